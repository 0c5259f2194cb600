"""One Optuna study of one (gpu, spec, bucket, family): resumable, shared by processes, and honest about failures.

Where it lies is the business of ``storage.py``. Neither of Optuna's constraint interfaces is used (one is deprecated in
version 5, the other does not exist in version 4): illegal points are told as pruned, with the reason, before anything
is compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import warnings
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState

from fa2gen.data import user_folder
from fa2gen.errors import StudyError
from fa2gen.hardware import Gpu
from fa2gen.problem import Bucket
from fa2gen.spec import Config, KernelSpec

from .space import GRIDS, Space, exclusion_reason
from .storage import Database, Journal

OUTCOMES = ("infeasible", "compile_failed", "spilled", "launch_failed", "wrong", "timeout")
"""Why a trial has no time; each is stored with its text."""

# Points that an ask may waste on illegal or known configs before it takes any legal one.
_MAX_WASTED_ASKS = 10


def state_dir() -> Path:
    """Folder of the studies: ``$FA2GEN_STATE_DIR``, else ``fa2gen`` in the XDG state directory; plus ``/studies``.

    Raises:
        Fa2genError: The user has no home; or $FA2GEN_STATE_DIR names that of an unknown one.
    """
    folder = user_folder("FA2GEN_STATE_DIR", "XDG_STATE_HOME", "~/.local/state")
    if folder is None:
        raise StudyError("there is no home folder for studies: set FA2GEN_STATE_DIR")
    return folder / "studies"


def study_name(
    gpu: str, spec: KernelSpec, bucket: Bucket, family: str, template_hash: str, space_key: str, objective: str
) -> str:
    """Readable name with a hash over everything that makes old numbers comparable with new ones.

    The family's grid is part of it: Optuna refuses a study whose parameters had other values.
    """
    identity = json.dumps(
        [gpu, spec.key(), bucket.label(), family, template_hash, space_key, objective, GRIDS[spec.kind][family].values]
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return f"{gpu}_{spec.slug()}_{bucket.label()}_{family}_{digest}"


@dataclass
class Asked:
    """A config to try; give it back with ``TuningStudy.complete`` or ``TuningStudy.fail``."""

    config: Config
    trial: Any


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without Optuna 4's warnings that what is the rule in 5 is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    with _quietly():
        # NumPy's generators take 32 bits.
        return optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=8, multivariate=True, constant_liar=True)


class TuningStudy:
    """Ask and tell over the legal space of one (gpu, spec, bucket) and family.

    Use as a context manager: while it is open, other processes see that its running trials are alive.

    Args:
        gpu, spec, bucket: What is tuned.
        template_hash: Of the templates of the family's kernels.
        space: The family's legal space.
        objective: What the numbers are: ``"measured"``, or the model and compiler that predict them. Never mixed.
        family: Kernel family.
        seed: Of the sampler.
        resume: False puts an earlier study aside (``*.old-<utc>-<pid>``), unless another process is using it, which a
            warning says.
        directory: Of the journal files; default :func:`state_dir`.
        storage: URL of a database in the journal's place, for processes on several hosts; see
            :func:`fa2gen.tuning.storage.open_storage`.

    Raises:
        StudyError: The journal cannot be written, or the database not be opened.
    """

    def __init__(
        self,
        gpu: Gpu,
        spec: KernelSpec,
        bucket: Bucket,
        *,
        template_hash: str,
        space: Space,
        objective: str = "measured",
        family: str = "sm80",
        seed: int = 0,
        resume: bool = True,
        directory: Path | None = None,
        storage: str | None = None,
    ) -> None:
        self._gpu, self._spec, self._space = gpu, spec, space
        self._grid = GRIDS[spec.kind][family]
        self._random = random.Random(seed)
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values) for name, values in self._grid.values.items()
        }
        self.name = study_name(gpu.name, spec, bucket, family, template_hash, space.key(), objective)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._memory = optuna.create_study(sampler=_sampler(seed))
        self._proposed: dict[Config, Any] = {}
        sampler = _sampler(seed + 1)
        self._home: Journal | Database
        if storage is None:
            self._home = Journal(directory or state_dir(), self.name, sampler, resume=resume)
        else:
            self._home = Database(storage, self.name, sampler, resume=resume)
        self._study = self._home.study
        # Trials of earlier sessions that ended without an answer: see standing_failures. Told by their numbers, since a
        # trial that was enqueued then may be asked for only now.
        self._void = {
            trial.number
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
            if trial.user_attrs.get("outcome") == "compile_failed"
        }
        # The sampler learns nothing from those.
        self._synced = set(self._void)

    def __enter__(self) -> TuningStudy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends this process's part; finished trials are on disk already."""
        self._home.close()

    @property
    def path(self) -> Path | None:
        """The journal's file; None for a study in a database."""
        return self._home.path if isinstance(self._home, Journal) else None

    def enqueue(self, config: Config) -> bool:
        """Puts a config in front of the sampler's; False if it lies outside the grid or its outcome is known."""
        if not self._grid.holds(config) or config in self.times() or config in self.standing_failures():
            return False
        with _quietly():
            self._study.enqueue_trial(self._grid.params_of(config))
        return True

    def ask(self) -> Asked | None:
        """The next config whose outcome is not known; None when the sampler finds no more."""
        known, failed, running = self.times(), self.standing_failures(), self._running()
        while True:
            if not self._has_waiting() and not self._propose({*known, *failed, *running}):
                return None
            # Takes the waiting trial; if another process took it first, the journal's sampler makes up another.
            trial = self._study.ask(self._distributions)
            config = self._grid.config_of(trial.params)
            reason = self._exclusion(config)
            if config is None or reason is not None:
                self._tell_failure(trial, "infeasible", str(reason))
            elif config in known:
                self._study.tell(trial, known[config])
            elif config in failed:
                self._tell_failure(trial, *failed[config])
            elif config in running:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._home.begin(trial)
                return Asked(config, trial)
            failed, running = self.standing_failures(), self._running()

    def _exclusion(self, config: Config | None) -> str | None:
        if config is None:
            return "step_divisor gives no whole steps of 16"
        return exclusion_reason(self._spec, config, self._gpu.arch)

    def _has_waiting(self) -> bool:
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _propose(self, taken: set[Config]) -> bool:
        """Enqueues a config that is worth trying; False if none is left.

        Nine points of ten are illegal, and a trial costs the journal a dozen synced writes: so the sampler runs on a
        copy in memory, and the journal gets one write for each illegal point and the whole trial of the legal one.
        """
        left = [config for config in self._space.configs if config not in taken]
        if not left:
            return False
        self._sync()
        for _ in range(_MAX_WASTED_ASKS):
            trial = self._memory.ask(self._distributions)
            config = self._grid.config_of(trial.params)
            reason = self._exclusion(config)
            if config is None or reason is not None:
                self._memory.tell(trial, state=TrialState.PRUNED)
                self._keep_infeasible(trial.params, str(reason))
            elif config in taken:
                self._memory.tell(trial, state=TrialState.FAIL)
            else:
                self._proposed[config] = trial
                with _quietly():
                    self._study.enqueue_trial(trial.params)
                return True
        with _quietly():
            self._study.enqueue_trial(self._grid.params_of(self._random.choice(left)))
        return True

    def _sync(self) -> None:
        """Brings the copy in memory up to date with what this and other processes finished."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            if trial.number in self._synced or set(trial.params) != set(self._grid.values):
                continue
            self._synced.add(trial.number)
            config = self._grid.config_of(trial.params)
            mine = self._proposed.pop(config, None) if config is not None else None
            if mine is None:
                self._memory.add_trial(trial)
            elif trial.state == TrialState.COMPLETE:
                self._memory.tell(mine, trial.values)
            else:
                self._memory.tell(mine, state=TrialState.PRUNED)

    def _keep_infeasible(self, params: dict[str, Any], reason: str) -> None:
        trial = optuna.trial.create_trial(
            state=TrialState.PRUNED,
            params=params,
            distributions=self._distributions,
            user_attrs={"outcome": "infeasible", "reason": reason},
        )
        self._study.add_trial(trial)
        # The copy in memory has it already.
        self._synced.add(self._study.get_trials(deepcopy=False)[-1].number)

    def complete(self, asked: Asked, ms: float, **attrs: Any) -> None:
        """Records a time; ``attrs`` are stored with the trial."""
        for name, value in attrs.items():
            asked.trial.set_user_attr(name, value)
        self._study.tell(asked.trial, ms)

    def fail(self, asked: Asked, outcome: str, reason: str) -> None:
        """Records why a config has no time."""
        self._tell_failure(asked.trial, outcome, reason)

    def record(self, config: Config, ms: float, **attrs: Any) -> None:
        """Adds a config whose time was found without asking, as a finished trial; a known one is left as it is.

        A failure before it was of that session, e.g. of a compiler that was killed; the gate's verdict stands.
        """
        if self.failures().get(config, ("",))[0] != "wrong":
            self._add(config, TrialState.COMPLETE, ms, attrs)

    def record_failure(self, config: Config, outcome: str, reason: str) -> None:
        """Adds a config that failed without having been asked for; a known one is left as it is."""
        _require_outcome(outcome)
        if config not in self.standing_failures():
            self._add(config, TrialState.PRUNED, None, {"outcome": outcome, "reason": reason})

    def _add(self, config: Config, state: TrialState, ms: float | None, attrs: dict[str, Any]) -> None:
        # The default may lie outside the grid; its numbers are in the tables, not in the study.
        if not self._grid.holds(config) or config in self.times():
            return
        trial = optuna.trial.create_trial(
            state=state,
            value=ms,
            params=self._grid.params_of(config),
            distributions=self._distributions,
            user_attrs=attrs,
        )
        self._study.add_trial(trial)

    def abandon(self, asked: Asked) -> None:
        """Gives a config back untried, after an interruption."""
        with contextlib.suppress(Exception):
            self._study.tell(asked.trial, state=TrialState.FAIL)

    def reject(self, config: Config, reason: str) -> None:
        """Marks a timed config as wrong: its time stays on record, but it is no candidate any more."""
        self._study.set_user_attr(f"wrong:{config.key()}", {"slug": config.slug(), "reason": reason})

    def times(self) -> dict[Config, float]:
        """Configs with a time, milliseconds, fastest first; rejected ones left out."""
        wrong = {name.partition(":")[2] for name in self._study.user_attrs if name.startswith("wrong:")}
        times = {}
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            config = self._grid.config_of(trial.params)
            if config is not None and config.key() not in wrong:
                times[config] = float(trial.values[0])
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def failures(self) -> dict[Config, tuple[str, str]]:
        """Configs that cannot be chosen: outcome and reason; not those that were timed after all."""
        return self._failures(frozenset())

    def standing_failures(self) -> dict[Config, tuple[str, str]]:
        """Those of :meth:`failures` that no session need try again: the others failed to compile in an earlier one.

        That can have been the machine's fault (a compiler that was killed, a full disk), so each session asks once
        more; what the compiler truly refuses costs it the seconds of one compilation.
        """
        return self._failures(self._void)

    def _failures(self, void: Set[int]) -> dict[Config, tuple[str, str]]:
        failures = {}
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.PRUNED,)):
            config = self._grid.config_of(trial.params)
            if config is not None and "outcome" in trial.user_attrs and trial.number not in void:
                failures[config] = (trial.user_attrs["outcome"], trial.user_attrs.get("reason", ""))
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            config = self._grid.config_of(trial.params)
            if config is None:
                continue
            failures.pop(config, None)
            verdict = self._study.user_attrs.get(f"wrong:{config.key()}")
            if verdict is not None:
                failures[config] = ("wrong", verdict["reason"])
        return failures

    def attrs(self, config: Config) -> dict[str, Any]:
        """What :meth:`complete` stored with a config."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if self._grid.config_of(trial.params) == config and trial.user_attrs:
                return dict(trial.user_attrs)
        return {}

    def _running(self) -> set[Config]:
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        complete = [trial.params for trial in running if set(trial.params) == set(self._grid.values)]
        return {config for config in map(self._grid.config_of, complete) if config is not None}

    def _tell_failure(self, trial: Any, outcome: str, reason: str) -> None:
        _require_outcome(outcome)
        trial.set_user_attr("outcome", outcome)
        trial.set_user_attr("reason", reason)
        # Pruned, not failed: the sampler learns that the region is no good.
        self._study.tell(trial, state=TrialState.PRUNED)


def _require_outcome(outcome: str) -> None:
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r}")
