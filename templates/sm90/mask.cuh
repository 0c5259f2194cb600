// ---- Mask: which keys a row sees, which key tiles need one
//
// Query i sees key j iff j < seqlen_k and, with causal attention, j <= i + diagonal, diagonal = seqlen_k - seqlen_q:
// the last query sees the last key (aligned bottom-right).

// Key tiles that some row before `row_end` sees.
FUNC int visible_tiles(int row_end, int seqlen_k, int diagonal) {
  const int end = kCausal ? min_i32(seqlen_k, max_i32(row_end + diagonal, 0)) : seqlen_k;
  return (end + kBlockN - 1) / kBlockN;
}

// How many of them, from the left, need no mask: every row from `row` on sees them whole. With the guarded softmax it
// also sees a key beyond, whose score becomes its reference.
FUNC int whole_tiles(int row, int seqlen_k, int diagonal) {
  const int end = kCausal ? min_i32(seqlen_k, max_i32(row + 1 + diagonal, 0)) : seqlen_k;
  return (kCausal && kGuarded ? max_i32(end - 1, 0) : end) / kBlockN;
}

// Sets the scores of invisible keys to -inf. `row` is this thread's first row. `column` is the tile's first key.
FUNC void mask_scores(ScoreTile& acc_s, int row, int column, int seqlen_k, int diagonal) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int seen = kCausal ? min_i32(seqlen_k, row + r * 8 + diagonal + 1) : seqlen_k;
    const int end = seen - (column + threadIdx.x % 4 * 2);  // in columns from this thread's first
#pragma unroll
    for (int n = 0; n < kBlockN / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (n * 8 + e >= end) acc_s[4 * n + 2 * r + e] = neg_inf();
  }
}
