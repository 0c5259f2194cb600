"""Attention as torch operators, ``fa2gen::attention_fwd`` and ``_bwd``: what compiled and traced programs hold.

Eager calls do not pass through them: torch's dispatcher would add some 10 us of host time to each. The operators look
plans up when they run, so that a program compiled for dynamic lengths serves them all.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.spec import BwdConfig, ForwardConfig

from .autocast import autocast_inputs
from .autograd import refuse_second_derivative
from .backward import gradients
from .plan import gradient_options
from .request import read_deterministic, read_flag, require_no_tangents, require_number
from .traced import is_observed, is_transformed


def traced_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    deterministic: bool | None,
    backend: str,
    config: ForwardConfig | None,
    backward_config: BwdConfig | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The call as a node of a traced program; arguments are checked when the program runs."""
    for name, given in (("config", config), ("backward_config", backward_config)):
        if given is not None:
            raise UnsupportedError(f"{name} cannot be forced in a compiled or traced program; the tuned tables choose")
    tensors, transformed = {"q": q, "k": k, "v": v}, None
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        # torch.compile takes such transforms apart before it comes here.
        if not torch.compiler.is_compiling() and is_transformed(x):
            transformed = transformed or name
    require_no_tangents(tensors)
    if transformed is not None:
        raise UnsupportedError(
            f"{transformed} is differentiated by a transform of torch.func, which attention does not support; use "
            "torch.autograd.grad or backward()"
        )
    causal, return_lse = read_flag("causal", causal), read_flag("return_lse", return_lse)
    deterministic = read_deterministic(deterministic)
    if softmax_scale is not None:
        require_number(softmax_scale)
        softmax_scale = float(softmax_scale)
    if (cast := autocast_inputs(q, k, v)) is not None:
        q, k, v = cast
    out, lse = torch.ops.fa2gen.attention_fwd(q, k, v, causal, softmax_scale, deterministic, backend)
    return (out, lse) if return_lse else out


def _unobserved() -> contextlib.AbstractContextManager[Any]:
    """Whoever observes has seen the operator; what it does inside is not for them."""
    return _disable_current_modes() if is_observed() else contextlib.nullcontext()


# Schemas are spelt out: torch before 2.6 cannot infer them from annotations that are strings.
@torch.library.custom_op(
    "fa2gen::attention_fwd",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, bool? deterministic, str backend)"
        " -> (Tensor, Tensor)"
    ),
)
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    deterministic: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of :func:`fa2gen.runtime.attention`; ``deterministic`` is for its backward."""
    from .attention import attention

    with _unobserved():
        return attention(  # type: ignore[return-value]
            q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=True, backend=backend
        )


@attention_fwd.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    deterministic: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _require_one_device(q=q, k=k, v=v)
    torch._check(q.dim() == 4, lambda: f"q must have 4 dimensions (batch, seqlen, heads, head_dim), got {q.dim()}")
    batch, seqlen_q, num_heads_q, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, num_heads_q, seqlen_q), dtype=torch.float32)


@torch.library.custom_op(
    "fa2gen::attention_bwd",
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, "
        "float? softmax_scale, bool deterministic, str backend) -> (Tensor, Tensor, Tensor)"
    ),
)
def attention_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    softmax_scale: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from those of the output and (None: zero) of the LSE."""
    options = gradient_options(causal, softmax_scale, deterministic, backend, None)
    with _unobserved():
        return gradients(options, dout, dlse, (q, k, v, out, lse))


@attention_bwd.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    softmax_scale: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    given = {} if dlse is None else {"dlse": dlse}
    _require_one_device(q=q, k=k, v=v, dout=dout, out=out, lse=lse, **given)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _require_one_device(*, q: Tensor, **others: Tensor) -> None:
    """A single tensor on the meta device brings a call here, which then would make up results for the others."""
    for name, x in others.items():
        if x.device != q.device:
            raise ArgumentError(f"{name} is on device {x.device} and q on {q.device}; all must be on the same one")


# As torch counts its own attention: two products forward, five backward, the mask not looked at.
@register_flop_formula(torch.ops.fa2gen.attention_fwd)
def _forward_flops(q_shape: torch.Size, k_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _product_flops(q_shape, k_shape)


@register_flop_formula(torch.ops.fa2gen.attention_bwd)
def _backward_flops(
    dout_shape: torch.Size, _: Any, q_shape: torch.Size, k_shape: torch.Size, *__: Any, **___: Any
) -> int:
    return 5 * _product_flops(q_shape, k_shape)


def _product_flops(q_shape: torch.Size, k_shape: torch.Size) -> int:
    batch, seqlen_q, num_heads_q, head_dim = q_shape
    return 2 * batch * num_heads_q * seqlen_q * k_shape[1] * head_dim


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, causal, softmax_scale, deterministic, backend = inputs
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)
    ctx.options = causal, softmax_scale, deterministic, backend


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 4
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return (None, None, None, *none)
        dout = torch.zeros_like(out)
    computed = torch.ops.fa2gen.attention_bwd(dout, dlse, q, k, v, out, lse, *ctx.options)
    return (*(x if needed else None for x, needed in zip(computed, ctx.needs_input_grad, strict=False)), *none)


attention_fwd.register_autograd(_backward, setup_context=_save)
attention_bwd.register_autograd(refuse_second_derivative)
