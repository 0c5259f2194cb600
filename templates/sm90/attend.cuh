// ---- One query tile against its key tiles, as a consumer warpgroup goes through them
//
// Key tiles come from right to left, so that the ones that need a mask come first.

// What a consumer warpgroup keeps from tile to tile.
struct Consumer {
  RingPosition k, v;
  RingPosition slot;  // of the next tile number
  int group;  // which of the block's consumers: its query rows are group * 64 to group * 64 + 63 of the tile
  u32 tile_p;  // its tile of P in shared memory
};

// Turns: warpgroups issue their products one after the other, so that the softmax of one runs under the products of
// the others. A named barrier for each, on which the one before arrives.
constexpr int kTurnBarrier = 1;

FUNC void wait_for_turn(int group) { bar_sync(kTurnBarrier + group, 256); }
FUNC void pass_turn(int group) { bar_arrive(kTurnBarrier + (group + 1 == kWarpgroups ? 0 : group + 1), 256); }

// Where a consumer's warps meet before its P is read from shared memory.
constexpr int kProbabilityBarrier = 1 + kWarpgroups;
// Where a consumer's warps meet at the end of a query tile.
constexpr int kOutputBarrier = 1 + 2 * kWarpgroups;

FUNC u32 key_tile(RingPosition at) { return smem_base() + kSmemK + at.stage * kKeyTileBytes; }
FUNC u32 value_tile(RingPosition at) { return smem_base() + kSmemV + at.stage * kKeyTileBytes; }

FUNC void release_k(Consumer& consumer) {
  release<kNumStages>(kBarriersK, consumer.k);
  advance<kNumStages>(consumer.k);
}
FUNC void release_v(Consumer& consumer) {
  release<kNumStages>(kBarriersV, consumer.v);
  advance<kNumStages>(consumer.v);
}

// P where the next product finds it.
FUNC void hand_over_probabilities(ProbabilityFragments& frag_p, const ScoreTile& acc_s, const Consumer& consumer) {
  pack_probabilities(frag_p, acc_s);
  if constexpr (kSharedP) {
    store_probabilities(consumer.tile_p, frag_p);
    bar_sync(kProbabilityBarrier + consumer.group, 128);
  }
}

// The scores of key tile j as P. `row` is this thread's first row.
template <bool kMasked>
FUNC void softmax_step(ScoreTile& acc_s, SoftmaxState& softmax, float (&alpha)[2], int row, int j, const FwdParams& p) {
  if constexpr (kMasked) mask_scores(acc_s, row, j * kBlockN, p.seqlen_k, p.seqlen_k - p.seqlen_q);
  online_softmax(acc_s, softmax, alpha, p.scale_log2);
}

// The first key tile up to its softmax: P of tile j, and no O yet.
FUNC void attend_first(ScoreTile& acc_s, ProbabilityFragments& frag_p, SoftmaxState& softmax, Consumer& consumer,
                       u32 tile_q, int row, int j, bool masked, const FwdParams& p) {
  float alpha[2];
  wait_full<kNumStages>(kBarriersK, consumer.k);
  wgmma_fence();
  issue_qk(acc_s, tile_q, key_tile(consumer.k));
  wgmma_commit();
  wgmma_wait<0>();
  release_k(consumer);
  if (masked)
    softmax_step<true>(acc_s, softmax, alpha, row, j, p);
  else
    softmax_step<false>(acc_s, softmax, alpha, row, j, p);
  hand_over_probabilities(frag_p, acc_s, consumer);
}

// O += P V of the tile before, and S = Q K^T of key tile j and its softmax while that product runs.
template <bool kMasked>
FUNC void attend_overlapped(ScoreTile& acc_s, OutputTile& acc_o, ProbabilityFragments& frag_p, SoftmaxState& softmax,
                            Consumer& consumer, u32 tile_q, int row, int j, bool accumulate, const FwdParams& p) {
  float alpha[2];
  trace("key tile", j);
  wait_full<kNumStages>(kBarriersK, consumer.k);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_qk(acc_s, tile_q, key_tile(consumer.k));
  wgmma_commit();
  wait_full<kNumStages>(kBarriersV, consumer.v);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), accumulate);
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<1>();
  release_k(consumer);
  softmax_step<kMasked>(acc_s, softmax, alpha, row, j, p);
  wgmma_wait<0>();
  release_v(consumer);
  hand_over_probabilities(frag_p, acc_s, consumer);
  rescale_output(acc_o, alpha);
}

// O += P V of the last key tile.
FUNC void attend_last(OutputTile& acc_o, const ProbabilityFragments& frag_p, Consumer& consumer, bool accumulate) {
  wait_full<kNumStages>(kBarriersV, consumer.v);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), accumulate);
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<0>();
  release_v(consumer);
}

// Key tile j, one product after the other.
template <bool kMasked>
FUNC void attend_in_order(ScoreTile& acc_s, OutputTile& acc_o, ProbabilityFragments& frag_p, SoftmaxState& softmax,
                          Consumer& consumer, u32 tile_q, int row, int j, bool accumulate, const FwdParams& p) {
  float alpha[2];
  trace("key tile", j);
  wait_full<kNumStages>(kBarriersK, consumer.k);
  if constexpr (kPingPong) wait_for_turn(consumer.group);
  wgmma_fence();
  issue_qk(acc_s, tile_q, key_tile(consumer.k));
  wgmma_commit();
  if constexpr (kPingPong) pass_turn(consumer.group);
  wgmma_wait<0>();
  release_k(consumer);
  softmax_step<kMasked>(acc_s, softmax, alpha, row, j, p);
  if (accumulate) rescale_output(acc_o, alpha);
  hand_over_probabilities(frag_p, acc_s, consumer);
  wait_full<kNumStages>(kBarriersV, consumer.v);
  wgmma_fence();
  issue_pv(acc_o, frag_p, consumer.tile_p, value_tile(consumer.v), accumulate);
  wgmma_commit();
  wgmma_wait<0>();
  release_v(consumer);
}

// All key tiles; at least one. Those from `whole` on need a mask.
FUNC void attend(OutputTile& acc_o, SoftmaxState& softmax, Consumer& consumer, u32 tile_q, int row, int visible,
                 int whole, const FwdParams& p) {
  ScoreTile acc_s;
  ProbabilityFragments frag_p;
  int j = visible - 1;
  if constexpr (kOverlap) {
    attend_first(acc_s, frag_p, softmax, consumer, tile_q, row, j, j >= whole, p);
    j--;
#pragma unroll 1
    for (; j >= whole; j--) {
      attend_overlapped<true>(acc_s, acc_o, frag_p, softmax, consumer, tile_q, row, j, j < visible - 2, p);
    }
#pragma unroll 1
    for (; j >= 0; j--) {
      attend_overlapped<false>(acc_s, acc_o, frag_p, softmax, consumer, tile_q, row, j, j < visible - 2, p);
    }
    attend_last(acc_o, frag_p, consumer, visible > 1);
  } else {
#pragma unroll 1
    for (; j >= whole; j--) {
      attend_in_order<true>(acc_s, acc_o, frag_p, softmax, consumer, tile_q, row, j, j < visible - 1, p);
    }
#pragma unroll 1
    for (; j >= 0; j--) {
      attend_in_order<false>(acc_s, acc_o, frag_p, softmax, consumer, tile_q, row, j, j < visible - 1, p);
    }
  }
}
