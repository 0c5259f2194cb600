"""Seeded bugs in what tunables and launches add to the sm90 forward: rings, skipped tiles, repairs, tiles ahead."""

from __future__ import annotations

import pytest

from fa2gen.spec import FwdSm90Config
from tests.sm90_bugs import (
    ACROSS,
    ACROSS_DIRECT,
    ACROSS_REGISTERS,
    CONFIG,
    DIRECT,
    EARLY,
    FEW_STAGES,
    GUARDED,
    GUARDED_DIRECT,
    GUARDED_SHARED_P,
    LOAD_READ,
    MORE_K,
    MORE_Q,
    NARROW,
    NUMBERS,
    ONE_Q,
    OTHER_TILES,
    OUT_OF_STEP,
    STATIC,
    Bug,
    require_caught,
    require_right,
)

BUGS = {
    "every lane arrives at an empty stage of Q": Bug(
        DIRECT, "init_ring<kQueryTiles>(kBarriersQ, 4)", "init_ring<kQueryTiles>(kBarriersQ, 1)", OUT_OF_STEP
    ),
    "a warp speaks for its warpgroup": Bug(
        CONFIG,
        "init_ring<kStagesK>(kBarriersK, 4 * kWarpgroups)",
        "init_ring<kStagesK>(kBarriersK, kWarpgroups)",
        OUT_OF_STEP,
    ),
    "the producer counts stages of K as those of V": Bug(
        MORE_K,
        "load_key_tile<kStagesK>(producer.k",
        "load_key_tile<kStagesV>(producer.k",
        {*OUT_OF_STEP, "mbarrier-init-not-fenced"},
    ),
    "consumers count stages of K as those of V": Bug(
        MORE_K, "advance<kStagesK>(consumer.k)", "advance<kStagesV>(consumer.k)", OUT_OF_STEP
    ),
    "tiles of K are as many as those of V in shared memory": Bug(
        MORE_K,
        "smem_base() + kSmemV + stage_of(at) * kKeyTileBytes",
        "smem_base() + kSmemK + kStagesV * kKeyTileBytes + stage_of(at) * kKeyTileBytes",
        {NUMBERS, *EARLY, *LOAD_READ},
    ),
    "a consumer goes on to the next Q tile of the ring": Bug(
        MORE_Q, "advance<kQueryTiles>(consumer.q, kWarpgroups)", "advance<kQueryTiles>(consumer.q)", OUT_OF_STEP
    ),
    "the Q tile before is taken for another": Bug(
        MORE_Q,
        "(stage < kWarpgroups ? kQueryTiles : 0) - kWarpgroups",
        "(stage == 0 ? kQueryTiles : 0) - 1",
        OUT_OF_STEP,
    ),
    "no Q tile is given back": Bug(
        CONFIG,
        "  finish_store(consumer);\n  int j = tile.own - 2;\n",
        "  int j = tile.own - 2;\n",
        {"deadlock", "tma-store-left-at-exit"},
    ),
    "a block ends before its last stores": Bug(
        CONFIG,
        "  if (is_group_leader()) tma_store_wait_read<0>();\n}",
        "}",
        {"tma-store-left-at-exit"},
    ),
    "Q is given back before its last product": Bug(
        GUARDED_DIRECT,
        "  int j = tile.own - 2;\n",
        "  release<kQueryTiles>(kBarriersQ, consumer.q);\n  int j = tile.own - 2;\n",
        {*LOAD_READ, "tma-load-not-waited"},
        more=(("tile, j, p);\n  release<kQueryTiles>(kBarriersQ, consumer.q);\n", "tile, j, p);\n"),),
    ),
    "the V before comes behind the next Q": Bug(
        ONE_Q,
        "    if (v_is_left) load_v(producer, 0, before, p);\n",
        "",
        {"deadlock"},
        more=(
            (
                "    v_is_left = visible > 0;\n    before = work;\n"
                "    if (visible > 0) load_query_tiles(producer, work, p);\n",
                "    if (visible > 0) load_query_tiles(producer, work, p);\n"
                "    if (v_is_left) load_v(producer, 0, before, p);\n"
                "    v_is_left = visible > 0;\n    before = work;\n",
            ),
        ),
    ),
    "the V before is forgotten": Bug(
        CONFIG, "    if (v_is_left) load_v(producer, 0, before, p);\n    v_is", "    v_is", {"deadlock"}
    ),
    "the V before is taken from the next head": Bug(
        CONFIG,
        "    if (v_is_left) load_v(producer, 0, before, p);",
        "    if (v_is_left) load_v(producer, 0, work, p);",
        {NUMBERS},
    ),
    "Q is loaded for rows without a key": Bug(
        CONFIG,
        "    if (visible > 0) load_query_tiles(producer, work, p);\n",
        "    load_query_tiles(producer, work, p);\n",
        {NUMBERS, "deadlock", "tma-load-left-at-exit"},
        keys=100,
    ),
    "rows without a key are left as they were": Bug(
        CONFIG, "    store_zeros(tile.row, work_tile(id, p), p);\n", "", {"global-not-written"}, keys=100
    ),
    "a lane stores every second chunk of zeros": Bug(
        CONFIG, "column += 32)", "column += 64)", {"global-not-written"}, keys=100
    ),
    "a query tile without keys is taken for one": Bug(
        ACROSS, "      if (ahead.visible == 0) break;\n", "", {*OUT_OF_STEP, NUMBERS}, keys=100
    ),
    "key tiles of other consumers are not given back": Bug(
        CONFIG,
        "  for (int j = tile.own; j < tile.visible; j++) skip_key(consumer);\n",
        "  for (int j = tile.own; j < tile.visible - 1; j++) skip_key(consumer);\n",
        {*OUT_OF_STEP, NUMBERS},
    ),
    "values of other consumers are not given back": Bug(
        CONFIG,
        "  for (int i = tile.own; i < tile.visible; i++) skip_value(consumer);\n",
        "  for (int i = tile.own; i < tile.visible - 1; i++) skip_value(consumer);\n",
        {*OUT_OF_STEP, NUMBERS},
    ),
    "a skipped key tile is not waited for": Bug(
        NARROW,
        "  await_k(consumer);\n  sync_warp();\n  release_k(consumer);\n",
        "  sync_warp();\n  release_k(consumer);\n",
        {"mbarrier-over-arrival"},
    ),
    "a skipped tile of V is not waited for": Bug(
        CONFIG,
        "  await_v(consumer);\n  sync_warp();\n  release_v(consumer);\n",
        "  sync_warp();\n  release_v(consumer);\n",
        {"mbarrier-over-arrival"},
    ),
    "turns of skipped key tiles are not passed": Bug(
        CONFIG,
        "  for (int i = tile.own; i < tile.visible; i++) skip_turn(consumer);\n",
        "  for (int i = tile.own; i < tile.visible - 1; i++) skip_turn(consumer);\n",
        {"deadlock"},
    ),
    "tiles are skipped without their turns": Bug(FEW_STAGES, "    skip_turn(consumer);\n", "", {"deadlock"}),
    "the short half of the query tiles begins one later": Bug(
        STATIC,
        "id -= long_m_blocks * heads_in_all;",
        "id -= long_m_blocks * heads_in_all - 1;",
        {*OTHER_TILES, "global-out-of-range"},
    ),
    "the short half of the query tiles is the long one": Bug(
        STATIC, "m_blocks = p.tail_m_blocks;", "m_blocks = p.num_m_blocks;", OTHER_TILES
    ),
    "every section begins with the first head": Bug(
        STATIC,
        "first_head = id / section_tiles * p.heads_per_section;",
        "first_head = 0;",
        OTHER_TILES,
        heads=5,
    ),
    "the last section is as large as the others": Bug(
        STATIC,
        "heads = min_i32(p.heads_per_section, heads_in_all - first_head);",
        "heads = p.heads_per_section;",
        {*OTHER_TILES, "tma-map", "global-out-of-range", "global-out-of-view", "crash"},
        heads=5,
    ),
    "sums are not proved": Bug(GUARDED, "any_lane(!is_proved(", "(false && !is_proved(", {NUMBERS}, lead=100.0),
    "each lane proves for itself": Bug(
        GUARDED,
        "any_lane(!is_proved(",
        "(!is_proved(",
        {"warp-divergence"},
        amount=60.0,
    ),
    "the limit is out of reach": Bug(
        GUARDED, "kGuardLimit = 16777216.f", "kGuardLimit = 3.4e38f", {NUMBERS}, lead=87.0
    ),
    "a reference that is large is not noticed": Bug(
        GUARDED, "-1.f : kGuardLimit", "kGuardLimit : kGuardLimit", {NUMBERS}, offset=1e8
    ),
    "a repair does not rescale O": Bug(GUARDED, "      rescale_output(acc_o, alpha);\n", "", {NUMBERS}, lead=100.0),
    "a repair leaves P as it was": Bug(
        GUARDED, "        pack_probabilities(frag_p, acc_s);\n", "", {NUMBERS}, lead=100.0
    ),
    "a repair adds the sum of before": Bug(
        GUARDED,
        "      rescale_output(acc_o, alpha);\n",
        "      rescale_output(acc_o, alpha);\n      add_tile_sum(softmax, tile_sum);\n",
        {NUMBERS},
        lead=100.0,
    ),
    "what was proved is not added": Bug(GUARDED, "      add_tile_sum(softmax, tile_sum);\n", "", {NUMBERS}),
    "a repair swaps the halves of K": Bug(
        GUARDED, "frag_k[2 * i], frag_k[2 * i + 1]", "frag_k[2 * i + 1], frag_k[2 * i]", {NUMBERS}, lead=100.0
    ),
    "a repair takes the next keys for these": Bug(
        GUARDED, "key = lane / 16 * 8 + lane % 8", "key = lane / 8 % 2 * 8 + lane % 8", {NUMBERS}, lead=100.0
    ),
    "a repair takes the rows of the first warp": Bug(
        GUARDED,
        "row = threadIdx.x / 32 % 4 * 16 + lane % 16, key",
        "row = lane % 16, key",
        {NUMBERS},
        lead=100.0,
    ),
    "a repair adds to the scores": Bug(GUARDED, "acc_s[i] = 0.f;", "acc_s[i] += 0.f;", {NUMBERS}, lead=100.0),
    "a repair stops at the first panel": Bug(
        GUARDED,
        "  for (int step = 0; step < kStepsQK; step++) {",
        "  for (int step = 0; step < 4; step++) {",
        {NUMBERS},
        lead=100.0,
    ),
    "K is given back before its scores are proved": Bug(
        GUARDED,
        "    pack_probabilities(frag_p, acc_s);\n    if (is_guarded",
        "    release<kStagesK>(kBarriersK, consumer.k);\n    pack_probabilities(frag_p, acc_s);\n    if (is_guarded",
        LOAD_READ,
        more=(("    }\n    release_k(consumer);\n", "    }\n    advance<kStagesK>(consumer.k);\n"),),
        lead=100.0,
    ),
    "a lane is left behind by a repair": Bug(
        GUARDED, "    }\n  }\n  sync_warp();\n}\n\n// Packs P", "    }\n  }\n}\n\n// Packs P", LOAD_READ, lead=100.0
    ),
    "P of a repair in shared memory without a barrier": Bug(
        GUARDED_SHARED_P,
        "    release_k(consumer);\n    store_probabilities(consumer.tile_p, frag_p);\n"
        "    bar_sync(kProbabilityBarrier + consumer.group, 128);\n",
        "    release_k(consumer);\n    store_probabilities(consumer.tile_p, frag_p);\n",
        {"shared-race-read-after-write", "proxy-fence-missing", "wgmma-operand-overwritten"},
        lead=100.0,
    ),
    "a row gets no reference from the tile that needs a mask": Bug(
        GUARDED, "  return (max_i32(end - 1, 0)) / kBlockN;\n", "  return (end + kBlockN - 1) / kBlockN;\n", {NUMBERS}
    ),
    "the scores ahead are read before they are waited for": Bug(
        ACROSS,
        "      wgmma_wait<0>();\n      release_k(consumer);\n",
        "      release_k(consumer);\n",
        {"wgmma-result-not-waited", *LOAD_READ},
    ),
    "K of the scores ahead is given back before they are waited for": Bug(
        ACROSS,
        "      wgmma_wait<0>();\n      release_k(consumer);\n",
        "      release_k(consumer);\n      wgmma_wait<0>();\n",
        LOAD_READ,
    ),
    "the last O is read before it is waited for": Bug(
        ACROSS,
        "  wgmma_wait<1>();\n  release_v(consumer);\n  consumer.k",
        "  release_v(consumer);\n  consumer.k",
        {"wgmma-result-not-waited", *LOAD_READ},
    ),
    "the last V is given back before its product is waited for": Bug(
        ACROSS,
        "  wgmma_wait<1>();\n  release_v(consumer);\n  consumer.k",
        "  release_v(consumer);\n  wgmma_wait<1>();\n  consumer.k",
        LOAD_READ,
    ),
    "K stays where it was before the scores ahead": Bug(
        ACROSS, "  consumer.k = ahead.k;\n", "", {*OUT_OF_STEP, NUMBERS}
    ),
    "Q in registers stays that of the query tile before": Bug(
        ACROSS_REGISTERS, "  consumer.frag_q = ahead.frag_q;\n", "", {NUMBERS}
    ),
    "the scores ahead are those of this Q": Bug(
        ACROSS,
        "issue_qk(acc_s, query_rows(ahead), key_tile(ahead.k));",
        "issue_qk(acc_s, query_rows(consumer), key_tile(ahead.k));",
        {NUMBERS, "wgmma-operand-overwritten"},
    ),
    "Q ahead is not waited for": Bug(
        ACROSS_DIRECT, "  advance<kQueryTiles>(ahead.q, kWarpgroups);\n", "", {*OUT_OF_STEP, NUMBERS}
    ),
    "the query tile before is taken for the one after": Bug(
        ACROSS, "      tile = query_tile(opaque(next), consumer.group, p);\n", "", {*OUT_OF_STEP, *OTHER_TILES}
    ),
    "the state of the query tile before is kept": Bug(ACROSS, "      clear_softmax(softmax);\n", "", {NUMBERS}),
}


@pytest.mark.parametrize("name", BUGS)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(name, BUGS[name], monkeypatch)


@pytest.mark.parametrize("config", dict.fromkeys(bug.config for bug in BUGS.values()), ids=FwdSm90Config.slug)
def test_the_unchanged_kernel_is_right(config: FwdSm90Config) -> None:
    require_right(config, BUGS.values())
