"""Legality of configs, each reason once, and the default config everywhere."""

from __future__ import annotations

import pytest

from fa2gen.constraints import default_config, estimate_registers, infeasible_reason, smem_plan
from fa2gen.hardware import arch_limits, supported_compute_capabilities
from fa2gen.spec import FwdConfig, KernelSpec

A100 = arch_limits((8, 0))


@pytest.mark.parametrize("capability", supported_compute_capabilities())
@pytest.mark.parametrize("head_dim", [1, 64, 96, 128])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gqa_ratio", [1, 7])
def test_default_config_is_legal_everywhere(capability, head_dim, dtype, causal, gqa_ratio):
    spec = KernelSpec(head_dim=head_dim, dtype=dtype, causal=causal, gqa_ratio=gqa_ratio, alignment=2)
    assert infeasible_reason(spec, default_config(spec), arch_limits(capability)) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_warps": 3, "block_m": 48}, "power of two"),
        ({"num_warps": 1, "block_m": 16}, "swizzle"),
        ({"block_m": 96, "num_warps": 4}, "16-row tiles"),
        ({"block_m": 512}, "rows a warp"),
        ({"block_n": 24, "step_n": 24}, "copy passes"),
        ({"block_n": 64, "step_n": 48}, "does not divide"),
        ({"block_n": 64, "step_n": 8}, "multiples of 16"),
        ({"block_n": 512, "step_n": 64}, "above 256"),
        ({"num_stages": 4}, "above 3"),
        ({"num_stages": 1, "step_n": 32}, "K is released"),
        ({"block_n": 256, "num_stages": 3}, "shared memory"),
        ({"block_m": 256, "num_warps": 4}, "registers"),
        ({"min_blocks": 3}, "min_blocks 3"),
    ],
)
def test_each_reason(change, text):
    reason = infeasible_reason(KernelSpec(head_dim=128), FwdConfig(**change), A100)
    assert reason is not None
    assert text in reason


def test_shared_memory_limit_is_the_chips():
    # 32 KiB of Q and 2 stages of 2 x 24 KiB: 128 KiB, for A100's 163 KiB but not for the 99 KiB of 8.6 and 8.9.
    spec, config = KernelSpec(head_dim=128), FwdConfig(block_n=96, step_n=48)
    assert smem_plan(spec, config).total == 128 * 1024
    assert infeasible_reason(spec, config, A100) is None
    assert "shared memory" in (infeasible_reason(spec, config, arch_limits((8, 6))) or "")


def test_register_estimate_counts_accumulators():
    spec, config = KernelSpec(head_dim=128), FwdConfig(block_m=128, block_n=64, step_n=64)
    assert estimate_registers(spec, config) == 128 + 64 + 24
    assert estimate_registers(spec, FwdConfig(q_in_regs=True)) == 128 + 64 + 64 + 24
