"""Content-addressed entries below one folder: one store for cubins, rendered text and the emulator's programs.

Layout, below :func:`~fa2gen.compile.location.cache_root`::

    kernels/<source key>/<key>/   cubins            (compile.cache)
    emulator/<key>/               host programs     (emulator.builder)
    sources/<key>/                rendered text     (compile.sources)
    locks/<key>.lock              while a process builds that entry
    tmp/                          entries being written or removed

An entry appears complete or not at all: its files are written below ``tmp/``, flushed to the disk, and the folder is
renamed. What is read is checked (:mod:`.entry`); a bad entry is removed and built again, never used. What a killed
process left in ``tmp/`` or ``locks/`` goes with the next entry that is stored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .entry import Contents, DamageError, Entry, flush, read_entry, write_entry, write_file
from .location import warn_once
from .locks import LOCK_SECONDS, build_lock, new_folder, remove, remove_if_free

#: Section -> how deep below it entries lie.
SECTIONS = {"kernels": 2, "emulator": 1, "sources": 1}
SCRATCH_PREFIX = "fa2gen-scratch-"
_ATTEMPTS = 5

# Sweeping removes what matches, and nothing else: $FA2GEN_CACHE_DIR may name a folder that holds other things too.
_TEMPORARY = re.compile(r"\d+-[0-9a-f]{32}")
_LOCK = re.compile(r"[0-9a-z-]+\.lock")
ENTRY = re.compile(r"(?:[0-9a-f]{64}/)?(?:[0-9a-f]{64}|(?:kernel|runtime)-[0-9a-f]{32})")


class EntryStore:
    """The entries of one section of a cache folder. Threads and processes may share it.

    It never raises because of the disk: what cannot be stored is returned all the same, with one warning.

    Args:
        root: Folder of all caches.
        section: Of :data:`SECTIONS`.
        lock_seconds: How long to wait for another process that builds the same entry.
    """

    def __init__(self, root: Path, section: str, *, lock_seconds: float = LOCK_SECONDS) -> None:
        self.root = root
        self.folder = root / section
        self._lock_seconds = lock_seconds

    def read(self, name: str, wanted: Sequence[str]) -> Entry | None:
        """The entry called ``name`` (its path in the section, which ends in its key); None: none that can be used."""
        try:
            return read_entry(self.folder / name, os.path.basename(name), wanted)
        except (DamageError, OSError):
            return None

    def read_or_build(self, name: str, wanted: Sequence[str], build: Callable[[], Contents]) -> tuple[Entry, bool]:
        """The entry called ``name``, else the result of ``build``, stored.

        Args:
            name: As for :meth:`read`.
            wanted: The files that are read; an entry that could not be stored has all.
            build: Called at most once, and by one process at a time unless a lock was waited for in vain.

        Returns:
            The entry, and whether it was there. Its lease is the caller's. Errors of ``build`` pass through; nothing
            is stored then.
        """
        found = self.read(name, wanted)
        if found is not None:
            return found, True
        path, key = self.folder / name, os.path.basename(name)
        before = _identity(path)  # of a damaged entry, which the holder of the lock replaces
        with self._lock(key, lambda: _identity(path) not in (None, before)):
            try:
                # Again, now alone: another process may have stored it, or have replaced the damaged one seen above.
                found = read_entry(path, key, wanted)
                if found is not None:
                    return found, True
            except DamageError as damage:
                self._discard(path, damage)
            except OSError:
                pass  # it may be whole: what is built now replaces it for this process only
            contents = build()
            stored = self._store(path, key, contents, wanted)
        return stored or Entry(contents.files, contents.facts), False

    @contextlib.contextmanager
    def _lock(self, key: str, is_there: Callable[[], bool]) -> Iterator[None]:
        locks = self.root / "locks"
        with contextlib.suppress(OSError):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have deleted the whole cache
            make_folder(locks)
        with build_lock(locks / f"{key}.lock", self._lock_seconds, is_there):
            yield

    def _discard(self, path: Path, damage: DamageError) -> None:
        warnings.warn(f"cached kernel {path} is damaged ({damage}): building it again", RuntimeWarning, stacklevel=5)
        discard(self.root, path)

    def _store(self, path: Path, key: str, contents: Contents, wanted: Sequence[str]) -> Entry | None:
        """Stores an entry and reads it back; None where the disk refuses."""
        try:
            self._publish(path, key, contents)
        except OSError as error:
            warn_once(
                f"{self.root} {error.errno}",
                f"the kernel cache {self.root} cannot be written ({error.strerror}): "
                "new kernels are kept for this process only",
            )
            return None
        finally:
            sweep(self.root)
        return self.read(str(path.relative_to(self.folder)), wanted)

    def _publish(self, path: Path, key: str, contents: Contents) -> None:
        make_folder(self.root / "tmp")
        temporary, lease = new_folder(self.root / "tmp")
        try:
            write_entry(temporary, key, contents)
            for attempt in range(_ATTEMPTS):
                for parent in (self.folder, path.parent):
                    make_folder(parent)
                try:
                    os.rename(temporary, path)
                    break
                except OSError as error:
                    # Lost a race: the other copy was complete when it appeared, and is as good as this one. (Or it is
                    # damage that could not be removed: reading it back tells.)
                    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                        return
                    # A clean-up may remove an empty parent folder just before the rename.
                    if error.errno != errno.ENOENT or attempt == _ATTEMPTS - 1:
                        raise
            with contextlib.suppress(FileNotFoundError):  # a clean-up was quick
                flush(path.parent)
        finally:
            lease.close()
            remove(temporary)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def make_folder(path: Path) -> None:
    """Makes a private folder below a cache's own; a file or a dead link in its place goes.

    Raises:
        OSError: The disk refuses.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            path.unlink(missing_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)


def discard(root: Path, path: Path) -> bool:
    """Removes an entry whoever uses it, in one step for those who look. Returns whether it is gone."""
    with contextlib.suppress(OSError):
        make_folder(root / "tmp")
        aside, lease = new_folder(root / "tmp")
        try:
            os.rename(path, aside / "damaged")
        finally:
            lease.close()
            remove(aside)
    return not os.path.lexists(path)


def leftovers(root: Path) -> list[Path]:
    """What lies in ``tmp/`` and ``locks/``: in use now, or left by a process that was killed."""
    found = []
    for folder, pattern in ((root / "tmp", _TEMPORARY), (root / "locks", _LOCK)):
        with contextlib.suppress(OSError):
            found += [folder / name for name in os.listdir(folder) if pattern.fullmatch(name)]
    return sorted(found)


def sweep(root: Path) -> int:
    """Removes what killed processes left; returns how many files and folders that were."""
    return sum(remove_if_free(path) for path in leftovers(root))


def replace_file(root: Path, name: str, data: bytes) -> None:
    """Writes the file ``name`` of the cache folder, whole or not at all.

    Raises:
        OSError: The disk refuses; the file is as it was.
    """
    make_folder(root / "tmp")
    temporary, lease = new_folder(root / "tmp")
    try:
        write_file(temporary / name, data, 0o600)
        os.replace(temporary / name, root / name)
    finally:
        lease.close()
        remove(temporary)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for a compiler's temporary files, in the system's place for them: a full cache must not stop a build.

    It goes at the end. If this process is killed, the next one that takes a scratch folder removes it.

    Raises:
        OSError: It cannot be made.
    """
    parent = Path(tempfile.gettempdir())
    sweep_scratch()
    folder, lease = new_folder(parent, SCRATCH_PREFIX)
    try:
        yield folder
    finally:
        lease.close()
        remove(folder)


def scratch_leftovers() -> list[Path]:
    """This user's scratch folders: in use now, or left by a process that was killed."""
    found = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(SCRATCH_PREFIX):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found.append(Path(entry.path))
    return sorted(found)


def sweep_scratch() -> int:
    """Removes scratch folders of killed processes; returns how many."""
    return sum(remove_if_free(path) for path in scratch_leftovers())
