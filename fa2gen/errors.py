"""Every exception that fa2gen raises on purpose.

All derive from ``Fa2genError``; the command line turns them into one line and an exit code. Errors about arguments are
also ``ValueError``, so that callers who know nothing of fa2gen catch them as they expect.
"""

from __future__ import annotations


class Fa2genError(Exception):
    """Base of fa2gen's errors; ``str(error)`` is one complete sentence for a person."""


class ArgumentError(Fa2genError, ValueError):
    """A bad argument: the message names it and says what is supported."""


class UnsupportedError(ArgumentError):
    """A valid request that no kernel of this version can serve."""


class InfeasibleError(Fa2genError):
    """A config that breaks a limit of the chip or of the kernel family; the message is the reason."""


class ToolchainError(Fa2genError):
    """nvcc, g++ or a CUDA library is missing or too old; the message says how to get it."""


class CompileError(Fa2genError):
    """A compiler refused a rendered kernel; ``log`` holds its output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log

    @property
    def full_text(self) -> str:
        """The message, then what the compiler wrote besides the lines that the message quotes."""
        message = str(self).splitlines()
        output = [line.rstrip() for line in self.log.splitlines()]
        return "\n".join(message + [line for line in output if not any(m.endswith(line.strip()) for m in message)])


class CacheError(Fa2genError):
    """The kernel cache cannot be used safely (foreign owner, world-writable)."""


class EmulatorError(Fa2genError):
    """The emulator stopped a kernel: ``name`` is the stable name of the diagnostic."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)  # what a copy is made from, as where a process hands the error to another
        self.name = name

    def __str__(self) -> str:
        return ": ".join(self.args)


class LaunchError(Fa2genError):
    """The CUDA driver refused to load or launch a kernel, or the kernel failed."""


class GateError(Fa2genError):
    """A kernel's result differs from the float64 reference by more than the tolerance rule allows."""


class TableError(Fa2genError):
    """A tuned table cannot be read or written; the file is left as it was."""


class StudyError(Fa2genError):
    """A tuning study cannot be opened or kept: a folder that cannot be written, a storage URL that leads nowhere."""
