// ---- Tiles in shared memory: where an element lies, how a tile arrives from global memory
//
// A tile of R rows is cut into panels of R rows by 64 columns (128 bytes), or by 32 (64 bytes) where the head dim is no
// multiple of 64. Inside a panel the index of a 16-byte chunk is XORed with the row, so that the 8 rows of one chunk
// column lie in 8 different bank groups: ldmatrix, plain and transposed, and the copies below are free of bank
// conflicts.

constexpr int kPanelColumns = kHeadDimPadded % 64 == 0 ? 64 : 32;
constexpr int kPanelRowBytes = 2 * kPanelColumns;
constexpr int kPanelChunks = kPanelColumns / 8;  // 16-byte chunks of a panel's row, and threads that copy them
constexpr int kPanelSteps = kPanelColumns / 16;  // k16 steps, or pairs of n8 tiles, in a panel
constexpr int kPanels = kHeadDimPadded / kPanelColumns;
constexpr int kRowsPerPass = kThreads / kPanelChunks;

// Byte offset of a chunk of a row of kRowBytes, 128 or 64. Two rows of 64 bytes share the 32 banks that one of 128
// fills.
template <int kRowBytes>
FUNC u32 swizzled_row(int row, int chunk) {
  const int key = kRowBytes == 128 ? row & 7 : row / 2 & 3;
  return row * kRowBytes + ((chunk ^ key) * 16);
}

// The same inside a panel.
FUNC u32 swizzled(int row, int chunk) { return swizzled_row<kPanelRowBytes>(row, chunk); }

// Lane address for ldmatrix.x4 of 16 rows x 16 columns at the tile's first row and column: the A operand (Q) and,
// transposed, the B operand of P V. Going k steps of 16 columns to the right inside a panel is XOR k * 32, because a
// chunk index is XORed with the row only.
FUNC u32 lane_row_major(u32 tile) {
  const int lane = threadIdx.x % 32;
  return tile + swizzled(lane % 16, lane / 16);
}

// Likewise for the B operand of Q K^T: registers 0 and 1 are keys 0 to 7, registers 2 and 3 keys 8 to 15.
FUNC u32 lane_column_pairs(u32 tile) {
  const int lane = threadIdx.x % 32;
  return tile + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Copies one 16-byte chunk (8 elements) of a row to shared memory; columns from kHeadDim on and
// rows that are not valid become zero, and their address is not read. A chunk that no product reads is left alone.
FUNC void load_chunk(u32 destination, gptr<const Element> source, int chunk, bool valid) {
  if constexpr (kHeadDim < kHeadDimPadded) {
    if (chunk >= kChunks) return;
  }
  if constexpr (kVectorBytes == 16) {
    const bool inside = valid && (kHeadDim == kHeadDimPadded || chunk * 8 < kHeadDim);
    cp_async16(destination, source, inside ? 16 : 0);
  } else {
    // Element by element through registers, for views that are not 16-byte aligned.
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = chunk * 8 + 2 * i;
      const u32 low = valid && column < kHeadDim ? ld_global<u16>(source + 2 * i) : 0;
      const u32 high = valid && column + 1 < kHeadDim ? ld_global<u16>(source + (2 * i + 1)) : 0;
      pair[i] = low | high << 16;
    }
    st_shared(destination, u32x4{pair[0], pair[1], pair[2], pair[3]});
  }
}

// This thread's part of a tile: a row and a chunk of the first panel. As many threads as a panel's row has
// chunks cover it (16 threads over a 256-byte row of two panels would hit the same banks twice).
FUNC u32 thread_part(u32 tile) { return tile + swizzled(threadIdx.x / kPanelChunks, threadIdx.x % kPanelChunks); }

// Loads a tile of kRows rows. `to` and `from` are this thread's part of the tile in shared and in global memory;
// `pass_bytes` leads to the same place kRowsPerPass rows on. With kRagged, rows from num_rows on become zero: stale
// memory times a zero of P could be NaN.
template <int kRows, bool kRagged>
FUNC void load_tile(u32 to, gptr<const Element> from, i64 pass_bytes, int num_rows) {
  static_assert(kRows % kRowsPerPass == 0 && kRowsPerPass % 8 == 0, "a pass keeps the swizzle of its first row");
#pragma unroll
  for (int pass = 0; pass < kRows; pass += kRowsPerPass) {
    const bool valid = !kRagged || pass + int(threadIdx.x) / kPanelChunks < num_rows;
#pragma unroll
    for (int panel = 0; panel < kPanels; panel++) {
      const u32 destination = to + panel * kRows * kPanelRowBytes + pass * kPanelRowBytes;
      if constexpr (!kRagged && kVectorBytes == 16 && kHeadDim == kHeadDimPadded)
        cp_async16(destination, from + panel * kPanelColumns);
      else
        load_chunk(destination, from + panel * kPanelColumns, panel * kPanelChunks + threadIdx.x % kPanelChunks, valid);
    }
    from = from.plus_bytes(pass_bytes);
  }
}
