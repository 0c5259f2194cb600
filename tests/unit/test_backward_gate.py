"""The backward gate must pass a right kernel and fail every broken one; the broken ones are made from a right one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fa2gen import reference
from fa2gen.errors import ArgumentError
from fa2gen.gate import (
    GateCase,
    GateReport,
    backward_cases,
    check_backward,
    forward_cases,
    make_gradients,
    make_inputs,
    run_backward_gate,
)
from fa2gen.gate.roundoff import backward_roundoff
from fa2gen.problem import Problem
from fa2gen.reference import attention_backward, attention_forward
from fa2gen.spec import BwdConfig, FwdConfig, KernelSpec
from tests.backward_fakes import Faults, backward_kernel

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = BwdConfig(block_m=64, block_n=64, step_m=64)
Gradients = tuple[Tensor, Tensor, Tensor]

SPECS = [
    KernelSpec(kind="bwd", head_dim=8, dtype="bf16"),
    KernelSpec(kind="bwd", head_dim=40, dtype="fp16", causal=True, gqa_ratio=3),
    KernelSpec(kind="bwd", head_dim=64, dtype="bf16", causal=True),
    KernelSpec(kind="bwd", head_dim=128, dtype="fp16"),
    KernelSpec(kind="bwd", head_dim=256, dtype="bf16", causal=True, gqa_ratio=2),
]


def _gate(spec: KernelSpec, faults: Faults, budget: str = "quick") -> GateReport:
    return run_backward_gate(spec, CONFIG, backward_kernel(spec, faults), backward_cases(spec, CONFIG, budget=budget))


def _flushed(x: Tensor) -> Tensor:
    """Without numbers below float32's normal range, which a GPU's exponential and matrix units take as 0."""
    return torch.where(x.abs() < 2.0**-126, 0.0, x)


RIGHT = {
    "exact": Faults(),
    "dS of rounded P": Faults(ds_of_rounded_p=True),
    "flushed": Faults(p=_flushed, ds=_flushed),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.slug)
def test_a_right_kernel_passes(spec: KernelSpec, name: str) -> None:
    report = _gate(spec, RIGHT[name])
    assert report.passed, report.text
    # Far from the limit, so that another seed, order of sums or matrix unit does not fail by chance.
    assert 0.1 < report.worst < 0.7, report.text
    assert f"{len(backward_cases(spec, CONFIG, budget='quick'))} cases" in report.text


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.slug)
def test_a_right_kernel_passes_the_full_gate(spec: KernelSpec) -> None:
    report = _gate(spec, Faults(), "full")
    assert report.passed, report.text
    assert report.worst < 0.7, report.text


def _without_last_key_tile(visible: Tensor) -> Tensor:
    keep = visible.clone()
    if keep.shape[1] > 64:
        keep[:, (keep.shape[1] - 1) // 64 * 64 :] = False
    return keep


def _without_last_query_tile(visible: Tensor) -> Tensor:
    return _without_last_key_tile(visible.T).T


def _without(axis: int, at: int) -> Callable[[Tensor], Tensor]:
    def drop(visible: Tensor) -> Tensor:
        keep = visible.clone()
        keep.select(axis, min(at, keep.shape[axis] - 1)).fill_(False)
        return keep

    return drop


def _hole_in_dq(dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    dq = dq.clone()
    dq[-1, -16:, -1, :8] = 0.0
    return dq, dk, dv


def _nan_in_dk(dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    dk = dk.contiguous()
    dk.view(-1)[dk.numel() // 2] = math.nan
    return dq, dk, dv


def _keep_first_heads(group: int) -> slice:
    return slice(0, max(1, group - 1))


MUTANTS = {
    "no D": Faults(use_d=False),
    "no dLSE": Faults(use_dlse=False),
    "dropped last key tile": Faults(visible=_without_last_key_tile),
    "dropped last query tile": Faults(visible=_without_last_query_tile),
    "dropped key 37": Faults(visible=_without(1, 37)),
    "dropped row 37": Faults(visible=_without(0, 37)),
    "dq without scale": Faults(scale_dq=False),
    "dk without scale": Faults(scale_dk=False),
    "one head of a group dropped": Faults(heads=_keep_first_heads),
    "P not normalised": Faults(p=lambda p: p * 2.0),
    "P 2 % off": Faults(p=lambda p: p * 1.02),
    "a 16x8 tile of dq left out": Faults(finish=_hole_in_dq),
    "dk and dv swapped": Faults(finish=lambda dq, dk, dv: (dq, dv, dk)),
    "dq negated": Faults(finish=lambda dq, dk, dv: (-dq, dk, dv)),
    "NaN in one element of dk": Faults(finish=_nan_in_dk),
    "dq 5 % off": Faults(finish=lambda dq, dk, dv: (dq * 1.05, dk, dv)),
    "dk 5 % off": Faults(finish=lambda dq, dk, dv: (dq, dk * 1.05, dv)),
    "dv 5 % off": Faults(finish=lambda dq, dk, dv: (dq, dk, dv * 1.05)),
    "dq lacks the first 16 keys": Faults(ds=lambda ds: ds * (torch.arange(ds.shape[3]) >= 16)),
    "dk lacks the first 16 rows": Faults(ds=lambda ds: ds * (torch.arange(ds.shape[2]) >= 16).unsqueeze(1)),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bf16"), (40, "fp16"), pytest.param(256, "bf16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_fails(name: str, head_dim: int, dtype: str, causal: bool) -> None:
    spec = KernelSpec(kind="bwd", head_dim=head_dim, dtype=dtype, causal=causal, gqa_ratio=2)
    report = _gate(spec, MUTANTS[name])
    assert not report.passed
    assert spec.slug() in report.text
    assert any(f", {gradient} batch" in report.where for gradient in ("dq", "dk", "dv"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_off_by_one_fails(shift: int, dtype: str) -> None:
    spec = KernelSpec(kind="bwd", head_dim=128, dtype=dtype, causal=True)
    assert not _gate(spec, Faults(causal_shift=shift)).passed


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_limit_is_a_small_part_of_the_gradient(head_dim: int) -> None:
    """Over 1025 keys in bf16: sums of absolute values would allow half of dq."""
    spec = KernelSpec(kind="bwd", head_dim=head_dim, dtype="bf16")
    case = GateCase(Problem(1, 64, 1025, 1, 1), "normal", head_dim**-0.5)
    q, k, v = make_inputs(spec, case)
    do, _ = make_gradients(spec, case)
    for size, ref in zip(backward_roundoff(q, k, v, do), attention_backward(q, k, v, do), strict=True):
        share = 3 * size.amax(-1) / ref.abs().amax(-1)
        assert 0.005 < float(share.median()) < 0.02


def test_one_visible_key_leaves_dq_zero_but_for_float32() -> None:
    """dP - D is 0 in truth: a float32 sum in another order may leave 1e-6, and nothing may leave 0.1."""
    spec = KernelSpec(kind="bwd", head_dim=64, dtype="bf16")
    case = GateCase(Problem(1, 3, 1, 1, 1), "normal", 0.125)
    q, k, v = make_inputs(spec, case)
    do, _ = make_gradients(spec, case)
    # Integers: nothing that the plain formula rounds is off.
    v, do = v.round(), do.round()
    dq, dk, dv = attention_backward(q, k, v, do)
    assert not dq.any()
    assert not dk.any()
    for error, passes in ((1e-6, True), (0.1, False)):
        grads = [(x + error).bfloat16() for x in (dq, dk)]
        report = check_backward([*grads, dv.bfloat16()], q, k, v, do, causal=False)
        assert report.passed is passes, report.text


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_probabilities_below_float32_may_count_as_zero(dtype: str) -> None:
    """The last key's dV is made of P of about 2^-128 alone, in bf16 five bits above the smallest number."""
    spec = KernelSpec(kind="bwd", head_dim=32, dtype=dtype)
    case = GateCase(Problem(1, 17, 33, 1, 1), "cold_last", 0.05, 85.5, 1, grad_layout="expanded")
    for name in ("exact", "flushed"):
        report = run_backward_gate(spec, CONFIG, backward_kernel(spec, RIGHT[name]), [case])
        assert report.passed, report.text


@pytest.mark.parametrize(("score", "passes"), [(-87.0, True), (-80.0, False)])
def test_terms_below_float32_may_be_lost(score: float, passes: bool) -> None:
    """Eight heads add e^score dO to a row of dv. e^-87 = 1.4 * 2^-126: where |dO| is smaller, so is the term."""
    q = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16)
    q[..., 0] = 1
    k, v = torch.zeros(2, 1, 2, 1, 8, dtype=torch.bfloat16)
    k[0, 1, 0, 0] = score
    do = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    grads = attention_backward(q, k, v, do, causal=False, softmax_scale=1.0)
    terms = math.exp(score) * do[0, 0].double()
    grads[2][0, 1, 0] = torch.where(terms.abs() < 2.0**-126 * math.exp(score + 87), 0.0, terms).sum(0)
    report = check_backward([x.bfloat16() for x in grads], q, k, v, do, causal=False, softmax_scale=1.0)
    assert report.passed is passes, report.text


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_large_logits_are_judged_by_what_float32_knows(dtype: str) -> None:
    """|LSE| of about 1e4 in fp16 and 1e5 in bf16: a float32 exponent is off by up to 1 %, not by 25 %."""
    spec = KernelSpec(kind="bwd", head_dim=128, dtype=dtype)
    cases = [case for case in backward_cases(spec, CONFIG, budget="full") if case.amount >= 4e3]
    assert len(cases) >= 3
    for case in cases:
        q, k, v = make_inputs(spec, case)
        _, lse = attention_forward(q, k, v, softmax_scale=case.softmax_scale)
        assert (1e4 if dtype == "fp16" else 7e4) < float(lse.abs().max()) < 3e5
        right, wrong = backward_kernel(spec), backward_kernel(spec, Faults(p=lambda p: p * 1.25))
        assert run_backward_gate(spec, CONFIG, right, [case]).passed
        assert not run_backward_gate(spec, CONFIG, wrong, [case]).passed


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "do", "dlse"])
def test_a_kernel_that_writes_its_inputs_fails(name: str) -> None:
    spec = KernelSpec(kind="bwd", head_dim=64)
    right = backward_kernel(spec)

    def run(*arguments: Tensor) -> Gradients:
        grads = right(*arguments)
        named = dict(zip(("q", "k", "v", "out", "lse", "do", "dlse"), arguments, strict=False))
        named[name].select(-1, 0).select(-1, 0).fill_(7.0)
        return grads

    report = run_backward_gate(spec, CONFIG, run, [GateCase(Problem(1, 5, 7, 1, 1), "normal", 0.125, dlse=True)])
    assert not report.passed
    assert "changed an input" in report.text


def test_out_and_lse_are_those_of_the_reference() -> None:
    spec = KernelSpec(kind="bwd", head_dim=64, dtype="fp16", causal=True)
    case = GateCase(Problem(2, 9, 7, 3, 3), "normal", 0.2, layout="padded")
    seen: list[Tensor] = []

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, scale: float
    ) -> Gradients:
        seen.extend((out, lse))
        assert dlse is None
        return backward_kernel(spec)(q, k, v, out, lse, do, dlse, scale)

    assert run_backward_gate(spec, CONFIG, run, [case]).passed
    q, k, v = make_inputs(spec, case)
    ref, ref_lse = attention_forward(q, k, v, causal=True, softmax_scale=0.2)
    assert torch.equal(seen[0], ref.half())
    assert seen[0].stride() == q.stride()
    assert torch.equal(seen[1], ref_lse.float())
    assert (seen[1] == -math.inf).any()


def test_wrong_shapes_and_dtypes_fail() -> None:
    spec = KernelSpec(kind="bwd", head_dim=64)
    case = GateCase(Problem(1, 5, 7, 2, 2), "normal", 0.125)
    q, k, v = make_inputs(spec, case)
    do, _ = make_gradients(spec, case)
    good = [x.bfloat16() for x in attention_backward(q, k, v, do)]
    assert check_backward(good, q, k, v, do, causal=False).passed
    for at, name in enumerate(("dq", "dk", "dv")):
        for bad in (good[at].float(), good[at][:, :4], good[at].transpose(1, 2)):
            grads = [bad if i == at else x for i, x in enumerate(good)]
            report = check_backward(grads, q, k, v, do, causal=False)
            assert not report.passed
            assert name in report.text


@pytest.mark.parametrize("chunk", [reference.MAX_CHUNK_ELEMENTS, 1000])
@pytest.mark.parametrize(
    ("at", "position", "where"),
    [
        (0, (1, 4, 5, 63), "dq batch 1 row 4 head 5"),
        (1, (2, 6, 2, 0), "dk batch 2 row 6 head 2"),
        (2, (0, 0, 1, 7), "dv batch 0 row 0 head 1"),
    ],
)
def test_the_report_says_where(
    at: int, position: tuple[int, ...], where: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", chunk)
    spec = KernelSpec(kind="bwd", head_dim=64, gqa_ratio=2)
    case = GateCase(Problem(3, 5, 7, 6, 3), "normal", 0.125, dlse=True)
    q, k, v = make_inputs(spec, case)
    do, dlse = make_gradients(spec, case)
    grads = [x.bfloat16() for x in attention_backward(q, k, v, do, dlse=dlse)]
    right = check_backward(grads, q, k, v, do, causal=False, dlse=dlse)
    assert right.passed
    assert all(f"{name} " in right.text for name in ("dq", "dk", "dv"))
    for wrong in (float(grads[at][position]) + 1.0, math.nan):
        grads[at][position] = wrong
        report = check_backward(grads, q, k, v, do, causal=False, dlse=dlse)
        assert not report.passed
        assert report.where == where
        assert report.worst == math.inf or not math.isnan(wrong)


def test_no_case_is_no_pass() -> None:
    spec = KernelSpec(kind="bwd", head_dim=64)
    assert not run_backward_gate(spec, CONFIG, backward_kernel(spec), []).passed


def test_visible_nan_never_passes() -> None:
    spec = KernelSpec(kind="bwd", head_dim=64)
    case = GateCase(Problem(1, 5, 7, 1, 1), "normal", 0.125)
    q, k, v = make_inputs(spec, case)
    do, _ = make_gradients(spec, case)
    k[0, 0, 0, 0] = math.nan
    grads = [x.bfloat16() for x in attention_backward(q, k, v, do)]
    assert grads[0].isnan().all()
    assert not check_backward(grads, q, k, v, do, causal=False).passed


@pytest.mark.parametrize("config", [CONFIG, BwdConfig(block_m=128, block_n=128), BwdConfig(block_m=32, block_n=96)])
@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.slug)
def test_cases_are_what_they_say(spec: KernelSpec, config: BwdConfig) -> None:
    quick, full = (backward_cases(spec, config, budget=budget) for budget in ("quick", "full"))
    assert full[: len(quick)] == quick
    assert len(quick) < 30
    assert 90 < len(full) < 150
    assert len({case.label() for case in full}) > 0.9 * len(full)
    assert len({case.seed for case in full}) == len(full)
    for cases in (quick, full):
        assert {case.layout for case in cases} == {"contiguous", "padded", "heads_first"}
        assert {case.grad_layout for case in cases} == {
            *("contiguous", "padded", "heads_first", "broadcast_row", "expanded")
        }
        assert {case.dlse for case in cases} == {False, True}
        assert 0.0 in {case.softmax_scale for case in cases}
    problems = [case.problem for case in full]
    assert all(p.batch and p.seqlen_q and p.seqlen_k and p.num_heads_q for p in problems)
    rows, keys = {p.seqlen_q for p in problems}, {p.seqlen_k for p in problems}
    assert {1, 113, 1025, *(config.block_m + i for i in (-1, 0, 1)), 15, 16, 17} <= rows
    assert {1, 203, 1025, *(config.block_n + i for i in (-1, 0, 1)), 16, 17} <= keys
    assert any(p.seqlen_q > p.seqlen_k > config.block_n for p in problems)


@pytest.mark.parametrize("spec", SPECS[:2], ids=KernelSpec.slug)
def test_inputs_are_what_they_say(spec: KernelSpec) -> None:
    for case in backward_cases(spec, CONFIG, budget="full")[:60]:
        p = case.problem
        q, k, v = make_inputs(spec, case)
        do, dlse = make_gradients(spec, case)
        assert do.shape == q.shape
        assert do.dtype == q.dtype
        assert do.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in do.stride()[:3])
        assert torch.isfinite(do).all()
        assert not torch.equal(do, q)
        strides = [stride for stride, extent in zip(do.stride()[:3], do.shape, strict=False) if extent > 1]
        if case.grad_layout == "expanded":
            assert not any(strides)
        elif case.grad_layout == "broadcast_row":
            assert do.stride(1) == 0
            assert p.num_heads_q == 1 or do.stride(2) > 0
        elif case.grad_layout != "contiguous":
            assert torch.as_strided(do, (do.untyped_storage().nbytes() // 2,), (1,), 0).isnan().any()
        assert (dlse is not None) is case.dlse
        if dlse is not None:
            assert dlse.shape == (p.batch, p.num_heads_q, p.seqlen_q)
            assert dlse.dtype == torch.float32
        _, lse = attention_forward(q, k, v, causal=spec.causal, softmax_scale=case.softmax_scale)
        assert float(torch.where(lse == -math.inf, 0.0, lse).abs().max()) < 1e6
        # Nothing that a kernel must form in 16 bits overflows them: a gradient that is inf shows nothing.
        grads = attention_backward(q, k, v, do, causal=spec.causal, softmax_scale=case.softmax_scale, dlse=dlse)
        assert all(torch.isfinite(x.to(q.dtype)).all() for x in grads)
        again = make_gradients(spec, case)
        assert torch.equal(do, again[0])
        assert dlse is None or (again[1] is not None and torch.equal(dlse, again[1]))


def test_forward_cases_have_no_gradients() -> None:
    for case in forward_cases(KernelSpec(head_dim=64), FwdConfig(), budget="full"):
        assert (case.grad_layout, case.grad_scale, case.dlse) == ("contiguous", 1.0, False)
        assert "do" not in case.label()


def test_defaults_of_the_process_change_no_case() -> None:
    """A program that runs a model sets a default device or dtype, and then warms up."""
    spec = KernelSpec(kind="bwd", head_dim=32, causal=True)
    cases = backward_cases(spec, CONFIG, budget="quick")
    expected = [make_gradients(spec, case) for case in cases]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert backward_cases(spec, CONFIG, budget="quick") == cases
            again = [make_gradients(spec, case) for case in cases]
    finally:
        torch.set_default_dtype(torch.float32)
    for (do, dlse), (do_again, dlse_again) in zip(expected, again, strict=True):
        assert torch.equal(do, do_again)
        assert dlse is None or (dlse_again is not None and torch.equal(dlse, dlse_again))


@pytest.mark.parametrize(("block_m", "block_n", "head_dim"), [(64, 64, 128), (128, 128, 64), (32, 128, 256)])
def test_quick_is_cheap_enough_to_emulate(block_m: int, block_n: int, head_dim: int) -> None:
    """Five products of 16x8x16 a tile pair, about 1 us each: below half a second."""
    total = 0.0
    config = BwdConfig(block_m=block_m, block_n=block_n, step_m=min(64, block_m))
    for case in backward_cases(KernelSpec(kind="bwd", head_dim=head_dim), config, budget="quick"):
        p = case.problem
        tiles = p.batch * p.num_heads_q * math.ceil(p.seqlen_q / block_m) * math.ceil(p.seqlen_k / block_n)
        total += tiles * 5 * block_m * block_n * head_dim / 2048
    assert total < 500_000


def test_unknown_names_raise() -> None:
    spec = KernelSpec(kind="bwd", head_dim=64)
    with pytest.raises(ArgumentError, match="budget"):
        backward_cases(spec, CONFIG, budget="huge")
    case = GateCase(Problem(1, 1, 1, 1, 1), "normal", 1.0)
    with pytest.raises(ArgumentError, match="layout"):
        make_gradients(spec, dataclasses.replace(case, grad_layout="nonsense"))
