"""What a family of kernels has to tune: its tunables' values, and which combinations of them are worth a try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fa2gen.hardware import ArchLimits
from fa2gen.spec import BwdConfig, Config, FwdConfig, FwdSm90Config, KernelSpec

Value = int | bool | str
ConfigOf = TypeVar("ConfigOf", FwdConfig, FwdSm90Config, BwdConfig)
# Warps an SM that the register budget may have to allow; 16 leave a thread 128 registers.
_MAX_PROMISED_WARPS = 16


@dataclass(frozen=True)
class Grid(Generic[ConfigOf]):
    """The grid of one kind and family.

    Attributes:
        values: Every tunable and its values; Optuna sees the same lists. Tunables that mean something only together are
            one.
        config_of: The config that a point of ``values`` stands for; None where it stands for none.
        params_of: Inverse of ``config_of``; values may lie outside ``values`` for a config that came from elsewhere.
        configs: Every config that could be legal for some spec; with True also those that only grouped heads have.
        exclusion_reason: (spec, config, arch) -> why a config is not in the space, or None.
    """

    values: Mapping[str, tuple[Value, ...]]
    config_of: Callable[[Mapping[str, Value]], ConfigOf | None]
    params_of: Callable[[ConfigOf], dict[str, Value]]
    configs: Callable[[bool], tuple[ConfigOf, ...]]
    exclusion_reason: Callable[[KernelSpec, ConfigOf, ArchLimits], str | None]

    def holds(self, config: ConfigOf) -> bool:
        """Whether a point of the grid stands for a config."""
        params = self.params_of(config)
        return all(value in self.values[name] for name, value in params.items()) and self.config_of(params) == config


def register_cap(config: Config, arch: ArchLimits) -> int:
    """Registers a thread that ``__launch_bounds__(num_threads, min_blocks)`` lets ptxas use."""
    per_warp = arch.max_registers_per_sm // (config.num_warps * config.min_blocks)
    per_thread = per_warp // arch.register_allocation_unit * arch.register_allocation_unit // 32
    return min(arch.max_registers_per_thread, per_thread)


def promise_reason(config: FwdConfig | BwdConfig) -> str | None:
    """Why ``min_blocks`` promises more warps than can have the registers they need, or None."""
    if config.num_warps * config.min_blocks > _MAX_PROMISED_WARPS:
        return f"min_blocks {config.min_blocks} of {config.num_warps} warps leaves a thread too few registers"
    return None


def same_budget_reason(config: FwdConfig | BwdConfig, arch: ArchLimits) -> str | None:
    """Why ``min_blocks`` changes nothing that ptxas sees, or None."""
    if config.min_blocks > 1:
        fewer = replace(config, min_blocks=config.min_blocks - 1)
        if register_cap(fewer, arch) == register_cap(config, arch):
            return f"min_blocks {config.min_blocks} leaves the register budget of {fewer.min_blocks}: the same code"
    return None
