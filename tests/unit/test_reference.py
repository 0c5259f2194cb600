"""The reference against torch's own attention in float64, by hand-computed cases, and under chunking."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fa2gen import reference
from fa2gen.gate import check_backward
from fa2gen.reference import attention_backward, attention_forward, plain16_forward, weight_noise

pytestmark = pytest.mark.usefixtures("one_thread")


def _inputs(batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q + seqlen_k)
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    return [torch.randn(batch, s, h, head_dim, generator=generator).bfloat16() for s, h in shapes]


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~visible, -math.inf)
    out = torch.nan_to_num(scores.softmax(-1)) @ v
    return out.transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 113, 203, 7, 1, 40),
        (1, 203, 113, 8, 2, 59),
        (3, 1, 65, 4, 4, 64),
        (2, 17, 1, 2, 1, 1),
        (1, 129, 129, 4, 1, 8),
    ],
)
@pytest.mark.parametrize("chunk", [reference.MAX_CHUNK_ELEMENTS, 5000, 150])
def test_equals_torch_in_float64(
    sizes: tuple[int, ...], causal: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", chunk)
    q, k, v = _inputs(*sizes)
    out, lse = attention_forward(q, k, v, causal=causal)
    ref, ref_lse = _torch_attention(q, k, v, causal, None)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, ref, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, ref_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 3.0])
def test_any_finite_scale(scale: float) -> None:
    q, k, v = _inputs(1, 77, 77, 2, 2, 64)
    out, lse = attention_forward(q, k, v, causal=True, softmax_scale=scale)
    ref, ref_lse = _torch_attention(q, k, v, True, scale)
    torch.testing.assert_close(out, ref, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, ref_lse, rtol=1e-13, atol=1e-12)


def test_causal_is_aligned_bottom_right() -> None:
    zeros = torch.zeros(1, 5, 1, 8, dtype=torch.float16)
    v = torch.tensor([1.0, 2.0], dtype=torch.float16).view(1, 2, 1, 1).expand(1, 2, 1, 8)
    out, lse = attention_forward(zeros, zeros[:, :2], v, causal=True)
    assert out[0, :, 0, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.5]
    assert lse[0, 0].tolist() == [-math.inf] * 3 + [0.0, math.log(2)]
    v = torch.arange(5.0).half().view(1, 5, 1, 1).expand(1, 5, 1, 8)
    out, _ = attention_forward(zeros[:, :2], zeros, v, causal=True)
    assert out[0, :, 0, 0].tolist() == [1.5, 2.0]


def test_gigantic_logits() -> None:
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    out, lse = attention_forward(x, x, x, softmax_scale=0.125)
    assert torch.equal(out, x.double())
    assert lse.item() == 133120.0**2 * 64 / 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("chunk", [reference.MAX_CHUNK_ELEMENTS, 400])
def test_what_no_query_sees_has_no_influence(bad: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", chunk)
    q, k, v = _inputs(2, 9, 33, 4, 2, 16)
    clean, clean_lse = attention_forward(q, k, v, causal=True)
    k[:, 30:], v[:, 30:] = bad, bad
    out, lse = attention_forward(q, k, v, causal=True)
    # Row i sees keys up to i + 24: rows 0 to 5 see none of the last three.
    assert torch.equal(out[:, :6], clean[:, :6])
    assert torch.equal(lse[..., :6], clean_lse[..., :6])
    assert not torch.isfinite(out[:, 6:]).any()


def test_visible_infinities_of_v_stay_in_their_column() -> None:
    q, k, v = _inputs(1, 4, 6, 1, 1, 4)
    v[0, 2, 0, 1], v[0, 3, 0, 2], v[0, 4, 0, 2] = math.inf, math.inf, -math.inf
    out, _ = attention_forward(q, k, v)
    assert (out[..., 1] == math.inf).all()
    assert out[..., 2].isnan().all()
    assert torch.isfinite(out[..., [0, 3]]).all()


@pytest.mark.parametrize("shape", [(0, 3, 5, 2), (2, 0, 5, 2), (2, 3, 0, 2), (2, 3, 5, 0)])
def test_zero_sizes(shape: tuple[int, int, int, int]) -> None:
    batch, seqlen_q, seqlen_k, heads = shape
    q, k = torch.ones(batch, seqlen_q, heads, 8).half(), torch.ones(batch, seqlen_k, heads, 8).half()
    out, lse = attention_forward(q, k, k)
    assert out.shape == q.shape
    assert lse.shape == (batch, heads, seqlen_q)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_plain16_rounds_scores_weights_and_output() -> None:
    q, k, v = _inputs(1, 65, 129, 2, 1, 64)
    ref, _ = attention_forward(q, k, v)
    plain = plain16_forward(q, k, v)
    error = (plain.double() - ref).abs().amax().item()
    assert plain.dtype == torch.bfloat16
    # Above what rounding the output alone costs (2^-9 of an ulp's binade), below a hundredth of the values.
    assert (ref.bfloat16().double() - ref).abs().amax().item() < error < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_around_the_gate_loosens_no_tolerance(dtype: torch.dtype) -> None:
    """With products rounded to bf16 the error of plain fp16 was 11 times as large."""
    q, k, v = (torch.randn(1, 9, 2, 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    for autocast_dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=autocast_dtype):
            plain, ref = plain16_forward(q, k, v), attention_forward(q, k, v)
        assert torch.equal(plain, plain16_forward(q, k, v))
        assert torch.equal(ref[0], attention_forward(q, k, v)[0])


def test_weight_noise_is_the_root_of_summed_squares() -> None:
    q, k, v = _inputs(1, 9, 21, 2, 2, 4)
    k.zero_()
    noise = weight_noise(q, k, v)
    expected = (v.double() / 21).square().sum(1, keepdim=True).sqrt().expand_as(noise)
    torch.testing.assert_close(noise, expected, rtol=1e-12, atol=0)


def _forward(q: Tensor, k: Tensor, v: Tensor) -> None:
    attention_forward(q, k, v)


def _backward(q: Tensor, k: Tensor, v: Tensor) -> None:
    attention_backward(q, k, v, q)


def _check_of_gradients(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert not check_backward((q, k, v), q, k, v, q, causal=False).passed


@pytest.mark.parametrize("compute", [_forward, _backward, _check_of_gradients])
def test_memory_stays_bounded(compute: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every intermediate obeys the bound as soon as one row of scores fits it."""
    monkeypatch.setattr(reference, "MAX_CHUNK_ELEMENTS", 1 << 13)
    largest = 0
    matmul = torch.matmul

    def watched(a: Tensor, b: Tensor) -> Tensor:
        nonlocal largest
        result = matmul(a, b)
        largest = max(largest, a.numel(), b.numel(), result.numel())
        return result

    monkeypatch.setattr(torch, "matmul", watched)
    compute(*_inputs(2, 150, 100, 4, 2, 16))
    assert 1 << 12 < largest <= 1 << 13
