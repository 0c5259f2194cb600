"""Compilers as child processes: drivers of other programs, which end together, also when this process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

# Its standard input is a pipe that nobody writes to: it ends when this process does, however that ends. Asking Linux
# for a signal at the parent's death (PR_SET_PDEATHSIG) would reach the driver alone, and not what it has started.
_WATCH = 'read -r _; kill -s KILL -- "-$1"'
# The program itself begins when its watcher is there: if this process is killed before, this shell reads no line.
_HOLD = 'read -r _ && exec "$@" </dev/null'


class Child:
    """A running program and those that it started, in a process group of their own.

    Args:
        command: The program and its arguments.
        folder: Where it runs, and where it puts its temporary files: they go with the folder.

    Attributes:
        group: The process group's id.

    Raises:
        OSError: It does not start.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _HOLD, "sh", *command],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.group = self._process.pid
        self._watcher: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no more processes: the compiler is there all the same
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "sh", str(self.group)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        begin, self._process.stdin = self._process.stdin, None
        assert begin is not None
        with contextlib.suppress(BrokenPipeError), begin:  # it was ended from outside: finish() tells
            begin.write("\n")

    def finish(self, seconds: float) -> tuple[int, str]:
        """Waits for its end: exit status, and everything it wrote.

        Raises:
            subprocess.TimeoutExpired: It took longer than ``seconds`` and was ended; so it is by any other exception.
        """
        try:
            output, _ = self._process.communicate(timeout=seconds)
            return self._process.returncode, output
        except BaseException:
            self.end()
            self._process.communicate()
            raise
        finally:
            if self._watcher is not None:
                self._watcher.kill()
                self._watcher.communicate()

    def end(self) -> None:
        """Kills it and what it started; :meth:`finish`, perhaps in another thread, returns then."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
