"""Runs the kernels' own text on the CPU and reports races, deadlocks and stray accesses by name (layer 3).

``forward.run_forward`` runs the forward kernel on torch tensors; it is not imported here, so that the emulator itself
does not need torch.
"""

from .builder import EmulatedKernel, build, cache_dir, find_host_compiler
from .runner import Buffer, Counters, run

__all__ = ["Buffer", "Counters", "EmulatedKernel", "build", "cache_dir", "find_host_compiler", "run", "run_forward"]


def __getattr__(name: str) -> object:
    if name == "run_forward":
        from .forward import run_forward

        return run_forward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
