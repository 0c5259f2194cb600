// ---- The matrix products of the backward
//
// S^T = K Q^T and dP^T = V dO^T: rows are keys, columns queries, so that P^T and dS^T are the left operands of
// dV += P^T dO and dK += dS^T Q as they stand in registers. dQ = dS K takes dS from shared memory, transposed on the
// way.

// What a warp works on. With two roles, one half of the warps computes dV and the other dK of the same keys; of one
// role, kWarpsD warps share keys.
struct WarpPlace {
  int index;  // in the block
  int role;
  int in_role;  // in its role's half
  int n;  // which keys
  int d;  // which queries of a step, and which columns of dV and dK
};

FUNC WarpPlace warp_place() {
  WarpPlace place;
  place.index = uniform(threadIdx.x / 32);
  place.role = place.index / (kNumWarps / kRoles);
  place.in_role = place.index % (kNumWarps / kRoles);
  place.n = place.in_role / kWarpsD;
  place.d = place.in_role % kWarpsD;
  return place;
}

constexpr int kTilesN = kWarpKeys / 16;  // m16 tiles of a warp's keys
constexpr int kWarpQueries = kStepM / kWarpsD;  // queries of a step that a warp multiplies with K and V
constexpr int kTilesS = kWarpQueries / 8;  // n8 tiles of its part of S^T
constexpr int kStepsS = kWarpQueries / 16;  // k16 steps of P^T dO that the warp's own P feeds
constexpr int kStepsD = (kHeadDim + 15) / 16;  // k16 steps of K Q^T; columns beyond are zero
constexpr int kPairsD = kHeadDimPadded / kWarpsD / 16;  // pairs of n8 tiles of its part of dV and dK
constexpr int kRows16 = 16 * kPanelRowBytes;  // bytes between groups of 16 rows
constexpr int kPanelM = kBlockM * kPanelRowBytes;  // bytes between the panels of Q and dO
constexpr int kPanelN = kBlockN * kPanelRowBytes;  // bytes between the panels of K and V

// Warps that share dQ of a tile: kDqWarpsM times its rows, the others its columns.
constexpr int kDqWarpsN = kNumWarps / kDqWarpsM;
constexpr int kDqTilesM = kBlockM / kDqWarpsM / 16;
constexpr int kDqPairs = kHeadDimPadded / kDqWarpsN / 16;

// P and dS in shared memory: a row of queries for each key, in panels like those of tile.cuh.
constexpr int kRowBytesS = kBlockM >= 64 ? 128 : 64;
constexpr int kChunksS = kRowBytesS / 16;
constexpr int kPanelS = kBlockN * kRowBytesS;
constexpr u32 kTileBytesS = kBlockN * kBlockM * 2;

// Accumulators: [i][n][e] is row i * 16 + e / 2 * 8 + lane / 4 of the warp, column n * 8 + lane % 4 * 2 + e % 2 of its
// part.
using ScoreTile = float[kTilesN][kTilesS][4];
using GradientTile = float[kTilesN][2 * kPairsD][4];
using DqTile = float[kDqTilesM][2 * kDqPairs][4];

// Left operands of mma, 16-bit elements two by two.
using KeyFragments = u32[kKvInRegs ? kStepsD : 1][kTilesN][4];
using ScoreFragments = u32[kStepsS][kTilesN][4];

template <int kRows, int kColumns>
FUNC void clear(float (&acc)[kRows][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < kRows; i++)
#pragma unroll
    for (int n = 0; n < kColumns; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[i][n][e] = 0.f;
}

// Address of a pair of n8 tiles, 16 columns wide, of a tile whose panels lie kPanel bytes apart; `lane` is the lane
// address in its first pair.
template <int kPanel>
FUNC u32 pair_address(u32 lane, int pair) {
  return (lane ^ (pair % kPanelSteps * 32)) + pair / kPanelSteps * kPanel;
}

// A fragments of K or V for k step `k`.
FUNC void load_key_fragments(u32 (&frag)[kTilesN][4], u32 lane_k, int k) {
#pragma unroll
  for (int i = 0; i < kTilesN; i++) ldmatrix_x4(frag[i], pair_address<kPanelN>(lane_k, k) + i * kRows16);
}

FUNC void load_all_key_fragments(KeyFragments& frag_k, u32 lane_k) {
#pragma unroll
  for (int k = 0; k < kStepsD; k++) load_key_fragments(frag_k[k], lane_k, k);
}

// B fragments are loaded kAhead before their use, A fragments a k step before: a warp shares its scheduler with one or
// two others, which cannot hide the latency of shared memory by themselves.
constexpr int kAhead = kRoles == 1 ? 1 : 2;
constexpr int kBuffers = kAhead + 1;

// B fragment number `at` of K Q^T: k step by k step, pair by pair of n8 tiles (16 queries).
FUNC void load_query_fragment(u32 (&frag)[4], u32 lane_q, int at) {
  constexpr int kPairs = kTilesS / 2;
  ldmatrix_x4(frag, pair_address<kPanelM>(lane_q, at / kPairs) + at % kPairs * kRows16);
}

// One k16 step of acc_s = K Q^T; the first sets acc_s, the others add.
template <bool kFirst>
FUNC void gemm_scores_step(ScoreTile& acc_s, const u32 (&frag_a)[kTilesN][4], u32 (&frag_q)[kBuffers][4], u32 lane_q,
                           int k) {
  constexpr int kPairs = kTilesS / 2;
#pragma unroll
  for (int pair = 0; pair < kPairs; pair++) {
    const int current = k * kPairs + pair, next = current + kAhead;
    if (next < kStepsD * kPairs) load_query_fragment(frag_q[next % kBuffers], lane_q, next);
    const u32(&b)[4] = frag_q[current % kBuffers];
#pragma unroll
    for (int i = 0; i < kTilesN; i++) {
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

// acc_s = K Q^T, or V dO^T: the warp's keys against its queries of a step.
FUNC void gemm_scores(ScoreTile& acc_s, const KeyFragments& frag_k, u32 lane_k, u32 lane_q) {
  // Its variants for the k steps are computed here, a few instructions; in registers of the whole loop they would cost
  // spills.
  lane_k = opaque(lane_k);
  lane_q = opaque(lane_q);
  [[maybe_unused]] u32 frag_a[2][kTilesN][4];
  u32 frag_q[kBuffers][4];
  if constexpr (!kKvInRegs) load_key_fragments(frag_a[0], lane_k, 0);
#pragma unroll
  for (int at = 0; at < kAhead; at++) load_query_fragment(frag_q[at], lane_q, at);
#pragma unroll
  for (int k = 0; k < kStepsD; k++) {
    if constexpr (kKvInRegs) {
      if (k == 0)
        gemm_scores_step<true>(acc_s, frag_k[k], frag_q, lane_q, k);
      else
        gemm_scores_step<false>(acc_s, frag_k[k], frag_q, lane_q, k);
    } else {
      if (k + 1 < kStepsD) load_key_fragments(frag_a[(k + 1) % 2], lane_k, k + 1);
      if (k == 0)
        gemm_scores_step<true>(acc_s, frag_a[k % 2], frag_q, lane_q, k);
      else
        gemm_scores_step<false>(acc_s, frag_a[k % 2], frag_q, lane_q, k);
    }
  }
}

// Packs P or dS to 16 bits. Two neighbouring n8 tiles are the A fragment of one k16 step: no shuffle, no memory.
FUNC void pack_scores(ScoreFragments& frag, const ScoreTile& acc) {
#pragma unroll
  for (int k = 0; k < kStepsS; k++)
#pragma unroll
    for (int i = 0; i < kTilesN; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        frag[k][i][j] = pack2<Element>(acc[i][2 * k + j / 2][j % 2 * 2], acc[i][2 * k + j / 2][j % 2 * 2 + 1]);
}

// B fragment number `at` of P^T dO: k step by k step (16 queries), pair by pair of n8 tiles of the warp's columns.
FUNC void load_gradient_fragment(u32 (&frag)[4], u32 lane_q, int first_pair, int at) {
  ldmatrix_x4_trans(frag, pair_address<kPanelM>(lane_q, first_pair + at % kPairsD) + at / kPairsD * kRows16);
}

// One k16 step of acc += P^T dO; kSteps in all.
template <int kSteps>
FUNC void gemm_gradient_step(GradientTile& acc, const u32 (&frag_a)[kTilesN][4], u32 (&frag_b)[kBuffers][4], u32 lane_q,
                             int first_pair, int k) {
#pragma unroll
  for (int pair = 0; pair < kPairsD; pair++) {
    const int current = k * kPairsD + pair, next = current + kAhead;
    if (next < kSteps * kPairsD) load_gradient_fragment(frag_b[next % kBuffers], lane_q, first_pair, next);
    const u32(&b)[4] = frag_b[current % kBuffers];
#pragma unroll
    for (int i = 0; i < kTilesN; i++) {
      mma_m16n8k16<Element>(acc[i][2 * pair], frag_a[i], b[0], b[1]);
      mma_m16n8k16<Element>(acc[i][2 * pair + 1], frag_a[i], b[2], b[3]);
    }
  }
}

// acc += P^T dO, or dS^T Q, for the queries of a step; P is the warp's own. `lane_q` is the lane address in the tile's
// first row.
FUNC void gemm_gradient(GradientTile& acc, const ScoreFragments& frag_p, u32 lane_q, int first_pair) {
  lane_q = opaque(lane_q);
  u32 frag_b[kBuffers][4];
#pragma unroll
  for (int at = 0; at < kAhead; at++) load_gradient_fragment(frag_b[at], lane_q, first_pair, at);
#pragma unroll
  for (int k = 0; k < kStepsS; k++) gemm_gradient_step<kStepsS>(acc, frag_p[k], frag_b, lane_q, first_pair, k);
}

// A fragments of P or dS for k step `k` of a tile in shared memory.
FUNC void load_score_fragments(u32 (&frag)[kTilesN][4], u32 lane_p, int k) {
#pragma unroll
  for (int i = 0; i < kTilesN; i++)
    ldmatrix_x4(frag[i], (lane_p ^ (2 * k % kChunksS * 16)) + 2 * k / kChunksS * kPanelS + i * 16 * kRowBytesS);
}

// Likewise for all queries of a tile, where two warps share the keys: P is what both have put into the tile at lane_p.
FUNC void gemm_gradient_shared(GradientTile& acc, u32 lane_p, u32 lane_q, int first_pair) {
  lane_p = opaque(lane_p);
  lane_q = opaque(lane_q);
  constexpr int kSteps = kBlockM / 16;
  u32 frag_a[2][kTilesN][4], frag_b[kBuffers][4];
  load_score_fragments(frag_a[0], lane_p, 0);
#pragma unroll
  for (int at = 0; at < kAhead; at++) load_gradient_fragment(frag_b[at], lane_q, first_pair, at);
#pragma unroll
  for (int k = 0; k < kSteps; k++) {
    if (k + 1 < kSteps) load_score_fragments(frag_a[(k + 1) % 2], lane_p, k + 1);
    gemm_gradient_step<kSteps>(acc, frag_a[k % 2], frag_b, lane_q, first_pair, k);
  }
}

// A fragments of dS for k step `k` (16 keys), transposed; B fragment number `at` of dS K.
FUNC void load_dq_fragments(u32 (&frag)[kDqTilesM][4], u32 lane_ds, int k) {
#pragma unroll
  for (int i = 0; i < kDqTilesM; i++) ldmatrix_x4_trans(frag[i], (lane_ds ^ (i * 32)) + k * 16 * kRowBytesS);
}

FUNC void load_dq_key_fragment(u32 (&frag)[4], u32 lane_k, int first_pair, int at) {
  ldmatrix_x4_trans(frag, pair_address<kPanelN>(lane_k, first_pair + at % kDqPairs) + at / kDqPairs * kRows16);
}

// One k16 step (16 keys) of acc_dq = dS K; the first sets acc_dq, the others add.
template <bool kFirst>
FUNC void gemm_dq_step(DqTile& acc_dq, const u32 (&frag_a)[kDqTilesM][4], u32 (&frag_k)[kBuffers][4], u32 lane_k,
                       int first_pair, int k) {
#pragma unroll
  for (int pair = 0; pair < kDqPairs; pair++) {
    const int current = k * kDqPairs + pair, next = current + kAhead;
    if (next < kBlockN / 16 * kDqPairs) load_dq_key_fragment(frag_k[next % kBuffers], lane_k, first_pair, next);
    const u32(&b)[4] = frag_k[current % kBuffers];
#pragma unroll
    for (int i = 0; i < kDqTilesM; i++) {
      if constexpr (kFirst) {
        mma_m16n8k16_init<Element>(acc_dq[i][2 * pair], frag_a[i], b[0], b[1]);
        mma_m16n8k16_init<Element>(acc_dq[i][2 * pair + 1], frag_a[i], b[2], b[3]);
      } else {
        mma_m16n8k16<Element>(acc_dq[i][2 * pair], frag_a[i], b[0], b[1]);
        mma_m16n8k16<Element>(acc_dq[i][2 * pair + 1], frag_a[i], b[2], b[3]);
      }
    }
  }
}

// acc_dq = dS K: this warp's rows and columns, all keys of the block.
FUNC void gemm_dq(DqTile& acc_dq, u32 lane_ds, u32 lane_k, int first_pair) {
  lane_ds = opaque(lane_ds);
  lane_k = opaque(lane_k);
  u32 frag_a[2][kDqTilesM][4], frag_k[kBuffers][4];
  load_dq_fragments(frag_a[0], lane_ds, 0);
#pragma unroll
  for (int at = 0; at < kAhead; at++) load_dq_key_fragment(frag_k[at], lane_k, first_pair, at);
#pragma unroll
  for (int k = 0; k < kBlockN / 16; k++) {
    if (k + 1 < kBlockN / 16) load_dq_fragments(frag_a[(k + 1) % 2], lane_ds, k + 1);
    if (k == 0)
      gemm_dq_step<true>(acc_dq, frag_a[k % 2], frag_k, lane_k, first_pair, k);
    else
      gemm_dq_step<false>(acc_dq, frag_a[k % 2], frag_k, lane_k, first_pair, k);
  }
}
