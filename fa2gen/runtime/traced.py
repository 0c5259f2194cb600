"""Calls that must be torch operators: on tensors that are stand-ins, or where somebody follows what torch runs."""

from __future__ import annotations

import torch
from torch import Tensor


def has_memory(*tensors: Tensor) -> bool:
    """False where a tensor is a stand-in (fake, wrapped, batched by vmap) that only the dispatcher can take apart."""
    return all(_has_memory(x) for x in tensors)


def _has_memory(x: Tensor) -> bool:
    # What is not a plain tensor with elements is for the argument checks to judge.
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested or (x.is_meta and type(x) is Tensor):
        return True
    try:
        return x.numel() == 0 or x._is_zerotensor() or x.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def is_observed() -> bool:
    """Whether a dispatch mode (make_fx, a flop counter) or ``torch.jit.trace`` follows this thread's operators.

    They would see an output come into being, but not the launch that fills it: the call has to be an operator.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def is_transformed(x: Tensor) -> bool:
    """Whether torch.func.grad or a relative of it follows what becomes of x."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False
