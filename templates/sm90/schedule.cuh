// ---- Schedule: which query tile a block takes, and in which order
//
// A block begins with the tile of its own number and walks over others until none is left.

struct WorkTile {
  int m_block, batch, head;
};

FUNC WorkTile work_tile(int id, const FwdParams& p) {
  if constexpr (kCausal) {
    // Heads go in sections whose K and V stay in L2 together, and inside a section the last query tiles come first:
    // they are the longest, and the short ones fill the gaps. Each head's first ones (tail_m_blocks, from the host) are
    // left to the end, for all heads together: a last section by itself has too few tiles to end evenly on all SMs.
    const int heads_in_all = p.batch * p.num_heads, long_m_blocks = p.num_m_blocks - p.tail_m_blocks;
    int first_head = 0, heads = heads_in_all, m_blocks = p.tail_m_blocks;
    if (id < long_m_blocks * heads_in_all) {
      const int section_tiles = long_m_blocks * p.heads_per_section;
      first_head = id / section_tiles * p.heads_per_section;
      id %= section_tiles;
      heads = min_i32(p.heads_per_section, heads_in_all - first_head);  // the last section may be smaller
      m_blocks = p.num_m_blocks;
    } else {
      id -= long_m_blocks * heads_in_all;
    }
    const int head = first_head + id % heads;
    return {m_blocks - 1 - id / heads, head / p.num_heads, head % p.num_heads};
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
  st_shared<int>(smem_base() + kTileNumbers + 4 * stage_of(at), tile);
  mbarrier_arrive(full_barrier<kTileSlots>(kBarriersTile, stage_of(at)));
  advance<kTileSlots>(at);
}

// And they take it.
FUNC int take_tile(RingPosition& at) {
  wait_full<kTileSlots>(kBarriersTile, at);
  const int tile = ld_shared<int>(smem_base() + kTileNumbers + 4 * stage_of(at));
  sync_warp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_barrier<kTileSlots>(kBarriersTile, stage_of(at)));
  advance<kTileSlots>(at);
  return tile;
}
