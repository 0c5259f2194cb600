// ---- P and dS of one step, transposed: rows are keys, columns queries
//
// P = exp(S - L) as 2^(s c - L log2(e)), c = softmax_scale log2(e): one FFMA and one ex2; dS = P (dP - D). A lane has
// columns 2 t and 2 t + 1 of each n8 tile, t = lane % 4, so L and D come from shared memory two at a time.

// Query i sees key j iff j < seqlen_k and, with causal attention, j <= i + diagonal. Sets the scores of the others to
// -inf. `key` and `query` are the first of the warp's part.
FUNC void mask_scores(ScoreTile& acc_s, int key, int query, int seqlen_k, int diagonal) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTilesN; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = key + i * 16 + r * 8 + lane / 4;
      int begin = row < seqlen_k ? 0 : 0x7fffffff;  // the first query that sees the key
      if constexpr (kCausal) begin = max_i32(begin, row - diagonal);
#pragma unroll
      for (int n = 0; n < kTilesS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (query + n * 8 + lane % 4 * 2 + e < begin) acc_s[i][n][2 * r + e] = neg_inf();
    }
}

// acc_s becomes P. `lane_lse` is where the lane finds the L log2(e) of its first column.
FUNC void probabilities(ScoreTile& acc_s, u32 lane_lse, float scale_log2) {
#pragma unroll
  for (int n = 0; n < kTilesS; n++) {
    const u32x2 lse = ld_shared<u32x2>(lane_lse + n * 32);
#pragma unroll
    for (int i = 0; i < kTilesN; i++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        acc_s[i][n][e] = ex2(fma_f32(acc_s[i][n][e], scale_log2, -bits_as<float>(e % 2 == 0 ? lse.x : lse.y)));
  }
}

// acc_dp becomes dS = P (dP - D). `lane_delta` is where the lane finds the D of its first column.
FUNC void score_gradients(ScoreTile& acc_dp, const ScoreTile& p, u32 lane_delta) {
#pragma unroll
  for (int n = 0; n < kTilesS; n++) {
    const u32x2 delta = ld_shared<u32x2>(lane_delta + n * 32);
#pragma unroll
    for (int i = 0; i < kTilesN; i++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        acc_dp[i][n][e] = p[i][n][e] * (acc_dp[i][n][e] - bits_as<float>(e % 2 == 0 ? delta.x : delta.y));
  }
}

// Likewise from a P that is packed already.
FUNC void score_gradients_packed(ScoreTile& acc_dp, const ScoreFragments& frag_p, u32 lane_delta) {
#pragma unroll
  for (int n = 0; n < kTilesS; n++) {
    const u32x2 delta = ld_shared<u32x2>(lane_delta + n * 32);
#pragma unroll
    for (int i = 0; i < kTilesN; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const u32 pair = frag_p[n / 2][i][n % 2 * 2 + e / 2];
        const float p = e % 2 == 0 ? unpack_low<Element>(pair) : unpack_high<Element>(pair);
        acc_dp[i][n][e] = p * (acc_dp[i][n][e] - bits_as<float>(e % 2 == 0 ? delta.x : delta.y));
      }
  }
}

// Where a lane puts its first pair of P or dS into a tile of shared memory, and finds it again.
FUNC u32 lane_scores(u32 tile, const WarpPlace& place) {
  const int lane = threadIdx.x % 32, chunk = place.d * (kWarpQueries / 8);
  return tile + swizzled_row<kRowBytesS>(lane / 4, chunk % kChunksS) + lane % 4 * 4 + chunk / kChunksS * kPanelS +
         place.n * (kWarpKeys * kRowBytesS);
}

// Lane address for ldmatrix of a tile of P or dS: keys as rows of the A operand, in dV += P^T dO and dK += dS^T Q.
FUNC u32 lane_score_rows(u32 tile) {
  const int lane = threadIdx.x % 32;
  return tile + swizzled_row<kRowBytesS>(lane % 16, lane / 16);
}

// Likewise, transposed: a warp's queries as rows of the A operand, in dQ = dS K.
FUNC u32 lane_dq_scores(u32 tile, int dq_warp_m) {
  const int lane = threadIdx.x % 32;
  const int chunk = dq_warp_m * (2 * kDqTilesM) + lane / 8 % 2;
  return tile + swizzled_row<kRowBytesS>(lane % 8 + lane / 16 * 8, chunk % kChunksS) + chunk / kChunksS * kPanelS;
}

// Byte address of register j of fragment [k][i] of step `step`.
FUNC u32 score_address(u32 lane, int step, int k, int i, int j) {
  const int chunk = step * (kStepM / 8) + 2 * k + j / 2;
  return (lane ^ (chunk % kChunksS * 16)) + chunk / kChunksS * kPanelS + (i * 16 + j % 2 * 8) * kRowBytesS;
}

FUNC void store_scores(u32 lane, const ScoreFragments& frag, int step) {
#pragma unroll
  for (int k = 0; k < kStepsS; k++)
#pragma unroll
    for (int i = 0; i < kTilesN; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) st_shared(score_address(lane, step, k, i, j), frag[k][i][j]);
}

FUNC void load_scores(ScoreFragments& frag, u32 lane, int step) {
#pragma unroll
  for (int k = 0; k < kStepsS; k++)
#pragma unroll
    for (int i = 0; i < kTilesN; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) frag[k][i][j] = ld_shared<u32>(score_address(lane, step, k, i, j));
}

// From a warp of one role to its partner of the other, lane by lane: P in the order of the fragments.
FUNC u32 lane_hand_over(u32 tile_p, const WarpPlace& place) {
  return tile_p + threadIdx.x % 32 * 16 + place.in_role * (kStepsS * kTilesN * 512);
}

FUNC void hand_over(u32 lane, const ScoreFragments& frag) {
#pragma unroll
  for (int k = 0; k < kStepsS; k++)
#pragma unroll
    for (int i = 0; i < kTilesN; i++)
      st_shared(lane + (k * kTilesN + i) * 512, u32x4{frag[k][i][0], frag[k][i][1], frag[k][i][2], frag[k][i][3]});
}

FUNC void take_over(ScoreFragments& frag, u32 lane) {
#pragma unroll
  for (int k = 0; k < kStepsS; k++)
#pragma unroll
    for (int i = 0; i < kTilesN; i++) {
      const u32x4 four = ld_shared<u32x4>(lane + (k * kTilesN + i) * 512);
      frag[k][i][0] = four.x;
      frag[k][i][1] = four.y;
      frag[k][i][2] = four.z;
      frag[k][i][3] = four.w;
    }
}

// Named barriers of two warps: P is there for the second role; what two warps that share keys have put together is
// whole.
FUNC int partner_barrier(const WarpPlace& place) { return 1 + place.in_role; }
FUNC int pair_barrier(const WarpPlace& place) {
  constexpr int kFirst = 1 + (kRoles == 2 ? kNumWarps / 2 : 0), kPairs = kNumWarps / kRoles / kWarpsD;
  return kFirst + place.role * kPairs + place.n;
}
