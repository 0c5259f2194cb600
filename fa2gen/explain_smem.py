"""What lies where in a block's shared memory, for people."""

from __future__ import annotations

from .constraints import smem_plan
from .constraints_backward import smem_plan as backward_smem_plan
from .spec import BwdConfig, Config, FwdConfig, KernelSpec

Area = tuple[str, int, int, str]
"""(name, offset, bytes, shape) of a tile."""


def smem_areas(spec: KernelSpec, config: Config) -> list[Area]:
    """The areas of the main kernel's dynamic shared memory, by address."""
    return _backward_areas(spec, config) if isinstance(config, BwdConfig) else _forward_areas(spec, config)


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
