"""What of an implementation is timed: its forward, its backward, or both in a row, always through autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fa2gen.errors import UnsupportedError

from .cells import Cell
from .machine import Ready, Tensors
from .peers import Call, Implementation


def make_ready(one: Implementation, cell: Cell, call: Call, tensors: list[Tensors]) -> Ready:
    """An implementation with what a cell measures of it.

    Args:
        one, cell: Which.
        call: What ``one.prepare`` returned.
        tensors: Of each input set, in its layout: q, k, v, and for gradients that of the output.

    Returns:
        Its call gives the output, or for a cell with a backward (dq, dk, dv).
    """
    if not cell.is_backward:
        return Ready(one, call, tensors)
    if cell.with_forward:
        return Ready(one, _step(call), tensors, begin=_leaves, is_step=True)
    return Ready(one, _gradients, tensors, begin=_forward(call))


def results(ready: Ready, tensors: Tensors) -> Tensors:
    """What a ready implementation computes for an input set: the output, or dq, dk and dv.

    In the layout of a cell's inputs.
    """
    computed = ready.call(*ready.begin(*tensors))
    found: Tensors = computed if isinstance(computed, tuple) else (computed,)
    return tuple(ready.implementation.arrange(x.detach()) for x in found)


def _leaves(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensors:
    """Leaves in the implementation's own layout: no transpose is recorded, and none is differentiated.

    New ones for every use: torch remembers the stream on which a leaf was first used, and a graph that is captured on
    another one would have to wait for it.
    """
    return (*(x.detach().requires_grad_() for x in (q, k, v)), do)


def _step(call: Call) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensors]:
    def step(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensors:
        return torch.autograd.grad(call(q, k, v), (q, k, v), do)

    return step


def _forward(call: Call) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensors]:
    def begin(*tensors: Tensor) -> Tensors:
        q, k, v, do = _leaves(*tensors)
        out = call(q, k, v)
        if not out.requires_grad:
            raise UnsupportedError("it is forward only: its output has no gradient")
        return out, q, k, v, do

    return begin


def _gradients(out: Tensor, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensors:
    return torch.autograd.grad(out, (q, k, v), do, retain_graph=True)
