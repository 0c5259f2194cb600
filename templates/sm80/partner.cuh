// ---- Two warps that share query rows
//
// A warp of 16 rows reads a fragment of K or V from shared memory for every two mma; one of 32 rows for every four.
// Where the accumulators of 32 rows do not fit one warp (head dim 256), two warps hold them: each computes P for half
// of a step's keys, both halves meet in a tile of P in shared memory, and each multiplies all of P with half of the
// columns of V. Two tiles of P take turns, so that one barrier of the two warps a step is enough.

constexpr int kTileBytesP = kBlockM * kRowBytesP;

FUNC void sync_partners() { bar_sync(1 + warp_m(), 32 * kWarpsN); }

// Where a lane finds P of its rows for ldmatrix.
FUNC u32 lane_probabilities(u32 tile_p) {
  const int lane = threadIdx.x % 32;
  return tile_p + swizzled_row<kRowBytesP>(warp_m() * kWarpRows + lane % 16, lane / 16);
}

// Puts the warp's part of P into a tile. Nobody may read it before sync_partners().
FUNC void store_probabilities(u32 tile_p, const ProbabilityFragments& frag_p) {
  const int lane = threadIdx.x % 32;
  const u32 to =
      tile_p + swizzled_row<kRowBytesP>(warp_m() * kWarpRows + lane / 4, warp_n() * (kWarpKeys / 8)) + lane % 4 * 4;
#pragma unroll
  for (int k = 0; k < kStepsP; k++)
#pragma unroll
    for (int i = 0; i < kTilesM; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        st_shared((to ^ ((2 * k + j / 2) * 16)) + (i * 16 + j % 2 * 8) * kRowBytesP, frag_p[k][i][j]);
}

// One value a row, known to the four lanes of a quad: what the partner has for it. Calls need a sync_partners() between
// them besides their own.
FUNC void exchange_rows(float (&theirs)[kTilesM][2], const float (&mine)[kTilesM][2]) {
  const u32 rows = smem_base() + kSmemExchange + (warp_m() * kWarpRows + threadIdx.x % 32 / 4) * 4;
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (threadIdx.x % 4 == 0) st_shared(rows + (warp_n() * kBlockM + i * 16 + r * 8) * 4, mine[i][r]);
  sync_partners();
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) theirs[i][r] = ld_shared<float>(rows + ((1 - warp_n()) * kBlockM + i * 16 + r * 8) * 4);
}
