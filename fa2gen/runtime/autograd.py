"""What autograd records of an eager call. Traced and compiled programs record operators instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from fa2gen.errors import UnsupportedError

from .backward import gradients, saved_gradients
from .plan import Differentiable, GradientOptions

_is_grad_enabled = torch.is_grad_enabled
_must_be_deterministic = torch._C._get_deterministic_algorithms
# The innermost saved-tensor hooks, or None. A torch that does not tell is taken to have some.
_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: True)


class Attention(Function):
    """Saves what the caller passed: the backward copies again what the forward had to copy."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Differentiable) -> Any:
        out, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        # What torch asks for now, not when the backward runs.
        ctx.options = call.options[_must_be_deterministic()]
        ctx.compute = gradients if call.copies or _saved_tensor_hooks(False) is not None else saved_gradients
        if not call.return_lse:
            return out
        # What was not used has no gradient, rather than zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        saved = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return None, None, None, None
            dout = torch.zeros_like(saved[3])
        # Grad mode is on where the backward itself is to be differentiated (create_graph=True).
        if _is_grad_enabled():
            dq, dk, dv = AttentionGradients.apply(ctx.options, dout, dlse, *saved)  # type: ignore[no-untyped-call]
        else:
            dq, dk, dv = ctx.compute(ctx.options, dout, dlse, saved)
        needs_dq, needs_dk, needs_dv, _ = ctx.needs_input_grad
        return dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None, None


class AttentionGradients(Function):
    """Gradients that have a history, as create_graph=True wants, which ends here."""

    @staticmethod
    def forward(ctx: Any, options: GradientOptions, dout: Tensor, dlse: Tensor | None, *saved: Any) -> Any:
        return gradients(options, dout, dlse, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refuse_second_derivative()


def refuse_second_derivative(*_: Any) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(
        "attention can be differentiated once: its gradients have no derivative. Where second derivatives are needed, "
        "use torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH"
    )


# Function.apply without the Python around it, a third of its time: transforms of torch.func are met as operators.
record: Callable[[Tensor, Tensor, Tensor, Differentiable], Any] = super(Function, Attention).apply
"""The results of a call on q, k and v, one of which requires grad, with a history."""
