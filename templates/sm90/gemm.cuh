// ---- The two matrix products of one key tile, for a warpgroup's 64 query rows
//
// Both are only issued here. Until a wgmma_wait covers them nothing else may touch their accumulators or P.

constexpr int kStepsQK = (kHeadDim + 15) / 16;  // k16 steps of Q K^T; columns beyond are zero
constexpr int kStepsPV = kBlockN / 16;  // k16 steps of P V
constexpr int kColumnsO = (kHeadDim + 15) / 16 * 16;  // columns of O; those beyond the head dim are zero

// Accumulators: [4 n + 2 r + e] is row warp % 4 * 16 + r * 8 + lane / 4, column n * 8 + lane % 4 * 2 + e.
using ScoreTile = float[kBlockN / 2];
using OutputTile = float[kColumnsO / 2];
// P as the left operand of P V: for each k16 step what the accumulators hold of these columns, two by two.
using ProbabilityFragments = u32[kStepsPV][4];

// The first k16 steps of Q as the left operand of Q K^T: from registers they need not be read from shared memory, whose
// bandwidth and energy the products would have for themselves, once for each key tile.
struct QueryFragments {
  u32 steps[kQueryRegs > 0 ? kQueryRegs : 1][4];
};

FUNC void load_query_fragments(QueryFragments& frag_q, u32 tile_q) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kQueryRegs; step++)
    ldmatrix_x4(frag_q.steps[step], tile_q + step / 4 * kQueryPanelBytes + swizzled(row, step % 4 * 2 + lane / 16));
  // The tile is given up by one lane for the warp.
  sync_warp();
}

// S = Q K^T.
FUNC void issue_qk(ScoreTile& acc_s, const QueryFragments& frag_q, u32 tile_q, u32 tile_k) {
  const u32 q = k_major(tile_q), k = k_major(tile_k);
  if constexpr (kQueryRegs > 0) {
#pragma unroll
    for (int step = 0; step < kQueryRegs; step++)
      wgmma_rs<Element, kBlockN, false>(acc_s, frag_q.steps[step], descriptor(k + k_step(step, kKeyPanelBytes)),
                                        step > 0);
  }
  if constexpr (kQueryRegs < kStepsQK) {
#pragma unroll
    for (int step = kQueryRegs; step < kStepsQK; step++)
      wgmma_ss<Element, kBlockN, false>(acc_s, descriptor(q + k_step(step, kQueryPanelBytes)),
                                        descriptor(k + k_step(step, kKeyPanelBytes)), step > 0);
  }
}

// O += P V, or O = P V. P comes from `frag_p`, or from this warpgroup's tile in shared memory.
FUNC void issue_pv(OutputTile& acc_o, const ProbabilityFragments& frag_p, u32 tile_p, u32 tile_v, bool accumulate) {
  const u32 v = mn_major(tile_v, kKeyPanelBytes);
#pragma unroll
  for (int step = 0; step < kStepsPV; step++) {
    const u64 rows = descriptor(v + step * (16 * kPanelRowBytes >> 4));
    if constexpr (kSharedP)
      wgmma_ss<Element, kColumnsO, true>(acc_o, descriptor(k_major(tile_p) + k_step(step, kQueryPanelBytes)), rows,
                                         step > 0 || accumulate);
    else
      wgmma_rs<Element, kColumnsO, true>(acc_o, frag_p[step], rows, step > 0 || accumulate);
  }
}

// S = Q K^T of this warp's 16 rows alone, by mma.sync: a repair is the affair of one warp, and wgmma needs all four.
FUNC void recompute_scores(ScoreTile& acc_s, u32 tile_q, u32 tile_k) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, key = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int i = 0; i < kBlockN / 2; i++) acc_s[i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < kStepsQK; step++) {
    u32 frag_q[4];
    ldmatrix_x4(frag_q, tile_q + step / 4 * kQueryPanelBytes + swizzled(row, step % 4 * 2 + lane / 16));
    const u32 keys = tile_k + step / 4 * kKeyPanelBytes + swizzled(key, step % 4 * 2 + lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < kBlockN / 16; n++) {
      u32 frag_k[4];
      ldmatrix_x4(frag_k, keys + n * 16 * kPanelRowBytes);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float* s = acc_s + 8 * n + 4 * i;
        float d[4] = {s[0], s[1], s[2], s[3]};
        mma_m16n8k16<Element>(d, frag_q, frag_k[2 * i], frag_k[2 * i + 1]);
#pragma unroll
        for (int e = 0; e < 4; e++) s[e] = d[e];
      }
    }
  }
  sync_warp();
}

// Packs P to 16 bits.
FUNC void pack_probabilities(ProbabilityFragments& frag_p, const ScoreTile& p) {
#pragma unroll
  for (int step = 0; step < kStepsPV; step++)
#pragma unroll
    for (int i = 0; i < 4; i++) frag_p[step][i] = pack2<Element>(p[8 * step + 2 * i], p[8 * step + 2 * i + 1]);
}

// Puts P into this warpgroup's tile, from where wgmma reads it once the warpgroup has met.
FUNC void store_probabilities(u32 tile_p, const ProbabilityFragments& frag_p) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kStepsPV; step++)
    stmatrix_x4(tile_p + step / 4 * kQueryPanelBytes + swizzled(row, step % 4 * 2 + lane / 16), frag_p[step][0],
                frag_p[step][1], frag_p[step][2], frag_p[step][3]);
  fence_proxy_async();
}
