"""Attention as a torch operator, ``fa2gen::attention_fwd``: what compiled and traced programs hold.

Eager calls do not pass through it: torch's dispatcher would add some 10 us of host time to each.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.spec import FwdConfig

from .request import read_flag, refuse_gradients, require_number


def has_memory(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """False where a tensor is a stand-in (fake, wrapped, batched by vmap) that only the dispatcher can take apart."""
    return all(_has_memory(x) for x in (q, k, v))


def _has_memory(x: Tensor) -> bool:
    # What is not a plain tensor with elements is for the argument checks to judge.
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested or (x.is_meta and type(x) is Tensor):
        return True
    if type(x) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    try:
        return x.numel() == 0 or x.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def is_observed() -> bool:
    """Whether a dispatch mode (make_fx, a flop counter) or ``torch.jit.trace`` follows this thread's operators.

    They would see an output come into being, but not the launch that fills it: the call has to be an operator.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


def traced_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    backend: str,
    config: FwdConfig | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The call as a node of a traced program; arguments are checked when the program runs."""
    if config is not None:
        raise UnsupportedError("config cannot be forced in a compiled or traced program; the tuned tables choose")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    refuse_gradients(q, k, v)
    causal, return_lse = read_flag("causal", causal), read_flag("return_lse", return_lse)
    if softmax_scale is not None:
        require_number(softmax_scale)
        softmax_scale = float(softmax_scale)
    out, lse = torch.ops.fa2gen.attention_fwd(q, k, v, causal, softmax_scale, return_lse, backend)
    return (out, lse) if return_lse else out


# Spelt out: torch before 2.6 cannot infer a schema from annotations that are strings.
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, bool return_lse, str backend)"
    " -> (Tensor, Tensor)"
)


@torch.library.custom_op("fa2gen::attention_fwd", mutates_args=(), schema=_SCHEMA)
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, return_lse: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """:func:`fa2gen.runtime.attention` with positional arguments; without ``return_lse`` the LSE has no elements."""
    from .attention import attention

    # Whoever observes has seen the operator; what it does inside is not for them.
    with _disable_current_modes() if is_observed() else contextlib.nullcontext():
        result = attention(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse, backend=backend)
    if isinstance(result, tuple):
        return result
    return result, q.new_empty((0,), dtype=torch.float32)


@attention_fwd.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float | None, return_lse: bool, backend: str
) -> tuple[Tensor, Tensor]:
    torch._check(q.dim() == 4, lambda: f"q must have 4 dimensions (batch, seqlen, heads, head_dim), got {q.dim()}")
    batch, seqlen_q, num_heads_q, _ = q.shape
    lse_shape = (batch, num_heads_q, seqlen_q) if return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)
