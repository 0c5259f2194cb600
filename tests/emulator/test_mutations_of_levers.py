"""Seeded bugs in what a config or an alignment chooses: stages, ring, proof, shared rows, packed heads, elements."""

from __future__ import annotations

import dataclasses

import pytest

from fa2gen.spec import FwdConfig, KernelSpec

NUMBERS = "wrong numbers"
RACES = {"shared-race-read-after-write", "shared-race-write-after-read", "shared-uninitialised-read"}
NOT_WAITED = {"cp-async-not-waited", "cp-async-overwrite"}
STRAY = {"global-out-of-view", "global-out-of-range"}

CONFIG = FwdConfig(block_m=64, block_n=64, step_n=32, num_warps=4, num_stages=2, softmax="guarded")
ONLINE = dataclasses.replace(CONFIG, softmax="online")
ONE_STAGE = dataclasses.replace(CONFIG, step_n=64, num_stages=1)
THREE_STAGES = dataclasses.replace(CONFIG, num_stages=3, q_in_regs=True, softmax="online")
RING = dataclasses.replace(CONFIG, pipeline="ring")
BLOCK = dataclasses.replace(CONFIG, proof="block")
BLOCK_RING = dataclasses.replace(BLOCK, pipeline="ring")
SHARED = dataclasses.replace(CONFIG, warps_n=2)
SHARED_ONLINE = dataclasses.replace(SHARED, softmax="online")
SHARED_BLOCK = dataclasses.replace(SHARED, proof="block", pipeline="ring")
PACKED = dataclasses.replace(CONFIG, pack_gqa=True)

CAUSAL = KernelSpec(head_dim=64, dtype="bf16", causal=True, gqa_ratio=2)
FULL = dataclasses.replace(CAUSAL, causal=False)
WIDE = dataclasses.replace(CAUSAL, head_dim=128, gqa_ratio=1)
WIDE_FULL = dataclasses.replace(WIDE, causal=False)
GROUPED = dataclasses.replace(CAUSAL, gqa_ratio=3)
UNALIGNED = dataclasses.replace(CAUSAL, head_dim=59, alignment=2)
# Nine chunks of 16 bytes in three panels of four: the products read a tenth, which is zero.
PREDICATED = dataclasses.replace(CAUSAL, head_dim=72)

# name: (spec, config, text, replacement, diagnostics)
MUTATIONS = {
    "online: blocks are whole too early": (
        CAUSAL,
        ONLINE,
        "max_i32(first_end - 1, 0) / kBlockN",
        "(first_end + kBlockN - 1) / kBlockN",
        {NUMBERS},
    ),
    # One stage.
    "one stage: no barrier before V is replaced": (
        CAUSAL,
        ONE_STAGE,
        "sync_threads();  // the tile is visible",
        "// the tile is visible",
        RACES,
    ),
    "one stage: no barrier before K is replaced": (
        CAUSAL,
        ONE_STAGE,
        "cp_async_wait<0>();\n  sync_threads();\n  if (i + 1",
        "cp_async_wait<0>();\n  if (i + 1",
        RACES,
    ),
    "one stage: no wait for K": (
        CAUSAL,
        ONE_STAGE,
        "cp_async_wait<kGroupsPending>();\n  sync_threads();",
        "sync_threads();",
        NOT_WAITED | RACES,
    ),
    "one stage: no wait for V": (
        CAUSAL,
        ONE_STAGE,
        "cp_async_wait<0>();\n  sync_threads();\n  if (i + 1",
        "sync_threads();\n  if (i + 1",
        NOT_WAITED | RACES,
    ),
    "one stage: an idle warp skips the barrier": (
        CAUSAL,
        ONE_STAGE,
        "  swap_stage(tiles, i, p);",
        "  if (active) swap_stage(tiles, i, p);",
        {"deadlock", "barrier-site"} | RACES,
    ),
    # Three stages, and Q in registers.
    "Q in registers: no sync_warp": (CAUSAL, THREE_STAGES, "  sync_warp();\n  if (blocks", "  if (blocks", RACES),
    "Q in registers: a wait too weak": (
        CAUSAL,
        THREE_STAGES,
        "cp_async_wait<kGroupsPending>();\n  sync_warp();",
        "cp_async_wait<kGroupsPending + 1>();\n  sync_warp();",
        NOT_WAITED,
    ),
    "the stages are not taken in turn": (
        CAUSAL,
        THREE_STAGES,
        "stage + 1 == kNumStages ? 0 : stage + 1",
        "stage ? 0 : 2",
        NOT_WAITED | RACES,
    ),
    "no commit before the loop": (CAUSAL, THREE_STAGES, "    cp_async_commit();\n    stage", "    stage", NOT_WAITED),
    # The ring.
    "ring: no sync_warp before a release": (
        CAUSAL,
        RING,
        "  sync_warp();\n  if (threadIdx.x % 32 == 0) mbarrier_arrive",
        "  if (threadIdx.x % 32 == 0) mbarrier_arrive",
        RACES | NOT_WAITED,
    ),
    "ring: no wait for an empty stage": (
        CAUSAL,
        RING,
        "if (i > 0) mbarrier_wait(empty",
        "if (false) mbarrier_wait(empty",
        RACES | {"mbarrier-over-arrival"},
    ),
    "ring: the first refill does not wait": (
        CAUSAL,
        RING,
        "if (i > 0) mbarrier_wait(empty",
        "if (i > 1) mbarrier_wait(empty",
        RACES | {"mbarrier-over-arrival"},
    ),
    "ring: no wait for a full stage": (
        CAUSAL,
        RING,
        "  mbarrier_wait(full_barrier(tiles.stage), tiles.phase);\n",
        "",
        NOT_WAITED | {"mbarrier-over-arrival"},
    ),
    "ring: the parity never flips": (
        CAUSAL,
        RING,
        "  tiles.phase ^= 1;\n",
        "",
        NOT_WAITED | RACES | {"mbarrier-over-arrival", "deadlock"},
    ),
    "ring: nobody releases": (
        CAUSAL,
        RING,
        "  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty_barrier(tiles.stage));\n",
        "",
        {"deadlock"},
    ),
    "ring: the empty parity of the stage before": (
        CAUSAL,
        RING,
        "tiles.stage == 0 ? tiles.phase ^ 1 : tiles.phase)",
        "tiles.phase)",
        RACES | {"deadlock", "mbarrier-over-arrival"},
    ),
    "ring: one warp is not waited for": (
        CAUSAL,
        RING,
        "(empty_barrier(stage), kNumWarps)",
        "(empty_barrier(stage), kNumWarps - 1)",
        RACES | {"mbarrier-over-arrival"},
    ),
    "ring: one thread's copies are not waited for": (
        CAUSAL,
        RING,
        "(full_barrier(stage), kThreads)",
        "(full_barrier(stage), kThreads - 1)",
        NOT_WAITED | {"mbarrier-over-arrival"},
    ),
    "ring: no barrier after the initialisation": (
        CAUSAL,
        RING,
        "    }\n  }\n  sync_threads();\n}",
        "    }\n  }\n}",
        {"mbarrier-not-initialised", "mbarrier-init-not-visible"},
    ),
    "ring: a stage too far is refilled": (
        CAUSAL,
        RING,
        "const int next = tiles.stage == 0 ? kNumStages - 1 : tiles.stage - 1;",
        "const int next = tiles.stage;",
        RACES | NOT_WAITED | {"mbarrier-over-arrival", "deadlock"},
    ),
    "ring: elements arrive like copies": (
        UNALIGNED,
        RING,
        "  mbarrier_arrive(full_barrier(stage));",
        "  cp_async_mbarrier_arrive(full_barrier(stage));",
        RACES,
    ),
    # The proof of a whole block.
    "block: O is not looked at": (
        FULL,
        BLOCK,
        "probe[e] = fma_f32(acc_o[i][n][e], 0.f, probe[e]);",
        "probe[e] = 0.f;",
        {NUMBERS},
    ),
    "block: the sums are not looked at": (
        FULL,
        BLOCK,
        "proved = proved && softmax.row_sum[i][r] < kBlockLimit &&",
        "proved = proved &&",
        {NUMBERS},
    ),
    "block: large references are not looked at": (
        FULL,
        BLOCK,
        "abs_f32(reference * scale_log2) <= kLargeReference);",
        "true);",
        {NUMBERS},
    ),
    "block: each warp decides for itself": (
        CAUSAL,
        BLOCK,
        "if (!sync_threads_or(!proved)) break;",
        "if (proved) break;",
        {"deadlock", "barrier-site", "warp-divergence"} | RACES,
    ),
    "block: again from where the walk ended": (CAUSAL, BLOCK, "    rewind_pipeline(tiles, p);\n", "", STRAY),
    "block: again with the guarded softmax": (FULL, BLOCK, "    online_only = true;\n", "", {"timeout"}),
    "block: only the first tiles again online": (FULL, BLOCK, "    masked_blocks = blocks.visible;\n", "", {NUMBERS}),
    "block: again without clearing the sums": (
        FULL,
        BLOCK,
        "    clear_softmax(warp.softmax);\n",
        "    if (!online_only) clear_softmax(warp.softmax);\n",
        {NUMBERS},
    ),
    "block: again on top of O": (
        FULL,
        BLOCK,
        "    clear_output(warp.acc_o);\n",
        "    if (!online_only) clear_output(warp.acc_o);\n",
        {NUMBERS},
    ),
    "block and ring: the stages may still be read": (
        FULL,
        BLOCK_RING,
        "mbarrier_wait(empty_barrier(stage), stage < tiles.stage ? tiles.phase : tiles.phase ^ 1);",
        ";",
        {"mbarrier-over-arrival"} | RACES,
    ),
    "block and ring: the parities of the last round": (
        FULL,
        BLOCK_RING,
        "stage < tiles.stage ? tiles.phase : tiles.phase ^ 1);",
        "tiles.phase);",
        {"mbarrier-over-arrival", "deadlock"} | RACES,
    ),
    # Two warps that share rows.
    "shared rows: both mask the first half": (WIDE, SHARED, "column + warp_n() * kWarpKeys", "column", {NUMBERS}),
    "shared rows: both take the first half of K": (
        WIDE,
        SHARED,
        " + warp_n() * kWarpKeys * kPanelRowBytes",
        "",
        {NUMBERS},
    ),
    "shared rows: the other half of V": (
        WIDE,
        SHARED,
        "lane_row_major(smem + kSmemV) + warp_n()",
        "lane_row_major(smem + kSmemV) + (1 - warp_n())",
        {NUMBERS},
    ),
    "shared rows: no barrier between P and P V": (
        WIDE,
        SHARED_ONLINE,
        "  store_probabilities(tile_p, frag_p);\n  sync_partners();",
        "  store_probabilities(tile_p, frag_p);",
        RACES,
    ),
    "shared rows: one tile of P": (
        WIDE_FULL,
        SHARED_BLOCK,
        "(i * (kBlockN / kStepN) + step) % 2 * kTileBytesP",
        "0",
        RACES,
    ),
    "shared rows: halves of P change places": (
        WIDE,
        SHARED,
        "warp_n() * (kWarpKeys / 8)) + lane",
        "(1 - warp_n()) * (kWarpKeys / 8)) + lane",
        {NUMBERS},
    ),
    "shared rows: own maxima": (WIDE, SHARED, "  share_max(step_max);\n", "", RACES | {NUMBERS}),
    "shared rows: own sums": (WIDE, SHARED, "  share_sum(row_sum);", "  sync_partners();", {NUMBERS}),
    "shared rows: no barrier in the exchange": (
        WIDE,
        SHARED,
        "mine[i][r]);\n  sync_partners();",
        "mine[i][r]);",
        RACES,
    ),
    "shared rows: own proof": (
        WIDE,
        SHARED,
        "proved = !bar_sync_or(1 + warp_m(), 32 * kWarpsN, !proved);",
        "{\n    proved = all_lanes(proved);\n    sync_partners();\n  }",
        RACES | {"deadlock", "barrier-site", "barrier-count", "shared-race-write-after-write"},
    ),
    "shared rows: a repair leaves P as it was": (
        WIDE,
        SHARED,
        "      store_probabilities(tile_p, frag_p);\n      sync_partners();",
        "      sync_partners();",
        {NUMBERS},
    ),
    "shared rows: a repair without barrier": (
        WIDE,
        SHARED,
        "      store_probabilities(tile_p, frag_p);\n      sync_partners();",
        "      store_probabilities(tile_p, frag_p);",
        RACES,
    ),
    "shared rows: O of both in the same columns": (
        WIDE,
        SHARED,
        "const u32 panel = (warp_n() * (kPanels / kWarpsN) + n / kPanelChunks) * kPanelQ;",
        "const u32 panel = n / kPanelChunks * kPanelQ;",
        RACES | {"shared-race-write-after-write", NUMBERS},
    ),
    "shared rows: both write the LSE": (
        WIDE,
        SHARED,
        "warp_n() == 0 && lane % 4 == 0",
        "lane % 4 == 0",
        {"global-two-writers"},
    ),
    # Packed heads.
    "packed: rows are positions": (
        GROUPED,
        PACKED,
        "{ return row / kGqaRatio; }",
        "{ return row; }",
        STRAY | {"global-two-writers"},
    ),
    "packed: all rows of one head": (
        GROUPED,
        PACKED,
        "query_of(row) * row_stride + row % kGqaRatio * head_stride",
        "query_of(row) * row_stride",
        {"global-two-writers"},
    ),
    "packed: LSE of one head": (
        GROUPED,
        PACKED,
        "head_q + ((warp.row + row) % kGqaRatio)",
        "head_q",
        {"global-two-writers"},
    ),
    "packed: rows of one head": (
        GROUPED,
        PACKED,
        "const int num_rows = p.seqlen_q * kGqaRatio;",
        "const int num_rows = p.seqlen_q;",
        {"global-not-written"},
    ),
    "packed: a tile of the unpacked head": (
        GROUPED,
        PACKED,
        "const int head_q = work.head * kGqaRatio;",
        "const int head_q = work.head;",
        {"global-two-writers", NUMBERS},
    ),
    # Rows that are no multiple of 16 bytes.
    "predicated: the chunk beyond the row is read": (
        PREDICATED,
        CONFIG,
        "valid && chunk * 8 < kHeadDim",
        "valid",
        STRAY,
    ),
    "predicated: the chunk beyond the row is not zeroed": (
        PREDICATED,
        CONFIG,
        "if (chunk >= kChunks) return;",
        "if (chunk * 8 >= kHeadDim) return;",
        {"shared-uninitialised-read"},
    ),
    "elements: no barrier": (
        UNALIGNED,
        CONFIG,
        "sync_threads();  // the tile is visible",
        "// the tile is visible",
        RACES,
    ),
    "elements: one column too many is read": (UNALIGNED, CONFIG, "valid && column + 1 < kHeadDim", "valid", STRAY),
    "elements: columns beyond the row are stored": (
        UNALIGNED,
        CONFIG,
        "if (column + e < kHeadDim) st_global",
        "st_global",
        {"global-two-writers", "global-out-of-view"},
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(caught_by_gate, name):
    spec, config, old, new, expected = MUTATIONS[name]
    # One repeats for ever.
    caught, text = caught_by_gate(spec, config, old, new, timeout=5.0 if "timeout" in expected else 60.0)
    assert caught in expected, text
