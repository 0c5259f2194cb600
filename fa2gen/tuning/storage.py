"""Where a study lies: a journal file of its own, or a database that several hosts share."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import re
import time
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from fa2gen.errors import StudyError
from fa2gen.tables import utc_now

from .journal import Session, open_journal, put_aside, sweep_sessions

# Processes that create the same tables at once stumble over each other; each try finds more of them made.
_TRIES = 12
# Seconds that a writer waits for other writers of an SQLite file.
_SQLITE_WAIT = 120.0
# A database does not know which processes live. No trial takes this many seconds, its batch's compilation included.
_LONGEST_TRIAL = 3600.0


class Journal:
    """A study in a journal file of its own, so that a damaged one costs one study.

    Args:
        folder: Of the journals; made if it is not there.
        name: Of the study and, with ``.journal``, of the file.
        sampler: Of the study.
        resume: False puts an earlier journal aside, unless another process works on it, which a warning says.

    Attributes:
        path: The file.
        study: Optuna's; no trial of a dead process is left running in it.

    Raises:
        StudyError: The file cannot be read or written.
    """

    def __init__(self, folder: Path, name: str, sampler: optuna.samplers.BaseSampler, *, resume: bool) -> None:
        self.path = folder / f"{name}.journal"
        # Shared by every process that works on the study; the one that gets it alone may clean up after dead ones.
        self._session = Session(self.path.with_suffix(".session"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sweep_sessions(folder)
            self.study = self._open(name, sampler, resume)
        except OSError as error:
            self._session.close()
            raise StudyError(f"the study {self.path} cannot be opened: {error}") from None
        except BaseException:
            self._session.close()
            raise

    def _open(self, name: str, sampler: optuna.samplers.BaseSampler, resume: bool) -> optuna.Study:
        while True:
            alone = self._session.open()
            if not resume and not alone:
                _warn_of_company(name)
            elif not resume and self.path.exists():
                put_aside(self.path, "old")
            resume = True
            study = _load_or_create(open_journal(self.path, in_use=not alone), name, sampler)
            if alone:
                for trial in _running(study):
                    study.tell(trial.number, state=TrialState.FAIL)
            opened = self.path.stat()
            self._session.share()
            # To let others in takes two steps; one that came in between thought itself alone, and may have put the
            # journal aside.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(opened, self.path.stat()):
                    return study

    def begin(self, trial: optuna.Trial) -> None:
        """Nothing to note: the session's lock tells that its process lives."""

    def close(self) -> None:
        """Lets go of the study; it may be opened again."""
        self._session.close()


class Database:
    """A study in a database that processes on several hosts share.

    Args:
        url: As :func:`open_storage` takes it.
        name: Of the study.
        sampler: Of the study.
        resume: False renames an earlier study, unless trials are running in it, which a warning says.

    Attributes:
        study: Optuna's.

    Raises:
        StudyError: As :func:`open_storage`.
    """

    def __init__(self, url: str, name: str, sampler: optuna.samplers.BaseSampler, *, resume: bool) -> None:
        storage = open_storage(url)
        self._engine = storage.engine
        self.study = _load_or_create(storage, name, sampler)
        for trial in filter(_is_dead, _running(self.study)):
            with contextlib.suppress(ValueError):  # another process was faster
                self.study.tell(trial.number, state=TrialState.FAIL)
        if not resume and _running(self.study):
            _warn_of_company(name)
        elif not resume:
            # Optuna has no renaming.
            aside = f"{name}.old-{utc_now().replace(':', '')}-{os.getpid()}"
            optuna.copy_study(from_study_name=name, from_storage=storage, to_storage=storage, to_study_name=aside)
            optuna.delete_study(study_name=name, storage=storage)
            self.study = _load_or_create(storage, name, sampler)

    def begin(self, trial: optuna.Trial) -> None:
        """Notes when a trial began: its process may die unseen."""
        trial.set_user_attr("asked", time.time())

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()


def open_storage(url: str) -> RDBStorage:
    """Optuna's storage at a URL, e.g. ``sqlite:///studies.db`` or ``postgresql://user@host/studies``.

    Raises:
        StudyError: No storage URL, one of a database in memory, a package that it needs is missing, or the database
            does not answer.
    """
    if not isinstance(url, str) or "://" not in url:
        raise StudyError(
            f"storage {url!r} is no URL: give one that Optuna takes, e.g. sqlite:///studies.db or "
            "postgresql://user@host/studies"
        )
    if re.fullmatch(r"sqlite(\+\w+)?://(/(:memory:)?)?(\?.*)?", url):
        raise StudyError(f"storage {url} names no file: the study would end with this process")
    for attempt in range(_TRIES):
        try:
            return RDBStorage(url, engine_kwargs=_engine_options(url))
        except ImportError as error:
            # Optuna's own words name no package, the error that it caught does.
            missing = getattr(error.__cause__ or error, "name", None) or "its database module"
            raise StudyError(f"storage {_hidden(url)} needs the package {missing}, which is not installed") from None
        except Exception as error:  # each database has exceptions of its own
            if _is_wrong(error):
                raise StudyError(f"storage {_hidden(url)} is no URL that Optuna takes: {_first_line(error)}") from None
            if attempt == _TRIES - 1:
                raise StudyError(f"storage {_hidden(url)} cannot be opened: {_first_line(error)}") from None
        time.sleep(random.uniform(0.02, 0.1) * (1 + attempt))
    raise AssertionError("the last try returns or raises")


def require_storage(url: str) -> None:
    """Raises now what :func:`open_storage` would raise after minutes of compiling."""
    open_storage(url).engine.dispose()


def _load_or_create(storage: BaseStorage, name: str, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    return optuna.create_study(storage=storage, study_name=name, sampler=sampler, load_if_exists=True)


def _running(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def _is_dead(trial: FrozenTrial) -> bool:
    """Whether a running trial of a database has been running for too long."""
    asked = trial.user_attrs.get("asked")
    if asked is not None:
        return bool(time.time() - float(asked) > _LONGEST_TRIAL)
    # Optuna writes local time without its zone, which may be another host's.
    start = trial.datetime_start
    return start is not None and datetime.datetime.now() - start > datetime.timedelta(days=1, seconds=_LONGEST_TRIAL)


def _warn_of_company(name: str) -> None:
    warnings.warn(
        f"the study {name} is not put aside but gone on with: another process works on it",
        RuntimeWarning,
        stacklevel=5,
    )


def _engine_options(url: str) -> dict[str, Any]:
    if not url.startswith("sqlite"):
        return {}
    # A transaction that reads first and writes later fails at once where another writes meanwhile, whatever the
    # timeout: 7 of 32 processes in optuna/optuna#820. One that takes the write lock when it begins waits its turn.
    return {"connect_args": {"timeout": _SQLITE_WAIT, "isolation_level": "IMMEDIATE"}}


def _is_wrong(error: Exception) -> bool:
    """Whether no number of tries will help: the URL itself cannot be read."""
    return type(error).__name__ in ("ArgumentError", "NoSuchModuleError") or isinstance(error, ValueError)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _hidden(url: str) -> str:
    """The URL without its password."""
    scheme, _, rest = url.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}" if at else url
