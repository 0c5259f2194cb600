"""What lies where in a block's shared memory, for people."""

from __future__ import annotations

from .config_sm90 import GROUP_ROWS
from .constraints import smem_plan
from .constraints_backward import smem_plan as backward_smem_plan
from .constraints_sm90 import TILE_NUMBERS_BYTES, padded_columns
from .constraints_sm90 import smem_plan as sm90_smem_plan
from .spec import BwdConfig, Config, FwdConfig, FwdSm90Config, KernelSpec

Area = tuple[str, int, int, str]
"""(name, offset, bytes, shape) of a tile."""


def smem_areas(spec: KernelSpec, config: Config) -> list[Area]:
    """The areas of the main kernel's dynamic shared memory, by address."""
    if isinstance(config, BwdConfig):
        return _backward_areas(spec, config)
    return _sm90_areas(spec, config) if isinstance(config, FwdSm90Config) else _forward_areas(spec, config)


def _forward_areas(spec: KernelSpec, config: FwdConfig) -> list[Area]:
    plan, width = smem_plan(spec, config), spec.native_head_dim
    areas = [("Q, then O", plan.q, plan.k - plan.q, f"{config.block_m} rows x {width}")]
    for name, start, end in (("K", plan.k, plan.v), ("V", plan.v, plan.p)):
        tile = (end - start) // config.num_stages
        for stage in range(config.num_stages):
            areas.append((f"{name} [{stage}]", start + stage * tile, tile, f"{config.block_n} keys x {width}"))
    tile = (plan.exchange - plan.p) // 2
    for turn in range(2 if tile else 0):
        areas.append((f"P [{turn}]", plan.p + turn * tile, tile, f"{config.block_m} rows x {config.step_n}"))
    if plan.barriers > plan.exchange:
        shape = f"a maximum or sum for each of {config.warps_n} x {config.block_m} rows"
        areas.append(("rows", plan.exchange, plan.barriers - plan.exchange, shape))
    if plan.total > plan.barriers:
        shape = f"a full and an empty one for each of {config.num_stages} stages"
        areas.append(("mbarriers", plan.barriers, plan.total - plan.barriers, shape))
    return areas


def _sm90_areas(spec: KernelSpec, config: FwdSm90Config) -> list[Area]:
    plan, width = sm90_smem_plan(spec, config), padded_columns(spec.head_dim)
    areas: list[Area] = []
    tile, use = plan.k // config.q_tiles, ", then O" if config.epilogue == "tma" else ""
    for stage in range(config.q_tiles):
        number = f" [{stage}]" if config.q_tiles > 1 else ""
        areas.append((f"Q{number}{use}", plan.q + stage * tile, tile, f"{GROUP_ROWS} rows x {width}"))
    tile = (plan.v - plan.k) // config.k_stages
    for name, start, stages in (("K", plan.k, config.k_stages), ("V", plan.v, config.num_stages)):
        for stage in range(stages):
            areas.append((f"{name} [{stage}]", start + stage * tile, tile, f"{config.block_n} keys x {width}"))
    if plan.barriers > plan.p:
        areas.append(
            ("P", plan.p, plan.barriers - plan.p, f"{config.block_m} rows x {config.block_n}, in panels of 64")
        )
    pairs = f"full and empty: {config.q_tiles} of Q, {config.k_stages} of K, {config.num_stages} of V"
    if config.scheduler == "static":
        return [*areas, ("mbarriers", plan.barriers, plan.total - plan.barriers, pairs)]
    numbers = plan.total - TILE_NUMBERS_BYTES
    areas.append(("mbarriers", plan.barriers, numbers - plan.barriers, f"{pairs}, 2 of tiles"))
    areas.append(("tile numbers", numbers, TILE_NUMBERS_BYTES, "from the producer to the consumers"))
    return areas


def _backward_areas(spec: KernelSpec, config: BwdConfig) -> list[Area]:
    plan, width = backward_smem_plan(spec, config), spec.native_head_dim
    keys, scores = f"{config.block_n} keys x {width}", f"{config.block_n} keys x {config.block_m} rows"
    areas = [("K, then dK", plan.k, plan.v - plan.k, keys), ("V, then dV", plan.v, plan.q - plan.v, keys)]
    tile = (plan.dout - plan.q) // config.num_stages
    for name, start in (("Q", plan.q), ("dO", plan.dout)):
        for stage in range(config.num_stages):
            areas.append((f"{name} [{stage}]", start + stage * tile, tile, f"{config.block_m} rows x {width}"))
    if plan.ds > plan.p:
        areas.append(("P", plan.p, plan.ds - plan.p, scores))
    tile = (plan.rows - plan.ds) // config.ds_stages
    areas += [(f"dS [{stage}]", plan.ds + stage * tile, tile, scores) for stage in range(config.ds_stages)]
    stages = f", for each of {config.num_stages} stages" if config.num_stages > 1 else ""
    areas.append(("L and D", plan.rows, plan.total - plan.rows, f"of {config.block_m} rows{stages}"))
    return areas
