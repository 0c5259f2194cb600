"""A call that has not been seen before: arguments are checked, the backend is chosen, a plan is made and remembered."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fa2gen.constraints import default_config, infeasible_reason
from fa2gen.errors import InfeasibleError
from fa2gen.hardware import arch_limits
from fa2gen.reference import attention_forward
from fa2gen.spec import FwdConfig

from .copies import copied
from .plan import PLANS, build_plan, match_config, remember
from .request import Request, read_flag, read_request, refuse_gradients, require_config
from .traced import has_memory, is_observed, traced_call

# The emulator runs what an sm_80 chip would.
EMULATED_CAPABILITY = (8, 0)

Result = Tensor | tuple[Tensor, Tensor]


def first_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    backend: str,
    config: FwdConfig | None,
) -> Result:
    """Serve a call for which there is no plan; see :func:`fa2gen.runtime.attention`."""
    if not has_memory(q, k, v) or is_observed():
        return traced_call(q, k, v, causal, softmax_scale, return_lse, backend, config)
    request = read_request(q, k, v, causal=causal, softmax_scale=softmax_scale, backend=backend)
    return_lse = read_flag("return_lse", return_lse)
    refuse_gradients(q, k, v)
    require_config(request.backend, config)
    if request.backend == "reference":
        return _reference(request, q, k, v, return_lse)
    if request.is_empty:
        return _empty(request, return_lse)
    if request.copied or request.softmax_scale < 0:
        return _on_copies(request, q, k, v, return_lse, backend, config)
    if request.backend == "emulator":
        return _emulated(request, q, k, v, return_lse, config)
    plan = build_plan(request, match_config(request, request.device.index, config).config, return_lse=return_lse)
    # Values as read: what the caller passed may be an array, which cannot be a key, or a tensor, which may change.
    given = None if softmax_scale is None else request.softmax_scale
    remember(plan_key(q, k, v, request.spec.causal, given, return_lse, backend, config), plan)
    return plan(q.data_ptr(), k.data_ptr(), v.data_ptr())  # type: ignore[no-any-return]


def plan_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    backend: str,
    config: FwdConfig | None,
) -> tuple[Any, ...]:
    """Everything that decides what is launched; :func:`attention` writes the same tuple out to save a call."""
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        causal,
        softmax_scale,
        return_lse,
        backend,
        config,
    )


def _on_copies(
    request: Request, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, backend: str, config: FwdConfig | None
) -> Result:
    """An equal call that needs no copy (s q = (-s)(-q)), and its output cut back to the caller's head dim."""
    negative = request.softmax_scale < 0
    q = copied(q, negated=negative) if negative or "q" in request.copied else q
    k, v = (copied(x, negated=False) if name in request.copied else x for name, x in (("k", k), ("v", v)))
    causal, scale = request.spec.causal, abs(request.softmax_scale)
    plan = PLANS.get(plan_key(q, k, v, causal, scale, return_lse, backend, config))
    if plan is not None:
        result: Result = plan(q.data_ptr(), k.data_ptr(), v.data_ptr())
    else:
        result = first_call(q, k, v, causal, scale, return_lse, backend, config)
    if request.head_dim == request.spec.head_dim:
        return result
    if isinstance(result, Tensor):
        return result.narrow(3, 0, request.head_dim).contiguous()
    return result[0].narrow(3, 0, request.head_dim).contiguous(), result[1]


def _empty(request: Request, return_lse: bool) -> Result:
    """The result where there is nothing to compute: no rows, or rows that see no key (output 0, LSE -inf)."""
    p = request.problem
    shape = (p.batch, p.seqlen_q, p.num_heads_q, request.head_dim)
    dtype = torch.float16 if request.spec.dtype == "fp16" else torch.bfloat16
    out = torch.zeros(shape, dtype=dtype, device=request.device)
    if not return_lse:
        return out
    lse_shape = (p.batch, p.num_heads_q, p.seqlen_q)
    return out, torch.full(lse_shape, -math.inf, dtype=torch.float32, device=request.device)


def _reference(request: Request, q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> Result:
    out, lse = attention_forward(q, k, v, causal=request.spec.causal, softmax_scale=request.softmax_scale)
    out = out.to(q.dtype)
    return (out, lse.float()) if return_lse else out


def _emulated(request: Request, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, config: FwdConfig | None) -> Result:
    from fa2gen.emulator.forward import run_forward

    config = emulated_config(request, config)
    out, lse, _ = run_forward(request.spec, config, q, k, v, softmax_scale=request.softmax_scale)
    return (out, lse) if return_lse else out


def emulated_config(request: Request, config: FwdConfig | None) -> FwdConfig:
    """The config that the emulator runs: the caller's if it is legal on the emulated chip, else the default."""
    if config is None:
        return default_config(request.spec)
    reason = infeasible_reason(request.spec, config, arch_limits(EMULATED_CAPABILITY))
    if reason is not None:
        raise InfeasibleError(f"config {config.slug()} cannot run {request.spec.slug()} on sm_80: {reason}")
    return config
