"""The gradients of a call, on every backend: one dictionary look-up away from their launches when seen before."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.reference import attention_backward
from fa2gen.spec import BwdConfig

from .copies import copied, copy_reasons
from .emulated import emulated_gradients
from .plan import (
    BACKWARD_PLANS,
    BackwardPlan,
    GradientOptions,
    gradient_options,
    match_config,
    remember,
)
from .plan_backward import build_backward_plan
from .request import Request, backward_request, read_request, require_no_tangents
from .traced import has_memory, is_observed

Gradients = tuple[Tensor, Tensor, Tensor]
# q, k, v, output and LSE of a call, as its backward finds them again.
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_is_compiling = torch.compiler.is_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack


def gradients(options: GradientOptions, dout: Tensor, dlse: Tensor | None, saved: Saved) -> Gradients:
    """dq, dk and dv of a call of attention: new contiguous tensors, shaped like q, k and v.

    A caller's saved-tensor hooks may have put tensors elsewhere, with other strides: everything that decides what is
    launched is looked at again.

    Args:
        options: Of the call.
        dout: Gradient of the output, shaped like it, any strides.
        dlse: Gradient of the LSE, likewise; None is zero.
        saved: Inputs and results of the call, any strides.

    Raises:
        ArgumentError: A tensor does not fit the others.
        Fa2genError: As for a forward call.
    """
    q, k, v, out, lse = saved
    try:
        q_ptr, k_ptr, v_ptr, out_ptr = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        lse_ptr, dout_ptr, dlse_ptr = lse.data_ptr(), dout.data_ptr(), 0 if dlse is None else dlse.data_ptr()
        run = BACKWARD_PLANS[_key(options, dout, saved, (q_ptr | k_ptr | v_ptr | out_ptr | dout_ptr) & 15)]
    # A call not seen before, an argument that is no tensor, a tensor without memory.
    except (KeyError, AttributeError, RuntimeError):
        run = None
    # As in the forward: stand-ins that share everything else with what a plan was made for.
    if (
        run is None
        or not (q_ptr and k_ptr and v_ptr and out_ptr and lse_ptr and dout_ptr)
        or (q.is_neg() or k.is_neg() or v.is_neg() or out.is_neg() or lse.is_neg() or dout.is_neg())
        or not (dlse is None or (dlse_ptr and is_like(dlse, lse)))
        or forward_ad._current_level >= 0
        or _num_dispatch_modes()
        or _is_compiling()
    ):
        return _first_gradients(options, dout, dlse, saved)
    return run(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, dout_ptr, dlse_ptr)


def plan_of(options: GradientOptions, dout: Tensor, saved: Saved) -> BackwardPlan | None:
    """The plan that :func:`gradients` has run for these; None if it copied something, or a traced operator ran."""
    if any(x.data_ptr() & 15 for x in (*saved[:4], dout)):
        return None
    return BACKWARD_PLANS.get(_key(options, dout, saved, 0))


def _key(options: GradientOptions, dout: Tensor, saved: Saved, misalignment: int) -> tuple[Any, ...]:
    """Everything that decides what is launched."""
    q, k, v, out, lse = saved
    return (
        options,
        misalignment,
        q.shape,
        k.shape,
        v.shape,
        out.shape,
        lse.shape,
        dout.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        out.stride(),
        lse.stride(),
        dout.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        out.dtype,
        lse.dtype,
        dout.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        out.get_device(),
        lse.get_device(),
        dout.get_device(),
    )


def is_like(dlse: Tensor, lse: Tensor) -> bool:
    return (
        dlse.shape == lse.shape
        and dlse.dtype is torch.float32
        and dlse.get_device() == lse.get_device()
        and dlse.is_contiguous()
        and not dlse.is_neg()
    )


def _first_gradients(options: GradientOptions, dout: Tensor, dlse: Tensor | None, saved: Saved) -> Gradients:
    """Gradients for which there is no plan, or no plan that may be used."""
    q, k, v, out, lse = saved
    if _is_compiling() or not has_memory(dout, dout if dlse is None else dlse, *saved) or is_observed():
        if options.config is not None:
            raise UnsupportedError("backward_config cannot be forced where operators are traced; the tables choose")
        result: Gradients = torch.ops.fa2gen.attention_bwd(
            dout, dlse, q, k, v, out, lse, options.causal, options.softmax_scale, options.deterministic, options.backend
        )
        return result
    request = read_request(q, k, v, causal=options.causal, softmax_scale=options.softmax_scale, backend=options.backend)
    _check_tensors(request, dout, dlse, saved)
    require_no_tangents({"dout": dout, "q": q, "k": k, "v": v} | ({} if dlse is None else {"dlse": dlse}))
    if request.backend == "reference":
        scale, dtype = request.softmax_scale, q.dtype
        dq, dk, dv = attention_backward(q, k, v, dout, causal=options.causal, softmax_scale=scale, dlse=dlse)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)
    if request.is_empty:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        return dq, dk, dv
    return _kernel_gradients(request, options, dout, dlse, saved)


def _check_tensors(request: Request, dout: Tensor, dlse: Tensor | None, saved: Saved) -> None:
    """Raise unless gradients and results are those of a call on q."""
    q, _, _, out, lse = saved
    p = request.problem
    rows = (p.batch, p.num_heads_q, p.seqlen_q)
    expected = {"dout": (dout, q.shape, q.dtype), "out": (out, q.shape, q.dtype), "lse": (lse, rows, torch.float32)}
    if dlse is not None:
        expected["dlse"] = (dlse, rows, torch.float32)
    for name, (x, shape, dtype) in expected.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            layout = "a nested tensor" if x.is_nested else f"layout {x.layout}"
            raise ArgumentError(f"{name} must be a dense tensor, got {layout}")
        if x.shape != shape:
            raise ArgumentError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
        if x.dtype != dtype:
            raise ArgumentError(f"{name} must have dtype {dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ArgumentError(f"{name} is on device {x.device} and q on {q.device}; all must be on the same one")


def _kernel_gradients(
    request: Request, options: GradientOptions, dout: Tensor, dlse: Tensor | None, saved: Saved
) -> Gradients:
    """Gradients by kernels, on copies where they need them: s q = (-s)(-q), and head dims padded with zeros."""
    q, k, v, out, lse = saved
    tensors = {"q": q, "k": k, "v": v, "o": out, "dout": dout}
    negative = request.softmax_scale < 0
    if replaced := {*copy_reasons(tensors), *(["q"] if negative else [])}:
        tensors = {
            name: copied(x, negated=negative and name == "q") if name in replaced else x for name, x in tensors.items()
        }
        scale = abs(request.softmax_scale)
        options = gradient_options(options.causal, scale, options.deterministic, options.backend, options.config)
    lse, dlse = _flat(lse), None if dlse is None else _flat(dlse)
    positive = dataclasses.replace(request, softmax_scale=abs(request.softmax_scale))
    ready = backward_request(positive, tensors, deterministic=options.deterministic)
    if request.backend == "emulator":
        dq, dk, dv = emulated_gradients(ready, options.config, tensors, lse, dlse)
    else:
        run = _plan(ready, options, tensors, lse)
        q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr = (x.data_ptr() for x in tensors.values())
        dlse_ptr = 0 if dlse is None else dlse.data_ptr()
        dq, dk, dv = run(q_ptr, k_ptr, v_ptr, out_ptr, lse.data_ptr(), dout_ptr, dlse_ptr)
    if request.head_dim != request.spec.head_dim:
        dq, dk, dv = (x.narrow(3, 0, request.head_dim).contiguous() for x in (dq, dk, dv))
    return (dq.neg_() if negative else dq), dk, dv


def _plan(ready: Request, options: GradientOptions, tensors: dict[str, Tensor], lse: Tensor) -> BackwardPlan:
    """The plan for gradients that need no copy; an old one if there is one."""
    q, k, v, out, dout = tensors.values()
    # Copies and what needs none are aligned.
    key = _key(options, dout, (q, k, v, out, lse), 0)
    run = BACKWARD_PLANS.get(key)
    if run is None:
        config = cast(BwdConfig, match_config(ready, ready.device.index, options.config).config)
        run = build_backward_plan(ready, config)
        remember(BACKWARD_PLANS, key, run)
    return run


def _flat(x: Tensor) -> Tensor:
    """x itself if its elements lie in a row in memory, else a copy."""
    if x.is_neg() or x._is_zerotensor() or not x.is_contiguous():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    return x
