// ---- Softmax of one step
//
// Exponents are in base 2: with c = softmax_scale * log2(e), p = 2^(s c - m c) is one FFMA and one ex2. A row lives in
// the four lanes of a quad; its sum stays per lane until the epilogue.

// Beyond |m c| = 2^11 the FFMA's rounding of m c would show (2^-13 of p; at 10^11 it is thousands and p overflows), so
// such rows take (s - m) c, whose error is relative to the difference. Logits of real models stay below 100.
constexpr float kLargeReference = 2048.f;

// Guarded softmax: a lane's sum over one step proves that no p of it passed this limit. fp16 P must stay below 65504;
// bf16 has float's exponent range, and sums of up to 2^27 a row and step leave |v| times the steps room up to 10^30.
constexpr float kGuardLimit = kFp16 ? 32768.f : 16777216.f;

// A lane's sum over all steps: the sum of a row's lanes, and its reciprocal, stay normal numbers.
constexpr float kBlockLimit = 1.2676506e30f;  // 2^100

constexpr float kLn2 = 0.69314718f;

// A thread keeps two rows of each m16 tile i: row i * 16 + r * 8 + lane / 4 of its warp.
struct SoftmaxState {
  float row_max[kTilesM][2];  // m: reference of each row, in raw scores; -inf until a key was seen
  float row_sum[kTilesM][2];  // l: this lane's part of sum 2^(s c - m c)
  float guard_limit;  // step sums must stay below; -1 forces the exact path (a large reference)
};

FUNC float quad_max(float v) {
  v = max_f32(v, shfl_xor(v, 1));
  return max_f32(v, shfl_xor(v, 2));
}

FUNC float quad_sum(float v) {
  v += shfl_xor(v, 1);
  return v + shfl_xor(v, 2);
}

// The row maxima of both warps that share the rows.
FUNC void share_max(float (&row_max)[kTilesM][2]) {
  float theirs[kTilesM][2];
  exchange_rows(theirs, row_max);
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) row_max[i][r] = max_f32(row_max[i][r], theirs[i][r]);
}

FUNC void share_sum(float (&row_sum)[kTilesM][2]) {
  float theirs[kTilesM][2];
  exchange_rows(theirs, row_sum);
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) row_sum[i][r] += theirs[i][r];
}

FUNC void clear_softmax(SoftmaxState& softmax) {
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      softmax.row_max[i][r] = neg_inf();
      softmax.row_sum[i][r] = 0.f;
    }
  if constexpr (kGuarded && !kDeferred) softmax.guard_limit = kGuardLimit;
}

// O *= alpha, row by row; skipped when no row of the warp got a new maximum.
FUNC void rescale_output(OutputTile& acc_o, const float (&alpha)[kTilesM][2]) {
  bool changed = false;
#pragma unroll
  for (int i = 0; i < kTilesM; i++) changed = changed || alpha[i][0] != 1.f || alpha[i][1] != 1.f;
  if (!any_lane(changed)) return;
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int n = 0; n < 2 * kPairsO; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc_o[i][n][e] *= alpha[i][e / 2];
}

// Row maxima of a step's scores.
FUNC void max_of_step(float (&step_max)[kTilesM][2], const ScoreTile& acc_s) {
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      step_max[i][r] = max_f32(acc_s[i][0][2 * r], acc_s[i][0][2 * r + 1]);
#pragma unroll
      for (int n = 1; n < kTilesS; n++)
        step_max[i][r] = max_f32(step_max[i][r], max_f32(acc_s[i][n][2 * r], acc_s[i][n][2 * r + 1]));
      step_max[i][r] = quad_max(step_max[i][r]);
    }
  if constexpr (kWarpsN > 1) share_max(step_max);
}

// Online softmax: m' = max(m, rowmax S), alpha = 2^((m - m') c), l = alpha l + rowsum P, O = alpha O; acc_s becomes P.
FUNC void online_softmax(ScoreTile& acc_s, OutputTile& acc_o, SoftmaxState& softmax, float scale_log2) {
  float alpha[kTilesM][2], reference[kTilesM][2], step_max[kTilesM][2];
  bool large = false;
  max_of_step(step_max, acc_s);
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float old_max = softmax.row_max[i][r];
      const float new_max = max_f32(old_max, step_max[i][r]);
      // A row that has seen no key yet: any finite reference gives 2^-inf = 0 where -inf - -inf would give NaN.
      reference[i][r] = new_max == neg_inf() ? 0.f : new_max;
      // Nothing to rescale before a row's first key: O and l are 0, and the first step skips the pass over O.
      alpha[i][r] = old_max == neg_inf() ? 1.f : ex2((old_max - reference[i][r]) * scale_log2);
      softmax.row_max[i][r] = new_max;
      softmax.row_sum[i][r] *= alpha[i][r];
      large = large || abs_f32(reference[i][r] * scale_log2) > kLargeReference;
    }
  if (any_lane(large)) {
#pragma unroll
    for (int i = 0; i < kTilesM; i++)
#pragma unroll
      for (int n = 0; n < kTilesS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc_s[i][n][e] = ex2((acc_s[i][n][e] - reference[i][e / 2]) * scale_log2);
  } else {
#pragma unroll
    for (int i = 0; i < kTilesM; i++)
#pragma unroll
      for (int n = 0; n < kTilesS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          acc_s[i][n][e] = ex2(fma_f32(acc_s[i][n][e], scale_log2, -(reference[i][e / 2] * scale_log2)));
  }
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int n = 0; n < kTilesS; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) softmax.row_sum[i][e / 2] += acc_s[i][n][e];
  if constexpr (kGuarded && !kDeferred) softmax.guard_limit = large ? -1.f : kGuardLimit;
  rescale_output(acc_o, alpha);
}

// The step's row maxima become the references of a guarded softmax: exact for rows that have seen no key before. All of
// the warp's rows see a key of this step.
FUNC void first_references(SoftmaxState& softmax, const ScoreTile& acc_s, float scale_log2) {
  max_of_step(softmax.row_max, acc_s);
  if constexpr (!kDeferred) {
    bool large = false;
#pragma unroll
    for (int i = 0; i < kTilesM; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) large = large || abs_f32(softmax.row_max[i][r] * scale_log2) > kLargeReference;
    softmax.guard_limit = any_lane(large) ? -1.f : kGuardLimit;
  }
}

// Guarded softmax: P of a step against the reference that the rows have, so there is no maximum, no shuffle and no
// rescale. step_sum is this lane's part of the row sums.
FUNC void guarded_softmax(ScoreTile& acc_s, float (&step_sum)[kTilesM][2], const SoftmaxState& softmax,
                          float scale_log2) {
  float reference[kTilesM][2];
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) reference[i][r] = softmax.row_max[i][r] * scale_log2;
#pragma unroll
  for (int n = 0; n < kTilesS; n++)
#pragma unroll
    for (int i = 0; i < kTilesM; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        acc_s[i][n][e] = ex2(fma_f32(acc_s[i][n][e], scale_log2, -reference[i][e / 2]));
        step_sum[i][e / 2] = n == 0 && e % 2 == 0 ? acc_s[i][n][e] : step_sum[i][e / 2] + acc_s[i][n][e];
      }
}

// Proof of one step: no lane's sum left its range or is NaN (or its reference is large or missing).
FUNC bool is_step_proved(const SoftmaxState& softmax, const float (&step_sum)[kTilesM][2]) {
  bool proved = true;
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
    proved = proved && step_sum[i][0] < softmax.guard_limit && step_sum[i][1] < softmax.guard_limit;
  return proved;
}

FUNC void add_step_sum(SoftmaxState& softmax, const float (&step_sum)[kTilesM][2]) {
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.row_sum[i][r] += step_sum[i][r];
}

// Proof of a whole query block: nothing left float's range if O is finite and the sums are below kBlockLimit, for what
// overflows on the way (p, a sum, a product) stays infinite or becomes NaN; and no reference is large, so that the
// exponents are right.
FUNC bool is_block_proved(const OutputTile& acc_o, const SoftmaxState& softmax, float scale_log2) {
  float probe[4] = {0.f, 0.f, 0.f, 0.f};  // stays 0 as long as what it meets is finite
  bool proved = true;
#pragma unroll
  for (int i = 0; i < kTilesM; i++) {
#pragma unroll
    for (int n = 0; n < 2 * kPairsO; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) probe[e] = fma_f32(acc_o[i][n][e], 0.f, probe[e]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      // A row that saw no key has no reference; had it taken part in a guarded step, its sum would not be finite.
      const float reference = softmax.row_max[i][r];
      proved = proved && softmax.row_sum[i][r] < kBlockLimit &&
               (reference == neg_inf() || abs_f32(reference * scale_log2) <= kLargeReference);
    }
  }
  return proved && probe[0] + probe[1] + probe[2] + probe[3] == 0.f;
}
