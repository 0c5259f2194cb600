// ---- One query tile against its key tiles, as a consumer warpgroup goes through them
//
// Key tiles come from left to right. Under a causal mask the tiles that need one come last, and blocks that begin together
// read the same K and V together, whichever query tile they have.

// What a consumer warpgroup keeps from tile to tile.
struct Consumer {
  RingPosition q, k, v;
  RingPosition slot;  // of the next tile number
  bool is_storing;  // the output before may still be on its way out of its Q tile
  int group;  // which of the block's consumers: its query rows are group * 64 to group * 64 + 63 of the tile
  u32 tile_p;  // its tile of P in shared memory
};

// A query tile as a consumer sees it. Its place follows from its number whenever it is needed: kept, it would take
// registers that the softmax has use for.
struct QueryTile {
  int id;
  int row;  // this thread's first row
  int visible;  // key tiles that some row of the block's tile sees
  int own;  // those that this consumer goes through: at least one
  int whole;  // those of them that need no mask
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

FUNC u32 query_rows(RingPosition at, int group) {
  return smem_base() + kSmemQ + at.stage * kQueryTileBytes + group * kGroupBytes;
}
FUNC u32 query_rows(const Consumer& consumer) { return query_rows(consumer.q, consumer.group); }
FUNC u32 key_tile(RingPosition at) { return smem_base() + kSmemK + at.stage * kKeyTileBytes; }
FUNC u32 value_tile(RingPosition at) { return smem_base() + kSmemV + at.stage * kKeyTileBytes; }

FUNC void await_k(const Consumer& consumer) { wait_full<kNumStages>(kBarriersK, consumer.k); }
FUNC void await_v(const Consumer& consumer) { wait_full<kNumStages>(kBarriersV, consumer.v); }

FUNC void release_k(Consumer& consumer) {
  release<kNumStages>(kBarriersK, consumer.k);
  advance<kNumStages>(consumer.k);
}
FUNC void release_v(Consumer& consumer) {
  release<kNumStages>(kBarriersV, consumer.v);
  advance<kNumStages>(consumer.v);
}

// O leaves through the Q tile where it was computed; that one may be refilled once the store has read it. With two Q
// tiles there is time until the next query tile is under way.
FUNC void finish_store(Consumer& consumer) {
  const RingPosition before = {kQueryStages == 1 ? 0 : 1 - consumer.q.stage, 0};
  if (consumer.is_storing && is_group_leader()) {
    tma_store_wait_read<0>();
    mbarrier_arrive(empty_barrier<kQueryStages>(kBarriersQ, before.stage));
  }
  consumer.is_storing = false;
}

// Under a causal mask the last key tiles of a query tile may be for later consumers only. They go back unread, though not
// before they have come: an arrival belongs to a phase. And their turns pass.
constexpr bool kSkips = kCausal && kWarpgroups > 1;

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
FUNC void share_probabilities(const ProbabilityFragments& frag_p, const Consumer& consumer) {
  store_probabilities(consumer.tile_p, frag_p);
  bar_sync(kProbabilityBarrier + consumer.group, 128);
}
FUNC void hand_over_probabilities(ProbabilityFragments& frag_p, const ScoreTile& acc_s, const Consumer& consumer) {
  pack_probabilities(frag_p, acc_s);
  if constexpr (kSharedP) share_probabilities(frag_p, consumer);
}

// The scores of key tile j as P.
template <bool kMasked>
FUNC void softmax_step(ScoreTile& acc_s, SoftmaxState& softmax, float (&alpha)[2], int row, int j, const FwdParams& p) {
  if constexpr (kMasked) mask_scores(acc_s, row, j * kBlockN, p.seqlen_k, p.seqlen_k - p.seqlen_q);
  online_softmax(acc_s, softmax, alpha, p.scale_log2);
}

// The scores of the first key tile.
FUNC void score_first(ScoreTile& acc_s, Consumer& consumer) {
  wait_full<kQueryStages>(kBarriersQ, consumer.q);
  await_k(consumer);
  wgmma_fence();
  issue_qk(acc_s, query_rows(consumer), key_tile(consumer.k));
  wgmma_commit();
  wgmma_wait<0>();
  release_k(consumer);
}

// And their softmax: P of that tile, and no O yet. Every row that sees a key sees the first one.
FUNC void attend_first(ScoreTile& acc_s, ProbabilityFragments& frag_p, SoftmaxState& softmax, const Consumer& consumer,
                       const QueryTile& tile, const FwdParams& p) {
  float alpha[2];
  if (tile.whole == 0) mask_scores(acc_s, tile.row, 0, p.seqlen_k, p.seqlen_k - p.seqlen_q);
  online_softmax(acc_s, softmax, alpha, p.scale_log2);
  hand_over_probabilities(frag_p, acc_s, consumer);
}

// Key tile j, whose scores are there, with the guarded softmax. O += P V of the tile before is in flight.
template <bool kMasked>
FUNC void guarded_step(ScoreTile& acc_s, OutputTile& acc_o, ProbabilityFragments& frag_p, SoftmaxState& softmax,
                       Consumer& consumer, int row, int j, const FwdParams& p) {
  float tile_sum[2];
  if constexpr (kMasked) mask_scores(acc_s, row, j * kBlockN, p.seqlen_k, p.seqlen_k - p.seqlen_q);
  guarded_softmax(acc_s, tile_sum, softmax, p.scale_log2);
  wgmma_wait<0>();
  release_v(consumer);
  pack_probabilities(frag_p, acc_s);
  if (any_lane(!is_proved(softmax, tile_sum))) {
    // Repair: the scores again, from K still in shared memory.
    float alpha[2];
    recompute_scores(acc_s, query_rows(consumer), key_tile(consumer.k));
    softmax_step<kMasked>(acc_s, softmax, alpha, row, j, p);
    pack_probabilities(frag_p, acc_s);
    rescale_output(acc_o, alpha);
    if (p.repairs.address && threadIdx.x % 32 == 0) atomic_add<u32>(p.repairs, 1);
  } else {
    add_tile_sum(softmax, tile_sum);
  }
  release_k(consumer);
  if constexpr (kSharedP) share_probabilities(frag_p, consumer);
}

// O += P V of the tile before, and S = Q K^T of key tile j and its softmax while that product runs.
template <bool kMasked>
FUNC void attend_overlapped(ScoreTile& acc_s, OutputTile& acc_o, ProbabilityFragments& frag_p, SoftmaxState& softmax,
                            Consumer& consumer, int row, int j, const FwdParams& p) {
  trace("key tile", j);
  await_k(consumer);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_qk(acc_s, query_rows(consumer), key_tile(consumer.k));
  wgmma_commit();
  await_v(consumer);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), j > 1);
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<1>();
  if constexpr (kGuarded) {
    guarded_step<kMasked>(acc_s, acc_o, frag_p, softmax, consumer, row, j, p);
  } else {
    float alpha[2];
    release_k(consumer);
    softmax_step<kMasked>(acc_s, softmax, alpha, row, j, p);
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
  if constexpr (kStoreByTma && kQueryStages > 1) finish_store(consumer);
  int j = 1;
#pragma unroll 1
  for (; j < tile.whole; j++) attend_overlapped<false>(acc_s, acc_o, frag_p, softmax, consumer, tile.row, j, p);
#pragma unroll 1
  for (; j < tile.own; j++) attend_overlapped<true>(acc_s, acc_o, frag_p, softmax, consumer, tile.row, j, p);
  if constexpr (!kStoreByTma) release<kQueryStages>(kBarriersQ, consumer.q);
}

// O += P V of the last key tile.
FUNC void attend_last(OutputTile& acc_o, const ProbabilityFragments& frag_p, Consumer& consumer,
                      const QueryTile& tile) {
  await_v(consumer);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), tile.own > 1);
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<0>();
  release_v(consumer);
}

// The same, and behind it the scores of the next query tile's first key tile: they are in flight on return.
FUNC void attend_last_and_next(ScoreTile& acc_s, OutputTile& acc_o, const ProbabilityFragments& frag_p,
                               Consumer& consumer, const QueryTile& tile) {
  RingPosition next_q = consumer.q;
  advance<kQueryStages>(next_q);
  await_v(consumer);
  if constexpr (kSkips) {
#pragma unroll 1
    for (int j = tile.own; j < tile.visible; j++) skip_key(consumer);
  }
  wait_full<kQueryStages>(kBarriersQ, next_q);
  await_k(consumer);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), tile.own > 1);
  wgmma_commit();
  wgmma_fence();
  issue_qk(acc_s, query_rows(next_q, consumer.group), key_tile(consumer.k));
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<1>();
  release_v(consumer);
}

// Key tile j, one product after the other.
template <bool kMasked>
FUNC void attend_in_order(ScoreTile& acc_s, OutputTile& acc_o, ProbabilityFragments& frag_p, SoftmaxState& softmax,
                          Consumer& consumer, int row, int j, const FwdParams& p) {
  float alpha[2];
  trace("key tile", j);
  await_k(consumer);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_qk(acc_s, query_rows(consumer), key_tile(consumer.k));
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<0>();
  release_k(consumer);
  softmax_step<kMasked>(acc_s, softmax, alpha, row, j, p);
  if (j > 0) rescale_output(acc_o, alpha);
  hand_over_probabilities(frag_p, acc_s, consumer);
  await_v(consumer);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), j > 0);
  wgmma_commit();
  wgmma_wait<0>();
  release_v(consumer);
}

// All key tiles, at least one.
FUNC void attend_all_in_order(OutputTile& acc_o, SoftmaxState& softmax, Consumer& consumer, const QueryTile& tile,
                              const FwdParams& p) {
  ScoreTile acc_s;
  ProbabilityFragments frag_p;
  wait_full<kQueryStages>(kBarriersQ, consumer.q);
  if constexpr (kStoreByTma && kQueryStages > 1) finish_store(consumer);
  int j = 0;
#pragma unroll 1
  for (; j < tile.whole; j++) attend_in_order<false>(acc_s, acc_o, frag_p, softmax, consumer, tile.row, j, p);
#pragma unroll 1
  for (; j < tile.own; j++) attend_in_order<true>(acc_s, acc_o, frag_p, softmax, consumer, tile.row, j, p);
  if constexpr (!kStoreByTma) release<kQueryStages>(kBarriersQ, consumer.q);
}
