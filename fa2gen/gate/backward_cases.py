"""The backward's cases: sizes at tile edges both ways round, gradients of every layout, probabilities at the limits.

Inputs are made as for the forward; output and LSE come from the float64 reference, so that a backward is judged alone.
No |LSE| is beyond 1e6: there, rounding it to float32 changes every probability by 3 % and more, whatever a kernel does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa2gen.spec import BwdConfig, KernelSpec

from .cases import DRAWN, DTYPES, LAYOUTS, Cases, GateCase, laid_out


@dataclass
class _BackwardCases(Cases):
    """Cases whose gradients take turns too: other layouts than the inputs' have, and a gradient of every other LSE."""

    def add(
        self,
        *problem: Any,
        grad_layout: str | None = None,
        grad_scale: float = 1.0,
        dlse: bool | None = None,
        **options: Any,
    ) -> None:
        number = len(self.items)
        super().add(*problem, **options)
        self.items[-1] = dataclasses.replace(
            self.items[-1],
            grad_layout=LAYOUTS[number // 3 % 3] if grad_layout is None else grad_layout,
            grad_scale=grad_scale,
            dlse=number % 2 == 0 if dlse is None else dlse,
        )


def backward_cases(spec: KernelSpec, config: BwdConfig, *, budget: str) -> tuple[GateCase, ...]:
    """The cases of a backward kernel; none has an empty length, which never reaches a kernel.

    Args:
        spec: Gives mask, head ratio and the range of the dtype.
        config: Gives the tile sizes whose edges are tried.
        budget: ``"quick"``: about twenty small cases, cheap enough for the emulator. ``"full"``: about a hundred, for a
            GPU; holds the quick ones.
    """
    return _BackwardCases(spec).collect(budget, config, _quick, _sizes, _adversaries)


def make_gradients(
    spec: KernelSpec, case: GateCase, device: str | torch.device = "cpu"
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a case's output and LSE on a device: do in the spec's dtype and the case's layout, dlse in float32.

    The last axis of do is contiguous whatever its layout, as kernels need it.
    """
    p = case.problem
    # The inputs' numbers are those of the seed itself.
    generator = torch.Generator().manual_seed(case.seed + 2**20)
    shared = {"broadcast_row": (p.batch, 1, p.num_heads_q), "expanded": (1, 1, 1)}
    drawn = shared.get(case.grad_layout, (p.batch, p.seqlen_q, p.num_heads_q))
    do = torch.randn(*drawn, spec.head_dim, generator=generator, **DRAWN) * case.grad_scale
    do = do.to(DTYPES[spec.dtype]).to(device)
    if case.grad_layout in shared:
        do = do.expand(p.batch, p.seqlen_q, p.num_heads_q, spec.head_dim)
    else:
        do = laid_out(do, case.grad_layout, spec.alignment)
    dlse = torch.randn(p.batch, p.num_heads_q, p.seqlen_q, generator=generator, **DRAWN) * case.grad_scale
    return do, dlse.to(device) if case.dlse else None


def _quick(cases: _BackwardCases, config: BwdConfig) -> None:
    block_m, block_n = config.block_m, config.block_n
    few = 2 if cases.spec.gqa_ratio <= 2 else 1
    small, large_v, steep = _extremes(cases.spec)
    cases.add(113, 203, batch=few, heads=few)
    cases.add(2 * block_m + 1, block_n + 1, "walk")
    cases.add(block_m - 1, 2 * block_n + 1)
    cases.add(block_m, block_n + 1, dlse=False)  # causal: the last key is one tile's only one, and the last row's only
    cases.add(2 * block_m, block_n)  # whole tiles only; causal: a query tile that sees nothing
    cases.add(1, block_n + 1)
    cases.add(5, 1, batch=2, dlse=False)  # one key: dq and dk are 0
    cases.add(block_m + 1, 1, heads=3)
    cases.add(17, 15)
    cases.add(15, block_n + 17, amount=4.0)
    cases.add(block_m + 3, block_n // 2 + 1, batch=2)
    cases.add(block_m + 1, block_n - 1, grad_layout="expanded")
    cases.add(block_m + 17, 31, grad_layout="broadcast_row", batch=2, heads=2)
    # Logits that are all -120 or all 120: a probability that is not masked beyond the end is e^115 or e^-125.
    cases.add(17, block_n + 17, "cold_first", 120.0, 4 * block_n)
    cases.add(block_m + 5, 17, "cold_first", -120.0, 4 * block_n)
    cases.add(block_m + 17, 3 * block_n // 2, "falling", 8.0, 16)
    cases.add(33, 2 * block_n + 1, "both", 30.0, 64)
    cases.add(17, block_n + 1, "spike_last", 200.0)
    cases.add(33, 2 * block_n + 1, "cold_last", 9.0, block_n)
    cases.add(17, block_n + 17, amount=steep)
    cases.add(33, 33, grad_scale=small)
    cases.add(17, 33, v_scale=large_v, grad_scale=1 / large_v)
    cases.add(17, block_n + 3, softmax_scale=0.0)
    cases.add(block_m + 1, 19, softmax_scale=1.0)


def _sizes(cases: _BackwardCases, config: BwdConfig) -> None:
    """Lengths at and beside tile edges, both ways round, and long enough for every stage of a ring of tiles."""
    block_m, block_n = config.block_m, config.block_n
    rows = sorted({1, 15, 16, 17, config.step_m + 1, block_m - 1, block_m, block_m + 1, 3 * block_m + 1})
    keys = sorted({1, 16, 17, block_n // 2 + 1, block_n - 1, block_n, block_n + 1, 203})
    for seqlen_q in rows:
        for number, seqlen_k in enumerate(keys):
            cases.add(seqlen_q, seqlen_k, heads=1 + number % 2)
    for tiles in range(3, 7):
        cases.add(tiles * block_m + 1, 2 * block_n + 1, batch=2)
    cases.add(1025, 1025, heads=2)
    cases.add(1025, 1025, grad_layout="expanded", batch=2)
    cases.add(113, 1025, heads=2)
    cases.add(1025, 113, heads=2)
    cases.add(1, 1025, batch=3)
    cases.add(1025, 1, batch=3)
    cases.add(33, 17, batch=97, heads=3)


def _adversaries(cases: _BackwardCases, config: BwdConfig) -> None:
    small, large_v, steep = _extremes(cases.spec)
    rows, keys = 3 * config.block_m + 17, 3 * config.block_n + 17
    for seqlen_q, seqlen_k in ((rows, keys), (4 * keys, keys)):
        cases.add(seqlen_q, seqlen_k, "walk", batch=2)
        cases.add(seqlen_q, seqlen_k, amount=0.05)
        cases.add(seqlen_q, seqlen_k, amount=steep)
        cases.add(seqlen_q, seqlen_k, "growing", 4.0, 16)
        cases.add(seqlen_q, seqlen_k, "both", 30.0, 64)
        cases.add(seqlen_q, seqlen_k, "spike_first", 9.0)
        cases.add(seqlen_q, seqlen_k, "cold_first", 12.0, config.block_n)
        cases.add(seqlen_q, seqlen_k, "cold_first", 1000.0, 2 * keys)
        cases.add(seqlen_q, seqlen_k, "constant", 0.0)
        cases.add(seqlen_q, seqlen_k, grad_layout="broadcast_row")
        cases.add(seqlen_q, seqlen_k, grad_scale=small)
        cases.add(seqlen_q, seqlen_k, v_scale=large_v)
        cases.add(seqlen_q, seqlen_k, softmax_scale=0.0)
        cases.add(seqlen_q, seqlen_k, softmax_scale=1e-3, amount=100.0)


def _extremes(spec: KernelSpec) -> tuple[float, float, float]:
    """Factor of a small do, factor of a large v, and one of q that brings |LSE| to about 1e4 (fp16) or 1e5.

    fp16: the small do leaves dS and the gradients below 2^-14, where fp16 loses digits; dO V^T and dS stay below 65504.
    """
    return (2.0**-10, 2.0**6, 4e3) if spec.dtype == "fp16" else (2.0**-60, 2.0**60, 3e4)
