"""Which kernels make a kind, which template files a kernel, and the hash that tells whether an entry is stale."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from ..data import data_dir
from ..errors import UnsupportedError
from .structs import param_struct

# kind -> its kernels, in the order in which they run; one has the kind's own name.
_KERNELS = {"fwd": ("fwd",), "bwd": ("bwd_preprocess", "bwd", "bwd_postprocess")}

# (kernel, family) -> template of the kernel body, and the headers it includes in that order.
_BODIES = {
    ("fwd", "sm80"): (
        "kernels/flash_fwd_sm80.cu.j2",
        (
            "sm80/tile.cuh",
            "sm80/query_rows.cuh",
            "sm80/gemm.cuh",
            "sm80/partner.cuh",
            "sm80/mask.cuh",
            "sm80/softmax.cuh",
            "sm80/schedule.cuh",
            "sm80/pipeline.cuh",
        ),
    ),
    ("fwd", "sm90"): (
        "kernels/flash_fwd_sm90.cu.j2",
        (
            "sm90/tile.cuh",
            "sm90/ring.cuh",
            "sm90/schedule.cuh",
            "sm90/gemm.cuh",
            "sm90/mask.cuh",
            "sm90/softmax.cuh",
            "sm90/attend.cuh",
            "sm90/epilogue.cuh",
            "sm90/produce.cuh",
        ),
    ),
    ("bwd_preprocess", "sm80"): ("kernels/flash_bwd_preprocess_sm80.cu.j2", ()),
    ("bwd", "sm80"): (
        "kernels/flash_bwd_sm80.cu.j2",
        (
            "sm80/tile.cuh",
            "sm80/bwd_gemm.cuh",
            "sm80/bwd_scores.cuh",
            "sm80/accumulate.cuh",
            "sm80/bwd_reduce.cuh",
            "sm80/bwd_walk.cuh",
        ),
    ),
    ("bwd_postprocess", "sm80"): ("kernels/flash_bwd_postprocess_sm80.cu.j2", ("sm80/accumulate.cuh",)),
}
# family -> the types, which the host shares.
_TYPE_HEADERS = {"sm80": ("common/types.cuh",), "sm90": ("common/types.cuh", "sm90/types.cuh")}
# (kind, family) -> what precedes the body when it is compiled for a GPU: the types and the primitives.
_PLATFORM_HEADERS = {
    ("fwd", "sm80"): ("common/types.cuh", "sm80/primitives.cuh"),
    ("fwd", "sm90"): (
        "common/types.cuh",
        "sm90/types.cuh",
        "sm80/primitives.cuh",
        "sm80/conversions.cuh",
        "sm90/primitives.cuh",
        "sm90/wgmma.cuh.j2",
    ),
    ("bwd", "sm80"): ("common/types.cuh", "sm80/primitives.cuh", "sm80/conversions.cuh", "sm80/reductions.cuh"),
}

# What decides a rendered text: in the package, the rooms that rendering imports (a test compares); of the templates,
# the folders whose files it reads.
RENDERING = (
    "__init__.py",
    "codegen",
    "config_sm90.py",
    "constraints.py",
    "constraints_backward.py",
    "constraints_sm90.py",
    "data.py",
    "errors.py",
    "hardware",
    "identity.py",
    "spec.py",
    "tensor_map.py",
    "tiles.py",
)
_TEXTS = ("common", "kernels", "sm80", "sm90")


def kernels_of(kind: str) -> tuple[str, ...]:
    """Names of a kind's kernels, in the order in which they run: ``("fwd",)``, or those of a backward."""
    return _KERNELS[kind]


def body_template(kernel: str, family: str) -> str:
    """Template name of a kernel's body, relative to the templates folder."""
    return _entry(kernel, family)[0]


def body_headers(kernel: str, family: str) -> tuple[str, ...]:
    """Headers that a kernel's body includes, in that order."""
    return _entry(kernel, family)[1]


def platform_headers(kind: str, family: str) -> tuple[str, ...]:
    """Headers that precede the bodies of a kind on a GPU, relative to the templates folder."""
    return _PLATFORM_HEADERS[kind, family]


def type_headers(family: str) -> tuple[str, ...]:
    """Of them those that precede bodies on the host as well."""
    return _TYPE_HEADERS[family]


def manifest(kind: str, family: str) -> tuple[str, ...]:
    """Every template file that takes part in a kind's kernels, relative to the templates folder."""
    entries = [_entry(kernel, family) for kernel in kernels_of(kind)]
    files = [file for body, headers in entries for file in (body, *headers)]
    return tuple(dict.fromkeys((*files, *_PLATFORM_HEADERS[kind, family])))


def _entry(kernel: str, family: str) -> tuple[str, tuple[str, ...]]:
    if (kernel, family) not in _BODIES:
        known = ", ".join(f"{k}/{f}" for k, f in sorted(_BODIES))
        raise UnsupportedError(f"no template for kernel {kernel!r}, family {family!r}; there are {known}")
    return _BODIES[kernel, family]


# Of these only comments go. `//` in an expression of the template divides.
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\{\{.*?\}\}|//[^\n]*|/\*.*?\*/', re.DOTALL)


def _code(text: str) -> bytes:
    """A text without comments, each stretch of white space as one blank."""
    code = _STRING_OR_COMMENT.sub(lambda match: " " if match[0][0] == "/" else match[0], text)
    return " ".join(code.split()).encode()


@functools.cache
def template_hash(kind: str, family: str) -> str:
    """16 hex digits over the code of the kind's own manifest and parameter structs.

    An edit to another family's files leaves it alone, and so does one to comments or line breaks: neither makes this
    kernel's tuned entries stale.
    """
    root = data_dir("templates")
    digest = hashlib.sha256(b"".join(_code(param_struct(kernel, family).declaration()) for kernel in kernels_of(kind)))
    for name in manifest(kind, family):
        digest.update(name.encode() + b"\0" + _code((root / name).read_text(encoding="utf-8")) + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def renderer_hash() -> str:
    """SHA-256 over everything that decides what a spec and a config are rendered into: templates and Python files."""
    digest = hashlib.sha256()
    package, templates = Path(__file__).resolve().parents[1], data_dir("templates")
    for root, names in ((package, RENDERING), (templates, _TEXTS)):
        for name in names:
            top = root / name
            files = (path for path in top.iterdir() if path.is_file()) if top.is_dir() else (top,)
            for path in sorted(files):
                digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()
