"""Seeded bugs in the kernel's text: each must be caught, the synchronisation ones by name."""

from __future__ import annotations

import dataclasses

import pytest

from fa2gen.codegen import KernelSource, render_kernel
from fa2gen.emulator import forward, run_forward
from fa2gen.errors import EmulatorError
from fa2gen.gate import GateReport, forward_cases, run_gate
from fa2gen.spec import FwdConfig, KernelSpec

NUMBERS = "wrong numbers"
# Two stages, tiles small enough that every case has several blocks and several softmax steps.
CONFIG = FwdConfig(block_m=64, block_n=64, step_n=32, num_warps=4, num_stages=2, softmax="guarded")
CAUSAL = KernelSpec(head_dim=64, dtype="bf16", causal=True, gqa_ratio=2)
# The causal limit of a row never exceeds seqlen_k, so only full attention depends on the mask of the ragged block.
FULL = dataclasses.replace(CAUSAL, causal=False)

# name: (text, replacement, what must be reported: any of these diagnostics, or wrong numbers)
MUTATIONS = {
    "no wait for K and V": (
        "cp_async_wait<kNumStages - 2>();\n    sync_threads();",
        "sync_threads();",
        {"cp-async-not-waited", "cp-async-overwrite"},
    ),
    "no barrier after the wait": (
        "sync_threads();  // K(i) and V(i)",
        "// K(i) and V(i)",
        {"shared-race-read-after-write", "shared-race-write-after-read", "shared-uninitialised-read"},
    ),
    "one warp skips a barrier": (
        "sync_threads();  // K(i) and V(i)",
        "if (warp != 3 || i != 1) sync_threads();  // K(i) and V(i)",
        {"deadlock", "barrier-site", "shared-race-read-after-write", "shared-race-write-after-read"},
    ),
    "load into the stage in use": (
        "const int next = stage == 0 ? kNumStages - 1 : stage - 1;",
        "const int next = stage;",
        {"cp-async-overwrite", "cp-async-not-waited", "shared-race-write-after-read", "shared-race-read-after-write"},
    ),
    "no commit in the loop": (
        "      load_v(next, false);\n    }\n    cp_async_commit();",
        "      load_v(next, false);\n    }",
        {"cp-async-not-waited", "cp-async-overwrite", "cp-async-left-at-exit"},
    ),
    "no sync_warp before O is stored": (
        "  sync_warp();\n  const i64 o_offset",
        "  const i64 o_offset",
        {"shared-race-read-after-write", "shared-uninitialised-read"},
    ),
    "ragged rows are loaded": (
        "if (first && last_rows < kBlockN)",
        "if (false)",
        {"global-out-of-view", "global-out-of-range", "global-uninitialised-read"},
    ),
    "rows beyond the end are stored": (
        "if (row >= num_rows || column",
        "if (column",
        {"global-out-of-view", "global-out-of-range", "global-two-writers"},
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
    "the last section of heads is not smaller": (
        "min_i32(p.heads_per_section, p.batch * p.num_heads - first_head)",
        "p.heads_per_section",
        {"global-out-of-range", "global-two-writers", "global-not-written", "global-out-of-view"},
    ),
    "one row of Q too many is loaded": (
        "p.q_row_stride, p.seqlen_q - row_0);",
        "p.q_row_stride, p.seqlen_q - row_0 + 1);",
        {"global-out-of-view", "global-out-of-range"},
    ),
    "tiles are walked the wrong way": (
        "from.plus_bytes(-tile_bytes)",
        "from.plus_bytes(tile_bytes)",
        {"global-out-of-view", "global-out-of-range"},
    ),
    "LSE of another row": (
        "* p.seqlen_q + warp_row + row), lse)",
        "* p.seqlen_q + warp_row + (row ^ 1)), lse)",
        {"global-two-writers", "global-out-of-range", NUMBERS},
    ),
    "a warp is idle one key too long": (
        "warp_row + kWarpRows - 1 + diagonal));",
        "warp_row + kWarpRows - 2 + diagonal));",
        {NUMBERS},
    ),
    "only the upper rows are guarded": (
        "step_sum[i][0] < softmax.guard_limit && step_sum[i][1] < softmax.guard_limit",
        "step_sum[i][0] < softmax.guard_limit",
        {NUMBERS},
    ),
    "only the lower rows are guarded": (
        "step_sum[i][0] < softmax.guard_limit && step_sum[i][1] < softmax.guard_limit",
        "step_sum[i][1] < softmax.guard_limit",
        {NUMBERS},
    ),
    "only one lane is asked": (
        "if (!all_lanes(proved)) return false;",
        "if (!any_lane(proved)) return false;",
        {NUMBERS},
    ),
    "large references are guarded": (
        "softmax.guard_limit = large ? -1.f : kGuardLimit;",
        "softmax.guard_limit = kGuardLimit;",
        {NUMBERS},
    ),
    "a repair keeps the weights that failed": (
        "still in shared memory\n      gemm_qk(acc_s, frag_q, lane_q, lane_k);",
        "still in shared memory",
        {NUMBERS},
    ),
    "blocks are whole too early": (
        "min_i32(blocks.whole, first_end / kBlockN)",
        "min_i32(blocks.whole, (first_end + kBlockN - 1) / kBlockN)",
        {NUMBERS},
    ),
    "the quad's sum is a half": (
        "return v + shfl_xor(v, 2);\n}\n\nFUNC void clear",
        "return v;\n}\n\nFUNC void clear",
        {NUMBERS},
    ),
    "a row without keys divides by 0": ("sum == 0.f ? 0.f : rcp(sum)", "rcp(sum)", {NUMBERS}),
    "a row without keys has no reference": ("new_max == neg_inf() ? 0.f : new_max", "new_max", {NUMBERS}),
    "causal mask off by one": ("lane / 4 + diagonal + 1);", "lane / 4 + diagonal + 2);", {NUMBERS}),
    "mask at the end of the keys off by one": ("int end = seqlen_k;", "int end = seqlen_k + 1;", {NUMBERS}),
    "last visible block is skipped": (
        "(last_end + kBlockN - 1) / kBlockN);",
        "last_end / kBlockN);",
        {NUMBERS},
    ),
    "O is not rescaled": ("  rescale_output(acc_o, alpha);\n", "", {NUMBERS}),
    "the sum is not rescaled": ("      softmax.row_sum[i][r] *= alpha[i][r];\n", "", {NUMBERS}),
    "the guard never fires": ("  if (!all_lanes(proved)) return false;\n", "", {NUMBERS}),
    "swizzle on one side only": (
        "return tile + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);",
        "return tile + swizzled(lane % 8 + lane / 16 * 8, 1 - lane / 8 % 2);",
        {NUMBERS},
    ),
    "query heads read the wrong key head": (
        "const int head_k = work.head / kGqaRatio;",
        "const int head_k = work.head % (p.num_heads / kGqaRatio);",
        {NUMBERS},
    ),
    "LSE in a slightly wrong base": (
        "constexpr float kLn2 = 0.69314718f;",
        "constexpr float kLn2 = 0.6933f;",
        {NUMBERS},
    ),
    "large references use the fused formula": (
        "constexpr float kLargeReference = 2048.f;",
        "constexpr float kLargeReference = 1e30f;",
        {NUMBERS},
    ),
}


ONE_STAGE = FwdConfig(block_m=64, block_n=64, step_n=64, num_warps=4, num_stages=1, softmax="guarded")
RING = FwdConfig(block_m=64, block_n=64, step_n=32, num_warps=4, num_stages=3, q_in_regs=True, softmax="online")
UNALIGNED = dataclasses.replace(CAUSAL, head_dim=59, alignment=2)
# Nine chunks of 16 bytes in three panels of four: the products read a tenth, which is zero.
PREDICATED = dataclasses.replace(CAUSAL, head_dim=72)
RACES = {"shared-race-read-after-write", "shared-race-write-after-read", "shared-uninitialised-read"}
NOT_WAITED = {"cp-async-not-waited", "cp-async-overwrite"}

# What the other schedules and the other way of loading depend on: (spec, config, text, replacement, diagnostics)
OTHER_MUTATIONS = {
    "one stage: no barrier before V is replaced": (
        CAUSAL,
        ONE_STAGE,
        "sync_threads();  // K(i) is visible to",
        "// K(i) is visible to",
        RACES,
    ),
    "one stage: no barrier before K is replaced": (
        CAUSAL,
        ONE_STAGE,
        "sync_threads();  // V(i) is visible",
        "// V(i) is visible",
        RACES,
    ),
    "one stage: no wait for K": (
        CAUSAL,
        ONE_STAGE,
        "cp_async_wait<0>();\n    sync_threads();  // K",
        "sync_threads();  // K",
        NOT_WAITED | RACES,
    ),
    "one stage: no wait for V": (
        CAUSAL,
        ONE_STAGE,
        "cp_async_wait<0>();\n      sync_threads();  // V",
        "sync_threads();  // V",
        NOT_WAITED | RACES,
    ),
    "one stage: an idle warp skips the barrier": (
        CAUSAL,
        ONE_STAGE,
        "sync_threads();  // V",
        "if (active) sync_threads();  // V",
        {"deadlock", "barrier-site"} | RACES,
    ),
    "Q in registers: no sync_warp": (CAUSAL, RING, "  sync_warp();\n  if (blocks", "  if (blocks", RACES),
    "Q in registers: a wait too weak": (
        CAUSAL,
        RING,
        "cp_async_wait<kNumStages - 2>();\n  sync_warp();",
        "cp_async_wait<kNumStages - 1>();\n  sync_warp();",
        NOT_WAITED,
    ),
    "the ring skips a stage": (
        CAUSAL,
        RING,
        "stage + 1 == kNumStages ? 0 : stage + 1",
        "stage ? 0 : 2",
        NOT_WAITED | RACES,
    ),
    "no commit before the loop": (
        CAUSAL,
        RING,
        "      load_v(stage, false);\n    }\n    cp_async_commit();",
        "      load_v(stage, false);\n    }",
        NOT_WAITED,
    ),
    "predicated: the chunk beyond the row is read": (
        PREDICATED,
        CONFIG,
        "valid && (kHeadDim == kHeadDimPadded || chunk * 8 < kHeadDim)",
        "valid",
        {"global-out-of-view", "global-out-of-range"},
    ),
    "predicated: the chunk beyond the row is not zeroed": (
        PREDICATED,
        CONFIG,
        "if (chunk >= kChunks) return;",
        "if (chunk * 8 >= kHeadDim) return;",
        {"shared-uninitialised-read"},
    ),
    "elements: no barrier": (UNALIGNED, CONFIG, "sync_threads();  // K(i) and", "// K(i) and", RACES),
    "elements: one column too many is read": (
        UNALIGNED,
        CONFIG,
        "valid && column + 1 < kHeadDim",
        "valid",
        {"global-out-of-view", "global-out-of-range"},
    ),
    "elements: columns beyond the row are stored": (
        UNALIGNED,
        CONFIG,
        "if (column + e < kHeadDim) st_global",
        "st_global",
        {"global-two-writers", "global-out-of-view"},
    ),
}


def _gate(
    monkeypatch: pytest.MonkeyPatch, spec: KernelSpec, mutate: tuple[str, str] | None, config: FwdConfig = CONFIG
) -> GateReport:
    def render(spec: KernelSpec, config: FwdConfig, platform: str) -> KernelSource:
        source = render_kernel(spec, config, platform)
        if mutate is None:
            return source
        old, new = mutate
        assert source.text.count(old) == 1, f"{source.text.count(old)} places read {old!r}"
        return dataclasses.replace(source, text=source.text.replace(old, new))

    monkeypatch.setattr(forward, "render_kernel", render)

    def runner(q, k, v, softmax_scale):
        out, lse, _ = run_forward(spec, config, q, k, v, softmax_scale=softmax_scale)
        return out, lse

    return run_gate(spec, config, runner, forward_cases(spec, config, budget="quick"))


@pytest.mark.parametrize("spec", [CAUSAL, FULL], ids=lambda spec: spec.slug())
def test_the_kernel_passes(monkeypatch, spec):
    report = _gate(monkeypatch, spec, None)
    assert report.passed, report.text


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(monkeypatch, name):
    old, new, expected = MUTATIONS[name]
    spec = FULL if name == "mask at the end of the keys off by one" else CAUSAL
    try:
        report = _gate(monkeypatch, spec, (old, new))
        caught, text = None if report.passed else NUMBERS, report.text
    except EmulatorError as error:
        caught, text = error.name, str(error)
    assert caught in expected, text


@pytest.mark.parametrize("name", OTHER_MUTATIONS)
def test_mutation_of_another_schedule_is_named(monkeypatch, name):
    spec, config, old, new, expected = OTHER_MUTATIONS[name]
    with pytest.raises(EmulatorError) as caught:
        _gate(monkeypatch, spec, (old, new), config)
    assert caught.value.name in expected, str(caught.value)
