"""What autograd records of an eager call. Traced and compiled programs record operators instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from fa2gen.errors import UnsupportedError

from .backward import gradients, is_like, plan_of
from .plan import SAVED_PLANS, Addresses, Differentiable, GradientOptions, remember

_is_grad_enabled = torch.is_grad_enabled
_must_be_deterministic = torch._C._get_deterministic_algorithms
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
# The innermost saved-tensor hooks, or None. A torch that does not tell is taken to have some.
_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: True)


class Attention(Function):
    """Saves what the caller passed: the backward copies again what the forward had to copy."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        calls: tuple[Differentiable, Differentiable],
        results: tuple[Tensor, Tensor, Addresses],
    ) -> Any:
        out, lse, addresses = results
        # What torch asks for now, not when the backward runs.
        ctx.call = call = calls[_must_be_deterministic()]
        ctx.addresses = addresses if _saved_tensor_hooks(False) is None else None
        # The output under another name, of the same version: torch makes an output anew when it is asked for, which
        # takes a backward 2.5 us; the name takes 0.8.
        if not call.return_lse:
            ctx.save_for_backward(q, k, v, out.detach(), lse)
            return out
        ctx.save_for_backward(q, k, v, out.detach(), lse.detach())
        # What was not used has no gradient, rather than zeros.
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        """Gradients. Torch drops those that nobody needs; asking for which would take 0.3 us."""
        q, k, v, out, lse = saved = ctx.saved_tensors
        call: Differentiable = ctx.call
        if dout is None:
            if dlse is None:
                return None, None, None, None, None
            dout = torch.zeros_like(out)
        # Grad mode is on where the backward itself is to be differentiated (create_graph=True).
        if _is_grad_enabled():
            dq, dk, dv = AttentionGradients.apply(call.options, dout, dlse, *saved)  # type: ignore[no-untyped-call]
            return dq, dk, dv, None, None
        try:
            found = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()
            dout_ptr, dlse_ptr = dout.data_ptr(), 0 if dlse is None else dlse.data_ptr()
        except RuntimeError:  # a batch of gradients
            dq, dk, dv = gradients(call.options, dout, dlse, saved)
            return dq, dk, dv, None, None
        # Everything that decides between plans belongs to the call, but dout's layout, and what ``x.data = y`` changes
        # behind autograd's back. That puts x elsewhere; where it comes back to an old address, by chance, other strides
        # may be left. A look at these instead of at all takes 5 us less in a step; here, not in a function, 2 less.
        if q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and dout.is_contiguous():
            key: Any = call
        else:
            key = (call, q.stride(), k.stride(), v.stride(), dout.stride())
        run = SAVED_PLANS.get(key)
        if (
            run is None
            or found != ctx.addresses
            or not dout_ptr
            or dout_ptr & 15
            or dout.is_neg()
            or not (dlse is None or (dlse_ptr and is_like(dlse, lse)))
            or forward_ad._current_level >= 0
            or _num_dispatch_modes()
        ):
            dq, dk, dv = gradients(call.options, dout, dlse, saved)
            if found == ctx.addresses and (run := plan_of(call.options, dout, saved)) is not None:
                remember(SAVED_PLANS, key, run)
        else:
            dq, dk, dv = run(*found, dout_ptr, dlse_ptr)
        return dq, dk, dv, None, None


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
record: Callable[[Tensor, Tensor, Tensor, tuple[Differentiable, Differentiable], Any], Any] = super(
    Function, Attention
).apply
"""The results of a call on q, k and v, one of which requires grad, with a history."""

if hasattr(Attention, "_backward_cls"):

    class AttentionBackward(Attention._backward_cls):  # type: ignore[misc, name-defined]
        """The node that autograd makes for a call. Torch's own finds its backward anew at each call, for 1.7 us."""

        __slots__ = ("addresses", "call")
        apply = Attention.backward

    Attention._backward_cls = AttentionBackward
