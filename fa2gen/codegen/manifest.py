"""Which template files make a kernel, and the hash that tells whether a tuned entry is stale."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from ..data import data_dir
from ..errors import UnsupportedError
from .params import PARAMS

# (kind, family) -> template of the kernel body, and the headers it includes in that order.
_BODIES = {
    ("fwd", "sm80"): (
        "kernels/flash_fwd_sm80.cu.j2",
        (
            "sm80/tile.cuh",
            "sm80/gemm.cuh",
            "sm80/partner.cuh",
            "sm80/mask.cuh",
            "sm80/softmax.cuh",
            "sm80/schedule.cuh",
            "sm80/pipeline.cuh",
        ),
    ),
}
# family -> what precedes the body when it is compiled for a GPU: the types, which the host shares, and the primitives.
_PLATFORM_HEADERS = {"sm80": ("common/types.cuh", "sm80/primitives.cuh")}

# What decides a rendered text: in the package, the rooms that rendering imports (a test compares); of the templates,
# the folders whose files it reads.
RENDERING = ("__init__.py", "codegen", "constraints.py", "data.py", "errors.py", "hardware", "spec.py")
_TEXTS = ("common", "kernels", "sm80")


def body_template(kind: str, family: str) -> str:
    """Template name of a kernel's body, relative to the templates folder."""
    return _entry(kind, family)[0]


def body_headers(kind: str, family: str) -> tuple[str, ...]:
    """Headers that a kernel's body includes, in that order."""
    return _entry(kind, family)[1]


def platform_headers(family: str) -> tuple[str, ...]:
    """Headers that precede the body on a GPU, relative to the templates folder."""
    return _PLATFORM_HEADERS[family]


def manifest(kind: str, family: str) -> tuple[str, ...]:
    """Every template file that takes part in a kernel, relative to the templates folder."""
    body, headers = _entry(kind, family)
    return (body, *headers, *_PLATFORM_HEADERS[family])


def _entry(kind: str, family: str) -> tuple[str, tuple[str, ...]]:
    if (kind, family) not in _BODIES:
        known = ", ".join(f"{k}/{f}" for k, f in sorted(_BODIES))
        raise UnsupportedError(f"no template for kind {kind!r}, family {family!r}; there are {known}")
    return _BODIES[kind, family]


# Of these only comments go. `//` in an expression of the template divides.
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|\{\{.*?\}\}|//[^\n]*|/\*.*?\*/', re.DOTALL)


def _code(text: str) -> bytes:
    """A text without comments, each stretch of white space as one blank."""
    code = _STRING_OR_COMMENT.sub(lambda match: " " if match[0][0] == "/" else match[0], text)
    return " ".join(code.split()).encode()


@functools.cache
def template_hash(kind: str, family: str) -> str:
    """16 hex digits over the code of the kernel's own manifest and parameter struct.

    An edit to another family's files leaves it alone, and so does one to comments or line breaks: neither makes this
    kernel's tuned entries stale.
    """
    root = data_dir("templates")
    digest = hashlib.sha256(_code(PARAMS[kind].declaration()))
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
