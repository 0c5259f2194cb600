"""Tuning on one GPU: what tables know, the model's favourites, neighbours, Optuna; a winner is proved, then saved."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fa2gen.compile import usable_cores
from fa2gen.constraints import default_config_of
from fa2gen.errors import CompileError
from fa2gen.problem import Bucket, Problem
from fa2gen.spec import Config, KernelSpec
from fa2gen.tables import Incumbent, Measurement, Provenance, TunedEntry, utc_now

from .builds import Build, compile_configs
from .defaults import MEASURED_TRIALS
from .device import MeasuringDevice, Verdict
from .report import Ledger, TuneJob, TuneRequest
from .shortlist import code_digest, launch_reason, neighbours, shortlist, spill_reason
from .space import legal_space
from .study import Asked, TuningStudy
from .timing import METHOD, Timing, stored_timing
from .tools import Tools
from .winner import MAX_RELATIVES, find_incumbent, find_relatives, ranking
from .worker import TrialFailure

# Times of an earlier session that look better than today's incumbent are taken again, but no more than this.
_MAX_CONFIRMATIONS = 3


class _Late(Exception):
    """The session's time is up."""


def objective(problem: Problem, tools: Tools) -> str:
    """What the times of a study are of: another problem's, or another compiler's code, shall not meet them."""
    return f"measured, nvcc {tools.nvcc_version()}, {problem}"


@dataclass(frozen=True)
class Options:
    """What a session was asked for besides its requests; see ``session.tune``."""

    trials: int | None = None
    resume: bool = True
    seed: int = 0
    storage: str | None = None


@dataclass
class Shared:
    """What the devices of a session have in common: one compiler pool, one list of proofs."""

    compiler: threading.Lock = field(default_factory=threading.Lock)
    proofs: dict[tuple[KernelSpec, Config], Verdict] = field(default_factory=dict)
    # A job that a lost device gave back goes on with the study that this session began, also without --resume.
    begun: set[TuneJob] = field(default_factory=set)


@dataclass
class _Job:
    """A request being tuned for a family: its study, and what this session has seen."""

    request: TuneRequest
    family: str
    bucket: Bucket
    study: TuningStudy
    template_hash: str
    incumbent: Config | None
    relatives: tuple[Config, ...] = ()
    timings: dict[Config, Timing] = field(default_factory=dict)
    failed: set[Config] = field(default_factory=set)
    # Machine code -> what came of it.
    seen: dict[str, Timing | TrialFailure] = field(default_factory=dict)

    @property
    def default(self) -> Config:
        return default_config_of(self.request.spec, self.family)

    def times(self) -> dict[Config, float]:
        """Configs that could be chosen, with today's time or an earlier session's."""
        wrong = {config for config, (outcome, _) in self.study.failures().items() if outcome == "wrong"}
        times = {**self.study.times(), **{config: timing.ms for config, timing in self.timings.items()}}
        return {config: ms for config, ms in times.items() if config not in wrong | self.failed}

    def tried(self) -> set[Config]:
        """Configs with a time or a standing failure, of any session; not what the sampler merely proposed."""
        failures = {c for c, (outcome, _) in self.study.standing_failures().items() if outcome != "infeasible"}
        return {*self.study.times(), *self.timings, *self.failed, *failures}

    def ranking(self) -> list[Config]:
        """What to prove, best first; nothing while it is not known how fast the table's own config is today."""
        if self.incumbent is not None and self.incumbent not in self.timings and self.incumbent not in self.failed:
            return []
        return ranking(self.times(), self.incumbent, self.timings)


class MeasuredTuning:
    """Does jobs on one device.

    Args:
        ledger: The session's account.
        tools: The other rooms.
        device: The ledger's GPU.
        options: The session's.
        shared: With the session's other devices.
    """

    def __init__(
        self, ledger: Ledger, tools: Tools, device: MeasuringDevice, options: Options, shared: Shared | None = None
    ) -> None:
        self._ledger, self._tools, self._device, self._options = ledger, tools, device, options
        self._shared = shared or Shared()
        self._trials = MEASURED_TRIALS if options.trials is None else options.trials
        self._stops = 0
        # Of the spec at hand: its size classes mostly try the same configs, and rendering one takes 20 ms.
        self._spec: KernelSpec | None = None
        self._kernels: dict[Config, Build | CompileError] = {}

    def tune(self, asked: TuneJob) -> None:
        """Tunes one request for one family; its entry is saved as soon as it is proved.

        Raises:
            KeyboardInterrupt: The second one. After the first, what was timed is proved and saved, and this returns.
            DeviceLost, DeviceUnfit: The device is of no more use; nothing of the request is lost but a trial.
        """
        request, family = asked.request, asked.family
        spec, gpu = request.spec, self._ledger.gpu
        bucket = request.problem.bucket(gpu.num_sms)
        template_hash = self._tools.template_hash(spec.kind, family)
        resume = self._options.resume or asked in self._shared.begun
        self._shared.begun.add(asked)
        with TuningStudy(
            gpu,
            spec,
            bucket,
            template_hash=template_hash,
            space=legal_space(spec, gpu, family),
            objective=objective(request.problem, self._tools),
            family=family,
            seed=self._options.seed,
            resume=resume,
            storage=self._options.storage,
        ) as study:
            roots: Sequence[Path] = self._tools.table_roots(self._ledger.out)
            incumbent = find_incumbent(spec, bucket, family, gpu, roots)
            relatives = find_relatives(spec, bucket, family, gpu, roots, MAX_RELATIVES)
            job = _Job(request, family, bucket, study, template_hash, incumbent, relatives)
            try:
                self._search(job)
            except KeyboardInterrupt:
                self._ledger.interrupted = True
                self._conclude(job)
                return
            try:
                self._conclude(job)
            except KeyboardInterrupt:
                self._ledger.interrupted = True
                self._conclude(job)

    def _search(self, job: _Job) -> None:
        """Times what the tables know and the model's favourites; neighbours of the best; what the sampler asks for.

        What ptxas makes of neighbours the model does not see: they are tried around what turned out to be fast.
        """
        request, study, cores = job.request, job.study, usable_cores()
        first = list(dict.fromkeys(config for config in (job.default, job.incumbent) if config is not None))
        budget = max(0, self._trials - len(study.times()))
        self._ledger.expect("measure", len(first) + budget)
        # Whole rounds of the compiler pool, these among them: a 17th kernel on 16 cores costs as much as 16 more.
        size = min(budget, -(-max(8, self._trials // 2) // cores) * cores - len(first))
        if budget:
            favourites = shortlist(request.spec, [request.problem], self._ledger.gpu, size + len(first), job.family)
            # At most half of them from the tables: few trials must not leave the model without a say.
            related = [config for config in job.relatives if config not in first][: size // 2]
            candidates = dict.fromkeys((*related, *favourites))
            for config in [config for config in candidates if config not in first][:size]:
                study.enqueue(config)
        # They may lie outside the grid, and are timed again in every session: beside the study.
        batch = [Asked(config, None) for config in first]
        while True:
            batch += self._ask(study, size)
            if not batch:
                return
            self._measure_batch(job, batch)
            budget -= sum(asked.trial is not None for asked in batch)
            if budget <= 0 or self._ledger.late():
                return
            batch, size = [], min(budget, max(4, cores))
            self._enqueue_neighbours(job, size)

    def _enqueue_neighbours(self, job: _Job, size: int) -> None:
        """Those of the two fastest so far, for two thirds of a batch: the rest is the sampler's."""
        request, times, tried = job.request, job.times(), job.tried()
        best = sorted(times, key=times.__getitem__)[:2]
        near = neighbours(request.spec, request.problem, self._ledger.gpu, best)
        for config in [config for config in near if config not in tried][: 2 * size // 3]:
            job.study.enqueue(config)

    def _ask(self, study: TuningStudy, count: int) -> list[Asked]:
        batch: list[Asked] = []
        while len(batch) < count:
            asked = study.ask()
            if asked is None:
                break
            batch.append(asked)
        return batch

    def _measure_batch(self, job: _Job, batch: list[Asked]) -> None:
        """Compiles a batch side by side, then times it one by one."""
        open_trials, spec = list(batch), job.request.spec
        try:
            needed = {index for index, asked in enumerate(batch) if asked.trial is None}
            compiled = self._compile(spec, [asked.config for asked in batch], needed)
            start = time.monotonic()
            for index, asked in enumerate(batch):
                self._check_stop()
                # Without the times of the default and the incumbent nothing could be saved.
                if index not in needed and self._ledger.late():
                    break
                kernel = compiled[index]
                try:
                    timing = self._time(job, asked.config, kernel)
                except TrialFailure as failure:
                    job.failed.add(asked.config)
                    self._ledger.fail(spec, asked.config, failure.outcome, str(failure))
                    if asked.trial is not None:
                        job.study.fail(asked, failure.outcome, str(failure))
                    elif failure.outcome == "wrong" and asked.config in job.study.times():
                        job.study.reject(asked.config, str(failure))
                    else:
                        job.study.record_failure(asked.config, failure.outcome, str(failure))
                else:
                    job.timings[asked.config] = timing
                    # Each fact costs the journal a synced write.
                    facts = {name: value for name, value in dataclasses.asdict(timing).items() if value}
                    if asked.trial is not None:
                        job.study.complete(asked, facts.pop("ms"), **facts)
                    else:
                        job.study.record(asked.config, facts.pop("ms"), **facts)
                open_trials.remove(asked)
                self._ledger.step("measure", f"{spec.slug()} {asked.config.slug()}")
            self._ledger.spent("measure", time.monotonic() - start)
        finally:
            for asked in open_trials:
                if asked.trial is not None:
                    job.study.abandon(asked)

    def _compile(
        self, spec: KernelSpec, configs: Sequence[Config], needed: set[int]
    ) -> dict[int, Build | CompileError]:
        """Results by index; where the time is up, not all but at least the needed ones."""
        self._ledger.expect("compile", len(configs))
        if spec != self._spec:
            self._spec, self._kernels = spec, {}
        results = {index: self._kernels[config] for index, config in enumerate(configs) if config in self._kernels}
        missing = [index for index in range(len(configs)) if index not in results]
        again = len(results)
        for index in results:
            self._ledger.step("compile", f"{spec.slug()} {configs[index].slug()}")

        def on_done(position: int, result: Build | CompileError) -> None:
            index = missing[position]
            results[index] = self._kernels[configs[index]] = result
            self._ledger.step("compile", f"{spec.slug()} {configs[index].slug()}")
            self._check_stop()
            if len(results) < len(configs) and results.keys() >= needed and self._ledger.late():
                raise _Late

        # One pool of compilers for all devices: while it works for one, the others measure.
        with self._shared.compiler if missing else contextlib.nullcontext():
            self._check_stop()
            start = time.monotonic()
            jobs = [(spec, configs[index]) for index in missing]
            with contextlib.suppress(_Late):
                compile_configs(self._tools, jobs, self._ledger.gpu.target, on_done, self._ledger.count)
            self._ledger.spent("compile", time.monotonic() - start)
        self._ledger.count(0, again)
        return results

    def _check_stop(self) -> None:
        """Raises what Ctrl-C raises in the main thread, once for each time."""
        if self._ledger.stops > self._stops:
            self._stops = self._ledger.stops
            raise KeyboardInterrupt

    def _time(self, job: _Job, config: Config, kernel: Build | CompileError) -> Timing:
        from .measure import MeasureRequest

        if isinstance(kernel, CompileError):
            raise TrialFailure("compile_failed", kernel.full_text)
        for outcome, reason in (
            ("spilled", spill_reason(kernel)),
            ("launch_failed", launch_reason(kernel, self._ledger.gpu)),
        ):
            if reason is not None:
                raise TrialFailure(outcome, reason)
        digest = code_digest(kernel)
        if digest not in job.seen:
            best = min([*job.study.times().values(), *(timing.ms for timing in job.timings.values())], default=math.inf)
            try:
                job.seen[digest] = self._device.measure(
                    MeasureRequest(kernel, job.request.spec, config, job.request.problem, best)
                )
            except TrialFailure as failure:
                job.seen[digest] = failure
        result = job.seen[digest]
        if isinstance(result, TrialFailure):
            raise result
        return result

    def _prove(self, job: _Job, config: Config) -> str | None:
        """What the gate says of a config that is right; None for any other, which then is no candidate any more."""
        from .measure import GateRequest

        spec, proofs = job.request.spec, self._shared.proofs
        if (spec, config) not in proofs:
            kernel = self._compile(spec, [config], {0})[0]
            start = time.monotonic()
            self._ledger.expect("prove", 1)
            if isinstance(kernel, CompileError):
                proofs[spec, config] = Verdict("compile_failed", kernel.full_text)
            else:
                proofs[spec, config] = self._device.gate(GateRequest(kernel, spec, config))
            self._ledger.spent("prove", time.monotonic() - start)
            self._ledger.step("prove", f"{spec.slug()} {config.slug()}")
        verdict = proofs[spec, config]
        if verdict.outcome is None:
            return verdict.text
        job.failed.add(config)
        self._ledger.fail(spec, config, verdict.outcome, verdict.text)
        # A crash or a hang of the gate says nothing of the results: a later session may try again.
        if verdict.outcome == "wrong":
            job.study.reject(config, verdict.text)
        return None

    def _confirm(self, job: _Job) -> None:
        """Takes times of earlier sessions again where one would win: clocks and heat may have been others then."""
        for _ in range(_MAX_CONFIRMATIONS):
            by_time = ranking(job.times(), job.incumbent, job.times())
            if not by_time or by_time[0] in job.timings or self._ledger.interrupted or self._ledger.late():
                return
            self._ledger.expect("measure", 1)
            self._measure_batch(job, [Asked(by_time[0], None)])

    def _conclude(self, job: _Job) -> None:
        """Proves the default and the best config that is right, and saves the latter."""
        self._confirm(job)
        if job.default in job.timings:
            self._ledger.default_ms[job.request.spec, job.bucket, job.family] = job.timings[job.default].ms
        if job.default not in job.failed:
            self._prove(job, job.default)
        while ranked := job.ranking():
            text = self._prove(job, ranked[0])
            if text is not None:
                self._ledger.save([self._entry(job, ranked[0], text)])
                return

    def _entry(self, job: _Job, config: Config, numerics: str) -> TunedEntry:
        timing = job.timings.get(config) or stored_timing(job.study.times()[config], job.study.attrs(config))
        incumbent = job.timings.get(job.incumbent) if job.incumbent is not None else None
        return TunedEntry(
            spec=job.request.spec,
            bucket=job.bucket,
            config=config,
            measurement=Measurement(
                "measured",
                timing.ms,
                timing.p20,
                timing.p80,
                timing.n,
                METHOD + (f"; taken twice, still doubtful: {timing.unsettled}" if timing.unsettled else ""),
                job.request.problem,
                clocks=timing.clocks,
            ),
            provenance=Provenance(
                template_hash=job.template_hash,
                nvcc=self._tools.nvcc_version(),
                driver=self._device.driver,
                versions=self._tools.versions(),
                trials=len(job.tried()),
                feasible=len(job.times()),
                numerics=numerics,
                utc=utc_now(),
                incumbent=Incumbent(job.incumbent, incumbent.ms) if job.incumbent and incumbent else None,
            ),
        )
