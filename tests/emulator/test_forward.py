"""The forward kernel in the emulator, on tensors of every layout; what it may not touch is NaN and forbidden."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from fa2gen.constraints import default_config
from fa2gen.emulator import Counters, run_forward
from fa2gen.errors import ArgumentError, EmulatorError, InfeasibleError
from fa2gen.gate import check_forward
from fa2gen.spec import NATIVE_HEAD_DIMS, FwdConfig, KernelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _random(shape: tuple[int, ...], spec: KernelSpec, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[spec.dtype])


def _in_nan(x: Tensor, pad: int, shift: int = 0) -> Tensor:
    """The same values in a view with NaN between its rows and a row of NaN after each sequence."""
    batch, seqlen, heads, head_dim = x.shape
    room = torch.full((batch, seqlen + 1, heads, head_dim + pad), math.nan).to(x.dtype)
    view = room[:, :seqlen, :, shift : shift + head_dim]
    return view.copy_(x)


def _check(
    spec: KernelSpec, config: FwdConfig, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **options: object
) -> Counters:
    scale = spec.head_dim**-0.5
    out, lse, counters = run_forward(spec, config, q, k, v, softmax_scale=scale, out=out, **options)
    report = check_forward(out, lse, q, k, v, causal=spec.causal, softmax_scale=scale)
    assert report.passed, report.text
    return counters


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"),
    [
        (1, 1, False),
        (64, 64, False),
        (64, 64, True),
        (113, 203, True),
        (113, 203, False),
        (200, 61, True),
        (2, 257, True),
    ],
)
def test_odd_lengths(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    spec = KernelSpec(head_dim=64, causal=causal, gqa_ratio=2)
    q = _random((1, seqlen_q, 4, 64), spec, 1)
    k, v = (_random((1, seqlen_k, 2, 64), spec, seed) for seed in (2, 3))
    config = default_config(spec)
    for seed, random_schedule in ((1, True), (2, False)):
        counters = _check(spec, config, q, k, v, seed=seed, random_schedule=random_schedule)
    # Free of bank conflicts: the swizzle serves copies, ldmatrix and the epilogue alike.
    assert counters.ldmatrix_conflicts == counters.cp_async_conflicts == counters.st_shared_conflicts == 0
    assert counters.mma > 0


@pytest.mark.parametrize("head_dim", [*NATIVE_HEAD_DIMS, 8, 40, 72, 136, 200])
def test_no_head_dim_has_bank_conflicts(head_dim: int) -> None:
    """Rows of 64 and of 128 bytes, whole and predicated, three stages of a ring and Q's fragments in registers."""
    spec = KernelSpec(head_dim=head_dim, causal=True)
    q = _random((1, 65, 1, head_dim), spec, 1)
    k, v = (_random((1, 131, 1, head_dim), spec, seed) for seed in (2, 3))
    for config in (
        default_config(spec),
        FwdConfig(block_m=64, block_n=32, step_n=16, num_warps=4, num_stages=3, q_in_regs=True),
    ):
        counters = _check(spec, config, q, k, v)
        assert counters.ldmatrix_conflicts == counters.st_shared_conflicts == 0
        # Where some lanes copy nothing, the emulator takes accesses of two instructions for one: an estimate.
        if head_dim in NATIVE_HEAD_DIMS:
            assert counters.cp_async_conflicts == 0


@pytest.mark.parametrize(
    ("head_dim", "alignment", "dtype", "pad", "shift"),
    [
        (40, 16, "bf16", 8, 0),
        (40, 2, "fp16", 3, 1),
        (59, 2, "bf16", 2, 1),
        (128, 16, "fp16", 8, 8),
        (111, 2, "bf16", 1, 0),
        (16, 16, "bf16", 8, 8),
        (88, 16, "fp16", 8, 0),
        (91, 2, "bf16", 4, 1),
        (168, 16, "bf16", 8, 0),
        (256, 2, "fp16", 1, 1),
    ],
)
def test_strided_rows_between_nan(head_dim: int, alignment: int, dtype: str, pad: int, shift: int) -> None:
    spec = KernelSpec(head_dim=head_dim, dtype=dtype, causal=True, alignment=alignment)
    q, k, v = (_in_nan(_random((2, n, 2, head_dim), spec, seed), pad, shift) for seed, n in enumerate((70, 83, 83)))
    out = _in_nan(torch.zeros_like(q), pad, shift)
    _check(spec, default_config(spec), q, k, v, out=out)


def test_packed_and_transposed_and_expanded_views() -> None:
    spec = KernelSpec(head_dim=64, gqa_ratio=1)
    config = default_config(spec)
    packed = _random((2, 70, 3, 2, 64), spec, 1)
    _check(spec, config, *packed.unbind(2))
    heads_first = _random((3, 2, 2, 70, 64), spec, 2)
    _check(spec, config, *(x.transpose(1, 2) for x in heads_first))
    one_head = _random((1, 70, 1, 64), spec, 3)
    _check(spec, config, packed[:, :, 0], *(one_head.expand(2, 70, 2, 64) for _ in range(2)))


def test_no_keys_and_no_queries() -> None:
    spec = KernelSpec(head_dim=64)
    config = default_config(spec)
    q, none = _random((1, 5, 2, 64), spec, 1), _random((1, 0, 2, 64), spec, 2)
    out, lse, _ = run_forward(spec, config, q, none, none, softmax_scale=1.0)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    out, lse, counters = run_forward(spec, config, none, q, q, softmax_scale=1.0)
    assert out.shape == (1, 0, 2, 64)
    assert lse.shape == (1, 2, 0)
    assert counters == Counters()


def test_repairs_are_counted() -> None:
    spec = KernelSpec(head_dim=64)
    config = dataclasses.replace(default_config(spec), softmax="guarded")
    q, k, v = (_random((1, 256, 1, 64), spec, seed) for seed in range(3))
    assert _check(spec, config, q, k, v).repairs == 0
    # Keys are visited from the last to the first: the first ones outgrow the reference of the last.
    k[:, :64] *= 200
    assert _check(spec, config, q, k, v).repairs > 0


def test_a_misaligned_view_is_reported() -> None:
    spec = KernelSpec(head_dim=64)
    k, v = (_random((1, 64, 1, 64), spec, seed) for seed in (2, 3))
    q = _in_nan(_random((1, 64, 1, 64), spec, 1), pad=8, shift=1)
    with pytest.raises(EmulatorError, match="global-misaligned"):
        run_forward(spec, default_config(spec), q, k, v, softmax_scale=1.0)


def test_wrong_tensors_are_refused() -> None:
    spec = KernelSpec(head_dim=64)
    config = default_config(spec)
    q = _random((1, 8, 1, 64), spec, 1)
    wrong = {
        "q must be a CPU tensor of bf16": (q.half(), q, q),
        "k must be .batch, seqlen, heads, 64": (q, q[..., :32], q),
        "v must be contiguous in its last dimension": (q, q, q.transpose(1, 3).contiguous().transpose(1, 3)),
        "k and v must have one shape": (q, q, q[:, :4]),
    }
    with pytest.raises(InfeasibleError, match="warps_n 2"):
        run_forward(spec, FwdConfig(block_m=64, block_n=64, step_n=32, warps_n=2), q, q, q, softmax_scale=1.0)
    for message, (a, b, c) in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            run_forward(spec, config, a, b, c, softmax_scale=1.0)
    with pytest.raises(ArgumentError, match="out must have"):
        run_forward(spec, config, q, q, q, softmax_scale=1.0, out=torch.empty(1, 8, 1, 32, dtype=q.dtype))
