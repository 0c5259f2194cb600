// ---- Pipeline: K and V tiles on their way to shared memory, and who may read or overwrite a stage
//
// Tiles come from right to left, each once.

constexpr int kTilesAhead = kNumStages > 1 ? kNumStages - 1 : 1;
constexpr int kGroupsPending = kNumStages > 1 ? kNumStages - 2 : 0;  // copy groups after the current tile's

struct Pipeline {
  gptr<const Element> k, v;  // this thread's part of the next tile to load
  u32 to_k;  // this thread's part of K's first stage
  int num_tiles;
  int first_rows;  // keys of the first tile, which may be ragged
  int stage;  // of the current tile
  u32 phase;  // parity of the stage's mbarrier phases for the current tile
};

// A ring: each stage has a "full" mbarrier, on which a tile's copies arrive, and an "empty" one, on which every warp
// arrives when it is done with the tile. Warps drift apart by a tile instead of meeting at a block barrier, which is
// worth most where a single block fills the SM.

FUNC u32 full_barrier(int stage) { return smem_base() + kSmemBarriers + stage * 8; }
FUNC u32 empty_barrier(int stage) { return full_barrier(kNumStages + stage); }

// Before the first tile of all; every thread of the block calls it.
FUNC void init_barriers() {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int stage = 0; stage < kNumStages; stage++) {
      mbarrier_init(full_barrier(stage), kThreads);
      mbarrier_init(empty_barrier(stage), kNumWarps);
    }
  }
  sync_threads();
}

// This thread's copies arrive on the stage's full mbarrier, when they have landed.
FUNC void arrive_full(int stage) {
  if constexpr (kVectorBytes == 16) {
    cp_async_mbarrier_arrive(full_barrier(stage));
  } else {
    // Copied element by element: ordinary stores, which an ordinary arrival releases.
    mbarrier_arrive(full_barrier(stage));
  }
}

// Loads, waits and releases.

FUNC void load_k(Pipeline& tiles, int stage, bool first, const FwdParams& p) {
  const u32 to = tiles.to_k + stage * kTileBytes;
  if (first && tiles.first_rows < kBlockN)
    load_tile<kBlockN, true>(to, tiles.k, p.k_pass_bytes, tiles.first_rows);
  else
    load_tile<kBlockN, false>(to, tiles.k, p.k_pass_bytes, kBlockN);
  tiles.k = tiles.k.plus_bytes(-p.k_tile_bytes);
}

FUNC void load_v(Pipeline& tiles, int stage, bool first, const FwdParams& p) {
  const u32 to = tiles.to_k + (kSmemV - kSmemK) + stage * kTileBytes;
  if (first && tiles.first_rows < kBlockN)
    load_tile<kBlockN, true>(to, tiles.v, p.v_pass_bytes, tiles.first_rows);
  else
    load_tile<kBlockN, false>(to, tiles.v, p.v_pass_bytes, kBlockN);
  tiles.v = tiles.v.plus_bytes(-p.v_tile_bytes);
}

// Puts the first kTilesAhead tiles on their way, together with what the caller has copied since its last commit. A
// group is committed for each tile, be it empty. The stages are free.
FUNC void start_pipeline(Pipeline& tiles, const FwdParams& p) {
  int stage = tiles.stage;
#pragma unroll
  for (int tile = 0; tile < kTilesAhead; tile++) {
    if (tile < tiles.num_tiles) {
      load_k(tiles, stage, tile == 0, p);
      if constexpr (kNumStages > 1) load_v(tiles, stage, tile == 0, p);
      if constexpr (kRing) arrive_full(stage);
    }
    cp_async_commit();
    stage = stage + 1 == kNumStages ? 0 : stage + 1;
  }
}

// Waits for tile i, or for its K where that is all that was loaded.
template <bool kFirst>
FUNC void wait_tile(Pipeline& tiles, int i, const FwdParams& p) {
  if constexpr (kRing) {
    mbarrier_wait(full_barrier(tiles.stage), tiles.phase);
  } else {
    cp_async_wait<kGroupsPending>();
    sync_threads();  // the tile is visible to every warp, and every warp is done with the one before
    if constexpr (kNumStages == 1) {
      // V(i) is loaded behind Q K(i)^T, K(i + 1) behind P V(i).
      load_v(tiles, 0, kFirst && i == 0, p);
    } else {
      const int next = tiles.stage == 0 ? kNumStages - 1 : tiles.stage - 1;
      if (i + kTilesAhead < tiles.num_tiles) {
        load_k(tiles, next, false, p);
        load_v(tiles, next, false, p);
      }
    }
    cp_async_commit();
  }
}

// Loads into the stage that tile i - 1 held, once every warp is done with it.
FUNC void refill_ring(Pipeline& tiles, int i, const FwdParams& p) {
  if (i + kTilesAhead < tiles.num_tiles) {
    const int next = tiles.stage == 0 ? kNumStages - 1 : tiles.stage - 1;
    if (i > 0) mbarrier_wait(empty_barrier(next), tiles.stage == 0 ? tiles.phase ^ 1 : tiles.phase);
    load_k(tiles, next, false, p);
    load_v(tiles, next, false, p);
    arrive_full(next);
  }
}

// Back to the first tile, when every warp is done with the last one.
FUNC void rewind_pipeline(Pipeline& tiles, const FwdParams& p) {
  tiles.k = tiles.k.plus_bytes(p.k_tile_bytes * tiles.num_tiles);
  tiles.v = tiles.v.plus_bytes(p.v_tile_bytes * tiles.num_tiles);
  if constexpr (kRing) {
    // The mbarriers go on counting, so the phases of the last tiles must be seen to be over.
#pragma unroll
    for (int stage = 0; stage < kNumStages; stage++)
      mbarrier_wait(empty_barrier(stage), stage < tiles.stage ? tiles.phase : tiles.phase ^ 1);
  }
}

// Waits for V(i), and loads K(i + 1), as every warp is done with K(i).
FUNC void swap_stage(Pipeline& tiles, int i, const FwdParams& p) {
  cp_async_wait<0>();
  sync_threads();
  if (i + 1 < tiles.num_tiles) load_k(tiles, 0, false, p);
  cp_async_commit();
}

// This warp is done with the current tile.
FUNC void release_tile(Pipeline& tiles) {
  if constexpr (kRing) {
    sync_warp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_barrier(tiles.stage));
  }
  tiles.stage++;
  if (tiles.stage < kNumStages) return;
  tiles.stage = 0;
  if constexpr (kRing) tiles.phase ^= 1;
}
