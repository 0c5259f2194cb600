"""Predicted kernel time from real facts: what ptxas says of the kernel, and the chip's rates.

The unit of account is one warp's softmax step: ``step_n`` keys against the warp's query rows. Its instructions are
counted from the algorithm; a scheduler's time for it, the SM's shared-memory and exp2 time and the exposed latencies
give a block's time, the grid's shape gives the kernel's, and the caches and HBM bound it from below.

Constants are fitted on an H200 to about 70 configs of each of eight cases (head dims 64 and 128, full and causal, 512
and 4096 keys, bf16, 16k tokens). There the config ranked first is at most 8 % slower than the fastest (half of the
cases: 0 %), the best of its first three at most 2 %, and times within 1.5 times the best are off by 5 % (root mean
square, each case's mean error taken out). ``tests/unit/test_tuning_model.py`` holds this. On other chips the same
constants are used with the chip's rates: a prediction, and tables say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fa2gen.constraints import estimate_registers, smem_plan
from fa2gen.hardware import Gpu, get_gpu, occupancy
from fa2gen.problem import Problem
from fa2gen.roofline import tile_work
from fa2gen.spec import FwdConfig, KernelSpec

from .space import register_cap

MODEL_VERSION = "sm80-fwd-1"
CALIBRATED_ON = "h200"
"""The product whose measured times the constants are fitted to and judged by."""

# Instruction issues of a scheduler besides the counted arithmetic: fixed per softmax step, and per 16-byte copy.
_STEP_ISSUES = 11.01
_COPY_ISSUES = 2.196
# Tensor latency that ptxas drains at the end of every basic block, clocks per step.
_STEP_DRAIN = 9.42
# An ldmatrix.x4 costs a scheduler 2 to 4 clocks.
_LDMATRIX_ISSUES = 3.347
# Gaps between dependent instructions with one warp on a scheduler, as a share of its time; more warps fill them.
_GAP = 0.2791
# How sharply shared memory bounds a step that it nearly fills (see _soft_max).
_SMEM_SHARPNESS = 8.0
# A block-wide barrier's skew where no other block fills in, clocks; with two resident blocks a third of it is seen.
_BARRIER = 330.4
# Latency of a tile's loads from L2 or HBM under load, clocks.
_LOAD_LATENCY = 807.7
# Prologue and epilogue of a block: fixed, and for a tile of 128 rows by 128 columns; more where nothing overlaps it.
_BLOCK_FIXED, _BLOCK_PER_TILE, _BLOCK_ALONE = 1895.0, 2674.0, 1.179
# Edges of resident blocks overlap: their sum counts as the number of blocks to this power.
_EDGE_SHARE = 0.483
# Slowdown of warps with 64 rows: no room to fetch fragments ahead.
_WIDE_WARP = 0.1146
# Share of the maximum boost clock that holds under tensor load (H200: 1.79 of 1.98 GHz).
_SUSTAINED_CLOCK = 0.905
# Launch and drain of a grid, milliseconds.
_LAUNCH_MS = 2.5e-3
# Registers beyond the lower estimate of constraints.py that a schedule without stalls wants.
_SCHEDULE_REGISTERS = 23
# Slowdown for each register that is missing for such a schedule.
_PRESSURE = 0.0051
# Spilled bytes (stores and loads) that the prologue accounts for; beyond, stores and loads sit in the loop.
_HARMLESS_SPILL = 26.85
# Masked steps: compares, selects, and the -inf guards.
_MASK_ISSUES_PER_SCORE = 1.744


@dataclass(frozen=True)
class Facts:
    """What ptxas and the launch rule say of a kernel.

    Attributes:
        registers: Registers per thread.
        spill_bytes: Spill stores plus loads, bytes per thread.
        smem_bytes: Shared memory of a block.
    """

    registers: int
    spill_bytes: int
    smem_bytes: int


@dataclass(frozen=True)
class Prediction:
    """Predicted kernel time.

    Attributes:
        ms: Milliseconds.
        blocks_per_sm: Resident blocks; with 0 the kernel cannot run and ``ms`` is infinite.
        shares: Resource to its time in milliseconds if it were alone: ``"issue"`` (tensor instructions included where
            they block the scheduler), ``"tensor"``, ``"mufu"``, ``"shared memory"``, ``"l2"``, ``"hbm"``.
    """

    ms: float
    blocks_per_sm: int
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        return max(self.shares, key=lambda name: self.shares[name]) if self.shares else "nothing fits"


def validity(gpu: Gpu) -> str:
    """What is known of the model's truth on a chip."""
    if gpu.name == CALIBRATED_ON:
        return "calibrated on this chip"
    return f"calibrated on an {get_gpu(CALIBRATED_ON).title}; its transfer to the {gpu.title} is unvalidated"


def estimate_facts(spec: KernelSpec, config: FwdConfig, gpu: Gpu) -> Facts:
    """Facts before compiling: ptxas takes the registers a good schedule wants, if there are so many, or spills."""
    needed = estimate_registers(spec, config)
    cap = register_cap(config, gpu.arch)
    spilled = max(0, needed + _SCHEDULE_REGISTERS // 2 - cap)
    return Facts(min(cap, needed + _SCHEDULE_REGISTERS), 8 * spilled, smem_plan(spec, config).total)


def predict(spec: KernelSpec, config: FwdConfig, problem: Problem, gpu: Gpu, facts: Facts | None = None) -> Prediction:
    """Kernel time of a config on a problem.

    Args:
        spec, config, problem, gpu: What runs where.
        facts: From the compiled kernel; estimated if None.
    """
    facts = facts or estimate_facts(spec, config, gpu)
    arch = gpu.arch
    resident = occupancy(arch, config.num_threads, facts.registers, facts.smem_bytes).blocks_per_sm
    if resident == 0:
        return Prediction(math.inf, 0)
    step = _step_clocks(spec, config, gpu, facts)
    tiles, masked_tiles, longest = _tile_counts(spec, config, problem)
    blocks = problem.batch * problem.num_heads_q * math.ceil(problem.seqlen_q / config.block_m)
    if blocks == 0:
        return Prediction(_LAUNCH_MS, resident)

    # One SM with `resident` blocks: clocks for a tile of each of them, with and without a mask.
    tile = _tile_clocks(step, config, resident, arch.schedulers_per_sm, masked=False)
    masked_tile = _tile_clocks(step, config, resident, arch.schedulers_per_sm, masked=True)
    size = config.block_m * spec.native_head_dim / 16384
    edge = (_BLOCK_FIXED + _BLOCK_PER_TILE * size) * (
        _BLOCK_ALONE if resident == 1 else math.pow(resident, _EDGE_SHARE)
    )
    heads = problem.batch * problem.num_heads_q
    work = heads * (tiles * tile + masked_tiles * (masked_tile - tile)) + blocks * edge
    clocks = _grid_clocks(work / resident, blocks, resident, gpu.num_sms, longest * tile + edge, spec.causal)

    ghz = gpu.boost_ghz * _SUSTAINED_CLOCK
    per_ms = 1e6 * ghz
    steps_sm = heads * tiles * (config.block_n / config.step_n) * config.num_warps / gpu.num_sms
    schedulers = arch.schedulers_per_sm
    shares = {
        "issue": steps_sm / schedulers * step.issue / per_ms,
        "tensor": steps_sm / schedulers * step.tensor / per_ms,
        "mufu": steps_sm / schedulers * step.mufu / per_ms,
        "shared memory": steps_sm * step.smem / per_ms,
        "l2": _l2_bytes(spec, config, heads, tiles) / (arch.l2_bytes_per_clk * gpu.num_sms) / per_ms,
        "hbm": problem.min_bytes(spec) / (0.9e6 * gpu.hbm_gbs),
    }
    bounds = (clocks / per_ms, shares["l2"], shares["hbm"])
    return Prediction(_LAUNCH_MS + _soft_max(*bounds, sharpness=6.0), resident, shares)


@dataclass(frozen=True)
class _Step:
    """Clocks of one warp's softmax step: of its scheduler (issue, tensor, mufu), of its SM (smem), and its latency."""

    issue: float
    tensor: float
    mufu: float
    smem: float
    masked_issue: float
    pressure: float
    overlap: bool

    def scheduler_clocks(self, masked: bool) -> float:
        """A scheduler's time for the step, the schedule's losses included."""
        issue = self.issue + (self.masked_issue if masked else 0.0)
        if not self.overlap:
            busy = issue
        else:
            # Tensor cores run beside other instructions, but FlashAttention's phases depend on each other.
            busy = _soft_max(issue, self.tensor, sharpness=2.0)
        return _soft_max(busy, self.mufu, sharpness=4.0) * self.pressure + _STEP_DRAIN


def _step_clocks(spec: KernelSpec, config: FwdConfig, gpu: Gpu, facts: Facts) -> _Step:
    arch = gpu.arch
    head_dim, step_n = spec.native_head_dim, config.step_n
    row_tiles = config.block_m // config.num_warps // 16
    mma = row_tiles * step_n * head_dim / 64
    ldmatrix = 2 * (step_n / 16) * (head_dim / 16) + (0 if config.q_in_regs else row_tiles * head_dim / 16)
    scores = row_tiles * step_n / 2
    copies = step_n * head_dim * 4 / (512 * config.num_warps) * (1 if spec.alignment == 16 else 8)
    # Scale, exp2, row sum, half a pack for each score.
    other = 3.5 * scores + _STEP_ISSUES + _COPY_ISSUES * copies
    # Running maximum of each score, and the rescale of the output with the shuffles and factors of its rows.
    online = scores + row_tiles * (head_dim / 2 + 20)
    masked = _MASK_ISSUES_PER_SCORE * scores
    if config.softmax == "online":
        other += online
    else:
        masked += online
    other += max(0, facts.spill_bytes - _HARMLESS_SPILL) / 4
    mma_clocks = arch.mma_cycles / gpu.tensor_rate
    issue = other + _LDMATRIX_ISSUES * ldmatrix + mma * (mma_clocks if arch.mma_blocks_issue else 2)
    wanted = estimate_registers(spec, config) + _SCHEDULE_REGISTERS
    missing = max(0, wanted - register_cap(config, arch), wanted - arch.max_registers_per_thread)
    return _Step(
        issue=issue,
        tensor=mma * mma_clocks,
        mufu=scores * 32 / (arch.mufu_lanes_per_clk / arch.schedulers_per_sm),
        smem=(512 * ldmatrix + 512 * copies) / arch.smem_bytes_per_clk,
        masked_issue=masked,
        pressure=1 + _PRESSURE * missing + (_WIDE_WARP if row_tiles > 3 else 0.0),
        overlap=not arch.mma_blocks_issue,
    )


def _tile_clocks(step: _Step, config: FwdConfig, resident: int, schedulers: int, masked: bool) -> float:
    """Clocks in which an SM does one key tile of each of its resident blocks."""
    steps = config.block_n / config.step_n
    warps_per_scheduler = config.num_warps * resident / schedulers
    busy = _soft_max(
        steps * warps_per_scheduler * step.scheduler_clocks(masked),
        steps * config.num_warps * resident * step.smem,
        sharpness=_SMEM_SHARPNESS,
    )
    # Dependent instructions leave gaps that only other warps fill.
    busy *= 1 + _GAP / warps_per_scheduler
    barriers = 2 if config.num_stages == 1 else 1
    exposed = barriers * _BARRIER / math.pow(resident, 1.5)
    if config.num_stages == 1:
        # Half a tile's work hides each load: K's behind the softmax and PV, V's behind QK.
        exposed += 2 * max(0.0, _LOAD_LATENCY - 0.3 * busy) / resident
    else:
        exposed += max(0.0, _LOAD_LATENCY - (config.num_stages - 1) * busy) / resident
    return busy + exposed


def _tile_counts(spec: KernelSpec, config: FwdConfig, problem: Problem) -> tuple[int, int, int]:
    """Key tiles visited for one head: all, those on the masked path, and those of the longest block."""
    block_m, block_n, seqlen_q, seqlen_k = config.block_m, config.block_n, problem.seqlen_q, problem.seqlen_k
    work, key_tiles = tile_work(spec, config, problem), math.ceil(seqlen_k / block_n)
    always_masked = 1 if config.softmax == "guarded" or seqlen_k % block_n else 0
    if not spec.causal:
        return work.tiles, work.blocks * min(always_masked, key_tiles), key_tiles
    if work.tiles == 0:
        return 0, 0, 0
    offset = seqlen_k - seqlen_q

    def masked_tiles(block: int) -> int:
        first_row, rows = block * block_m, min(seqlen_q, (block + 1) * block_m)
        count = math.ceil((rows + offset) / block_n)
        return min(count, max(always_masked, count - max(0, (first_row + 1 + offset) // block_n)))

    # Blocks before `first` see nothing. Between it and the last one the count repeats: there are as many different ones
    # as blocks in a period, and a call may have millions of blocks.
    first, last = max(0, -offset) // block_m, work.blocks - 1
    masked = sum(masked_tiles(block) for block in {first, last})
    period = block_n // math.gcd(block_m, block_n)
    for start in range(first + 1, min(last, first + 1 + period)):
        masked += masked_tiles(start) * math.ceil((last - start) / period)
    return work.tiles, masked, key_tiles


def _grid_clocks(work: float, blocks: int, resident: int, num_sms: int, longest: float, causal: bool) -> float:
    """Clocks of the whole grid.

    Args:
        work: Sum over blocks of the SM time of ``resident`` of them sharing an SM, divided by ``resident``.
        longest: SM time of the longest block under full residency.
    """
    even = work / num_sms
    per_block = work * resident / blocks
    if causal:
        # Longest first: the short blocks at the end fill the gaps; about half a mean block is left over.
        return max(even + 0.5 * per_block / resident, _alone(resident) * longest)
    waves, rest = divmod(blocks, num_sms * resident)
    clocks = waves * per_block
    if rest:
        # The last wave spreads over the SMs: fewer blocks on an SM run faster, but not in proportion.
        on_busiest = math.ceil(rest / num_sms)
        clocks += per_block * max(_alone(resident), on_busiest / resident)
    return max(even, clocks)


def _alone(resident: int) -> float:
    """Time of a block that has an SM to itself, as a share of its time among ``resident`` blocks."""
    return 1.0 if resident == 1 else 1.25 / resident


def _l2_bytes(spec: KernelSpec, config: FwdConfig, heads: int, tiles: int) -> float:
    return heads * tiles * config.block_n * spec.native_head_dim * 4.0


def _soft_max(*times: float, sharpness: float) -> float:
    """Combined time of resources that overlap: the largest, more where others come near it."""
    largest = max(times)
    if largest == 0:
        return 0.0
    return largest * math.pow(math.fsum(math.pow(time / largest, sharpness) for time in times), 1 / sharpness)
