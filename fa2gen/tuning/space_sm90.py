"""The grid of the sm90 family's forward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace

from fa2gen.config_sm90 import EPILOGUES, SCHEDULERS
from fa2gen.constraints import config_reason, infeasible_reason
from fa2gen.constraints_sm90 import consumer_registers, estimate_registers
from fa2gen.hardware import ArchLimits
from fa2gen.spec import FwdSm90Config, KernelSpec

from .grid import Grid, Value

# overlap and ping_pong. Neither is left out: it was slowest wherever it was measured (H200, head dim 128: 7 to 12 %
# behind both), and it takes the registers of turns alone.
_PRODUCTS = {"overlap turns": (True, True), "overlap": (True, False), "turns": (False, True)}

_VALUES: dict[str, tuple[Value, ...]] = {
    "block_m": (64, 128, 192),
    "block_n": (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
    "num_stages": (2, 3, 4),
    "q_stages": (1, 2),
    "p_in_smem": (False, True),
    "products": tuple(_PRODUCTS),
    "scheduler": SCHEDULERS,
    "epilogue": EPILOGUES,
}
# Keys on their way beyond which another stage has nothing to hide: a load takes as long as 64 keys at head dim 64.
_MAX_KEYS_AHEAD = 512
# Registers of a consumer that the estimate must leave free: of 290 kernels compiled for sm_90a those that left 4 had no
# spills, and the five that left none were serialized.
_SPARE_REGISTERS = 4


def _config_of(params: Mapping[str, Value]) -> FwdSm90Config | None:
    """None where ``products`` is none of this grid's."""
    if params["products"] not in _PRODUCTS:
        return None
    overlap, ping_pong = _PRODUCTS[str(params["products"])]
    return FwdSm90Config(
        block_m=int(params["block_m"]),
        block_n=int(params["block_n"]),
        num_stages=int(params["num_stages"]),
        q_stages=int(params["q_stages"]),
        p_in_smem=bool(params["p_in_smem"]),
        overlap=overlap,
        ping_pong=ping_pong,
        scheduler=str(params["scheduler"]),
        epilogue=str(params["epilogue"]),
    )


def _params_of(config: FwdSm90Config) -> dict[str, Value]:
    words = [word for word, there in (("overlap", config.overlap), ("turns", config.ping_pong)) if there]
    return {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "num_stages": config.num_stages,
        "q_stages": config.q_stages,
        "p_in_smem": config.p_in_smem,
        "products": " ".join(words),
        "scheduler": config.scheduler,
        "epilogue": config.epilogue,
    }


@functools.cache
def _configs(_grouped: bool) -> tuple[FwdSm90Config, ...]:
    """Grouped heads have no configs of their own: query tiles hold rows of one head."""
    points = (dict(zip(_VALUES, point, strict=True)) for point in itertools.product(*_VALUES.values()))
    configs = (config for point in points if (config := _config_of(point)) is not None)
    return tuple(config for config in configs if config_reason(config) is None and _futile_reason(config) is None)


def _futile_reason(config: FwdSm90Config) -> str | None:
    """Why a config that may be legal serves no spec well, or None."""
    if config.num_stages > 2 and config.num_stages * config.block_n > _MAX_KEYS_AHEAD:
        return f"{config.num_stages} stages of {config.block_n} keys: more than {_MAX_KEYS_AHEAD} hide nothing"
    if config.warpgroups == 1 and config.p_in_smem:
        return "P in shared memory saves registers, of which a single consumer has enough"
    if not config.overlap and not config.ping_pong:
        return "neither overlap nor turns: 7 to 12 % behind both (H200, head dim 128)"
    return None


def _registers_reason(spec: KernelSpec, config: FwdSm90Config) -> str | None:
    needed, available = estimate_registers(spec, config), consumer_registers(config)
    if needed + _SPARE_REGISTERS > available:
        return f"about {needed} of {available} registers a consumer: ptxas serializes products where none is free"
    return None


def _spared_registers_reason(spec: KernelSpec, config: FwdSm90Config, arch: ArchLimits) -> str | None:
    """Why registers that a config does without would not be missed, or None."""
    richer = []
    if config.p_in_smem:
        richer.append(("P in shared memory", replace(config, p_in_smem=False)))
    if not config.overlap:
        richer.append(("turns without overlap", replace(config, overlap=True)))
    for saving, faster in richer:
        if infeasible_reason(spec, faster, arch) is None and _registers_reason(spec, faster) is None:
            return f"{saving}: there are registers for the faster way"
    return None


def _exclusion_reason(spec: KernelSpec, config: FwdSm90Config, arch: ArchLimits) -> str | None:
    return (
        infeasible_reason(spec, config, arch)
        or _registers_reason(spec, config)
        or _futile_reason(config)
        or _spared_registers_reason(spec, config, arch)
    )


GRID = Grid(_VALUES, _config_of, _params_of, _configs, _exclusion_reason)
