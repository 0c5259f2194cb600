"""What a tuning session is asked for and what it tells: requests, progress, report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fa2gen.errors import ArgumentError
from fa2gen.hardware import Gpu
from fa2gen.problem import Problem
from fa2gen.spec import Config, KernelSpec
from fa2gen.tables import EntryKey, TunedEntry, save_entries
from fa2gen.tables.merge import TemplateHash
from fa2gen.tables.store import cached_table

from .defaults import SEQLENS

SIZES = tuple((length, length) for length in SEQLENS)
"""Query and key lengths that are tuned by default."""
GROUPED_SIZES = ((1024, 1024), (8192, 8192))
"""The same for grouped heads, which mostly run like others."""

STAGES = ("compile", "measure", "prove", "save")


@dataclass(frozen=True)
class TuneRequest:
    """A kernel to tune, and a problem that stands for its bucket of sizes."""

    spec: KernelSpec
    problem: Problem

    def __post_init__(self) -> None:
        if min(self.problem.batch, self.problem.num_heads_q, self.problem.seqlen_q, self.problem.seqlen_k) < 1:
            raise ArgumentError(f"problem must have work to do, got {self.problem}")
        if self.problem.gqa_ratio != self.spec.gqa_ratio:
            raise ArgumentError(
                f"problem has {self.problem.gqa_ratio} query heads per key/value head, spec {self.spec.gqa_ratio}"
            )


@dataclass(frozen=True)
class TuneJob:
    """A request for one of the families that compete for it: each has a study and an entry of its own."""

    request: TuneRequest
    family: str


def default_requests(
    head_dim: int,
    *,
    dtypes: Sequence[str] = ("bf16",),
    causal: Sequence[bool] = (False, True),
    gqa_ratios: Sequence[int] = (1, 8),
    sizes: Sequence[tuple[int, int]] | None = None,
    tokens: int = 16384,
    hidden: int = 2048,
    kind: str = "fwd",
    deterministic: bool = False,
) -> tuple[TuneRequest, ...]:
    """The usual set: every kernel of a head dim, each for several lengths at a fixed number of tokens.

    Other dtypes, GQA ratios and lengths borrow from these (``tables.lookup``).

    Args:
        head_dim, dtypes, causal, gqa_ratios: The kernels.
        sizes: Query and key lengths; the batch is ``tokens // max(...)``. Default: ``SIZES``, and for grouped heads
            ``GROUPED_SIZES`` and, forward, decoding: one query against 4,096 keys in 16 times the tokens, so many
            sequences that it pays to pack the heads of a group.
        tokens: batch times the larger of the lengths.
        hidden: Query heads times head_dim, about: heads are rounded to whole groups.
        kind, deterministic: Of the kernels; a backward's head_dim is a multiple of 8.
    """
    requests = []
    for dtype in dtypes:
        for mask in causal:
            for ratio in gqa_ratios:
                alignment = 2 if head_dim % 8 and kind == "fwd" else 16
                spec = KernelSpec(kind, head_dim, dtype, mask, ratio, alignment, deterministic)
                pairs = sizes if sizes is not None else SIZES if ratio == 1 else GROUPED_SIZES
                problems = [usual_problem(spec, *pair, tokens=tokens, hidden=hidden) for pair in pairs]
                if sizes is None and ratio > 1 and kind == "fwd":
                    problems.append(usual_problem(spec, 1, 4096, tokens=16 * tokens, hidden=hidden))
                requests += [TuneRequest(spec, problem) for problem in problems]
    return tuple(requests)


def usual_problem(
    spec: KernelSpec,
    seqlen_q: int,
    seqlen_k: int,
    *,
    tokens: int = 16384,
    hidden: int = 2048,
    batch: int | None = None,
    heads: int | None = None,
) -> Problem:
    """A call of these lengths as it is tuned.

    Args:
        spec: The kernel.
        seqlen_q, seqlen_k: Queries and keys per sequence.
        tokens: batch times the larger of the lengths, about: a single query against 8192 keys is a call of two
            sequences, not of 16384, whose keys and values fill no GPU's memory.
        hidden: Query heads times head_dim, about: heads are rounded to whole groups.
        batch, heads: Sequences and query heads, where ``tokens`` and ``hidden`` are not to say them.

    Raises:
        ArgumentError: ``heads`` is not a multiple of the spec's gqa_ratio.
    """
    if heads is not None and heads % spec.gqa_ratio:
        raise ArgumentError(
            f"--heads {heads} is not a multiple of --gqa {spec.gqa_ratio}: each key/value head has as many query heads"
        )
    kv_heads = max(1, round(hidden / spec.head_dim / spec.gqa_ratio)) if heads is None else heads // spec.gqa_ratio
    if batch is None:
        batch = max(1, tokens // max(1, seqlen_q, seqlen_k))
    return Problem(batch, seqlen_q, seqlen_k, kv_heads * spec.gqa_ratio, kv_heads)


@dataclass(frozen=True)
class TuneEvent:
    """Progress: ``done`` of ``total`` in a stage (one of ``STAGES``; totals may grow), and what was just done."""

    stage: str
    done: int
    total: int
    text: str


@dataclass(frozen=True)
class Failure:
    """A config that cannot be chosen: an outcome of ``study.OUTCOMES`` and its reason."""

    spec: KernelSpec
    config: Config
    outcome: str
    reason: str


@dataclass(frozen=True)
class TuneReport:
    """What a session did.

    Attributes:
        gpu: What was tuned for.
        measured: Times were measured on it; False: predicted.
        entries: What was found for each request and family, proved and given to the table.
        failures: Configs that were tried and cannot be chosen.
        paths: Files written.
        compiled, cached: Kernels compiled, and taken from the cache.
        seconds: Wall time.
        stage_seconds: Wall time by stage.
        interrupted: Ctrl-C or the timeout ended it early; what was proved by then is saved.
        superseded: How many of the entries gave way to one that the table holds already: a prediction never replaces a
            measured entry.
        default_ms: The family's default config's time for each entry, measured in this session or predicted as the
            entry is; an entry whose default could not be timed is not in it.
        devices: Device indices that measured.
    """

    gpu: Gpu
    measured: bool
    entries: tuple[TunedEntry, ...]
    failures: tuple[Failure, ...]
    paths: tuple[Path, ...]
    compiled: int
    cached: int
    seconds: float
    stage_seconds: dict[str, float]
    interrupted: bool
    superseded: int = 0
    default_ms: Mapping[EntryKey, float] = field(default_factory=dict)
    devices: tuple[int, ...] = ()


@dataclass
class Ledger:
    """A session's running account; everything that ends up in the report. Threads may share it.

    Attributes:
        stops: How often Ctrl-C asked the session to stop while several devices measured, each in a thread.
    """

    gpu: Gpu
    measured: bool
    out: Path | None
    progress: Callable[[TuneEvent], None] | None
    deadline: float
    entries: list[TunedEntry] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    paths: set[Path] = field(default_factory=set)
    compiled: int = 0
    cached: int = 0
    superseded: set[EntryKey] = field(default_factory=set)
    interrupted: bool = False
    stops: int = 0
    template_hash: TemplateHash | None = None
    default_ms: dict[EntryKey, float] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    started: float = field(default_factory=time.monotonic)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)
    _total: dict[str, int] = field(default_factory=dict)
    # Proofs and devices report from threads of their own.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def expect(self, stage: str, count: int) -> None:
        """Adds to a stage's total."""
        with self._lock:
            self._total[stage] = self._total.get(stage, 0) + count

    def step(self, stage: str, text: str, count: int = 1) -> None:
        """Tells that ``count`` more of a stage are done."""
        with self._lock:
            self._done[stage] = self._done.get(stage, 0) + count
            if self.progress is not None:
                total = max(self._total.get(stage, 0), self._done[stage])
                self.progress(TuneEvent(stage, self._done[stage], total, text))

    def spent(self, stage: str, seconds: float) -> None:
        """Adds to a stage's wall time."""
        with self._lock:
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds

    def count(self, compiled: int, cached: int) -> None:
        """Adds to the kernels that were compiled and taken from the cache."""
        with self._lock:
            self.compiled += compiled
            self.cached += cached

    def fail(self, spec: KernelSpec, config: Config, outcome: str, reason: str) -> None:
        """Notes a failure once."""
        failure = Failure(spec, config, outcome, reason)
        with self._lock:
            if failure not in self.failures:
                self.failures.append(failure)

    def save(self, entries: Sequence[TunedEntry]) -> None:
        """Writes entries to the table at once, so that an end at any moment loses nothing that was proved.

        Saving the same entries again, after an interruption, changes nothing.
        """
        start = time.monotonic()
        with self._lock:
            refused = {(failure.spec, failure.config) for failure in self.failures}
            paths = save_entries(self.gpu, entries, root=self.out, template_hash=self.template_hash, refused=refused)
            tables = [cached_table(path) for path in paths]
            present = {entry.key: entry for table in tables if table is not None for entry in table.entries}
            keys = {entry.key for entry in entries}
            self.entries = [entry for entry in self.entries if entry.key not in keys] + list(entries)
            self.superseded -= keys
            self.superseded |= {entry.key for entry in entries if present.get(entry.key) != entry}
            self.paths.update(paths)
        self.spent("save", time.monotonic() - start)
        self.expect("save", len(entries))
        self.step(
            "save", ", ".join(f"{e.spec.slug()} {e.bucket.label()} {e.config.family}" for e in entries), len(entries)
        )

    def late(self) -> bool:
        """Whether the time is up; the report then says interrupted."""
        if time.monotonic() < self.deadline:
            return False
        self.interrupted = True
        return True

    def report(self) -> TuneReport:
        with self._lock:
            return TuneReport(
                gpu=self.gpu,
                measured=self.measured,
                entries=tuple(self.entries),
                failures=tuple(self.failures),
                paths=tuple(sorted(self.paths)),
                compiled=self.compiled,
                cached=self.cached,
                seconds=time.monotonic() - self.started,
                stage_seconds=dict(self.stage_seconds),
                interrupted=self.interrupted,
                superseded=len(self.superseded),
                default_ms=dict(self.default_ms),
                devices=self.devices,
            )
