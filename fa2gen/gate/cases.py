"""Inputs that broken kernels fail: sizes at tile edges, keys that hold all the weight, scores that defeat a softmax.

Sizes come from the config's tiles. Data are drawn on the CPU from a seed, so every device sees the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa2gen.errors import ArgumentError
from fa2gen.problem import Problem
from fa2gen.spec import ForwardConfig, KernelSpec

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("contiguous", "padded", "heads_first")
Adder = Callable[[Any, Any], None]
# Said wherever numbers are made: a process that runs a model may have set other defaults.
DRAWN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


@dataclass(frozen=True)
class GateCase:
    """One input of the gate.

    Attributes:
        problem: Sizes.
        data: How q, k and v are made; ``amount`` is its parameter and ``period`` the keys per step it is built on.

            - ``normal``: standard normal, q times ``amount``.
            - ``walk``: each row's weight lies on one key (its logit leads by about 4 sqrt(head_dim)); the rows walk
              over every tile edge and then over every key. Causal rows also face a like key just beyond their diagonal.
            - ``growing``, ``falling``, ``both``: logits change by ``amount`` for every ``period`` keys, upwards,
              downwards, or upwards with one row of every 16, at changing places, downwards.
            - ``spike_first``, ``spike_last``: the first or last key leads by ``amount``.
            - ``cold_first``, ``cold_last``: the keys of the first or last tile of ``period`` lie ``amount`` below the
              rest.
            - ``constant``: every element of q and k is ``amount``.
        amount, period: See ``data``.
        softmax_scale: Factor of the scores.
        v_scale: Factor of v.
        layout: ``contiguous``, or a view into NaN: ``padded`` (batch, seqlen, heads, head_dim) with gaps on every axis,
            ``heads_first`` (batch, heads, seqlen, head_dim) in memory.
        seed: Of the random numbers.
        grad_layout: Layout of the output's gradient, backward only: as ``layout``, or a view without memory of its own,
            ``broadcast_row`` (every row of a head has the same numbers, row stride 0) or ``expanded`` (every row of
            every head has; batch, row and head strides are 0).
        grad_scale: Factor of the output's gradient, which is standard normal, and of that of the LSE.
        dlse: Whether the LSE has a gradient.
    """

    problem: Problem
    data: str
    softmax_scale: float
    amount: float = 1.0
    period: int = 1
    v_scale: float = 1.0
    layout: str = "contiguous"
    seed: int = 0
    grad_layout: str = "contiguous"
    grad_scale: float = 1.0
    dlse: bool = False

    def label(self) -> str:
        """E.g. ``growing(8)/64 b1 q17 k385 h1:1 padded``."""
        p = self.problem
        text = f"{self.data}({self.amount:g})/{self.period} b{p.batch} q{p.seqlen_q} k{p.seqlen_k}"
        text += f" h{p.num_heads_q}:{p.num_heads_k} {self.layout} scale {self.softmax_scale:.3g}"
        text += "" if self.v_scale == 1.0 else f" v*{self.v_scale:.3g}"
        text += "" if self.grad_layout == "contiguous" else f" do {self.grad_layout}"
        text += "" if self.grad_scale == 1.0 else f" do*{self.grad_scale:.3g}"
        return f"{text} dlse" if self.dlse else text


@dataclass
class Cases:
    """Collects the cases of one spec; layouts take turns and every case has a seed of its own."""

    spec: KernelSpec
    items: list[GateCase] = field(default_factory=list)

    def add(
        self,
        seqlen_q: int,
        seqlen_k: int,
        data: str = "normal",
        amount: float = 1.0,
        period: int = 1,
        *,
        batch: int = 1,
        heads: int = 1,
        v_scale: float = 1.0,
        softmax_scale: float | None = None,
    ) -> None:
        number = len(self.items)
        self.items.append(
            GateCase(
                problem=Problem(batch, seqlen_q, seqlen_k, heads * self.spec.gqa_ratio, heads),
                data=data,
                softmax_scale=1.0 / math.sqrt(self.spec.head_dim) if softmax_scale is None else softmax_scale,
                amount=amount,
                period=period,
                v_scale=v_scale,
                layout=LAYOUTS[(number + 1) % 3],
                seed=number,
            )
        )

    def collect(self, budget: str, config: Any, quick: Adder, *full: Adder) -> tuple[GateCase, ...]:
        """All cases of a budget; each adder is called with this object and the config."""
        if budget not in ("quick", "full"):
            raise ArgumentError(f"budget must be quick or full, got {budget!r}")
        for add_cases in (quick, *full) if budget == "full" else (quick,):
            add_cases(self, config)
        return tuple(self.items)


def forward_cases(spec: KernelSpec, config: ForwardConfig, *, budget: str) -> tuple[GateCase, ...]:
    """The cases of a forward kernel.

    Args:
        spec: Gives mask, head ratio and the range of the dtype.
        config: Gives the tile sizes whose edges are tried.
        budget: ``"quick"``: about twenty small cases, cheap enough for the emulator. ``"full"``: about a hundred, for a
            GPU; holds the quick ones.
    """
    return Cases(spec).collect(budget, config, _quick, _sizes, _adversaries)


def _quick(cases: Cases, config: ForwardConfig) -> None:
    block_m, block_n, step_n = config.block_m, config.block_n, config.step_n
    (huge, rounded_up), large_v, steep = _extremes(cases.spec)
    few = 2 if cases.spec.gqa_ratio <= 2 else 1
    cases.add(113, 203, batch=few, heads=few)
    cases.add(block_m + 1, 2 * block_n + 1, "walk")
    cases.add(block_m - 1, block_n + 1, amount=60.0)
    cases.add(block_m, block_n + 1)  # causal: the last key is one tile's only one, and the last row's only
    cases.add(1, block_n + 1)
    cases.add(5, 1, batch=2)
    cases.add(block_m + 1, 1, heads=3)  # an odd number of heads: the schedule's last section is smaller
    if cases.spec.causal:  # query tiles without a key, several for each block that walks over tiles
        cases.add(5 * block_m + 1, 1, heads=few)
    cases.add(17, 2 * block_n)  # whole tiles only
    cases.add(3, 0)
    cases.add(block_m + 3, block_n // 2 + 1)
    cases.add(17, 6 * step_n + 1, "growing", 8.0, step_n)
    cases.add(17, 6 * step_n + 1, "falling", 8.0, step_n)
    cases.add(33, 2 * block_n + step_n + 1, "both", 120.0, step_n)
    cases.add(16, 2 * block_n + step_n + 1, "both", 120.0, step_n)  # one row alone needs a repair
    cases.add(17, 3 * block_n, "falling", 120.0, step_n)
    cases.add(17, 2 * block_n + 1, "spike_first", 200.0)
    cases.add(17, 2 * block_n + 1, "spike_last", 200.0)
    cases.add(17, 2 * block_n + 1, "cold_last", 25.0, block_n)
    cases.add(17, 2 * block_n + 1, "cold_last", 300.0, block_n)
    cases.add(17, 2 * block_n + 1, "cold_first", 300.0, block_n)
    # A tile that every row sees whole, besides the one at the end.
    cases.add(17, 2 * block_n + 17, "constant", huge)
    cases.add(17, 2 * block_n + 17, "constant", rounded_up)
    cases.add(17, step_n + 1, v_scale=large_v)
    cases.add(17, 2 * block_n + 1, "cold_last", steep, block_n, v_scale=large_v)
    cases.add(17, block_n + 3, softmax_scale=0.0)
    # bf16: every p is e^86 = 2e37 of a guarded reference, which fits float32, and so do their products with v; the sums
    # do not.
    cases.add(17, 4 * block_n, "cold_last", 86.0, block_n, softmax_scale=1e-3, v_scale=2.0**-30)


def _sizes(cases: Cases, config: ForwardConfig) -> None:
    """Lengths at and beside tile edges, both ways round, and long enough for every stage of a ring of tiles."""
    block_m, block_n, step_n = config.block_m, config.block_n, config.step_n
    rows = sorted({1, 2, 16, 113, block_m - 1, block_m, block_m + 1})
    keys = sorted({1, step_n - 1, step_n, step_n + 1, block_n - 1, block_n, block_n + 1, 2 * block_n + 1, 203})
    for seqlen_q in rows:
        for seqlen_k in keys:
            cases.add(seqlen_q, seqlen_k, heads=2)
    for stages in range(3, 7):
        cases.add(2 * block_m + 1, stages * block_n + 1, batch=2)
    cases.add(1025, 1025, batch=2, heads=2)
    cases.add(113, 1025, heads=2)
    cases.add(1025, 113, heads=2)
    cases.add(1, 4 * 1025, batch=3)
    cases.add(17, 33, batch=97, heads=3)


def _adversaries(cases: Cases, config: ForwardConfig) -> None:
    block_m, block_n, step_n = config.block_m, config.block_n, config.step_n
    (huge, rounded_up), large_v, steep = _extremes(cases.spec)
    rows, keys = 2 * block_m + 17, 8 * block_n + step_n + 1
    for seqlen_q, seqlen_k in ((rows, keys), (keys, keys), (keys, rows)):
        cases.add(seqlen_q, seqlen_k, "walk", batch=2)
        cases.add(seqlen_q, seqlen_k, amount=60.0, batch=2)
        cases.add(seqlen_q, seqlen_k, amount=0.05)
        cases.add(seqlen_q, seqlen_k, amount=4000.0 if cases.spec.dtype == "fp16" else 3e5)
        for data in ("growing", "falling", "both"):
            for amount in (2.0, 8.0, 30.0, 120.0):
                cases.add(seqlen_q, seqlen_k, data, amount, step_n)
        for data in ("spike_first", "spike_last"):
            for amount in (12.0, 40.0, 200.0):
                cases.add(seqlen_q, seqlen_k, data, amount)
        for data in ("cold_first", "cold_last"):
            for amount in (9.0, 12.0, 25.0, 33.0, 36.0, 80.0, 300.0):
                cases.add(seqlen_q, seqlen_k, data, amount, block_n)
        cases.add(seqlen_q, seqlen_k, "constant", huge)
        cases.add(seqlen_q, seqlen_k, "constant", rounded_up)
        cases.add(seqlen_q, seqlen_k, "constant", 0.0)
        cases.add(seqlen_q, seqlen_k, v_scale=large_v)
        cases.add(seqlen_q, seqlen_k, "cold_last", steep, block_n, v_scale=large_v)
        cases.add(seqlen_q, seqlen_k, "growing", steep / 4, step_n, v_scale=large_v)
        cases.add(seqlen_q, seqlen_k, softmax_scale=0.0)
        cases.add(seqlen_q, seqlen_k, softmax_scale=1.0)


def _extremes(spec: KernelSpec) -> tuple[tuple[float, float], float, float]:
    """Elements that make gigantic logits, factor of v near the dtype's limit, and a logit lead short of a repair.

    bf16: 2^100 leaves normal draws and their sums within float32, but not times e^30, where a reference that is never
    renewed has p of up to 1e13.
    """
    return (_huge_elements(spec), 2.0**13, 8.0) if spec.dtype == "fp16" else (_huge_elements(spec), 2.0**100, 30.0)


def _huge_elements(spec: KernelSpec) -> tuple[float, float]:
    """Two elements whose logit times scale float32 rounds up and down the most: about 1e10 in fp16, 3e11 in bf16.

    Where a kernel cancels against the rounded product, one makes every weight infinite and the other 0. Elements have 8
    significant bits, so that a logit, head_dim times their square, is exact however it is summed.
    """
    element = torch.arange(128, 256, dtype=torch.float64, device="cpu")
    element *= 2.0**8 if spec.dtype == "fp16" else 2.0**10
    scale_log2 = torch.tensor(math.log2(math.e) / math.sqrt(spec.head_dim), **DRAWN).double()
    product = spec.head_dim * element.square() * scale_log2
    rounding = (product.float().double() - product) / product
    return float(element[rounding.argmax()]), float(element[rounding.argmin()])


def make_inputs(spec: KernelSpec, case: GateCase, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a case on a device, in the spec's dtype and the case's layout."""
    p = case.problem
    generator = torch.Generator().manual_seed(case.seed)

    def normal(seqlen: int, heads: int) -> Tensor:
        return torch.randn(p.batch, seqlen, heads, spec.head_dim, generator=generator, **DRAWN)

    q, k, v = normal(p.seqlen_q, p.num_heads_q), normal(p.seqlen_k, p.num_heads_k), normal(p.seqlen_k, p.num_heads_k)
    if case.data == "normal":
        q *= case.amount
    elif case.data == "constant":
        q.fill_(case.amount)
        k.fill_(case.amount)
    elif case.data == "walk":
        q, k = _walk(spec, case, k)
    else:
        _impose_profile(case, q, k)
    dtype = DTYPES[spec.dtype]
    q, k, v = q.to(dtype), k.to(dtype), (v * case.v_scale).to(dtype)
    return tuple(laid_out(x.to(device), case.layout, spec.alignment) for x in (q, k, v))  # type: ignore[return-value]


def _impose_profile(case: GateCase, q: Tensor, k: Tensor) -> None:
    """Spend the last column on a chosen logit for every key; the other columns stay random.

    The last, because a float32 sum that begins with a large term rounds every later one at that term's ulp.
    """
    lead = 8.0
    keys = torch.arange(case.problem.seqlen_k, **DRAWN)
    last = case.problem.seqlen_k - 1
    if case.data in ("growing", "falling", "both"):
        profile = case.amount / case.period * keys
    elif case.data in ("spike_first", "spike_last"):
        profile = case.amount * (keys == (0 if case.data == "spike_first" else last)).float()
    elif case.data in ("cold_first", "cold_last"):
        tile = 0 if case.data == "cold_first" else last // case.period
        profile = -case.amount * (keys // case.period == tile).float()
    else:
        raise ArgumentError(f"data of a gate case is unknown: {case.data!r}")
    q[..., -1] = -lead if case.data == "falling" else lead
    if case.data == "both":
        # One row alone must be enough to repair a step: rows 11, 16, 37, 58, 79, ... are in both halves of mma tiles.
        rows = torch.arange(case.problem.seqlen_q, device="cpu")
        q[:, rows % 16 == (rows // 16 * 5 + 11) % 16, :, -1] = -lead
    k[..., -1] = (profile / (lead * case.softmax_scale))[:, None]


def _walk(spec: KernelSpec, case: GateCase, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k in which row after row gives its weight to another key, tile edges first.

    Keys are random sign vectors times 3, so that a row made of a key's signs leads by (9 d - 9 |cross term|) scale.
    """
    p = case.problem
    k = torch.where(k < 0, k.new_tensor(-3.0), k.new_tensor(3.0))
    order = torch.tensor(list(dict.fromkeys([*_tile_edges(p.seqlen_k), *range(p.seqlen_k)])), device="cpu")
    rows = torch.arange(p.batch * p.num_heads_q * p.seqlen_q, device="cpu").view(p.batch, p.num_heads_q, p.seqlen_q)
    target = order[rows % p.seqlen_k]
    per_head = k.transpose(1, 2).repeat_interleave(spec.gqa_ratio, dim=1)  # (batch, num_heads_q, keys, d)

    def keys_of(index: Tensor) -> Tensor:
        return per_head.gather(2, index.unsqueeze(-1).expand(*index.shape, spec.head_dim))

    if not spec.causal:
        return keys_of(target).transpose(1, 2), k
    # The last key that the row sees; rows that see none get any key.
    diagonal = (torch.arange(p.seqlen_q, device="cpu") + p.seqlen_k - p.seqlen_q).clamp(min=-1).expand_as(target)
    q = keys_of(torch.minimum(target, diagonal.clamp(min=0)))
    beyond = diagonal + 1
    q = q + torch.where((beyond < p.seqlen_k).unsqueeze(-1), keys_of(beyond.clamp(max=p.seqlen_k - 1)), 0.0)
    return q.transpose(1, 2), k


def _tile_edges(seqlen_k: int) -> Iterator[int]:
    """First and last keys of tiles of 16, the smallest unit that any tile or softmax step is made of."""
    yield seqlen_k - 1
    for edge in range(0, seqlen_k, 16):
        yield edge
        yield max(0, edge - 1)


def laid_out(x: Tensor, layout: str, alignment: int) -> Tensor:
    """The same values as a view of NaN-filled storage; alignment 2 gives odd strides and an odd start."""
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout of a gate case must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "contiguous":
        return x
    batch, seqlen, heads, head_dim = x.shape
    width = head_dim + 8 if alignment == 16 else head_dim + 3
    first = 0 if alignment == 16 else 1
    shape = (batch, seqlen + 3, heads + 1, width) if layout == "padded" else (batch, heads + 1, seqlen + 3, width)
    storage = torch.full(shape, math.nan, dtype=x.dtype, device=x.device)
    storage = storage if layout == "padded" else storage.transpose(1, 2)
    view = storage[:, 2 : 2 + seqlen, 1 : 1 + heads, first : first + head_dim]
    view.copy_(x)
    return view
