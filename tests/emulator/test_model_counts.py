"""The performance model of the backward counts what the kernel does."""

from __future__ import annotations

import math

import pytest
import torch

from fa2gen.emulator import run_backward
from fa2gen.spec import BwdConfig, KernelSpec
from fa2gen.tuning.model_backward import count_tile

CONFIGS = [
    (64, "sm80_64x64s32_w4_st2_r1_mb1_ds2"),
    (64, "sm80_64x64s64_w4_st1_r2_mb1"),
    (72, "sm80_64x64s64_w8_st1_r1_mb1_wd2"),
    (64, "sm80_32x64s32_w8_st2_r2_mb1_wd2"),
    (64, "sm80_64x64s16_w4_st1_r1_mb1_kvr"),
]


@pytest.mark.parametrize(("head_dim", "slug"), CONFIGS)
def test_counts_are_the_kernels(head_dim: int, slug: str) -> None:
    spec, config = KernelSpec("bwd", head_dim=head_dim), BwdConfig.from_slug(slug)
    tiles, heads = 3, 2
    q = torch.randn(1, tiles * config.block_m, heads, head_dim).bfloat16()
    k = torch.randn(1, config.block_n, heads, head_dim).bfloat16()
    lse = torch.full((1, heads, q.shape[1]), 5.0)
    _, _, _, counters = run_backward(spec, config, q, k, k, q, lse, q, softmax_scale=1 / math.sqrt(head_dim))
    work, warps = count_tile(spec, config), heads * tiles * config.num_warps
    assert counters.mma == warps * work.mma
    assert counters.ex2 == 32 * warps * work.scores
    # Fragments that are kept are loaded once a block: rows of keys for every 16 columns, of K and V or of one of them.
    kept = config.warp_keys // 16 * math.ceil(head_dim / 16) * 2 // config.roles if config.kv_in_regs else 0
    assert counters.ldmatrix == warps * work.ldmatrix + heads * config.num_warps * kept
    # What is not counted: L and D of each row by 16 bytes, and K and V, once.
    once = 2 * 2 * config.block_n * spec.native_head_dim + 8 * tiles * config.block_m
    assert counters.cp_async == 32 * warps * work.copies + heads * once / 16
