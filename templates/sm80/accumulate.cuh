// ---- Gradients that several blocks add up: float32, in the order in which warps hold them
//
// Rows by 16 and columns by 8 make tiles of 128 floats, row by row of tiles. Lane l holds four floats of a tile:
// columns 2 t and 2 t + 1, t = l % 4, of rows g = l / 4 and g + 8. Where four are added at a time a lane's lie side by
// side; where each is added by itself, the warp's 32 do. Either way a warp adds to whole lines.

constexpr int kTileFloats = 128;
constexpr int kLaneFloats = kVectorReduction ? 4 : 1;  // from one lane's first float to the next lane's
constexpr int kElementFloats = kVectorReduction ? 1 : 32;  // from one float of a lane to its next

// Floats before the tile of these 16 rows and 8 columns.
FUNC i64 tile_offset(i64 row_tile, int column_tile) {
  return (row_tile * (kHeadDimPadded / 8) + column_tile) * kTileFloats;
}
