"""Renders a spec and a config into one self-contained kernel source."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from ..constraints import smem_plan
from ..data import data_dir
from ..errors import ArgumentError
from ..hardware import arch_limits, supported_compute_capabilities
from ..spec import FwdConfig, KernelSpec
from .lexer import TemplateError
from .manifest import body_headers, body_template, platform_headers
from .params import PARAMS
from .prune import prune
from .rejoin import rejoin

PLATFORMS = ("cuda", "host")

# The emulator's headers give CUDA's keywords and define the primitives for g++; the types are the same file on both
# sides and lie between the two.
HOST_KEYWORDS = '#include "fa2gen_keywords.h"\n'
HOST_INCLUDE = '#include "fa2gen_host.h"\n'

# Stands for the kernel's name until the text is pruned, so that the parts of the text that do not depend on the config
# are read once for all kernels.
_NAME = "KERNEL_NAME"
# Up to this many characters the kernel's name and its parameter fit one line of 120.
_LONGEST_NAME_ON_A_LINE = 77


@dataclass(frozen=True)
class KernelSource:
    """One rendered kernel.

    Attributes:
        platform: ``"cuda"``: text is what nvcc compiles and what ``emit`` writes; it includes nothing. ``"host"``: text
            is what the emulator builds.
        text: The whole translation unit: head comment, platform part, body. Nothing in the CUDA text is without use.
        body: The kernel itself, equal byte for byte on both platforms.
        entry: Name of the ``extern "C"`` kernel.
        num_threads, smem_bytes: Launch rule: threads per block, bytes of dynamic shared memory.
    """

    spec: KernelSpec
    config: FwdConfig
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


def _literal(value: bool) -> str:
    return "true" if value else "false"


def _constants(spec: KernelSpec, config: FwdConfig) -> dict[str, Any]:
    """Everything a body template may name."""
    return {
        "entry": _NAME,
        "head_dim": spec.head_dim,
        "head_dim_padded": spec.native_head_dim,
        "element": spec.dtype,
        "fp16": _literal(spec.dtype == "fp16"),
        "causal": _literal(spec.causal),
        "gqa_ratio": spec.gqa_ratio,
        "pack_gqa": _literal(config.pack_gqa),
        "vector_bytes": spec.alignment,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "step_n": config.step_n,
        "num_warps": config.num_warps,
        "warps_n": config.warps_n,
        "num_stages": config.num_stages,
        "q_in_regs": _literal(config.q_in_regs),
        "guarded": _literal(config.softmax == "guarded"),
        "deferred": _literal(config.proof == "block"),
        "ring": _literal(config.pipeline == "ring"),
        "min_blocks": config.min_blocks,
        "smem": smem_plan(spec, config),
        "params_declaration": PARAMS[spec.kind].declaration(),
    }


def _assignments(form: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in form.items())


def entry_name(spec: KernelSpec, config: FwdConfig) -> str:
    """C name of the kernel, readable in a profiler: ``fa2gen_fwd_d128_..._sm80_...``."""
    return f"fa2gen_{spec.slug()}_{config.slug()}"


def full_parts(spec: KernelSpec, config: FwdConfig) -> list[str]:
    """The kernel's CUDA text before anything is left out, without its head comment, cut into its subjects.

    The platform's headers come first; the kernel is still called ``KERNEL_NAME``.
    """
    text = _environment().get_template(body_template(spec.kind, config.family)).render(_constants(spec, config))
    parts = [_file(name) for name in platform_headers(config.family)]
    for subject in (PARAMS[spec.kind].declaration(), *map(_file, body_headers(spec.kind, config.family))):
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


@functools.lru_cache(maxsize=512)
def render_kernel(spec: KernelSpec, config: FwdConfig, platform: str = "cuda") -> KernelSource:
    """Renders a kernel for nvcc (``"cuda"``) or for the emulator (``"host"``).

    Args:
        spec: What the kernel computes.
        config: How; must be legal for the spec (see ``constraints.infeasible_reason``), or the rendered file's
            ``static_assert``s refuse it.
        platform: Changes what precedes the body, never the body.

    Raises:
        ArgumentError: Unknown platform.
        TemplateError: A template is not written as the pruning reads it.
    """
    if platform not in PLATFORMS:
        raise ArgumentError(f"platform must be one of {', '.join(PLATFORMS)}, got {platform!r}")
    entry = entry_name(spec, config)
    headers = platform_headers(config.family)
    parts = prune(full_parts(spec, config), fixed=len(headers))
    body = _named(rejoin(join_parts(parts[len(headers) :])), entry)
    if platform == "cuda":
        text = join_parts((head_comment(spec, config), *parts[: len(headers)], body))
    else:
        text = join_parts((HOST_KEYWORDS, _file(headers[0]), HOST_INCLUDE, body))
    return KernelSource(
        spec=spec,
        config=config,
        platform=platform,
        text=text,
        body=body,
        entry=entry,
        num_threads=config.num_threads,
        smem_bytes=smem_plan(spec, config).total,
    )


def grid_rule(spec: KernelSpec, config: FwdConfig) -> str:
    """The number of thread blocks of a launch as a formula, as C and Python read it but for ``ceil`` and ``/``."""
    if not config.pack_gqa:
        return f"batch * num_heads * ceil(seqlen_q / {config.block_m})"
    ratio = spec.gqa_ratio
    return f"batch * (num_heads / {ratio}) * ceil(seqlen_q * {ratio} / {config.block_m})"


def head_comment(spec: KernelSpec, config: FwdConfig) -> str:
    """The comment that opens an emitted file."""
    smem = smem_plan(spec, config)
    chips = map(arch_limits, supported_compute_capabilities())
    fits = [chip.target for chip in chips if smem.total <= chip.max_smem_per_block]
    params = PARAMS[spec.kind]
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
