"""The forward of the sm90 family through nvcc: what ptxas says of every way of computing it, against the plan."""

from __future__ import annotations

import itertools
import re
import time

import pytest

from fa2gen.codegen import render_kernel
from fa2gen.compile import CompiledKernel, compile_many
from fa2gen.config_sm90 import EPILOGUES, SCHEDULERS, SOFTMAXES
from fa2gen.constraints import estimate_registers, infeasible_reason
from fa2gen.constraints_sm90 import consumer_registers, most_skipped, output_columns, register_split, smem_plan
from fa2gen.hardware import arch_limits
from fa2gen.spec import DTYPES, NATIVE_HEAD_DIMS, FwdSm90Config
from fa2gen.tables import store
from tests.sm90_covering import DEFAULTS, KERNELS, TARGET

pytestmark = pytest.mark.nvcc

HOPPER = arch_limits((9, 0))


@pytest.fixture(scope="module")
def compiled() -> list[CompiledKernel]:
    start = time.perf_counter()
    results = compile_many([(render_kernel(spec, config), TARGET) for spec, config in KERNELS])
    kernels = []
    for result in results:
        assert isinstance(result, CompiledKernel), getattr(result, "log", result)
        kernels.append(result)
    built = [kernel for kernel in kernels if not kernel.from_cache]
    print(f"\n{len(built)} of {len(kernels)} kernels compiled in {time.perf_counter() - start:.1f} s")
    for kernel in built:
        ptxas = re.search(r"Compile time = ([\d.]+) ms", kernel.log)
        print(f"  ptxas {float(ptxas[1]) if ptxas else 0:6.0f} ms  {kernel.source.entry}")
    return kernels


def test_every_choice_is_among_them() -> None:
    configs, specs = [config for _, config in KERNELS], [spec for spec, _ in KERNELS]
    switches = {(config.p_in_smem, config.overlap, config.ping_pong) for config in configs}
    assert switches == set(itertools.product((False, True), repeat=3))
    leaving = {(config.scheduler, config.epilogue) for config in configs}
    assert leaving == set(itertools.product(SCHEDULERS, EPILOGUES))
    softmaxes = {(config.softmax, config.overlap_tiles, config.p_in_smem) for config in configs if config.overlap}
    assert softmaxes == set(itertools.product(SOFTMAXES, (False, True), (False, True)))
    # Where kernels choose by sizes: maxima after a repair, the last k16 steps of Q, tiles that not all consumers see.
    guarded = [(spec, config) for spec, config in KERNELS if config.softmax == "guarded"]
    assert {(spec.head_dim > 64, spec.causal) for spec, _ in guarded} >= {(False, True), (True, False), (True, True)}
    from_registers = {config.q_regs / (output_columns(spec.head_dim) // 16) for spec, config in KERNELS}
    assert {0, 1} < from_registers
    skipping = [config for spec, config in KERNELS if spec.causal and config.warpgroups > 1]
    assert {config.num_stages > most_skipped(config) for config in skipping} == {False, True}
    assert {config.k_extra for config in configs} == {0, 1}
    assert {(config.q_stages, config.q_extra > 0) for config in configs} == {(1, False), (1, True), (2, False)}
    assert {config.section_mib > 0 for config in configs} == {False, True}
    assert {config.warpgroups for config in configs} == {1, 2, 3, 4}
    assert {config.num_stages for config in configs} == {1, 2, 3, 4}
    assert {(spec.dtype, spec.causal) for spec in specs} == set(itertools.product(DTYPES, (False, True)))
    assert {spec.gqa_ratio > 1 for spec in specs} == {False, True}
    untuned = {(spec.head_dim, spec.causal) for spec, _ in DEFAULTS}
    assert untuned == set(itertools.product(NATIVE_HEAD_DIMS, (False, True)))


def test_they_are_legal() -> None:
    for spec, config in KERNELS:
        assert infeasible_reason(spec, config, HOPPER) is None, (spec, config)


def test_nothing_is_spilled(compiled: list[CompiledKernel]) -> None:
    for kernel in compiled:
        used = kernel.resources
        assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0), kernel.source.entry


def test_shipped_configs_are_neither_spilled_nor_serialized() -> None:
    """Every config that a table of the package holds for this family; what is serialized is no kernel."""
    tables = [store.cached_table(path) for path in sorted(store.package_dir().glob("*/fwd.json"))]
    shipped = {
        (entry.spec, entry.config): None
        for table in tables
        if table is not None
        for entry in table.entries
        if isinstance(entry.config, FwdSm90Config)
    }
    assert len(shipped) >= 20
    results = compile_many([(render_kernel(spec, config), TARGET) for spec, config in shipped])
    for result, (spec, config) in zip(results, shipped, strict=True):
        label = f"{spec.slug()} {config.slug()}"
        assert isinstance(result, CompiledKernel), f"{label}: {getattr(result, 'log', result)}"
        used = result.resources
        assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0), label


def test_products_stay_asynchronous(compiled: list[CompiledKernel]) -> None:
    """ptxas waits for every wgmma where it does not understand the registers, and says so; or it adds a fence."""
    for kernel in compiled:
        for word in ("serializ", "setmaxnreg", "injected", "warning"):
            assert word not in kernel.log, kernel.log


def test_resources_agree_with_the_plan(compiled: list[CompiledKernel]) -> None:
    for kernel, (spec, config) in zip(compiled, KERNELS, strict=True):
        label, source, used = kernel.source.entry, kernel.source, kernel.resources
        # Shared memory is dynamic, so ptxas sees none of it; the kernel's own static_assert checks the plan.
        assert used.static_smem_bytes == 0, label
        assert source.smem_bytes == smem_plan(spec, config).total, label
        assert f"kSmemBytes = {source.smem_bytes};" in source.text, label
        assert source.num_threads == config.num_threads == 128 * (config.warpgroups + 1), label
        # What __launch_bounds__ leaves a thread, of the 65,536 registers of an SM.
        granted = min(255, 65536 // source.num_threads // 8 * 8)
        split = register_split(config)
        if split.consumer:
            # Where setmaxnreg moves registers, the launch takes all, so that there is something to give.
            assert used.registers == granted, label
            assert split.producer + config.warpgroups * split.consumer <= granted * (config.warpgroups + 1), label
        else:
            assert estimate_registers(spec, config) <= used.registers <= granted, label
        assert estimate_registers(spec, config) <= consumer_registers(config), label
