"""Renders a spec and a config into one self-contained kernel source."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..constraints import smem_bytes as main_smem_bytes
from ..constraints import smem_plan
from ..constraints_backward import (
    POSTPROCESS_ROWS,
    POSTPROCESS_THREADS,
    PREPROCESS_ROWS,
    PREPROCESS_THREADS,
    dq_warps_m,
    postprocess_smem_bytes,
)
from ..constraints_backward import smem_plan as bwd_smem_plan
from ..constraints_sm90 import output_columns, register_split
from ..constraints_sm90 import smem_plan as sm90_smem_plan
from ..errors import ArgumentError
from ..spec import BwdConfig, Config, FwdSm90Config, KernelSpec
from .files import environment, file_text
from .head import head_comment
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
    columns = output_columns(spec.head_dim)
    products = {("ss" if config.p_in_smem else "rs", columns, True)}
    if config.q_regs > 0:
        products.add(("rs", config.block_n, False))
    if config.q_regs < columns // 16:
        products.add(("ss", config.block_n, False))
    return {
        "warpgroups": config.warpgroups,
        "k_stages": config.k_stages,
        "q_tiles": config.q_tiles,
        "fp16": _literal(spec.dtype == "fp16"),
        "guarded": _literal(config.softmax == "guarded"),
        "dynamic": _literal(config.scheduler == "dynamic"),
        "store_by_tma": _literal(config.epilogue == "tma"),
        "registers": register_split(config),
        "ptx_element": {"bf16": "bf16", "fp16": "f16"}[spec.dtype],
        "wgmma_shapes": [
            {"form": form, "n": n, "transposed_b": _literal(transposed)} for form, n, transposed in sorted(products)
        ],
    }


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
    text = environment().get_template(body_template(kernel, config.family)).render(constants)
    parts = [
        environment().get_template(name).render(constants) if name.endswith(".j2") else file_text(name)
        for name in platform_headers(spec.kind, config.family)
    ]
    params = param_struct(kernel, config.family)
    for subject in (params.declaration(), *map(file_text, body_headers(kernel, config.family))):
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
        text = join_parts(
            (head_comment(spec, config, kernel, entry, launch_size(spec, config, kernel)), *parts[: len(headers)], body)
        )
    else:
        types = map(file_text, type_headers(config.family))
        text = join_parts((HOST_KEYWORDS, *types, _HOST_INCLUDES[config.family], body))
    num_threads, smem_bytes = launch_size(spec, config, kernel)
    return KernelSource(spec, config, kernel, platform, text, body, entry, num_threads, smem_bytes)


def render_kernels(spec: KernelSpec, config: Config, platform: str = "cuda") -> tuple[KernelSource, ...]:
    """All kernels of a spec, in the order in which they run; see :func:`render_kernel`."""
    return tuple(render_kernel(spec, config, platform, kernel) for kernel in kernels_of(spec.kind))
