"""What bounds one attention call on one GPU, and which configs may serve it: the facts behind ``fa2gen explain``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .codegen import render_kernel, template_hash
from .compile import CompiledKernel, compile_kernel
from .constraints import SmemPlan, default_config, estimate_registers, infeasible_reason, smem_plan
from .errors import CompileError, ToolchainError
from .hardware import Gpu, Occupancy, occupancy
from .launch import fwd_plan, heads_per_section
from .problem import Problem
from .roofline import (
    BYTES_PER_ELEMENT,
    Roofline,
    Traffic,
    compulsory_traffic,
    executed_flops,
    standard_traffic,
    uncached_traffic,
)
from .spec import FwdConfig, KernelSpec
from .tables import Match, TunedEntry, lookup
from .tables.merge import is_current
from .tables.store import cached_table, search_dirs, table_path
from .tuning.grid import register_cap
from .tuning.model import estimate_facts, predict
from .tuning.prediction import Facts, Prediction
from .tuning.shortlist import facts_of
from .tuning.space import exclusion_reason, legal_space


@dataclass(frozen=True)
class Selection:
    """Which config is explained, and why it.

    Attributes:
        config: The config.
        origin: ``"tuned"``: the table lookup's choice; ``"default"``; ``"given"`` by the caller.
        why: One sentence.
        match: What the lookup says for this call, whatever was asked for.
        excluded: Why the tuner does not try the config here; None where it does.
        illegal: True if the chip or the kernel family forbids it; the tuner also leaves out configs that would compile
            to the code of others, or lie outside its grid.
    """

    config: FwdConfig
    origin: str
    why: str
    match: Match
    excluded: str | None
    illegal: bool


@dataclass(frozen=True)
class Memory:
    """HBM traffic of standard attention and of this kernel, and what L2 holds.

    Attributes:
        standard: S and P written to memory and read back.
        tiled: Each byte of the kernel's tensors once.
        uncached: The kernel's re-reads of K and V all from memory.
        kv_bytes: K and V of one key/value head.
        heads_per_section: Query heads that the grid works on at a time, so that their K and V stay in half of L2.
    """

    standard: Traffic
    tiled: Traffic
    uncached: Traffic
    kv_bytes: int
    heads_per_section: int
    l2_bytes: int

    @property
    def l2_serves(self) -> bool:
        """K and V of a head fit in half of L2, so re-reads come from there and ``tiled`` is what to expect."""
        return 2 * self.kv_bytes <= self.l2_bytes


@dataclass(frozen=True)
class Registers:
    """Registers of a thread.

    Attributes:
        least: What accumulators and fragments need at least (``constraints.estimate_registers``).
        cap: What ``__launch_bounds__`` leaves a thread.
        facts: Registers and spills that everything after is computed from.
        compiled: The kernel they come from; None: they are the model's estimate.
        note: Why there is no compiled kernel; ``""`` where there is.
    """

    least: int
    cap: int
    facts: Facts
    compiled: CompiledKernel | None
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """Thread blocks of the call and how they fall on the SMs.

    Attributes:
        blocks: Thread blocks.
        wave: Blocks that the chip holds at a time; 0 if none fits.
    """

    blocks: int
    wave: int

    @property
    def waves(self) -> float:
        return self.blocks / self.wave if self.wave else 0.0

    @property
    def full_waves(self) -> int:
        return self.blocks // self.wave if self.wave else 0

    @property
    def tail(self) -> int:
        """Blocks of the last wave, if it is not full."""
        return self.blocks % self.wave if self.wave else 0

    @property
    def efficiency(self) -> float:
        """Waves over waves rounded up: the share of the block slots that equal blocks would fill."""
        return self.waves / (self.full_waves + bool(self.tail)) if self.wave else 0.0


@dataclass(frozen=True)
class MeasuredTime:
    """A measured entry of this kernel, GPU and size class.

    Attributes:
        entry: The entry; its problem may differ from the one explained.
        stale: Its templates have changed since.
        predicted_ms: The model's time for that entry's config and problem.
    """

    entry: TunedEntry
    stale: bool
    predicted_ms: float


@dataclass(frozen=True)
class ExclusionGroup:
    """Excluded configs whose reasons differ in numbers only.

    Attributes:
        reason: The common reason, with the range of each number.
        configs: Its configs with their own reasons, in the grid's order.
    """

    reason: str
    configs: tuple[tuple[FwdConfig, str], ...]


@dataclass(frozen=True)
class Explanation:
    """Everything that ``fa2gen explain`` shows."""

    gpu: Gpu
    spec: KernelSpec
    problem: Problem
    roofline: Roofline
    memory: Memory
    executed_flops: int
    selection: Selection
    smem: SmemPlan
    registers: Registers
    occupancy: Occupancy
    grid: Grid
    prediction: Prediction
    measured: tuple[MeasuredTime, ...]
    legal: int
    excluded: tuple[ExclusionGroup, ...]

    @property
    def flops(self) -> int:
        """FLOPs of the visible query-key pairs."""
        return self.memory.tiled.flops

    @property
    def tflops(self) -> float:
        """Predicted rate over ``flops``, TFLOP/s; 0 where the kernel cannot run."""
        return self.flops / self.prediction.ms / 1e9

    def smem_areas(self) -> list[tuple[str, int, int, str]]:
        """(name, offset, bytes, shape) of each tile in shared memory, by address."""
        config, plan, width = self.selection.config, self.smem, self.spec.native_head_dim
        areas = [("Q, then O", plan.q, plan.k - plan.q, f"{config.block_m} rows x {width}")]
        for name, start, end in (("K", plan.k, plan.v), ("V", plan.v, plan.p)):
            tile = (end - start) // config.num_stages
            for stage in range(config.num_stages):
                areas.append((f"{name} [{stage}]", start + stage * tile, tile, f"{config.block_n} keys x {width}"))
        tile = (plan.exchange - plan.p) // 2
        for turn in range(2 if tile else 0):
            areas.append((f"P [{turn}]", plan.p + turn * tile, tile, f"{config.block_m} rows x {config.step_n}"))
        if plan.barriers > plan.exchange:
            shape = f"a maximum or sum for each of {config.warps_n} x {config.block_m} rows"
            areas.append(("rows", plan.exchange, plan.barriers - plan.exchange, shape))
        if plan.total > plan.barriers:
            shape = f"a full and an empty one for each of {config.num_stages} stages"
            areas.append(("mbarriers", plan.barriers, plan.total - plan.barriers, shape))
        return areas


def explain(
    spec: KernelSpec, problem: Problem, gpu: Gpu, *, config: FwdConfig | str = "tuned", compile: bool = True
) -> Explanation:
    """Explains one call.

    Args:
        spec, problem, gpu: What runs where; the problem's lengths and heads at least 1.
        config: ``"tuned"``: the table lookup's choice; ``"default"``; or a config or its slug.
        compile: Ask ptxas for registers and spills where nvcc or a cached cubin is at hand; else they are estimated.

    Raises:
        ArgumentError: ``config`` is none of these, or the problem does not fit the spec or the grid.
    """
    selection = _select(spec, problem, gpu, config)
    chosen = selection.config
    registers = _registers(spec, chosen, gpu, compile=compile and not selection.illegal)
    smem = smem_plan(spec, chosen)
    resident = occupancy(gpu.arch, chosen.num_threads, registers.facts.registers, registers.facts.smem_bytes)
    space = legal_space(spec, gpu)
    return Explanation(
        gpu=gpu,
        spec=spec,
        problem=problem,
        roofline=Roofline.of(gpu),
        memory=_memory(spec, chosen, problem, gpu),
        executed_flops=executed_flops(spec, chosen, problem),
        selection=selection,
        smem=smem,
        registers=registers,
        occupancy=resident,
        grid=Grid(_blocks(spec, chosen, problem, gpu), resident.blocks_per_sm * gpu.num_sms),
        prediction=predict(spec, chosen, problem, gpu, registers.facts),
        measured=_measured(spec, problem, gpu, chosen, registers.facts),
        legal=len(space.configs),
        excluded=group_exclusions(space.excluded),
    )


def _select(spec: KernelSpec, problem: Problem, gpu: Gpu, config: FwdConfig | str) -> Selection:
    # What the run time would do is to be explained, also where FA2GEN_STRICT makes it an error.
    bucket = problem.bucket(gpu.num_sms)
    match = lookup(spec, bucket, gpu, template_hash=template_hash, strict=False)
    if config == "tuned":
        chosen, origin, why = match.config, "tuned", _why(match, spec, gpu, bucket.label())
    elif config == "default":
        chosen, origin, why = default_config(spec), "default", "asked for; legal for every kernel on every GPU"
    else:
        chosen = config if isinstance(config, FwdConfig) else FwdConfig.from_slug(config)
        origin, why = "given", "asked for"
    illegal = infeasible_reason(spec, chosen, gpu.arch)
    excluded = illegal or exclusion_reason(spec, chosen, gpu.arch)
    if excluded is None and chosen not in legal_space(spec, gpu).configs:
        excluded = "not in the tuner's grid"
    return Selection(chosen, origin, why, match, excluded, illegal is not None)


def _why(match: Match, spec: KernelSpec, gpu: Gpu, bucket: str) -> str:
    entry = match.entry
    if entry is None:
        tables = "all entries are stale" if match.stale else "no table has an entry to borrow from"
        return f"{tables}, so the default config, legal for every kernel on every GPU"
    other, size = entry.spec, entry.bucket.label()
    reasons = {
        "exact": f"the table of {match.gpu} has this kernel and size class {bucket}",
        "alignment": f"size class {bucket} of the kernel for 16-byte aligned rows",
        "nearest bucket": f"no entry for size class {bucket}; {size} is nearest, {match.distance:g} powers of two away",
        "native head dim": f"no entry for head dim {spec.head_dim}; its tiles are those of head dim {other.head_dim}",
        "other dtype": f"no entry for {spec.dtype}; {other.dtype} has the same tiles",
        "nearest gqa ratio": f"no entry for gqa ratio {spec.gqa_ratio}; {other.gqa_ratio} is nearest",
        "other gpu": f"no table of {gpu.name} has this kernel; {match.gpu} runs the same target {gpu.target}",
    }
    stale = f" ({match.staleness})" if match.stale else ""
    changes = f", {match.changes}" if match.changes else ""
    return f"{reasons[match.source]}{changes}; the entry is {entry.measurement.kind}{stale}"


def _memory(spec: KernelSpec, config: FwdConfig, problem: Problem, gpu: Gpu) -> Memory:
    return Memory(
        standard_traffic(spec, problem),
        compulsory_traffic(spec, problem),
        uncached_traffic(spec, config, problem),
        kv_bytes=2 * BYTES_PER_ELEMENT * problem.seqlen_k * spec.head_dim,
        heads_per_section=heads_per_section(spec, problem, gpu.l2_bytes),
        l2_bytes=gpu.l2_bytes,
    )


def _registers(spec: KernelSpec, config: FwdConfig, gpu: Gpu, *, compile: bool) -> Registers:
    least, cap = estimate_registers(spec, config), register_cap(config, gpu.arch)
    note = "not compiled"
    if compile:
        try:
            compiled = compile_kernel(render_kernel(spec, config), gpu.target)
            return Registers(least, cap, facts_of((compiled,)), compiled)
        except (ToolchainError, CompileError) as error:
            note = str(error)
    return Registers(least, cap, estimate_facts(spec, config, gpu), None, note)


def _blocks(spec: KernelSpec, config: FwdConfig, problem: Problem, gpu: Gpu) -> int:
    """Blocks of the launch of contiguous tensors."""

    def strides(seqlen: int, heads: int) -> tuple[int, int, int]:
        return seqlen * heads * spec.head_dim, heads * spec.head_dim, spec.head_dim

    q, k = strides(problem.seqlen_q, problem.num_heads_q), strides(problem.seqlen_k, problem.num_heads_k)
    plan = fwd_plan(
        spec,
        config,
        problem,
        strides={"q": q, "k": k, "v": k, "o": q},
        softmax_scale=float(spec.head_dim**-0.5),
        l2_bytes=gpu.l2_bytes,
    )
    x, y, z = plan.launches[0].grid
    return x * y * z


def _measured(
    spec: KernelSpec, problem: Problem, gpu: Gpu, config: FwdConfig, facts: Facts
) -> tuple[MeasuredTime, ...]:
    """Measured entries of exactly this kernel and size class; of a config that is in several tables the first."""
    key = (spec, problem.bucket(gpu.num_sms))
    found: dict[FwdConfig, MeasuredTime] = {}
    for root in search_dirs():
        table = cached_table(table_path(root, gpu.name, spec.kind))
        for entry in table.entries if table else ():
            if entry.key != key or entry.measurement.kind != "measured":
                continue
            known = facts if entry.config == config else None
            predicted = predict(spec, entry.config, entry.measurement.problem, gpu, known).ms
            found.setdefault(entry.config, MeasuredTime(entry, not is_current(entry, template_hash), predicted))
    return tuple(found.values())


# A number that stands alone; "sm_80" is a name.
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\d.])")


def group_exclusions(excluded: Sequence[tuple[FwdConfig, str]]) -> tuple[ExclusionGroup, ...]:
    """Groups configs whose reasons differ in numbers only, the largest group first."""
    groups: dict[str, list[tuple[FwdConfig, str]]] = {}
    for config, reason in excluded:
        groups.setdefault(_NUMBER.sub("#", reason), []).append((config, reason))
    named = [ExclusionGroup(_with_ranges([reason for _, reason in group]), tuple(group)) for group in groups.values()]
    return tuple(sorted(named, key=lambda group: -len(group.configs)))


def _with_ranges(reasons: Sequence[str]) -> str:
    """The reasons as one, with "lowest to highest" for each number that differs."""
    columns = zip(*([int(number) for number in _NUMBER.findall(reason)] for reason in reasons), strict=True)
    ranges = [f"{min(values)} to {max(values)}" if len(set(values)) > 1 else str(values[0]) for values in columns]
    filled = iter(ranges)
    return _NUMBER.sub(lambda _: next(filled), reasons[0])
