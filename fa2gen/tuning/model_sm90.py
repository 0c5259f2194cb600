"""Predicted time of the sm90 family's forward.

The unit of account is one key tile of a block: ``block_n`` keys against the query rows of all its consumer warpgroups.
Tensor cores multiply for one warpgroup at a time, no faster than shared memory gives the operands and takes the next
tiles; each scheduler does the softmax of one warp of each. With overlap and turns the two run side by side, and the
slower one sets the pace; what is lost besides, a sharpness of that maximum for each way to order the products says. A
single warpgroup has nobody to run under: what its products do not overlap adds up. A query tile adds its edges, the
first products and softmax and the last product without anything beside them, Q's way in and the output's way out, which
a second Q tile or a store from registers takes out of the way. The blocks of the persistent grid have so many query
tiles each. Sections change nothing here: what they gain is below what this can tell.

Rates are those of an H200: tensor 4096 FLOPs a clock and SM, exp2 16 and shared memory 128 bytes. The other constants
are fitted to 768 times of an H200, those that a tuning session took: head dims 64, 96, 128, 192 and 256, full and
causal, 512 to 16k queries and keys, bf16, 16k tokens, hidden 2048. They are met to 5.4 % (root mean square; at most
23 %). Of the 8 to 21 configs of a kernel and size the fastest, or one within 1.3 % of it, is among the model's first
eight, and one within 4.6 % among its first four: ``tests/unit/test_tuning_model_sm90.py`` holds this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fa2gen.constraints_sm90 import consumer_registers, estimate_registers, output_columns, padded_columns, smem_plan
from fa2gen.hardware import Gpu
from fa2gen.problem import Problem
from fa2gen.roofline import tile_work
from fa2gen.spec import FwdSm90Config, KernelSpec

from .prediction import Facts, Prediction, soft_max
from .waves import Counts, grid_clocks

MODEL_VERSION = "sm90-fwd-2"

# FLOPs a clock and SM of wgmma; the share of it that so many warpgroups reach (H200: 767, 917 and 889 TFLOP/s).
_TENSOR_FLOPS, _TENSOR_SHARE = 4096.0, {1: 1.0, 2: 1.0, 3: 0.94, 4: 1.0}
# Issues of a scheduler for a score: FMNMX at half rate (online), FFMA, exp2, FADD, half a pack at half rate. Fitted
# within what these may be.
_SCORE_ISSUES = {"online": 6.5, "guarded": 3.0}
# Bytes a clock that shared memory gives to wgmma and takes from TMA, and how sharply it bounds the products.
_SMEM_BYTES, _SMEM_SHARPNESS = 128.0, 11.8
# Clocks of a scheduler for an exp2 of a warp.
_MUFU_CLOCKS = 8.0
# How sharply the slower of tensor cores and softmax bounds a key tile: overlap and turns, either, neither.
_SHARPNESS = {2: 3.37, 1: 2.93, 0: 1.36}
# Clocks of a key tile besides: waiting for mbarriers and turns.
_TILE = 20.0
# Gaps between dependent instructions with one warp on a scheduler, as a share of its softmax; more warps fill them, to
# this power of their number.
_GAP, _GAP_SHARE = 1.5, 2.0
# P through shared memory, clocks of a key tile: fence and barrier. Issues of a store, of 4 scores of a lane.
_SHARED_P, _SHARED_P_ISSUES = 45.0, 6.0
# A masked key tile, for each score of a lane.
_MASK_ISSUES = 1.5
# Latency of a tile's load from L2 under load, clocks.
_LOAD_LATENCY = 1430.0
# Edges of a query tile, clocks: fixed, and for 128 rows of 128 columns; what one Q tile adds (the next one is awaited);
# and with it a store through Q's place, for as many rows and columns; a store from registers, likewise.
_EDGE, _EDGE_SIZE, _ONE_Q, _STORE_WAIT, _DIRECT = 910.0, 2500.0, 225.0, 1505.0, 420.0
# What stays of a query tile's edges where they run under the next one's first product.
_UNDER_NEXT = 0.92
# Clocks of a query tile to draw the next one.
_DRAW = 50.0
# What is left over at the end of a causal grid, in mean query tiles: drawn, and dealt out.
_REST = {"dynamic": 0.73, "static": 1.93}
# Share of the maximum clock's rates that is reached: the power limit (profiler: 1.6 to 1.78 of 1.98 GHz), and all else.
_SUSTAINED_CLOCK = 0.846
# Launch and drain of a grid, milliseconds.
_LAUNCH_MS = 0.0045
# Bytes a clock and SM of L2's reads by TMA (profiler: 37 % of the peak at 5 TB/s), and how sharply it and HBM bound.
_L2_BYTES, _MEMORY_SHARPNESS = 58.0, 6.0
# Registers beyond the lower estimate of constraints.py that consumers want for a schedule without stalls, of one to
# four; slowdown for each that is missing. And for each that is spilled: such a kernel is no candidate.
_SCHEDULE_REGISTERS, _PRESSURE, _SPILL_PRESSURE = {1: 0, 2: 2, 3: 8, 4: 11}, 0.0033, 0.1


def estimate_facts(spec: KernelSpec, config: FwdSm90Config) -> Facts:
    """Facts before compiling: ptxas reports the launch's share of the registers, whatever the consumers have."""
    share = {1: min(255, estimate_registers(spec, config)), 2: 168, 3: 128, 4: 96}[config.warpgroups]
    missing = max(0, estimate_registers(spec, config) - consumer_registers(config))
    return Facts(share, 8 * missing, smem_plan(spec, config).total)


def predict(spec: KernelSpec, config: FwdSm90Config, problem: Problem, gpu: Gpu, facts: Facts) -> Prediction:
    """Kernel time of a config on a problem."""
    if facts.smem_bytes > gpu.arch.max_smem_per_block:
        return Prediction(math.inf, 0)
    work = tile_work(spec, config, problem)
    query_tiles = work.heads * work.blocks
    if query_tiles == 0:
        return Prediction(_LAUNCH_MS, 1)
    tile = _key_tile(spec, config)
    edge = _edge_clocks(spec, config, tile)
    pressure = _pressure(spec, config, facts)

    def block_clocks(together: int, tiles: float, masked: float) -> float:
        """SM time of a query tile; ``together`` is 1 throughout."""
        return (tiles * tile.clocks + masked * tile.mask + edge) * pressure

    counts = Counts(work.tiles / work.blocks, _masked_tiles(spec, config, problem), _longest(config, problem))
    rest = _REST[config.scheduler] if spec.causal else None
    clocks = grid_clocks(block_clocks, counts, query_tiles, 1, gpu.num_sms, rest)
    per_ms = 1e6 * gpu.boost_ghz * _SUSTAINED_CLOCK
    tiles_sm = work.heads * work.tiles / gpu.num_sms
    shares = {
        "issue": tiles_sm * config.warpgroups * tile.issue / per_ms,
        "tensor": tiles_sm * config.warpgroups * tile.tensor / per_ms,
        "mufu": tiles_sm * config.warpgroups * tile.mufu / per_ms,
        "shared memory": tiles_sm * tile.smem / per_ms,
        "l2": tiles_sm * config.block_n * spec.head_dim * 4 / _L2_BYTES / per_ms,
        "hbm": problem.min_bytes(spec) / (0.9e6 * gpu.hbm_gbs),
    }
    bounds = (clocks / per_ms, shares["l2"], shares["hbm"])
    return Prediction(_LAUNCH_MS + soft_max(*bounds, sharpness=_MEMORY_SHARPNESS), 1, shares)


@dataclass(frozen=True)
class _KeyTile:
    """Clocks of one key tile.

    Attributes:
        tensor, issue, mufu: Of one warpgroup: tensor cores at their full rate; issues and exp2 of a scheduler.
        smem: Of the block's shared memory.
        softmax: Of one warpgroup.
        qk, pv: Products of one warpgroup at the rate that so many reach.
        clocks: Of the block.
        mask: What a mask adds.
    """

    tensor: float
    issue: float
    mufu: float
    smem: float
    softmax: float
    qk: float
    pv: float
    clocks: float
    mask: float


def _key_tile(spec: KernelSpec, config: FwdSm90Config) -> _KeyTile:
    groups, scores = config.warpgroups, config.block_n / 2  # scores of a lane
    # The products' inner and outer widths are whole steps of 16, not panels.
    product = 2 * 64 * config.block_n * output_columns(spec.head_dim) / _TENSOR_FLOPS
    qk = pv = product / _TENSOR_SHARE[groups]
    issue, mufu = _SCORE_ISSUES[config.softmax] * scores, _MUFU_CLOCKS * scores
    if config.softmax == "online":
        issue += output_columns(spec.head_dim) / 2  # rescaled once a tile
    if config.p_in_smem:
        issue += _SHARED_P_ISSUES * scores / 4
    softmax = soft_max(issue, mufu, sharpness=4.0) * (1 + _GAP / math.pow(groups, _GAP_SHARE))
    softmax += _SHARED_P if config.p_in_smem else 0.0
    # What one warpgroup cannot do side by side.
    chain = qk + max(pv, softmax) if config.overlap else qk + pv + softmax
    smem = _smem_bytes(spec, config) / _SMEM_BYTES
    products = soft_max(groups * (qk + pv), smem, sharpness=_SMEM_SHARPNESS)
    together = soft_max(products, groups * softmax, sharpness=_SHARPNESS[config.overlap + config.ping_pong])
    clocks = max(chain, together) + _TILE
    # K and V of a tile are awaited where those before take less time than a load.
    clocks += max(0.0, _LOAD_LATENCY - (config.num_stages - 1 + config.k_extra / 2) * clocks)
    return _KeyTile(2 * product, issue, mufu, smem, softmax, qk, pv, clocks, _MASK_ISSUES * scores * groups)


def _smem_bytes(spec: KernelSpec, config: FwdSm90Config) -> float:
    """Bytes of shared memory that a key tile's products read, and that it fills."""
    columns = output_columns(spec.head_dim)
    rows = 64 * 2 * (columns - 16 * config.q_regs)
    if config.p_in_smem:
        rows += 2 * 64 * 2 * config.block_n  # written once, read once
    keys = config.block_n * columns * 2
    return config.warpgroups * (rows + 2 * keys) + 2 * config.block_n * padded_columns(spec.head_dim) * 2


def _pressure(spec: KernelSpec, config: FwdSm90Config, facts: Facts) -> float:
    """Slowdown by missing registers."""
    # Q's registers are written once a query tile: no schedule is made around them.
    spare = consumer_registers(config) - estimate_registers(spec, replace(config, q_regs=0))
    missing = max(0, _SCHEDULE_REGISTERS[config.warpgroups] - spare)
    return 1 + _PRESSURE * missing + _SPILL_PRESSURE * facts.spill_bytes / 8


def _edge_clocks(spec: KernelSpec, config: FwdSm90Config, tile: _KeyTile) -> float:
    size = config.block_m * spec.head_dim / 16384
    edge = _EDGE + _EDGE_SIZE * size
    if config.overlap:
        # The first scores have no product to run under.
        edge += tile.softmax
    if config.overlap_tiles:
        edge *= _UNDER_NEXT
    if config.q_stages == 1:
        edge += _ONE_Q * (1 - config.q_extra / config.warpgroups)
        edge += _STORE_WAIT * size if config.epilogue == "tma" else 0.0
    edge += _DIRECT * size if config.epilogue == "direct" else 0.0
    return edge + (_DRAW if config.scheduler == "dynamic" else 0.0)


def _masked_tiles(spec: KernelSpec, config: FwdSm90Config, problem: Problem) -> float:
    """Of a mean query tile's key tiles, those that the diagonal or the end of the keys crosses."""
    if spec.causal:
        return min(math.ceil(problem.seqlen_k / config.block_n), (config.block_m + config.block_n) / config.block_n)
    return 1.0 if problem.seqlen_k % config.block_n else 0.0


def _longest(config: FwdSm90Config, problem: Problem) -> int:
    return math.ceil(problem.seqlen_k / config.block_n)
