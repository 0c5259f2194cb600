// ---- One query tile against its key tiles, as a consumer warpgroup goes through them
//
// Key tiles come from right to left, so that the ones that need a mask come first.

// What a consumer warpgroup keeps from tile to tile.
struct Consumer {
  RingPosition q, k, v;
  RingPosition slot;  // of the next tile number
  bool is_storing;  // the output before may still be on its way out of its Q tile
  QueryFragments frag_q;  // of its rows of Q, where some lie in registers
  int group;  // which of the block's consumers: its query rows are group * 64 to group * 64 + 63 of the tile
  u32 tile_p;  // its tile of P in shared memory
  // Tile sums must stay below; -1: the next tile's maximum is wanted (a large reference, a repair). Not beside m and l:
  // there it would change the machine code of kernels that do without.
  float guard_limit;
};

// A query tile as a consumer sees it. Its place follows from its number whenever it is needed: kept, it would take
// registers that the softmax has use for.
struct QueryTile {
  int id;
  int row;  // this thread's first row
  int visible;  // key tiles that some row of the block's tile sees
  int own;  // those that this consumer goes through, from the left: at least one
  int whole;  // those of them, from the left, that need no mask
};

FUNC QueryTile query_tile(int id, int group, const FwdParams& p) {
  const int diagonal = p.seqlen_k - p.seqlen_q;
  QueryTile tile;
  tile.id = id;
  const int row_0 = work_tile(id, p).m_block * kBlockM, group_row = row_0 + group * kGroupRows;
  tile.row = group_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  tile.visible = visible_tiles(row_0 + kBlockM, p.seqlen_k, diagonal);
  tile.own = kCausal ? max_i32(visible_tiles(group_row + kGroupRows, p.seqlen_k, diagonal), 1) : tile.visible;
  tile.whole = whole_tiles(group_row, p.seqlen_k, diagonal);
  return tile;
}

// Turns: warpgroups issue their products one after the other, so that the softmax of one runs under the products of
// the others. A named barrier for each, on which the one before arrives.
constexpr int kTurnBarrier = 1;

FUNC void wait_for_turn(int group) { bar_sync(kTurnBarrier + group, 256); }
FUNC void pass_turn(int group) { bar_arrive(kTurnBarrier + (group + 1 == kWarpgroups ? 0 : group + 1), 256); }

// Where a consumer's warps meet before its P is read from shared memory.
constexpr int kProbabilityBarrier = 1 + kWarpgroups;
// Where a consumer's warps meet at the end of a query tile.
constexpr int kOutputBarrier = 1 + 2 * kWarpgroups;

FUNC u32 query_rows(const Consumer& consumer) { return smem_base() + kSmemQ + stage_of(consumer.q) * kQueryTileBytes; }
FUNC u32 key_tile(RingPosition at) { return smem_base() + kSmemK + stage_of(at) * kKeyTileBytes; }
FUNC u32 value_tile(RingPosition at) { return smem_base() + kSmemV + stage_of(at) * kKeyTileBytes; }

FUNC void await_q(Consumer& consumer) {
  wait_full<kQueryTiles>(kBarriersQ, consumer.q);
  if constexpr (kQueryRegs > 0) load_query_fragments(consumer.frag_q, query_rows(consumer));
}
FUNC void await_k(const Consumer& consumer) { wait_full<kStagesK>(kBarriersK, consumer.k); }
FUNC void await_v(const Consumer& consumer) { wait_full<kStagesV>(kBarriersV, consumer.v); }

FUNC void release_k(Consumer& consumer) {
  release<kStagesK>(kBarriersK, consumer.k);
  advance<kStagesK>(consumer.k);
}
FUNC void release_v(Consumer& consumer) {
  release<kStagesV>(kBarriersV, consumer.v);
  advance<kStagesV>(consumer.v);
}

// O leaves through Q's place, which may be refilled once the store has read it. Where every consumer has two places
// there is time until the next query tile is under way.
constexpr bool kStoresOverlap = kStoreByTma && kQueryTiles == 2 * kWarpgroups;

FUNC void finish_store(Consumer& consumer) {
  const int stage = stage_of(consumer.q), before = stage + (stage < kWarpgroups ? kQueryTiles : 0) - kWarpgroups;
  if (consumer.is_storing && is_group_leader()) {
    tma_store_wait_read<0>();
    mbarrier_arrive(empty_barrier<kQueryTiles>(kBarriersQ, before));
  }
  consumer.is_storing = false;
}

// Under a causal mask the first key tiles of a query tile may be for later consumers only. They go back unread, though
// not before they have come: an arrival belongs to a phase. And their turns pass.
constexpr bool kSkips = kCausal && kWarpgroups > 1;
// As many of them there are at most.
constexpr int kMostSkipped = (kBlockM - kGroupRows + kBlockN - 1) / kBlockN;
// Where all of them and one more have their stages, a consumer need not wait for the others before its first softmax.
constexpr bool kSkipsKeysFirst = kStagesV > kMostSkipped;

// No product makes a warp's lanes meet here. One that has yet to wait would wait for ever once the stage is refilled.
FUNC void skip_key(Consumer& consumer) {
  await_k(consumer);
  sync_warp();
  release_k(consumer);
}
FUNC void skip_value(Consumer& consumer) {
  await_v(consumer);
  sync_warp();
  release_v(consumer);
}
FUNC void skip_turn(const Consumer& consumer) {
  wait_for_turn(consumer.group);
  pass_turn(consumer.group);
}
FUNC void skip_tiles(Consumer& consumer, const QueryTile& tile) {
#pragma unroll 1
  for (int j = tile.own; j < tile.visible; j++) {
    skip_key(consumer);
    if constexpr (kPingPong) skip_turn(consumer);
    skip_value(consumer);
  }
}

// P where the next product finds it.
FUNC void hand_over_probabilities(ProbabilityFragments& frag_p, const ScoreTile& acc_s, const Consumer& consumer) {
  pack_probabilities(frag_p, acc_s);
  if constexpr (kSharedP) {
    store_probabilities(consumer.tile_p, frag_p);
    bar_sync(kProbabilityBarrier + consumer.group, 128);
  }
}

// Scores as P against the maximum so far, theirs included.
FUNC void exact_softmax(ScoreTile& acc_s, SoftmaxState& softmax, float (&alpha)[2], Consumer& consumer,
                        const FwdParams& p) {
  if constexpr (kGuarded)
    consumer.guard_limit = online_softmax(acc_s, softmax, alpha, p.scale_log2) ? -1.f : kGuardLimit;
  else
    online_softmax(acc_s, softmax, alpha, p.scale_log2);
}

// The scores of key tile j as P.
template <bool kMasked>
FUNC void softmax_step(ScoreTile& acc_s, SoftmaxState& softmax, float (&alpha)[2], Consumer& consumer, int row, int j,
                       const FwdParams& p) {
  if constexpr (kMasked) mask_scores(acc_s, row, j * kBlockN, p.seqlen_k, p.seqlen_k - p.seqlen_q);
  exact_softmax(acc_s, softmax, alpha, consumer, p);
}

// Q and the first key tile are there.
FUNC void await_first(Consumer& consumer, const QueryTile& tile) {
  if constexpr (kSkips && kSkipsKeysFirst) {
#pragma unroll 1
    for (int j = tile.own; j < tile.visible; j++) skip_key(consumer);
  }
  if constexpr (kSkips && !kSkipsKeysFirst) skip_tiles(consumer, tile);
  await_q(consumer);
  await_k(consumer);
}

// The scores of the first key tile.
FUNC void score_first(ScoreTile& acc_s, Consumer& consumer, const QueryTile& tile) {
  await_first(consumer, tile);
  wgmma_fence();
  issue_qk(acc_s, consumer.frag_q, query_rows(consumer), key_tile(consumer.k));
  wgmma_commit();
  wgmma_wait<0>();
  release_k(consumer);
}

// And their softmax: P of that tile, and no O yet.
FUNC void attend_first(ScoreTile& acc_s, ProbabilityFragments& frag_p, SoftmaxState& softmax, Consumer& consumer,
                       const QueryTile& tile, const FwdParams& p) {
  float alpha[2];
  const int j = tile.own - 1;
  if constexpr (kSkips && kSkipsKeysFirst && kPingPong) {
#pragma unroll 1
    for (int i = tile.own; i < tile.visible; i++) skip_turn(consumer);
  }
  if (j >= tile.whole) mask_scores(acc_s, tile.row, j * kBlockN, p.seqlen_k, p.seqlen_k - p.seqlen_q);
  exact_softmax(acc_s, softmax, alpha, consumer, p);
  hand_over_probabilities(frag_p, acc_s, consumer);
  if constexpr (kSkips && kSkipsKeysFirst) {
#pragma unroll 1
    for (int i = tile.own; i < tile.visible; i++) skip_value(consumer);
  }
}

// O += P V of the tile before, and S = Q K^T of key tile j and its softmax while that product runs.
template <bool kMasked>
FUNC void attend_overlapped(ScoreTile& acc_s, OutputTile& acc_o, ProbabilityFragments& frag_p, SoftmaxState& softmax,
                            Consumer& consumer, const QueryTile& tile, int j, const FwdParams& p) {
  float alpha[2];
  trace("key tile", j);
  await_k(consumer);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_qk(acc_s, consumer.frag_q, query_rows(consumer), key_tile(consumer.k));
  wgmma_commit();
  await_v(consumer);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), j < tile.own - 2);
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<1>();
  if constexpr (kGuarded && !kMasked) {
    float tile_sum[2];
    const bool is_guarded = !kMayGoOnline || consumer.guard_limit > 0.f;
    if (is_guarded)
      guarded_softmax(acc_s, tile_sum, softmax, p.scale_log2);
    else
      exact_softmax(acc_s, softmax, alpha, consumer, p);
    wgmma_wait<0>();
    release_v(consumer);
    pack_probabilities(frag_p, acc_s);
    if (is_guarded && !any_lane(!is_proved(tile_sum, consumer.guard_limit))) {
      add_tile_sum(softmax, tile_sum);
    } else {
      if (is_guarded) {
        // Repair: the scores again, from K still in shared memory.
        recompute_scores(acc_s, query_rows(consumer), key_tile(consumer.k));
        exact_softmax(acc_s, softmax, alpha, consumer, p);
        pack_probabilities(frag_p, acc_s);
        if constexpr (kMayGoOnline) consumer.guard_limit = -1.f;
        if (p.repairs.address && threadIdx.x % 32 == 0) atomic_add<u32>(p.repairs, 1);
      } else if (any_lane(has_grown(alpha))) {
        consumer.guard_limit = -1.f;
      }
      rescale_output(acc_o, alpha);
    }
    release_k(consumer);
    if constexpr (kSharedP) {
      store_probabilities(consumer.tile_p, frag_p);
      bar_sync(kProbabilityBarrier + consumer.group, 128);
    }
  } else {
    release_k(consumer);
    softmax_step<kMasked>(acc_s, softmax, alpha, consumer, tile.row, j, p);
    wgmma_wait<0>();
    release_v(consumer);
    hand_over_probabilities(frag_p, acc_s, consumer);
    rescale_output(acc_o, alpha);
  }
}

// Of all key tiles, at least one, everything but O += P V of the last. `acc_s` has the first one's scores.
FUNC void attend(ScoreTile& acc_s, OutputTile& acc_o, ProbabilityFragments& frag_p, SoftmaxState& softmax,
                 Consumer& consumer, const QueryTile& tile, const FwdParams& p) {
  attend_first(acc_s, frag_p, softmax, consumer, tile, p);
  if constexpr (kStoresOverlap) finish_store(consumer);
  int j = tile.own - 2;
  if constexpr (kCausal) {
#pragma unroll 1
    for (; j >= tile.whole; j--) attend_overlapped<true>(acc_s, acc_o, frag_p, softmax, consumer, tile, j, p);
  }
#pragma unroll 1
  for (; j >= 0; j--) attend_overlapped<false>(acc_s, acc_o, frag_p, softmax, consumer, tile, j, p);
  if constexpr (!kStoreByTma) release<kQueryTiles>(kBarriersQ, consumer.q);
}

// O += P V of the last key tile.
FUNC void attend_last(OutputTile& acc_o, const ProbabilityFragments& frag_p, Consumer& consumer, bool accumulate) {
  await_v(consumer);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), accumulate);
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<0>();
  release_v(consumer);
}

// The same, and behind it the scores of the first key tile of the next query tile: they are in flight on return.
FUNC void attend_last_and_next(ScoreTile& acc_s, OutputTile& acc_o, const ProbabilityFragments& frag_p,
                               Consumer& consumer, const QueryTile& tile, const QueryTile& next) {
  Consumer ahead = consumer;
  advance<kQueryTiles>(ahead.q, kWarpgroups);
  await_v(consumer);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), tile.own > 1);
  wgmma_commit();
  await_first(ahead, next);
  // Before the product: it is in flight on return, and what it reads stays.
  if constexpr (kQueryRegs > 0) consumer.frag_q = ahead.frag_q;
  wgmma_fence();
  issue_qk(acc_s, consumer.frag_q, query_rows(ahead), key_tile(ahead.k));
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<1>();
  release_v(consumer);
  consumer.k = ahead.k;
}

// Key tile j, one product after the other.
template <bool kMasked>
FUNC void attend_in_order(ScoreTile& acc_s, OutputTile& acc_o, ProbabilityFragments& frag_p, SoftmaxState& softmax,
                          Consumer& consumer, const QueryTile& tile, int j, const FwdParams& p) {
  float alpha[2];
  const bool accumulate = j < tile.own - 1;
  trace("key tile", j);
  await_k(consumer);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_qk(acc_s, consumer.frag_q, query_rows(consumer), key_tile(consumer.k));
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<0>();
  release_k(consumer);
  softmax_step<kMasked>(acc_s, softmax, alpha, consumer, tile.row, j, p);
  if (accumulate) rescale_output(acc_o, alpha);
  hand_over_probabilities(frag_p, acc_s, consumer);
  await_v(consumer);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), accumulate);
  wgmma_commit();
  wgmma_wait<0>();
  release_v(consumer);
}

// All key tiles, at least one.
FUNC void attend_all_in_order(OutputTile& acc_o, SoftmaxState& softmax, Consumer& consumer, const QueryTile& tile,
                              const FwdParams& p) {
  ScoreTile acc_s;
  ProbabilityFragments frag_p;
  if constexpr (kSkips) skip_tiles(consumer, tile);
  await_q(consumer);
  if constexpr (kStoresOverlap) finish_store(consumer);
  int j = tile.own - 1;
#pragma unroll 1
  for (; j >= tile.whole; j--) attend_in_order<true>(acc_s, acc_o, frag_p, softmax, consumer, tile, j, p);
#pragma unroll 1
  for (; j >= 0; j--) attend_in_order<false>(acc_s, acc_o, frag_p, softmax, consumer, tile, j, p);
  if constexpr (!kStoreByTma) release<kQueryTiles>(kBarriersQ, consumer.q);
}
