"""``fa2gen explain`` with a compiler: registers and spills are ptxas's, and everything after is computed from them."""

from __future__ import annotations

import pytest

from fa2gen.codegen import render_kernel
from fa2gen.commands.explain_json import explanation_json
from fa2gen.commands.explain_text import explanation_text
from fa2gen.compile import compile_kernel
from fa2gen.explain import explain
from fa2gen.hardware import get_gpu, occupancy
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, Config, FwdConfig, KernelSpec
from fa2gen.tuning.model import predict
from fa2gen.tuning.shortlist import facts_of

pytestmark = pytest.mark.nvcc


# Either leaves room for three blocks of four warps on an SM.
CONFIGS: dict[str, Config] = {
    "fwd": FwdConfig(block_m=64, block_n=64, step_n=64, num_warps=4, num_stages=1, min_blocks=3),
    "bwd": BwdConfig(block_m=32, block_n=64, step_m=32, num_warps=4, num_stages=1, min_blocks=3),
}


@pytest.mark.parametrize(("gpu_name", "kind"), [("a100", "fwd"), ("rtx-4090", "fwd"), ("a100", "bwd")])
def test_registers_come_from_ptxas(gpu_name: str, kind: str) -> None:
    gpu, spec, problem = get_gpu(gpu_name), KernelSpec(kind, head_dim=64, causal=True), Problem(8, 2048, 2048, 32, 32)
    config = CONFIGS[kind]
    e = explain(spec, problem, gpu, config=config.slug())
    compiled = compile_kernel(render_kernel(spec, config), gpu.target)
    resources = compiled.resources
    assert e.registers.compiled is not None
    assert e.registers.compiled.resources == resources
    assert e.registers.facts == facts_of((compiled,))
    # 65,536 / (128 threads * 3 blocks) = 170, granted in steps of 8.
    assert resources.registers <= e.registers.cap == 168
    assert e.occupancy == occupancy(gpu.arch, 128, resources.registers, e.smem_bytes + resources.static_smem_bytes)
    assert e.occupancy.blocks_per_sm >= 3
    assert e.prediction == predict(spec, config, problem, gpu, facts_of((compiled,)))
    assert explanation_json(e)["registers"]["source"] == "ptxas"
    assert f"by ptxas              {resources.registers}; {resources.spill_store_bytes} bytes" in explanation_text(e)


def test_an_illegal_config_is_not_compiled() -> None:
    e = explain(KernelSpec(), Problem(1, 64, 64, 1, 1), get_gpu("a10"), config="sm80_256x128s64_w8_st3_qs_guarded_mb1")
    assert e.registers.compiled is None
    assert explanation_json(e)["registers"]["source"] == "estimate"
