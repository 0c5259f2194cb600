"""Inputs that broke attention libraries in public reports, through the generated kernel in the emulator.

``test_bl_<number>`` is the case of that number in the project's collection of such reports; those that need a GPU's
size or speed are in ``tests/gpu/test_field_cases.py``.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fa2gen.errors import ArgumentError
from fa2gen.gate import check_forward
from fa2gen.runtime import attention, describe
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


def _qkv(
    batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, d: int, dtype: torch.dtype = BF16
) -> list[Tensor]:
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    return [_normal(batch, s, h, d, dtype=dtype, seed=seed) for seed, (s, h) in enumerate(shapes)]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    config: FwdConfig | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = attention(
        q, k, v, causal=causal, softmax_scale=scale, return_lse=True, backend="emulator", config=config
    )
    report = check_forward(out, lse, q, k, v, causal=causal, softmax_scale=scale)
    assert report.passed, report.text
    return out, lse


def test_bl_002_one_key_with_gigantic_logits() -> None:
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=BF16)
    out, lse = attention(x, x, x, softmax_scale=0.125, return_lse=True, backend="emulator")
    assert torch.equal(out, x)
    assert lse.item() == pytest.approx(1.4177e11, rel=1e-4)


@pytest.mark.parametrize(
    ("d", "dtype", "seqlen", "causal"), [(64, BF16, 704, False), (32, FP16, 705, True), (128, BF16, 705, True)]
)
def test_bl_004_very_negative_uniform_logits(d: int, dtype: torch.dtype, seqlen: int, causal: bool) -> None:
    q, k = (0.1 * _normal(1, seqlen, 1, d, dtype=dtype, seed=seed) for seed in (1, 2))
    q[..., 0], k[..., 0] = 1.0, -120.0 * math.sqrt(d)
    _, lse = _check(q, k, _normal(1, seqlen, 1, d, dtype=dtype, seed=3), causal=causal)
    assert lse[0, 0, -1].item() == pytest.approx(-120 + math.log(seqlen), abs=0.3)


@pytest.mark.parametrize("causal", [False, True])
def test_bl_008_negative_and_zero_scales(causal: bool) -> None:
    q, k, v = _qkv(1, 77, 77, 2, 2, 64)
    _check(q, k, v, causal=causal, scale=-0.125)
    _, lse = _check(q, k, v, causal=causal, scale=0.0)
    seen = torch.arange(1, 78) if causal else torch.full((77,), 77)
    torch.testing.assert_close(lse, seen.log().expand_as(lse), rtol=0, atol=1e-5)


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_bl_011_nan_and_infinity_beyond_the_length(seqlen_q: int) -> None:
    for number, length in enumerate((100, 37)):
        cache = torch.full((2, 2, 256, 2, 64), math.nan, dtype=BF16)
        cache[:, :, length:, :, ::2] = math.inf
        cache[:, :, :length] = _normal(2, 2, length, 2, 64, seed=number)
        k, v = cache[:, number : number + 1, :length]
        _check(_normal(1, seqlen_q, 4, 64, seed=9), k, v, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_bl_016_lengths_around_tile_borders(causal: bool) -> None:
    """Head dim 192; every pair of lengths, 64, 128 and other dims: on a GPU."""
    lengths = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 193, 255, 257)
    for number, seqlen_q in enumerate(lengths):
        for seqlen_k in (lengths[(7 * number + 3) % 20], lengths[-1 - number]):
            _check(*_qkv(1, seqlen_q, seqlen_k, 1, 1, 192), causal=causal)


def test_bl_017_and_070_zero_sizes() -> None:
    for b, s, h in ((0, 16, 4), (2, 0, 4), (2, 16, 0)):
        x = torch.ones(b, s, h, 64, dtype=BF16)
        for causal in (False, True):
            out, lse = attention(x, x, x, causal=causal, return_lse=True, backend="emulator")
            assert (out.shape, lse.shape) == (x.shape, (b, h, s))
    q = torch.ones(2, 16, 4, 64, dtype=BF16)
    with pytest.raises(ArgumentError, match="head_dim 0"):
        attention(q[..., :0], q[..., :0], q[..., :0], backend="emulator")
    with pytest.raises(ArgumentError, match="q has 4 heads and k and v have 0"):
        attention(q, q[:, :, :0], q[:, :, :0], backend="emulator")


@pytest.mark.parametrize("seqlen_q", [1, 3, 8])
def test_bl_019_a_few_queries_are_the_last_rows(seqlen_q: int) -> None:
    q, k, v = _qkv(1, 9, 300, 8, 2, 128)
    all_rows = attention(q, k, v, causal=True, backend="emulator")
    last = attention(q[:, -seqlen_q:], k, v, causal=True, backend="emulator")
    assert isinstance(all_rows, Tensor)
    assert torch.equal(all_rows[:, -seqlen_q:], last)


def test_bl_024_027_028_030_each_tensor_has_strides_of_its_own() -> None:
    q, k, v = _qkv(3, 3, 3, 3, 3, 64)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for tensors in (heads_first, (q, k, heads_first[2]), (q, heads_first[1], v)):
        _check(*tensors)
    longer = [_normal(3, 5, 3, 64, seed=seed)[:, :3] for seed in (7, 8)]
    for tensors in ((q, k, longer[1]), (q, longer[0], v)):
        _check(*tensors)
    shared = k[:, :, :1].expand(3, 3, 3, 64)
    _check(q, shared, shared)
    cache = _normal(4, 400, 2, 64)
    _check(_normal(6, 33, 4, 64)[::3], cache[::2, :50], cache[::2, :50])
    # The stride of a single element is arbitrary: it must not count as unaligned.
    _check(torch.as_strided(q, (1, 1, 3, 64), (3, 5, 64, 1)), k[:1], v[:1])


@pytest.mark.parametrize("d", [40, 24, 20])
def test_bl_034_starts_that_are_hardly_aligned(d: int) -> None:
    """Sequences that begin at rows of 80, 48 and 40 bytes in one buffer: multiples of 16 and of no more, or of 8."""
    packed = [_normal(1, 16, 1, d, dtype=FP16, seed=seed) for seed in range(3)]
    for start, end in itertools.pairwise((0, 1, 4, 9, 16)):
        _check(*(x[:, start:end] for x in packed), causal=True)


@pytest.mark.parametrize("d", [8, 96, 200])
@pytest.mark.parametrize("seqlen_q", [1, 130])
def test_bl_034_unaligned_bases_and_pitches(seqlen_q: int, d: int) -> None:
    """Base one element off, rows 5 elements longer than their data: in place for one query, in a copy for 260."""

    def odd(x: Tensor) -> Tensor:
        storage = torch.full((*x.shape[:3], d + 5), math.nan, dtype=BF16)
        view = storage[..., 1 : 1 + d]
        return view.copy_(x)

    q, k, v = _qkv(2, seqlen_q, 33, 2, 1, d)
    assert describe(odd(q), odd(k), v, backend="emulator").spec.alignment == (2 if seqlen_q == 1 else 16)
    for tensors in ((odd(q), odd(k), odd(v)), (q, k, odd(v)), (odd(q), k, v)):
        _check(*tensors, causal=True)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((33, 2, 2), "q has 33 heads and k and v have 2"),
        ((3, 2, 2), "q has 3 heads and k and v have 2"),
        ((2, 4, 4), "q has 2 heads and k and v have 4"),
        ((4, 2, 1), r"k has shape \(1, 5, 2, 64\) and v \(1, 5, 1, 64\)"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_bl_045_heads_that_do_not_divide(heads: tuple[int, int, int], message: str, backend: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        attention(*(torch.zeros(1, 5, h, 64, dtype=BF16) for h in heads), backend=backend)


def test_bl_046_fewer_keys_than_query_heads_of_a_group() -> None:
    _check(*_qkv(1, 1, 3, 32, 4, 128), causal=True)


def test_bl_051_more_queries_than_keys() -> None:
    _, lse = _check(*_qkv(1, 300, 150, 2, 2, 64), causal=True)
    assert (lse[..., :150] == -math.inf).all()
    assert lse[..., 150:].isfinite().all()
    zeros, v = torch.zeros(1, 5, 1, 64, dtype=BF16), torch.tensor([1.0, 2.0]).bfloat16().view(1, 2, 1, 1)
    out, lse = _check(zeros, zeros[:, :2], v.expand(1, 2, 1, 64).contiguous(), causal=True)
    assert out[0, :, 0, 5].tolist() == [0.0, 0.0, 0.0, 1.0, 1.5]
    assert lse[0, 0].tolist() == pytest.approx([-math.inf] * 3 + [0.0, math.log(2)], abs=1e-6)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "expected"), [(1, 16, [7.5]), (2, 5, [1.5, 2.0])])
def test_bl_052_causal_is_bottom_right(seqlen_q: int, seqlen_k: int, expected: list[float]) -> None:
    k = torch.zeros(1, seqlen_k, 1, 64, dtype=BF16)
    v = torch.arange(float(seqlen_k)).bfloat16().view(1, -1, 1, 1).repeat(1, 1, 1, 64)
    out, _ = _check(k[:, :seqlen_q], k, v, causal=True)
    assert out[0, :, 0, 63].tolist() == expected


@pytest.mark.parametrize("d", [128, 192])
def test_bl_066_zero_keys(d: int) -> None:
    for seqlen_q, causal in itertools.product((1, 64, 128, 256), (False, True)):
        out, lse = _check(*_qkv(1, seqlen_q, 0, 4, 4, d), causal=causal)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_bl_097_lse_is_the_natural_log() -> None:
    zeros, v = torch.zeros(1, 4, 1, 64, dtype=BF16), torch.arange(1.0, 5.0).bfloat16().view(1, 4, 1, 1)
    out, lse = _check(zeros, zeros, v.repeat(1, 1, 1, 64))
    assert lse[0, 0].tolist() == pytest.approx([math.log(4)] * 4, abs=1e-6)
    assert (out == 2.5).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_bl_080_083_other_dtypes(dtype: torch.dtype) -> None:
    q, k, v = _qkv(1, 5, 7, 1, 1, 64)
    message = f"q has dtype {dtype}; torch.float16 and torch.bfloat16 are supported"
    for tensors in ((q.to(dtype), k.to(dtype), v.to(dtype)), (q.to(dtype), k, v)):
        with pytest.raises(ArgumentError, match=message):
            attention(*tensors, backend="emulator")
        with torch.autocast("cpu", dtype=BF16):
            if dtype is torch.float32:  # which autocast is there to cast
                assert torch.equal(attention(*tensors, backend="emulator"), attention(q, k, v, backend="emulator"))
            else:
                with pytest.raises(ArgumentError, match=message):
                    attention(*tensors, backend="emulator")


@pytest.mark.parametrize("d", [59, 64])
def test_bl_103_no_route_drops_an_option(d: int) -> None:
    """Aligned, unaligned and padded; each option changes the result, and as the reference says."""
    q, k, v = _qkv(1, 9, 33, 4, 2, d)
    unaligned = torch.zeros(k.numel() + 1, dtype=BF16)[1:].view(k.shape).copy_(k)
    for keys in (k, unaligned):
        results = [
            _check(q, keys, v, causal=causal, scale=scale)[0] for causal in (False, True) for scale in (None, 1.0)
        ]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))


def test_bl_106_a_row_depends_on_its_own_batch_only() -> None:
    q, k, v = _qkv(4, 20, 150, 1, 1, 64)
    together = attention(q, k, v, backend="emulator")
    for batch in range(4):
        one = slice(batch, batch + 1)
        assert torch.equal(attention(q[one], k[one], v[one], backend="emulator"), together[one])


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


@pytest.mark.parametrize("scale", [0.0, 1e-37])
def test_scales_whose_products_with_scores_matter(scale: float) -> None:
    # Scores of up to 1e37: times 1e-37 they decide the weights, times 0 they must not.
    q = torch.full((1, 3, 1, 8), 1e18, dtype=BF16)
    _check(q, 1e18 * _normal(1, 9, 1, 8), _normal(1, 9, 1, 8, seed=1), scale=scale)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.slug() if config else "default")
@pytest.mark.parametrize("causal", [False, True])
def test_huge_and_tiny_numbers(config: FwdConfig | None, causal: bool) -> None:
    q, k, v = _qkv(1, 40, 100, 1, 1, 64)
    for factor in (60.0, 1e4, 1e-6):
        _check(factor * q, k, v, causal=causal, config=config)
    # The guarded softmax of bf16 wants |v| times the number of steps below 2e30.
    for tensors in ((1e30 * q, 1e-30 * k, v), (1e-30 * q, 1e30 * k, v), (q, k, 1e29 * v), (q, k, 1e-30 * v)):
        _check(*tensors, causal=causal, config=config)
    _check(1e15 * q, 1e15 * k, v, causal=causal, scale=1e-30, config=config)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.slug() if config else "default")
def test_one_key_and_one_query(config: FwdConfig | None) -> None:
    for seqlen_q, seqlen_k, causal in itertools.product((1, 40), (1, 65), (False, True)):
        q, k, v = _qkv(2, seqlen_q, seqlen_k, 1, 1, 64)
        out, _ = _check(q, k, v, causal=causal, config=config)
        if seqlen_k == 1:
            assert torch.equal(out[:, -1], v[:, 0])
