// ---- Schedule and pipeline: which keys a thread block takes, and how tiles of queries come by
//
// The grid is one-dimensional (grid.x reaches 2^31 - 1; y and z stop at 65535). The hardware starts blocks in order, so
// the order is the schedule: heads go in sections (heads_per_section, from the host), and inside a section the first
// key blocks of all its heads start first; with a causal mask they are the longest. A block only ever waits for blocks
// before it.

struct WorkTile {
  int n_block, batch, head_k;
  int head_q;  // the block's query head, or the first of the group that it walks over
};

FUNC WorkTile work_tile(const BwdParams& p) {
  const int num_heads = kSplitHeads ? p.num_heads : p.num_heads / kGqaRatio;
  const int section_tiles = p.num_n_blocks * p.heads_per_section;
  const int first_head = blockIdx.x / section_tiles * p.heads_per_section;
  const int heads = min_i32(p.heads_per_section, p.batch * num_heads - first_head);  // the last section may be smaller
  const int id = blockIdx.x % section_tiles;
  const int head = first_head + id % heads;
  WorkTile work;
  work.n_block = id / heads;
  work.batch = head / num_heads;
  work.head_k = kSplitHeads ? head % num_heads / kGqaRatio : head % num_heads;
  work.head_q = kSplitHeads ? head % num_heads : work.head_k * kGqaRatio;
  return work;
}

// The tile of queries to load next: from last to first, head after head.
struct Walk {
  gptr<const Element> q, dout;  // this thread's part of it
  u32 to_q;  // this thread's part of Q's first stage
  int m_block;
  int row_tile;  // counts tiles of queries of all heads
  int stage;
};

constexpr int kTilesAhead = kNumStages > 1 ? kNumStages - 1 : 1;
constexpr int kGroupsPending = kNumStages > 1 ? kNumStages - 2 : 0;  // copy groups after the current tile's

// L log2(e) and D of a tile's queries: padded by the preprocessing to whole tiles.
FUNC void load_rows(u32 to, int row_tile, const BwdParams& p) {
  constexpr int kThreadsEach = kBlockM / 4;
  const int thread = threadIdx.x;
  const i64 from = i64(row_tile) * kBlockM + thread % kThreadsEach * 4;
  if (thread < kThreadsEach) cp_async16(to + thread * 16, p.lse_log2 + from);
  if (thread >= kThreadsEach && thread < 2 * kThreadsEach) cp_async16(to + thread * 16, p.delta + from);
}

// Loads the next tile, and moves on; `m_first` is the first tile that sees the block's keys.
FUNC void load_next(Walk& walk, int m_first, const BwdParams& p) {
  const u32 to = walk.to_q + walk.stage * kTileBytesM;
  const int num_rows = p.seqlen_q - walk.m_block * kBlockM;
  if (num_rows < kBlockM) {
    load_tile<kBlockM, true>(to, walk.q, p.q_pass_bytes, num_rows);
    load_tile<kBlockM, true>(to + (kSmemDout - kSmemQ), walk.dout, p.dout_pass_bytes, num_rows);
  } else {
    load_tile<kBlockM, false>(to, walk.q, p.q_pass_bytes, kBlockM);
    load_tile<kBlockM, false>(to + (kSmemDout - kSmemQ), walk.dout, p.dout_pass_bytes, kBlockM);
  }
  load_rows(smem_base() + kSmemRows + walk.stage * (8 * kBlockM), walk.row_tile, p);
  walk.q = walk.q.plus_bytes(-p.q_tile_bytes);
  walk.dout = walk.dout.plus_bytes(-p.dout_tile_bytes);
  walk.row_tile--;
  walk.stage = walk.stage + 1 == kNumStages ? 0 : walk.stage + 1;
  if (--walk.m_block >= m_first) return;
  // The next head's last tile.
  const int tiles = p.num_m_blocks - m_first;
  walk.q = walk.q.plus_bytes(p.q_tile_bytes * tiles) + p.q_head_stride;
  walk.dout = walk.dout.plus_bytes(p.dout_tile_bytes * tiles) + p.dout_head_stride;
  walk.row_tile += p.num_m_blocks + tiles;
  walk.m_block = p.num_m_blocks - 1;
}

// Stores a tile's rows of kHeadDim columns; `from` and `to` are this thread's part.
FUNC void store_tile(gptr<Element> to, u32 from, i64 row_stride, int num_rows) {
#pragma unroll
  for (int pass = 0; pass < kBlockN; pass += kRowsPerPass)
#pragma unroll
    for (int panel = 0; panel < kPanels; panel++) {
      const int column = (panel * kPanelChunks + threadIdx.x % kPanelChunks) * 8;
      if (pass + int(threadIdx.x) / kPanelChunks >= num_rows || column >= kHeadDim) continue;
      st_global(to + (pass * row_stride + panel * kPanelColumns),
                ld_shared<u32x4>(from + panel * (kBlockN * kPanelRowBytes) + pass * kPanelRowBytes));
    }
}
