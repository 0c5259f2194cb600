"""Compiling configs: each is as many kernels as its kind has, and they come back together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fa2gen.compile import CompiledKernel
from fa2gen.constraints_sm90 import compile_target
from fa2gen.errors import CompileError
from fa2gen.spec import Config, KernelSpec

if TYPE_CHECKING:
    from .tools import Tools

Build = tuple[CompiledKernel, ...]
"""The kernels of a config, in the order in which they run."""


def main_kernel(build: Build) -> CompiledKernel:
    """The one that does the work, and has the kind's own name."""
    return next(kernel for kernel in build if kernel.source.kernel == kernel.source.spec.kind)


def compile_configs(
    tools: Tools,
    jobs: Sequence[tuple[KernelSpec, Config]],
    target: str,
    on_done: Callable[[int, Build | CompileError], None],
    count: Callable[[int, int], None] = lambda compiled, cached: None,
) -> list[Build | CompileError]:
    """Compiles configs side by side.

    Args:
        tools: Renders and compiles.
        jobs: Specs and configs.
        target: The GPU's, ``sm_80`` and the like; a family may need a variant of it.
        on_done: Called in this thread with (index of the job, result) once all kernels of a config are there, or one
            was refused, in any order. What it raises ends the compiling.
        count: Called with the numbers of kernels (compiled, taken from the cache), each text counting once.

    Returns:
        One result a job, in the order of the jobs; a config with a refused kernel is that one's CompileError.
    """
    rendered = [tools.render(spec, config) for spec, config in jobs]
    sources = [source for mine in rendered for source in mine]
    owners = [index for index, mine in enumerate(rendered) for _ in mine]
    first = [owners.index(index) for index in range(len(jobs))]
    kernels: list[CompiledKernel | None] = [None] * len(sources)
    results: list[Build | CompileError | None] = [None] * len(jobs)
    # Those before and after a backward's main kernel are the same for most configs.
    seen: set[str] = set()

    def on_kernel(position: int, answer: CompiledKernel | CompileError) -> None:
        index = owners[position]
        if isinstance(answer, CompiledKernel) and sources[position].text not in seen:
            seen.add(sources[position].text)
            count(not answer.from_cache, answer.from_cache)
        if results[index] is not None:
            return  # another of its kernels was refused
        done: Build | CompileError
        if isinstance(answer, CompileError):
            done = answer
        else:
            kernels[position] = answer
            mine = kernels[first[index] : first[index] + len(rendered[index])]
            done = tuple(kernel for kernel in mine if kernel is not None)
            if len(done) < len(mine):
                return
        results[index] = done
        on_done(index, done)

    tools.compile_many([(source, compile_target(source.config, target)) for source in sources], on_kernel)
    return [result for result in results if result is not None]
