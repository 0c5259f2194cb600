"""Kernels of the sm90 family that together hold every way of computing it: what compile tests go through."""

from __future__ import annotations

from fa2gen.spec import FwdSm90Config, KernelSpec

TARGET = "sm_90a"

# Of each native head dim a tile that fills shared memory or registers about as far as it goes without spilling.
FILLING = {
    32: FwdSm90Config(block_m=192, block_n=128),
    64: FwdSm90Config(block_m=192, block_n=128),
    96: FwdSm90Config(block_m=128, block_n=128),
    128: FwdSm90Config(block_m=128, block_n=128),
    192: FwdSm90Config(block_m=128, block_n=96),
    256: FwdSm90Config(block_m=128, block_n=80),
}

# The first four turn every choice of the templates both ways.
KERNELS: list[tuple[KernelSpec, FwdSm90Config]] = [
    (KernelSpec(causal=True), FILLING[128]),
    (
        KernelSpec(head_dim=40, dtype="fp16", gqa_ratio=8),
        FwdSm90Config(
            block_m=64, block_n=80, num_stages=1, q_stages=2, p_in_smem=True, overlap=False, ping_pong=False,
            scheduler="dynamic", epilogue="direct",
        ),
    ),
    (
        KernelSpec(head_dim=64, causal=True, gqa_ratio=7),
        FwdSm90Config(block_m=192, block_n=96, num_stages=3, ping_pong=False, scheduler="dynamic"),
    ),
    (
        KernelSpec(head_dim=192, dtype="fp16"),
        FwdSm90Config(block_m=128, block_n=64, p_in_smem=True, epilogue="direct"),
    ),
    (KernelSpec(head_dim=256, causal=True), FwdSm90Config(block_m=64, block_n=64, ping_pong=False)),
    (KernelSpec(head_dim=96), FwdSm90Config(overlap=False)),
    (
        KernelSpec(head_dim=96, dtype="fp16", causal=True, gqa_ratio=3),
        FwdSm90Config(block_m=192, block_n=64, p_in_smem=True, overlap=False, scheduler="dynamic", epilogue="direct"),
    ),
    (KernelSpec(gqa_ratio=4), FwdSm90Config(block_n=64, num_stages=2, q_stages=2, overlap=False, ping_pong=False)),
    (KernelSpec(dtype="fp16"), FwdSm90Config(p_in_smem=True, block_n=64, num_stages=4, ping_pong=False)),
    (KernelSpec(head_dim=256), FwdSm90Config(block_n=48, overlap=False, scheduler="dynamic")),
    (KernelSpec(head_dim=8, causal=True), FwdSm90Config(block_n=16, num_stages=4, epilogue="direct")),
    (KernelSpec(head_dim=32, dtype="fp16"), FwdSm90Config(block_m=64, block_n=256, ping_pong=False)),
    (KernelSpec(causal=True), FwdSm90Config(block_n=176, num_stages=1, q_stages=2, scheduler="dynamic")),
    (KernelSpec(head_dim=72, causal=True, gqa_ratio=2), FwdSm90Config(block_n=112, p_in_smem=True, q_stages=2)),
    *((KernelSpec(head_dim=d, causal=causal), config) for d, config in FILLING.items() for causal in (False, True)),
]  # fmt: skip
KERNELS = list(dict.fromkeys(KERNELS))
