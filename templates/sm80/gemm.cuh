// ---- The two matrix products of one softmax step
//
// kWarpRows query rows against kStepN keys. kWarpsN warps share the rows: of two, each takes half of the keys in
// S = Q K^T and half of the head dim in O += P V.

FUNC int warp_m() { return threadIdx.x / (32 * kWarpsN); }  // which rows are this warp's
FUNC int warp_n() { return threadIdx.x / 32 % kWarpsN; }  // which keys of a step, and which columns of O

constexpr int kWarpKeys = kStepN / kWarpsN;  // keys of a step that a warp multiplies with Q
constexpr int kTilesM = kWarpRows / 16;  // m16 tiles of a warp's rows
constexpr int kTilesS = kWarpKeys / 8;  // n8 tiles of its part of S
constexpr int kTilesO = kHeadDimPadded / kWarpsN / 8;  // n8 tiles of its part of O
constexpr int kStepsQK = (kHeadDim + 15) / 16;  // k16 steps of Q K^T; columns beyond are zero
constexpr int kStepsP = kWarpKeys / 16;  // k16 steps of P V that the warp's own P feeds
constexpr int kStepsPV = kStepN / 16;  // k16 steps of P V
constexpr int kPairsO =
    kWarpsN > 1 ? kTilesO / 2 : (kHeadDim + 15) / 16;  // pairs of n8 tiles of O that are not padding
constexpr int kPanelQ = kBlockM * kPanelRowBytes;  // bytes between the panels of Q
constexpr int kPanelKV = kBlockN * kPanelRowBytes;  // bytes between the panels of K and V
constexpr int kRowBytesP = kStepN * 2;  // a row of the tile through which two warps share P
constexpr int kRows16 = 16 * kPanelRowBytes;  // bytes between groups of 16 rows

// Accumulators: [i][n][e] is row i * 16 + e / 2 * 8 + lane / 4 of the warp, column n * 8 + lane % 4 * 2 + e % 2 of its
// part.
using ScoreTile = float[kTilesM][kTilesS][4];
using OutputTile = float[kTilesM][kTilesO][4];

// Operands of mma, 16-bit elements two by two.
using ProbabilityFragments = u32[kStepsP][kTilesM][4];
using QueryFragments = u32[kQInRegs ? kStepsQK : 1][kTilesM][4];

FUNC void clear_output(OutputTile& acc_o) {
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int n = 0; n < kTilesO; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc_o[i][n][e] = 0.f;
}

// A fragments of Q for k step `k`.
FUNC void load_query_fragments(u32 (&frag)[kTilesM][4], u32 lane_q, int k) {
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
    ldmatrix_x4(frag[i], (lane_q ^ (k % kPanelSteps * 32)) + k / kPanelSteps * kPanelQ + i * kRows16);
}

FUNC void load_all_query_fragments(QueryFragments& frag_q, u32 lane_q) {
#pragma unroll
  for (int k = 0; k < kStepsQK; k++) load_query_fragments(frag_q[k], lane_q, k);
}

// B fragment of k step `k` for a pair of n8 tiles (16 keys).
FUNC void load_key_fragment(u32 (&frag)[4], u32 lane_k, int k, int pair) {
  ldmatrix_x4(frag, (lane_k ^ (k % kPanelSteps * 32)) + k / kPanelSteps * kPanelKV + pair * kRows16);
}

// One k16 step of acc_s = Q K^T; the first sets acc_s, the others add. The next B fragment is loaded before the current
// one is used. (A loop of its own: with both kinds of step in its body, nvcc leaves a long one rolled and acc_s in
// memory.)
template <bool kFirst>
FUNC void gemm_qk_step(ScoreTile& acc_s, const QueryFragments& frag_q, u32 (&frag_k)[2][4], u32 lane_q, u32 lane_k,
                       int k) {
  constexpr int kPairs = kTilesS / 2;
  u32 frag_a[kTilesM][4];
  if constexpr (kQInRegs) {
#pragma unroll
    for (int i = 0; i < kTilesM; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) frag_a[i][j] = frag_q[k][i][j];
  } else {
    load_query_fragments(frag_a, lane_q, k);
  }
#pragma unroll
  for (int pair = 0; pair < kPairs; pair++) {
    const int current = k * kPairs + pair, next = current + 1;
    if (next < kStepsQK * kPairs) load_key_fragment(frag_k[next % 2], lane_k, next / kPairs, next % kPairs);
    const u32(&b)[4] = frag_k[current % 2];
#pragma unroll
    for (int i = 0; i < kTilesM; i++) {
      if constexpr (kFirst) {
        mma_m16n8k16_init<Element>(acc_s[i][2 * pair], frag_a[i], b[0], b[1]);
        mma_m16n8k16_init<Element>(acc_s[i][2 * pair + 1], frag_a[i], b[2], b[3]);
      } else {
        mma_m16n8k16<Element>(acc_s[i][2 * pair], frag_a[i], b[0], b[1]);
        mma_m16n8k16<Element>(acc_s[i][2 * pair + 1], frag_a[i], b[2], b[3]);
      }
    }
  }
}

// acc_s = Q K^T.
FUNC void gemm_qk(ScoreTile& acc_s, const QueryFragments& frag_q, u32 lane_q, u32 lane_k) {
  // Its variants for the k steps are computed here, three XORs a step: nvcc would keep each in a register of the whole
  // loop, and at head dim 128 spill others for them (H200: 3 % of d 128).
  lane_q = opaque(lane_q);
  u32 frag_k[2][4];
  load_key_fragment(frag_k[0], lane_k, 0, 0);
  gemm_qk_step<true>(acc_s, frag_q, frag_k, lane_q, lane_k, 0);
#pragma unroll
  for (int k = 1; k < kStepsQK; k++) gemm_qk_step<false>(acc_s, frag_q, frag_k, lane_q, lane_k, k);
}

// Packs P to 16 bits. Two neighbouring n8 tiles of S are the A fragment of one k16 step of P V: no shuffle, no memory.
FUNC void pack_probabilities(ProbabilityFragments& frag_p, const ScoreTile& p) {
#pragma unroll
  for (int k = 0; k < kStepsP; k++)
#pragma unroll
    for (int i = 0; i < kTilesM; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        frag_p[k][i][j] = pack2<Element>(p[i][2 * k + j / 2][j % 2 * 2], p[i][2 * k + j / 2][j % 2 * 2 + 1]);
}

// B fragment of P V for k step `k` (16 keys) and a pair of n8 tiles of O.
FUNC void load_value_fragment(u32 (&frag)[4], u32 lane_v, int k, int pair) {
  ldmatrix_x4_trans(frag, (lane_v ^ (pair % kPanelSteps * 32)) + pair / kPanelSteps * kPanelKV + k * kRows16);
}

// acc_o += P V, P being the warp's own. The next B fragment is loaded before the current one is used. (Two loops: nvcc
// leaves one over the 48 fragments of head dim 192 rolled, with acc_o and P in memory.)
FUNC void gemm_pv(OutputTile& acc_o, const ProbabilityFragments& frag_p, u32 lane_v) {
  u32 frag_v[2][4];
  load_value_fragment(frag_v[0], lane_v, 0, 0);
#pragma unroll
  for (int k = 0; k < kStepsPV; k++)
#pragma unroll
    for (int pair = 0; pair < kPairsO; pair++) {
      const int next = k * kPairsO + pair + 1;
      if (next < kStepsPV * kPairsO) load_value_fragment(frag_v[next % 2], lane_v, next / kPairsO, next % kPairsO);
      const u32(&b)[4] = frag_v[(next + 1) % 2];
#pragma unroll
      for (int i = 0; i < kTilesM; i++) {
        mma_m16n8k16<Element>(acc_o[i][2 * pair], frag_p[k][i], b[0], b[1]);
        mma_m16n8k16<Element>(acc_o[i][2 * pair + 1], frag_p[k][i], b[2], b[3]);
      }
    }
}

// Likewise where two warps share the rows: P is what both have put into the tile at lane_p.
FUNC void gemm_pv_shared(OutputTile& acc_o, u32 lane_p, u32 lane_v) {
  u32 frag_a[kTilesM][4], frag_v[2][4];
  load_value_fragment(frag_v[0], lane_v, 0, 0);
#pragma unroll
  for (int k = 0; k < kStepsPV; k++) {
#pragma unroll
    for (int i = 0; i < kTilesM; i++) ldmatrix_x4(frag_a[i], (lane_p ^ (k * 32)) + i * 16 * kRowBytesP);
#pragma unroll
    for (int pair = 0; pair < kPairsO; pair++) {
      const int next = k * kPairsO + pair + 1;
      if (next < kStepsPV * kPairsO) load_value_fragment(frag_v[next % 2], lane_v, next / kPairsO, next % kPairsO);
      const u32(&b)[4] = frag_v[(next + 1) % 2];
#pragma unroll
      for (int i = 0; i < kTilesM; i++) {
        mma_m16n8k16<Element>(acc_o[i][2 * pair], frag_a[i], b[0], b[1]);
        mma_m16n8k16<Element>(acc_o[i][2 * pair + 1], frag_a[i], b[2], b[3]);
      }
    }
  }
}
