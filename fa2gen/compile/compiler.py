"""From a kernel source to a cubin: cache, then nvcc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from ..codegen import KernelSource
from ..errors import ArgumentError, CompileError, ToolchainError
from .cache import Build, CubinCache, cache_key, default_cache
from .invoke import Processes, run_nvcc, run_pycuda
from .nvcc import Nvcc, find_nvcc, first_release, key_flags
from .ptxas import ResourceUsage, parse_ptxas, require_asynchronous


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's binary for one target.

    Attributes:
        source: What was compiled.
        target: E.g. ``"sm_80"``.
        cubin: The binary.
        resources: Registers, spills and static shared memory by ptxas's account.
        key: Names the cubin: SHA-256 over source text, nvcc build, target and flags.
        from_cache: Whether it was read from the cache (then ``build_seconds`` is what it once took).
        build_seconds: Wall time of nvcc.
        log: nvcc's and ptxas's output.
        nvcc_build_id: The compiler that made it.
    """

    source: KernelSource
    target: str
    cubin: bytes
    resources: ResourceUsage
    key: str
    from_cache: bool
    build_seconds: float
    log: str
    nvcc_build_id: str = ""


def compile_kernel(
    source: KernelSource, target: str, *, nvcc: Nvcc | None = None, cache: CubinCache | None = None
) -> CompiledKernel:
    """Compiles a kernel, or takes it from the cache.

    Without a usable nvcc, a cubin that any nvcc made from the same text, target and flags is served; the newest wins.

    Args:
        source: Rendered for the platform ``"cuda"``.
        target: ``sm_80`` and the like.
        nvcc: Default: :func:`find_nvcc`.
        cache: Default: :func:`default_cache`.

    Raises:
        ArgumentError: The source is not CUDA text.
        CompileError: nvcc refused the source; ``log`` holds its output.
        ToolchainError: The kernel is not cached, and there is no nvcc or it is too old for the target.
        CacheError: $FA2GEN_CACHE_DIR cannot be used safely.
    """
    return _compile(source, target, nvcc, cache or default_cache(), None)


def compile_many(
    jobs: Sequence[tuple[KernelSource, str]],
    *,
    workers: int | None = None,
    on_done: Callable[[int, CompiledKernel | CompileError], None] | None = None,
    nvcc: Nvcc | None = None,
    cache: CubinCache | None = None,
) -> list[CompiledKernel | CompileError]:
    """Compiles many kernels at once, each nvcc a process of its own.

    Args:
        jobs: (source, target) pairs. Equal ones are compiled once.
        workers: nvcc processes at a time; default: the cores that this process may use.
        on_done: Called in this thread with (index of the job, result) as each finishes, in any order.
        nvcc, cache: As for :func:`compile_kernel`.

    Returns:
        One result a job, in the order of the jobs; a refused kernel is its CompileError.

    Raises:
        ToolchainError: A kernel needs nvcc, and there is none or it is too old. The rest is cancelled; so it is by an
            exception from ``on_done`` and by KeyboardInterrupt, which leave no process behind.
    """
    workers = workers if workers is not None else usable_cores()
    if workers < 1:
        raise ArgumentError(f"workers must be at least 1, got {workers}")
    cache = cache or default_cache()
    processes = Processes()
    results: list[CompiledKernel | CompileError | None] = [None] * len(jobs)
    same: dict[tuple[str, str], list[int]] = {}
    for index, (source, target) in enumerate(jobs):
        same.setdefault((source.text, target), []).append(index)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fa2gen-nvcc")
    try:
        pending: dict[Future[CompiledKernel], list[int]] = {
            pool.submit(_compile, *jobs[indices[0]], nvcc, cache, processes): indices for indices in same.values()
        }
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                result = _outcome(future)
                for index in pending.pop(future):
                    mine = result if isinstance(result, CompileError) else replace(result, source=jobs[index][0])
                    results[index] = mine
                    if on_done is not None:
                        on_done(index, mine)
    finally:
        # Idle when all went well; otherwise no job may start, and those that run are ended.
        processes.stop()
        pool.shutdown(wait=True, cancel_futures=True)
    return [result for result in results if result is not None]


def _outcome(future: Future[CompiledKernel]) -> CompiledKernel | CompileError:
    try:
        return future.result()
    except CompileError as error:
        return error


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(
    source: KernelSource, target: str, nvcc: Nvcc | None, cache: CubinCache, processes: Processes | None
) -> CompiledKernel:
    if source.platform != "cuda":
        raise ArgumentError(f"source must be rendered for the platform 'cuda', got {source.platform!r}")
    flags = key_flags(target)
    try:
        compiler = find_nvcc() if nvcc is None else nvcc
        compiler.require(target)
    except ToolchainError as error:
        found = cache.get_any(cache_key(source.text, "", target, flags).source)
        if found is None:
            raise ToolchainError(
                f"kernel {source.entry} for {target} is not in the cache and must be compiled by the nvcc of CUDA "
                f"{'.'.join(map(str, first_release(target)))} or newer: {error}"
            ) from None
        return _compiled(source, target, found[0], found[1], from_cache=True)
    key = cache_key(source.text, compiler.build_id, target, flags)
    build, from_cache = cache.get_or_build(
        key, source.text, lambda: _build(source, target, compiler, processes), kernel=source.entry
    )
    return _compiled(source, target, key.full, build, from_cache=from_cache)


def _build(source: KernelSource, target: str, nvcc: Nvcc, processes: Processes | None) -> Build:
    start = time.perf_counter()
    done = run_pycuda(source.text, target, nvcc) if processes is None else None
    cubin, log = done or run_nvcc(source.text, target, nvcc, processes)
    seconds = time.perf_counter() - start
    require_asynchronous(log, source.entry)
    return Build(cubin, parse_ptxas(log, source.entry), log, nvcc.version, nvcc.build_id, seconds)


def _compiled(source: KernelSource, target: str, key: str, build: Build, *, from_cache: bool) -> CompiledKernel:
    return CompiledKernel(
        source=source,
        target=target,
        cubin=build.cubin,
        resources=build.resources,
        key=key,
        from_cache=from_cache,
        build_seconds=build.seconds,
        log=build.log,
        nvcc_build_id=build.nvcc_build_id,
    )
