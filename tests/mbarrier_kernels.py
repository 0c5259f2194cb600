"""Small kernels of 4 warps that synchronise through mbarriers, with what they must give: like primitive_kernels.py."""

from __future__ import annotations

import numpy as np

from tests.primitive_kernels import Probe

NUM_THREADS = 128
ROUNDS = 8
ROUND_WORDS = 4 * NUM_THREADS  # words of a stage: 16 bytes of each thread

# A ring of kStages stages of 2 KiB. full[stage] counts the threads that copy, empty[stage] those that say that they, or
# their warp, have read. A stage is filled kStages - 1 rounds ahead.
RING = """
  constexpr int kStages = {stages}, kRounds = 8;
  const u32 full = smem + 6144, empty = full + 8 * kStages;
  name_shared("full", full, 8 * kStages);
  name_shared("empty", empty, 8 * kStages);
  if (tid == 0)
    for (int stage = 0; stage < kStages; stage++) {{
      mbarrier_init(full + 8 * stage, {full_count});
      mbarrier_init(empty + 8 * stage, {empty_count});
    }}
  {after_init}
  auto produce = [&](int round) {{
    const int stage = round % kStages;
    {wait_empty}
    {copy}
  }};
  for (int round = 0; round < kStages - 1; round++) produce(round);
  u32 sum = 0;
  for (int round = 0; round < kRounds; round++) {{
    trace("round", round);
    if (round + kStages - 1 < kRounds) produce(round + kStages - 1);
    const int stage = round % kStages;
    {wait_full}
    u32 r[4];
    {read}
    sum = 3 * sum + r[0] + 5 * r[1] + 7 * r[2] + 11 * r[3];
    {arrive_empty}
  }}
  st_global(p.out + (blockIdx.x * kThreads + tid), sum);"""

PARTS = {
    "full_count": "kThreads",
    "empty_count": "kThreads / 32",
    "after_init": "sync_threads();",
    "wait_empty": "mbarrier_wait(empty + 8 * stage, (round / kStages + 1) & 1);",
    "copy": """cp_async16(smem + 2048 * stage + 16 * tid, p.in + (512 * round + 4 * tid));
    cp_async_mbarrier_arrive(full + 8 * stage);""",
    "wait_full": "mbarrier_wait(full + 8 * stage, round / kStages & 1);",
    # The rows that another warp copied.
    "read": "ldmatrix_x4(r, smem + 2048 * stage + 16 * (lane + 32 * ((warp + round) % 4)));",
    "arrive_empty": "sync_warp(); if (lane == 0) mbarrier_arrive(empty + 8 * stage);",
}
# Rows by plain loads: each lane reads what ldmatrix would give it.
PLAIN_READ = """const u32 from = smem + 2048 * stage + 512 * ((warp + round) % 4) + 4 * lane;
    for (int m = 0; m < 4; m++) r[m] = ld_shared<u32>(from + 128 * m);"""
# The same through registers: plain stores, so a plain arrival.
PLAIN_COPY = """st_shared(smem + 2048 * stage + 16 * tid, ld_global<u32x4>(p.in + (512 * round + 4 * tid)));
    mbarrier_arrive(full + 8 * stage);"""
EVERY_THREAD_FREES = {"empty_count": "kThreads", "arrive_empty": "mbarrier_arrive(empty + 8 * stage);"}


def ring(stages: int, **changes: str) -> str:
    """The body of the ring with some of its parts changed."""
    return RING.format(stages=stages, **{**PARTS, **changes})


INPUT = (np.arange(ROUNDS * ROUND_WORDS, dtype=np.uint64) * 2654435761 % 2**32).astype(np.uint32)


def ring_expected() -> np.ndarray:
    """What every thread sums: one word for each."""
    rows = INPUT.reshape(ROUNDS, NUM_THREADS, 4).astype(np.uint64)
    total = np.zeros(NUM_THREADS, np.uint64)
    tid = np.arange(NUM_THREADS)
    lane = tid % 32
    for n in range(ROUNDS):
        first = 32 * ((tid // 32 + n) % 4)
        r = [rows[n, first + 8 * m + lane // 4, lane % 4] for m in range(4)]
        total = (3 * total + r[0] + 5 * r[1] + 7 * r[2] + 11 * r[3]) % 2**32
    return total.astype(np.uint32)


def _ring(stages: int, **changes: str) -> Probe:
    # Two blocks do the same: each has mbarriers of its own.
    return Probe(ring(stages, **changes), INPUT, np.tile(ring_expected(), 2), grid=2)


MBARRIER_PROBES: dict[str, Probe] = {
    "ring of 2": _ring(2),
    "ring of 3": _ring(3),
    "ring of 2, every thread frees": _ring(2, **EVERY_THREAD_FREES),
    "ring of 3, every thread frees, plain reads": _ring(3, read=PLAIN_READ, **EVERY_THREAD_FREES),
    "ring of 2, plain stores": _ring(2, copy=PLAIN_COPY),
    "ring of 3, plain stores and reads": _ring(3, copy=PLAIN_COPY, read=PLAIN_READ),
    # One lane waits for its warp.
    "ring of 2, one lane waits": _ring(
        2, wait_full="if (lane == 0) mbarrier_wait(full + 8 * stage, round / kStages & 1); sync_warp();"
    ),
    # The last warp copies what the others read, and ends before they do.
    "a warp produces": Probe(
        """
  constexpr int kStages = 3, kRounds = 8;
  const u32 full = smem + 6144, empty = full + 8 * kStages;
  if (tid == 0)
    for (int stage = 0; stage < kStages; stage++) {
      mbarrier_init(full + 8 * stage, 32);
      mbarrier_init(empty + 8 * stage, 3);
    }
  sync_threads();
  if (warp == 3) {
    for (int round = 0; round < kRounds; round++) {
      const int stage = round % kStages;
      mbarrier_wait(empty + 8 * stage, (round / kStages + 1) & 1);
      for (int i = lane; i < 128; i += 32) cp_async16(smem + 2048 * stage + 16 * i, p.in + (512 * round + 4 * i));
      cp_async_mbarrier_arrive(full + 8 * stage);
    }
    return;
  }
  u32 sum = 0;
  for (int round = 0; round < kRounds; round++) {
    const int stage = round % kStages;
    mbarrier_wait(full + 8 * stage, round / kStages & 1);
    sum = 3 * sum + ld_shared<u32>(smem + 2048 * stage + 4 * (tid ^ 1));
    sync_warp();
    if (lane == 0) mbarrier_arrive(empty + 8 * stage);
  }
  st_global(p.out + tid, sum);""",
        INPUT,
        sum(
            3 ** (ROUNDS - 1 - n) * INPUT.reshape(ROUNDS, ROUND_WORDS)[n, np.arange(96) ^ 1].astype(np.uint64)
            for n in range(ROUNDS)
        ).astype(np.uint32),  # modulo 2^32
    ),
    # What a thread learns it passes on: copies and stores of warp 0 reach warp 1 by an mbarrier, warp 2 by another and
    # warp 3 by a named barrier; then all of them overwrite what was read.
    "orders add up": Probe(
        """
  if (tid < 2) mbarrier_init(smem + 6144 + 8 * tid, 32);
  sync_threads();
  if (warp == 0) {
    cp_async16(smem + 16 * lane, p.in + 4 * lane);
    st_shared(smem + 512 + 4 * lane, ld_global<u32>(p.in + (128 + lane)));
    cp_async_commit();
    cp_async_wait<0>();
    mbarrier_arrive(smem + 6144);
  } else if (warp == 1) {
    mbarrier_wait(smem + 6144, 0);
    mbarrier_arrive(smem + 6152);
  } else if (warp == 2) {
    mbarrier_wait(smem + 6152, 0);
    bar_arrive(1, 64);
  } else {
    bar_sync(1, 64);
  }
  const u32 copied = warp == 0 ? 0 : ld_shared<u32>(smem + 4 * lane);
  const u32 stored = warp == 0 ? 0 : ld_shared<u32>(smem + 512 + 4 * (31 - lane));
  sync_threads();
  st_shared(smem + 4 * tid, copied);
  st_shared(smem + 512 + 4 * tid, stored);
  sync_warp();
  st_global(p.out + tid, ld_shared<u32>(smem + 4 * (tid ^ 1)) + 3 * ld_shared<u32>(smem + 512 + 4 * tid));""",
        INPUT[:256],
        np.concatenate([np.zeros(32, np.uint32), np.tile(INPUT[np.arange(32) ^ 1] + 3 * INPUT[128:160][::-1], 3)]),
    ),
    # Copies of groups and of mbarriers side by side: a wait for groups covers both.
    "groups beside an mbarrier": Probe(
        """
  if (tid == 0) mbarrier_init(smem + 6144, kThreads);
  cp_async16(smem + 16 * tid, p.in + 4 * tid);
  cp_async_commit();
  sync_threads();
  cp_async16(smem + 2048 + 16 * tid, p.in + (512 + 4 * tid));
  cp_async_mbarrier_arrive(smem + 6144);
  cp_async_commit();
  cp_async_wait<1>();
  const u32x4 own = ld_shared<u32x4>(smem + 16 * tid);
  mbarrier_wait(smem + 6144, 0);
  const u32x4 next = ld_shared<u32x4>(smem + 2048 + 16 * (tid ^ 64));
  cp_async_wait<0>();
  sync_threads();
  const u32x4 other = ld_shared<u32x4>(smem + 16 * (tid ^ 64));
  st_global(p.out + 4 * tid, u32x4{own.x + next.x + other.x, own.y + next.y, own.z + next.z, own.w + next.w});""",
        INPUT[:1024],
        (
            INPUT[:512].reshape(128, 4)
            + INPUT[512:1024].reshape(128, 4)[np.arange(128) ^ 64]
            + INPUT[:512].reshape(128, 4)[np.arange(128) ^ 64] * np.array([1, 0, 0, 0], np.uint32)
        ).reshape(-1),
    ),
    # Who says yes: nobody, the last thread, all; the barrier also orders the stores.
    "sync_threads_or": Probe(
        """
  for (int round = 0; round < 3; round++) {
    st_shared(smem + 4 * tid, u32(tid + round));
    const bool any = sync_threads_or(round == 2 || (round == 1 && tid == kThreads - 1));
    st_global(p.out + (128 * round + tid), ld_shared<u32>(smem + 4 * (kThreads - 1 - tid)) * 2 + u32(any));
    sync_threads();
  }""",
        INPUT[:1],
        np.concatenate([2 * (np.arange(128, dtype=np.uint32)[::-1] + n) + np.uint32(n > 0) for n in range(3)]),
    ),
    # The same in halves of the block, each with a barrier of its own: in round 1 the second half alone says yes.
    "bar_sync_or": Probe(
        """
  for (int round = 0; round < 3; round++) {
    st_shared(smem + 4 * tid, u32(tid + round));
    const bool any = bar_sync_or(1 + warp / 2, 64, round == 2 || (round == 1 && tid == kThreads - 1));
    st_global(p.out + (128 * round + tid), ld_shared<u32>(smem + 4 * (tid ^ 63)) * 2 + u32(any));
    bar_sync(1 + warp / 2, 64);
  }""",
        INPUT[:1],
        np.concatenate(
            [
                2 * ((np.arange(128) ^ 63) + n).astype(np.uint32) + (np.arange(128) >= 64 * (2 - n)).astype(np.uint32)
                for n in range(3)
            ]
        ),
    ),
}
