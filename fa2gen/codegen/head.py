"""The comment at the head of an emitted file, and the rule for the number of its thread blocks."""

from __future__ import annotations

from typing import Any

from ..constraints import infeasible_reason, smem_plan
from ..constraints_backward import POSTPROCESS_ROWS, PREPROCESS_ROWS
from ..constraints_backward import smem_plan as bwd_smem_plan
from ..constraints_sm90 import TARGET, consumer_registers, padded_columns, register_split
from ..constraints_sm90 import smem_plan as sm90_smem_plan
from ..hardware import arch_limits, supported_compute_capabilities
from ..spec import BwdConfig, Config, FwdSm90Config, KernelSpec
from .files import environment
from .structs import param_struct


def _assignments(form: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in form.items())


def grid_rule(spec: KernelSpec, config: Config, kernel: str | None = None) -> str:
    """The number of thread blocks of a launch as a formula, as C and Python read it but for ``ceil`` and ``/``.

    ``num_sms`` in it are the multiprocessors of the chip.
    """
    if isinstance(config, BwdConfig):
        return _backward_grid_rule(spec, config, kernel or spec.kind)
    if isinstance(config, FwdSm90Config):
        return f"min(batch * num_heads * ceil(seqlen_q / {config.block_m}), num_sms)"
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


def head_comment(spec: KernelSpec, config: Config, kernel: str, entry: str, launch_size: tuple[int, int]) -> str:
    """The comment that opens an emitted file.

    Args:
        spec, config, kernel, entry: Of what kernel, and its name in the file.
        launch_size: Threads of a block, and its dynamic shared memory in bytes.
    """
    if isinstance(config, BwdConfig):
        return _backward_head_comment(spec, config, kernel, entry, launch_size)
    if isinstance(config, FwdSm90Config):
        return _sm90_head_comment(spec, config, entry)
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
        environment()
        .get_template("kernels/head.j2")
        .render(
            entry=entry,
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


# Of an H200.
_EXAMPLE_SMS = 132


def _sm90_head_comment(spec: KernelSpec, config: FwdSm90Config, entry: str) -> str:
    heads = spec.gqa_ratio * max(1, 32 // spec.gqa_ratio)
    m_blocks = -(-4000 // config.block_m)
    return (
        environment()
        .get_template("kernels/head_sm90.j2")
        .render(
            entry=entry,
            spec=spec,
            config=config,
            smem=sm90_smem_plan(spec, config),
            padded=padded_columns(spec.head_dim),
            split=register_split(config),
            consumer_registers=consumer_registers(config),
            target=TARGET,
            params=param_struct(spec.kind, config.family),
            grid=grid_rule(spec, config),
            example_heads=heads,
            example_tiles=f"2 * {heads} * ceil(4000 / {config.block_m}) = {2 * heads * m_blocks}",
            example_blocks=min(2 * heads * m_blocks, _EXAMPLE_SMS),
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


def _backward_head_comment(
    spec: KernelSpec, config: BwdConfig, kernel: str, entry: str, launch_size: tuple[int, int]
) -> str:
    num_threads, smem_bytes = launch_size
    chips = map(arch_limits, supported_compute_capabilities())
    return (
        environment()
        .get_template("kernels/head_bwd.j2")
        .render(
            kernel=kernel,
            entry=entry,
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
