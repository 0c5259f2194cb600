"""Random attention calls: each follows from its seed alone, on any device.

A call asks for one kernel of a small pool (a spec and a config), because compiling is what takes time; everything else
is free: the head dim that is padded to the spec's, sizes, memory layout of each tensor, scale, data. ``bad_call`` makes
a call that must be refused out of a good one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fa2gen.constraints import default_config, families_on
from fa2gen.errors import ArgumentError, InfeasibleError, UnsupportedError
from fa2gen.gate import GateReport, check_forward
from fa2gen.hardware import ArchLimits
from fa2gen.problem import Problem
from fa2gen.spec import NATIVE_HEAD_DIMS, ForwardConfig, FwdConfig, KernelSpec
from fa2gen.tuning.space import GRIDS, exclusion_reason

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
POOL_SEED = 20
# Around the tiles' edges; a third of all lengths.
EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 97, 127, 128, 129, 191, 193, 255, 256, 257, 511, 513, 1025)
# Queries that share a key, up to which unaligned keys are read in place.
MAX_QUERIES_IN_PLACE = 256

ALIGNED_LAYOUTS = (
    "contiguous",
    "sliced",
    "heads_first",
    "rows_first",
    "every_other",
    "packed",
    "expanded_batch",
    "expanded_rows",
    "expanded_heads",
)
# The last dimension is not contiguous, so that the tensor is copied; base and strides are odd.
LAYOUTS = (*ALIGNED_LAYOUTS, "columns_first", "misaligned")


@dataclass(frozen=True)
class PoolKernel:
    """A kernel that calls may ask for; a config of None leaves the choice to the tables."""

    spec: KernelSpec
    config: ForwardConfig | None


@dataclass(frozen=True)
class Call:
    """One call of ``attention``; ``repr`` is what a failing test prints.

    Attributes:
        seed: Of everything below and of the data.
        kernel: Spec (head dim padded to a multiple of 8) and config that the call needs.
        head_dim: The caller's.
        batch, seqlen_q, seqlen_k, num_heads_k: Sizes.
        layouts: Of q, k and v, one of ``LAYOUTS``.
        data: ``normal``; ``steep``: q times 60; ``constant``: equal elements of q and k; ``spikes``: some keys times
            40; ``tiny``: q and k times 1e-3; ``hidden``: the last ``hidden`` keys hold infinity and NaN, and the rows
            that see them, the last as many, are not compared. Factors are a third above 64 columns.
        fill: What lies between the rows of a view.
    """

    seed: int
    kernel: PoolKernel
    head_dim: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_k: int
    layouts: tuple[str, str, str]
    data: str
    hidden: int
    softmax_scale: float | None
    return_lse: bool
    fill: float = field(default=math.nan)

    @property
    def spec(self) -> KernelSpec:
        return self.kernel.spec

    @property
    def problem(self) -> Problem:
        heads_q = self.num_heads_k * self.spec.gqa_ratio
        return Problem(self.batch, self.seqlen_q, self.seqlen_k, heads_q, self.num_heads_k)

    @property
    def is_empty(self) -> bool:
        """Nothing is launched for it."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``attention``, without the backend."""
        return {
            "causal": self.spec.causal,
            "softmax_scale": self.softmax_scale,
            "return_lse": self.return_lse,
            "config": self.kernel.config,
        }


def kernel_pool(arch: ArchLimits, *, count: int, from_tables: int, max_head_dim: int = 256) -> list[PoolKernel]:
    """``count`` kernels, the same for every run; the first ``from_tables`` of them run the tables' choice."""
    rng = random.Random(POOL_SEED)
    kernels = []
    for number in range(count):
        from_table = number < from_tables
        native = from_table or rng.random() < 0.6
        head_dims = [d for d in (NATIVE_HEAD_DIMS if native else range(8, 257, 8)) if d <= max_head_dim]
        spec = KernelSpec(
            head_dim=rng.choice(head_dims),
            dtype=rng.choice(("bf16", "bf16", "fp16")),
            causal=rng.random() < 0.5,
            gqa_ratio=rng.choice((1, 8) if from_table else (1, 1, 2, 3, 4, 7, 8, 16)),
            alignment=2 if number % 8 == 7 else 16,
        )
        config = None if from_table else random_config(spec, arch, rng) if rng.random() < 0.8 else default_config(spec)
        kernels.append(PoolKernel(spec, config))
    return kernels


def random_config(spec: KernelSpec, arch: ArchLimits, rng: random.Random) -> ForwardConfig:
    """Any member of the tuner's spaces of a spec, each tunable drawn alone; the rare values get their chance."""
    grid = GRIDS[spec.kind][rng.choice(families_on(spec, arch))]
    for _ in range(100_000):
        config = grid.config_of({name: rng.choice(values) for name, values in grid.values.items()})
        if config is not None and exclusion_reason(spec, config, arch) is None:
            return config
    raise AssertionError(f"no config is legal for {spec.slug()}")


def draw_call(
    seed: int,
    pool: Sequence[PoolKernel],
    *,
    max_length: int = 3000,
    max_pairs: int = 4_000_000,
    max_elements: int = 8_000_000,
) -> Call:
    """The call of a seed.

    Args:
        seed: Any integer.
        pool: From :func:`kernel_pool`.
        max_length: Of queries and keys.
        max_pairs: Bound of batch * query heads * seqlen_q * seqlen_k; together with
        max_elements: of q, or of k with as many heads: what checking a call costs.
    """
    rng = random.Random(seed)
    kernel = rng.choice(pool)
    spec = kernel.spec
    in_place = spec.alignment == 2
    padding = 0 if in_place or rng.random() < 0.7 else rng.randrange(1, 8)
    sizes = {
        "batch": 0 if rng.random() < 0.01 else rng.choice((1, 1, 2, 3, 5, 9)),
        "seqlen_q": _length(rng, max_length),
        "seqlen_k": _length(rng, max_length),
        "num_heads_k": rng.choice((1, 1, 2, 3, 4)),
    }
    if in_place:
        sizes["seqlen_q"] = rng.randint(1, max(1, MAX_QUERIES_IN_PLACE // spec.gqa_ratio))
    while (
        math.prod(sizes.values()) * spec.gqa_ratio > max_pairs
        or math.prod(sizes.values())
        // max(1, min(sizes["seqlen_q"], sizes["seqlen_k"]))
        * spec.gqa_ratio
        * spec.head_dim
        > max_elements
    ):
        largest = max(sizes, key=lambda name: sizes[name])
        sizes[largest] = (sizes[largest] + 1) // 2
    data, hidden = rng.choice(("normal", "normal", "normal", "steep", "constant", "spikes", "tiny", "hidden")), 0
    hideable = min(sizes["seqlen_q"], sizes["seqlen_k"]) - 1
    if data == "hidden":
        if spec.causal and hideable > 0:
            hidden = rng.randint(1, min(hideable, 200))
        else:
            data = "normal"
    layouts = _layouts(rng, spec, sizes["seqlen_q"], copied=padding > 0, hidden=hidden > 0)
    head_dim = spec.head_dim - padding
    return Call(
        seed=seed,
        kernel=kernel,
        head_dim=head_dim,
        layouts=layouts,
        data=data,
        hidden=hidden,
        softmax_scale=_scale(rng, head_dim, data),
        return_lse=rng.random() < 0.7,
        fill=rng.choice((math.nan, math.inf)),
        **sizes,
    )


def _length(rng: random.Random, longest: int) -> int:
    kind = rng.random()
    if kind < 0.35:
        return min(longest, rng.choice(EDGES))
    return rng.randint(1, min(longest, 300 if kind < 0.8 else 3000))


def _scale(rng: random.Random, head_dim: int, data: str) -> float | None:
    default = 1.0 / math.sqrt(head_dim)
    if rng.random() < 0.6:
        return None
    scales = [0.0, -default, 1e-4, 1e-30]
    # Logits beyond what fp16 holds are no fair test: the plain 16-bit formula, which sets the standard, overflows.
    if data in ("normal", "hidden"):
        scales += [1.0, 2.0 if head_dim <= 64 else 1.0]
    return rng.choice(scales)


def _layouts(
    rng: random.Random, spec: KernelSpec, seqlen_q: int, *, copied: bool, hidden: bool
) -> tuple[str, str, str]:
    """Layouts whose call needs a kernel of the spec's alignment."""
    in_place = spec.alignment == 2
    copies_keys = copied or seqlen_q * spec.gqa_ratio > MAX_QUERIES_IN_PLACE
    keys = LAYOUTS if in_place or copies_keys else tuple(name for name in LAYOUTS if name != "misaligned")
    q, k, v = rng.choice(LAYOUTS), rng.choice(keys), rng.choice(keys)
    if in_place:
        k, v = rng.choice((("misaligned", "misaligned"), ("misaligned", "heads_first"), ("contiguous", "misaligned")))
    if hidden and k == "expanded_rows":
        k = "sliced"
    return q, k, v


def make_tensors(call: Call, device: str | torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a call."""
    generator = torch.Generator(device).manual_seed(call.seed)
    p = call.problem
    shapes = ((p.seqlen_q, p.num_heads_q), (p.seqlen_k, p.num_heads_k), (p.seqlen_k, p.num_heads_k))
    views, values = [], []
    for (seqlen, heads), layout in zip(shapes, call.layouts, strict=True):
        base, view = memory((call.batch, seqlen, heads, call.head_dim), layout, call, device)
        views.append((base, view))
        values.append(torch.randn(base.shape, generator=generator, device=device))
    q, k, v = values
    # At 60 and 185 columns a plain float32 sum of products is already 1.04 times off the LSE's limit.
    factor = 1.0 if call.head_dim <= 64 else 1 / 3
    if call.data == "steep":
        q *= 60.0 * factor
    elif call.data == "constant":
        q.fill_(3.0)
        k.fill_(3.0)
    elif call.data == "tiny":
        q *= 1e-3
        k *= 1e-3
    elif call.data == "spikes":
        k *= torch.where(torch.rand(k.shape[1], generator=generator, device=device) < 0.02, 40.0 * factor, 1.0)[
            :, None, None
        ]
    elif call.data == "hidden":
        k[:, -call.hidden :] = math.inf
        k[:, -1] = math.nan
    for (base, _), x in zip(views, (q, k, v), strict=True):
        base.copy_(x)
    return views[0][1], views[1][1], views[2][1]


def memory(
    shape: tuple[int, int, int, int], layout: str, call: Call, device: str | torch.device
) -> tuple[Tensor, Tensor]:
    """(what is written, what is passed): a view of memory filled with ``call.fill``, repeated where it is expanded."""
    batch, seqlen, heads, d = shape

    def filled(*extents: int) -> Tensor:
        return torch.full(extents, call.fill, dtype=DTYPES[call.spec.dtype], device=device)

    if layout.startswith("expanded"):
        axis = ("expanded_batch", "expanded_rows", "expanded_heads").index(layout)
        once = filled(*(1 if i == axis else extent for i, extent in enumerate(shape)))
        return once, once.expand(shape)
    if layout == "contiguous":
        view = filled(*shape)
    elif layout == "sliced":
        view = filled(batch, seqlen + 3, heads + 1, d + 8)[:, 2 : 2 + seqlen, 1:, 8:]
    elif layout == "heads_first":
        view = filled(batch, heads, seqlen, d).transpose(1, 2)
    elif layout == "rows_first":
        view = filled(seqlen, batch, heads, d).transpose(0, 1)
    elif layout == "every_other":
        view = filled(2 * batch, 2 * seqlen, heads, d)[::2, ::2]
    elif layout == "packed":
        view = filled(batch, seqlen, 3 * heads, d)[:, :, heads : 2 * heads]
    elif layout == "columns_first":
        view = filled(batch, seqlen, d, heads).transpose(2, 3)
    else:
        # One element before the row's start, and rows an odd number of elements apart.
        view = filled(batch, seqlen + 1, heads, d + 3)[:, 1:, :, 1 : 1 + d]
    return view, view


def check_result(call: Call, result: Any, q: Tensor, k: Tensor, v: Tensor) -> GateReport:
    """The gate's rule on every element, but for rows that see a hidden infinity."""
    out, lse = result if call.return_lse else (result, None)
    assert out.is_contiguous()
    # Without as many of the last rows and keys the mask, which is aligned at the bottom right, stays where it is.
    rows, keys = call.seqlen_q - call.hidden, call.seqlen_k - call.hidden
    return check_forward(
        out[:, :rows],
        None if lse is None else lse[:, :, :rows],
        q[:, :rows],
        k[:, :keys],
        v[:, :keys],
        causal=call.spec.causal,
        softmax_scale=call.softmax_scale,
    )


def is_followed_by_a_bad_call(call: Call) -> bool:
    return call.seed % 8 == 3


def bad_call(
    call: Call, q: Tensor, k: Tensor, v: Tensor, backend: str
) -> tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]]:
    """What is wrong, arguments and options of ``attention``, and the exception that they must raise."""
    rng = random.Random(f"bad {call.seed}")
    batch, seqlen_k, _, d = k.shape
    options: dict[str, Any] = {**call.options, "backend": backend}
    other = torch.float16 if k.dtype == torch.bfloat16 else torch.bfloat16
    wide = q.new_empty((1, 1, 1, 264))
    odd_heads, longer = k.new_empty((batch, seqlen_k, 2 * q.shape[2] + 1, d)), k.new_empty((batch, seqlen_k + 1, 1, d))
    elsewhere = k.to("cpu" if k.is_cuda else "meta")
    tensors: dict[str, tuple[Any, ...]] = {
        "a dtype of 32 bits": (q.float(), k, v),
        "two dtypes": (q, k.to(other), v),
        "two devices": (q, elsewhere, v),
        "three dimensions": (q.flatten(2), k, v),
        "two head dims": (q, k[..., :-1], v),
        "more values than keys": (q, k[:, :, :1], longer),
        "heads that do not divide": (q, odd_heads, odd_heads),
        "two batches": (q, *[k.new_empty((batch + 1, *k.shape[1:]))] * 2),
        "a list": (q, [1.0], v),
        "a head dim above 256": (wide, wide, wide),
    }
    values: dict[str, dict[str, Any]] = {
        "scale NaN": {"softmax_scale": math.nan},
        "scale infinite": {"softmax_scale": math.inf},
        "scale a text": {"softmax_scale": "1"},
        "causal 2": {"causal": 2},
        "return_lse a text": {"return_lse": "yes"},
        "deterministic a text": {"deterministic": "yes"},
        "an unknown backend": {"backend": "cpu"},
        "the other device's backend": {"backend": "emulator" if k.is_cuda else "cuda"},
    }
    if not call.is_empty:  # with nothing to launch these are not looked at
        values |= {
            "scale too large": {"softmax_scale": 3e38},
            "an illegal config": {"config": FwdConfig(block_m=48, num_warps=3)},
            "a config that is none": {"config": "fast"},
        }
    expected: dict[str, type[Exception]] = {
        "a head dim above 256": UnsupportedError,
        "scale too large": UnsupportedError,
        "an illegal config": InfeasibleError,
    }
    name = rng.choice([*tensors, *values])
    return name, tensors.get(name, (q, k, v)), {**options, **values.get(name, {})}, expected.get(name, ArgumentError)
