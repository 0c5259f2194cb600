"""What is measured: a kernel, its sizes and its data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tuning.report import usual_problem

if TYPE_CHECKING:
    from torch import Tensor, device

# What the inputs hold. "normal": independent normal numbers, on which a guarded softmax repairs nothing. The others
# make it repair: every query tile of 128 rows, or one in a hundred.
DATA = ("normal", "repair-1pct", "repair-all")
# Rows of a query tile that is to be repaired, and how many tiles there are to one of them in "repair-1pct".
_TILE_ROWS, _ONE_IN = 128, 100
# Exponents (base 2) by which scores grow from one key to the next on the left. Kernels take keys from right to left, 32
# and more in a step: 160 a step leave float32's range of 2^127 in every one.
_GROWTH = 5.0
# Column 0 of a query that is to be repaired. The keys then stay below fp16's 65504 up to 400,000 of them.
_AMPLITUDE = 256.0


@dataclass(frozen=True)
class Cell:
    """One row of a benchmark.

    Attributes:
        spec: What is computed; its ``kind`` too.
        problem: How much of it.
        data: One of ``DATA``.
    """

    spec: KernelSpec
    problem: Problem
    data: str = "normal"

    @property
    def flops(self) -> int:
        """Of visible query-key pairs only."""
        return self.problem.flops(self.spec)

    @property
    def lengths(self) -> str:
        """``"4096"``, or ``"1x8192"`` (queries x keys)."""
        p = self.problem
        return str(p.seqlen_q) if p.seqlen_q == p.seqlen_k else f"{p.seqlen_q}x{p.seqlen_k}"

    def label(self) -> str:
        """E.g. ``"fwd_d64_bf16_causal_gqa1 at 4096"``."""
        return f"{self.spec.slug()} at {self.lengths}" + ("" if self.data == "normal" else f", {self.data} data")


def make_cells(
    specs: Sequence[KernelSpec],
    lengths: Sequence[tuple[int, int]],
    *,
    tokens: int,
    hidden: int,
    batch: int | None = None,
    heads: int | None = None,
    data: Sequence[str] = ("normal",),
) -> list[Cell]:
    """Every combination, without repeats: by spec, then data, then length.

    Args:
        specs: Kernels.
        lengths: (queries, keys) of a sequence.
        tokens, hidden: Size of a call where ``batch`` and ``heads`` do not say it: the batch holds about so many
            tokens, and query heads are about ``hidden / head_dim``, rounded to whole groups.
        batch, heads: Sequences and query heads.
        data: Of ``DATA``.

    Raises:
        ArgumentError: ``heads`` is not a multiple of a spec's gqa_ratio.
    """
    cells = []
    for spec, kind, (seqlen_q, seqlen_k) in itertools.product(specs, data, lengths):
        problem = usual_problem(spec, seqlen_q, seqlen_k, tokens=tokens, hidden=hidden, batch=batch, heads=heads)
        cells.append(Cell(spec, problem, kind))
    return list(dict.fromkeys(cells))


def make_inputs(cell: Cell, device: str | device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a cell, (batch, seqlen, heads, head_dim), contiguous."""
    import torch

    spec, problem = cell.spec, cell.problem
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float16 if spec.dtype == "fp16" else torch.bfloat16

    def normal(seqlen: int, heads: int) -> Tensor:
        shape = (problem.batch, seqlen, heads, spec.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v = (
        normal(seqlen, heads)
        for seqlen, heads in (
            (problem.seqlen_q, problem.num_heads_q),
            (problem.seqlen_k, problem.num_heads_k),
            (problem.seqlen_k, problem.num_heads_k),
        )
    )
    if cell.data != "normal":
        _make_scores_grow(q, k, every_tile=cell.data == "repair-all")
    return q, k, v


def _make_scores_grow(q: Tensor, k: Tensor, *, every_tile: bool) -> None:
    """Let the scores of whole query tiles grow from right to left, beyond what a softmax with a fixed reference holds.

    Column 0 carries it: a ramp along the keys, an amplitude or 0 in the queries.
    """
    import torch

    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k = k.shape[1]
    slope = _GROWTH * math.sqrt(head_dim) * math.log(2) / _AMPLITUDE
    ramp = torch.arange(seqlen_k - 1, -1, -1, device=k.device, dtype=torch.float32) * slope
    k[..., 0] = ramp[None, :, None].to(k.dtype)
    tiles = math.ceil(seqlen_q / _TILE_ROWS)
    number = torch.arange(batch * heads * tiles, device=q.device).view(batch, heads, tiles)
    repaired = torch.ones_like(number, dtype=torch.bool) if every_tile else number % _ONE_IN == 0
    rows = repaired.repeat_interleave(_TILE_ROWS, dim=2)[..., :seqlen_q].transpose(1, 2)
    q[..., 0] = torch.where(rows, _AMPLITUDE, 0.0).to(q.dtype)
