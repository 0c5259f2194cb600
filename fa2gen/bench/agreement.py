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


def sample_rows(seqlen: int) -> list[int]:
    """First and last rows, rows on both sides of tile edges, and some between."""
    wanted = {0, 1, 63, 64, 127, 128, seqlen // 3, seqlen // 2, seqlen - 129, seqlen - 65, seqlen - 2, seqlen - 1}
    return sorted(row for row in wanted if 0 <= row < seqlen)


def reference_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, cell: Cell, allowance: float = 1.0) -> str:
    """Compares sampled rows with the float64 reference by the gate's rule: what is wrong, or ``""``.

    Rows of the first and last sequence, of their first and last key/value head with all its query heads.

    Args:
        out, q, k, v: (batch, seqlen, heads, head_dim).
        allowance: Times the rule's limit that an error may reach.
    """
    p, group = cell.problem, cell.spec.gqa_ratio
    if out.shape != q.shape or out.dtype != q.dtype:
        return f"its output is {tuple(out.shape)} {out.dtype}, not {tuple(q.shape)} {q.dtype}"
    sampled = sample_rows(p.seqlen_q)
    for batch in sorted({0, p.batch - 1}):
        for head in sorted({0, p.num_heads_k - 1}):
            heads = slice(head * group, (head + 1) * group)
            keys, values = (x[batch : batch + 1, :, head : head + 1] for x in (k, v))
            # Under a causal mask each row by itself: alone it sees its keys without a mask.
            for rows in [[row] for row in sampled] if cell.spec.causal else [sampled]:
                seen = max(0, min(p.seqlen_k, rows[0] + 1 + p.seqlen_k - p.seqlen_q)) if cell.spec.causal else None
                theirs, queries = (x[batch : batch + 1, rows, heads] for x in (out, q))
                report = check_forward(theirs, None, queries, keys[:, :seen], values[:, :seen], causal=False)
                if report.worst > allowance:
                    return (
                        f"it is not attention's: off by {report.worst:.3g} times what the tolerance rule allows, in "
                        f"sequence {batch}, row {rows[0] if cell.spec.causal else rows}, key/value head {head}"
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
