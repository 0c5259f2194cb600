"""Renders a spec and a config into one self-contained kernel source."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from ..constraints import infeasible_reason, smem_plan
from ..constraints import smem_bytes as main_smem_bytes
from ..constraints_backward import (
    POSTPROCESS_ROWS,
    POSTPROCESS_THREADS,
    PREPROCESS_ROWS,
    PREPROCESS_THREADS,
    dq_warps_m,
    postprocess_smem_bytes,
)
from ..constraints_backward import smem_plan as bwd_smem_plan
from ..data import data_dir
from ..errors import ArgumentError
from ..constraints_sm90 import output_columns, register_split
from ..constraints_sm90 import smem_plan as sm90_smem_plan
from ..hardware import arch_limits, supported_compute_capabilities
from ..spec import BwdConfig, Config, FwdSm90Config, KernelSpec
from .lexer import TemplateError
from .manifest import body_headers, body_template, kernels_of, platform_headers, type_headers
from .prune import prune
from .rejoin import rejoin
from .structs import param_struct

PLATFORMS = ("cuda", "host")

# The emulator's headers give CUDA's keywords and define the primitives for g++; the types are the same file on both
# sides and lie between the two.
HOST_KEYWORDS = '#include "fa2gen_keywords.h"\n'
HOST_INCLUDE = '#include "fa2gen_host.h"\n'
HOST_INCLUDE_SM90 = '#include "fa2gen_host_sm90.h"\n'
_HOST_INCLUDES = {"sm80": HOST_INCLUDE, "sm90": HOST_INCLUDE + HOST_INCLUDE_SM90}

# Stands for the kernel's name until the text is pruned, so that the parts of the text that do not depend on the config
# are read once for all kernels.
_NAME = "KERNEL_NAME"
# Up to this many characters the kernel's name and its parameter fit one line of 120.
_LONGEST_NAME_ON_A_LINE = 77


@dataclass(frozen=True)
class KernelSource:
    """One rendered kernel.

    Attributes:
        spec, config: What was rendered, and how. Kernels around the main one of a backward depend on little of them.
        kernel: Which of the kind's kernels (``manifest.kernels_of``).
        platform: ``"cuda"``: text is what nvcc compiles and what ``emit`` writes; it includes nothing. ``"host"``: text
            is what the emulator builds.
        text: The whole translation unit: head comment, platform part, body. Nothing in the CUDA text is without use.
        body: The kernel itself, equal byte for byte on both platforms.
        entry: Name of the ``extern "C"`` kernel.
        num_threads, smem_bytes: Launch rule: threads per block, bytes of dynamic shared memory.
    """

    spec: KernelSpec
    config: Config
    kernel: str
    platform: str
    text: str
    body: str
    entry: str
    num_threads: int
    smem_bytes: int


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )


@functools.cache
def _file(name: str) -> str:
    return (data_dir("templates") / name).read_text(encoding="utf-8")


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _constants(spec: KernelSpec, config: Config, kernel: str) -> dict[str, Any]:
    """Everything a body template may name."""
    common = {
        "entry": _NAME,
        "head_dim": spec.head_dim,
        "head_dim_padded": spec.native_head_dim,
        "element": spec.dtype,
        "params_declaration": param_struct(kernel, config.family).declaration(),
    }
    if kernel == "bwd_preprocess":
        return common | {"num_threads": PREPROCESS_THREADS, "block_rows": PREPROCESS_ROWS}
    tunables = {name: _literal(value) for name, value in vars(config).items()}
    if isinstance(config, BwdConfig):
        common["vector_reduction"] = _literal(config.reduction == "vector")
        if kernel == "bwd_postprocess":
            smem = postprocess_smem_bytes(spec)
            launch = {"num_threads": POSTPROCESS_THREADS, "block_rows": POSTPROCESS_ROWS, "smem_bytes": smem}
            return common | launch | {"split_heads": _literal(config.split_heads)}
        warps_m = dq_warps_m(spec, config)
        common |= {"deterministic": _literal(spec.deterministic), "dq_warps_m": warps_m}
        smem_of_kind: Any = bwd_smem_plan(spec, config)
    elif isinstance(config, FwdSm90Config):
        common |= _sm90_constants(spec, config)
        smem_of_kind = sm90_smem_plan(spec, config)
    else:
        common |= {
            "fp16": _literal(spec.dtype == "fp16"),
            "vector_bytes": spec.alignment,
            "guarded": _literal(config.softmax == "guarded"),
            "deferred": _literal(config.proof == "block"),
            "ring": _literal(config.pipeline == "ring"),
        }
        smem_of_kind = smem_plan(spec, config)
    shape = {"causal": _literal(spec.causal), "gqa_ratio": spec.gqa_ratio, "smem": smem_of_kind}
    return tunables | common | shape


def _sm90_constants(spec: KernelSpec, config: FwdSm90Config) -> dict[str, Any]:
    products = {("ss", config.block_n, False), ("ss" if config.p_in_smem else "rs", output_columns(spec.head_dim), True)}
    return {
        "warpgroups": config.warpgroups,
        "dynamic": _literal(config.scheduler == "dynamic"),
        "store_by_tma": _literal(config.epilogue == "tma"),
        "registers": register_split(config),
        "ptx_element": {"bf16": "bf16", "fp16": "f16"}[spec.dtype],
        "wgmma_shapes": [
            {"form": form, "n": n, "transposed_b": _literal(transposed)} for form, n, transposed in sorted(products)
        ],
    }


def _assignments(form: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in form.items())


def entry_name(spec: KernelSpec, config: Config, kernel: str | None = None) -> str:
    """C name of a kernel, readable in a profiler: ``fa2gen_fwd_d128_..._sm80_...``.

    The kernels before and after a backward's main one are named by what they depend on.
    """
    if kernel in (None, spec.kind):
        return f"fa2gen_{spec.slug()}_{config.slug()}"
    name = f"fa2gen_{kernel}_d{spec.head_dim}_{spec.dtype}"
    if kernel == "bwd_postprocess" and isinstance(config, BwdConfig):
        name += f"{'_v4' if config.reduction == 'vector' else ''}{'_sh' if config.split_heads else ''}"
    return name


def full_parts(spec: KernelSpec, config: Config, kernel: str | None = None) -> list[str]:
    """The kernel's CUDA text before anything is left out, without its head comment, cut into its subjects.

    The platform's headers come first; the kernel is still called ``KERNEL_NAME``.
    """
    kernel = kernel or spec.kind
    constants = _constants(spec, config, kernel)
    text = _environment().get_template(body_template(kernel, config.family)).render(constants)
    parts = [
        _environment().get_template(name).render(constants) if name.endswith(".j2") else _file(name)
        for name in platform_headers(spec.kind, config.family)
    ]
    params = param_struct(kernel, config.family)
    for subject in (params.declaration(), *map(_file, body_headers(kernel, config.family))):
        before, found, text = text.partition(subject)
        if not found:
            raise TemplateError(f"the kernel's template changes what it includes: {subject.splitlines()[0]}")
        parts += [before, subject]
    return [*parts, text]


def _named(text: str, entry: str) -> str:
    opened = f"{entry}(" if len(entry) <= _LONGEST_NAME_ON_A_LINE else f"{entry}(\n        "
    return text.replace(f"{_NAME}(", opened)


def join_parts(parts: Sequence[str]) -> str:
    """Parts as one text, a blank line between them."""
    return "\n".join(part for part in parts if part)


def launch_size(spec: KernelSpec, config: Config, kernel: str) -> tuple[int, int]:
    """Threads of a block, and its dynamic shared memory in bytes."""
    if kernel == "bwd_preprocess":
        return PREPROCESS_THREADS, 0
    if kernel == "bwd_postprocess":
        return POSTPROCESS_THREADS, postprocess_smem_bytes(spec)
    return config.num_threads, main_smem_bytes(spec, config)


@functools.lru_cache(maxsize=512)
def render_kernel(spec: KernelSpec, config: Config, platform: str = "cuda", kernel: str | None = None) -> KernelSource:
    """Renders a kernel for nvcc (``"cuda"``) or for the emulator (``"host"``).

    Args:
        spec: What the kernel computes.
        config: How; must be legal for the spec (see ``constraints.infeasible_reason``), or the rendered file's
            ``static_assert``s refuse it.
        platform: Changes what precedes the body, never the body.
        kernel: Which of the kind's kernels; None: the main one.

    Raises:
        ArgumentError: Unknown platform, or a kernel of another kind.
        TemplateError: A template is not written as the pruning reads it.
    """
    if platform not in PLATFORMS:
        raise ArgumentError(f"platform must be one of {', '.join(PLATFORMS)}, got {platform!r}")
    kernel = spec.kind if kernel is None else kernel
    if kernel not in kernels_of(spec.kind):
        raise ArgumentError(f"kernel must be one of {', '.join(kernels_of(spec.kind))}, got {kernel!r}")
    entry = entry_name(spec, config, kernel)
    headers = platform_headers(spec.kind, config.family)
    parts = prune(full_parts(spec, config, kernel), fixed=len(headers))
    body = _named(rejoin(join_parts(parts[len(headers) :])), entry)
    if platform == "cuda":
        text = join_parts((head_comment(spec, config, kernel), *parts[: len(headers)], body))
    else:
        types = map(_file, type_headers(config.family))
        text = join_parts((HOST_KEYWORDS, *types, _HOST_INCLUDES[config.family], body))
    num_threads, smem_bytes = launch_size(spec, config, kernel)
    return KernelSource(spec, config, kernel, platform, text, body, entry, num_threads, smem_bytes)


def render_kernels(spec: KernelSpec, config: Config, platform: str = "cuda") -> tuple[KernelSource, ...]:
    """All kernels of a spec, in the order in which they run; see :func:`render_kernel`."""
    return tuple(render_kernel(spec, config, platform, kernel) for kernel in kernels_of(spec.kind))


def grid_rule(spec: KernelSpec, config: Config, kernel: str | None = None) -> str:
    """The number of thread blocks of a launch as a formula, as C and Python read it but for ``ceil`` and ``/``."""
    if isinstance(config, BwdConfig):
        return _backward_grid_rule(spec, config, kernel or spec.kind)
    if not config.pack_gqa:
        return f"batch * num_heads * ceil(seqlen_q / {config.block_m})"
    ratio = spec.gqa_ratio
    return f"batch * (num_heads / {ratio}) * ceil(seqlen_q * {ratio} / {config.block_m})"


def _backward_grid_rule(spec: KernelSpec, config: BwdConfig, kernel: str) -> str:
    rows = f"ceil(seqlen_q / {config.block_m}) * {config.block_m}"
    if kernel == "bwd_preprocess":
        return f"batch * num_heads * ceil({rows} / {PREPROCESS_ROWS})"
    if kernel == "bwd_postprocess":
        rule = f"batch * num_heads * ceil({rows} / {POSTPROCESS_ROWS})"
        keys = f"ceil(seqlen_k / {config.block_n}) * {config.block_n}"
        return rule + (f" + 2 * batch * num_heads_k * ceil({keys} / {POSTPROCESS_ROWS})" if config.split_heads else "")
    heads = "num_heads" if config.split_heads or spec.gqa_ratio == 1 else f"(num_heads / {spec.gqa_ratio})"
    return f"batch * {heads} * ceil(seqlen_k / {config.block_n})"


def head_comment(spec: KernelSpec, config: Config, kernel: str | None = None) -> str:
    """The comment that opens an emitted file."""
    if isinstance(config, BwdConfig):
        return _backward_head_comment(spec, config, kernel or spec.kind)
    smem = smem_plan(spec, config)
    chips = map(arch_limits, supported_compute_capabilities())
    fits = [chip.target for chip in chips if smem.total <= chip.max_smem_per_block]
    params = param_struct(spec.kind, config.family)
    # About 32, as far as whole groups allow.
    heads = spec.gqa_ratio * max(1, 32 // spec.gqa_ratio)
    packed = spec.gqa_ratio if config.pack_gqa else 1
    grid_heads, grid_rows = 2 * heads // packed, 4000 * packed
    m_blocks = -(-grid_rows // config.block_m)
    sizes = f"2 * {heads // packed} * ceil({grid_rows} / {config.block_m})"
    return (
        _environment()
        .get_template("kernels/head.j2")
        .render(
            entry=entry_name(spec, config),
            spec=spec,
            config=config,
            smem=smem,
            tile_bytes=config.block_n * spec.native_head_dim * 2,
            params=params,
            fits=fits,
            grid=grid_rule(spec, config),
            example_heads=heads,
            example_grid=f"{sizes} = {grid_heads} * {m_blocks} = {grid_heads * m_blocks}",
            example_blocks=grid_heads * m_blocks,
            spec_text=_assignments(spec.canonical()),
            config_text=_assignments(config.canonical()),
        )
    )


# In terms of parameters, for these kernels are the same for configs of any tile sizes.
_HEAD_GRIDS = {
    ("bwd_preprocess", False): "batch * num_heads * num_row_blocks",
    ("bwd_preprocess", True): "batch * num_heads * num_row_blocks",
    ("bwd_postprocess", False): "num_dq_blocks",
    ("bwd_postprocess", True): "num_dq_blocks + 2 * num_dk_blocks",
}


def _backward_head_comment(spec: KernelSpec, config: BwdConfig, kernel: str) -> str:
    num_threads, smem_bytes = launch_size(spec, config, kernel)
    chips = map(arch_limits, supported_compute_capabilities())
    return (
        _environment()
        .get_template("kernels/head_bwd.j2")
        .render(
            kernel=kernel,
            entry=entry_name(spec, config, kernel),
            spec=spec,
            config=config,
            smem=bwd_smem_plan(spec, config),
            num_threads=num_threads,
            smem_bytes=smem_bytes,
            params=param_struct(kernel, config.family),
            fits=[chip.target for chip in chips if infeasible_reason(spec, config, chip) is None],
            grid=_HEAD_GRIDS[kernel, config.split_heads] if kernel != "bwd" else grid_rule(spec, config, kernel),
            spec_text=_assignments(spec.canonical()),
            config_text=_assignments(config.canonical()),
        )
    )
