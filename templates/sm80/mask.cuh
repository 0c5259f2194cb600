// ---- Mask: which keys a row sees, which key blocks need one
//
// Query i sees key j iff j < seqlen_k and, with causal attention, j <= i + diagonal, diagonal = seqlen_k - seqlen_q:
// the last query sees the last key (aligned bottom-right).

// Sets the scores of invisible keys to -inf. `column` is the key of the warp's first score. `row` is its row.
FUNC void mask_scores(ScoreTile& acc_s, int row, int column, int seqlen_k, int diagonal) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTilesM; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int end = seqlen_k;
      if constexpr (kCausal) end = min_i32(end, query_of(row + i * 16 + r * 8 + lane / 4) + diagonal + 1);
#pragma unroll
      for (int n = 0; n < kTilesS; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (column + n * 8 + lane % 4 * 2 + e >= end) acc_s[i][n][2 * r + e] = neg_inf();
    }
}

// Key blocks that some row of a query block sees, and how many of them, from the left, need no mask: every row sees
// them whole, and has seen a key to the right of them before. The rest cross the diagonal or the end of the keys.
struct KeyBlocks {
  int visible, whole;
};

FUNC KeyBlocks key_blocks(int row_0, int seqlen_k, int diagonal) {
  KeyBlocks blocks = {(seqlen_k + kBlockN - 1) / kBlockN, seqlen_k / kBlockN};
  if constexpr (kCausal) {
    const int last_end = max_i32(query_of(row_0 + kBlockM - 1) + 1 + diagonal, 0);  // keys that the last row sees
    const int first_end = max_i32(query_of(row_0) + 1 + diagonal, 0);  // keys that the first row sees
    blocks.visible = min_i32(blocks.visible, (last_end + kBlockN - 1) / kBlockN);
    blocks.whole = min_i32(blocks.whole, max_i32(first_end - 1, 0) / kBlockN);
  }
  return blocks;
}
