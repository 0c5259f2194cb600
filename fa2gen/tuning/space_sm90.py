"""The grid of the sm90 family's forward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace

from fa2gen.config_sm90 import EPILOGUES
from fa2gen.constraints import config_reason, infeasible_reason
from fa2gen.constraints_sm90 import consumer_registers, estimate_registers, has_room_for_q, output_columns
from fa2gen.hardware import ArchLimits
from fa2gen.spec import FwdSm90Config, KernelSpec

from .grid import Grid, Value

# Tunables that mean something only together are one.
# overlap, ping_pong and softmax. One of the first two there must be: without both was slowest wherever it was measured
# (H200, head dim 128: 7 to 12 % behind both), and takes the registers of turns alone. Where products overlap the
# guarded softmax is 5 to 16 % faster than the online one; without overlap there is none.
_PRODUCTS = {
    "overlap turns": (True, True, "guarded"),
    "overlap": (True, False, "guarded"),
    "turns": (False, True, "online"),
}
# num_stages and k_extra.
_STAGES = {"2": (2, 0), "2 + 1 of K": (2, 1), "3": (3, 0), "4": (4, 0)}
# q_stages and q_extra.
_QUERY_TILES = {"1": (1, 0), "1 + 64 rows": (1, 1), "2": (2, 0)}
# scheduler and section_mib: sections are what tiles are drawn from.
_SCHEDULES = {
    "static": ("static", 0),
    "dynamic": ("dynamic", 0),
    "dynamic, 8 MiB": ("dynamic", 8),
    "dynamic, 32 MiB": ("dynamic", 32),
}

_VALUES: dict[str, tuple[Value, ...]] = {
    "block_m": (64, 128, 192, 256),
    "block_n": (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
    "stages": tuple(_STAGES),
    "query_tiles": tuple(_QUERY_TILES),
    "q_regs": (0, 4, 8),
    "p_in_smem": (False, True),
    "products": tuple(_PRODUCTS),
    "overlap_tiles": (False, True),
    "schedule": tuple(_SCHEDULES),
    "epilogue": EPILOGUES,
}
_HOW_TILES_COME = ("schedule", "epilogue")
# Keys on their way beyond which another stage has nothing to hide: a load takes as long as 64 keys at head dim 64.
_MAX_KEYS_AHEAD = 512
# Registers of a consumer that the estimate must leave free: of 290 kernels compiled for sm_90a those that left 4 had no
# spills, and the five that left none were serialized.
_SPARE_REGISTERS = 4
# Columns of O up to which Q in registers gained nothing (H200, head dim 64, a step of 192 x 128 tiles: 0.92 to 1.01).
_NARROW = 64


def _config_of(params: Mapping[str, Value]) -> FwdSm90Config | None:
    """None where a word is none of this grid's."""
    products, stages = _PRODUCTS.get(str(params["products"])), _STAGES.get(str(params["stages"]))
    query_tiles, schedule = _QUERY_TILES.get(str(params["query_tiles"])), _SCHEDULES.get(str(params["schedule"]))
    if products is None or stages is None or query_tiles is None or schedule is None:
        return None
    overlap, ping_pong, softmax = products
    num_stages, k_extra = stages
    q_stages, q_extra = query_tiles
    scheduler, section_mib = schedule
    return FwdSm90Config(
        block_m=int(params["block_m"]),
        block_n=int(params["block_n"]),
        num_stages=num_stages,
        k_extra=k_extra,
        q_stages=q_stages,
        q_extra=q_extra,
        q_regs=int(params["q_regs"]),
        p_in_smem=bool(params["p_in_smem"]),
        overlap=overlap,
        ping_pong=ping_pong,
        softmax=softmax,
        overlap_tiles=bool(params["overlap_tiles"]),
        scheduler=scheduler,
        section_mib=section_mib,
        epilogue=str(params["epilogue"]),
    )


def _params_of(config: FwdSm90Config) -> dict[str, Value]:
    """Words of configs that no point stands for are none of the grid's."""

    def word(known: Mapping[str, tuple[Value, ...]], *values: Value) -> str:
        return next((word for word, its in known.items() if its == values), " ".join(map(str, values)))

    return {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "stages": word(_STAGES, config.num_stages, config.k_extra),
        "query_tiles": word(_QUERY_TILES, config.q_stages, config.q_extra),
        "q_regs": config.q_regs,
        "p_in_smem": config.p_in_smem,
        "products": word(_PRODUCTS, config.overlap, config.ping_pong, config.softmax),
        "overlap_tiles": config.overlap_tiles,
        "schedule": word(_SCHEDULES, config.scheduler, config.section_mib),
        "epilogue": config.epilogue,
    }


@functools.cache
def _configs(_grouped: bool) -> tuple[FwdSm90Config, ...]:
    """Grouped heads have no configs of their own: query tiles hold rows of one head."""
    names = [name for name in _VALUES if name not in _HOW_TILES_COME]
    plain: dict[str, Value] = {name: _VALUES[name][0] for name in _HOW_TILES_COME}
    rests = [
        dict(zip(_HOW_TILES_COME, point, strict=True))
        for point in itertools.product(*(_VALUES[name] for name in _HOW_TILES_COME))
    ]
    configs = []
    for point in itertools.product(*(_VALUES[name] for name in names)):
        params = plain | dict(zip(names, point, strict=True))
        # By itself and first: of 45,000 shapes one in six can be.
        shape = _config_of(params | {"epilogue": "direct"})
        if shape is None or config_reason(shape) is not None or _futile_reason(shape) is not None:
            continue
        configs += [config for rest in rests if (config := _config_of(params | rest)) is not None]
    return tuple(config for config in configs if config_reason(config) is None and _futile_reason(config) is None)


def _futile_reason(config: FwdSm90Config) -> str | None:
    """Why a config that may be legal serves no spec well, or None."""
    if config.num_stages > 2 and config.num_stages * config.block_n > _MAX_KEYS_AHEAD:
        return f"{config.num_stages} stages of {config.block_n} keys: more than {_MAX_KEYS_AHEAD} hide nothing"
    if config.warpgroups == 1 and config.p_in_smem:
        return "P in shared memory saves registers, of which a single consumer has enough"
    if not config.overlap and not config.ping_pong:
        return "neither overlap nor turns: 7 to 12 % behind both (H200, head dim 128)"
    if config.overlap and config.softmax == "online":
        return "softmax online: 5 to 16 % behind the guarded one (H200)"
    if config.q_stages == 1 and config.epilogue == "tma":
        return "epilogue tma with one Q tile: the next one waits for the output (H200, head dim 128: 10 % at 1k)"
    if config.p_in_smem and config.q_regs:
        return "P in shared memory saves registers, and Q in registers takes them"
    return None


def _registers_reason(spec: KernelSpec, config: FwdSm90Config) -> str | None:
    needed, available = estimate_registers(spec, config), consumer_registers(config)
    if needed + _SPARE_REGISTERS > available:
        return f"about {needed} of {available} registers a consumer: ptxas serializes products where none is free"
    return None


def _spared_reason(spec: KernelSpec, config: FwdSm90Config, arch: ArchLimits) -> str | None:
    """Why what a config does without would not be missed, or None."""
    richer = []
    if config.p_in_smem:
        richer.append(("P in shared memory: there are registers", replace(config, p_in_smem=False)))
    if not config.overlap:
        richer.append(("turns without overlap: there are registers", replace(config, overlap=True)))
    if config.k_extra:
        stages = config.num_stages + 1
        richer.append(("one more stage of K: there is shared memory", replace(config, num_stages=stages, k_extra=0)))
    if config.q_extra:
        richer.append(("64 more rows of Q: there is shared memory", replace(config, q_stages=2, q_extra=0)))
    if config.q_regs == 4 and has_room_for_q(spec, config, 8):
        return "4 k16 steps of Q in registers: there are registers for 8"
    for saving, faster in richer:
        if infeasible_reason(spec, faster, arch) is None and _registers_reason(spec, faster) is None:
            return f"{saving} for the faster way"
    return None


def _pointless_reason(spec: KernelSpec, config: FwdSm90Config) -> str | None:
    """Why a tunable does nothing for a spec, or None."""
    if config.q_regs and output_columns(spec.head_dim) <= _NARROW:
        return f"Q in registers gains nothing up to head_dim {_NARROW} (H200)"
    return None


def _exclusion_reason(spec: KernelSpec, config: FwdSm90Config, arch: ArchLimits) -> str | None:
    return (
        infeasible_reason(spec, config, arch)
        or _registers_reason(spec, config)
        or _futile_reason(config)
        or _pointless_reason(spec, config)
        or _spared_reason(spec, config, arch)
    )


GRID = Grid(_VALUES, _config_of, _params_of, _configs, _exclusion_reason)
