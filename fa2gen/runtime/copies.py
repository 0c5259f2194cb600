"""Tensors that a call copies before its kernels run: which ones, why, and how.

Kernels move rows as 16-byte vectors or, in views that do not allow that, element by element: eight times as many
instructions, for every query block of every head again. A copy costs two passes over the tensor, once. So keys and
values in an unaligned view are copied where several query blocks read them, and stay where they are where one does:
that is decoding, whose cache may be most of the GPU's memory. q is read once and no larger than the output: it is
copied rather than make the keys move element by element. Backward kernels move vectors only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fa2gen.problem import Problem

# Queries that share a key, heads of a group included: of more than these, several query blocks fetch it. On an H200, in
# bf16, calls in place took so many times as long as those with copies, at 128, 256, 512 and 1024 queries:
#   64 sequences of 1k keys, head dim 128, which fill the chip    0.46  0.74  1.10  1.48
#    4 of 4k, 16 heads of 128                                     0.76  0.78  0.75  1.04
#    4 of 4k, 8 heads of 256                                      0.96  0.96  0.97  1.36
#    4 of 4k, 32 heads of 64 over 8                               0.91  0.86  1.04  1.03
#    4 of 4k, 16 heads of 128 over 2: too few blocks to hide that  1.32  1.34  1.24  1.66
# One query against a cache stays in place also where the copy would be faster (1.33 for one sequence of 16k): the copy
# might not fit.
MAX_QUERIES_IN_PLACE = 256


def used_strides(x: Tensor) -> tuple[int, int, int]:
    """Element strides of (batch, row, head), 0 for an axis of one element.

    The stride of such an axis is arbitrary and never used: it must not decide which kernel runs.
    """
    batch, row, head = (stride if extent > 1 else 0 for extent, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    return batch, row, head


def is_aligned(x: Tensor) -> bool:
    """Whether every row can move as 16-byte vectors."""
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in used_strides(x))


def padded_head_dim(head_dim: int) -> int:
    """The multiple of 8 that kernels run: rows are whole 16-byte vectors."""
    return -(-head_dim // 8) * 8


def copy_reasons(tensors: Mapping[str, Tensor], problem: Problem | None = None) -> dict[str, str]:
    """Which tensors have to be copied, and why: q, k and v of a forward; without a problem, any of a backward."""
    reasons = {name: reason for name, x in tensors.items() if (reason := _reason(x))}
    unaligned = [name for name, x in tensors.items() if name not in reasons and not is_aligned(x)]
    in_place = problem is not None and problem.seqlen_q * problem.gqa_ratio <= MAX_QUERIES_IN_PLACE
    if in_place and unaligned != ["q"]:
        return reasons
    return reasons | dict.fromkeys(unaligned, "its base or a stride is not a multiple of 16 bytes")


def _reason(x: Tensor) -> str | None:
    head_dim = x.shape[3]
    if head_dim != padded_head_dim(head_dim):
        return f"head_dim {head_dim} is padded to {padded_head_dim(head_dim)}"
    if head_dim > 1 and x.stride(3) != 1:
        return "its last dimension is not contiguous"
    # Such as the imaginary part of a conjugate: memory holds the values before the negation.
    if x.is_neg():
        return "it is a view that negates"
    # As forward-mode differentiation makes of what does not depend on its input; a kernel would be given address 0.
    return "its zeros have no memory" if x._is_zerotensor() else None


def copied(x: Tensor, *, negated: bool) -> Tensor:
    """x or -x in new, aligned memory, its last dimension contiguous and padded with zeros to a multiple of 8.

    An axis that repeats (stride 0), such as a key/value head expanded to many, repeats in the copy.
    """
    repeats, head_dim = [stride == 0 for stride in x.stride()[:3]], x.shape[3]
    once = x[tuple(slice(0, 1) if repeat else slice(None) for repeat in repeats)] if any(repeats) else x
    width = padded_head_dim(head_dim)
    # Zeros: whatever stands there, times the other operand's zero, could be NaN.
    copy = (once.new_empty if width == head_dim else once.new_zeros)((*once.shape[:3], width))
    values = copy if width == head_dim else copy.narrow(3, 0, head_dim)
    if negated:
        torch.neg(once, out=values)
    else:
        values.copy_(once)
    return copy.expand(*x.shape[:3], width) if any(repeats) else copy
