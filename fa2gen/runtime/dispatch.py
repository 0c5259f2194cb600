"""A call that has not been seen before: arguments are checked, the backend is chosen, a plan is made and remembered."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fa2gen.reference import attention_forward
from fa2gen.spec import BwdConfig, ForwardConfig

from .autocast import autocast_inputs
from .autograd import record
from .copies import copied
from .emulated import emulated_config, emulated_forward
from .operators import traced_call
from .plan import (
    PLANS,
    Differentiable,
    ForwardPlan,
    gradient_options,
    match_config,
    remember,
)
from .plan_forward import build_plans
from .request import (
    Request,
    backward_request,
    read_deterministic,
    read_flag,
    read_request,
    require_config,
    require_no_tangents,
)
from .traced import has_memory, is_observed

Result = Tensor | tuple[Tensor, Tensor]


class Options(NamedTuple):
    """Everything that a call is given besides its tensors, in the order of the keys of ``PLANS``."""

    causal: bool
    softmax_scale: float | None
    return_lse: bool
    deterministic: bool | None
    backend: str
    config: ForwardConfig | None
    backward_config: BwdConfig | None

    def differentiable(self) -> tuple[Differentiable, Differentiable]:
        """The call to be recorded, where torch asks for no deterministic algorithms and where it does."""
        causal, scale, return_lse, wanted, backend, _, config = self
        fast, strict = (
            Differentiable(
                gradient_options(causal, scale, asked if wanted is None else wanted, backend, config), return_lse
            )
            for asked in (False, True)
        )
        return fast, strict


def first_call(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Result:
    """Serve a call for which there is no plan; ``given`` is an :class:`Options`, still to be checked."""
    options = Options(*given)
    if not has_memory(q, k, v) or is_observed():
        return traced_call(q, k, v, *options)
    if (cast := autocast_inputs(q, k, v)) is not None:
        from .attention import attention

        return attention(*cast, **options._asdict())
    causal, scale, backend = options.causal, options.softmax_scale, options.backend
    request = read_request(q, k, v, causal=causal, softmax_scale=scale, backend=backend)
    # Values as read: what the caller passed may be an array, which cannot be a key, or a tensor, which may change.
    options = options._replace(
        causal=request.spec.causal,
        softmax_scale=None if scale is None else request.softmax_scale,
        return_lse=read_flag("return_lse", options.return_lse),
        deterministic=read_deterministic(options.deterministic),
    )
    require_no_tangents({"q": q, "k": k, "v": v})
    require_config(request.backend, options.config, options.backward_config)
    if options.backward_config is not None and not request.is_empty:
        _require_feasible_gradients(request, options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        # Addresses that no tensor has: what a call without a plan saved is looked at as a whole.
        with torch.no_grad():
            results = (*_serve(request, options, q, k, v, with_lse=True), (0, 0, 0, 0, 0))
        return record(q, k, v, options.differentiable(), results)  # type: ignore[no-any-return]
    return _serve(request, options, q, k, v, with_lse=options.return_lse)


def _require_feasible_gradients(request: Request, options: Options) -> None:
    """Raise before anything is launched where the backward would, of which the forced config is known already."""
    asked = torch.are_deterministic_algorithms_enabled() if options.deterministic is None else options.deterministic
    wanted = backward_request(request, {}, deterministic=asked)
    if request.backend == "emulator":
        emulated_config(wanted, options.backward_config)
    else:
        match_config(wanted, request.device.index, options.backward_config)


def plan_key(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Any, ...]:
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
        *options,
    )


def _serve(request: Request, options: Options, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Result:
    """The results of a call whose arguments have been read, as far as autograd is not concerned."""
    if request.backend == "reference":
        out, lse = attention_forward(q, k, v, causal=request.spec.causal, softmax_scale=request.softmax_scale)
        out, lse = out.to(q.dtype), lse.float()
    elif request.is_empty:
        out, lse = _empty(request)
    elif request.copied or request.softmax_scale < 0:
        return _on_copies(request, options, q, k, v, with_lse)
    elif request.backend == "emulator":
        out, lse = emulated_forward(request, options.config, q, k, v)
    else:
        key = plan_key(q, k, v, options)
        plan = PLANS.get(key)
        if plan is None:
            plan = _plan(request, options)
            remember(PLANS, key, plan)
        return _launched(plan, q, k, v, with_lse)
    return (out, lse) if with_lse else out


def _plan(request: Request, options: Options) -> ForwardPlan:
    config = cast(ForwardConfig, match_config(request, request.device.index, options.config).config)
    run, run_with_lse, record = build_plans(request, config)
    return ForwardPlan(run_with_lse if options.return_lse else run, record, options.differentiable())


def _launched(plan: ForwardPlan, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Result:
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return plan.record(*addresses)[:2] if with_lse else plan.run(*addresses)


def _on_copies(request: Request, options: Options, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Result:
    """An equal call that needs no copy (s q = (-s)(-q)), and its output cut back to the caller's head dim."""
    negative = request.softmax_scale < 0
    q = copied(q, negated=negative) if negative or "q" in request.copied else q
    k, v = (copied(x, negated=False) if name in request.copied else x for name, x in (("k", k), ("v", v)))
    options = options._replace(softmax_scale=abs(request.softmax_scale))
    plan = PLANS.get(plan_key(q, k, v, options))
    if plan is not None:
        result = _launched(plan, q, k, v, with_lse)
    else:
        causal, scale, backend = options.causal, options.softmax_scale, options.backend
        again = read_request(q, k, v, causal=causal, softmax_scale=scale, backend=backend)
        result = _serve(again, options, q, k, v, with_lse)
    if request.head_dim == request.spec.head_dim:
        return result
    if isinstance(result, Tensor):
        return result.narrow(3, 0, request.head_dim).contiguous()
    return result[0].narrow(3, 0, request.head_dim).contiguous(), result[1]


def _empty(request: Request) -> tuple[Tensor, Tensor]:
    """The result where there is nothing to compute: no rows, or rows that see no key (output 0, LSE -inf)."""
    p = request.problem
    shape = (p.batch, p.seqlen_q, p.num_heads_q, request.head_dim)
    dtype = torch.float16 if request.spec.dtype == "fp16" else torch.bfloat16
    out = torch.zeros(shape, dtype=dtype, device=request.device)
    lse_shape = (p.batch, p.num_heads_q, p.seqlen_q)
    return out, torch.full(lse_shape, -math.inf, dtype=torch.float32, device=request.device)
