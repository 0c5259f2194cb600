"""Kernels of the sm90 family that together hold every way of computing it: what compile tests go through."""

from __future__ import annotations

from fa2gen.constraints_sm90 import TARGET as TARGET
from fa2gen.constraints_sm90 import default_forward_config
from fa2gen.spec import NATIVE_HEAD_DIMS, FwdSm90Config, KernelSpec

# What runs where nothing is tuned.
DEFAULTS = [
    (spec, default_forward_config(spec))
    for d in NATIVE_HEAD_DIMS
    for causal in (False, True)
    for spec in [KernelSpec(head_dim=d, causal=causal)]
]

# The first four turn every choice of the templates both ways.
KERNELS: list[tuple[KernelSpec, FwdSm90Config]] = [
    (KernelSpec(causal=True), FwdSm90Config(q_stages=2, q_regs=8, softmax="guarded", overlap_tiles=True)),
    (
        KernelSpec(head_dim=40, dtype="fp16", gqa_ratio=8),
        FwdSm90Config(
            block_m=64, block_n=80, num_stages=1, q_stages=2, p_in_smem=True, overlap=False, ping_pong=False,
            scheduler="dynamic", epilogue="direct",
        ),
    ),
    # Two key tiles that not all consumers see, and no stages for these and one more.
    (
        KernelSpec(head_dim=64, causal=True, gqa_ratio=7),
        FwdSm90Config(
            block_m=192, block_n=96, k_extra=1, q_regs=2, p_in_smem=True, ping_pong=False, softmax="guarded",
            scheduler="dynamic",
        ),
    ),
    (
        KernelSpec(head_dim=192, dtype="fp16"),
        FwdSm90Config(block_n=64, q_extra=1, overlap_tiles=True, epilogue="direct"),
    ),
    (KernelSpec(causal=True), FwdSm90Config()),
    (
        KernelSpec(head_dim=64, causal=True, gqa_ratio=7),
        FwdSm90Config(block_m=192, block_n=96, num_stages=3, ping_pong=False, scheduler="dynamic"),
    ),
    (
        KernelSpec(head_dim=192, dtype="fp16"),
        FwdSm90Config(block_n=64, q_regs=12, p_in_smem=True, epilogue="direct"),
    ),
    (
        KernelSpec(head_dim=256, causal=True),
        FwdSm90Config(block_m=64, block_n=64, q_regs=4, ping_pong=False, softmax="guarded"),
    ),
    (KernelSpec(head_dim=96), FwdSm90Config(overlap=False)),
    (
        KernelSpec(head_dim=96, dtype="fp16", causal=True, gqa_ratio=3),
        FwdSm90Config(block_m=192, block_n=64, p_in_smem=True, overlap=False, scheduler="dynamic", epilogue="direct"),
    ),
    (KernelSpec(gqa_ratio=4), FwdSm90Config(block_n=64, num_stages=2, q_stages=2, overlap=False, ping_pong=False)),
    (
        KernelSpec(dtype="fp16"),
        FwdSm90Config(
            block_n=64, num_stages=4, q_stages=2, p_in_smem=True, ping_pong=False, softmax="guarded",
            overlap_tiles=True,
        ),
    ),
    (KernelSpec(head_dim=256), FwdSm90Config(block_n=48, overlap=False, scheduler="dynamic")),
    (
        KernelSpec(head_dim=8, causal=True),
        FwdSm90Config(block_m=256, block_n=16, num_stages=4, q_extra=3, epilogue="direct"),
    ),
    (KernelSpec(head_dim=32, dtype="fp16"), FwdSm90Config(block_m=64, block_n=256, ping_pong=False)),
    (
        KernelSpec(causal=True),
        FwdSm90Config(block_n=176, num_stages=1, k_extra=1, q_stages=2, softmax="guarded", scheduler="dynamic"),
    ),
    (
        KernelSpec(head_dim=72, causal=True, gqa_ratio=2),
        FwdSm90Config(block_n=112, p_in_smem=True, q_stages=2, overlap_tiles=True, section_mib=8),
    ),
    (KernelSpec(head_dim=64), FwdSm90Config(block_m=192)),
    *DEFAULTS,
]  # fmt: skip
