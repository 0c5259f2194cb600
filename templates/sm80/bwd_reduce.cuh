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
  int n_block;
};

// A warp's part of a tile has a semaphore: the number of key blocks that have added to it, in their order.
FUNC gptr<u32> dq_semaphore(int row_tile, const WarpPlace& place, const BwdParams& p) {
  return p.semaphores + (i64(row_tile) * kNumWarps + place.index);
}

FUNC void add_dq_part(const DqWork& work, const WarpPlace& place, const BwdParams& p) {
  const int warp_m = place.index / kDqWarpsN, warp_n = place.index % kDqWarpsN;
  DqTile acc_dq;
  gemm_dq(acc_dq, work.lane_ds, work.lane_k, warp_n * kDqPairs);
  const int column_tile = warp_n * (2 * kDqPairs);
  const i64 row_16 = i64(work.row_tile) * (kBlockM / 16) + warp_m * kDqTilesM;
  if constexpr (kDeterministic) {
    if (threadIdx.x % 32 == 0) wait_until_equal(dq_semaphore(work.row_tile, place, p), work.n_block);
    sync_warp();
  }
  add_tiles(p.dq_accum + tile_offset(row_16, column_tile), acc_dq, column_tile);
}

// Lets the next key block add.
FUNC void release_dq(int row_tile, const WarpPlace& place, const BwdParams& p) {
  sync_warp();
  if (threadIdx.x % 32 == 0) release_add(dq_semaphore(row_tile, place, p), 1);
  sync_warp();  // no lane may meet the next barrier of the block before the others
}
