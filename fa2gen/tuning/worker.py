"""A child process that owns the GPU: a trial that crashes the CUDA context or hangs takes only the child with it.

The parent sends a request and waits with a watchdog. A child that dies or hangs is replaced, and the trial gets a typed
failure. Frames are an 8-byte length and a pickle, over the child's standard input and output; what a library prints
goes to the child's standard error, whose end is quoted when it dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from fa2gen.errors import Fa2genError, LaunchError

_LENGTH = struct.Struct("<Q")
# Seconds that a killed child may take to be gone.
_END_TIMEOUT = 30.0
Handler = Callable[[str, Any], Any]


class TrialFailure(Fa2genError):
    """A trial's typed failure.

    Attributes:
        outcome: One of ``study.OUTCOMES``.
        fatal: The child cannot go on (its CUDA context is gone) and is replaced.
    """

    def __init__(self, outcome: str, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.fatal = fatal


class DeviceUnfit(LaunchError):
    """The device cannot do what is asked of it, whatever the config: it has too little memory left, say."""


class Worker:
    """Parent's handle of the child.

    Args:
        handler: ``"module:factory"``; the child calls ``factory(**options)`` once and the returned function for every
            request, as ``function(operation, payload)``.
        options: Keyword arguments of the factory.
        env: Extra environment of the child.
    """

    def __init__(
        self, handler: str, options: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._handler, self._options, self._env = handler, dict(options or {}), dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        """Starts the child unless it runs; returns at once, so that its imports overlap the parent's work."""
        if self._process is not None:
            return
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [self._env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        self._process = subprocess.Popen(
            # Not -m: the module would run as __main__ and its TrialFailure be another class than the handler's.
            [sys.executable, "-c", f"from fa2gen.tuning.worker import serve; serve({os.getpid()})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **self._env, "PYTHONPATH": os.pathsep.join(paths)},
            # Ctrl-C goes to the parent alone, which then ends the session in order.
            start_new_session=True,
        )
        self.starts += 1
        assert self._process.stdin is not None
        # A child that hangs while it starts must not block the parent's writes.
        os.set_blocking(self._process.stdin.fileno(), False)
        with contextlib.suppress(BrokenPipeError):
            _write_all(self._process.stdin.fileno(), _frame((self._handler, self._options)), None)

    def call(self, operation: str, payload: Any = None, *, timeout: float) -> Any:
        """Runs one request in the child.

        Args:
            operation, payload: For the handler; the payload is pickled.
            timeout: Seconds until the child counts as hung; its start is included when it is not running yet.

        Raises:
            TrialFailure: The handler raised (its outcome, or ``launch_failed``), the child died (``launch_failed``) or
                hung (``timeout``).
            DeviceUnfit: The handler says that it can serve no such request.
        """
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout
        try:
            _write_all(process.stdin.fileno(), _frame((operation, payload)), deadline)
            reply = _receive(process.stdout.fileno(), deadline)
        except TimeoutError:
            self.stop()
            reason = f"no answer within {timeout:.0f} s; the measuring process was replaced"
            raise TrialFailure("timeout", reason) from None
        except (BrokenPipeError, EOFError):
            raise TrialFailure("launch_failed", self._obituary(process), fatal=True) from None
        except BaseException:
            # An interruption between request and answer would leave the answer to the next request.
            self.stop()
            raise
        status, *rest = reply
        if status == "ok":
            return rest[0]
        if status == "unfit":
            self.stop()
            raise DeviceUnfit(rest[0])
        outcome, reason, fatal = rest
        if fatal:
            self.stop()
        raise TrialFailure(outcome, reason, fatal=fatal)

    def _obituary(self, process: subprocess.Popen[bytes]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        code = process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        words = ""
        if self._stderr is not None:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - 600))
            words = self._stderr.read().decode(errors="replace").strip()
        self.stop()
        return f"the measuring process died ({how})" + (f": {words}" if words else "")

    def kill(self) -> None:
        """Ends the child from another thread than the one that calls it; that call fails, and its thread cleans up."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """Ends the child, at once and whatever it is doing; the next call starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            # A process that waits for a lost GPU inside the driver cannot be ended; it must not take this one along.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END_TIMEOUT)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None


def _frame(value: Any) -> bytes:
    data = pickle.dumps(value)
    return _LENGTH.pack(len(data)) + data


def _write_all(descriptor: int, data: bytes, deadline: float | None) -> None:
    view = memoryview(data)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        while view:
            _await(selector, deadline)
            view = view[os.write(descriptor, view[:65536]) :]


def _receive(descriptor: int, deadline: float | None = None) -> Any:
    (length,) = _LENGTH.unpack(_read_exactly(descriptor, _LENGTH.size, deadline))
    return pickle.loads(_read_exactly(descriptor, length, deadline))


def _read_exactly(descriptor: int, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(data) < count:
            _await(selector, deadline)
            chunk = os.read(descriptor, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
    return bytes(data)


def _await(selector: selectors.BaseSelector, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if (left is not None and left <= 0) or not selector.select(left):
        raise TimeoutError


def serve(parent: int) -> None:
    """The child's loop: ends when the parent closes the pipe or dies.

    Args:
        parent: The parent's process id.
    """
    # A hung kernel would outlive a killed parent: ask Linux for a kill when the parent goes (the thread of it that
    # started this process, to be exact; that one waits for it), and go if it went before.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        return
    answers = os.dup(1)
    os.dup2(2, 1)
    name, options = _receive(0)
    module, _, factory = name.partition(":")
    unfit: DeviceUnfit | None = None
    try:
        handler: Handler = getattr(importlib.import_module(module), factory)(**options)
    except DeviceUnfit as error:
        unfit = error
    while True:
        try:
            operation, payload = _receive(0)
        except EOFError:
            return
        try:
            if unfit is not None:
                raise unfit
            reply: tuple[Any, ...] = ("ok", handler(operation, payload))
        except TrialFailure as failure:
            reply = ("failed", failure.outcome, str(failure), failure.fatal)
        except DeviceUnfit as error:
            reply = ("unfit", str(error))
        except Exception as error:
            # Unknown state: the child is replaced.
            reply = ("failed", "launch_failed", f"{type(error).__name__}: {error}", True)
        _write_all(answers, _frame(reply), None)
