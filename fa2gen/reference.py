"""Attention forward by its definition, in float64 (the reference) or with 16-bit rounding (``plain16``).

Both are computed in chunks of batches, key/value heads and query rows, so that memory stays bounded at any length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Largest intermediate (scores or one converted operand) in elements: 256 MB of float64.
MAX_CHUNK_ELEMENTS = 1 << 25


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
    seqlen_k, num_heads_k = k.shape[1], k.shape[2]
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale)
    out = q.new_zeros((batch, seqlen_q, num_heads_q, head_dim), dtype=dtype)
    lse = q.new_full((batch, num_heads_q, seqlen_q), -math.inf, dtype=dtype)
    if 0 in (batch, seqlen_q, num_heads_q, seqlen_k):
        return out, lse
    group = num_heads_q // num_heads_k
    rows = _chunk(seqlen_q, group * seqlen_k)
    cost = seqlen_k * max(group * rows, 2 * head_dim)
    heads = _chunk(num_heads_k, cost)
    batches = _chunk(batch, cost * heads)

    for b in _slices(batch, batches):
        for h in _slices(num_heads_k, heads):
            keys = k[b, :, h].to(dtype).permute(0, 2, 3, 1)  # (b, h, d, keys)
            values = v[b, :, h].to(dtype).transpose(1, 2)  # (b, h, keys, d)
            values = values.square() if squared else values
            finite = bool(torch.isfinite(values).all())
            query_heads = slice(h.start * group, h.stop * group)
            for r in _slices(seqlen_q, rows):
                visible = min(seqlen_k, r.stop + seqlen_k - seqlen_q) if causal else seqlen_k
                if visible <= 0:
                    continue
                queries = q[b, r, query_heads].to(dtype).transpose(1, 2)
                queries = queries.reshape(queries.shape[0], -1, group, *queries.shape[2:])
                mask = _causal_mask(r, visible, seqlen_k - seqlen_q, q.device) if causal else None
                weights, row_lse = _softmax(queries, keys[..., :visible], scale, mask, rounded_to)
                weights = weights.square_() if squared else weights
                o = _weighted_sum(weights, values[..., :visible, :], mask, finite)
                out[b, r, query_heads] = _round(o, rounded_to).flatten(1, 2).transpose(1, 2)
                lse[b, query_heads, r] = row_lse.flatten(1, 2)
    return out, lse


def _softmax(
    queries: Tensor, keys: Tensor, scale: float, mask: Tensor | None, rounded_to: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Weights (b, h, group, rows, keys) and LSE of queries (b, h, group, rows, d); mask (rows, keys), True: visible."""
    scores = torch.matmul(queries.flatten(2, 3), keys).view(*queries.shape[:4], -1)
    scores = _round(scores.mul_(scale), rounded_to)
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    row_max = scores.amax(dim=-1, keepdim=True)
    # A row with no visible key has row_max = -inf; exp(-inf - 0) = 0 keeps it at zero.
    weights = scores.sub_(torch.where(row_max == -math.inf, 0.0, row_max)).exp_()
    row_sum = weights.sum(dim=-1, keepdim=True)
    lse = (row_max + torch.log(row_sum)).squeeze(-1)
    return _round(weights.div_(torch.where(row_sum == 0, 1.0, row_sum)), rounded_to), lse


def _weighted_sum(weights: Tensor, values: Tensor, mask: Tensor | None, finite: bool) -> Tensor:
    """Weights times values (b, h, keys, d): a value row reaches only the rows that see it, NaN or not."""
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


def _causal_mask(rows: slice, keys: int, offset: int, device: torch.device) -> Tensor:
    i = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    return torch.arange(keys, device=device) <= i + offset


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)


def _chunk(extent: int, cost: int) -> int:
    """How many of ``extent`` items, each ``cost`` elements, fit the bound (at least one)."""
    return max(1, min(extent, MAX_CHUNK_ELEMENTS // max(1, cost)))


def _slices(extent: int, step: int) -> Iterator[slice]:
    for start in range(0, extent, step):
        yield slice(start, min(start + step, extent))
