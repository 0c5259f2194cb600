"""Attention backward by its formula, from q, k, v and the gradients of the output and of the LSE.

With P = exp(S - LSE), D = rowsum(dO * O) - dLSE and dS = P * (dO V^T - D): dV = P^T dO, dQ = scale dS K and
dK = scale dS^T Q, each key/value head summed over the query heads of its group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .chunks import Chunk, chunks, default_scale, round_to
from .forward import pairwise, softmax, weighted_sum

Gradients = tuple[Tensor, Tensor, Tensor]


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
        p, dp, ds: P, dO V^T and dS, (b, h, group, rows, visible); p and ds are 0 where a row does not see a key.
        lse: (b, h, group, rows, 1); -inf for rows that see no key.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    o: Tensor
    p: Tensor
    dp: Tensor
    ds: Tensor
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
    for chunk in chunks(q, k, causal):
        queries, keys, values = chunk.queries(q, dtype), chunk.keys(k, dtype), chunk.keys(v, dtype)
        p, lse = softmax(queries, keys, scale, chunk.mask, rounded_to)
        p = _masked(p, chunk.mask)
        o = round_to(weighted_sum(p, values, chunk.mask), rounded_to)
        grad = chunk.queries(do, dtype)
        dp = round_to(pairwise(grad, values), rounded_to)
        delta = (grad * o).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - chunk.per_row(dlse, dtype)
        ds = round_to(_masked(p * (dp - delta), chunk.mask), rounded_to)
        yield chunk, Terms(queries, keys, values, grad, o, p, dp, ds, lse.unsqueeze(-1))


def to_queries(weights: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Sums over the keys that a row sees: (b, h, group, rows, d) of keys (b, h, visible, d)."""
    group, rows = weights.shape[2:4]
    per_head = None if mask is None else mask.repeat(group, 1)
    return _matmul_of_seen(weights.flatten(2, 3), keys, per_head).unflatten(2, (group, rows))


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
