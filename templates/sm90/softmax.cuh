// ---- Softmax of one key tile
//
// Exponents are in base 2: with c = softmax_scale * log2(e), p = 2^(s c - m c) is one FFMA and one ex2. A row lives in
// the four lanes of a quad; its sum stays per lane until the epilogue.

// Beyond |m c| = 2^11 the FFMA's rounding of m c would show (2^-13 of p; at 10^11 it is thousands and p overflows), so
// such rows take (s - m) c, whose error is relative to the difference. Logits of real models stay below 100.
constexpr float kLargeReference = 2048.f;

// Guarded softmax: a lane's sum over one tile proves that no p of it passed this limit. fp16 P must stay below 65504;
// bf16 has float's exponent range, and sums of up to 2^27 a row and tile leave |v| times the tiles room up to 10^30.
constexpr float kGuardLimit = kFp16 ? 32768.f : 16777216.f;

constexpr float kLn2 = 0.69314718f;

// A thread keeps two rows: warp % 4 * 16 + r * 8 + lane / 4 of its warpgroup's.
struct SoftmaxState {
  float row_max[2];  // m, in raw scores; -inf until a key was seen
  float row_sum[2];  // l: this lane's part of sum 2^(s c - m c)
};

FUNC float quad_max(float v) {
  v = max_f32(v, shfl_xor(v, 1));
  return max_f32(v, shfl_xor(v, 2));
}

FUNC float quad_sum(float v) {
  v += shfl_xor(v, 1);
  return v + shfl_xor(v, 2);
}

FUNC void clear_softmax(SoftmaxState& softmax) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    softmax.row_max[r] = neg_inf();
    softmax.row_sum[r] = 0.f;
  }
}

// m' = max(m, rowmax S), alpha = 2^((m - m') c), l = alpha l + rowsum P; acc_s becomes P. O = alpha O is left to do.
// Whether a reference of the warp is large.
FUNC bool online_softmax(ScoreTile& acc_s, SoftmaxState& softmax, float (&alpha)[2], float scale_log2) {
  float reference[2];
  bool large = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float step_max = max_f32(acc_s[2 * r], acc_s[2 * r + 1]);
#pragma unroll
    for (int n = 1; n < kBlockN / 8; n++)
      step_max = max_f32(step_max, max_f32(acc_s[4 * n + 2 * r], acc_s[4 * n + 2 * r + 1]));
    const float old_max = softmax.row_max[r];
    const float new_max = max_f32(old_max, quad_max(step_max));
    // A row that has seen no key yet: any finite reference gives 2^-inf = 0 where -inf - -inf would give NaN.
    reference[r] = new_max == neg_inf() ? 0.f : new_max;
    alpha[r] = ex2((old_max - reference[r]) * scale_log2);
    softmax.row_max[r] = new_max;
    large = large || abs_f32(reference[r] * scale_log2) > kLargeReference;
  }
  // The rare case only prepares, so that one basic block goes from the exponents to the fragments of P. With the
  // exponents in a branch of each case, ptxas puts the sums, the conversion of P and the rescaling of O behind them; in
  // one block they run while ex2 does: H200, 28 kernels and sizes, 0.98 to 1.17 times as fast, 1.05 in the mean.
  large = any_lane(large);
  if (large) {
#pragma unroll
    for (int i = 0; i < kBlockN / 2; i++) acc_s[i] -= reference[i / 2 % 2];
    reference[0] = reference[1] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < kBlockN / 2; i++)
    acc_s[i] = ex2(fma_f32(acc_s[i], scale_log2, -(reference[i / 2 % 2] * scale_log2)));
  // A tile's keys are added to each other first. Added to l one by one, many small p are lost beside a large one: with
  // 2^22 keys, one of them 16 above the others' mean logit, l lacked 0.2 % on an H200.
  float tile_sum[2] = {acc_s[0] + acc_s[1], acc_s[2] + acc_s[3]};
#pragma unroll
  for (int i = 4; i < kBlockN / 2; i++) tile_sum[i / 2 % 2] += acc_s[i];
#pragma unroll
  for (int r = 0; r < 2; r++) softmax.row_sum[r] = fma_f32(softmax.row_sum[r], alpha[r], tile_sum[r]);
  return large;
}

// Guarded softmax: P against the reference that the rows have, so there is no maximum, no shuffle and no rescale.
// tile_sum is this lane's part of the row sums.
FUNC void guarded_softmax(ScoreTile& acc_s, float (&tile_sum)[2], const SoftmaxState& softmax, float scale_log2) {
  const float reference[2] = {softmax.row_max[0] * scale_log2, softmax.row_max[1] * scale_log2};
#pragma unroll
  for (int i = 0; i < kBlockN / 2; i++) {
    acc_s[i] = ex2(fma_f32(acc_s[i], scale_log2, -reference[i / 2 % 2]));
    tile_sum[i / 2 % 2] = i / 4 == 0 && i % 2 == 0 ? acc_s[i] : tile_sum[i / 2 % 2] + acc_s[i];
  }
}

// No lane's sum left its range or is NaN, nor is its reference large. A row without a reference has NaN: rows get one
// from the tiles that need a mask.
FUNC bool is_proved(const float (&tile_sum)[2], float guard_limit) {
  return tile_sum[0] < guard_limit && tile_sum[1] < guard_limit;
}

// After a repair a warp takes the next tile's maximum at once, and goes on so while maxima grow by what would need
// another repair. H200, scores that grow along the keys, full attention, head dims 128 and 256: 0.88 to 0.98 times as
// fast as the online softmax, where repairs alone are 0.40 and 0.43 times. Up to head dim 64, where repairs cost half,
// choosing costs 3 % without any.
constexpr bool kMayGoOnline = kColumnsO > 64;

FUNC bool has_grown(const float (&alpha)[2]) { return alpha[0] < 1.f / kGuardLimit || alpha[1] < 1.f / kGuardLimit; }

FUNC void add_tile_sum(SoftmaxState& softmax, const float (&tile_sum)[2]) {
  softmax.row_sum[0] += tile_sum[0];
  softmax.row_sum[1] += tile_sum[1];
}

FUNC void rescale_output(OutputTile& acc_o, const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < kColumnsO / 2; i++) acc_o[i] *= alpha[i / 2 % 2];
}
