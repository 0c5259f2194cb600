// ---- Rows of Q on their way in, rows of O on their way out; of one head, or of packed heads

// Query of a row: the rows of a key/value head's query heads are packed position by position, or there is one head.
FUNC int query_of(int row) { return kPackGqa ? row / kGqaRatio : row; }

// Elements from a head's first row to row `row` of q or o.
FUNC i64 row_offset(int row, i64 row_stride, i64 head_stride) {
  return kPackGqa ? query_of(row) * row_stride + row % kGqaRatio * head_stride : row * row_stride;
}

// Loads a warp's share of the query block that begins at row_0 into the Q tile; rows from num_rows on become zero.
FUNC void load_q_rows(u32 tile_q, gptr<const Element> q, i64 row_stride, i64 head_stride, int row_0, int num_rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = lane % kPanelChunks;
#pragma unroll
  for (int i = 0; i < kBlockM / kNumWarps; i += 32 / kPanelChunks) {
    const int row = warp * (kBlockM / kNumWarps) + i + lane / kPanelChunks;
    const bool valid = row_0 + row < num_rows;
    const gptr<const Element> source = q + (row_offset(row_0 + row, row_stride, head_stride) + chunk * 8);
#pragma unroll
    for (int panel = 0; panel < kPanels; panel++)
      load_chunk(tile_q + panel * kBlockM * kPanelRowBytes + swizzled(row, chunk), source + panel * kPanelColumns,
                 panel * kPanelChunks + chunk, valid);
  }
}

// Stores this warp's part of O from the tile that begins at row_0: its rows from first_row and panels from first_panel
// on; rows from num_rows on are not stored.
FUNC void store_o_rows(gptr<Element> o, u32 tile_o, i64 row_stride, i64 head_stride, int first_row, int first_panel,
                       int row_0, int num_rows) {
  const int lane = threadIdx.x % 32;
  const int chunk = lane % kPanelChunks;
#pragma unroll
  for (int i = 0; i < kWarpRows; i += 32 / kPanelChunks) {
    const int row = first_row + i + lane / kPanelChunks;
#pragma unroll
    for (int j = 0; j < kPanels / kWarpsN; j++) {
      const int panel = first_panel + j;
      const int column = (panel * kPanelChunks + chunk) * 8;
      if (row_0 + row >= num_rows || column >= kHeadDim) continue;
      const u32x4 value = ld_shared<u32x4>(tile_o + panel * kBlockM * kPanelRowBytes + swizzled(row, chunk));
      const gptr<Element> target = o + (row_offset(row_0 + row, row_stride, head_stride) + column);
      if constexpr (kVectorBytes == 16) {
        st_global(target, value);
      } else {
        const u32 pair[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int e = 0; e < 8; e++)
          if (column + e < kHeadDim) st_global(target + e, u16(pair[e / 2] >> e % 2 * 16));
      }
    }
  }
}
