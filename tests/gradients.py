"""Gradients that are known: those that autograd finds for the formula of attention, written out in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def call_inputs(
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_k: int = 7,
    heads_q: int = 4,
    heads_k: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """q, k and v, leaves that require grad."""
    generator = torch.Generator().manual_seed(1000 * seqlen_q + seqlen_k)
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    tensors = [torch.randn(batch, s, h, head_dim, generator=generator) for s, h in shapes]
    return [x.to(dtype).requires_grad_() for x in tensors]


def formula(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64. A row that sees no key has output 0, LSE -inf and no gradient."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale)
    rows, keys = scores.shape[2:]
    visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(keys - rows)
    some = visible.any(1)
    # Rows without keys look at all of them and are put right afterwards: their softmax would be NaN.
    scores = scores.masked_fill(~visible & some[:, None], -math.inf)
    lse = scores.logsumexp(3).masked_fill(~some, -math.inf)
    return (scores.softmax(3) @ v).masked_fill(~some[:, None], 0).transpose(1, 2), lse


def formula_gradients(
    tensors: list[Tensor], dout: Tensor | None, dlse: Tensor | None = None, **options: bool | float | None
) -> list[Tensor]:
    """dq, dk and dv in float64, for the gradients of output and LSE; None is zero."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    out, lse = formula(*leaves, **options)  # type: ignore[arg-type]
    loss = out.new_zeros(())
    if dout is not None:
        loss = loss + (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isinf(), 0) * dlse.double()).sum()
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def assert_rounded(found: Tensor, known: Tensor) -> None:
    """``found`` is ``known`` rounded to its dtype, but for float64's own error where terms cancel."""
    found, known = found.detach(), known.detach()
    unit = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-11
    largest = float(known.abs().amax()) if known.numel() else 0.0
    torch.testing.assert_close(found.double(), known, rtol=unit, atol=2.0**-25 + 1e-9 * largest)
