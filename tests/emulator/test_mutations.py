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
        "cp_async_wait<kNumStages - 2>();\n      sync_threads();",
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
        "        load_v(next, false);\n      }\n      cp_async_commit();",
        "        load_v(next, false);\n      }",
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
        "return tile + swizzled(threadIdx.x / 8, threadIdx.x % 8);",
        "return tile + swizzled(threadIdx.x / 8, threadIdx.x % 8) + 8;",
        {"shared-misaligned"},
    ),
    "causal mask off by one": ("lane / 4 + diagonal + 1);", "lane / 4 + diagonal + 2);", {NUMBERS}),
    "mask at the end of the keys off by one": ("int end = seqlen_k;", "int end = seqlen_k + 1;", {NUMBERS}),
    "last visible block is skipped": (
        "(last_end + kBlockN - 1) / kBlockN);",
        "last_end / kBlockN);",
        {NUMBERS},
    ),
    "O is not rescaled": ("  rescale_output(acc_o, alpha);\n", "", {NUMBERS}),
    "the sum is not rescaled": ("      rows.sum[i][r] *= alpha[i][r];\n", "", {NUMBERS}),
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
    "LSE in a slightly wrong base": ("lg2(sum) * 0.69314718f", "lg2(sum) * 0.6933f", {NUMBERS}),
    "large references use the fused formula": (
        "constexpr float kLargeReference = 2048.f;",
        "constexpr float kLargeReference = 1e30f;",
        {NUMBERS},
    ),
}


def _gate(monkeypatch: pytest.MonkeyPatch, spec: KernelSpec, mutate: tuple[str, str] | None) -> GateReport:
    def render(spec: KernelSpec, config: FwdConfig, platform: str) -> KernelSource:
        source = render_kernel(spec, config, platform)
        if mutate is None:
            return source
        old, new = mutate
        assert source.text.count(old) == 1, f"{source.text.count(old)} places read {old!r}"
        return dataclasses.replace(source, text=source.text.replace(old, new))

    monkeypatch.setattr(forward, "render_kernel", render)

    def runner(q, k, v, softmax_scale):
        out, lse, _ = run_forward(spec, CONFIG, q, k, v, softmax_scale=softmax_scale)
        return out, lse

    return run_gate(spec, CONFIG, runner, forward_cases(spec, CONFIG, budget="quick"))


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
