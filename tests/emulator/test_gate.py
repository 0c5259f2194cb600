"""A covering set of kernels passes the quick gate in the emulator."""

from __future__ import annotations

import itertools
import math

import pytest
from torch import Tensor

from fa2gen.constraints import default_config, infeasible_reason
from fa2gen.emulator.forward import run_forward
from fa2gen.gate import forward_cases, run_gate
from fa2gen.hardware import arch_limits
from fa2gen.spec import (
    ALIGNMENTS,
    DTYPES,
    NATIVE_HEAD_DIMS,
    PIPELINES,
    PROOFS,
    SOFTMAXES,
    FwdConfig,
    KernelSpec,
)

SLOW = pytest.mark.slow
# Head dim, dtype, mask, query heads per key/value head, alignment; config, or none for the default one.
KERNELS = [
    (128, "bf16", "full", 1, 16, "64x64s64_w4_st2_qs_online_mb1"),
    (128, "bf16", "causal", 1, 16, "128x64s32_w8_st2_qs_guarded_mb1_pb_ring_wn2"),
    (128, "bf16", "causal", 7, 16, "64x64s64_w4_st2_qs_guarded_mb1_pb_pack"),
    (64, "bf16", "full", 1, 16, "128x64s64_w4_st3_qr_guarded_mb1_pb"),
    (64, "bf16", "full", 1, 16, "64x64s64_w2_st1_qs_guarded_mb1_pb"),
    (64, "bf16", "causal", 1, 2, "64x64s64_w4_st3_qs_guarded_mb1_ring"),
    (64, "fp16", "causal", 3, 2, "32x32s32_w2_st2_qs_online_mb1_pack"),
    (64, "fp16", "causal", 2, 16, None),
    (32, "bf16", "causal", 1, 16, "64x64s64_w2_st3_qr_guarded_mb1_pb_ring"),
    (96, "bf16", "full", 5, 16, "64x64s32_w4_st2_qs_guarded_mb1_pb_ring_pack"),
    (192, "fp16", "causal", 1, 16, None),
    (256, "bf16", "causal", 1, 16, "64x64s64_w4_st2_qs_guarded_mb1_pb_ring_wn2"),
    (256, "fp16", "full", 3, 16, "64x32s32_w4_st3_qs_guarded_mb1_wn2_pack"),
    # Predicated: one 16-byte chunk, a whole panel of 32 columns and a part of one, half of the last of 64.
    (8, "fp16", "full", 1, 16, None),
    (72, "bf16", "causal", 1, 16, None),
    (224, "bf16", "causal", 1, 16, "64x32s32_w4_st2_qs_guarded_mb1_pb_wn2"),
    (83, "bf16", "causal", 1, 2, "64x64s64_w2_st1_qs_online_mb2"),
    (250, "fp16", "full", 1, 2, None),
    # Fast ones of the tables, whose blocks are large, and what else may meet.
    pytest.param(128, "bf16", "full", 1, 16, "256x64s64_w8_st2_qs_guarded_mb1_pb_ring", marks=SLOW),
    pytest.param(256, "bf16", "full", 1, 16, "128x64s64_w8_st2_qs_guarded_mb1_ring_wn2", marks=SLOW),
    pytest.param(136, "bf16", "full", 1, 16, "64x32s32_w4_st3_qr_online_mb1_ring", marks=SLOW),
    pytest.param(192, "bf16", "full", 4, 16, "64x64s32_w4_st2_qs_guarded_mb1_pb_pack", marks=SLOW),
    pytest.param(104, "bf16", "full", 1, 16, "64x64s64_w4_st2_qs_guarded_mb1_pb_ring_wn2", marks=SLOW),
    pytest.param(256, "bf16", "full", 8, 2, "64x32s32_w4_st2_qs_online_mb1_ring_wn2_pack", marks=SLOW),
    pytest.param(40, "bf16", "full", 1, 2, "64x64s32_w4_st2_qs_guarded_mb1_pb", marks=SLOW),
    pytest.param(96, "fp16", "causal", 2, 2, "64x64s64_w4_st1_qr_guarded_mb1_pack", marks=SLOW),
    pytest.param(32, "fp16", "full", 16, 16, "128x64s64_w4_st2_qs_guarded_mb1_ring_pack", marks=SLOW),
]


def _kernel(row: tuple) -> tuple[KernelSpec, FwdConfig]:
    head_dim, dtype, mask, gqa_ratio, alignment, slug = row
    spec = KernelSpec(head_dim=head_dim, dtype=dtype, causal=mask == "causal", gqa_ratio=gqa_ratio, alignment=alignment)
    return spec, default_config(spec) if slug is None else FwdConfig.from_slug(f"sm80_{slug}")


def test_the_set_covers_every_choice() -> None:
    """Each value at least once without the slow ones, and each pair of the schedule's choices with them."""
    fast = [_kernel(row) for row in KERNELS if isinstance(row, tuple) and not hasattr(row, "marks")]
    every = [_kernel(getattr(row, "values", row)) for row in KERNELS]
    for spec, config in every:
        assert infeasible_reason(spec, config, arch_limits((9, 0))) is None, (spec.slug(), config.slug())
    choices = {
        "native_head_dim": NATIVE_HEAD_DIMS,
        "dtype": DTYPES,
        "causal": (False, True),
        "alignment": ALIGNMENTS,
        "num_stages": (1, 2, 3),
        "q_in_regs": (False, True),
        "softmax": SOFTMAXES,
        "proof": PROOFS,
        "pipeline": PIPELINES,
        "warps_n": (1, 2),
        "pack_gqa": (False, True),
    }

    def values(kernels: list[tuple[KernelSpec, FwdConfig]], *names: str) -> set[tuple]:
        return {tuple(getattr(x, n) if hasattr(x, n) else getattr(y, n) for n in names) for x, y in kernels}

    for name, wanted in choices.items():
        assert values(fast, name) == {(value,) for value in wanted}, name
    levers = ("causal", "alignment", "num_stages", "softmax", "proof", "pipeline", "warps_n", "pack_gqa")
    impossible = {
        # A block's proof is the guarded softmax's; a ring and shared rows need two stages.
        ("softmax", "online", "proof", "block"),
        ("num_stages", 1, "pipeline", "ring"),
        ("num_stages", 1, "warps_n", 2),
    }
    for one, two in itertools.combinations(levers, 2):
        wanted_pairs = set(itertools.product(choices[one], choices[two]))
        missing = {(one, a, two, b) for a, b in wanted_pairs - values(every, one, two)} - impossible
        assert not missing


@pytest.mark.parametrize("row", [pytest.param(getattr(r, "values", r), marks=getattr(r, "marks", ())) for r in KERNELS])
def test_quick_gate(row: tuple) -> None:
    spec, config = _kernel(row)

    def run(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        out, lse, _ = run_forward(spec, config, q, k, v, softmax_scale=softmax_scale)
        return out, lse

    report = run_gate(spec, config, run, forward_cases(spec, config, budget="quick"))
    assert report.passed, report.text
    assert math.isfinite(report.worst)
