"""Predicted time of a backward: of its main kernel from real facts, and of the kernels before and after it.

The unit of account is one warp's share of a tile of queries. Its mma, ldmatrix, loads, stores and additions to dQ are
counted from the kernel's loops; a scheduler's time for them, the SM's shared-memory and exp2 time and the exposed
latencies give a block's time, the grid's shape gives the kernel's, and L2 (reads, and the sums of dQ) and HBM bound it
from below. The other two kernels move memory.

Its constants are those of the forward's model where the two share what they stand for, and estimates elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa2gen.constraints import estimate_registers, smem_bytes
from fa2gen.constraints_backward import dq_warps_m
from fa2gen.hardware import ArchLimits, Gpu, occupancy
from fa2gen.problem import Problem
from fa2gen.roofline import tile_work
from fa2gen.spec import BwdConfig, KernelSpec

from .grid import register_cap
from .prediction import Facts, Prediction, soft_max
from .waves import Counts, grid_clocks

MODEL_VERSION = "sm80-bwd-1"

# Issues of a scheduler for each instruction of a kind: 16-byte copy, ldmatrix.x4, float32 addition to global memory
# (one float or four a lane), and per score 5.5: scale, exp2, dP - D, the product, two halves of packs.
_COPY_ISSUES, _LDMATRIX_ISSUES, _ADD_ISSUES, _SCORE_ISSUES = 3.2, 3.6, 4.0, 5.5
# Compares and selects of a masked score.
_MASK_ISSUES = 3.0
# Gaps between dependent instructions with one warp on a scheduler, as a share of its time; more warps fill them, to
# this power of their number.
_GAP, _GAP_SHARE = 0.28, 1.0
# How sharply shared memory bounds a tile that it nearly fills, and L2 and HBM the whole.
_SMEM_SHARPNESS, _MEMORY_SHARPNESS = 8.0, 6.0
# A block-wide barrier's skew where no other block fills in, clocks; latency of a tile's loads; waiting for P from a
# warp of the other role.
_BARRIER, _LOAD_LATENCY, _HAND_OVER = 300.0, 970.0, 150.0
# Prologue and epilogue of a block: fixed, and for a tile of 128 keys by 128 columns.
_BLOCK_FIXED, _BLOCK_PER_TILE = 3000.0, 6000.0
# Bytes a clock and SM that L2 adds up, in additions of four floats and of one.
_VECTOR_ADD_BYTES, _SCALAR_ADD_BYTES = 16.0, 8.0
# Slowdown of a deterministic backward, whose key blocks wait for each other.
_ORDERED = 1.1
# Share of HBM bandwidth that the kernels before and after reach, and launch and drain of each grid, milliseconds.
_HBM_SHARE, _LAUNCH_MS = 0.85, 0.0035
# Registers beyond the lower estimate of constraints.py: what ptxas takes where it may, how many of them it does without
# before it spills (28 kernels of head dims 64 to 256 for sm_90: within 32), and what a schedule without stalls wants.
# Slowdown for each that is missing.
_USUAL_REGISTERS, _SPARE_REGISTERS, _SCHEDULE_REGISTERS, _PRESSURE = 66, 40, 16, 0.015
# Issues for the 4-byte words that are spilled, to this power of their number.
_SPILL_ISSUES, _SPILL_POWER = 9.2, 0.63
# What is left over at the end of a causal grid, in mean blocks.
_CAUSAL_REST = 0.32


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
    barriers: int


def estimate_facts(spec: KernelSpec, config: BwdConfig, gpu: Gpu) -> Facts:
    """Facts before compiling: ptxas takes the registers that it mostly takes, if there are so many, or spills."""
    wanted, cap = estimate_registers(spec, config) + _USUAL_REGISTERS, register_cap(config, gpu.arch)
    spilled = max(0, wanted - cap - _SPARE_REGISTERS)
    return Facts(min(cap, wanted), 8 * spilled, smem_bytes(spec, config))


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
    barriers = 1 if config.ds_stages == 2 else 2 + (shared > 1) * ((config.num_stages == 1) + (config.roles == 2))
    return _Tile(
        mma=mma,
        ldmatrix=ldmatrix,
        scores=scores,
        stores=scores / 2 + handed,
        loads=2 * steps * queries * 2 + (handed if config.roles == 2 else 0.0),
        copies=2 * block_m * width * 2 / (512 * config.num_warps),
        additions=rows * 2 * columns * (1 if config.reduction == "vector" else 4),
        barriers=barriers,
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
    other = _SCORE_ISSUES * tile.scores + _LDMATRIX_ISSUES * tile.ldmatrix + tile.stores + tile.loads
    other += _COPY_ISSUES * tile.copies + _ADD_ISSUES * tile.additions
    other += _SPILL_ISSUES * math.pow(facts.spill_bytes / 4, _SPILL_POWER)
    issue = other + tile.mma * (mma_clocks if arch.mma_blocks_issue else 2)
    tensor = tile.mma * mma_clocks
    mufu = tile.scores * 32 / (arch.mufu_lanes_per_clk / arch.schedulers_per_sm)
    smem = (512 * (tile.ldmatrix + tile.copies) + 128 * (tile.stores + tile.loads)) / arch.smem_bytes_per_clk
    wanted = estimate_registers(spec, config) + _SCHEDULE_REGISTERS
    missing = max(0, wanted - register_cap(config, arch), wanted - arch.max_registers_per_thread)
    slowdown = (1 + _PRESSURE * missing) * (_ORDERED if spec.deterministic else 1.0)

    def scheduler_clocks(issue: float) -> float:
        busy = issue if arch.mma_blocks_issue else soft_max(issue, tensor, sharpness=2.0)
        return soft_max(busy, mufu, sharpness=4.0) * slowdown

    def block_clocks(together: int, tiles: float, masked: float) -> float:
        """SM time of blocks that share it from their start to their end."""
        mask = _MASK_ISSUES * tile.scores
        plain, mixed = (
            _tile_clocks(config, arch, tile, scheduler_clocks(each), smem, together) for each in (issue, issue + mask)
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
    add_rate = _VECTOR_ADD_BYTES if config.reduction == "vector" else _SCALAR_ADD_BYTES
    l2_clocks = 2 * tile_bytes / arch.l2_bytes_per_clk + 2 * tile_bytes / add_rate
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


def _tile_clocks(
    config: BwdConfig, arch: ArchLimits, tile: _Tile, scheduler: float, smem: float, resident: int
) -> float:
    """Clocks in which an SM does one tile of queries of each of its resident blocks."""
    # Fewer warps than schedulers leave some idle.
    warps_per_scheduler = max(1.0, config.num_warps * resident / arch.schedulers_per_sm)
    busy = soft_max(warps_per_scheduler * scheduler, config.num_warps * resident * smem, sharpness=_SMEM_SHARPNESS)
    # Dependent instructions leave gaps that only other warps fill.
    busy *= 1 + _GAP / math.pow(warps_per_scheduler, _GAP_SHARE)
    waits = tile.barriers * _BARRIER + (_HAND_OVER if config.roles == 2 else 0.0)
    # One stage is refilled behind dQ alone, a fifth of the work.
    hidden = busy if config.num_stages > 1 else 0.2 * busy
    return busy + waits / math.pow(resident, 1.5) + max(0.0, _LOAD_LATENCY - hidden) / resident


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
