"""A right backward kernel in float32 with 16-bit operands, as the real ones compute it, and ways to break it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fa2gen.gate import BackwardRunner
from fa2gen.spec import KernelSpec

LOG2E = math.log2(math.e)


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Faults:
    """What a broken kernel does differently; each default is right.

    Attributes:
        visible, p, ds: Applied to the mask (rows, keys), to P and to dS, both (batch, heads, rows, keys) in float32.
        use_d, use_dlse, use_log2e: Whether D, the LSE's gradient and the change of base enter.
        scale_dq, scale_dk: Whether the gradient is multiplied by softmax_scale.
        heads: Query heads that dk and dv are summed over, of every group.
        finish: Applied to (dq, dk, dv).
        ds_of_rounded_p: dS from the 16-bit P; a right kernel may do either.
    """

    visible: Callable[[Tensor], Tensor] = _unchanged
    p: Callable[[Tensor], Tensor] = _unchanged
    ds: Callable[[Tensor], Tensor] = _unchanged
    use_d: bool = True
    use_dlse: bool = True
    scale_dq: bool = True
    scale_dk: bool = True
    heads: Callable[[int], slice] = lambda group: slice(None)
    causal_shift: int = 0
    finish: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = lambda dq, dk, dv: (dq, dk, dv)
    ds_of_rounded_p: bool = False


def backward_kernel(spec: KernelSpec, faults: Faults = Faults()) -> BackwardRunner:
    """P = exp2(S c - LSE log2 e) in float32; P and dS are rounded to 16 bit before the products they are factors of."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        rows_q, rows_o, rows_do = (x.float().transpose(1, 2) for x in (q, out, do))
        rows_k, rows_v = (x.float().transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        if spec.causal:
            visible = visible.tril(k.shape[1] - q.shape[1] + faults.causal_shift)
        visible = faults.visible(visible)
        # What a kernel gets as float32: the scale times log2 e, and the LSE in base 2.
        scale_log2 = torch.tensor(scale * LOG2E, dtype=torch.float32)
        lse_log2 = torch.where(lse == -math.inf, 0.0, lse * LOG2E).unsqueeze(-1)
        exponent = torch.matmul(rows_q, rows_k.mT).double() * scale_log2.double() - lse_log2.double()
        p = faults.p(torch.where(visible, torch.exp2(exponent.float()), 0.0))
        p16 = p.to(q.dtype).float()
        delta = (rows_do * rows_o).sum(-1, keepdim=True) if faults.use_d else torch.zeros_like(lse_log2)
        if dlse is not None and faults.use_dlse:
            delta = delta - dlse.unsqueeze(-1)
        ds = (p16 if faults.ds_of_rounded_p else p) * (torch.matmul(rows_do, rows_v.mT) - delta)
        ds16 = faults.ds(torch.where(visible, ds, 0.0)).to(q.dtype).float()
        dq = torch.matmul(ds16, rows_k) * (scale if faults.scale_dq else 1.0)
        dk = torch.matmul(ds16.mT, rows_q) * (scale if faults.scale_dk else 1.0)
        dv = torch.matmul(p16.mT, rows_do)
        dk, dv = (x.unflatten(1, (-1, group))[:, :, faults.heads(group)].sum(2) for x in (dk, dv))
        return faults.finish(*(x.transpose(1, 2).to(q.dtype) for x in (dq, dk, dv)))

    return run
