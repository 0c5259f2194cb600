"""What bounds one attention call on one GPU, and which configs may serve it: the facts behind ``fa2gen explain``."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .codegen import param_struct, render_kernel, template_hash
from .compile import CompiledKernel, compile_kernel
from .constraints import config_reason, default_config_on, estimate_registers, infeasible_reason, smem_bytes
from .constraints_sm90 import MAX_WARPGROUPS, RegisterSplit, compile_target, register_split
from .errors import CompileError, InfeasibleError, ToolchainError
from .explain_grid import Grid as Grid
from .explain_smem import Area, smem_areas
from .hardware import Gpu, Occupancy, occupancy
from .launch import Launch, LaunchPlan, bwd_plan, fwd_plan
from .problem import Problem
from .roofline import (
    BYTES_PER_ELEMENT,
    Roofline,
    Traffic,
    compulsory_traffic,
    executed_flops,
    packed_heads,
    standard_traffic,
    uncached_traffic,
)
from .spec import BwdConfig, Config, FwdSm90Config, KernelSpec, config_from_slug
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

    config: Config
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
        tiled: Each byte that the kernel needs once.
        uncached: What the kernel reads again all from memory.
        reread_bytes: What blocks read again of one head: K and V, or of a backward Q, dO and the sums of dQ.
        heads_per_section: Heads (those with blocks of their own) that the grid works on at a time.
        heads_by_l2: As many as suit L2 alone; a fixed order of a backward's sums may ask for more.
        section_bytes: ``reread_bytes`` of the heads at a time; of a forward the most of any section.
        used_share: Share of them that blocks are at on average; less than 1 in a backward with a causal mask.
        tail_blocks: Query blocks (or tiles) of each head of a causal forward, its first, that come after all sections.
        tail_bytes: K and V that these read at most, of all heads together; 0 without them.
    """

    standard: Traffic
    tiled: Traffic
    uncached: Traffic
    reread_bytes: int
    heads_per_section: int
    heads_by_l2: int
    section_bytes: int
    used_share: float
    tail_blocks: int
    tail_bytes: int
    l2_bytes: int

    @property
    def used_bytes(self) -> int:
        """What blocks read again at a time, on average."""
        return round(self.section_bytes * self.used_share)

    @property
    def l2_serves(self) -> bool:
        """What blocks read again at a time fits in L2: it comes from there, and ``tiled`` is what to expect."""
        return max(self.used_bytes, self.tail_bytes) <= self.l2_bytes


@dataclass(frozen=True)
class Registers:
    """Registers of a thread.

    Attributes:
        least: What accumulators and fragments need at least (``constraints.estimate_registers``).
        cap: What ``__launch_bounds__`` leaves a thread.
        facts: Registers and spills that everything after is computed from; of a backward, of its main kernel.
        compiled: The kernel they come from; None: they are the model's estimate.
        note: Why there is no compiled kernel; ``""`` where there is.
        split: What a thread of the producer and of a consumer has once they have shared out the launch's registers;
            None: every thread keeps its own.
    """

    least: int
    cap: int
    facts: Facts
    compiled: CompiledKernel | None
    note: str = ""
    split: RegisterSplit | None = None


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
    configs: tuple[tuple[Config, str], ...]


@dataclass(frozen=True)
class Explanation:
    """Everything that ``fa2gen explain`` shows.

    Shared memory, registers, occupancy and grid are those of the main kernel; ``plan`` has all launches.
    """

    gpu: Gpu
    spec: KernelSpec
    problem: Problem
    roofline: Roofline
    memory: Memory
    executed_flops: int
    selection: Selection
    plan: LaunchPlan
    smem_bytes: int
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
        return 0.0 if self.selection.illegal else self.flops / self.prediction.ms / 1e9

    def smem_areas(self) -> list[Area]:
        """Each tile in shared memory, by address."""
        return smem_areas(self.spec, self.selection.config)


def explain(
    spec: KernelSpec, problem: Problem, gpu: Gpu, *, config: Config | str = "tuned", compile: bool = True
) -> Explanation:
    """Explains one call.

    Args:
        spec, problem, gpu: What runs where; the problem's lengths and heads at least 1.
        config: ``"tuned"``: the table lookup's choice; ``"default"``; or a config or its slug.
        compile: Ask ptxas for registers and spills where nvcc or a cached cubin is at hand; else they are estimated.

    Raises:
        ArgumentError: ``config`` is none of these, or the problem does not fit the spec or the grid.
        InfeasibleError: ``config`` has a number of warpgroups that no kernel of its family has.
    """
    selection = _select(spec, problem, gpu, config)
    chosen = selection.config
    registers = _registers(spec, chosen, gpu, compile=compile and not selection.illegal)
    plan = _plan(spec, chosen, problem, gpu)
    resident = occupancy(gpu.arch, chosen.num_threads, registers.facts.registers, registers.facts.smem_bytes)
    space = legal_space(spec, gpu, chosen.family)
    return Explanation(
        gpu=gpu,
        spec=spec,
        problem=problem,
        roofline=Roofline.of(gpu, chosen.family),
        memory=_memory(spec, chosen, problem, gpu, plan),
        executed_flops=executed_flops(spec, chosen, problem),
        selection=selection,
        plan=plan,
        smem_bytes=smem_bytes(spec, chosen),
        registers=registers,
        occupancy=resident,
        grid=_grid(spec, chosen, plan, resident.blocks_per_sm * gpu.num_sms),
        prediction=predict(spec, chosen, problem, gpu, registers.facts),
        measured=_measured(spec, problem, gpu, chosen, registers.facts),
        legal=len(space.configs),
        excluded=group_exclusions(space.excluded),
    )


def _select(spec: KernelSpec, problem: Problem, gpu: Gpu, config: Config | str) -> Selection:
    # What the run time would do is to be explained, also where FA2GEN_STRICT makes it an error.
    bucket = problem.bucket(gpu.num_sms)
    match = lookup(spec, bucket, gpu, template_hash=template_hash, strict=False)
    if config == "tuned":
        chosen, origin, why = match.config, "tuned", _why(match, spec, gpu, bucket.label())
    elif config == "default":
        chosen = default_config_on(spec, gpu.arch)
        origin, why = "default", f"asked for; what runs on {gpu.arch.target} where nothing is tuned"
    else:
        chosen = config_from_slug(spec.kind, config) if isinstance(config, str) else config
        origin, why = "given", "asked for"
        if isinstance(chosen, FwdSm90Config) and not 1 <= chosen.warpgroups <= MAX_WARPGROUPS:
            # Other configs are explained although no kernel has them; of these not even the registers are known.
            raise InfeasibleError(f"config {chosen.slug()} cannot be explained: {config_reason(chosen)}")
    illegal = infeasible_reason(spec, chosen, gpu.arch)
    excluded = illegal or exclusion_reason(spec, chosen, gpu.arch)
    if excluded is None and chosen not in legal_space(spec, gpu, chosen.family).configs:
        excluded = "not in the tuner's grid"
    return Selection(chosen, origin, why, match, excluded, illegal is not None)


def _why(match: Match, spec: KernelSpec, gpu: Gpu, bucket: str) -> str:
    entry = match.entry
    if entry is None:
        tables = "all entries are stale" if match.stale else "no table has an entry to borrow from"
        return f"{tables}, so the default config of {gpu.target}"
    other, size = entry.spec, entry.bucket.label()
    reasons = {
        "exact": f"the table of {match.gpu} has this kernel and size class {bucket}",
        "alignment": f"size class {bucket} of the kernel for 16-byte aligned rows",
        "nearest bucket": f"no entry for size class {bucket}; {size} is nearest, {match.distance:g} powers of two away",
        "native head dim": f"no entry for head dim {spec.head_dim}; its tiles are those of head dim {other.head_dim}",
        "other dtype": f"no entry for {spec.dtype}; {other.dtype} has the same tiles",
        "non-deterministic entry": "no entry for deterministic sums; the kernel without them has the same tiles",
        "nearest gqa ratio": f"no entry for gqa ratio {spec.gqa_ratio}; {other.gqa_ratio} is nearest",
        "other gpu": f"no table of {gpu.name} has this kernel; {match.gpu} runs the same target {gpu.target}",
    }
    stale = f" ({match.staleness})" if match.stale else ""
    changes = f", {match.changes}" if match.changes else ""
    return f"{reasons[match.source]}{changes}; the entry is {entry.measurement.kind}{stale}"


def _memory(spec: KernelSpec, config: Config, problem: Problem, gpu: Gpu, plan: LaunchPlan) -> Memory:
    section = by_l2 = _param(plan, spec, config, "heads_per_section")
    share, tail, tail_bytes = 1.0, 0, 0
    if isinstance(config, BwdConfig):
        # Q and dO, and sums in float32; of a group's heads that share blocks, those of one at a time.
        head = problem.seqlen_q * (2 * BYTES_PER_ELEMENT * spec.head_dim + 4 * spec.native_head_dim)
        section_bytes = section * head
        # The heads' blocks of the same keys start together, and read the queries that see these.
        share = problem.visible_pairs(spec.causal) / (problem.seqlen_q * problem.seqlen_k)
        if spec.deterministic:
            unordered = replace(spec, deterministic=False)
            by_l2 = _param(_plan(unordered, config, problem, gpu), unordered, config, "heads_per_section")
    else:
        head = 2 * BYTES_PER_ELEMENT * problem.seqlen_k * spec.head_dim
        # A forward counts query heads, also where it packs those of a group.
        packed, tail = packed_heads(spec, config), _param(plan, spec, config, "tail_m_blocks")
        if isinstance(config, FwdSm90Config) and not spec.causal:
            # Tiles follow each other head by head: as many heads as the tiles that are under way.
            tiles = -(-problem.seqlen_q // config.block_m)
            section = min(problem.batch * problem.num_heads_q, -(-_main_launch(plan, spec).grid[0] // tiles))
        section = by_l2 = section * packed
        section_bytes = _kv_heads_at_a_time(problem, section) * head
        rows = -(-tail * config.block_m // packed)
        keys = min(problem.seqlen_k, max(0, rows + problem.seqlen_k - problem.seqlen_q)) if rows else 0
        tail_bytes = problem.batch * problem.num_heads_k * 2 * BYTES_PER_ELEMENT * keys * spec.head_dim
    return Memory(
        standard_traffic(spec, problem),
        compulsory_traffic(spec, config, problem),
        uncached_traffic(spec, config, problem),
        reread_bytes=head,
        heads_per_section=section,
        heads_by_l2=by_l2,
        section_bytes=section_bytes,
        used_share=share,
        tail_blocks=tail,
        tail_bytes=tail_bytes,
        l2_bytes=gpu.l2_bytes,
    )


def _kv_heads_at_a_time(problem: Problem, section: int) -> int:
    """Key/value heads of a section of query heads: the most of any, as sections may begin and end inside of groups."""
    heads, ratio = problem.batch * problem.num_heads_q, problem.gqa_ratio
    # Where in a group sections begin repeats after as many sections as a group has heads.
    starts = range(0, heads, section)[:ratio]
    return max((min(heads, start + section) - 1) // ratio - start // ratio + 1 for start in starts)


def _grid(spec: KernelSpec, config: Config, plan: LaunchPlan, wave: int) -> Grid:
    blocks = _main_launch(plan, spec).grid[0]
    return Grid(blocks, wave, _param(plan, spec, config, "num_tiles") if isinstance(config, FwdSm90Config) else None)


def _param(plan: LaunchPlan, spec: KernelSpec, config: Config, name: str) -> int:
    """A parameter of the main kernel."""
    params = param_struct(spec.kind, config.family)
    values = struct.unpack(params.format, _main_launch(plan, spec).params)
    return int(values[[field.name for field in params.fields].index(name)])


def _registers(spec: KernelSpec, config: Config, gpu: Gpu, *, compile: bool) -> Registers:
    least, cap = estimate_registers(spec, config), register_cap(config, gpu.arch)
    split = register_split(config) if isinstance(config, FwdSm90Config) else None
    split = split if split is not None and split.consumer else None
    note = "not compiled"
    if compile:
        try:
            compiled = compile_kernel(render_kernel(spec, config), compile_target(config, gpu.target))
            return Registers(least, cap, facts_of((compiled,)), compiled, split=split)
        except (ToolchainError, CompileError) as error:
            note = str(error)
    return Registers(least, cap, estimate_facts(spec, config, gpu), None, note, split)


def _main_launch(plan: LaunchPlan, spec: KernelSpec) -> Launch:
    return next(launch for launch in plan.launches if launch.kernel == spec.kind)


def _plan(spec: KernelSpec, config: Config, problem: Problem, gpu: Gpu) -> LaunchPlan:
    """The launches of a call on contiguous tensors."""

    def contiguous(seqlen: int, heads: int) -> tuple[int, int, int]:
        return seqlen * heads * spec.head_dim, heads * spec.head_dim, spec.head_dim

    q, k = contiguous(problem.seqlen_q, problem.num_heads_q), contiguous(problem.seqlen_k, problem.num_heads_k)
    strides = dict.fromkeys(("q", "o", "dout", "dq"), q) | dict.fromkeys(("k", "v", "dk", "dv"), k)
    scale = float(spec.head_dim**-0.5)
    if isinstance(config, BwdConfig):
        return bwd_plan(spec, config, problem, strides=strides, softmax_scale=scale, l2_bytes=gpu.l2_bytes)
    sizes = {"l2_bytes": gpu.l2_bytes, "num_sms": gpu.num_sms}
    return fwd_plan(spec, config, problem, strides=strides, softmax_scale=scale, **sizes)


def _measured(spec: KernelSpec, problem: Problem, gpu: Gpu, config: Config, facts: Facts) -> tuple[MeasuredTime, ...]:
    """Measured entries of exactly this kernel and size class; of a config that is in several tables the first."""
    bucket = problem.bucket(gpu.num_sms)
    found: dict[Config, MeasuredTime] = {}
    for root in search_dirs():
        table = cached_table(table_path(root, gpu.name, spec.kind))
        for entry in table.entries if table else ():
            if (entry.spec, entry.bucket) != (spec, bucket) or entry.measurement.kind != "measured":
                continue
            if infeasible_reason(spec, entry.config, gpu.arch) is not None:  # as a look-up does
                continue
            known = facts if entry.config == config else None
            predicted = predict(spec, entry.config, entry.measurement.problem, gpu, known).ms
            found.setdefault(entry.config, MeasuredTime(entry, not is_current(entry, template_hash), predicted))
    return tuple(found.values())


# A number that stands alone; "sm_80" is a name.
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\d.])")


def group_exclusions(excluded: Sequence[tuple[Config, str]]) -> tuple[ExclusionGroup, ...]:
    """Groups configs whose reasons differ in numbers only, the largest group first."""
    groups: dict[str, list[tuple[Config, str]]] = {}
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
