"""Which configs are worth trying for a spec on a GPU, and for every other one the reason why not.

Legality itself is decided in ``constraints.py``; this module lists the grid and drops what would compile to the same
code as another member, or is known to lose everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from dataclasses import dataclass, replace

from fa2gen.constraints import config_reason, infeasible_reason
from fa2gen.hardware import ArchLimits, Gpu
from fa2gen.spec import FwdConfig, KernelSpec

# Tunables that mean something only together are one: a ring needs two stages, a proof the guarded softmax.
_COPIES = {
    "1": (1, "barrier"),
    "2": (2, "barrier"),
    "3": (3, "barrier"),
    "2 ring": (2, "ring"),
    "3 ring": (3, "ring"),
}
_SOFTMAXES = {"online": ("online", "step"), "guarded": ("guarded", "step"), "guarded block": ("guarded", "block")}

# Every tunable and its values; Optuna sees the same lists.
GRID: dict[str, tuple[int | bool | str, ...]] = {
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
# Warps an SM that the register budget may have to allow; 16 leave a thread 128 registers.
_MAX_PROMISED_WARPS = 16


@dataclass(frozen=True)
class Space:
    """The configs to choose from, in the grid's order, and every excluded one with its reason."""

    configs: tuple[FwdConfig, ...]
    excluded: tuple[tuple[FwdConfig, str], ...]

    def key(self) -> str:
        """12 hex digits over the members: a study of one space is never resumed on another."""
        text = json.dumps([config.canonical() for config in self.configs])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def config_of(params: dict[str, int | bool | str]) -> FwdConfig | None:
    """The config that a point of ``GRID`` stands for; None where ``step_divisor`` does not give whole 16-key steps."""
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


def params_of(config: FwdConfig) -> dict[str, int | bool | str]:
    """Inverse of :func:`config_of`; values may lie outside ``GRID`` for a config that came from elsewhere."""
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


def register_cap(config: FwdConfig, arch: ArchLimits) -> int:
    """Registers a thread that ``__launch_bounds__(num_threads, min_blocks)`` lets ptxas use."""
    per_warp = arch.max_registers_per_sm // (config.num_warps * config.min_blocks)
    per_thread = per_warp // arch.register_allocation_unit * arch.register_allocation_unit // 32
    return min(arch.max_registers_per_thread, per_thread)


@functools.cache
def grid(*, packed: bool = False) -> tuple[FwdConfig, ...]:
    """Every config of ``GRID`` that could be legal for some spec.

    Args:
        packed: Also those that pack the query heads of a group.
    """
    names = ("block_m", "num_warps", "warps_n")
    shapes = [dict(zip(names, point, strict=True)) for point in itertools.product(*(GRID[name] for name in names))]
    # By themselves and first: the product has 70,000 points, and nine of ten have rows that no warp can take.
    shapes = [shape for shape in shapes if config_reason(FwdConfig(**shape)) is None]  # type: ignore[arg-type]
    rest = {name: values for name, values in GRID.items() if name not in names}
    if not packed:
        rest["pack_gqa"] = (False,)
    points = (
        {**shape, **dict(zip(rest, point, strict=True))}
        for shape in shapes
        for point in itertools.product(*rest.values())
    )
    configs = (config for point in points if (config := config_of(point)) is not None)
    return tuple(config for config in configs if config_reason(config) is None and _futile_reason(config) is None)


def _futile_reason(config: FwdConfig) -> str | None:
    """Why a legal config serves no spec well, or None."""
    if config.warps_n > 1 and config.warp_rows < 32:
        return f"{config.warp_rows} rows shared by {config.warps_n} warps: one has room for them"
    if config.num_warps * config.min_blocks > _MAX_PROMISED_WARPS:
        return f"min_blocks {config.min_blocks} of {config.num_warps} warps leaves a thread too few registers"
    return None


def exclusion_reason(spec: KernelSpec, config: FwdConfig, arch: ArchLimits) -> str | None:
    """Why a config is not in the space, or None."""
    least = _NARROW_STEP_N if spec.native_head_dim >= _WIDE_HEAD_DIM and config.warp_rows == 16 else MIN_STEP_N
    if config.step_n < least:
        return f"step_n {config.step_n} is below {least}"
    reason = infeasible_reason(spec, config, arch) or _futile_reason(config)
    if reason is not None:
        return reason
    if config.min_blocks > 1:
        fewer = replace(config, min_blocks=config.min_blocks - 1)
        if register_cap(fewer, arch) == register_cap(config, arch):
            return f"min_blocks {config.min_blocks} leaves the register budget of {fewer.min_blocks}: the same code"
    return None


def legal_space(spec: KernelSpec, gpu: Gpu) -> Space:
    """The space of a spec on a GPU."""
    return _legal_space(spec, gpu.arch)


@functools.lru_cache(maxsize=64)
def _legal_space(spec: KernelSpec, arch: ArchLimits) -> Space:
    configs, excluded = [], []
    for config in grid(packed=spec.gqa_ratio > 1):
        reason = exclusion_reason(spec, config, arch)
        if reason is None:
            configs.append(config)
        else:
            excluded.append((config, reason))
    return Space(tuple(configs), tuple(excluded))
