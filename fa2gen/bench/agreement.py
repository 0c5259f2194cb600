"""Whether implementations compute the same: what another mask, layout or head order computes is not to be timed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa2gen.gate import check_forward
from fa2gen.gate.rule import UNIT_ROUNDOFF

from .cells import Cell

# A peer rounds in its own way; the worst rows of a right one come near the gate's limit, those of another mask or head
# order are beyond it a hundred times. fa2gen itself must keep the limit.
PEER_ALLOWANCE = 4.0
# Two right results, each some roundoffs from the exact one: this many between them, of the row's largest element.
_BETWEEN = 16
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


def peer_error(out: Tensor, own: Tensor) -> str:
    """Compares every row of a peer's output with fa2gen's: what is wrong, or ``""``.

    Args:
        out, own: (batch, seqlen, heads, head_dim), 16 bits.
    """
    if out.shape != own.shape or out.dtype != own.dtype:
        return f"its output is {tuple(out.shape)} {out.dtype}, not {tuple(own.shape)} {own.dtype}"
    per_sequence = own[0].numel()
    step = max(1, _CHUNK_ELEMENTS // max(1, per_sequence))
    worst, where = 0.0, (0, 0, 0)
    for start in range(0, own.shape[0], step):
        theirs, ours = (x[start : start + step].float() for x in (out, own))
        size = ours.abs().amax(-1)
        # A row of few columns may happen to be near zero; its neighbours say how large rows are.
        limit = _BETWEEN * UNIT_ROUNDOFF[own.dtype] * (size + size.mean(dim=1, keepdim=True))
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
