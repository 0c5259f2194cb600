"""Which configs are worth trying for a spec on a GPU, and for every other one the reason why not.

Legality itself is decided in ``constraints.py``; this module lists the grid and drops what would compile to the same
code as another member.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from dataclasses import dataclass

from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import ArchLimits, Gpu
from fa2gen.spec import SOFTMAXES, FwdConfig, KernelSpec

# Every tunable and its values; Optuna sees the same lists.
GRID: dict[str, tuple[int | bool | str, ...]] = {
    "block_m": (64, 128, 192, 256),
    "block_n": (32, 64, 96, 128),
    # Keys per tile over keys per softmax step: step_n = block_n / step_divisor.
    "step_divisor": (1, 2, 3, 4),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3),
    "q_in_regs": (False, True),
    "softmax": SOFTMAXES,
    "min_blocks": (1, 2, 3),
}
# A step of 16 keys gives the tensor cores too little between two softmaxes; 32 inside 64 already costs 9 %.
MIN_STEP_N = 32


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
    return FwdConfig(
        block_m=int(params["block_m"]),
        block_n=block_n,
        step_n=block_n // divisor,
        num_warps=int(params["num_warps"]),
        num_stages=int(params["num_stages"]),
        q_in_regs=bool(params["q_in_regs"]),
        softmax=str(params["softmax"]),
        min_blocks=int(params["min_blocks"]),
    )


def params_of(config: FwdConfig) -> dict[str, int | bool | str]:
    """Inverse of :func:`config_of`; values may lie outside ``GRID`` for a config that came from elsewhere."""
    return {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "step_divisor": config.block_n // config.step_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "q_in_regs": config.q_in_regs,
        "softmax": config.softmax,
        "min_blocks": config.min_blocks,
    }


def register_cap(config: FwdConfig, arch: ArchLimits) -> int:
    """Registers a thread that ``__launch_bounds__(num_threads, min_blocks)`` lets ptxas use."""
    per_warp = arch.max_registers_per_sm // (config.num_warps * config.min_blocks)
    per_thread = per_warp // arch.register_allocation_unit * arch.register_allocation_unit // 32
    return min(arch.max_registers_per_thread, per_thread)


@functools.cache
def grid() -> tuple[FwdConfig, ...]:
    """Every config of the grid, legal or not."""
    points = (config_of(dict(zip(GRID, values, strict=True))) for values in itertools.product(*GRID.values()))
    return tuple(config for config in points if config is not None)


def exclusion_reason(spec: KernelSpec, config: FwdConfig, arch: ArchLimits) -> str | None:
    """Why a config is not in the space, or None."""
    if config.step_n < MIN_STEP_N:
        return f"step_n {config.step_n} is below {MIN_STEP_N}"
    reason = infeasible_reason(spec, config, arch)
    if reason is not None:
        return reason
    if config.min_blocks > 1:
        fewer = FwdConfig(**{**config.canonical(), "min_blocks": config.min_blocks - 1})
        if register_cap(fewer, arch) == register_cap(config, arch):
            return f"min_blocks {config.min_blocks} leaves the register budget of {fewer.min_blocks}: the same code"
    return None


def legal_space(spec: KernelSpec, gpu: Gpu) -> Space:
    """The space of a spec on a GPU."""
    return _legal_space(spec, gpu.arch)


@functools.lru_cache(maxsize=64)
def _legal_space(spec: KernelSpec, arch: ArchLimits) -> Space:
    configs, excluded = [], []
    for config in grid():
        reason = exclusion_reason(spec, config, arch)
        if reason is None:
            configs.append(config)
        else:
            excluded.append((config, reason))
    return Space(tuple(configs), tuple(excluded))
