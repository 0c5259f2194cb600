"""Occupancy as computed from ptxas's report, against the driver's own account of the loaded kernel."""

from __future__ import annotations

import pytest

from fa2gen import driver
from fa2gen.codegen import KernelSource, kernels_of, render_kernel
from fa2gen.compile import CompiledKernel, compile_many
from fa2gen.constraints import default_config
from fa2gen.errors import CompileError
from fa2gen.hardware import arch_limits, match_device, occupancy
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tuning.shortlist import shortlist

KB = 1024
# (values that must live in registers at the same time, threads, shared memory): each limit and its edges.
CASES = [
    *((live, threads, 0) for live in (8, 64, 100, 140, 200) for threads in (32, 96, 128, 256, 512)),
    *((8, threads, 0) for threads in (64, 160, 768, 1024)),
    *((8, 128, smem) for smem in (1, 3 * KB, 31 * KB, 32 * KB, 49 * KB, 64 * KB, 75 * KB, 75 * KB + 1)),
    *((100, 256, smem) for smem in (24 * KB, 48 * KB, 81 * KB + 1)),
]
HEAD_DIMS = {"fwd": (64, 128), "bwd": (64, 128, 256)}


def _kernel_of(live: int, threads: int, smem: int) -> KernelSource:
    """Loads ``live`` values, meets at a barrier, stores them: none can be dropped or loaded later."""
    loads = "\n".join(
        f'  float v{i}; asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(v{i}) : "l"(p.data + {32 * i}));'
        for i in range(live)
    )
    stores = "\n".join(
        f'  asm volatile("st.volatile.global.f32 [%0], %1;" :: "l"(p.data + {32 * i}), "f"(v{i}));' for i in range(live)
    )
    text = (
        "struct Params { float* data; };\n"
        'extern "C" __global__ void occupant(const __grid_constant__ Params p) {\n'
        f'{loads}\n  asm volatile("bar.sync 0;" ::: "memory");\n{stores}\n}}\n'
    )
    return KernelSource(KernelSpec(), FwdConfig(), "fwd", "cuda", text, text, "occupant", threads, smem)


def _kernels() -> list[KernelSource]:
    """The default and the model's favourites of some head dims, forward and backward; the backward's small kernels."""
    info = driver.device_info(0)
    gpu = match_device(info.name, info.compute_capability, info.num_sms, info.l2_bytes)
    sources = []
    for kind, head_dims in HEAD_DIMS.items():
        for head_dim in head_dims:
            spec = KernelSpec(kind, head_dim, causal=True)
            problem = Problem(4, 4096, 4096, 2048 // head_dim, 2048 // head_dim)
            configs = dict.fromkeys([default_config(spec), *shortlist(spec, [problem], gpu, 8)])
            sources += [render_kernel(spec, config) for config in configs]
            others = [name for name in kernels_of(kind) if name != kind]
            sources += [render_kernel(spec, default_config(spec), kernel=name) for name in others]
    return sources


@pytest.fixture(scope="module")
def compiled() -> list[CompiledKernel]:
    major, minor = driver.device_info(0).compute_capability
    limit = arch_limits((major, minor)).max_smem_per_block
    made = [_kernel_of(*case) for case in CASES if case[2] <= limit]
    results = compile_many([(source, f"sm_{major}{minor}") for source in [*made, *_kernels()]])
    assert not [result for result in results if isinstance(result, CompileError)]
    return [result for result in results if isinstance(result, CompiledKernel)]


def test_occupancy_agrees_with_the_driver(compiled: list[CompiledKernel]) -> None:
    arch = arch_limits(driver.device_info(0).compute_capability)
    wrong, limiters = [], set()
    for kernel in compiled:
        source, resources = kernel.source, kernel.resources
        ours = occupancy(arch, source.num_threads, resources.registers, source.smem_bytes + resources.static_smem_bytes)
        loaded = driver.load(kernel, 0)
        try:
            theirs = loaded.blocks_per_sm()
        finally:
            loaded.unload()
        limiters.update(ours.limiters)
        if theirs != ours.blocks_per_sm:
            wrong.append((source.entry, source.num_threads, resources.registers, source.smem_bytes, ours, theirs))
    assert not wrong
    kernels = [kernel.source.kernel for kernel in compiled if kernel.source.entry != "occupant"]
    assert len(compiled) - len(kernels) >= 30
    assert min(kernels.count(kind) for kind in HEAD_DIMS) >= 16
    assert {*kernels} == {name for kind in HEAD_DIMS for name in kernels_of(kind)}
    assert limiters == {"registers", "shared memory", "warps", "blocks"}
