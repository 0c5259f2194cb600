"""Predicted kernel time of a forward from real facts: what ptxas says of the kernel, and the chip's rates.

The unit of account is one warp's softmax step: ``step_n`` keys against the warp's query rows. Its instructions are
counted from the algorithm; a scheduler's time for it, the SM's shared-memory and exp2 time and the exposed latencies
give a block's time, the grid's shape gives the kernel's, and the caches and HBM bound it from below.

Constants are fitted to 935 times of an H200: 11 to 52 configs of each of 24 cases (head dims 32 to 256, full and
causal, 512 and 4096 keys, bf16, 16k tokens), and 16 of each of nine cases of one to 128 queries of grouped heads. Of
the 24, the config ranked first is at most 7 % slower than the fastest (2 % in the mean) and the best of the first three
at most 2.2 %, and times within 1.5 times the best are off by 3 to 7 % (root mean square, each case's mean error taken
out; the mean error is 10 % at most, too short at 512 causal, too long at 4096).
``tests/unit/test_tuning_model.py`` holds this. On other chips the same constants are used with the chip's rates: a
prediction, and tables say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa2gen.constraints import estimate_registers, smem_plan
from fa2gen.hardware import ArchLimits, Gpu, occupancy
from fa2gen.problem import Problem
from fa2gen.roofline import tile_work
from fa2gen.spec import FwdConfig, KernelSpec

from .grid import register_cap
from .prediction import Facts, Prediction, soft_max
from .tiles import masked_steps, tile_counts
from .waves import Counts, grid_clocks

MODEL_VERSION = "sm80-fwd-2"

# Instruction issues of a scheduler besides the counted arithmetic: per 16-byte copy.
_COPY_ISSUES = 3.179
# ptxas drains the tensor pipe at the end of a basic block: clocks of a proof by step, which ends one with its vote, and
# of the online softmax, which has several.
_PROOF_DRAIN, _ONLINE_DRAIN = 62.2, 125.0
# An ldmatrix.x4 costs a scheduler 2 to 4 clocks.
_LDMATRIX_ISSUES = 3.611
# A store of P for the warp that shares the rows, and the wait for it, clocks.
_STORE_ISSUES, _PAIR_WAIT = 1.0, 125.8
# Gaps between dependent instructions with one warp on a scheduler, as a share of its time; more warps fill them, to
# this power of their number.
_GAP, _GAP_SHARE = 0.2809, 1.844
# How sharply shared memory bounds a step that it nearly fills (see prediction.soft_max).
_SMEM_SHARPNESS = 12.0
# How sharply L2 and HBM bound the whole.
_MEMORY_SHARPNESS = 6.0
# A block-wide barrier's skew where no other block fills in, clocks; with two resident blocks a third of it is seen. A
# ring's warps wait for the slowest only where it is a stage behind.
_BARRIER, _RING = 376.1, 173.1
# What a warp issues for a tile to poll a ring's mbarriers and to arrive on them.
_RING_ISSUES = 26.69
# Latency of a tile's loads from L2 or HBM under load, clocks.
_LOAD_LATENCY = 968.6
# Prologue and epilogue of a block: fixed, and for a tile of 128 rows by 128 columns, to this power of its size; more
# where nothing overlaps them. The proof of a block adds a pass over its output, for so much of such a tile.
_BLOCK_FIXED, _BLOCK_PER_TILE, _BLOCK_POWER, _BLOCK_ALONE = 1508.0, 3668.0, 0.8906, 1.213
_BLOCK_PROOF = 472.7
# Edges of resident blocks overlap: their sum counts as the number of blocks to this power.
_EDGE_SHARE = 0.6071
# Slowdown of warps with 64 rows: no room to fetch fragments ahead.
_WIDE_WARP = 0.1462
# Share of the maximum boost clock that holds (NVML, while the data was taken: 1.98 of 1.98 GHz).
_SUSTAINED_CLOCK = 1.0
# Launch and drain of a grid, milliseconds.
_LAUNCH_MS = 0.004594
# Registers beyond the lower estimate of constraints.py that a schedule without stalls wants.
_SCHEDULE_REGISTERS = 16
# What ptxas takes beyond that estimate where it may: usually (229 kernels: within 16, one standard deviation), for a
# proof by block, for a causal mask; less for Q in registers, which the estimate counts in full. It does without so many
# before it spills.
_USUAL_REGISTERS, _PROOF_REGISTERS, _CAUSAL_REGISTERS, _Q_REGISTERS, _SPARE_REGISTERS = 62, 12, 6, 14, 16
# Slowdown for each register that is missing for such a schedule.
_PRESSURE = 0.01527
# Issues for the 4-byte words that are spilled (stores and loads), to this power of their number: ptxas first spills
# what the masked tiles or the ends of a block alone need.
_SPILL_ISSUES, _SPILL_POWER = 9.179, 0.6292
# Masked steps: compares, selects, and the -inf guards, for rows and columns; nothing of it overlaps.
_MASK_ISSUES_PER_SCORE = 8.0
# What is left over at the end of a causal grid, in mean blocks.
_CAUSAL_REST = 0.3212
# A masked tile takes so much of the way from its warps' mean time to the longest.
_SKEW = 0.2231


def estimate_facts(spec: KernelSpec, config: FwdConfig, gpu: Gpu) -> Facts:
    """Facts before compiling: ptxas takes the registers that it mostly takes, if there are so many, or spills."""
    wanted = estimate_registers(spec, config) + _USUAL_REGISTERS
    wanted += _PROOF_REGISTERS if config.proof == "block" else 0
    wanted += _CAUSAL_REGISTERS if spec.causal else 0
    wanted -= _Q_REGISTERS if config.q_in_regs else 0
    cap = register_cap(config, gpu.arch)
    spilled = max(0, wanted - cap - _SPARE_REGISTERS)
    return Facts(min(cap, wanted), 9 * spilled, smem_plan(spec, config).total)


def predict(spec: KernelSpec, config: FwdConfig, problem: Problem, gpu: Gpu, facts: Facts) -> Prediction:
    """Kernel time of a config on a problem."""
    arch = gpu.arch
    resident = occupancy(arch, config.num_threads, facts.registers, facts.smem_bytes).blocks_per_sm
    if resident == 0:
        return Prediction(math.inf, 0)
    work = tile_work(spec, config, problem)
    blocks = work.heads * work.blocks
    if blocks == 0:
        return Prediction(_LAUNCH_MS, resident)
    step = _step_clocks(spec, config, gpu, facts)
    _, masked_tiles, longest = tile_counts(spec, config, problem)
    counts = Counts(work.tiles / work.blocks, masked_tiles / work.blocks, longest)
    size = config.block_m * spec.native_head_dim / 16384

    def block_clocks(together: int, tiles: float, masked: float) -> float:
        """SM time of blocks that share it from their start to their end."""
        plain, mixed = (_tile_clocks(step, spec, config, arch, together, masked=each) for each in (False, True))
        edge = _BLOCK_FIXED + _BLOCK_PER_TILE * math.pow(size, _BLOCK_POWER)
        edge += _BLOCK_PROOF * size if config.proof == "block" else 0.0
        edge *= _BLOCK_ALONE if together == 1 else math.pow(together, _EDGE_SHARE)
        return (tiles - masked) * plain + masked * mixed + edge

    clocks = grid_clocks(block_clocks, counts, blocks, resident, gpu.num_sms, _CAUSAL_REST if spec.causal else None)
    per_ms = 1e6 * gpu.boost_ghz * _SUSTAINED_CLOCK
    steps_sm = work.heads * work.tiles * (config.block_n / config.step_n) * config.num_warps / gpu.num_sms
    schedulers = arch.schedulers_per_sm
    shares = {
        "issue": steps_sm / schedulers * step.issue / per_ms,
        "tensor": steps_sm / schedulers * step.tensor / per_ms,
        "mufu": steps_sm / schedulers * step.mufu / per_ms,
        "shared memory": steps_sm * step.smem / per_ms,
        "l2": _l2_bytes(spec, config, work.heads, work.tiles) / (arch.l2_bytes_per_clk * gpu.num_sms) / per_ms,
        "hbm": problem.min_bytes(spec) / (0.9e6 * gpu.hbm_gbs),
    }
    bounds = (clocks / per_ms, shares["l2"], shares["hbm"])
    return Prediction(_LAUNCH_MS + soft_max(*bounds, sharpness=_MEMORY_SHARPNESS), resident, shares)


@dataclass(frozen=True)
class _Step:
    """Clocks of one warp's softmax step if each resource were alone, and of its scheduler with the schedule's losses.

    Attributes:
        issue, tensor, mufu: Of its scheduler.
        smem: Of its SM.
        plain_clocks, masked_clocks: Of its scheduler, in a step without and with mask and running maximum.
    """

    issue: float
    tensor: float
    mufu: float
    smem: float
    plain_clocks: float
    masked_clocks: float


def _step_clocks(spec: KernelSpec, config: FwdConfig, gpu: Gpu, facts: Facts) -> _Step:
    arch = gpu.arch
    head_dim, step_n, shared = spec.native_head_dim, config.step_n, config.warps_n
    row_tiles = config.warp_rows // 16
    # Warps that share rows split the keys of Q K^T and the columns of P V; each reads all of Q and P.
    mma = row_tiles * step_n * head_dim / 64 / shared
    ldmatrix = 2 * (step_n / 16) * (head_dim / 16) / shared
    ldmatrix += 0 if config.q_in_regs else row_tiles * head_dim / 16
    scores = row_tiles * step_n / 2 / shared
    stores = 0.0
    if shared > 1:
        ldmatrix += row_tiles * step_n / 16
        stores = scores / 2
    copies = step_n * head_dim * 4 / (512 * config.num_warps) * (1 if spec.alignment == 16 else 8)
    # Scale, exp2, row sum, half a pack for each score.
    other = 3.5 * scores + _COPY_ISSUES * copies + _STORE_ISSUES * stores
    # Running maximum of each score, factors and shuffles of its rows, and the rescale of the output.
    rescale = row_tiles * head_dim / 2 / shared
    online = scores + 20 * row_tiles
    masked = _MASK_ISSUES_PER_SCORE * scores
    drain = _PAIR_WAIT if shared > 1 else 0.0
    masked_drain = 0.0
    if config.softmax == "online":
        other += online + rescale
        drain += _ONLINE_DRAIN
    else:
        masked += online + rescale
        masked_drain = _ONLINE_DRAIN
        drain += _PROOF_DRAIN if config.proof == "step" else 0.0
    other += _SPILL_ISSUES * math.pow(facts.spill_bytes / 4, _SPILL_POWER)
    mma_clocks = arch.mma_cycles / gpu.tensor_rate
    issue = other + _LDMATRIX_ISSUES * ldmatrix + mma * (mma_clocks if arch.mma_blocks_issue else 2)
    tensor, mufu = mma * mma_clocks, scores * 32 / (arch.mufu_lanes_per_clk / arch.schedulers_per_sm)
    wanted = estimate_registers(spec, config) + _SCHEDULE_REGISTERS
    missing = max(0, wanted - register_cap(config, arch), wanted - arch.max_registers_per_thread)
    pressure = 1 + _PRESSURE * missing + (_WIDE_WARP if row_tiles > 3 else 0.0)

    def scheduler_clocks(issue: float) -> float:
        # Tensor cores may run beside other instructions, but FlashAttention's phases depend on each other.
        busy = issue if arch.mma_blocks_issue else soft_max(issue, tensor, sharpness=2.0)
        return soft_max(busy, mufu, sharpness=4.0) * pressure + drain

    return _Step(
        issue=issue,
        tensor=tensor,
        mufu=mufu,
        smem=(512 * ldmatrix + 512 * copies + 128 * stores) / arch.smem_bytes_per_clk,
        plain_clocks=scheduler_clocks(issue),
        masked_clocks=scheduler_clocks(issue + masked) + masked_drain,
    )


def _tile_clocks(
    step: _Step, spec: KernelSpec, config: FwdConfig, arch: ArchLimits, resident: int, *, masked: bool
) -> float:
    """Clocks in which an SM does one key tile of each of its resident blocks."""
    steps = config.block_n / config.step_n
    # Fewer warps than schedulers leave some idle.
    warps_per_scheduler = max(1.0, config.num_warps * resident / arch.schedulers_per_sm)
    plain, online = masked_steps(spec, config) if masked else (1.0, 0.0)
    scheduler = plain * step.plain_clocks
    if online:
        # A block's warps mask different steps, and wait for each other.
        scheduler += online * step.masked_clocks
        scheduler += _SKEW * (step.masked_clocks - scheduler)
    polls = _RING_ISSUES if config.pipeline == "ring" else 0.0
    busy = soft_max(
        warps_per_scheduler * (steps * scheduler + polls),
        steps * config.num_warps * resident * step.smem * (plain + online),
        sharpness=_SMEM_SHARPNESS,
    )
    # Dependent instructions leave gaps that only other warps fill.
    busy *= 1 + _GAP / math.pow(warps_per_scheduler, _GAP_SHARE)
    if config.pipeline == "ring":
        exposed = _RING / math.pow(resident, 1.5)
    else:
        exposed = (2 if config.num_stages == 1 else 1) * _BARRIER / math.pow(resident, 1.5)
    if config.num_stages == 1:
        # Half a tile's work hides each load: K's behind the softmax and PV, V's behind QK.
        exposed += 2 * max(0.0, _LOAD_LATENCY - 0.3 * busy) / resident
    else:
        exposed += max(0.0, _LOAD_LATENCY - (config.num_stages - 1) * busy) / resident
    return busy + exposed


def _l2_bytes(spec: KernelSpec, config: FwdConfig, heads: int, tiles: int) -> float:
    return heads * tiles * config.block_n * spec.native_head_dim * 4.0
