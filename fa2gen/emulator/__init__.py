"""Runs the kernels' own text on the CPU and reports races, deadlocks and stray accesses by name (layer 3).

``forward.run_forward`` and ``backward.run_backward`` run kernels on torch tensors; they are not imported here, so that
the emulator itself does not need torch.
"""

from .builder import EmulatedKernel, build, cache_dir, find_host_compiler
from .runner import Buffer, Counters, run

__all__ = [
    "Buffer",
    "Counters",
    "EmulatedKernel",
    "build",
    "cache_dir",
    "find_host_compiler",
    "run",
    "run_backward",
    "run_forward",
]


def __getattr__(name: str) -> object:
    if name == "run_forward":
        from .forward import run_forward

        return run_forward
    if name == "run_backward":
        from .backward import run_backward

        return run_backward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
