"""Locks of the cache: on folders, so that nothing in use is removed, and on builds, so that nothing is built twice.

All are ``flock``: the kernel drops them when their process dies, however it dies, and no clock is involved. A folder is
held (shared) by whoever writes or reads it, and removed only by one who gets it exclusively. Where a file system has no
locks (some network ones), age decides what may be removed, and a kernel may be built twice; nothing else changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

#: Seconds to wait for another process that builds the same kernel before building it here as well.
LOCK_SECONDS = 60.0
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.01, 0.1
#: Without locks, what nobody changed for so long is taken to be left over.
STALE_SECONDS = 24 * 3600.0

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class Lease:
    """Holds a folder: nobody removes it before :meth:`close`, or before the end of this process."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        # A default, since the module's names may be gone when the interpreter ends and the last leases with it.
        handle, self.handle = self.handle, -1
        if handle >= 0:
            _close(handle)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def hold(folder: Path) -> Lease | None:
    """Holds ``folder``; None if it is not there, or is being removed.

    Raises:
        OSError: It is no folder, a symbolic link or cannot be opened.
    """
    try:
        lease = Lease(os.open(folder, _OPEN | os.O_DIRECTORY))
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lease.handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        lease.close()
        return None
    except OSError:
        pass  # no locks on this file system
    # What was locked may have been moved away in between.
    if not same_file(lease.handle, folder):
        lease.close()
        return None
    return lease


def new_folder(parent: Path, prefix: str = "") -> tuple[Path, Lease]:
    """Makes a private folder in ``parent`` under a new name, held from its first moment on.

    Raises:
        OSError: The disk refuses.
    """
    while True:
        folder = parent / f"{prefix}{os.getpid()}-{uuid.uuid4().hex}"
        folder.mkdir(mode=0o700)
        lease = hold(folder)
        if lease is not None:
            return folder, lease
        # Swept between the two lines above.


def remove_if_free(path: Path, aside: Path | None = None) -> bool:
    """Removes a file or a folder unless somebody holds it.

    Args:
        path: What to remove.
        aside: Where to move it first, so that nobody sees it half removed; must not exist.

    Returns:
        Whether it is gone by this call.
    """
    try:
        handle = os.open(path, _OPEN | os.O_NONBLOCK)
    except OSError:
        return path.is_symlink() and remove(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            if time.time() - os.fstat(handle).st_mtime < STALE_SECONDS:
                return False
        if not same_file(handle, path):
            return False
        if aside is not None:
            try:
                os.rename(path, aside)
            except OSError:
                return False
        return remove(aside or path)
    finally:
        os.close(handle)


def remove(path: Path) -> bool:
    """Deletes a file, a link or a folder, whoever uses it. Returns whether it is gone; what cannot be deleted stays."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    return not os.path.lexists(path)


@contextlib.contextmanager
def build_lock(path: Path, seconds: float, is_there: Callable[[], bool]) -> Iterator[None]:
    """Holds the lock file ``path``, or goes on without it: when ``is_there()``, after ``seconds``, or without locks.

    The holder deletes the file, so a lock counts only if the file that was locked is still the one at ``path``.

    Args:
        path: In a folder that exists.
        seconds: How long to wait for a holder, who may hang.
        is_there: Whether what the lock is waited for has been done meanwhile.
    """
    handle = _acquire(path, seconds, is_there)
    try:
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(handle)


def _acquire(path: Path, seconds: float, is_there: Callable[[], bool]) -> int | None:
    deadline = time.monotonic() + seconds
    pause = _FIRST_POLL_SECONDS
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None  # read-only, full, or something else in its place: double work is all that can happen
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(handle, path):
                return handle
            os.close(handle)  # its holder had just deleted it: there is a new one, or none
        except BlockingIOError:
            os.close(handle)
            if is_there() or time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SECONDS)
        except OSError:
            os.close(handle)  # no locks on this file system
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None


def same_file(handle: int, path: Path) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        ours, there = os.fstat(handle), os.lstat(path)
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
