"""What is measured: a kernel, its sizes and its data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tuning.report import usual_problem

if TYPE_CHECKING:
    from torch import Tensor, device

# The forward alone; the backward alone, of a forward that ran before; both in a row, as a training step has them.
PASSES = ("fwd", "bwd", "fwd+bwd")
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
        with_forward: The forward is measured too, before the backward that ``spec`` is.
    """

    spec: KernelSpec
    problem: Problem
    data: str = "normal"
    with_forward: bool = False

    def __post_init__(self) -> None:
        if self.with_forward and self.spec.kind != "bwd":
            raise ArgumentError("with_forward is for a spec of kind bwd")

    @property
    def direction(self) -> str:
        """One of ``PASSES``."""
        return "fwd+bwd" if self.with_forward else self.spec.kind

    @property
    def is_backward(self) -> bool:
        """There are gradients to compute."""
        return self.spec.kind == "bwd"

    @property
    def forward_spec(self) -> KernelSpec:
        """Of the forward kernel that belongs to this cell."""
        return dataclasses.replace(self.spec, kind="fwd", deterministic=False)

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """What is measured, in the order in which it runs."""
        return (self.forward_spec, self.spec) if self.with_forward else (self.spec,)

    @property
    def flops(self) -> int:
        """Of visible query-key pairs only."""
        return sum(map(self.problem.flops, self.specs))

    @property
    def min_bytes(self) -> int:
        """Bytes that must cross HBM."""
        return sum(map(self.problem.min_bytes, self.specs))

    @property
    def lengths(self) -> str:
        """``"4096"``, or ``"1x8192"`` (queries x keys)."""
        p = self.problem
        return str(p.seqlen_q) if p.seqlen_q == p.seqlen_k else f"{p.seqlen_q}x{p.seqlen_k}"

    def slug(self) -> str:
        """E.g. ``"fwd_d64_bf16_causal_gqa1"``, ``"fwd+bwd_d64_bf16_causal_gqa1"``."""
        return ("fwd+" if self.with_forward else "") + self.spec.slug()

    def label(self) -> str:
        """E.g. ``"fwd_d64_bf16_causal_gqa1 at 4096"``."""
        return f"{self.slug()} at {self.lengths}" + ("" if self.data == "normal" else f", {self.data} data")


def make_cells(
    specs: Sequence[KernelSpec],
    lengths: Sequence[tuple[int, int]],
    *,
    tokens: int,
    hidden: int,
    batch: int | None = None,
    heads: int | None = None,
    data: Sequence[str] = ("normal",),
    passes: Sequence[str] = ("fwd",),
) -> list[Cell]:
    """Every combination, without repeats: by pass, then spec, then data, then length.

    Args:
        specs: Forward kernels.
        lengths: (queries, keys) of a sequence.
        tokens, hidden: Size of a call where ``batch`` and ``heads`` do not say it: the batch holds about so many
            tokens, and query heads are about ``hidden / head_dim``, rounded to whole groups.
        batch, heads: Sequences and query heads.
        data: Of ``DATA``; other than normal for the forward alone, whose softmax it is about.
        passes: Of ``PASSES``.

    Raises:
        ArgumentError: ``heads`` is not a multiple of a spec's gqa_ratio, or data that a pass does not take.
        UnsupportedError: No backward kernel has a spec's head dim.
    """
    cells = []
    for direction, spec, kind, (seqlen_q, seqlen_k) in itertools.product(passes, specs, data, lengths):
        if direction != "fwd" and kind != "normal":
            raise ArgumentError(f"--data {kind} is about the forward's softmax; --pass {direction} takes normal data")
        problem = usual_problem(spec, seqlen_q, seqlen_k, tokens=tokens, hidden=hidden, batch=batch, heads=heads)
        measured = spec if direction == "fwd" else _backward_spec(spec, direction)
        cells.append(Cell(measured, problem, kind, with_forward=direction == "fwd+bwd"))
    return list(dict.fromkeys(cells))


def _backward_spec(spec: KernelSpec, direction: str) -> KernelSpec:
    if spec.alignment != 16:
        raise UnsupportedError(
            f"--headdim {spec.head_dim} with --pass {direction}: backward kernels have head dims that are multiples of "
            "8, others run padded to one"
        )
    return dataclasses.replace(spec, kind="bwd")


def make_inputs(cell: Cell, device: str | device, seed: int) -> tuple[Tensor, ...]:
    """q, k and v of a cell, for gradients also that of the output; (batch, seqlen, heads, head_dim), contiguous."""
    import torch

    spec, p = cell.spec, cell.problem
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float16 if spec.dtype == "fp16" else torch.bfloat16
    queries, keys = (p.seqlen_q, p.num_heads_q), (p.seqlen_k, p.num_heads_k)
    tensors = tuple(
        torch.randn((p.batch, *extents, spec.head_dim), generator=generator, device=device, dtype=dtype)
        for extents in (queries, keys, keys, *([queries] if cell.is_backward else []))
    )
    if cell.data != "normal":
        _make_scores_grow(*tensors[:2], every_tile=cell.data == "repair-all")
    return tensors


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
