"""Inputs that broke attention libraries in public reports, through the generated kernel in the emulator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fa2gen.gate import check_forward
from fa2gen.runtime import attention
from fa2gen.spec import FwdConfig

BF16, FP16 = torch.bfloat16, torch.float16
# The three schedules: one tile in turns, two ahead of the other, and a ring of three; both softmaxes.
CONFIGS = (
    None,
    FwdConfig(block_m=32, block_n=32, step_n=16, num_warps=2, num_stages=3, softmax="guarded"),
    FwdConfig(block_m=32, block_n=32, step_n=32, num_warps=2, num_stages=1, softmax="online"),
)


def _normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _qkv(batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, d: int) -> list[Tensor]:
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    return [_normal(batch, s, h, d, seed=seed) for seed, (s, h) in enumerate(shapes)]


def _check(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    out, lse = attention(q, k, v, causal=causal, softmax_scale=scale, return_lse=True, backend="emulator")
    report = check_forward(out, lse, q, k, v, causal=causal, softmax_scale=scale)
    assert report.passed, report.text
    return lse


def test_one_key_with_gigantic_logits() -> None:
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=BF16)
    out, lse = attention(x, x, x, softmax_scale=0.125, return_lse=True, backend="emulator")
    assert torch.equal(out, x)
    assert lse.item() == pytest.approx(1.4177e11, rel=1e-4)


@pytest.mark.parametrize(("d", "dtype", "seqlen", "causal"), [(64, BF16, 704, False), (32, FP16, 705, True)])
def test_uniform_very_negative_logits_and_a_partial_tile(d: int, dtype: torch.dtype, seqlen: int, causal: bool) -> None:
    q, k = (0.1 * _normal(1, seqlen, 1, d, dtype=dtype, seed=seed) for seed in (1, 2))
    q[..., 0], k[..., 0] = 1.0, -120.0 * math.sqrt(d)
    lse = _check(q, k, _normal(1, seqlen, 1, d, dtype=dtype, seed=3), causal=causal)
    assert lse[0, 0, -1].item() == pytest.approx(-120 + math.log(seqlen), abs=0.3)


@pytest.mark.parametrize("scale", [0.0, 1e-37])
def test_scales_whose_products_with_scores_matter(scale: float) -> None:
    # Scores of up to 1e37: times 1e-37 they decide the weights, times 0 they must not.
    q = torch.full((1, 3, 1, 8), 1e18, dtype=BF16)
    _check(q, 1e18 * _normal(1, 9, 1, 8), _normal(1, 9, 1, 8, seed=1), scale=scale)


@pytest.mark.parametrize("seqlen_q", [1, 3, 8])
def test_a_few_queries_are_the_last_rows(seqlen_q: int) -> None:
    q, k, v = _qkv(1, 9, 300, 8, 2, 128)
    all_rows = attention(q, k, v, causal=True, backend="emulator")
    last = attention(q[:, -seqlen_q:], k, v, causal=True, backend="emulator")
    assert isinstance(all_rows, Tensor)
    assert torch.equal(all_rows[:, -seqlen_q:], last)


def test_each_tensor_has_strides_of_its_own() -> None:
    q, k, v = _qkv(3, 3, 3, 3, 3, 64)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for tensors in (heads_first, (q, k, heads_first[2]), (q, heads_first[1], v)):
        _check(*tensors)
    shared = k[:, :, :1].expand(3, 3, 3, 64)
    _check(q, shared, shared)
    cache = _normal(4, 400, 2, 64)
    _check(_normal(6, 33, 4, 64)[::3], cache[::2, :50], cache[::2, :50])
    # The stride of a single element is arbitrary: it must not count as unaligned.
    _check(torch.as_strided(q, (1, 1, 3, 64), (3, 5, 64, 1)), k[:1], v[:1])


def test_fewer_keys_than_query_heads_of_a_group() -> None:
    _check(*_qkv(1, 1, 3, 32, 4, 128), causal=True)


def test_more_queries_than_keys() -> None:
    lse = _check(*_qkv(1, 300, 150, 2, 2, 64), causal=True)
    assert (lse[..., :150] == -math.inf).all()
    assert lse[..., 150:].isfinite().all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.slug() if config else "default")
@pytest.mark.parametrize("causal", [False, True])
def test_nan_and_infinity_reach_who_sees_them_and_nobody_else(config: FwdConfig | None, causal: bool) -> None:
    """Query 7 or key 70 of 40 queries over 100 keys is bad; causal queries from 10 on see key 70."""
    for bad in (math.nan, math.inf, -math.inf):
        for which, at in ((0, 7), (1, 70)):
            tensors = _qkv(1, 40, 100, 1, 1, 64)
            tensors[which][:, at] = bad
            out, lse = attention(*tensors, causal=causal, return_lse=True, backend="emulator", config=config)
            ref, ref_lse = attention(*tensors, causal=causal, return_lse=True, backend="reference")
            for x, y in ((out, ref), (lse, ref_lse)):
                assert torch.equal(x.isnan(), y.isnan())
                assert torch.equal(x.isinf(), y.isinf())
    if not causal:
        q, k, v = _qkv(1, 40, 100, 1, 1, 64)
        v[:, 70, :, 3] = math.nan
        assert attention(q, k, v, backend="emulator", config=config).isnan().nonzero()[:, 3].unique().tolist() == [3]


def test_a_row_depends_on_its_own_batch_only() -> None:
    q, k, v = _qkv(4, 20, 150, 1, 1, 64)
    together = attention(q, k, v, backend="emulator")
    for batch in range(4):
        one = slice(batch, batch + 1)
        assert torch.equal(attention(q[one], k[one], v[one], backend="emulator"), together[one])
