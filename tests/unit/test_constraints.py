"""Legality of configs, each reason once, and the default config everywhere."""

from __future__ import annotations

import pytest

from fa2gen.constraints import (
    borrowed_config,
    default_config,
    estimate_registers,
    infeasible_reason,
    panel_columns,
    rows_per_pass,
    smem_plan,
)
from fa2gen.hardware import arch_limits, occupancy, supported_compute_capabilities
from fa2gen.spec import NATIVE_HEAD_DIMS, FwdConfig, KernelSpec

A100 = arch_limits((8, 0))


@pytest.mark.parametrize("capability", supported_compute_capabilities())
@pytest.mark.parametrize("head_dim", [1, 32, 40, 64, 72, 96, 104, 128, 136, 192, 200, 256])
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
        ({"block_n": 48, "step_n": 48, "num_warps": 8}, "copy passes"),
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


def test_default_config_fills_the_chips_that_have_room():
    """A warp for each scheduler even where an SM has 100 KB, two where it has 164."""
    for head_dim in NATIVE_HEAD_DIMS:
        spec = KernelSpec(head_dim=head_dim)
        config = default_config(spec)
        registers, smem = estimate_registers(spec, config), smem_plan(spec, config).total
        for capability in supported_compute_capabilities():
            arch = arch_limits(capability)
            fewest = 4 if arch.max_smem_per_sm < 128 * 1024 else 8
            if head_dim == 256 and capability in ((8, 0), (8, 7)):
                fewest = 4  # 96 KiB of a block, 164 of an SM
            assert occupancy(arch, config.num_threads, registers, smem).warps_per_sm >= fewest


@pytest.mark.parametrize(
    ("change", "changes"),
    [
        ({}, ""),
        ({"proof": "block"}, "proof step instead of block"),
        ({"pack_gqa": True}, "heads not packed"),
        ({"proof": "block", "pack_gqa": True}, "proof step instead of block, heads not packed"),
    ],
)
def test_borrowed_configs_lose_what_is_forbidden_alone(change, changes):
    plain = FwdConfig(softmax="guarded")
    borrowed = FwdConfig(**{**plain.canonical(), **change})
    assert borrowed_config(KernelSpec(dtype="fp16"), borrowed) == (plain, changes)
    assert borrowed_config(KernelSpec(gqa_ratio=8), borrowed) == (borrowed, "")


@pytest.mark.parametrize(
    ("head_dim", "columns", "rows", "total"),
    [
        (32, 32, 32, 20 * 1024),
        (64, 64, 16, 40 * 1024),
        (96, 32, 32, 60 * 1024),
        (128, 64, 16, 80 * 1024),
        (192, 64, 16, 120 * 1024),
        (256, 64, 16, 160 * 1024),
        (8, 32, 32, 20 * 1024),
        (72, 32, 32, 60 * 1024),
        (200, 64, 16, 160 * 1024),
    ],
)
def test_tiles_of_every_width(head_dim, columns, rows, total):
    """Four warps, 64 rows of Q and two stages of 64 keys: 320 rows of the native width, and no padding beyond it."""
    spec, config = KernelSpec(head_dim=head_dim), FwdConfig(block_m=64)
    assert panel_columns(spec) == columns
    assert rows_per_pass(spec, config) == rows
    assert smem_plan(spec, config).total == total


def test_one_warp_serves_narrow_panels_only():
    config = FwdConfig(block_m=16, block_n=32, step_n=32, num_warps=1)
    assert infeasible_reason(KernelSpec(head_dim=32), config, A100) is None
    assert infeasible_reason(KernelSpec(head_dim=96), config, A100) is None
    assert "copy 4 rows a pass" in (infeasible_reason(KernelSpec(head_dim=64), config, A100) or "")


def test_wide_heads_need_narrow_warps():
    """Head dim 256: 16 rows of output are 128 registers a thread, 32 rows all there are."""
    spec = KernelSpec(head_dim=256)
    reason = infeasible_reason(spec, FwdConfig(block_m=64, block_n=32, step_n=32, num_warps=2), A100)
    assert reason == "at least 312 registers a thread, 255 exist"
    assert infeasible_reason(spec, FwdConfig(block_m=64, block_n=32, step_n=32, num_warps=4), A100) is None


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
