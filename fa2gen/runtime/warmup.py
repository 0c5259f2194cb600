"""Preparing calls ahead: compiling, loading, and proving kernels whose config was not tuned for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fa2gen.codegen import kernels_of
from fa2gen.compile import compile_many, kernel_source
from fa2gen.constraints_sm90 import compile_target
from fa2gen.driver import unavailable_reason
from fa2gen.errors import ArgumentError, CompileError, GateError, LaunchError
from fa2gen.gate import BackwardRunner, Runner, backward_cases, forward_cases, run_backward_gate, run_gate
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, Config, ForwardConfig, KernelSpec

from .attention import attention
from .autocast import autocast_inputs
from .describe import Description, describe_request
from .plan import device_gpu, loaded_kernel, loaded_kernels, match_config
from .plan_backward import build_backward_plan
from .plan_forward import build_plan
from .request import Request, backward_request, read_deterministic, read_flag, read_request, require_config

_gated: set[tuple[KernelSpec, Config, int]] = set()


def warmup(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    config: ForwardConfig | None = None,
    backward_config: BwdConfig | None = None,
    gate: bool | None = None,
    backward: bool | None = None,
) -> Description:
    """Make the next call with such tensors warm: its kernels compiled, loaded and launched once.

    After it the call, with its backward if that was prepared too, may be captured into a CUDA graph. The tensors are
    read, not changed, and no gradient is added to them.

    Args:
        q, k, v, causal, softmax_scale, return_lse, deterministic, config, backward_config: As for
            :func:`fa2gen.runtime.attention`.
        gate: Check the kernels on the GPU against the float64 reference, some seconds for a new kernel, once a process.
            None: where the config was not verified for this very spec (every source but ``"exact"``).
        backward: Prepare the gradients too; None: where a tensor requires grad.

    Returns:
        What the call runs. CPU tensors need no preparation.

    Raises:
        GateError: A kernel's results are wrong.
        Fa2genError: As the call itself.
    """
    q, k, v = autocast_inputs(q, k, v) or (q, k, v)
    request = read_request(q, k, v, causal=causal, softmax_scale=softmax_scale, backend="auto")
    require_config(request.backend, config, backward_config)
    deterministic = read_deterministic(deterministic)
    if backward is None:
        backward = q.requires_grad or k.requires_grad or v.requires_grad
    backward = read_flag("backward", backward)
    if request.backend == "cuda" and not request.is_empty:
        _prepare(request, config, gate)
        if backward:
            wanted = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
            _prepare(backward_request(request, {"q": q, "k": k, "v": v}, deterministic=wanted), backward_config, gate)
    # Leaves of their own: gradients go nowhere else.
    leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    with torch.set_grad_enabled(backward):
        result = attention(
            *leaves,
            causal=causal,
            softmax_scale=softmax_scale,
            return_lse=return_lse,
            deterministic=deterministic,
            config=config,
            backward_config=backward_config,
        )
        if backward:
            out = result if isinstance(result, Tensor) else result[0]
            torch.autograd.grad(out, leaves, torch.zeros_like(out))
    return describe_request(request, config)


def _prepare(request: Request, config: Config | None, gate: bool | None) -> None:
    """Compile and load the kernels of a call or of its gradients, and gate them where that is wanted."""
    index, spec = request.device.index, request.spec
    match = match_config(request, index, config)
    loaded_kernels(spec, match.config, index, kernels_of(spec.kind))
    if gate or (gate is None and match.source != "exact"):
        gate_kernel(spec, match.config, request.device)


def warmup_specs(
    calls: Sequence[tuple[KernelSpec, Problem]],
    *,
    device: torch.device | str | int | None = None,
    gate: bool | None = None,
) -> list[Description]:
    """Compile the kernels of many calls at once, in parallel, and load them.

    Args:
        calls: Spec and sizes of each; the sizes decide the config. The spec is what :func:`describe` says of the call,
            or of its gradients: a head dim that is no multiple of 8 runs padded to one, with alignment 16.
        device: CUDA device; default the current one.
        gate: As for :func:`warmup`.

    Returns:
        What each call runs, in order.
    """
    index = _device_index(device)
    requests = [_request(spec, problem, torch.device("cuda", index)) for spec, problem in calls]
    matches = [match_config(request, index, None) for request in requests]
    target = device_gpu(index).target
    names = [(i, name) for i, request in enumerate(requests) for name in kernels_of(request.spec.kind)]
    compiled = compile_many(
        [
            (kernel_source(requests[i].spec, matches[i].config, name), compile_target(matches[i].config, target))
            for i, name in names
        ]
    )
    for (i, name), kernel in zip(names, compiled, strict=True):
        if isinstance(kernel, CompileError):
            raise kernel
        loaded_kernel(requests[i].spec, matches[i].config, index, kernel, name=name)
    for request in requests:
        _prepare(request, None, gate)
    return [describe_request(request, None) for request in requests]


def _device_index(device: torch.device | str | int | None) -> int:
    # torch refuses a number where it has no accelerator.
    name = f"cuda:{device}" if isinstance(device, int) else "cuda" if device is None else device
    try:
        target = torch.device(name)
    except (RuntimeError, TypeError):
        target = torch.device("meta")
    if target.type != "cuda":
        raise ArgumentError(f"device must be a CUDA device, got {device!r}")
    if (reason := unavailable_reason()) is not None:
        raise LaunchError(f"no GPU can be used: {reason}")
    return torch.cuda.current_device() if target.index is None else target.index


def gate_kernel(spec: KernelSpec, config: Config, device: torch.device) -> None:
    """Run the quick gate on a GPU, once for each kernel.

    Raises:
        GateError: The kernel's results are wrong.
    """
    key = (spec, config, device.index)
    if key in _gated:
        return
    if isinstance(config, BwdConfig):
        cases = backward_cases(spec, config, budget="quick")
        report = run_backward_gate(spec, config, backward_runner(spec, config, device), cases, device=device)
    else:
        cases = forward_cases(spec, config, budget="quick")
        report = run_gate(spec, config, gate_runner(spec, config, device), cases, device=device)
    if not report.passed:
        raise GateError(f"{report.text}. Do not use this kernel; please report it")
    _gated.add(key)


def gate_runner(spec: KernelSpec, config: ForwardConfig, device: torch.device) -> Runner:
    """Runs exactly this spec and config, whichever the tensors would be given, into memory that held NaN."""

    def run(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        request = read_request(q, k, v, causal=spec.causal, softmax_scale=softmax_scale, backend="cuda")
        request = dataclasses.replace(request, spec=spec)
        plan = build_plan(request, config, return_lse=True)
        # The allocator hands the blocks of these two out again.
        poison = (torch.full_like(q, math.nan), torch.full((q.shape[:3].numel(),), math.nan, device=q.device))
        del poison
        out, lse = plan(q.data_ptr(), k.data_ptr(), v.data_ptr())
        return out, lse

    return run


def backward_runner(spec: KernelSpec, config: BwdConfig, device: torch.device) -> BackwardRunner:
    """Likewise for the gradients; all tensors must be such that a backward copies none."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        request = read_request(q, k, v, causal=spec.causal, softmax_scale=scale, backend="cuda")
        tensors = {"q": q, "k": k, "v": v, "o": out, "dout": dout}
        request = backward_request(request, tensors, deterministic=spec.deterministic)
        if request.copied:
            raise ArgumentError(f"{', '.join(request.copied)}: kernels of a backward want aligned tensors")
        plan = build_backward_plan(dataclasses.replace(request, spec=spec), config, poisoned=True)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), dout.data_ptr())
        return plan(*addresses, 0 if dlse is None else dlse.data_ptr())

    return run


def _request(spec: KernelSpec, problem: Problem, device: torch.device) -> Request:
    if spec.gqa_ratio != problem.gqa_ratio:
        raise ArgumentError(f"calls: {spec.slug()} has gqa_ratio {spec.gqa_ratio}, its problem {problem.gqa_ratio}")
    return Request(spec, problem, spec.head_dim, 1.0 / math.sqrt(spec.head_dim), "cuda", device, {}, {})
