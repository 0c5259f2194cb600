"""Attention by its definition, forward and backward: in float64 (the reference) or with 16-bit rounding (``plain16``).

Everything is computed in chunks of batches, key/value heads and query rows, so that memory stays bounded at any length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Largest intermediate (scores or one converted operand) in elements: 256 MB of float64.
MAX_CHUNK_ELEMENTS = 1 << 25
Gradients = tuple[Tensor, Tensor, Tensor]


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
    for chunk in _chunks(q, k, causal):
        weights, row_lse = _softmax(chunk.queries(q, dtype), chunk.keys(k, dtype), scale, chunk.mask, rounded_to)
        values = chunk.keys(v, dtype)
        if squared:
            weights, values = weights.square_(), values.square()
        chunk.put_queries(out, _round(_weighted_sum(weights, values, chunk.mask), rounded_to))
        chunk.put_rows(lse, row_lse)
    return out, lse


def _softmax(
    queries: Tensor, keys: Tensor, scale: float, mask: Tensor | None, rounded_to: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Weights (b, h, group, rows, keys) and LSE (b, h, group, rows) of queries (b, h, group, rows, d).

    keys is (b, h, keys, d); mask (rows, keys), True: visible.
    """
    scores = pairwise(queries, keys)
    scores = _round(scores.mul_(scale), rounded_to)
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    row_max = scores.amax(dim=-1, keepdim=True)
    # A row with no visible key has row_max = -inf; exp(-inf - 0) = 0 keeps it at zero.
    weights = scores.sub_(torch.where(row_max == -math.inf, 0.0, row_max)).exp_()
    row_sum = weights.sum(dim=-1, keepdim=True)
    lse = (row_max + torch.log(row_sum)).squeeze(-1)
    return _round(weights.div_(torch.where(row_sum == 0, 1.0, row_sum)), rounded_to), lse


def pairwise(queries: Tensor, keys: Tensor) -> Tensor:
    """Dot products (b, h, group, rows, keys) of queries (b, h, group, rows, d) and keys (b, h, keys, d)."""
    return torch.matmul(queries.flatten(2, 3), keys.transpose(2, 3)).view(*queries.shape[:4], -1)


def _weighted_sum(weights: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
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


@torch.no_grad()
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
) -> Gradients:
    """Gradients of :func:`attention_forward` in float64, on the tensors' device.

    A key that a query does not see has no part in that query's gradient, nor the query in the key's, whatever they
    hold. A visible NaN or infinity makes NaN of what it reaches.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), any strides.
        k, v: (batch, seqlen_k, num_heads_k, head_dim); num_heads_q is a multiple of num_heads_k.
        do: Gradient of the output, shaped like q; any strides, 0 included.
        causal: Query i sees key j iff ``j <= i + seqlen_k - seqlen_q``.
        softmax_scale: Factor of the scores, any finite number; None is ``1 / sqrt(head_dim)``.
        dlse: Gradient of the natural-log LSE (batch, num_heads_q, seqlen_q); None is zero. A row that sees no key has
            no gradient, whatever its dlse.

    Returns:
        dq, dk and dv in float64, shaped like q, k and v. Rows of queries that see no key are 0, and rows of keys that
        no query sees.
    """
    return _backward(q, k, v, do, causal, softmax_scale, dlse, torch.float64, rounded_to=None)


@torch.no_grad()
def plain16_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
) -> Gradients:
    """The same gradients as an unfused program in q's 16-bit type would give them.

    Scores, probabilities, the output, dP, dS and the gradients are each rounded once to q's dtype; D is a float32 sum
    over the rounded output; products accumulate in float32.

    Returns:
        dq, dk and dv in q's dtype; elements are not finite where an intermediate leaves the range of that type.
    """
    # A caller's autocast would round the products too (float64 it leaves alone).
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = _backward(q, k, v, do, causal, softmax_scale, dlse, torch.float32, rounded_to=q.dtype)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@dataclass(frozen=True)
class Terms:
    """What the formula makes of a chunk.

    Attributes:
        q, do, o: Of its query rows, (b, h, group, rows, d).
        k, v: Of its keys, (b, h, visible, d).
        p, ds: P and dS, (b, h, group, rows, visible); 0 where a row does not see a key.
        dp, dp_less_d: dO V^T and what it leaves of D, (b, h, group, rows, visible).
        lse: (b, h, group, rows, 1); -inf for rows that see no key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    o: Tensor
    p: Tensor
    ds: Tensor
    dp: Tensor
    dp_less_d: Tensor
    lse: Tensor


def chunk_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    causal: bool,
    scale: float,
    dlse: Tensor | None,
    dtype: torch.dtype,
    rounded_to: torch.dtype | None,
) -> Iterator[tuple[Chunk, Terms]]:
    """Each chunk of a backward and its terms in ``dtype``, every one rounded to ``rounded_to``."""
    for chunk in _chunks(q, k, causal):
        queries, keys, values = chunk.queries(q, dtype), chunk.keys(k, dtype), chunk.keys(v, dtype)
        p, lse = _softmax(queries, keys, scale, chunk.mask, rounded_to)
        p = _masked(p, chunk.mask)
        o = _round(_weighted_sum(p, values, chunk.mask), rounded_to)
        grad = chunk.queries(do, dtype)
        dp = _round(pairwise(grad, values), rounded_to)
        delta = (grad * o).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - chunk.per_row(dlse, dtype)
        dp_less_d = dp - delta
        ds = _round(_masked(p * dp_less_d, chunk.mask), rounded_to)
        yield chunk, Terms(queries, keys, values, grad, o, p, ds, dp, dp_less_d, lse.unsqueeze(-1))


def to_queries(weights: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Sums over the keys that a row sees: (b, h, group, rows, d) of keys (b, h, visible, d)."""
    group, rows = weights.shape[2:4]
    per_head = None if mask is None else mask.repeat(group, 1)
    out = _matmul_of_seen(weights.flatten(2, 3), keys, per_head)
    return out.view(*out.shape[:2], group, rows, -1)


def to_keys(weights: Tensor, queries: Tensor, mask: Tensor | None) -> Tensor:
    """Sums over the rows, of all heads of the group, that see a key: (b, h, visible, d) of queries."""
    per_head = None if mask is None else mask.repeat(weights.shape[2], 1).T
    return _matmul_of_seen(weights.flatten(2, 3).transpose(2, 3), queries.flatten(2, 3), per_head)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    causal: bool,
    softmax_scale: float | None,
    dlse: Tensor | None,
    dtype: torch.dtype,
    rounded_to: torch.dtype | None,
) -> Gradients:
    scale = default_scale(softmax_scale, q.shape[-1])
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for chunk, terms in chunk_terms(q, k, v, do, causal, scale, dlse, dtype, rounded_to):
        chunk.put_queries(dq, to_queries(terms.ds, terms.k, chunk.mask).mul_(scale))
        chunk.add_keys(dk, to_keys(terms.ds, terms.q, chunk.mask).mul_(scale))
        chunk.add_keys(dv, to_keys(terms.p, terms.do, chunk.mask))
    return dq, dk, dv


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask, 0.0)


def _matmul_of_seen(weights: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
    """weights (b, h, m, n) x rows (b, h, n, d), weights being 0 where mask (m, n) is False, whatever the row holds."""
    finite = torch.isfinite(rows)
    if bool(finite.all()):
        return torch.matmul(weights, rows)
    reach = rows.new_ones(weights.shape[-2:]) if mask is None else mask.to(rows.dtype)
    out = torch.matmul(weights, rows.masked_fill(~finite, 0.0))
    return out.masked_fill_(torch.matmul(reach, (~finite).to(rows.dtype)) > 0, torch.nan)


@dataclass(frozen=True)
class Chunk:
    """Some query rows of some heads, and the keys that any of them sees.

    Attributes:
        batches, heads, rows: What it covers; ``heads`` are key/value heads.
        group: Query heads per key/value head.
        visible: Keys 0 to ``visible - 1`` are seen by the last row, and no row sees others.
        mask: (rows, visible), True where a row sees a key; None where every row sees all of them.
    """

    batches: slice
    heads: slice
    rows: slice
    group: int
    visible: int
    mask: Tensor | None

    @property
    def query_heads(self) -> slice:
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    def queries(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, h, group, rows, d) of x (batch, seqlen_q, num_heads_q, d)."""
        part = x[self.batches, self.rows, self.query_heads].to(dtype).transpose(1, 2)
        return part.reshape(part.shape[0], -1, self.group, *part.shape[2:])

    def keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, h, visible, d) of x (batch, seqlen_k, num_heads_k, d)."""
        return x[self.batches, : self.visible, self.heads].to(dtype).transpose(1, 2)

    def per_row(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, h, group, rows, 1) of x (batch, num_heads_q, seqlen_q)."""
        part = x[self.batches, self.query_heads, self.rows].to(dtype)
        return part.reshape(part.shape[0], -1, self.group, part.shape[2], 1)

    def put_queries(self, x: Tensor, part: Tensor) -> None:
        """Write (b, h, group, rows, d) into x (batch, seqlen_q, num_heads_q, d)."""
        x[self.batches, self.rows, self.query_heads] = part.flatten(1, 2).transpose(1, 2)

    def put_rows(self, x: Tensor, part: Tensor) -> None:
        """Write (b, h, group, rows) into x (batch, num_heads_q, seqlen_q)."""
        x[self.batches, self.query_heads, self.rows] = part.flatten(1, 2)

    def add_keys(self, x: Tensor, part: Tensor) -> None:
        """Add (b, h, visible, d) to x (batch, seqlen_k, num_heads_k, d)."""
        x[self.batches, : self.visible, self.heads] += part.transpose(1, 2)


def _chunks(q: Tensor, k: Tensor, causal: bool) -> Iterator[Chunk]:
    """The chunks of a call that see keys at all, in order; every row of the rest sees none."""
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k, num_heads_k = k.shape[1], k.shape[2]
    if 0 in (batch, seqlen_q, num_heads_q, seqlen_k):
        return
    group = num_heads_q // num_heads_k
    rows = chunk_extent(seqlen_q, group * seqlen_k)
    cost = seqlen_k * max(group * rows, 2 * head_dim)
    heads = chunk_extent(num_heads_k, cost)
    batches = chunk_extent(batch, cost * heads)
    for b in slices(batch, batches):
        for h in slices(num_heads_k, heads):
            for r in slices(seqlen_q, rows):
                visible = min(seqlen_k, r.stop + seqlen_k - seqlen_q) if causal else seqlen_k
                if visible > 0:
                    mask = _causal_mask(r, visible, seqlen_k - seqlen_q, q.device) if causal else None
                    yield Chunk(b, h, r, group, visible, mask)


def default_scale(softmax_scale: float | None, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale)


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x with its values rounded to ``dtype``; None: as they are."""
    return x if dtype is None else x.to(dtype).to(x.dtype)


def chunk_extent(extent: int, cost: int) -> int:
    """How many of ``extent`` items, each ``cost`` elements, fit the bound (at least one)."""
    return max(1, min(extent, MAX_CHUNK_ELEMENTS // max(1, cost)))


def slices(extent: int, step: int) -> Iterator[slice]:
    for start in range(0, extent, step):
        yield slice(start, min(start + step, extent))


def _causal_mask(rows: slice, keys: int, offset: int, device: torch.device) -> Tensor:
    i = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    return torch.arange(keys, device=device) <= i + offset
