"""The grid of the sm80 family's forward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

from fa2gen.constraints import config_reason, infeasible_reason
from fa2gen.hardware import ArchLimits
from fa2gen.spec import FwdConfig, KernelSpec

from .grid import Grid, Value, promise_reason, same_budget_reason

# Tunables that mean something only together are one: a ring needs two stages, a proof the guarded softmax.
_COPIES = {
    "1": (1, "barrier"),
    "2": (2, "barrier"),
    "3": (3, "barrier"),
    "2 ring": (2, "ring"),
    "3 ring": (3, "ring"),
}
_SOFTMAXES = {"online": ("online", "step"), "guarded": ("guarded", "step"), "guarded block": ("guarded", "block")}

_VALUES: dict[str, tuple[Value, ...]] = {
    "block_m": (64, 128, 192, 256),
    "block_n": (32, 64, 96, 128),
    # Keys per tile over keys per softmax step: step_n = block_n / step_divisor.
    "step_divisor": (1, 2, 3, 4),
    "num_warps": (2, 4, 8),
    # Warps that share query rows.
    "warps_n": (1, 2),
    # num_stages and pipeline.
    "copies": tuple(_COPIES),
    "q_in_regs": (False, True),
    # softmax and proof.
    "softmax": tuple(_SOFTMAXES),
    "min_blocks": (1, 2, 3),
    "pack_gqa": (False, True),
}
# A step of 16 keys gives the tensor cores too little between two softmaxes (32 inside 64 already costs 9 %), but where
# the output takes most registers it may be all that fits.
MIN_STEP_N = 32
_NARROW_STEP_N, _WIDE_HEAD_DIM = 16, 192


def _config_of(params: Mapping[str, Value]) -> FwdConfig | None:
    """None where ``step_divisor`` does not give whole 16-key steps."""
    block_n, divisor = int(params["block_n"]), int(params["step_divisor"])
    if block_n % (16 * divisor):
        return None
    num_stages, pipeline = _COPIES[str(params["copies"])]
    softmax, proof = _SOFTMAXES[str(params["softmax"])]
    return FwdConfig(
        block_m=int(params["block_m"]),
        block_n=block_n,
        step_n=block_n // divisor,
        num_warps=int(params["num_warps"]),
        num_stages=num_stages,
        q_in_regs=bool(params["q_in_regs"]),
        softmax=softmax,
        min_blocks=int(params["min_blocks"]),
        proof=proof,
        pipeline=pipeline,
        warps_n=int(params["warps_n"]),
        pack_gqa=bool(params["pack_gqa"]),
    )


def _params_of(config: FwdConfig) -> dict[str, Value]:
    return {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "step_divisor": config.block_n // config.step_n,
        "num_warps": config.num_warps,
        "warps_n": config.warps_n,
        "copies": f"{config.num_stages}{' ring' if config.pipeline == 'ring' else ''}",
        "q_in_regs": config.q_in_regs,
        "softmax": f"{config.softmax}{' block' if config.proof == 'block' else ''}",
        "min_blocks": config.min_blocks,
        "pack_gqa": config.pack_gqa,
    }


@functools.cache
def _configs(grouped: bool) -> tuple[FwdConfig, ...]:
    """With ``grouped`` also those that pack the query heads of a group."""
    names = ("block_m", "num_warps", "warps_n")
    shapes = [dict(zip(names, point, strict=True)) for point in itertools.product(*(_VALUES[name] for name in names))]
    # By themselves and first: the product has 70,000 points, and nine of ten have rows that no warp can take.
    shapes = [shape for shape in shapes if config_reason(FwdConfig(**shape)) is None]  # type: ignore[arg-type]
    rest = {name: values for name, values in _VALUES.items() if name not in names}
    if not grouped:
        rest["pack_gqa"] = (False,)
    points = (
        {**shape, **dict(zip(rest, point, strict=True))}
        for shape in shapes
        for point in itertools.product(*rest.values())
    )
    configs = (config for point in points if (config := _config_of(point)) is not None)
    return tuple(config for config in configs if config_reason(config) is None and _futile_reason(config) is None)


def _futile_reason(config: FwdConfig) -> str | None:
    """Why a legal config serves no spec well, or None."""
    if config.warps_n > 1 and config.warp_rows < 32:
        return f"{config.warp_rows} rows shared by {config.warps_n} warps: one has room for them"
    return promise_reason(config)


def _exclusion_reason(spec: KernelSpec, config: FwdConfig, arch: ArchLimits) -> str | None:
    least = _NARROW_STEP_N if spec.native_head_dim >= _WIDE_HEAD_DIM and config.warp_rows == 16 else MIN_STEP_N
    if config.step_n < least:
        return f"step_n {config.step_n} is below {least}"
    return infeasible_reason(spec, config, arch) or _futile_reason(config) or same_budget_reason(config, arch)


GRID = Grid(_VALUES, _config_of, _params_of, _configs, _exclusion_reason)
