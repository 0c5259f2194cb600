"""The forward kernel through nvcc: every architecture, every feature, real resource usage against the plan."""

from __future__ import annotations

import os
import subprocess

import pytest

from fa2gen.codegen import render_kernel
from fa2gen.compile import CompiledKernel, compile_many, find_nvcc, nvcc_command
from fa2gen.compile.nvcc import CUBIN_NAME, SOURCE_NAME
from fa2gen.constraints import default_config, estimate_registers, infeasible_reason
from fa2gen.hardware import arch_limits, occupancy
from fa2gen.spec import FwdConfig, KernelSpec

# Each row turns on what the others leave off; the full grid adds every dtype, mask and architecture to each config.
FAST_128 = FwdConfig(block_m=128, block_n=64, step_n=64, num_warps=4, num_stages=2, softmax="guarded", min_blocks=2)
FAST_64 = FwdConfig(
    block_m=64, block_n=64, step_n=64, num_warps=2, num_stages=2, q_in_regs=True, softmax="guarded", min_blocks=4
)
SHARED_256 = FwdConfig(num_warps=8, softmax="guarded", pipeline="ring", warps_n=2)
RING_128 = FwdConfig(block_m=256, num_warps=8, num_stages=3, softmax="guarded", proof="block", pipeline="ring")
COVERING = [
    (KernelSpec(head_dim=128), FAST_128, (9, 0)),
    (
        KernelSpec(head_dim=128, causal=True, gqa_ratio=8, dtype="fp16"),
        default_config(KernelSpec(head_dim=128)),
        (8, 0),
    ),
    (KernelSpec(head_dim=64, causal=True), FAST_64, (8, 0)),
    (KernelSpec(head_dim=64, gqa_ratio=7), FwdConfig(block_n=128, step_n=64, q_in_regs=True), (8, 9)),
    (KernelSpec(head_dim=96, causal=True), FwdConfig(block_n=32, step_n=32, num_stages=3, min_blocks=1), (8, 6)),
    (KernelSpec(head_dim=111, alignment=2), FwdConfig(block_m=64, num_stages=1), (12, 0)),
    (KernelSpec(head_dim=40, causal=True, dtype="fp16"), FwdConfig(num_stages=1), (10, 0)),
    *(
        (KernelSpec(head_dim=d, causal=True), default_config(KernelSpec(head_dim=d)), (9, 0))
        for d in (32, 192, 200, 256)
    ),
    (KernelSpec(head_dim=256), SHARED_256, (9, 0)),
    (KernelSpec(head_dim=128), RING_128, (9, 0)),
    (
        KernelSpec(head_dim=96, alignment=2, gqa_ratio=4),
        FwdConfig(block_m=64, num_stages=3, softmax="guarded", pipeline="ring", pack_gqa=True),
        (8, 0),
    ),
]
CONFIGS = [
    *{config for _, config, _ in COVERING},
    FwdConfig(block_m=256, num_warps=8),
    FwdConfig(block_m=64, block_n=96, step_n=48, num_warps=2, num_stages=2),
    FwdConfig(block_m=128, block_n=64, num_warps=8, q_in_regs=True),
    *(
        FwdConfig(num_warps=warps, softmax=softmax, proof=proof, pipeline=pipeline, warps_n=warps // 4)
        for warps in (4, 8)
        for softmax, proof in (("online", "step"), ("guarded", "step"), ("guarded", "block"))
        for pipeline in ("barrier", "ring")
    ),
]
FULL_GRID = [
    (spec, config, capability)
    for capability in ((8, 0), (8, 6), (9, 0))
    for head_dim, alignment in ((64, 16), (128, 16), (59, 2))
    for dtype in ("fp16", "bf16")
    for causal in (False, True)
    for spec in [KernelSpec(head_dim=head_dim, dtype=dtype, causal=causal, alignment=alignment)]
    for config in [default_config(spec), *CONFIGS]
    if infeasible_reason(spec, config, arch_limits(capability)) is None
]
GRID = FULL_GRID if os.environ.get("FA2GEN_TEST_FULL") else COVERING


@pytest.fixture(scope="module")
def compiled() -> list[CompiledKernel]:
    jobs = [(render_kernel(spec, config), arch_limits(capability).target) for spec, config, capability in GRID]
    results = compile_many(jobs)
    for result in results:
        assert isinstance(result, CompiledKernel), getattr(result, "log", result)
    return results


def test_covering_set_is_legal():
    for spec, config, capability in COVERING:
        assert infeasible_reason(spec, config, arch_limits(capability)) is None, (spec, config, capability)


def test_resources_agree_with_the_plan(compiled):
    for kernel, (spec, config, capability) in zip(compiled, GRID, strict=True):
        label = f"{kernel.source.entry} on {kernel.target}"
        arch = arch_limits(capability)
        # Shared memory is dynamic, so ptxas sees none of it; the kernel's own static_assert checks the plan.
        assert kernel.resources.static_smem_bytes == 0, label
        assert kernel.resources.registers <= arch.max_registers_per_thread, label
        # The estimate ranks and excludes configs before they are compiled: it must not exceed what ptxas needs.
        if kernel.resources.spill_store_bytes == 0:
            assert estimate_registers(spec, config) <= kernel.resources.registers, label
        resident = occupancy(arch, config.num_threads, kernel.resources.registers, kernel.source.smem_bytes)
        assert resident.blocks_per_sm >= config.min_blocks, label


def test_fast_configs_do_not_spill_in_their_loops(compiled):
    # A few bytes live through the prologue; FA2's d 128 kernel spills 156 bytes and more on the same compiler.
    for kernel, (_, config, _) in zip(compiled, GRID, strict=True):
        if config in (FAST_128, FAST_64, SHARED_256, RING_128):
            limit = 128 if config == RING_128 else 64
            assert kernel.resources.spill_store_bytes <= limit, (kernel.source.entry, kernel.target, kernel.resources)


def test_accumulators_stay_in_registers(compiled):
    # Where nvcc leaves a long loop rolled, the arrays that it indexes lie in local memory: 512 bytes at head dim 192.
    for kernel, (spec, config, _) in zip(compiled, GRID, strict=True):
        if config == default_config(spec):
            spilled = kernel.resources.spill_store_bytes
            assert kernel.resources.stack_bytes <= spilled + 64, (kernel.source.entry, kernel.target, kernel.resources)


def test_plain_nvcc_makes_the_same_bytes(compiled, tmp_path):
    """An emitted file compiled by hand is the kernel that was tuned: the build's stand-in header changes no byte."""
    nvcc = find_nvcc()
    for kernel in compiled[:3]:
        (tmp_path / SOURCE_NAME).write_text(kernel.source.text)
        subprocess.run(nvcc_command(nvcc, kernel.target), cwd=tmp_path, check=True, capture_output=True)
        assert (tmp_path / CUBIN_NAME).read_bytes() == kernel.cubin, kernel.source.entry
