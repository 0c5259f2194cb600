"""Probes of sm_90a's instructions other than wgmma: TMA, transaction counts, warps, registers, tickets."""

from __future__ import annotations

import numpy as np

from tests.sm90_kernels import NUM_THREADS, MappedTensor, Sm90Probe, counting, swizzle

# ---- TMA loads: boxes of a tensor, one after the other on one mbarrier, inside and partly or wholly outside.

_TENSOR = counting(2, 40, 3, 88)
_PLACES = [
    (0, 0, 0, 0),
    (64, 0, 1, 0),
    (24, 30, 2, 1),
    (0, -5, 0, 1),
    (-8, 3, 1, 1),
    (0, 40, 0, 0),
    (0, 8, 3, 0),
    (0, 8, 0, 2),
]

_LOAD = """
  init_barriers(smem, 1, 1);
  for (int i = 0; i < p.extra; i++) {
    trace("box", i);
    if (tid == 0) {
      tma_prefetch_map(p.a);
      mbarrier_arrive_expect_tx(smem, kBytes);
      int at[4];
      for (int axis = 0; axis < 4; axis++) at[axis] = int(ld_global<u32>(p.in + (4 * i + axis)));
      tma_load(tile, p.a, smem, at[0], at[1], at[2], at[3]);
    }
    mbarrier_try_wait(smem, i & 1);
    for (int word = tid; word < kBytes / 4; word += kThreads)
      st_global(p.out + (i * (kBytes / 4) + word), ld_shared<u32>(tile + 4 * word));
    sync_threads();
  }"""


def _load(columns: int, rows: int) -> Sm90Probe:
    tensor = MappedTensor(_TENSOR, (columns, rows, 1, 1))
    boxes = [swizzle(tensor.boxed(at)[0, 0]) for at in _PLACES]
    return Sm90Probe(
        f"  constexpr int kBytes = {2 * columns * rows};{_LOAD}",
        np.concatenate(boxes),
        a=tensor,
        inputs=np.array(_PLACES, np.int32).reshape(-1).view(np.uint32),
        extra=len(_PLACES),
    )


def _box_of_heads() -> Sm90Probe:
    """Boxes of several heads and batches; two tensors arrive on one mbarrier, which counts two arrivals."""
    a, b = MappedTensor(_TENSOR, (64, 8, 2, 2)), MappedTensor(_TENSOR, (32, 16, 1, 1))
    tile_a, tile_b = swizzle(a.boxed((8, 5, 1, 0)).reshape(-1, 64)), swizzle(b.boxed((0, 16, 2, 1))[0, 0])
    return Sm90Probe(
        """
  init_barriers(smem, 2, 2);
  if (tid == 32) mbarrier_arrive(smem);
  if (tid == 0) {
    mbarrier_arrive_expect_tx(smem, 4096 + 1024);
    tma_load(tile, p.a, smem, 8, 5, 1, 0);
    tma_load(tile + 8192, p.b, smem, 0, 16, 2, 1);
  }
  mbarrier_try_wait(smem, 0);
  for (int word = tid; word < 1024; word += kThreads) st_global(p.out + word, ld_shared<u32>(tile + 4 * word));
  for (int word = tid; word < 256; word += kThreads)
    st_global(p.out + (1024 + word), ld_shared<u32>(tile + 8192 + 4 * word));""",
        np.concatenate([tile_a, tile_b]),
        a=a,
        b=b,
    )


def _ring() -> Sm90Probe:
    """A producer warp, two stages, two warpgroups that read what it brings."""
    tensor = MappedTensor(counting(1, 16 * 16, 1, 64), (64, 16, 1, 1))
    words = tensor.values.reshape(16, -1).view(np.uint32).astype(np.uint64)  # [round][word], before the swizzle
    tiles = np.stack([swizzle(tensor.boxed((0, 16 * r, 0, 0))[0, 0]) for r in range(16)]).astype(np.uint64)
    assert words.shape == tiles.shape
    sums = np.zeros(256, np.uint64)
    for tile in tiles:
        sums = (3 * sums + tile[:256] + tile[256:]) % 2**32
    return Sm90Probe(
        """
  constexpr int kRounds = 16;
  const u32 full = smem, empty = smem + 16;
  name_shared("full", full, 16);
  name_shared("empty", empty, 16);
  if (tid == 0) {
    for (int i = 0; i < 2; i++) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, 2);
    }
    fence_mbarrier_init();
  }
  sync_threads();
  if (group == 2) {
    if (warp == 8 && elect_one())
      for (int round = 0; round < kRounds; round++) {
        trace("round", round);
        const int stage = round % 2;
        mbarrier_try_wait(empty + 8 * stage, (round / 2 + 1) & 1);
        mbarrier_arrive_expect_tx(full + 8 * stage, 2048);
        tma_load(tile + 2048 * stage, p.a, full + 8 * stage, 0, 16 * round, 0, 0);
      }
    return;
  }
  u32 sum = 0;
  for (int round = 0; round < kRounds; round++) {
    trace("round", round);
    const int stage = round % 2;
    mbarrier_try_wait(full + 8 * stage, round / 2 & 1);
    const u32 from = tile + 2048 * stage + 4 * tid;
    sum = 3 * sum + ld_shared<u32>(from) + ld_shared<u32>(from + 1024);
    bar_sync(1 + group, 128);
    if (tid % 128 == 0) mbarrier_arrive(empty + 8 * stage);
  }
  st_global(p.out + tid, sum);""",
        sums.astype(np.uint32),
        a=tensor,
    )


# ---- TMA stores: a tile that threads wrote, to several places of a tensor, inside and partly or wholly outside.

_STORE_PLACES = [(0, 0, 0, 0), (24, 34, 2, 1), (8, 5, 1, 0), (0, 40, 0, 0), (64, 12, 1, 1)]


def _store() -> Sm90Probe:
    rows, o = 32, np.zeros((2, 40, 3, 88), np.uint16)
    after = o.copy()
    tiles = counting(len(_STORE_PLACES), rows, 64)
    for tile, (c0, r0, head, batch) in zip(tiles, _STORE_PLACES, strict=True):
        for r, c in np.ndindex(rows, 64):
            if 0 <= r0 + r < 40 and 0 <= c0 + c < 88 and head < 3 and batch < 2:
                after[batch, r0 + r, head, c0 + c] = tile[r, c]
    places = np.array(_STORE_PLACES, np.int32).reshape(-1).view(np.uint32)
    return Sm90Probe(
        """
  for (int i = 0; i < p.extra; i++) {
    const u32 from = tile + 4096 * (i % 2);
    for (int chunk = tid; chunk < 256; chunk += kThreads)
      st_shared(from + swizzled(chunk / 8, chunk % 8), ld_global<u32x4>(p.in + (20 + i * 1024 + 4 * chunk)));
    fence_proxy_async();
    sync_threads();
    if (tid == 0) {
      int at[4];
      for (int axis = 0; axis < 4; axis++) at[axis] = int(ld_global<u32>(p.in + (4 * i + axis)));
      tma_store(p.o, from, at[0], at[1], at[2], at[3]);
      tma_store_commit();
      tma_store_wait_read<1>();
    }
    sync_threads();
  }
  if (tid == 0) tma_store_wait_read<0>();
  st_global(p.out + tid, u32(tid));""",
        np.arange(NUM_THREADS, dtype=np.uint32),
        o=MappedTensor(o, (64, rows, 1, 1)),
        inputs=np.concatenate([places, tiles.reshape(-1).view(np.uint32)]),
        o_after=after,
        extra=len(_STORE_PLACES),
    )


# ---- Warps and warpgroups

_WORDS = (np.arange(4 * NUM_THREADS, dtype=np.uint64) * 2654435761 % 2**32).astype(np.uint32)


def _stmatrix() -> Sm90Probe:
    """Each warp stores its 32 x 4 registers; rows of the four matrices follow each other."""
    registers = _WORDS.reshape(-1, 32, 4)  # [warp][lane][matrix]
    rows = registers.reshape(-1, 8, 4, 4).transpose(0, 3, 1, 2)  # [warp][matrix][row][column]
    return Sm90Probe(
        """
  u32 r[4];
  for (int i = 0; i < 4; i++) r[i] = ld_global<u32>(p.in + (4 * tid + i));
  stmatrix_x4(tile + 512 * warp + 16 * lane, r[0], r[1], r[2], r[3]);
  sync_warp();
  for (int i = 0; i < 4; i++)
    st_global(p.out + (128 * warp + 32 * i + lane), ld_shared<u32>(tile + 512 * warp + 128 * i + 4 * lane));""",
        rows.reshape(-1).copy(),
        inputs=_WORDS,
    )


def _turns() -> int:
    value = 1
    for turn in range(12):
        value = (3 * value + turn % 3) % 2**32
    return value


SM90_PROBES: dict[str, Sm90Probe] = {
    "load of rows of 128 bytes": _load(64, 32),
    "load of rows of 64 bytes": _load(32, 24),
    "load of rows of 32 bytes": _load(16, 16),
    "boxes of heads and batches": _box_of_heads(),
    "ring": _ring(),
    "store": _store(),
    "stmatrix": _stmatrix(),
    "elect": Sm90Probe(
        """
  u32 elected = 0;
  for (int i = 0; i < 3; i++)
    if (elect_one()) elected++;
  st_global(p.out + 2 * tid, u32(any_lane(elected == 3)) + 2 * u32(any_lane(elected == 1 || elected == 2)));
  u32 sum = elected;
  for (int mask = 1; mask < 32; mask *= 2) sum += shfl_xor(sum, mask);
  st_global(p.out + (2 * tid + 1), sum);""",
        np.tile(np.array([1, 3], np.uint32), NUM_THREADS),
    ),
    # 168 registers a thread at the start: the first warpgroup gives 144 of them to the two others.
    "registers": Sm90Probe(
        """
  if (group == 0) {
    setmaxnreg_dec<24>();
    st_global(p.out + tid, 1u);
  } else {
    setmaxnreg_inc<240>();
    st_global(p.out + tid, 2u);
  }""",
        np.repeat(np.array([1, 2], np.uint32), [128, 256]),
    ),
    # Warpgroups take turns: each adds to the numbers of the one before. The last arrivals are of nobody's next turn.
    "turns": Sm90Probe(
        """
  if (group == 0) st_shared(tile + 4 * tid, 1u);
  if (group == 2) bar_arrive(1, 256);
  for (int round = 0; round < 4; round++) {
    bar_sync(1 + group, 256);
    u32 sum = round == 0 && group == 0 ? 1 : ld_shared<u32>(tile + 4 * (tid % 128));
    st_shared(tile + 4 * (tid % 128), 3 * sum + u32(group));
    bar_arrive(1 + (group + 1) % 3, 256);
  }
  if (group == 0) bar_sync(1, 256);
  if (group == 0) st_global(p.out + tid, ld_shared<u32>(tile + 4 * tid));""",
        np.full(128, _turns(), np.uint32),
    ),
    # 20 numbers for 5 blocks, each of which draws one beyond.
    "tickets": Sm90Probe(
        """
  if (tid == 0) {
    if (blockIdx.x == 0) open_tickets(p.tickets);
    for (;;) {
      const u32 number = draw_ticket(p.tickets, 20 + gridDim.x - 1);
      if (number >= 20) break;
      st_global(p.out + number, 7 * number + 1);
    }
  }""",
        7 * np.arange(20, dtype=np.uint32) + 1,
        grid=5,
    ),
}
