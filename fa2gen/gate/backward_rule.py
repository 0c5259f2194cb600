"""The tolerance rule of gradients: how far dq, dk and dv may be from the float64 reference.

Row by row, u being the unit roundoff of the input's dtype::

    max_d |g - ref| <= 3 max(max_d |plain16 - ref|, max_d roundoff + u max_d |ref|)

plain16 is the same formula with S, P, O, dP and dS rounded (:func:`fa2gen.reference.plain16_backward`). By itself it is
no limit: the true dq of a row with one visible key, or whose weight lies on one key, is zero, and its plain error may
be zero by chance. ``roundoff`` is the size of what a kernel cannot avoid (:mod:`fa2gen.gate.roundoff`).

Numbers below 2^-126 are zeros to a GPU's float32 sums, each term of which may lose as much.

Roundings are independent, so ``roundoff`` is a root of summed squares. The worst case, a sum of absolute values with
|dP| and |D| as sums of absolute products, would be no limit either, as dS has either sign: at head_dim 128 in bf16,
times 3 u, it is 57 % of a row of dq over 1025 keys and 105 % over 4096; gradients that are 5 % off passed, and at
head_dim 256 nearly all cases of a missing dLSE. The roots allow 2 % there. Simulated right kernels (float32,
truncating matrix units, P rounded before dS or not, head dims 8 to 256, with their own output and LSE or the
reference's) stay below 0.6 of the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa2gen.reference import attention_backward, chunk_extent, plain16_backward, slices

from .roundoff import backward_roundoff
from .rule import UNIT_ROUNDOFF, GateReport, error_ratio, form, largest, plain_error, refused

GRADIENTS = ("dq", "dk", "dv")

# A GPU's additions to float32 in global memory, and its exp2, take what is smaller for zero. bf16 reaches as far down.
FLUSHED = 2.0**-126


def check_backward(
    grads: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
) -> GateReport:
    """Compare gradients with the float64 reference; every element counts and NaN never passes.

    Args:
        grads: dq, dk and dv, shaped like q, k and v and in their dtype.
        q, k, v, do: The inputs, fp16 or bf16; see :func:`fa2gen.reference.attention_backward`.
        causal: Bottom-right causal mask.
        softmax_scale: Factor of the scores; None is ``1 / sqrt(head_dim)``.
        dlse: Gradient of the LSE (batch, num_heads_q, seqlen_q); None is zero.

    Returns:
        The report; ``where`` begins with the gradient that is nearest to its limit, or furthest beyond.
    """
    for name, grad, like in zip(GRADIENTS, grads, (q, k, v), strict=True):
        if grad.shape != like.shape or grad.dtype != like.dtype:
            return refused(f"{name} is {form(grad)}, expected {form(like)}")
    worst = dict.fromkeys(GRADIENTS, (0.0, "nowhere"))
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k, num_heads_k = k.shape[1:3]
    group = num_heads_q // num_heads_k if num_heads_k else 1
    # Batches and key/value heads have nothing to do with each other: memory is that of a few of them.
    cost = max(1, head_dim * (group * seqlen_q + seqlen_k))
    heads = chunk_extent(num_heads_k, cost)
    for b in slices(batch, chunk_extent(batch, cost * heads)):
        for h in slices(num_heads_k, heads):
            query_heads = slice(h.start * group, h.stop * group)
            ratios = _ratios(
                tuple(x[b, :, at] for x, at in zip(grads, (query_heads, h, h), strict=True)),
                tuple(x[b, :, at] for x, at in zip((q, k, v, do), (query_heads, h, h, query_heads), strict=True)),
                causal,
                softmax_scale,
                None if dlse is None else dlse[b, query_heads],
            )
            for name, of_rows, first_head in zip(GRADIENTS, ratios, (query_heads.start, h.start, h.start), strict=True):
                if of_rows.numel():
                    found = largest(of_rows, ("batch", "row", "head"), (b.start, 0, first_head))
                    worst[name] = found if found[0] >= worst[name][0] else worst[name]
    nearest = max(GRADIENTS, key=lambda name: worst[name][0])
    ratio, where = worst[nearest]
    if where == "nowhere":
        return GateReport(True, 0.0, where, 0.0, "passed: nothing to compare")
    text = ", ".join(f"{name} {worst[name][0]:.3g} of its limit at {worst[name][1]}" for name in GRADIENTS)
    passed = ratio <= 1.0
    return GateReport(passed, ratio, f"{nearest} {where}", 0.0, f"{'passed' if passed else 'FAILED'}: {text}")


def _ratios(
    grads: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    causal: bool,
    softmax_scale: float | None,
    dlse: Tensor | None,
) -> list[Tensor]:
    """Error over limit of each row of each gradient, (batch, seqlen, heads)."""
    refs, plains, roundoffs = (
        compute(*inputs, causal=causal, softmax_scale=softmax_scale, dlse=dlse)
        for compute in (attention_backward, plain16_backward, backward_roundoff)
    )
    unit, least = UNIT_ROUNDOFF[inputs[0].dtype], torch.finfo(inputs[0].dtype).smallest_normal
    q, k = inputs[:2]
    terms = (k.shape[1], *[q.shape[1] * q.shape[2] // k.shape[2]] * 2)
    ratios = []
    for grad, ref, plain, roundoff, summed in zip(grads, refs, plains, roundoffs, terms, strict=True):
        largest_ref = ref.abs().amax(-1)
        tiny = unit * largest_ref.clamp(min=least) + summed * FLUSHED
        rounding = roundoff.amax(-1) + torch.where(largest_ref > 0, tiny, 0.0)
        ratios.append(
            error_ratio((grad.double() - ref).abs().amax(-1), 3 * torch.maximum(plain_error(plain, ref), rounding))
        )
    return ratios
