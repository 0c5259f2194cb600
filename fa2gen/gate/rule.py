"""The tolerance rule: how far a kernel's result may be from the float64 reference.

It is applied row by row: a tensor-wide maximum would let a dropped tile pass (row 0 dominates a causal output).

- output: ``max_d |out - ref| <= 2 max(max_d |plain16 - ref|, u max_d |ref|)``, where ref is float64, plain16 the same
  formula in the input's dtype and u its unit roundoff. Rows without a visible key must be exactly 0.
- LSE: within 1e-4, or 1e-6 of its value from 100 on, or 2^-22 of the largest sum of absolute values
  ``scale sum_d |q_d k_d|`` where terms cancel; -inf exactly where no key is visible.

Below 64 columns a row's maximum is no statistic: both errors of a row may happen to be near zero, and 4 % of a right
kernel's rows fail at head_dim 1 (simulated). There ``u (max_d noise + max_d |ref|)`` joins the maximum, noise being the
size of the error that rounding the weights leaves (:func:`fa2gen.reference.weight_noise`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fa2gen.reference import attention_forward, plain16_forward, weight_noise

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Fewest columns whose maximum is a fair size of a row's error. By the bare rule 4 % of a right kernel's rows are wrong
# at 1 column. In fp16, with a causal mask and a query that all rows share, the worst of 700,000 rows of an emulated
# kernel is at 1.03 of the limit at 32 columns, and of a million simulated ones at 0.99 at 40 and 0.86 at 64; with the
# noise, both are at 0.56 below 64.
FEWEST_COLUMNS = 64


@dataclass(frozen=True)
class GateReport:
    """Outcome of one check or of a whole gate.

    Attributes:
        passed: Every element is within its limit.
        worst: Largest error of a row of the output or of a gradient, divided by its limit; inf for NaN and for a wrong
            shape or dtype.
        where: Case, which gradient, and batch, row and head, of that largest ratio.
        lse_worst: Largest LSE error divided by its limit; 0 where no LSE was judged.
        text: One line for people.
    """

    passed: bool
    worst: float
    where: str
    lse_worst: float
    text: str


def check_forward(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
) -> GateReport:
    """Compare a forward result with the float64 reference; every element counts and NaN never passes.

    Args:
        out: (batch, seqlen_q, num_heads_q, head_dim) in q's dtype.
        lse: (batch, num_heads_q, seqlen_q) float32; None where it was not computed.
        q, k, v: The inputs, fp16 or bf16; see :func:`fa2gen.reference.attention_forward`.
        causal: Bottom-right causal mask.
        softmax_scale: Factor of the scores; None is ``1 / sqrt(head_dim)``.
    """
    if out.shape != q.shape or out.dtype != q.dtype:
        return refused(f"output is {form(out)}, expected {form(q)}")
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    if lse is not None and (lse.shape != lse_shape or lse.dtype != torch.float32):
        return refused(f"LSE is {form(lse)}, expected {lse_shape} torch.float32")
    if out.numel() == 0:
        return GateReport(True, 0.0, "nowhere", 0.0, "passed: nothing to compare")
    ref, ref_lse = attention_forward(q, k, v, causal=causal, softmax_scale=softmax_scale)
    ratio = _output_ratio(out, ref, q, k, v, causal, softmax_scale)
    worst, where = largest(ratio, ("batch", "row", "head"))
    lse_worst, lse_where = 0.0, "nowhere"
    if lse is not None:
        lse_ratio = _lse_ratio(lse.double(), ref_lse)
        if bool((lse_ratio > 1).any()):
            lse_ratio = torch.minimum(
                lse_ratio, _cancelled_ratio(lse.double(), ref_lse, q, k, v, causal, softmax_scale)
            )
        lse_worst, lse_where = largest(lse_ratio, ("batch", "head", "row"))
    passed = worst <= 1.0 and lse_worst <= 1.0
    text = f"{'passed' if passed else 'FAILED'}: output {worst:.3g} of its limit at {where}"
    if lse is not None:
        text += f", LSE {lse_worst:.3g} at {lse_where}"
    return GateReport(passed, worst, where, lse_worst, text)


def _output_ratio(
    out: Tensor, ref: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None
) -> Tensor:
    """Error over limit of each row, (batch, seqlen_q, num_heads_q)."""
    plain = plain16_forward(q, k, v, causal=causal, softmax_scale=softmax_scale)
    rounding = ref.abs().amax(-1)
    if q.shape[-1] < FEWEST_COLUMNS:
        rounding = rounding + weight_noise(q, k, v, causal=causal, softmax_scale=softmax_scale).amax(-1)
    limit = 2 * torch.maximum(plain_error(plain, ref), UNIT_ROUNDOFF[q.dtype] * rounding)
    return error_ratio((out.double() - ref).abs().amax(-1), limit)


def _lse_ratio(lse: Tensor, ref: Tensor) -> Tensor:
    limit = torch.where(ref.abs() < 100, 1e-4, 1e-6 * ref.abs())
    return torch.where(lse == ref, 0.0, error_ratio((lse - ref).abs(), limit))


def _cancelled_ratio(
    lse: Tensor, ref: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None
) -> Tensor:
    """Error over the rounding of float32 sums whose terms cancel: at 256 columns a score is often 1 % of them."""
    scale = None if softmax_scale is None else abs(softmax_scale)
    # The LSE of the sums of absolute values is their largest, or up to the logarithm of the number of keys above it.
    _, terms = attention_forward(q.abs(), k.abs(), v, causal=causal, softmax_scale=scale)
    return torch.where(lse == ref, 0.0, error_ratio((lse - ref).abs(), 2.0**-22 * terms))


def plain_error(plain: Tensor, ref: Tensor) -> Tensor:
    """Largest error of each row; 0 where the plain formula overflows its dtype: it sets no standard there."""
    return torch.nan_to_num((plain.double() - ref).abs().amax(-1), nan=0.0, posinf=0.0)


def error_ratio(error: Tensor, limit: Tensor) -> Tensor:
    """error / limit; 0 for no error at all, inf for NaN and for any error where none is allowed."""
    return torch.where(error == 0, 0.0, error / limit).nan_to_num(nan=math.inf, posinf=math.inf)


def largest(ratio: Tensor, axes: tuple[str, str, str], first: tuple[int, int, int] = (0, 0, 0)) -> tuple[float, str]:
    """The largest of some ratios and where it is; ``first``: the position of the first of them."""
    flat = int(ratio.argmax())
    position = []
    for extent, start in zip(reversed(ratio.shape), reversed(first), strict=True):
        flat, at = divmod(flat, extent)
        position.append(start + at)
    where = " ".join(f"{axis} {at}" for axis, at in zip(axes, reversed(position), strict=True))
    return float(ratio.max()), where


def refused(reason: str) -> GateReport:
    return GateReport(False, math.inf, "everywhere", math.inf, f"FAILED: {reason}")


def form(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
