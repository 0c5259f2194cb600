"""The grid of the sm80 family's backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

from fa2gen.constraints import config_reason, infeasible_reason
from fa2gen.hardware import ArchLimits
from fa2gen.spec import BwdConfig, KernelSpec

from .grid import Grid, Value, promise_reason, same_budget_reason

# num_stages and ds_stages: a second tile of dS is for those that prefetch.
_STAGES = {"1": (1, 1), "2": (2, 1), "2 ds": (2, 2)}

_VALUES: dict[str, tuple[Value, ...]] = {
    "block_m": (32, 64, 128),
    "block_n": (32, 64, 128, 256),
    # Queries per tile over queries per step: step_m = block_m / step_divisor.
    "step_divisor": (1, 2, 4),
    "num_warps": (4, 8, 16),
    "stages": tuple(_STAGES),
    "roles": (1, 2),
    "warps_d": (1, 2),
    "kv_in_regs": (False, True),
    "reduction": ("scalar", "vector"),
    "split_heads": (False, True),
    "min_blocks": (1, 2, 3),
}


def _config_of(params: Mapping[str, Value]) -> BwdConfig | None:
    """None where ``step_divisor`` does not give whole 16-query steps."""
    block_m, divisor = int(params["block_m"]), int(params["step_divisor"])
    if block_m % (16 * divisor):
        return None
    num_stages, ds_stages = _STAGES[str(params["stages"])]
    return BwdConfig(
        block_m=block_m,
        block_n=int(params["block_n"]),
        step_m=block_m // divisor,
        num_warps=int(params["num_warps"]),
        num_stages=num_stages,
        roles=int(params["roles"]),
        warps_d=int(params["warps_d"]),
        kv_in_regs=bool(params["kv_in_regs"]),
        reduction=str(params["reduction"]),
        ds_stages=ds_stages,
        split_heads=bool(params["split_heads"]),
        min_blocks=int(params["min_blocks"]),
    )


def _params_of(config: BwdConfig) -> dict[str, Value]:
    return {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "step_divisor": config.block_m // config.step_m,
        "num_warps": config.num_warps,
        "stages": f"{config.num_stages}{' ds' if config.ds_stages > 1 else ''}",
        "roles": config.roles,
        "warps_d": config.warps_d,
        "kv_in_regs": config.kv_in_regs,
        "reduction": config.reduction,
        "split_heads": config.split_heads,
        "min_blocks": config.min_blocks,
    }


@functools.cache
def _configs(grouped: bool) -> tuple[BwdConfig, ...]:
    """With ``grouped`` also those whose query heads of a group have blocks of their own."""
    values = _VALUES if grouped else {**_VALUES, "split_heads": (False,)}
    points = (dict(zip(values, point, strict=True)) for point in itertools.product(*values.values()))
    configs = (config for point in points if (config := _config_of(point)) is not None)
    return tuple(config for config in configs if config_reason(config) is None and promise_reason(config) is None)


def _exclusion_reason(spec: KernelSpec, config: BwdConfig, arch: ArchLimits) -> str | None:
    return infeasible_reason(spec, config, arch) or promise_reason(config) or same_budget_reason(config, arch)


GRID = Grid(_VALUES, _config_of, _params_of, _configs, _exclusion_reason)
