"""The gate must pass a right kernel and fail every broken one; the broken ones are made from a right one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fa2gen.errors import ArgumentError
from fa2gen.gate import GateCase, GateReport, check_forward, forward_cases, make_inputs, run_gate
from fa2gen.problem import Problem
from fa2gen.reference import attention_forward
from fa2gen.spec import FwdConfig, KernelSpec

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = FwdConfig(block_m=128, block_n=64, step_n=64)
Weights = Callable[[Tensor, Tensor], Tensor]


def _kernel(
    spec: KernelSpec,
    *,
    weights: Weights = lambda visible, scores: visible,
    tile: Callable[[int, float], float] = lambda number, alpha: alpha,
    kv_head: Callable[[int, int], int] = lambda head, ratio: head // ratio,
    finish: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda out, lse: (out, lse),
    causal_shift: int = 0,
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """An online-softmax kernel in float32 with tiles of 64 keys and 16-bit weights; the arguments break it."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        heads = torch.tensor([kv_head(h, spec.gqa_ratio) for h in range(q.shape[2])], dtype=torch.long)
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), k[:, :, heads].float()) * scale
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if spec.causal:
            visible = visible.tril(seqlen_k - seqlen_q + causal_shift)
        scores = scores.masked_fill(~weights(visible, scores), -math.inf)
        shape = (*scores.shape[:3], 1)
        row_max, row_sum = torch.full(shape, -math.inf), torch.zeros(shape)
        acc = torch.zeros(*scores.shape[:3], q.shape[3])
        for number, start in enumerate(range(0, seqlen_k, 64)):
            part = scores[..., start : start + 64]
            new_max = torch.maximum(row_max, part.amax(-1, keepdim=True))
            safe = torch.where(new_max == -math.inf, 0.0, new_max)
            alpha = torch.exp(row_max - safe)
            p = torch.exp(part - safe)
            row_sum = row_sum * alpha + p.sum(-1, keepdim=True)
            values = v[:, start : start + 64, heads].float().transpose(1, 2)
            acc = acc * torch.tensor(tile(number, 1.0)) * alpha if number else acc * alpha
            acc = acc + p.to(q.dtype).float() @ values
            row_max = new_max
        out = torch.where(row_sum == 0, 0.0, acc / row_sum).transpose(1, 2).to(q.dtype)
        return finish(out, (row_max + row_sum.log()).squeeze(-1))

    return run


def _gate(spec: KernelSpec, runner: Callable[..., tuple[Tensor, Tensor]], budget: str = "quick") -> GateReport:
    return run_gate(spec, CONFIG, runner, forward_cases(spec, CONFIG, budget=budget))


SPECS = [
    KernelSpec(head_dim=64, dtype="bf16"),
    KernelSpec(head_dim=64, dtype="fp16", causal=True),
    KernelSpec(head_dim=40, dtype="bf16", causal=True, gqa_ratio=4),
    KernelSpec(head_dim=59, dtype="fp16", gqa_ratio=7, alignment=2),
    KernelSpec(head_dim=1, dtype="bf16", alignment=2),
    KernelSpec(head_dim=200, dtype="fp16"),
    KernelSpec(head_dim=256, dtype="bf16", causal=True),
]


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.slug)
def test_a_right_kernel_passes(spec: KernelSpec) -> None:
    report = _gate(spec, _kernel(spec))
    assert report.passed, report.text
    assert 0 < report.worst <= 1
    assert f"{len(forward_cases(spec, CONFIG, budget='quick'))} cases" in report.text


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.slug)
def test_a_right_kernel_passes_the_full_gate(spec: KernelSpec) -> None:
    report = _gate(spec, _kernel(spec), "full")
    assert report.passed, report.text


def _drop_last_tile(visible: Tensor, scores: Tensor) -> Tensor:
    keep = visible.clone()
    if keep.shape[1] > 64:
        keep[:, (keep.shape[1] - 1) // 64 * 64 :] = False
    return keep


def _drop_keys(*keys: int) -> Weights:
    def drop(visible: Tensor, scores: Tensor) -> Tensor:
        keep = visible.clone()
        keep[:, [key for key in keys if key < keep.shape[1]]] = False
        return keep

    return drop


def _spoil_one_element(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    if out.numel():
        out = out.contiguous()
        out.view(-1)[out.numel() // 2] = math.nan
    return out, lse


MUTANTS = {
    "dropped key tile": {"weights": _drop_last_tile},
    "dropped first tile": {"weights": _drop_keys(*range(64))},
    "dropped key 0": {"weights": _drop_keys(0)},
    "dropped key 63": {"weights": _drop_keys(63)},
    "dropped key 64": {"weights": _drop_keys(64)},
    "dropped key 37": {"weights": _drop_keys(37)},
    "dropped key 100": {"weights": _drop_keys(100)},
    "missing rescale": {"tile": lambda number, alpha: 2.0},
    "NaN in one element": {"finish": _spoil_one_element},
    "wrong LSE": {"finish": lambda out, lse: (out, lse + 2e-4)},
    "wrong LSE, one row": {"finish": lambda out, lse: (out, lse + 2e-4 * (torch.arange(lse.shape[-1]) == 2))},
    "base-2 LSE": {"finish": lambda out, lse: (out, lse / math.log(2))},
    "LSE of empty rows +inf": {"finish": lambda out, lse: (out, torch.where(lse == -math.inf, math.inf, lse))},
    "output 1 % off": {"finish": lambda out, lse: (out * 1.01, lse)},
    "rows shifted": {"finish": lambda out, lse: (out.roll(1, 1), lse)},
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_fails(name: str, dtype: str, causal: bool) -> None:
    spec = KernelSpec(head_dim=64, dtype=dtype, causal=causal)
    if name == "LSE of empty rows +inf" and not causal:
        # Without a mask only the case without keys has such rows.
        assert any(case.problem.seqlen_k == 0 for case in forward_cases(spec, CONFIG, budget="quick"))
    report = _gate(spec, _kernel(spec, **MUTANTS[name]))
    assert not report.passed
    assert spec.slug() in report.text


@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_off_by_one_fails(shift: int) -> None:
    spec = KernelSpec(head_dim=128, causal=True)
    assert not _gate(spec, _kernel(spec, causal_shift=shift)).passed


def test_swapped_heads_fail() -> None:
    spec = KernelSpec(head_dim=64, gqa_ratio=2)
    swapped = _kernel(spec, kv_head=lambda head, ratio: (head // ratio) ^ 1 if ratio > 1 and head < 4 else head)
    cases = [case for case in forward_cases(spec, CONFIG, budget="quick") if case.problem.num_heads_k == 2]
    assert cases
    assert not run_gate(spec, CONFIG, swapped, cases).passed
    modulo = _kernel(spec, kv_head=lambda head, ratio: head % 2)
    assert not run_gate(spec, CONFIG, modulo, cases).passed


def test_every_single_key_is_walked() -> None:
    """The full gate notices any one key that is left out of a long row, where no tensor-wide rule would."""
    spec = KernelSpec(head_dim=128, dtype="bf16")
    walk = max(
        (case for case in forward_cases(spec, CONFIG, budget="full") if case.data == "walk"),
        key=lambda case: case.problem.seqlen_q * case.problem.seqlen_k,
    )
    walk = dataclasses.replace(walk, problem=dataclasses.replace(walk.problem, batch=1))
    for key in range(0, walk.problem.seqlen_k, 41):
        assert not run_gate(spec, CONFIG, _kernel(spec, weights=_drop_keys(key)), [walk]).passed, key


def test_a_kernel_that_writes_its_inputs_fails() -> None:
    spec = KernelSpec(head_dim=64)
    right = _kernel(spec)

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        result = right(q, k, v, scale)
        v[0, 0, 0, 0] = 7.0
        return result

    case = GateCase(Problem(1, 5, 7, 1, 1), "normal", 0.125)
    report = run_gate(spec, CONFIG, run, [case])
    assert not report.passed
    assert "changed an input" in report.text


def test_wrong_shapes_and_dtypes_fail() -> None:
    spec = KernelSpec(head_dim=64)
    q, k, v = make_inputs(spec, GateCase(Problem(1, 5, 7, 2, 2), "normal", 0.125))
    out, lse = _kernel(spec)(q, k, v, 0.125)
    assert check_forward(out, lse, q, k, v, causal=False, softmax_scale=0.125).passed
    for bad_out, bad_lse in ((out.float(), lse), (out[:, :4], lse), (out, lse.double()), (out, lse.transpose(1, 2))):
        assert not check_forward(bad_out, bad_lse, q, k, v, causal=False, softmax_scale=0.125).passed


def test_no_case_is_no_pass() -> None:
    spec = KernelSpec(head_dim=64)
    assert not run_gate(spec, CONFIG, _kernel(spec), []).passed


def test_visible_nan_never_passes() -> None:
    spec = KernelSpec(head_dim=64)
    q, k, v = make_inputs(spec, GateCase(Problem(1, 5, 7, 1, 1), "normal", 0.125))
    v[0, 0, 0, 0] = math.nan
    out, lse = _kernel(spec)(q, k, v, 0.125)
    assert out[..., 0].isnan().all()
    assert not check_forward(out, lse, q, k, v, causal=False, softmax_scale=0.125).passed


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.slug)
def test_cases_are_what_they_say(spec: KernelSpec) -> None:
    quick, full = (forward_cases(spec, CONFIG, budget=budget) for budget in ("quick", "full"))
    assert full[: len(quick)] == quick
    assert len(set(full)) == len(full)
    layouts, datas = {case.layout for case in quick}, {case.data for case in full}
    assert layouts == {"contiguous", "padded", "heads_first"}
    assert {"normal", "walk", "growing", "falling", "both", "cold_last", "constant", "spike_first"} <= datas
    for case in full[:60]:
        q, k, v = make_inputs(spec, case)
        p = case.problem
        assert q.shape == (p.batch, p.seqlen_q, p.num_heads_q, spec.head_dim)
        assert k.shape == v.shape == (p.batch, p.seqlen_k, p.num_heads_k, spec.head_dim)
        for x in (q, k, v):
            assert torch.isfinite(x).all()
            assert x.stride(-1) == 1 or x.numel() == 0 or spec.head_dim == 1
            if spec.alignment == 16:
                assert all(stride % 8 == 0 for stride in x.stride()[:3])
        if case.layout != "contiguous" and q.numel():
            assert not q.is_contiguous() or q.numel() == q.shape[-1]
            assert torch.as_strided(q, (q.untyped_storage().nbytes() // 2,), (1,), 0).isnan().any()
        again = make_inputs(spec, case)
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_defaults_of_the_process_change_no_case(dtype: str) -> None:
    """A program that runs a model sets a default device or dtype, and then warms up."""
    spec, config = KernelSpec(head_dim=32, dtype=dtype, causal=True), FwdConfig(softmax="guarded")
    cases = forward_cases(spec, config, budget="full")[:40]
    inputs = [make_inputs(spec, case) for case in cases]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert forward_cases(spec, config, budget="full")[:40] == cases
            again = [make_inputs(spec, case) for case in cases]
    finally:
        torch.set_default_dtype(torch.float32)
    for expected, got in zip(inputs, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_quick_is_cheap_enough_to_emulate() -> None:
    """128 x 64 at head_dim 128: 1024 warp-mma a tile pair, about 1 us each; 5 s on two cores are 10 million."""
    tiles = 0
    for case in forward_cases(KernelSpec(head_dim=128), CONFIG, budget="quick"):
        p = case.problem
        tiles += p.batch * p.num_heads_q * math.ceil(p.seqlen_q / 128) * math.ceil(p.seqlen_k / 64)
    assert tiles * 1024 < 500_000


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_constant_logits_round_both_ways(dtype: str) -> None:
    """At every head dim: an exponent s c minus the rounded m c gives weights of inf for one and of 0 for the other."""
    for head_dim in range(1, 257):
        spec = KernelSpec(head_dim=head_dim, dtype=dtype, alignment=2)
        elements = [case.amount for case in forward_cases(spec, CONFIG, budget="quick") if case.data == "constant"]
        exponents = []
        for element in elements:
            score = np.float32(head_dim * element * element)
            assert float(score) == head_dim * element * element
            scale_log2 = np.float32(math.log2(math.e) / math.sqrt(head_dim))
            exponents.append(float(score) * float(scale_log2) - float(score * scale_log2))
        assert len(exponents) == 2
        # 2^128 is infinite in bf16 and float32; fp16 ends at 2^16.
        assert max(exponents) > (128 if dtype == "bf16" else 16)
        assert min(exponents) < -16
        q, _, _ = make_inputs(spec, GateCase(Problem(1, 1, 1, 1, 1), "constant", 1.0, elements[0]))
        assert (q == elements[0]).all()


def test_guarded_softmax_is_provoked() -> None:
    """Cases make a later block lead the first visited one by more than float32's exponent, from either end."""
    spec = KernelSpec(head_dim=64)
    leads = {1: 0.0, -1: 0.0}
    for case in forward_cases(spec, CONFIG, budget="quick"):
        if case.problem.seqlen_k <= 64 or case.data == "constant":
            continue
        q, k, _ = make_inputs(spec, case)
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * case.softmax_scale
        for direction in leads:
            first = scores[..., :64] if direction == 1 else scores[..., (scores.shape[-1] - 1) // 64 * 64 :]
            lead = (scores.amax(-1) - first.amax(-1)).max().item()
            leads[direction] = max(leads[direction], lead)
    assert min(leads.values()) > 100


def test_an_lse_of_cancelling_terms() -> None:
    """The halves of 256 columns cancel, all but 124 of 3068: a float32 sum of such terms is not good to 1e-6."""
    q, k, v = (torch.ones(1, 1, 1, 256, dtype=torch.bfloat16) for _ in range(3))
    k[..., :128], k[..., 128:], k[..., 0] = 192.0, -184.0, 1152.0
    _, ref = attention_forward(q, k, v)
    terms = float((q * k).double().abs().sum()) / 16
    assert 100 < float(ref.abs()) < terms / 20
    for error, passes in ((0.9, True), (1.1, False)):
        lse = (ref + error * 2.0**-22 * terms).float()
        assert check_forward(v, lse, q, k, v, causal=False).passed is passes
    assert not check_forward(v, ref.float() + 1.0, q, k, v, causal=False).passed
    for wrong in (math.inf, -math.inf, math.nan):
        assert not check_forward(v, torch.full_like(ref, wrong).float(), q, k, v, causal=False).passed


def test_unknown_names_raise() -> None:
    spec = KernelSpec(head_dim=64)
    with pytest.raises(ArgumentError, match="budget"):
        forward_cases(spec, CONFIG, budget="huge")
    with pytest.raises(ArgumentError, match="data"):
        make_inputs(spec, GateCase(Problem(1, 1, 1, 1, 1), "nonsense", 1.0))
