"""How far from the reference the roundings of a right backward kernel may lead."""

from __future__ import annotations

import torch
from torch import Tensor

from fa2gen.reference import Gradients, chunk_terms, default_scale, pairwise, to_keys, to_queries

FLOAT32_ULP = 2.0**-23
# Below it a GPU's exponential, and what matrix units make of such numbers, may be zero.
_FLOAT32_LEAST = 2.0**-126


@torch.no_grad()
def backward_roundoff(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
) -> Gradients:
    """Sizes of the errors in dq, dk and dv that follow from the roundings which a kernel in q's dtype cannot avoid.

    Four kinds, each rounding being independent of the others; u is the dtype's unit roundoff, and where a value is
    below the dtype's normal range its roundings have the size of those at the range's end.

    - P and dS, before the products that they are factors of: ``u sqrt(2 sum dS^2 k^2)`` and the like.
    - The output, 16 bits of every element and of the weights that it was summed with, through D: each row has one error
      of D, of size ``u sqrt(sum_d do^2 o^2 + sum_j P^2 dP^2)``, times ``|sum_j P k|`` in dq and summed up in dk.
    - Float32, as sums of absolute values: 2 ulp of ``|do| |v| + |do| |o| + |dlse|`` where dP - D cancels, and ``|LSE|
      + scale |q| |k|`` ulp of P itself, the exponential of a float32 number of that size. At |LSE| = 1e6 half an ulp
      of the LSE is 3 % of P, and half an ulp of its product with log2 e 4 %: beyond, no kernel that is given a float32
      LSE has gradients to judge.
    - The end of float32: a P or dS below 2^-126 may count as 0, as a GPU's exponential and matrix units take it.

    Args:
        q, k, v, do, causal, softmax_scale, dlse: See :func:`fa2gen.reference.attention_backward`.

    Returns:
        Three float64 tensors shaped like q, k and v, without the roundings of the gradients themselves.
    """
    scale = default_scale(softmax_scale, q.shape[-1])
    info = torch.finfo(q.dtype)
    unit, least = info.eps / 2, info.smallest_normal
    dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
    dk_squares, dv_squares = torch.zeros_like(dk), torch.zeros_like(dv)
    for chunk, t in chunk_terms(q, k, v, do, causal, scale, dlse, torch.float64, None):
        mask = chunk.mask
        seen = torch.ones((), dtype=torch.bool, device=q.device) if mask is None else mask
        p = torch.where(seen, t.p.clamp(min=least), 0.0)
        ds = torch.where(seen, t.ds.abs().clamp(min=least), 0.0)
        # A kernel may make dS of the P that it has rounded for dV.
        ds_squares = ds.square() + torch.where(seen, p * t.dp_less_d, 0.0).square()
        of_weights = torch.where(seen, t.p * t.dp, 0.0).square().sum(-1, keepdim=True)
        d_error = unit * ((t.do * t.o).square().sum(-1, keepdim=True) + of_weights).sqrt()
        size = pairwise(t.do.abs(), t.v.abs()) + (t.do * t.o).abs().sum(-1, keepdim=True)
        if dlse is not None:
            size = size + chunk.per_row(dlse, torch.float64).abs()
        exponent = torch.where(t.lse == -torch.inf, 0.0, t.lse.abs()) + abs(scale) * pairwise(t.q.abs(), t.k.abs())
        exact = FLOAT32_ULP * torch.where(seen, 2 * t.p * size + t.ds.abs() * exponent, 0.0)
        flushed_p = torch.where(seen & (t.p < _FLOAT32_LEAST), t.p, 0.0)
        exact += torch.where(seen, flushed_p * t.dp_less_d.abs() + t.ds.abs().clamp(max=_FLOAT32_LEAST), 0.0)

        dq_part = unit * to_queries(ds_squares, t.k.square(), mask).sqrt_()
        dq_part += d_error * to_queries(t.p, t.k, mask).abs()
        chunk.put_queries(dq, dq_part + to_queries(exact, t.k.abs(), mask))
        chunk.add_keys(dk_squares, to_keys(ds_squares, t.q.square(), mask))
        chunk.add_keys(dk, to_keys(t.p * d_error + exact, t.q.abs(), mask))
        chunk.add_keys(dv_squares, to_keys(p.square(), t.do.square(), mask))
        chunk.add_keys(dv, to_keys(FLOAT32_ULP * t.p * (2 + exponent) + flushed_p, t.do.abs(), mask))
    return (
        abs(scale) * dq,
        abs(scale) * (dk + unit * dk_squares.sqrt_()),
        dv + unit * dv_squares.sqrt_(),
    )
