// ---- Schedule: which query tile a block takes, and in which order
//
// A block walks over tiles until none is left. Statically it takes every gridDim.x-th; dynamically the producer draws
// the number of the next one from all blocks' common stack and hands it to the consumers through shared memory.
//
// Without a causal mask the query tiles of a head follow each other, so that blocks that run together read the same K
// and V. With one, heads go in sections whose K and V fit in half of L2 together (heads_per_section, from the host), and
// inside a section the last query tiles come first: they are the longest, and the short ones fill the gaps. Measured on
// an H200, causal, d 128, one lever after the other: +6 % and +8 % (16k tokens), +9 % and +10 % (1k).

struct WorkTile {
  int m_block, batch, head;
};

FUNC WorkTile work_tile(int id, const FwdParams& p) {
  if constexpr (kCausal) {
    const int section_tiles = p.num_m_blocks * p.heads_per_section;
    const int first_head = id / section_tiles * p.heads_per_section;
    const int heads = min_i32(p.heads_per_section, p.batch * p.num_heads - first_head);  // the last may have fewer
    const int place = id % section_tiles;
    const int head = first_head + place % heads;
    return {p.num_m_blocks - 1 - place / heads, head / p.num_heads, head % p.num_heads};
  } else {
    const int head = id / p.num_m_blocks;
    return {id % p.num_m_blocks, head / p.num_heads, head % p.num_heads};
  }
}

// The producer's side: the tile after `tile`. Each block begins with the one of its own number.
FUNC int next_tile(int tile, const FwdParams& p) {
  if constexpr (kDynamic)
    return gridDim.x + draw_ticket(p.tickets, p.num_tiles - 1);
  else
    return tile + gridDim.x;
}

FUNC void hand_over_tile(RingPosition& at, int tile) {
  wait_empty<kTileSlots>(kBarriersTile, at);
  st_shared<int>(smem_base() + kTileNumbers + 4 * at.stage, tile);
  mbarrier_arrive(full_barrier<kTileSlots>(kBarriersTile, at.stage));
  advance<kTileSlots>(at);
}

// The consumers' side: the tile after `tile`.
FUNC int take_tile(RingPosition& at, int tile) {
  if constexpr (kDynamic) {
    wait_full<kTileSlots>(kBarriersTile, at);
    tile = ld_shared<int>(smem_base() + kTileNumbers + 4 * at.stage);
    sync_warp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_barrier<kTileSlots>(kBarriersTile, at.stage));
    advance<kTileSlots>(at);
    return tile;
  } else {
    return tile + gridDim.x;
  }
}
