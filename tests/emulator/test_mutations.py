"""Seeded bugs in the kernel's text: each must be caught, the synchronisation ones by name.

Here those of every kernel; test_mutations_of_levers.py has those of what a config may choose.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa2gen.emulator import run_forward
from fa2gen.gate import check_forward, forward_cases, run_gate
from fa2gen.spec import FwdConfig, KernelSpec

NUMBERS = "wrong numbers"
RACES = {"shared-race-read-after-write", "shared-race-write-after-read", "shared-uninitialised-read"}
NOT_WAITED = {"cp-async-not-waited", "cp-async-overwrite"}
STRAY = {"global-out-of-view", "global-out-of-range"}
# Two stages, tiles small enough that every case has several blocks and several softmax steps.
CONFIG = FwdConfig(block_m=64, block_n=64, step_n=32, num_warps=4, num_stages=2, softmax="guarded")
CAUSAL = KernelSpec(head_dim=64, dtype="bf16", causal=True, gqa_ratio=2)
# The causal limit of a row never exceeds seqlen_k, so only full attention depends on the mask of the ragged block.
FULL = dataclasses.replace(CAUSAL, causal=False)
# One of the gate's cases has three heads, which are two sections, and two query blocks.
ONE_HEAD = dataclasses.replace(FULL, gqa_ratio=1)
SPECS = {
    "mask at the end of the keys off by one": FULL,
    "the last section of heads is not smaller": ONE_HEAD,
    "large references of the first step are guarded": FULL,
}
ALL_ROWS_GUARDED = "step_sum[i][0] < softmax.guard_limit && step_sum[i][1] < softmax.guard_limit"

# name: (text, replacement, what must be reported: any of these diagnostics, or wrong numbers)
MUTATIONS = {
    "no wait for K and V": (
        "cp_async_wait<kGroupsPending>();\n  sync_threads();",
        "sync_threads();",
        NOT_WAITED,
    ),
    "no barrier after the wait": ("sync_threads();  // the tile is visible", "// the tile is visible", RACES),
    "one warp skips a barrier": (
        "sync_threads();  // the tile is visible",
        "if (threadIdx.x / 32 != 3 || i != 1) sync_threads();  // the tile is visible",
        {"deadlock", "barrier-site", *RACES},
    ),
    "load into the stage in use": (
        "const int next = tiles.stage == 0 ? kNumStages - 1 : tiles.stage - 1;",
        "const int next = tiles.stage;",
        NOT_WAITED | RACES,
    ),
    "no commit in the loop": (
        "    load_v(tiles, next, false, p);\n  }\n  cp_async_commit();",
        "    load_v(tiles, next, false, p);\n  }",
        {"cp-async-left-at-exit", *NOT_WAITED},
    ),
    "no sync_warp before O is stored": ("  sync_warp();\n  store_o_rows", "  store_o_rows", RACES),
    "ragged rows of K are loaded": (
        "if (first && tiles.first_rows < kBlockN)\n    load_tile<kBlockN, true>(to, tiles.k",
        "if (false)\n    load_tile<kBlockN, true>(to, tiles.k",
        {"global-uninitialised-read", *STRAY},
    ),
    "ragged rows of V are loaded": (
        "if (first && tiles.first_rows < kBlockN)\n    load_tile<kBlockN, true>(to, tiles.v",
        "if (false)\n    load_tile<kBlockN, true>(to, tiles.v",
        {"global-uninitialised-read", *STRAY},
    ),
    "rows beyond the end are stored": (
        "if (row_0 + row >= num_rows || column",
        "if (column",
        {"global-two-writers", *STRAY},
    ),
    "a collective in a lane's branch": (
        "v = max_f32(v, shfl_xor(v, 1));",
        "if (threadIdx.x % 32 < 16) v = max_f32(v, shfl_xor(v, 1));",
        {"warp-divergence", "deadlock"},
    ),
    "misaligned copy": (
        "return tile + swizzled(threadIdx.x / kPanelChunks, threadIdx.x % kPanelChunks);",
        "return tile + swizzled(threadIdx.x / kPanelChunks, threadIdx.x % kPanelChunks) + 8;",
        {"shared-misaligned"},
    ),
    "one row of Q too many is loaded": (
        "const bool valid = row_0 + row < num_rows;",
        "const bool valid = row_0 + row <= num_rows;",
        STRAY,
    ),
    "tiles are walked the wrong way": (
        "tiles.k = tiles.k.plus_bytes(-p.k_tile_bytes)",
        "tiles.k = tiles.k.plus_bytes(p.k_tile_bytes)",
        STRAY,
    ),
    # The schedule.
    "the last section of heads is not smaller": (
        "min_i32(p.heads_per_section, heads_in_all - first_head)",
        "p.heads_per_section",
        {"global-two-writers", "global-not-written", *STRAY},
    ),
    "sections overlap": (
        "first_head = id / section_tiles * p.heads_per_section",
        "first_head = 0",
        {"global-two-writers"},
    ),
    "the tail begins with the last block": (
        "m_blocks = p.tail_m_blocks;",
        "m_blocks = p.num_m_blocks;",
        {"global-two-writers", "global-not-written"},
    ),
    "the tail counts the tiles before it": ("    id -= long_tiles;\n", "", {"global-two-writers", *STRAY}),
    # Which keys.
    "LSE of another row": (
        "query_of(warp.row + row)), lse)",
        "query_of(warp.row + (row ^ 1))), lse)",
        {"global-two-writers", "global-out-of-range", NUMBERS},
    ),
    "a warp is idle one key too long": (
        "query_of(warp.row + kWarpRows - 1) + 1 + diagonal",
        "query_of(warp.row + kWarpRows - 1) + diagonal",
        {NUMBERS},
    ),
    "causal mask off by one": ("lane / 4) + diagonal + 1);", "lane / 4) + diagonal + 2);", {NUMBERS}),
    "mask at the end of the keys off by one": ("int end = seqlen_k;", "int end = seqlen_k + 1;", {NUMBERS}),
    "last visible block is skipped": ("(last_end + kBlockN - 1) / kBlockN);", "last_end / kBlockN);", {NUMBERS}),
    "query heads read the wrong key head": (
        "const int head_k = head_q / kGqaRatio;",
        "const int head_k = head_q % (p.num_heads / kGqaRatio);",
        {NUMBERS},
    ),
    "swizzle on one side only": (
        "return tile + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);",
        "return tile + swizzled(lane % 8 + lane / 16 * 8, 1 - lane / 8 % 2);",
        {NUMBERS},
    ),
    # Softmax.
    "a lane's own maximum": ("      step_max[i][r] = quad_max(step_max[i][r]);\n", "", {NUMBERS}),
    "the quad's sum is a half": ("return v + shfl_xor(v, 2);", "return v;", {NUMBERS}),
    "a row without keys divides by 0": ("sum == 0.f ? 0.f : rcp(sum)", "rcp(sum)", {NUMBERS}),
    "a row without keys has no reference": ("new_max == neg_inf() ? 0.f : new_max", "new_max", {NUMBERS}),
    "O is not rescaled": ("  rescale_output(acc_o, alpha);\n", "", {NUMBERS}),
    "the sum is not rescaled": ("      softmax.row_sum[i][r] *= alpha[i][r];\n", "", {NUMBERS}),
    "LSE in a slightly wrong base": ("float kLn2 = 0.69314718f;", "float kLn2 = 0.6933f;", {NUMBERS}),
    "large references use the fused formula": (
        "constexpr float kLargeReference = 2048.f;",
        "constexpr float kLargeReference = 1e30f;",
        {NUMBERS},
    ),
    # The guard.
    "only the upper rows are guarded": (ALL_ROWS_GUARDED, "step_sum[i][0] < softmax.guard_limit", {NUMBERS}),
    "only the lower rows are guarded": (ALL_ROWS_GUARDED, "step_sum[i][1] < softmax.guard_limit", {NUMBERS}),
    "only one lane is asked": ("proved = all_lanes(proved);", "proved = any_lane(proved);", {NUMBERS}),
    "the guard never fires": ("proved = is_step_proved(warp.softmax, step_sum);", "proved = true;", {NUMBERS}),
    "large references are guarded": (
        "softmax.guard_limit = large ? -1.f : kGuardLimit;",
        "softmax.guard_limit = kGuardLimit;",
        {NUMBERS},
    ),
    "large references of the first step are guarded": (
        "  softmax.guard_limit = any_lane(large) ? -1.f : kGuardLimit;\n",
        "",
        {NUMBERS},
    ),
    "a repair keeps the weights that failed": (
        "still in shared memory.\n      gemm_qk(acc_s, warp.lane_q, warp.lane_k + offset);",
        "still in shared memory.",
        {NUMBERS},
    ),
    "a repair counts the sums that failed": (
        "    if (proved) add_step_sum(warp.softmax, step_sum);",
        "    add_step_sum(warp.softmax, step_sum);",
        {NUMBERS},
    ),
}
# Not here, because any outcome is right: the factor of a row that has nothing to rescale yet (O and l are 0), and
# which tiles a section of the schedule takes from the tail.

# Of the guarded softmax alone: a row without a reference has p = inf, so steps without the mask that they need are
# repaired. The numbers are right, and only the counter of repairs tells.
COUNTED = {
    "blocks are whole too early": ("max_i32(first_end - 1, 0) / kBlockN", "(first_end + kBlockN - 1) / kBlockN"),
    "blocks are whole without a key to their right": ("max_i32(first_end - 1, 0) / kBlockN", "first_end / kBlockN"),
    "steps are plain without a key to their right": ("column + kStepN < first_end;", "column + kStepN <= first_end;"),
    "steps are plain that the first row sees in part": ("column + kStepN < first_end;", "column < first_end;"),
}


@pytest.mark.parametrize("spec", [CAUSAL, FULL], ids=lambda spec: spec.slug())
def test_the_kernel_passes(spec):
    def runner(q, k, v, softmax_scale):
        return run_forward(spec, CONFIG, q, k, v, softmax_scale=softmax_scale)[:2]

    report = run_gate(spec, CONFIG, runner, forward_cases(spec, CONFIG, budget="quick"))
    assert report.passed, report.text


def _repairs() -> int:
    """Repairs on random data, where the first row of a block, or a warp, sees the last key of a tile, or of a step."""
    generator = torch.Generator().manual_seed(1)
    repairs = 0
    for seqlen_k in (159, 191):
        q = torch.randn(1, 128, 2, 64, generator=generator).bfloat16()
        k, v = (torch.randn(1, seqlen_k, 1, 64, generator=generator).bfloat16() for _ in range(2))
        out, lse, counters = run_forward(CAUSAL, CONFIG, q, k, v, softmax_scale=0.125)
        assert check_forward(out, lse, q, k, v, causal=True, softmax_scale=0.125).passed
        repairs += counters.repairs
    return repairs


def test_random_data_needs_no_repair():
    assert _repairs() == 0


@pytest.mark.parametrize("name", COUNTED)
def test_mutation_is_counted(mutate, name):
    mutate(*COUNTED[name])
    assert _repairs() > 0


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(caught_by_gate, name):
    old, new, expected = MUTATIONS[name]
    caught, text = caught_by_gate(SPECS.get(name, CAUSAL), CONFIG, old, new)
    assert caught in expected, text
