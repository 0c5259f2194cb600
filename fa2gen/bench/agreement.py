"""Whether implementations compute the same: what another mask, layout or head order computes is not to be timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fa2gen.gate import check_backward, check_forward
from fa2gen.gate.rule import UNIT_ROUNDOFF

from .cells import Cell

# A peer rounds in its own way; the worst rows of a right one come near the gate's limit, those of another mask or head
# order are beyond it a hundred times. fa2gen itself must keep the limit.
PEER_ALLOWANCE = 4.0
# Two right results, each some roundoffs from the exact one: this many between them, of the row's largest element.
_BETWEEN = 16
_GRADIENTS = ("dq", "dk", "dv")
# Elements of one comparison in float32: 256 MB.
_CHUNK_ELEMENTS = 1 << 26


def sample_strips(seqlen: int) -> list[range]:
    """Strips of eight rows: the first and the last, over tile edges, and between."""
    starts = {0, 60, 124, seqlen // 3, seqlen // 2, seqlen - 132, seqlen - 8}
    return [range(max(0, start), min(start + 8, seqlen)) for start in sorted(starts) if -8 < start < seqlen]


def reference_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, cell: Cell, allowance: float = 1.0) -> str:
    """Compares strips of rows with the float64 reference by the gate's rule: what is wrong, or ``""``.

    They are taken from the first key/value head of the first sequence and from the last of the last one, with all query
    heads that read it.

    Args:
        out, q, k, v: (batch, seqlen, heads, head_dim).
        allowance: Times the rule's limit that an error may reach.
    """
    p, group, causal = cell.problem, cell.spec.gqa_ratio, cell.spec.causal
    if out.shape != q.shape or out.dtype != q.dtype:
        return f"its output is {tuple(out.shape)} {out.dtype}, not {tuple(q.shape)} {q.dtype}"
    for batch, head in sorted({(0, 0), (p.batch - 1, p.num_heads_k - 1)}):
        sequence, heads = slice(batch, batch + 1), slice(head * group, (head + 1) * group)
        keys, values = (x[sequence, :, head : head + 1] for x in (k, v))
        for strip in sample_strips(p.seqlen_q):
            # Up to the last key that the last of these rows sees, the mask is aligned as in the whole.
            seen = max(0, strip.stop + p.seqlen_k - p.seqlen_q) if causal else p.seqlen_k
            theirs, queries = (x[sequence, strip.start : strip.stop, heads] for x in (out, q))
            report = check_forward(theirs, None, queries, keys[:, :seen], values[:, :seen], causal=causal)
            if report.worst > allowance:
                return (
                    f"it is not attention's: off by {report.worst:.3g} times what the tolerance rule allows, at "
                    f"{report.where} of sequence {batch}, rows from {strip.start}, query heads from {heads.start}"
                )
    return ""


def gradient_error(grads: Sequence[Tensor], inputs: Sequence[Tensor], cell: Cell, allowance: float = 1.0) -> str:
    """Compares gradients with the float64 reference by the gate's rule: what is wrong, or ``""``.

    All rows count, of the first key/value head of the first sequence and of the last of the last one, and of all query
    heads that read it.

    Args:
        grads: dq, dk, dv; (batch, seqlen, heads, head_dim).
        inputs: q, k, v and the output's gradient, likewise.
        allowance: Times the rule's limit that an error may reach.
    """
    for name, grad, like in zip(_GRADIENTS, grads, inputs, strict=False):
        if grad.shape != like.shape or grad.dtype != like.dtype:
            return f"its {name} is {tuple(grad.shape)} {grad.dtype}, not {tuple(like.shape)} {like.dtype}"
    p, group = cell.problem, cell.spec.gqa_ratio
    for batch, head in sorted({(0, 0), (p.batch - 1, p.num_heads_k - 1)}):
        at_q = slice(batch, batch + 1), slice(None), slice(head * group, (head + 1) * group)
        at_k = slice(batch, batch + 1), slice(None), slice(head, head + 1)
        dq, dk, dv = (x[at] for x, at in zip(grads, (at_q, at_k, at_k), strict=True))
        q, k, v, do = (x[at] for x, at in zip(inputs, (at_q, at_k, at_k, at_q), strict=True))
        report = check_backward((dq, dk, dv), q, k, v, do, causal=cell.spec.causal)
        if report.worst > allowance:
            return (
                f"they are not attention's gradients: off by {report.worst:.3g} times what the tolerance rule allows, "
                f"at {report.where} of sequence {batch}, query heads from {head * group}"
            )
    return ""


def peer_gradient_error(grads: Sequence[Tensor], own: Sequence[Tensor]) -> str:
    """Compares every row of a peer's gradients with fa2gen's: what is wrong, or ``""``.

    Args:
        grads, own: dq, dk, dv; (batch, seqlen, heads, head_dim), 16 bits.
    """
    for name, theirs, ours in zip(_GRADIENTS, grads, own, strict=True):
        # A row whose terms cancel (a query that sees one key) is nothing but their rounding, as large as that of the
        # largest rows.
        wrong = peer_error(theirs, ours, of_largest=True)
        if wrong:
            return f"{name}: {wrong}"
    return ""


def peer_error(out: Tensor, own: Tensor, *, of_largest: bool = False) -> str:
    """Compares every row of a peer's output with fa2gen's: what is wrong, or ``""``.

    Args:
        out, own: (batch, seqlen, heads, head_dim), 16 bits.
        of_largest: An error is measured by the largest row of its head, not by an average one.
    """
    if out.shape != own.shape or out.dtype != own.dtype:
        return f"it is {tuple(out.shape)} {out.dtype}, not {tuple(own.shape)} {own.dtype}"
    per_sequence = own[0].numel()
    step = max(1, _CHUNK_ELEMENTS // max(1, per_sequence))
    worst, where = 0.0, (0, 0, 0)
    for start in range(0, own.shape[0], step):
        theirs, ours = (x[start : start + step].float() for x in (out, own))
        size = ours.abs().amax(-1)
        # A row of few columns may happen to be near zero; its neighbours say how large rows are.
        usual = size.amax(dim=1, keepdim=True) if of_largest else size.mean(dim=1, keepdim=True)
        limit = _BETWEEN * UNIT_ROUNDOFF[own.dtype] * (size + usual)
        error = (theirs - ours).abs().amax(-1)
        ratio = torch.where(error == 0, 0.0, error / limit).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = float(ratio.max())
        if largest > worst:
            index = int(ratio.argmax())
            sequence, rest = divmod(index, ratio.shape[1] * ratio.shape[2])
            worst, where = largest, (start + sequence, *divmod(rest, ratio.shape[2]))
    if worst <= 1.0:
        return ""
    sequence, row, head = where
    return (
        f"it is not fa2gen's: off by {worst:.3g} times what rounding explains, in sequence {sequence}, row {row}, "
        f"head {head}"
    )
