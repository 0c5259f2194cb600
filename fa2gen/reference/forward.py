"""Attention forward by its definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .chunks import chunks, default_scale, round_to


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp, computed in ``dtype`` on the tensors' device.

    A key that a query does not see has no influence on it whatever it holds: scores are replaced by the mask, not added
    to, and value rows take part in a product only where they are visible, so NaN and infinity stay where they are.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), any strides.
        k, v: (batch, seqlen_k, num_heads_k, head_dim); num_heads_q is a multiple of num_heads_k and query head h reads
            key/value head ``h // (num_heads_q // num_heads_k)``.
        causal: Query i sees key j iff ``j <= i + seqlen_k - seqlen_q``.
        softmax_scale: Factor of the scores, any finite number; None is ``1 / sqrt(head_dim)``.
        dtype: Floating-point type of the whole computation and of the results.

    Returns:
        Output (batch, seqlen_q, num_heads_q, head_dim) and natural-log LSE (batch, num_heads_q, seqlen_q), both in
        ``dtype``. A query that sees no key has output 0 and LSE -inf.
    """
    return _forward(q, k, v, causal, softmax_scale, dtype, rounded_to=None)


def plain16_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """Output of the same formula evaluated in q's 16-bit type: what an unfused program would give.

    Scores, probabilities and the output are each rounded once to q's dtype; products accumulate in float32, as matrix
    units do. Its error against :func:`attention_forward` sizes the tolerance of the gate.

    Returns:
        Output in q's dtype; elements are not finite where a scaled score leaves the range of that type.
    """
    # A caller's autocast would round the products too (float64 it leaves alone).
    with torch.autocast(q.device.type, enabled=False):
        out, _ = _forward(q, k, v, causal, softmax_scale, torch.float32, rounded_to=q.dtype)
    return out.to(q.dtype)


def weight_noise(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """Size of the error that rounding each weight independently leaves in the output, per unit roundoff.

    ``sqrt(sum_j w_j^2 v_j^2)`` in float64, shaped like the output.
    """
    out, _ = _forward(q, k, v, causal, softmax_scale, torch.float64, rounded_to=None, squared=True)
    return out.sqrt_()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    dtype: torch.dtype,
    rounded_to: torch.dtype | None,
    squared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention in ``dtype``; ``squared`` sums squared weights times squared values instead."""
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    scale = default_scale(softmax_scale, head_dim)
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full((batch, num_heads_q, seqlen_q), -math.inf, dtype=dtype)
    for chunk in chunks(q, k, causal):
        weights, row_lse = softmax(chunk.queries(q, dtype), chunk.keys(k, dtype), scale, chunk.mask, rounded_to)
        values = chunk.keys(v, dtype)
        if squared:
            weights, values = weights.square_(), values.square()
        chunk.put_queries(out, round_to(weighted_sum(weights, values, chunk.mask), rounded_to))
        chunk.put_rows(lse, row_lse)
    return out, lse


def softmax(
    queries: Tensor, keys: Tensor, scale: float, mask: Tensor | None, rounded_to: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Weights (b, h, group, rows, keys) and LSE (b, h, group, rows) of queries (b, h, group, rows, d).

    keys is (b, h, keys, d); mask (rows, keys), True: visible.
    """
    scores = pairwise(queries, keys)
    scores = round_to(scores.mul_(scale), rounded_to)
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    row_max = scores.amax(dim=-1, keepdim=True)
    # A row with no visible key has row_max = -inf; exp(-inf - 0) = 0 keeps it at zero.
    weights = scores.sub_(torch.where(row_max == -math.inf, 0.0, row_max)).exp_()
    row_sum = weights.sum(dim=-1, keepdim=True)
    lse = (row_max + torch.log(row_sum)).squeeze(-1)
    return round_to(weights.div_(torch.where(row_sum == 0, 1.0, row_sum)), rounded_to), lse


def pairwise(queries: Tensor, keys: Tensor) -> Tensor:
    """Dot products (b, h, group, rows, keys) of queries (b, h, group, rows, d) and keys (b, h, keys, d)."""
    return torch.matmul(queries.flatten(2, 3), keys.transpose(2, 3)).view(*queries.shape[:4], -1)


def weighted_sum(weights: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Weights times values (b, h, keys, d): a value row reaches only the rows that see it, NaN or not."""
    finite = bool(torch.isfinite(values).all())
    known = values if finite else torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    out = torch.matmul(weights.flatten(2, 3), known).view(*weights.shape[:4], -1)
    return out if finite else _with_non_finite_values(out, values, mask)


def _with_non_finite_values(out: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Put NaN and infinities of visible value rows where a sum with positive weights would have them."""
    visible = values.new_ones((out.shape[-2], values.shape[-2])) if mask is None else mask.to(values.dtype)

    def sees(flags: Tensor) -> Tensor:
        return torch.matmul(visible, flags.to(values.dtype)).unsqueeze(2) > 0

    positive, negative = sees(values == math.inf), sees(values == -math.inf)
    out = torch.where(positive, math.inf, torch.where(negative, -math.inf, out))
    return torch.where(sees(values.isnan()) | (positive & negative), math.nan, out)
