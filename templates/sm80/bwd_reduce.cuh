// ---- Adding to sums in global memory

// Adds a warp's accumulators; `sums` is the tile of its first rows and columns, `column_tile` counts to that.
template <int kRows, int kColumns>
FUNC void add_tiles(gptr<float> sums, const float (&acc)[kRows][kColumns][4], int column_tile) {
  const gptr<float> lane_sums = sums + threadIdx.x % 32 * kLaneFloats;
#pragma unroll
  for (int i = 0; i < kRows; i++)
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
      if constexpr (kHeadDim < kHeadDimPadded) {
        if ((column_tile + n) * 8 >= kHeadDim) continue;
      }
      const gptr<float> to = lane_sums + (i * (kHeadDimPadded / 8) + n) * kTileFloats;
      if constexpr (kVectorReduction) {
        atomic_add4(to, acc[i][n][0], acc[i][n][1], acc[i][n][2], acc[i][n][3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++) atomic_add<float>(to + e * kElementFloats, acc[i][n][e]);
      }
    }
}

// dQ of a tile of queries, from dS of all keys of the block.
struct DqWork {
  u32 lane_ds, lane_k;  // lane addresses: this warp's part of dS, and of K
  int row_tile;  // counts tiles of kBlockM rows of all heads
};

FUNC void add_dq(const DqWork& work, const WarpPlace& place, const BwdParams& p) {
  const int warp_m = place.index / kDqWarpsN, warp_n = place.index % kDqWarpsN;
  DqTile acc_dq;
  gemm_dq(acc_dq, work.lane_ds, work.lane_k, warp_n * kDqPairs);
  const int column_tile = warp_n * (2 * kDqPairs);
  const i64 row_16 = i64(work.row_tile) * (kBlockM / 16) + warp_m * kDqTilesM;
  add_tiles(p.dq_accum + tile_offset(row_16, column_tile), acc_dq, column_tile);
}

// ---- A fixed order of the additions to dQ: key blocks take turns at each tile of queries
//
// A tile has a semaphore, the number of key blocks that have added to it. One lane speaks for its block, with barriers
// of the block between it and the warps that add. It belongs to the last warp, which has least to do behind a barrier
// (H200, d 128: 0.96 of the speed without an order, with the first warp's lane 0.93; with a semaphore and a fence for
// each warp 0.84: the fence waits for additions to arrive).

FUNC bool speaks_for_block() { return threadIdx.x == kThreads - 32; }

// Lets the next key block add to the tile `added`, -1 for none: this block's warps have. Returns how many key blocks
// have added to the tile at hand, to the lane that speaks.
FUNC u32 pass_turn(int added, int row_tile, const BwdParams& p) {
  u32 seen = 0;
  if (speaks_for_block()) {
    const gptr<u32> released = added >= 0 ? p.semaphores + added : gptr<u32>{nullptr};
    seen = look_and_release_add(p.semaphores + row_tile, released, 1);
  }
  sync_warp();  // no lane may meet the block's next barrier before the others
  return seen;
}

// Before a barrier behind which this block's warps add to the tile: waits until the key blocks before it have.
FUNC void await_turn(u32 seen, int row_tile, int n_block, const BwdParams& p) {
  if (speaks_for_block() && seen != u32(n_block)) wait_until_equal(p.semaphores + row_tile, n_block);
  sync_warp();
}

// Passes the last turns, when there is nothing more to look for.
FUNC void end_turn(int added, const BwdParams& p) {
  if (speaks_for_block() && added >= 0) release_add(p.semaphores + added, 1);
  sync_warp();
}
