// ---- Schedule: which query tile a block takes, and in which order
//
// A block begins with the tile of its own number and walks over others until none is left.

struct WorkTile {
  int m_block, batch, head;
};

FUNC WorkTile work_tile(int id, const FwdParams& p) {
  if constexpr (kCausal) {
    // Heads go in sections whose K and V fit in half of L2 together, and inside a section the last query tiles come
    // first: they are the longest, and the short ones fill the gaps. Measured on an H200, d 128, one lever after the
    // other: +6 % and +8 % (16k tokens), +9 % and +10 % (1k).
    const int section_tiles = p.num_m_blocks * p.heads_per_section;
    const int first_head = id / section_tiles * p.heads_per_section;
    const int heads = min_i32(p.heads_per_section, p.batch * p.num_heads - first_head);  // the last may have fewer
    const int place = id % section_tiles;
    const int head = first_head + place % heads;
    return {p.num_m_blocks - 1 - place / heads, head / p.num_heads, head % p.num_heads};
  } else {
    // The query tiles of a head follow each other, so that blocks that run together read the same K and V.
    const int head = id / p.num_m_blocks;
    return {id % p.num_m_blocks, head / p.num_heads, head % p.num_heads};
  }
}

// The producer's next tile.
FUNC int next_tile(int tile, const FwdParams& p) {
  if constexpr (kDynamic) {
    // Those that no block begins with are drawn, in order, by whoever is free.
    return gridDim.x + draw_ticket(p.tickets, p.num_tiles - 1);
  } else {
    return tile + gridDim.x;
  }
}

// It tells the consumers, who cannot know which one was drawn.
FUNC void hand_over_tile(RingPosition& at, int tile) {
  wait_empty<kTileSlots>(kBarriersTile, at);
  st_shared<int>(smem_base() + kTileNumbers + 4 * at.stage, tile);
  mbarrier_arrive(full_barrier<kTileSlots>(kBarriersTile, at.stage));
  advance<kTileSlots>(at);
}

// And they take it.
FUNC int take_tile(RingPosition& at) {
  wait_full<kTileSlots>(kBarriersTile, at);
  const int tile = ld_shared<int>(smem_base() + kTileNumbers + 4 * at.stage);
  sync_warp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_barrier<kTileSlots>(kBarriersTile, at.stage));
  advance<kTileSlots>(at);
  return tile;
}
