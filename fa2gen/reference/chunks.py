"""Chunks of attention: batches, key/value heads and query rows whose scores fit a bound together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Largest intermediate (scores or one converted operand) in elements: 256 MB of float64.
MAX_CHUNK_ELEMENTS = 1 << 25


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
        return x[self.batches, self.rows, self.query_heads].to(dtype).transpose(1, 2).unflatten(1, (-1, self.group))

    def keys(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, h, visible, d) of x (batch, seqlen_k, num_heads_k, d)."""
        return x[self.batches, : self.visible, self.heads].to(dtype).transpose(1, 2)

    def per_row(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, h, group, rows, 1) of x (batch, num_heads_q, seqlen_q)."""
        return x[self.batches, self.query_heads, self.rows].to(dtype).unflatten(1, (-1, self.group)).unsqueeze(-1)

    def put_queries(self, x: Tensor, part: Tensor) -> None:
        """Write (b, h, group, rows, d) into x (batch, seqlen_q, num_heads_q, d)."""
        x[self.batches, self.rows, self.query_heads] = part.flatten(1, 2).transpose(1, 2)

    def put_rows(self, x: Tensor, part: Tensor) -> None:
        """Write (b, h, group, rows) into x (batch, num_heads_q, seqlen_q)."""
        x[self.batches, self.query_heads, self.rows] = part.flatten(1, 2)

    def add_keys(self, x: Tensor, part: Tensor) -> None:
        """Add (b, h, visible, d) to x (batch, seqlen_k, num_heads_k, d)."""
        x[self.batches, : self.visible, self.heads] += part.transpose(1, 2)


def chunks(q: Tensor, k: Tensor, causal: bool) -> Iterator[Chunk]:
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


def round_to(x: Tensor, dtype: torch.dtype | None) -> Tensor:
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
