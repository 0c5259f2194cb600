"""Predicted time of a backward: of its main kernel from real facts, and of the kernels before and after it.

The unit of account is one warp's share of a tile of queries. Its mma, ldmatrix, loads, stores and additions to dQ are
counted from the kernel's loops; a scheduler's time for them, the SM's shared-memory and exp2 time and the exposed
latencies give a block's time, the grid's shape gives the kernel's, and L2 (reads, and the sums of dQ) and HBM bound it
from below. The other two kernels move memory.

Constants are fitted to 771 times of an H200: 19 to 25 configs of each of 36 cases (head dims 32 to 256, full and
causal, 512, 2048 and 8192 queries and keys, bf16, 16k tokens, hidden 2048; kernels of two roles have become 2 % faster
since). The config ranked first is at most 6 % slower than the fastest (0.5 % in the mean; by the facts estimated before
compiling 0.8 %), the best of the first three at most 1 %. Kendall's tau of times that differ by more than 2 % is 0.76
to 1 (0.89 in the mean), and times within 1.5 times the best are off by 2 to 5 % (root mean square, each case's mean
error of -5 to 4 % taken out). ``tests/unit/test_tuning_model_backward.py`` holds this. Fitted to five head dims alone,
by least squares without regard to ranks, the constants rank the sixth with a mean regret of 1.4 % (head dim 64: 5 %)
and a tau of 0.88. On other chips they are used with the chip's rates: a prediction, and tables say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa2gen.constraints import smem_bytes
from fa2gen.constraints_backward import dq_warps_m
from fa2gen.hardware import ArchLimits, Gpu, occupancy
from fa2gen.problem import Problem
from fa2gen.roofline import tile_work
from fa2gen.spec import BwdConfig, KernelSpec

from .grid import register_cap
from .prediction import Facts, Prediction, soft_max
from .waves import Counts, grid_clocks

MODEL_VERSION = "sm80-bwd-2"

# Issues of a scheduler: of a tile whatever its size (loop, addresses, barrier), for a score (scale, exp2, dP - D, the
# product, half of two packs, and what of them waits), for a masked one besides, a 16-byte copy, and an addition to
# global memory of one float or four a lane. An ldmatrix, a load and a store issue once.
_TILE_ISSUES, _SCORE_ISSUES, _MASK_ISSUES, _COPY_ISSUES, _ADD_ISSUES = 100.0, 6.8, 0.4, 4.0, 4.8
# Issues for a 4-byte word that is spilled or fetched again.
_SPILL_ISSUES = 6.3
# Gaps between dependent instructions with one warp on a scheduler, as a share of its time; more warps fill them. A lone
# block without roles has all its warps in the same phase, which leaves tensor cores idle for so much more.
_GAP, _IN_PHASE = 0.52, 0.08
# How sharply shared memory bounds a tile that it nearly fills, and L2 and HBM the whole.
_SMEM_SHARPNESS, _MEMORY_SHARPNESS = 7.4, 6.0
# What a tile waits for, clocks: P from a warp of the other role, which dQ of the tile before covers where dS has two
# tiles, and in either case its scores, each; the warp that shares the keys. And the bytes a clock at which the next
# tile comes where it has no stage of its own.
_HAND_OVER, _HAND_OVER_SCORE, _PAIR_WAIT, _FILL_BYTES = 490.0, 7.0, 430.0, 68.0
# Prologue and epilogue of a block: fixed, and for a tile of 128 keys by 128 columns.
_BLOCK_FIXED, _BLOCK_PER_TILE = 4000.0, 6300.0
# Bytes a clock and SM that L2 adds up.
_ADD_BYTES = 17.0
# Slowdown of a deterministic backward, whose key blocks wait for each other (H200, 36 cells: geometric mean).
_ORDERED = 1.035
# Share of HBM bandwidth that the kernels before and after reach, and launch and drain of each grid, milliseconds.
_HBM_SHARE, _LAUNCH_MS = 0.8, 0.0035
# What is left over at the end of a causal grid, in mean blocks.
_CAUSAL_REST = 0.37
# Registers beyond accumulators and fragments without which ptxas spills (360 kernels for sm_90); fewer with two roles,
# with two tiles of dS, and where a tile is one panel of 32 columns. What it takes beyond where it may; bytes of spill
# stores and loads for each that is missing.
_OTHER_REGISTERS, _ROLES_REGISTERS, _DS_REGISTERS, _NARROW_REGISTERS = 49, 13, 14, 17
_SPARE_REGISTERS, _SPILL_BYTES = 36, 9


@dataclass(frozen=True)
class _Tile:
    """What one warp does for a tile of queries: instructions, but for scores and additions, which are a lane's."""

    mma: float
    ldmatrix: float
    scores: float
    stores: float
    loads: float
    copies: float
    additions: float


def estimate_facts(spec: KernelSpec, config: BwdConfig, gpu: Gpu) -> Facts:
    """Facts before compiling: ptxas takes the registers that it mostly takes, if there are so many, or spills."""
    needed, cap = _needed_registers(spec, config), register_cap(config, gpu.arch)
    spilled = _SPILL_BYTES * max(0, needed - cap)
    return Facts(min(cap, needed + _SPARE_REGISTERS), spilled, smem_bytes(spec, config))


def _needed_registers(spec: KernelSpec, config: BwdConfig) -> int:
    """What is alive where most is: beside dV and dK either S and dP of a step or a warp's part of dQ."""
    keys, width, gradients = config.warp_keys, spec.native_head_dim, 3 - config.roles
    kept = gradients * keys * width // config.warps_d // 32
    scores = keys * config.step_m // config.warps_d // 32
    # The kernel packs a large P before dP is computed. Fragments of the left operand are loaded a k step ahead.
    held = 0 if config.roles == 2 else scores // 2 if scores > 32 else scores
    products = scores + held
    if config.kv_in_regs:
        kept += gradients * keys * width // 64
    else:
        products += keys // 2
    dq_rows = config.block_m // (dq_warps_m(spec, config) or 1)
    dq = config.block_m * width // config.num_warps // 32 + dq_rows // 2
    other = _OTHER_REGISTERS - _ROLES_REGISTERS * (config.roles == 2) - _DS_REGISTERS * (config.ds_stages == 2)
    return kept + max(products, dq) + other - _NARROW_REGISTERS * (width == 32)


def count_tile(spec: KernelSpec, config: BwdConfig) -> _Tile:
    """The work of one warp and tile, from the loops of the kernel's template."""
    width, block_m, shared = spec.native_head_dim, config.block_m, config.warps_d
    keys, pairs = config.warp_keys // 16, width // shared // 16
    # Of S^T and dP^T, and of dV and dK, a warp of two roles does one each.
    products = 2 / config.roles
    steps, queries = block_m // config.step_m, config.step_m / shared / 16
    k_steps = math.ceil(spec.head_dim / 16)
    mma = products * steps * keys * 2 * queries * k_steps
    ldmatrix = products * steps * k_steps * (queries + (0 if config.kv_in_regs else keys))
    mma += products * block_m / 16 * 2 * pairs * keys
    ldmatrix += products * block_m / 16 * (pairs + (keys if shared > 1 else 0))
    # dQ: all warps share its rows and columns.
    warps_m = dq_warps_m(spec, config) or 1
    rows, columns = block_m // warps_m // 16, width // (config.num_warps // warps_m) // 16
    mma += config.block_n / 16 * rows * 2 * columns
    ldmatrix += config.block_n / 16 * (rows + columns)
    # Four of a lane for each m16 x n8 tile of S^T; with two roles half of the warps have P, the others dS.
    scores = steps * keys * 2 * queries * 4 / config.roles
    handed = scores / 2 if config.roles * shared > 1 else 0.0  # P, in pairs of a lane
    return _Tile(
        mma=mma,
        ldmatrix=ldmatrix,
        scores=scores,
        stores=scores / 2 + handed,
        loads=2 * steps * queries * 2 + (handed if config.roles == 2 else 0.0),
        copies=2 * block_m * width * 2 / (512 * config.num_warps),
        additions=rows * 2 * columns * (1 if config.reduction == "vector" else 4),
    )


def predict(spec: KernelSpec, config: BwdConfig, problem: Problem, gpu: Gpu, facts: Facts) -> Prediction:
    """Time of the three kernels of a config on a problem."""
    arch = gpu.arch
    resident = occupancy(arch, config.num_threads, facts.registers, facts.smem_bytes).blocks_per_sm
    if resident == 0:
        return Prediction(math.inf, 0)
    work = tile_work(spec, config, problem)
    around = _around_bytes(spec, config, problem) / (_HBM_SHARE * 1e6 * gpu.hbm_gbs)
    blocks = work.heads * work.blocks
    if blocks == 0 or work.tiles == 0:
        return Prediction(3 * _LAUNCH_MS + around, resident)
    tile, mma_clocks = count_tile(spec, config), arch.mma_cycles / gpu.tensor_rate
    other = _TILE_ISSUES + _SCORE_ISSUES * tile.scores + tile.ldmatrix + tile.stores + tile.loads
    other += _COPY_ISSUES * tile.copies + _ADD_ISSUES * tile.additions + _SPILL_ISSUES * facts.spill_bytes / 4
    issue = other + tile.mma * (mma_clocks if arch.mma_blocks_issue else 2)
    tensor = tile.mma * mma_clocks
    mufu = tile.scores * 32 / (arch.mufu_lanes_per_clk / arch.schedulers_per_sm)
    # Additions to global memory leave through the same unit.
    sums = tile.additions * (4 if config.reduction == "vector" else 1)
    smem = (512 * (tile.ldmatrix + tile.copies) + 128 * (tile.stores + tile.loads + sums)) / arch.smem_bytes_per_clk
    waits = _waits(spec, config, tile)
    slowdown = _ORDERED if spec.deterministic else 1.0

    def scheduler_clocks(issue: float) -> float:
        busy = issue if arch.mma_blocks_issue else soft_max(issue, tensor, sharpness=2.0)
        return soft_max(busy, mufu, sharpness=4.0) * slowdown

    def block_clocks(together: int, tiles: float, masked: float) -> float:
        """SM time of blocks that share it from their start to their end."""
        mask = _MASK_ISSUES * tile.scores
        plain, mixed = (
            waits + _busy_clocks(config, arch, scheduler_clocks(each), smem, together) for each in (issue, issue + mask)
        )
        size = config.block_n * spec.native_head_dim / 16384
        edge = _BLOCK_FIXED + _BLOCK_PER_TILE * size * math.sqrt(together)
        return (tiles - masked) * plain + masked * mixed + edge

    counts = Counts(work.tiles / work.blocks, _masked_tiles(spec, config, problem), _longest(spec, config, problem))
    rest = _CAUSAL_REST if spec.causal else None
    clocks = grid_clocks(block_clocks, counts, blocks, resident, gpu.num_sms, rest)
    per_ms = 1e6 * gpu.boost_ghz
    warps_sm = work.heads * work.tiles * config.num_warps / gpu.num_sms
    tile_bytes = 2.0 * config.block_m * spec.native_head_dim  # of Q, or of dO
    l2_clocks = 2 * tile_bytes / arch.l2_bytes_per_clk + 2 * tile_bytes / _ADD_BYTES
    shares = {
        "issue": warps_sm / arch.schedulers_per_sm * issue / per_ms,
        "tensor": warps_sm / arch.schedulers_per_sm * tensor / per_ms,
        "mufu": warps_sm / arch.schedulers_per_sm * mufu / per_ms,
        "shared memory": warps_sm * smem / per_ms,
        "l2": work.heads * work.tiles * l2_clocks / gpu.num_sms / per_ms,
        "hbm": problem.min_bytes(spec) / (0.9e6 * gpu.hbm_gbs) + around,
    }
    bounds = (clocks / per_ms, shares["l2"], shares["hbm"] - around)
    main = soft_max(*bounds, sharpness=_MEMORY_SHARPNESS)
    return Prediction(3 * _LAUNCH_MS + around + main, resident, shares)


def _busy_clocks(config: BwdConfig, arch: ArchLimits, scheduler: float, smem: float, resident: int) -> float:
    """Clocks in which an SM does one tile of queries of each of its resident blocks, but for what they wait for."""
    # Fewer warps than schedulers leave some idle.
    warps_per_scheduler = max(1.0, config.num_warps * resident / arch.schedulers_per_sm)
    busy = soft_max(warps_per_scheduler * scheduler, config.num_warps * resident * smem, sharpness=_SMEM_SHARPNESS)
    # Dependent instructions leave gaps that only other warps fill.
    in_phase = _IN_PHASE if config.roles * resident == 1 else 0.0
    return busy * (1 + _GAP / warps_per_scheduler + in_phase)


def _waits(spec: KernelSpec, config: BwdConfig, tile: _Tile) -> float:
    """Clocks that a tile waits for, which resident blocks do not hide: they are as long for all of them."""
    waits = _PAIR_WAIT if config.warps_d > 1 else 0.0
    if config.roles == 2:
        waits += _HAND_OVER_SCORE * tile.scores + (_HAND_OVER if config.ds_stages == 1 else 0.0)
    if config.num_stages == 1:
        waits += 4 * config.block_m * spec.native_head_dim / _FILL_BYTES  # Q and dO
    return waits


def _masked_tiles(spec: KernelSpec, config: BwdConfig, problem: Problem) -> float:
    """Of a mean block's tiles, those that the diagonal or the end of the keys crosses."""
    walked = 1 if config.split_heads else spec.gqa_ratio
    query_tiles = math.ceil(problem.seqlen_q / config.block_m)
    if spec.causal:
        return walked * min(query_tiles, (config.block_n + config.block_m) / config.block_m)
    # The last block masks all of its tiles where its keys end early.
    return (
        walked * query_tiles / math.ceil(problem.seqlen_k / config.block_n) if problem.seqlen_k % config.block_n else 0
    )


def _longest(spec: KernelSpec, config: BwdConfig, problem: Problem) -> int:
    """Tiles of the first key block, which all queries see that see any key."""
    first = max(0, problem.seqlen_q - problem.seqlen_k) // config.block_m if spec.causal else 0
    walked = 1 if config.split_heads else spec.gqa_ratio
    return walked * (math.ceil(problem.seqlen_q / config.block_m) - first)


def _around_bytes(spec: KernelSpec, config: BwdConfig, problem: Problem) -> float:
    """HBM traffic of the kernels before and after: O, dO and dQ, and the sums of dQ, cleared and read; of dK and dV."""
    rows_q = problem.batch * problem.num_heads_q * problem.seqlen_q
    rows_k = problem.batch * problem.num_heads_k * problem.seqlen_k
    size = rows_q * (3 * 2 * spec.head_dim + 2 * 4 * spec.native_head_dim)
    if config.split_heads:
        size += 2 * rows_k * (2 * spec.head_dim + 2 * 4 * spec.native_head_dim)
    return float(size)
