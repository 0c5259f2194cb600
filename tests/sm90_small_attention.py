"""A kernel with all that a forward of sm_90a does, without its softmax: O = (Q K^T) K over a ring of tiles of K.

One thread loads, two warpgroups multiply, O leaves through Q's place. Its parts can be changed one by one.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.sm90_kernels import MappedTensor, Sm90Probe

SHAPES = (("rs", 64, True), ("ss", 64, False))
ROUNDS = 5

_TEXT = """
  constexpr int kRounds = 5, kStages = {stages};
  const u32 full = smem, empty = smem + 32, full_q = smem + 64, ring = tile + 16384;
  name_shared("full", full, 32);
  name_shared("empty", empty, 32);
  name_shared("full_q", full_q, 8);
  name_shared("Q", tile, 16384);
  name_shared("K", ring, 8192 * kStages);
  if (tid == 0) {{
    for (int i = 0; i < kStages; i++) {{
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, 2);
    }}
    mbarrier_init(full_q, 1);
    {fence_init}
  }}
  {after_init}
  if (group == 2) {{
    if (warp == 8 && elect_one()) {{
      {load_q}
      for (int round = 0; round < kRounds; round++) {{
        trace("round", round);
        const int stage = round % kStages;
        const u32 k = ring + 8192 * stage;
        {wait_empty}
        {load}
      }}
    }}
    return;
  }}
  float s[32], o[32];
  u32 frag[4][4];
  const u32 q = tile + 8192 * group;
  {wait_q}
#pragma unroll 1
  for (int round = 0; round < kRounds; round++) {{
    trace("round", round);
    const int stage = round % kStages;
    const u32 k = ring + 8192 * stage;
    {wait_full}
    {fence_s}
    {issue_s}
    {commit_s}
    {wait_s}
    {pack}
    {fence_o}
    {issue_o}
    {commit_o}
    {wait_o}
    {release}
  }}
  {stage}
  {fence_proxy}
  {meet}
  {store}
  st_global(p.out + tid, u32(tid));"""

PARTS = {
    "stages": "2",
    "fence_init": "fence_mbarrier_init();",
    "after_init": "sync_threads();",
    "load_q": """mbarrier_arrive_expect_tx(full_q, 16384);
      for (int i = 0; i < 2; i++) tma_load(tile + 8192 * i, p.a, full_q, 0, 64 * i, 0, 0);""",
    "wait_empty": "mbarrier_try_wait(empty + 8 * stage, (round / kStages + 1) & 1);",
    "load": """mbarrier_arrive_expect_tx(full + 8 * stage, 8192);
        tma_load(k, p.b, full + 8 * stage, 0, 64 * round, 0, 0);""",
    "wait_q": "mbarrier_try_wait(full_q, 0);",
    "wait_full": "mbarrier_try_wait(full + 8 * stage, round / kStages & 1);",
    "fence_s": "wgmma_fence();",
    "issue_s": """
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_ss<Element, 64, false>(s, operand(q + 32 * step), operand(k + 32 * step), step > 0);""",
    "commit_s": "wgmma_commit();",
    "wait_s": "wgmma_wait<0>();",
    "pack": """
#pragma unroll
    for (int i = 0; i < 16; i++) frag[i / 4][i % 4] = pack2<Element>(s[2 * i], s[2 * i + 1]);""",
    "fence_o": "wgmma_fence();",
    "issue_o": """
#pragma unroll
    for (int step = 0; step < 4; step++)
      wgmma_rs<Element, 64, true>(o, frag[step], operand(k + 2048 * step, 8192), round > 0 || step > 0);""",
    "commit_o": "wgmma_commit();",
    "wait_o": "wgmma_wait<0>();",
    "release": "if (tid % 128 == 0) mbarrier_arrive(empty + 8 * stage);",
    "stage": """
#pragma unroll
  for (int step = 0; step < 4; step++)
    stmatrix_x4(q + swizzled(warp % 4 * 16 + lane % 16, step * 2 + lane / 16),
                pack2<Element>(o[8 * step], o[8 * step + 1]), pack2<Element>(o[8 * step + 2], o[8 * step + 3]),
                pack2<Element>(o[8 * step + 4], o[8 * step + 5]), pack2<Element>(o[8 * step + 6], o[8 * step + 7]));""",
    "fence_proxy": "fence_proxy_async();",
    "meet": "bar_sync(1 + group, 128);",
    "store": """if (tid % 128 == 0) {
    tma_store(p.o, q, 0, 64 * group, 0, 0);
    tma_store_commit();
    tma_store_wait_read<0>();
  }""",
}


def small_attention(**changes: str) -> str:
    """The body with some of its parts changed."""
    return _TEXT.format(**{**PARTS, **changes})


def small_attention_probe(element: str, **changes: str) -> Sm90Probe:
    """The probe: operands are -1, 0 and 1, so that scores are exact in 16 bits and sums in float32."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[element]
    generator = torch.Generator().manual_seed(7)
    q = torch.randint(-1, 2, (128, 64), generator=generator).to(torch.float32)
    k = torch.randint(-1, 2, (64 * ROUNDS, 64), generator=generator).to(torch.float32)
    o = ((q @ k.T) @ k).to(dtype)

    def tensor(values: torch.Tensor) -> MappedTensor:
        bits = values.to(dtype).view(torch.int16).numpy().view(np.uint16)
        return MappedTensor(bits.reshape(1, -1, 1, 64), (64, 64, 1, 1))

    return Sm90Probe(
        small_attention(**changes),
        np.arange(256, dtype=np.uint32),
        a=tensor(q),
        b=tensor(k),
        o=tensor(torch.zeros_like(o)),
        o_after=tensor(o).values,
        shapes=SHAPES,
    )
