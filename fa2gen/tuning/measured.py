"""Tuning on the GPU at hand: the model's favourites first, then Optuna; the winner is proved before it is saved."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2gen.compile import CompiledKernel, usable_cores
from fa2gen.constraints import default_config, infeasible_reason
from fa2gen.errors import CompileError, LaunchError
from fa2gen.problem import Bucket
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import Measurement, Provenance, TunedEntry, table_path, user_dir, utc_now
from fa2gen.tables.store import cached_table

from .report import Ledger, TuneRequest
from .shortlist import code_digest, shortlist, spill_reason
from .space import legal_space
from .study import Asked, TuningStudy
from .tools import MeasuringProcess, Tools
from .worker import TrialFailure

if TYPE_CHECKING:
    from .measure import Timing

DEFAULT_TRIALS = 40
# The first call starts the child, imports torch and makes a CUDA context.
_START_TIMEOUT, _MEASURE_TIMEOUT, _GATE_TIMEOUT = 180.0, 60.0, 120.0


class MeasuredTuning:
    """One session on one device.

    Args:
        ledger: The session's account.
        tools: The other rooms.
        worker: The measuring process, of the ledger's GPU; stopped at the end.
        driver: Driver version for the provenance.
        trials: Configs to time for each (spec, bucket), earlier sessions' included; default 40.
        resume: Go on with an earlier session's study.
        studies: Folder of the studies; None is the default one.
    """

    def __init__(
        self,
        ledger: Ledger,
        tools: Tools,
        worker: MeasuringProcess,
        driver: str,
        *,
        trials: int | None,
        resume: bool,
        studies: Path | None = None,
    ) -> None:
        self._ledger, self._tools, self._driver = ledger, tools, driver
        self._trials = DEFAULT_TRIALS if trials is None else trials
        self._resume, self._studies = resume, studies
        self._worker = worker
        self._proofs: dict[tuple[KernelSpec, FwdConfig], tuple[bool, str]] = {}

    def run(self, requests: Sequence[TuneRequest]) -> None:
        """Tunes the requests in order; each entry is saved as soon as it is proved."""
        self._worker.start()
        self._ledger.expect("measure", len(requests) * (self._trials + 1))
        try:
            for request in requests:
                if self._ledger.interrupted or self._ledger.late():
                    break
                self._tune(request)
        finally:
            self._worker.stop()

    def _tune(self, request: TuneRequest) -> None:
        spec, gpu = request.spec, self._ledger.gpu
        bucket = request.problem.bucket(gpu.num_sms)
        template_hash = self._tools.template_hash(spec.kind, FwdConfig.family)
        space = legal_space(spec, gpu)
        with TuningStudy(
            gpu,
            spec,
            bucket,
            template_hash=template_hash,
            space=space,
            resume=self._resume,
            directory=self._studies,
        ) as study:
            timings: dict[FwdConfig, Timing] = {}
            try:
                self._search(request, study, self._incumbent(spec, bucket), timings)
            except KeyboardInterrupt:
                # What was timed so far is worth a proof; a second Ctrl-C ends that too.
                self._ledger.interrupted = True
            self._conclude(request, bucket, study, timings, template_hash)

    def _search(
        self, request: TuneRequest, study: TuningStudy, incumbent: FwdConfig | None, timings: dict[FwdConfig, Timing]
    ) -> None:
        """Times the default, the incumbent, the model's favourites, then what the sampler asks for."""
        binaries: dict[str, Timing] = {}
        budget = max(0, self._trials - len(study.times()))
        cores = usable_cores()
        # Whole rounds of the compiler pool, the default among them: a 17th kernel on 16 cores costs as much as 16 more.
        size = min(budget, -(-max(8, self._trials // 2 + 1) // cores) * cores - 1)
        if budget:
            favourites = shortlist(request.spec, [request.problem], self._ledger.gpu, size)
            for config in [*([incumbent] if incumbent is not None else []), *favourites][:size]:
                study.enqueue(config)
        # The default may lie outside the grid, so it is timed beside the study.
        batch = [Asked(default_config(request.spec), None)]
        while True:
            batch += self._ask(study, size)
            if not batch:
                return
            self._measure_batch(request, study, batch, timings, binaries)
            budget -= sum(asked.trial is not None for asked in batch)
            if budget <= 0 or self._ledger.late():
                return
            batch, size = [], min(budget, max(4, cores))

    def _ask(self, study: TuningStudy, count: int) -> list[Asked]:
        batch: list[Asked] = []
        while len(batch) < count:
            asked = study.ask()
            if asked is None:
                break
            batch.append(asked)
        return batch

    def _incumbent(self, spec: KernelSpec, bucket: Bucket) -> FwdConfig | None:
        """What the tables hold for this spec and bucket, stale or not."""
        root = user_dir() if self._ledger.out is None else self._ledger.out
        table = cached_table(table_path(root, self._ledger.gpu.name, spec.kind))
        for entry in table.entries if table is not None else ():
            if entry.key == (spec, bucket) and infeasible_reason(spec, entry.config, self._ledger.gpu.arch) is None:
                return entry.config
        return None

    def _measure_batch(
        self,
        request: TuneRequest,
        study: TuningStudy,
        batch: list[Asked],
        timings: dict[FwdConfig, Timing],
        binaries: dict[str, Timing],
    ) -> None:
        """Compiles a batch side by side, then times it one by one."""
        open_trials = list(batch)
        try:
            compiled = self._compile(request.spec, [asked.config for asked in batch])
            start = time.monotonic()
            for asked, kernel in zip(batch, compiled, strict=True):
                try:
                    timing = self._time(request, asked.config, kernel, timings, binaries)
                    timings[asked.config] = timing
                    if asked.trial is not None:
                        study.complete(
                            asked, timing.ms, p20=timing.p20, p80=timing.p80, n=timing.n, stopped=timing.stopped
                        )
                except TrialFailure as failure:
                    self._ledger.fail(request.spec, asked.config, failure.outcome, str(failure))
                    if asked.trial is not None:
                        study.fail(asked, failure.outcome, str(failure))
                open_trials.remove(asked)
                self._ledger.step("measure", f"{request.spec.slug()} {asked.config.slug()}")
            self._ledger.spent("measure", time.monotonic() - start)
        finally:
            for asked in open_trials:
                if asked.trial is not None:
                    study.abandon(asked)

    def _compile(self, spec: KernelSpec, configs: Sequence[FwdConfig]) -> list[CompiledKernel | CompileError]:
        start = time.monotonic()
        self._ledger.expect("compile", len(configs))

        def on_done(index: int, result: Any) -> None:
            self._ledger.step("compile", f"{spec.slug()} {configs[index].slug()}")

        jobs = [(self._tools.render(spec, config), self._ledger.gpu.target) for config in configs]
        results = self._tools.compile_many(jobs, on_done)
        for result in results:
            if isinstance(result, CompiledKernel):
                self._ledger.cached += result.from_cache
                self._ledger.compiled += not result.from_cache
        self._ledger.spent("compile", time.monotonic() - start)
        return results

    def _time(
        self,
        request: TuneRequest,
        config: FwdConfig,
        kernel: CompiledKernel | CompileError,
        timings: dict[FwdConfig, Timing],
        binaries: dict[str, Timing],
    ) -> Timing:
        from .measure import MeasureRequest

        if isinstance(kernel, CompileError):
            raise TrialFailure("compile_failed", f"{kernel}\n{kernel.log}".strip())
        reason = spill_reason(kernel)
        if reason is not None:
            raise TrialFailure("spilled", reason)
        digest = code_digest(kernel)
        if digest not in binaries:
            best = min((timing.ms for timing in timings.values()), default=math.inf)
            self._ready()
            payload = MeasureRequest(kernel, request.spec, config, request.problem, best)
            binaries[digest] = self._worker.call("measure", payload, timeout=_MEASURE_TIMEOUT)
        return binaries[digest]

    def _ready(self) -> None:
        """Waits for the child's start, with a limit of its own; a trial's time does not include it."""
        try:
            self._worker.call("ready", timeout=_START_TIMEOUT)
        except TrialFailure as failure:
            raise LaunchError(f"the measuring process does not start: {failure}") from None

    def _prove(self, spec: KernelSpec, config: FwdConfig) -> tuple[bool, str]:
        from .measure import GateRequest

        if (spec, config) not in self._proofs:
            (kernel,) = self._compile(spec, [config])
            start = time.monotonic()
            self._ledger.expect("prove", 1)
            if isinstance(kernel, CompileError):
                verdict = (False, str(kernel))
            else:
                try:
                    self._ready()
                    payload = GateRequest(kernel, spec, config)
                    passed, text = self._worker.call("gate", payload, timeout=_GATE_TIMEOUT)
                    verdict = (passed, f"GPU: {text}")
                except TrialFailure as failure:
                    verdict = (False, str(failure))
            self._proofs[spec, config] = verdict
            self._ledger.spent("prove", time.monotonic() - start)
            self._ledger.step("prove", f"{spec.slug()} {config.slug()}")
        return self._proofs[spec, config]

    def _conclude(
        self,
        request: TuneRequest,
        bucket: Bucket,
        study: TuningStudy,
        timings: dict[FwdConfig, Timing],
        template_hash: str,
    ) -> None:
        """Proves the default and the fastest config that is right, and saves the latter."""
        spec = request.spec
        passed, text = self._prove(spec, default_config(spec))
        if not passed:
            self._ledger.fail(spec, default_config(spec), "wrong", text)
        times = {**study.times(), **{config: timing.ms for config, timing in timings.items()}}
        rejected = study.failures()
        for config in sorted(times, key=times.__getitem__):
            if config in rejected:
                continue
            passed, text = self._prove(spec, config)
            if not passed:
                self._ledger.fail(spec, config, "wrong", text)
                study.reject(config, text)
                continue
            self._ledger.save([self._entry(request, bucket, study, config, times, timings, text, template_hash)])
            return

    def _entry(
        self,
        request: TuneRequest,
        bucket: Bucket,
        study: TuningStudy,
        config: FwdConfig,
        times: dict[FwdConfig, float],
        timings: dict[FwdConfig, Timing],
        numerics: str,
        template_hash: str,
    ) -> TunedEntry:
        from .measure import METHOD

        if config in timings:
            timing = timings[config]
            p20, p80, n = timing.p20, timing.p80, timing.n
        else:
            attrs = study.attrs(config)
            p20, p80, n = attrs["p20"], attrs["p80"], attrs["n"]
        failed = [failure for failure in self._ledger.failures if failure.spec == request.spec]
        return TunedEntry(
            spec=request.spec,
            bucket=bucket,
            config=config,
            measurement=Measurement("measured", times[config], p20, p80, n, METHOD, request.problem),
            provenance=Provenance(
                template_hash=template_hash,
                nvcc=self._tools.nvcc_version(),
                driver=self._driver,
                versions=self._tools.versions(),
                trials=len(times) + len(failed),
                feasible=len(times),
                numerics=numerics,
                utc=utc_now(),
            ),
        )
