"""Seeded bugs in the text of the backward's kernels: each must be caught, those of synchronisation by name."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch

from fa2gen.emulator import run_backward
from fa2gen.errors import EmulatorError
from fa2gen.gate import backward_cases, check_backward, run_backward_gate
from fa2gen.reference import attention_forward
from fa2gen.spec import BwdConfig, KernelSpec

NUMBERS = "wrong numbers"
RACES = {"shared-race-read-after-write", "shared-race-write-after-read", "shared-uninitialised-read"}
NOT_WAITED = {"cp-async-not-waited", "cp-async-overwrite"}
STRAY = {"global-out-of-view", "global-out-of-range"}
NO_VALUE = {"global-uninitialised-read"}
UNORDERED = {"semaphore-unordered-sum"}

# Tiles small enough that every case has several.
PLAIN = BwdConfig(block_m=32, block_n=32, step_m=32, num_warps=2, num_stages=2)
ONE_STAGE = dataclasses.replace(PLAIN, num_stages=1)
ROLES = dataclasses.replace(PLAIN, num_warps=4, roles=2)
ROLES_AHEAD = dataclasses.replace(ROLES, ds_stages=2)
SHARED = dataclasses.replace(PLAIN, num_warps=4, warps_d=2)
SPLIT = dataclasses.replace(PLAIN, split_heads=True)

CAUSAL = KernelSpec("bwd", 64, causal=True, gqa_ratio=2)
FULL = dataclasses.replace(CAUSAL, causal=False)
ORDERED = dataclasses.replace(CAUSAL, deterministic=True)
WIDE = dataclasses.replace(FULL, head_dim=128)


class Mutation(NamedTuple):
    """What is changed in which kernel, and what must be reported: any of these diagnostics, or wrong numbers."""

    old: str
    new: str
    expected: set[str]
    spec: KernelSpec = CAUSAL
    config: BwdConfig = PLAIN
    kernel: str = "bwd"


def _before(old: str, new: str, expected: set[str], spec: KernelSpec = CAUSAL, config: BwdConfig = PLAIN) -> Mutation:
    return Mutation(old, new, expected, spec, config, "bwd_preprocess")


def _after(old: str, new: str, expected: set[str], spec: KernelSpec = CAUSAL, config: BwdConfig = PLAIN) -> Mutation:
    return Mutation(old, new, expected, spec, config, "bwd_postprocess")


TILE_IS_VISIBLE = "sync_threads();  // the tile is visible to every warp"
LAST_DQ = "  add_dq(dq, warp.place, p);\n  sync_threads();\n"
WAIT = "if (speaks_for_block() && seen != u32(n_block)) wait_until_equal("

MUTATIONS: dict[str, Mutation] = {
    # D, L and cleared sums.
    "no D": _before("+ row), delta);", "+ row), 0.f);", {NUMBERS}),
    "D of half of a row": _before("lanes < kRowLanes;", "lanes < kRowLanes / 2;", {NUMBERS}),
    "the gradient of L is added": _before("delta -= ld_global", "delta += ld_global", {NUMBERS}),
    "L is a natural logarithm": _before("lse_log2 = lse * kLog2e;", "lse_log2 = lse;", {NUMBERS}),
    "rows without keys have a probability": _before("if (lse != neg_inf())", "if (true)", {NUMBERS}),
    "sums of dQ are not cleared": _before("clear(p.dq_accum, p.dq_accum_bytes);", "", NO_VALUE),
    "half of the sums are cleared": _before("at < bytes; at +=", "at < bytes / 2; at +=", NO_VALUE),
    "sums of dV are not cleared": _before("clear(p.dv_accum, p.dkv_accum_bytes);", "", NO_VALUE, config=SPLIT),
    "semaphores are not cleared": _before("clear(p.semaphores, p.semaphores_bytes);", "", NO_VALUE, ORDERED),
    "L and D stop at the last row": _before("|| row >= p.padded_seqlen_q)", "|| row >= p.seqlen_q)", NO_VALUE),
    "a row of dO too many is read": _before("if (row < p.seqlen_q && chunk", "if (row <= p.seqlen_q && chunk", STRAY),
    # Copies and stages.
    "no wait for a tile": Mutation("cp_async_wait<kGroupsPending>();\n", "", NOT_WAITED),
    "no barrier after the wait": Mutation(TILE_IS_VISIBLE, "//", RACES | NOT_WAITED),
    "one warp skips a barrier": Mutation(
        TILE_IS_VISIBLE, f"if (threadIdx.x / 32 != 1 || i != 1) {TILE_IS_VISIBLE}", {"deadlock", "barrier-site", *RACES}
    ),
    "a stale stage": Mutation(
        "    stage = stage + 1 == kNumStages ? 0 : stage + 1;", "    stage = 0;", RACES | NOT_WAITED | {NUMBERS}
    ),
    "a tile is loaded into the stage in use": Mutation(
        "walk.stage = walk.stage + 1 == kNumStages ? 0 : walk.stage + 1;", "", RACES | NOT_WAITED
    ),
    "one stage: the next tile is loaded too early": Mutation(
        "sync_threads();  // dS is whole, and every warp is done with Q and dO", "//", RACES, config=ONE_STAGE
    ),
    "L and D of the stage before": Mutation("+ walk.stage * (8 * kBlockM)", "", RACES | NOT_WAITED),
    "L and D of the next tile": Mutation(
        "(8 * kBlockM), walk.row_tile, p);", "(8 * kBlockM), walk.row_tile + 1, p);", {NUMBERS, *STRAY}
    ),
    "ragged queries are loaded": Mutation("if (num_rows < kBlockM) {", "if (false) {", STRAY),
    "ragged keys are stored": Mutation(
        "if (pass + int(threadIdx.x) / kPanelChunks >= num_rows", "if (false", {"global-two-writers", *STRAY}
    ),
    "tiles are walked the wrong way": Mutation(
        "walk.dout.plus_bytes(-p.dout_tile_bytes)", "walk.dout.plus_bytes(p.dout_tile_bytes)", STRAY
    ),
    "the group's next head is the same": Mutation(
        "plus_bytes(p.q_tile_bytes * tiles) + p.q_head_stride;", "plus_bytes(p.q_tile_bytes * tiles);", {NUMBERS}
    ),
    # Which queries and keys.
    "a head of the group is dropped": Mutation(
        "(p.num_m_blocks - m_first) * kGqaRatio;", "(p.num_m_blocks - m_first);", {NUMBERS}
    ),
    "the first tile that sees the keys is dropped": Mutation(
        "max_i32(0, key_0 - diagonal) / kBlockM;", "(max_i32(0, key_0 - diagonal) + kBlockM - 1) / kBlockM;", {NUMBERS}
    ),
    "no mask at the end of the keys": Mutation("row < seqlen_k ? 0 : 0x7fffffff", "0", {NUMBERS}, FULL),
    "mask at the end of the keys off by one": Mutation("row < seqlen_k ?", "row <= seqlen_k ?", {NUMBERS}, FULL),
    "ragged tiles are not masked": Mutation("masked = num_keys < kBlockN", "masked = false", {NUMBERS}, FULL),
    "causal mask off by one": Mutation(
        "max_i32(begin, row - diagonal)", "max_i32(begin, row - diagonal - 1)", {NUMBERS}
    ),
    "query heads of another key head": Mutation(
        "work.head_q = work.head_k * kGqaRatio;",
        "work.head_q = (num_heads - 1 - work.head_k) * kGqaRatio;",
        {NUMBERS},
    ),
    # Products.
    "D is added": Mutation(
        "(acc_dp[i][n][e] - bits_as<float>(e % 2 == 0 ? delta.x : delta.y))",
        "(acc_dp[i][n][e] + bits_as<float>(e % 2 == 0 ? delta.x : delta.y))",
        {NUMBERS},
    ),
    "D of another column": Mutation("e % 2 == 0 ? delta.x : delta.y", "delta.x", {NUMBERS}),
    "L of another column": Mutation("e % 2 == 0 ? lse.x : lse.y", "lse.x", {NUMBERS}),
    "dS is not transposed": Mutation("ldmatrix_x4_trans(frag[i], (lane_ds", "ldmatrix_x4(frag[i], (lane_ds", {NUMBERS}),
    "K is transposed": Mutation(
        "ldmatrix_x4_trans(frag, pair_address<kPanelN>", "ldmatrix_x4(frag, pair_address<kPanelN>", {NUMBERS}
    ),
    "swizzle on one side only": Mutation(
        "return tile + swizzled(lane % 16, lane / 16);", "return tile + swizzled(lane % 16, 1 - lane / 16);", {NUMBERS}
    ),
    "dK without the scale": Mutation("is_dk ? p.softmax_scale : 1.f;", "1.f;", {NUMBERS}),
    "dQ without the scale": _after("p.padded_seqlen_q, p.softmax_scale},", "p.padded_seqlen_q, 1.f},", {NUMBERS}),
    "split: dK without the scale": _after(
        "p.padded_seqlen_k, p.softmax_scale},", "p.padded_seqlen_k, 1.f},", {NUMBERS}, config=SPLIT
    ),
    "all warps add to the same columns": Mutation(
        "column_tile = warp_n * (2 * kDqPairs)", "column_tile = 0", {NUMBERS}
    ),
    "a sum is stored": Mutation(
        "atomic_add<float>(to + e * kElementFloats, ", "st_global(to + e * kElementFloats, ", {"global-two-writers"}
    ),
    # From warp to warp.
    "dS is read before it is whole": Mutation(
        "sync_threads();  // dS is whole, and every warp is done with Q and dO", "//", RACES
    ),
    "P is read before the partner's barrier": Mutation(
        "bar_sync(partner_barrier(warp.place), 64);", "", RACES, config=ROLES
    ),
    "P is handed over before it is there": Mutation(
        "hand_over(warp.lane_p, frag);\n    bar_arrive(partner_barrier(warp.place), 64);",
        "bar_arrive(partner_barrier(warp.place), 64);\n    hand_over(warp.lane_p, frag);",
        RACES,
        config=ROLES,
    ),
    "all partners meet at one barrier": Mutation(
        "{ return 1 + place.in_role; }", "{ return 1; }", {*RACES, "barrier-count"}, config=ROLES
    ),
    "roles: dS into the tile of the one before": Mutation(
        "const u32 ds_stage = i % 2;", "const u32 ds_stage = 0;", {NUMBERS, *RACES}, config=ROLES_AHEAD
    ),
    "roles: dQ of the last tile is dropped": Mutation(LAST_DQ, "  sync_threads();\n", {NUMBERS}, config=ROLES_AHEAD),
    "roles: K's place is taken too early": Mutation(
        LAST_DQ, "  add_dq(dq, warp.place, p);\n", RACES, config=ROLES_AHEAD
    ),
    "shared keys: P is read before it is whole": Mutation(
        "bar_sync(pair_barrier(warp.place), 64);", "", RACES, config=SHARED
    ),
    "K's place is taken too early": Mutation("cp_async_wait<0>();\n  sync_threads();", "cp_async_wait<0>();", RACES),
    "gradients leave before they are whole": Mutation(
        "sync_threads();\n  const i64 key = key_0", "const i64 key = key_0", RACES
    ),
    "rows leave before they are whole": _after(
        "    sync_warp();\n#pragma unroll\n    for (int i = 0", "    for (int i = 0", RACES
    ),
    "rows are overwritten before they have left": _after(
        "sync_warp();  // the panel before has left", "//", RACES, WIDE
    ),
    "ragged rows leave": _after("if (row_0 + row >= gradient.num_rows", "if (false", {"global-two-writers", *STRAY}),
    # From block to block.
    "no wait for the blocks before": Mutation(WAIT, "if (false) wait_until_equal(", UNORDERED, ORDERED),
    "the turn comes behind the barrier": Mutation(
        "await_turn(seen, row_tile, work.n_block, p);\n    sync_threads();  // dS is whole",
        "sync_threads(); await_turn(seen, row_tile, work.n_block, p);  // dS is whole",
        UNORDERED,
        ORDERED,
    ),
    "what was seen is of another tile": Mutation(
        "look_and_release_add(p.semaphores + row_tile,",
        "look_and_release_add(p.semaphores + max_i32(row_tile - 1, 0),",
        UNORDERED,
        ORDERED,
    ),
    "the turn passes before the additions": Mutation(
        "added = dq.row_tile;", "added = row_tile;", UNORDERED, ORDERED, ROLES_AHEAD
    ),
    "the last turn passes before the additions": Mutation(
        "sync_threads();\n  end_turn(dq.row_tile, p);\n",
        "end_turn(dq.row_tile, p);\n  sync_threads();\n",
        UNORDERED | {"semaphore-release-without-sync"},
        ORDERED,
        ROLES_AHEAD,
    ),
    "an addition that releases nothing": Mutation(
        "seen = look_and_release_add(p.semaphores + row_tile, released, 1);",
        "seen = look_and_release_add(p.semaphores + row_tile, gptr<u32>{nullptr}, 1);"
        " if (released.address) atomic_add<u32>(released, 1);",
        UNORDERED,
        ORDERED,
    ),
    "never released": Mutation(
        "const gptr<u32> released = added >= 0 ?", "const gptr<u32> released = false ?", {"deadlock"}, ORDERED
    ),
    "the last turn is not passed": Mutation(
        "if (speaks_for_block() && added >= 0)", "if (false)", {"deadlock"}, ORDERED
    ),
    "a wait for the wrong block": Mutation(
        "p.semaphores + row_tile, n_block);", "p.semaphores + row_tile, n_block + 1);", {"deadlock"}, ORDERED
    ),
    "a semaphore for all tiles": Mutation(
        "? p.semaphores + added", "? p.semaphores + 0 * added", {"deadlock"}, ORDERED
    ),
    "later keys start first": Mutation(
        "work.n_block = id / heads;",
        "work.n_block = p.num_n_blocks - 1 - id / heads;",
        {"deadlock"},
        dataclasses.replace(ORDERED, causal=False),
    ),
}


# A gate of two dozen cases each: what every mutation is a change of.
@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (CAUSAL, PLAIN),
        *(
            pytest.param(*kernel, marks=pytest.mark.slow)
            for kernel in (
                (FULL, PLAIN),
                (WIDE, PLAIN),
                (ORDERED, PLAIN),
                (CAUSAL, ONE_STAGE),
                (CAUSAL, ROLES),
                (CAUSAL, ROLES_AHEAD),
                (CAUSAL, SHARED),
                (CAUSAL, SPLIT),
            )
        ),
    ],
    ids=lambda x: x.slug(),
)
def test_the_kernels_pass(spec: KernelSpec, config: BwdConfig) -> None:
    def runner(q, k, v, out, lse, do, dlse, softmax_scale):
        return run_backward(spec, config, q, k, v, out, lse, do, softmax_scale=softmax_scale, dlse=dlse)[:3]

    report = run_backward_gate(spec, config, runner, backward_cases(spec, config, budget="quick"))
    assert report.passed, report.text


# Each of these has a sibling that is always tried.
SLOW = {
    "D of another column",
    "D of half of a row",
    "K is transposed",
    "K's place is taken too early",
    "L and D of the next tile",
    "L and D of the stage before",
    "L is a natural logarithm",
    "L of another column",
    "P is handed over before it is there",
    "a row of dO too many is read",
    "a sum is stored",
    "a tile is loaded into the stage in use",
    "all partners meet at one barrier",
    "all warps add to the same columns",
    "an addition that releases nothing",
    "dK without the scale",
    "half of the sums are cleared",
    "mask at the end of the keys off by one",
    "query heads of another key head",
    "ragged keys are stored",
    "ragged rows leave",
    "ragged tiles are not masked",
    "rows are overwritten before they have left",
    "split: dK without the scale",
    "sums of dV are not cleared",
    "swizzle on one side only",
    "the gradient of L is added",
    "the group's next head is the same",
    "tiles are walked the wrong way",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MUTATIONS]
)
def test_mutation_is_caught(caught_by_backward_gate, name: str) -> None:
    old, new, expected, spec, config, kernel = MUTATIONS[name]
    caught, text = caught_by_backward_gate(spec, config, kernel, old, new)
    assert caught in expected, text


def test_a_last_section_that_is_not_smaller(mutate) -> None:
    """Of three heads two are in the first section; both have two blocks of keys."""

    def run() -> None:
        generator = torch.Generator().manual_seed(1)
        q, k, v, do = (torch.randn(1, 33, 3, 64, generator=generator).bfloat16() for _ in range(4))
        spec = dataclasses.replace(FULL, gqa_ratio=1)
        out, lse = attention_forward(q, k, v, causal=False)
        grads = run_backward(spec, PLAIN, q, k, v, out.bfloat16(), lse.float(), do, softmax_scale=0.125)[:3]
        report = check_backward(grads, q, k, v, do, causal=False)
        assert report.passed, report.text

    run()
    mutate("min_i32(p.heads_per_section, p.batch * num_heads - first_head)", "p.heads_per_section")
    with pytest.raises(EmulatorError) as caught:
        run()
    assert caught.value.name in {"global-two-writers", "global-not-written", *STRAY}
