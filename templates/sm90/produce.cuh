// ---- The producer: one thread that puts tiles of Q, K and V on their way

struct Producer {
  RingPosition q, k, v;
  RingPosition tile;
};

// Every consumer has its own rows of Q in a tile of their own. The tiles are a ring, which the consumers go through by
// turns.
FUNC void load_query_tiles(Producer& producer, const WorkTile& work, const FwdParams& p) {
#pragma unroll 1
  for (int group = 0; group < kWarpgroups; group++) {
    wait_empty<kQueryTiles>(kBarriersQ, producer.q);
    const u32 full = full_barrier<kQueryTiles>(kBarriersQ, stage_of(producer.q));
    mbarrier_arrive_expect_tx(full, kQueryTileBytes);
    const u32 tile = smem_base() + kSmemQ + stage_of(producer.q) * kQueryTileBytes;
#pragma unroll
    for (int panel = 0; panel < kPanels; panel++)
      tma_load(tile + panel * kQueryPanelBytes, p.q_map, full, panel * 64, work.m_block * kBlockM + group * kGroupRows,
               work.head, work.batch);
    advance<kQueryTiles>(producer.q);
  }
}

// Key tile j of K or of V into the next stage of its ring.
template <int kStages>
FUNC void load_key_tile(RingPosition& at, u32 barriers, u32 tiles, const TensorMap& map, int j, const WorkTile& work) {
  wait_empty<kStages>(barriers, at);
  const u32 full = full_barrier<kStages>(barriers, stage_of(at));
  mbarrier_arrive_expect_tx(full, kKeyTileBytes);
  const u32 tile = smem_base() + tiles + stage_of(at) * kKeyTileBytes;
#pragma unroll
  for (int panel = 0; panel < kPanels; panel++)
    tma_load(tile + panel * kKeyPanelBytes, map, full, panel * 64, j * kBlockN, work.head / kGqaRatio, work.batch);
  advance<kStages>(at);
}

FUNC void load_k(Producer& producer, int j, const WorkTile& work, const FwdParams& p) {
  load_key_tile<kStagesK>(producer.k, kBarriersK, kSmemK, p.k_map, j, work);
}
FUNC void load_v(Producer& producer, int j, const WorkTile& work, const FwdParams& p) {
  load_key_tile<kStagesV>(producer.v, kBarriersV, kSmemV, p.v_map, j, work);
}

// Tiles come in the order in which the consumers wait for them: V one key tile behind K, also from one query tile to
// the next. Between a query tile's first loads and the rest, which wait for stages, is time to learn of the next one.
FUNC void produce(const FwdParams& p) {
  tma_prefetch_map(p.q_map);
  tma_prefetch_map(p.k_map);
  tma_prefetch_map(p.v_map);
  if constexpr (kDynamic) {
    if (blockIdx.x == 0) open_tickets(p.tickets);
  }
  Producer producer;
  producer.q = producer.k = producer.v = 0;
  if constexpr (kDynamic) producer.tile = 0;
  WorkTile before = {0, 0, 0};
  bool v_is_left = false;  // the last one of the query tile before
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.num_tiles;) {
    const WorkTile work = work_tile(tile, p);
    const int visible = visible_tiles((work.m_block + 1) * kBlockM, p.seqlen_k, p.seqlen_k - p.seqlen_q);
    if (visible > 0) load_k(producer, visible - 1, work, p);
    // Before Q, which consumers may give up only when they have multiplied with this V; and before the
    // number of the next tile, which they do not ask for earlier.
    if (v_is_left) load_v(producer, 0, before, p);
    v_is_left = visible > 0;
    before = work;
    if (visible > 0) load_query_tiles(producer, work, p);
    tile = next_tile(tile, p);
    if constexpr (kDynamic) hand_over_tile(producer.tile, tile);
#pragma unroll 1
    for (int j = visible - 1; j > 0; j--) {
      trace("key tile", j);
      load_k(producer, j - 1, work, p);
      load_v(producer, j, work, p);
    }
  }
  if (v_is_left) load_v(producer, 0, before, p);
}
