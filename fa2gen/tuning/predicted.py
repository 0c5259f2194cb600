"""Tuning for a GPU that is not here: compile for it, rank by the model over ptxas's facts, prove in the emulator."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from fa2gen.compile import usable_cores
from fa2gen.constraints import default_config_of
from fa2gen.errors import CompileError, GateError
from fa2gen.hardware import Gpu
from fa2gen.problem import Problem
from fa2gen.spec import Config, KernelSpec
from fa2gen.tables import Measurement, Provenance, TunedEntry, utc_now

from .builds import Build, compile_configs
from .defaults import PREDICTED_TRIALS
from .model import model_version, predict, validity
from .prediction import Facts
from .report import Ledger, TuneJob
from .shortlist import facts_of, launch_reason, shortlist, spill_reason
from .space import Space, legal_space
from .study import TuningStudy
from .tools import Tools

_METHOD = "performance model over ptxas's registers and spills, occupancy and the chip's rates"
# Predicted differences below the model's own error (4 %) are no ground for one more config to prove and to keep.
_TIE = 0.02
# Wrong kernels are bugs; after this many the default has to do.
_MAX_PROOFS = 3


def method(gpu: Gpu, kind: str, family: str) -> str:
    """How a predicted entry's time was found, and how far the model is known to hold on that chip."""
    return f"{_METHOD}; {validity(gpu, kind, family)}"


class _Late(Exception):
    """The session's time is up."""


@dataclass
class _Group:
    """One spec and family: its problems, and its configs as they come back from the compiler and the gate."""

    spec: KernelSpec
    family: str
    space: Space
    problems: list[Problem]
    configs: list[Config]
    facts: dict[Config, Facts] = field(default_factory=dict)
    failures: dict[Config, tuple[str, str]] = field(default_factory=dict)
    missing: int = 0


def tune_predicted(
    asked: Sequence[TuneJob],
    ledger: Ledger,
    tools: Tools,
    trials: int | None,
    *,
    resume: bool,
    seed: int = 0,
    storage: str | None = None,
) -> None:
    """Does every job; entries go to the ledger as soon as they are proved.

    The model ranks the whole legal space, so nothing is left for a sampler to find; each (spec, bucket, family) still
    has its Optuna study, with every config's predicted time or failure, beside the measured ones.

    Args:
        asked: What to tune.
        ledger: The session's account.
        tools: The other rooms.
        trials: Configs to compile for each spec and family; default ``PREDICTED_TRIALS``. The default config is always
            one more.
        resume: False puts earlier studies aside.
        seed, storage: Of the studies.
    """
    study = functools.partial(_study, ledger=ledger, tools=tools, resume=resume, seed=seed, storage=storage)
    tools.require_emulator()
    groups = _groups(asked, ledger, PREDICTED_TRIALS if trials is None else trials)
    jobs = [(group, config) for group in groups for config in group.configs]
    ledger.expect("compile", len(jobs))
    proofs: dict[Future[list[TunedEntry]], _Group] = {}
    pool = ThreadPoolExecutor(max(1, usable_cores()), thread_name_prefix="fa2gen-proof")
    stopping = threading.Event()

    def on_done(index: int, result: Build | CompileError) -> None:
        group, config = jobs[index]
        _take_result(group, config, result, ledger)
        group.missing -= 1
        if group.missing == 0:
            proofs[pool.submit(_settle, group, ledger, tools, study, stopping)] = group
        _harvest(proofs, ledger, wait=False)
        if ledger.late():
            raise _Late

    try:
        start = time.monotonic()
        configs = [(group.spec, config) for group, config in jobs]
        try:
            compile_configs(tools, configs, ledger.gpu.target, on_done, ledger.count)
        finally:
            ledger.spent("compile", time.monotonic() - start)
        start = time.monotonic()
        try:
            _harvest(proofs, ledger, wait=True)
        finally:
            ledger.spent("prove", time.monotonic() - start)
    except _Late:
        pass
    finally:
        # The interpreter would wait for the proofs that run anyway; what they find is saved, no others start.
        stopping.set()
        pool.shutdown(wait=False, cancel_futures=True)
        futures.wait([future for future in proofs if not future.cancelled()])
        _harvest(proofs, ledger, wait=False)


def _groups(asked: Sequence[TuneJob], ledger: Ledger, trials: int) -> list[_Group]:
    problems: dict[tuple[KernelSpec, str], list[Problem]] = {}
    for job in asked:
        problems.setdefault((job.request.spec, job.family), []).append(job.request.problem)
    groups = []
    for (spec, family), mine in problems.items():
        space, favourites = legal_space(spec, ledger.gpu, family), shortlist(spec, mine, ledger.gpu, trials, family)
        configs = list(dict.fromkeys([default_config_of(spec, family), *favourites]))
        # The default proves itself and each problem has a winner, mostly the same one.
        ledger.expect("prove", 2)
        groups.append(_Group(spec, family, space, mine, configs, missing=len(configs)))
    return groups


def _take_result(group: _Group, config: Config, result: Build | CompileError, ledger: Ledger) -> None:
    if isinstance(result, CompileError):
        _fail(group, config, "compile_failed", result.full_text, ledger)
    else:
        if (reason := spill_reason(result)) is not None:
            _fail(group, config, "spilled", reason, ledger)
        elif (reason := launch_reason(result, ledger.gpu)) is not None:
            _fail(group, config, "launch_failed", reason, ledger)
        else:
            group.facts[config] = facts_of(result)
    ledger.step("compile", f"{group.spec.slug()} {config.slug()}")


def _fail(group: _Group, config: Config, outcome: str, reason: str, ledger: Ledger) -> None:
    group.failures[config] = outcome, reason
    ledger.fail(group.spec, config, outcome, reason)


def _settle(
    group: _Group,
    ledger: Ledger,
    tools: Tools,
    open_study: Callable[[_Group, Problem], TuningStudy],
    stopping: threading.Event,
) -> list[TunedEntry]:
    """Picks and proves a config for each problem of a group; runs beside the compiler.

    Once ``stopping`` is set no proof begins, and problems whose own choice is not proved by then have no entry: the
    default, which is, may be slower than what the table holds for them.
    """
    entries: list[TunedEntry] = []
    with contextlib.ExitStack() as stack:
        studies = [stack.enter_context(open_study(group, problem)) for problem in group.problems]
        times = [_record(group, problem, study, ledger) for problem, study in zip(group.problems, studies, strict=True)]
        proved: dict[Config, str | None] = {}

        def prove(config: Config) -> str | None:
            if config not in proved:
                if stopping.is_set():
                    raise _Late
                try:
                    proved[config] = tools.prove(group.spec, config)
                except GateError as error:
                    proved[config] = None
                    _fail(group, config, "wrong", str(error), ledger)
                    for study in studies:
                        study.reject(config, str(error))
                except CompileError as error:
                    # Of the emulator's compiler; it says nothing of the results, so a later session may try again.
                    proved[config] = None
                    _fail(group, config, "compile_failed", error.full_text, ledger)
                ledger.step("prove", f"{group.spec.slug()} {config.slug()}")
            return proved[config]

        fallback = default_config_of(group.spec, group.family)
        for problem, mine in zip(group.problems, times, strict=True):
            if fallback in mine:
                ledger.default_ms[group.spec, problem.bucket(ledger.gpu.num_sms), group.family] = mine[fallback]
        with contextlib.suppress(_Late):
            prove(fallback)
            for problem, study, ranking, mine in zip(group.problems, studies, _rankings(times), times, strict=True):
                for config in ranking[:_MAX_PROOFS] + [fallback] * (fallback in mine):
                    text = prove(config)
                    if text is not None:
                        entries.append(_entry(group, problem, config, mine, len(study.failures()), text, ledger, tools))
                        break
    return entries


def _study(
    group: _Group, problem: Problem, *, ledger: Ledger, tools: Tools, resume: bool, seed: int, storage: str | None
) -> TuningStudy:
    return TuningStudy(
        ledger.gpu,
        group.spec,
        problem.bucket(ledger.gpu.num_sms),
        template_hash=tools.template_hash(group.spec.kind, group.family),
        space=group.space,
        # Other facts, another model or another problem give other numbers, which must not meet these.
        objective=f"{model_version(group.spec.kind, group.family)}, nvcc {tools.nvcc_version()}, {problem}",
        family=group.family,
        seed=seed,
        resume=resume,
        storage=storage,
    )


def _record(group: _Group, problem: Problem, study: TuningStudy, ledger: Ledger) -> dict[Config, float]:
    """Writes what the compiler said into a problem's study; all predicted times, earlier sessions' included."""
    for config, (outcome, reason) in group.failures.items():
        study.record_failure(config, outcome, reason)
    times = {
        config: predict(group.spec, config, problem, ledger.gpu, facts).ms for config, facts in group.facts.items()
    }
    for config, ms in times.items():
        facts = group.facts[config]
        study.record(config, ms, registers=facts.registers, spill_bytes=facts.spill_bytes)
    times = {**study.times(), **times}
    # What this session's compiler or an earlier session's gate refused is out.
    refused = {*group.failures, *study.failures()}
    return {config: ms for config, ms in times.items() if config not in refused}


def _rankings(times: list[dict[Config, float]]) -> list[list[Config]]:
    """Configs for each problem, best first; those within ``_TIE`` of the best in the order of the whole spec."""
    best = [min(mine.values(), default=1.0) for mine in times]
    everywhere = {config for mine in times for config in mine}
    overall = {
        config: sum(mine.get(config, math.inf) / fastest for mine, fastest in zip(times, best, strict=True))
        for config in everywhere
    }
    rankings = []
    for mine, fastest in zip(times, best, strict=True):
        close = [config for config in mine if mine[config] <= (1 + _TIE) * fastest]
        rest = [config for config in mine if mine[config] > (1 + _TIE) * fastest]
        rankings.append(sorted(close, key=overall.__getitem__) + sorted(rest, key=mine.__getitem__))
    return rankings


def _entry(
    group: _Group,
    problem: Problem,
    config: Config,
    times: dict[Config, float],
    failed: int,
    numerics: str,
    ledger: Ledger,
    tools: Tools,
) -> TunedEntry:
    ms = times[config]
    return TunedEntry(
        spec=group.spec,
        bucket=problem.bucket(ledger.gpu.num_sms),
        config=config,
        measurement=Measurement("predicted", ms, ms, ms, 0, method(ledger.gpu, group.spec.kind, group.family), problem),
        provenance=Provenance(
            template_hash=tools.template_hash(group.spec.kind, group.family),
            nvcc=tools.nvcc_version(),
            driver="",
            versions=tools.versions(),
            trials=len(times) + failed,
            feasible=len(times),
            numerics=numerics,
            utc=utc_now(),
            model_version=model_version(group.spec.kind, group.family),
        ),
    )


def _harvest(proofs: dict[Future[list[TunedEntry]], _Group], ledger: Ledger, *, wait: bool) -> None:
    """Saves what has been proved; with ``wait``, all of it, but not beyond the session's time."""
    while proofs:
        finished = [future for future in proofs if future.done() and not future.cancelled()]
        errors = []
        for future in finished:
            if (error := future.exception()) is not None:
                errors.append(error)
            elif entries := future.result():
                ledger.save(entries)
            # Only now: interrupted in the midst of it, the session's end saves them again.
            del proofs[future]
        if errors:
            # After the others are saved.
            raise errors[0]
        if not wait or ledger.late():
            return
        futures.wait(proofs, timeout=0.2, return_when=futures.FIRST_COMPLETED)
