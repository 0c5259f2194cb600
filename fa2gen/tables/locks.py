"""Lock files that leave nothing behind: a lock dies with its holder, who takes the file along."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(name: Path) -> Iterator[None]:
    """Exclusive lock among processes and threads, for as long as the context lasts."""
    while True:
        with open(name, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The holder before may have removed the file that was waited for: a lock on it excludes nobody.
            if not is_same_file(lock.fileno(), name):
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    name.unlink()
                # Closing would not do where a child that was forked meanwhile has a copy of it.
                fcntl.flock(lock, fcntl.LOCK_UN)
            return


def is_same_file(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one that its path names."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
