"""A study's files: a journal that survives kills and damage, and the mark of the sessions that work on it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import warnings
from pathlib import Path
from typing import IO, Any

from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from fa2gen.errors import StudyError
from fa2gen.tables.locks import is_same_file
from fa2gen.tables.store import free_name

from .space import GRIDS

_CHUNK = 65536


class _JournalLock:
    """flock on the journal itself: it dies with its holder, unlike Optuna's lock files, and leaves no file.

    A writer killed in the middle leaves a line without its end; a later append would join it and make the journal
    unreadable for good. Whoever takes the lock next cuts such a rest off.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        file = self.take()
        rest = _torn_line(file)
        if rest:
            file.truncate(file.seek(0, os.SEEK_END) - len(rest))
        return True

    def take(self) -> IO[bytes]:
        """Takes the lock and changes nothing."""
        while True:
            file = os.fdopen(os.open(self._journal, os.O_RDWR | os.O_CREAT, 0o644), "rb+")
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have put the journal aside meanwhile.
            if is_same_file(file.fileno(), self._journal):
                self._file = file
                return file
            file.close()

    def release(self) -> None:
        # First forgotten, then let go: whoever waits in another thread puts its own file in the place.
        file, self._file = self._file, None
        if file is not None:
            # Closing would not do where a child that was forked meanwhile has a copy of it.
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()


def _torn_line(file: IO[bytes], before: int | None = None) -> bytes:
    """What follows the last newline in the file, or in so many bytes of it."""
    rest = b""
    end = file.seek(0, os.SEEK_END) if before is None else before
    while end:
        start = max(0, end - _CHUNK)
        file.seek(start)
        chunk = file.read(end - start)
        at = chunk.rfind(b"\n")
        rest = chunk[at + 1 :] + rest
        if at >= 0:
            break
        end = start
    return rest


def open_journal(path: Path, *, in_use: bool = False) -> JournalStorage:
    """The storage in a journal file, made if there is none.

    A last line that a kill or a power cut tore is cut off. A journal that is damaged otherwise is put aside as
    ``<name>.damaged-<utc>-<pid>`` with a warning, and a new one begins: damage costs one study.

    Args:
        path: Of the file.
        in_use: Other processes work on it: it is not taken from under them.

    Raises:
        StudyError: The journal is damaged and ``in_use``.
        OSError: The file cannot be read or written.
    """
    # Optuna asks for acquire() and release() alone; its base class is not public.
    lock: Any = _JournalLock(path)
    file = lock.take()
    try:
        reason = _cut_or_refuse(file)
        if reason is None:
            try:
                return _replayed(path, lock)
            except OSError:
                raise
            except Exception as error:  # whatever the replay of foreign lines raises
                reason = f"{type(error).__name__}: {error}"
        if in_use:
            raise StudyError(f"the study {path} is damaged ({reason}), and another process works on it: end that first")
        aside = put_aside(path, "damaged")
        warnings.warn(
            f"the study {path} is damaged ({reason}); it is kept as {aside.name} and a new one begins",
            RuntimeWarning,
            stacklevel=3,
        )
        path.touch()
        return _replayed(path, lock)
    finally:
        lock.release()


def _cut_or_refuse(file: IO[bytes]) -> str | None:
    """Cuts a torn last line off; why the rest cannot be one of ours, or None."""
    rest = _torn_line(file)
    whole = file.seek(0, os.SEEK_END) - len(rest)
    # A file system that had extended the file before its power went shows zeros.
    if rest.strip(b"\0") and not rest.startswith(b"{"):
        return "its end is no line of a journal"
    if rest:
        file.truncate(whole)
    # Optuna forgives a last line that it cannot read, in its first reading of a file and not in the second.
    try:
        json.loads(_torn_line(file, before=whole - 1) if whole else b"{}")
    except (ValueError, RecursionError) as error:
        return f"its last line: {error}"
    return None


def _replayed(path: Path, lock: Any) -> JournalStorage:
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    for study in storage.get_all_studies():
        for trial in storage.get_all_trials(study._study_id, deepcopy=False):
            _require_ours(trial)
    return storage


def _require_ours(trial: FrozenTrial) -> None:
    """Raises ValueError where a replayed trial is none that a study of these grids holds."""
    for name, distribution in trial.distributions.items():
        grids = (grid for families in GRIDS.values() for grid in families.values())
        known = [CategoricalDistribution(grid.values[name]) for grid in grids if name in grid.values]
        if distribution not in known:
            raise ValueError(f"trial {trial.number} has other values for {name}")
    trial._validate()


def put_aside(path: Path, why: str) -> Path:
    """Renames a journal to ``<name>.<why>-<utc>-<pid>``."""
    return path.rename(free_name(path, why))


class Session:
    """Which processes work on a study: a file that each of them holds a shared lock on, for as long as it lives.

    Args:
        path: Of the file. The last one to close it removes it, and so does any later session in the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def open(self) -> bool:
        """Waits for its turn; True if nobody else works on the study, who then has to wait for :meth:`share`."""
        self.close()
        while True:
            file = open(self._path, "w")  # noqa: SIM115  (open until close)
            alone = _try_exclusive(file)
            if not alone:
                fcntl.flock(file, fcntl.LOCK_SH)
            if is_same_file(file.fileno(), self._path):
                self._file = file
                return alone
            file.close()

    def share(self) -> None:
        """Lets others in."""
        assert self._file is not None
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Leaves; the last one takes the file along."""
        file, self._file = self._file, None
        if file is None:
            return
        with file:
            if _try_exclusive(file) and is_same_file(file.fileno(), self._path):
                with contextlib.suppress(OSError):
                    self._path.unlink()


def sweep_sessions(folder: Path) -> None:
    """Removes the session files of killed processes."""
    for path in folder.glob("*.session"):
        with contextlib.suppress(OSError), open(path, "r+") as file:
            if _try_exclusive(file) and is_same_file(file.fileno(), path):
                path.unlink()


def _try_exclusive(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
