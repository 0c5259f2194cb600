"""The backward reference against torch's autograd in float64, by hand-computed roundings, and under chunking.

Field cases are named by their numbers.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fa2gen import reference
from fa2gen.gate import check_backward
from fa2gen.reference import attention_backward, attention_forward, plain16_backward

pytestmark = pytest.mark.usefixtures("one_thread")


def _inputs(
    batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, do and dlse."""
    generator = torch.Generator().manual_seed(seqlen_q + 7 * seqlen_k)
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k), (seqlen_q, heads_q))
    q, k, v, do = (torch.randn(batch, s, h, head_dim, generator=generator).to(dtype) for s, h in shapes)
    return q, k, v, do, torch.randn(batch, heads_q, seqlen_q, generator=generator)


def _autograd(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """Gradients that autograd finds through torch's own float64 operations; rows without a key are left out."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    rows, keys, values = (x.transpose(1, 2) for x in leaves)
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=1) for x in (keys, values))
    first = max(0, q.shape[1] - k.shape[1]) if causal else 0
    scores = rows[:, :, first:] @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = scores.masked_fill(~visible[first:], -math.inf)
    loss = ((scores.softmax(-1) @ values) * do.double().transpose(1, 2)[:, :, first:]).sum()
    if dlse is not None:
        loss = loss + (scores.logsumexp(-1) * dlse.double()[..., first:]).sum()
    return torch.autograd.grad(loss, leaves)


def _assert_close(grads: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for grad, ref in zip(grads, expected, strict=True):
        assert grad.dtype == torch.float64
        torch.testing.assert_close(grad, ref, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 113, 203, 7, 1, 40), (1, 65, 33, 8, 2, 59), (3, 1, 65, 4, 4, 64), (2, 17, 1, 2, 1, 1)]
)
@pytest.mark.parametrize("chunk", [reference.MAX_CHUNK_ELEMENTS, 12000])
def test_equals_autograd_in_float64(
    sizes: tuple[int, ...], with_dlse: bool, causal: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", chunk)
    q, k, v, do, dlse = _inputs(*sizes, torch.bfloat16)
    dlse = dlse if with_dlse else None
    _assert_close(attention_backward(q, k, v, do, causal=causal, dlse=dlse), _autograd(q, k, v, do, dlse, causal, None))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.125, 0.0, 3.0])
def test_any_finite_scale(scale: float, causal: bool) -> None:
    """BL-008, backward: a scale of either sign, and 0 where q and k have no gradient."""
    q, k, v, do, dlse = _inputs(1, 77, 77, 2, 2, 64, torch.bfloat16)
    grads = attention_backward(q, k, v, do, causal=causal, softmax_scale=scale, dlse=dlse)
    _assert_close(grads, _autograd(q, k, v, do, dlse, causal, scale))
    if scale == 0.0:
        assert not grads[0].any()
        assert not grads[1].any()


@pytest.mark.parametrize(
    ("seqlen", "head_dim", "dtype", "causal"),
    [
        (704, 64, torch.bfloat16, False),
        (704, 32, torch.float16, True),
        (705, 64, torch.bfloat16, True),
        (705, 128, torch.float16, False),
    ],
)
def test_uniform_and_very_negative_logits(seqlen: int, head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    """BL-004: logits that are all about -120 cost no gradient anything."""
    generator = torch.Generator().manual_seed(seqlen)
    q, k, v, do = (torch.randn(1, seqlen, 1, head_dim, generator=generator) for _ in range(4))
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(head_dim)
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    lse = attention_forward(q, k, v, causal=causal)[1][0, 0, -1].item()
    assert lse == pytest.approx(-120 + math.log(seqlen), abs=0.5)
    grads = attention_backward(q, k, v, do, causal=causal)
    _assert_close(grads, _autograd(q, k, v, do, None, causal, None))
    assert check_backward([x.to(dtype) for x in grads], q, k, v, do, causal=causal).passed


@pytest.mark.parametrize("stranger", [math.nan, math.inf])
def test_rows_that_see_nothing_have_no_gradient(stranger: float) -> None:
    """BL-012: whatever the gradients of their output and LSE hold."""
    q, k, v, do, dlse = _inputs(2, 40, 17, 4, 2, 8, torch.float16)
    expected = _autograd(q, k, v, do, dlse, True, None)
    do[:, :23], dlse[..., :23], q[:, :23] = stranger, stranger, stranger
    grads = attention_backward(q, k, v, do, causal=True, dlse=dlse)
    assert not grads[0][:, :23].any()
    _assert_close(grads, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("chunk", [reference.MAX_CHUNK_ELEMENTS, 400])
def test_what_no_query_sees_has_no_influence(bad: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """BL-011, backward."""
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", chunk)
    q, k, v, do, dlse = _inputs(2, 9, 33, 4, 2, 16, torch.bfloat16)
    clean = attention_backward(q, k, v, do, causal=True, dlse=dlse)
    k[:, 30:], v[:, 30:] = bad, bad
    dq, dk, dv = attention_backward(q, k, v, do, causal=True, dlse=dlse)
    # Row i sees keys up to i + 24: rows 0 to 5 see none of the last three, the others see them and spread NaN.
    assert torch.equal(dq[:, :6], clean[0][:, :6])
    assert dq[:, 6:].isnan().all()
    assert dk.isnan().all()
    assert dv.isnan().all()


def test_keys_beyond_the_diagonal_are_clean_of_bad_queries() -> None:
    q, k, v, do, _ = _inputs(1, 9, 9, 2, 1, 16, torch.bfloat16)
    clean = attention_backward(q, k, v, do, causal=True)
    q[:, 3], do[:, 3] = math.inf, math.nan
    dq, dk, dv = attention_backward(q, k, v, do, causal=True)
    assert dq[:, 3].isnan().all()
    for grad, expected in zip((dk, dv), clean[1:], strict=True):
        assert grad[:, :4].isnan().all()
        assert torch.equal(grad[:, 4:], expected[:, 4:])
    assert torch.equal(dq[:, [0, 1, 2, *range(4, 9)]], clean[0][:, [0, 1, 2, *range(4, 9)]])


@pytest.mark.parametrize("shape", [(0, 3, 5, 2), (2, 0, 5, 2), (2, 3, 0, 2), (2, 3, 5, 0)])
def test_zero_sizes(shape: tuple[int, int, int, int]) -> None:
    """BL-068, one sequence: keys that have no query at all have gradients of exactly 0."""
    batch, seqlen_q, seqlen_k, heads = shape
    q, k = torch.ones(batch, seqlen_q, heads, 8).half(), torch.ones(batch, seqlen_k, heads, 8).half()
    for grads in (attention_backward(q, k, k, q), plain16_backward(q, k, k, q)):
        for grad, like in zip(grads, (q, k, k), strict=True):
            assert grad.shape == like.shape
            assert not grad.any()
        assert check_backward([x.half() for x in grads], q, k, k, q, causal=False).passed


def test_small_float32_inputs() -> None:
    """BL-092."""
    q, k, v, do, _ = _inputs(4, 300, 300, 8, 8, 32, torch.float32)
    q, k = 0.16 * q, 0.16 * k
    _assert_close(attention_backward(q, k, v, do), _autograd(q, k, v, do, None, False, None))


def test_odd_shapes_and_the_plain_formula() -> None:
    """BL-095: the plain 16-bit gradients are near the reference, but not as near as its own rounding."""
    q, k, v, do, _ = _inputs(1, 19, 45, 3, 1, 40, torch.bfloat16)
    ref = attention_backward(q, k, v, do, causal=True)
    _assert_close(ref, _autograd(q, k, v, do, None, True, None))
    for plain, exact in zip(plain16_backward(q, k, v, do, causal=True), ref, strict=True):
        assert plain.dtype == torch.bfloat16
        error, rounding = (float((x.double() - exact).abs().max()) for x in (plain, exact.bfloat16()))
        assert rounding < error < 0.03 * float(exact.abs().max())


def test_gradient_through_the_lse() -> None:
    """BL-099."""
    q, k, v, do, dlse = _inputs(1, 65, 65, 4, 2, 64, torch.bfloat16)
    _assert_close(attention_backward(q, k, v, do, causal=True, dlse=dlse), _autograd(q, k, v, do, dlse, True, None))
    # Through the LSE alone: dK is the softmax's own gradient, V has none.
    dq, _, dv = attention_backward(q, k, v, torch.zeros_like(do), causal=True, dlse=dlse)
    assert not dv.any()
    assert dq.abs().amax() > 0.01


def test_gradients_without_memory_of_their_own() -> None:
    q, k, v, do, _ = _inputs(2, 9, 11, 4, 2, 8, torch.bfloat16)
    for view in (do[:1, :1, :1].expand_as(do), do[:, :1].expand_as(do), do[:1, :1, :1, :1].expand_as(do)):
        _assert_close(attention_backward(q, k, v, view), attention_backward(q, k, v, view.clone()))


def test_plain16_rounds_every_intermediate() -> None:
    """One query and two keys, each step rounded by hand; D is a sum over the rounded output."""

    def bf16(x: float) -> float:
        return torch.tensor(x, dtype=torch.float32).bfloat16().item()

    q, k, v, do = (torch.zeros(1, n, 1, 8, dtype=torch.bfloat16) for n in (1, 2, 2, 1))
    q[..., 0], do[..., 0], scale, dlse = 1.25, 1.625, 0.7, 0.125
    k[0, :, 0, 0] = torch.tensor([0.71875, -1.3125])
    v[0, :, 0, 0] = torch.tensor([2.53125, -0.40625])
    s = [bf16(1.25 * float(x) * scale) for x in k[0, :, 0, 0]]
    total = sum(math.exp(x - s[0]) for x in s)
    p = [bf16(math.exp(x - s[0]) / total) for x in s]
    o = bf16(sum(a * float(b) for a, b in zip(p, v[0, :, 0, 0], strict=True)))
    dp = [bf16(1.625 * float(x)) for x in v[0, :, 0, 0]]
    ds = [bf16(a * (b - (1.625 * o - dlse))) for a, b in zip(p, dp, strict=True)]
    grads = plain16_backward(q, k, v, do, softmax_scale=scale, dlse=torch.full((1, 1, 1), dlse))
    assert grads[0][0, 0, 0, 0].item() == bf16(
        scale * sum(a * float(b) for a, b in zip(ds, k[0, :, 0, 0], strict=True))
    )
    assert grads[1][0, :, 0, 0].tolist() == [bf16(scale * x * 1.25) for x in ds]
    assert grads[2][0, :, 0, 0].tolist() == [bf16(x * 1.625) for x in p]
    # Left unrounded, any one of them would have shown.
    exact = attention_backward(q, k, v, do, softmax_scale=scale, dlse=torch.full((1, 1, 1), dlse))
    assert all(not torch.equal(a, b.bfloat16()) for a, b in zip(grads[:2], exact[:2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_autograd_around_the_gate_change_nothing(dtype: torch.dtype) -> None:
    q, k, v, do, _ = _inputs(1, 9, 9, 2, 2, 64, dtype)
    expected = plain16_backward(q, k, v, do), attention_backward(q, k, v, do)
    q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = plain16_backward(q, k, v, do), attention_backward(q, k, v, do)
    for a, b in zip(expected, again, strict=True):
        assert all(torch.equal(x, y) and not y.requires_grad for x, y in zip(a, b, strict=True))
