"""Preparing calls ahead: compiling, loading, and proving kernels whose config was not tuned for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fa2gen.compile import compile_many, kernel_source
from fa2gen.driver import unavailable_reason
from fa2gen.errors import ArgumentError, CompileError, GateError, LaunchError
from fa2gen.gate import Runner, forward_cases, run_gate
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec

from .attention import attention
from .describe import Description, describe_request
from .plan import build_plan, device_gpu, loaded_kernel, match_config
from .request import Request, read_request, require_config

_gated: set[tuple[KernelSpec, FwdConfig, int]] = set()


def warmup(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    config: FwdConfig | None = None,
    gate: bool | None = None,
) -> Description:
    """Make the next call with such tensors warm: its kernel compiled, loaded and launched once.

    After it the call may be captured into a CUDA graph. The tensors are read, not changed.

    Args:
        q, k, v, causal, softmax_scale, return_lse, config: As for :func:`fa2gen.runtime.attention`.
        gate: Check the kernel on the GPU against the float64 reference, some seconds for a new kernel, once a process.
            None: where the config was not verified for this very spec (every source but ``"exact"``).

    Returns:
        What the call runs. CPU tensors need no preparation.

    Raises:
        GateError: The kernel's results are wrong.
        Fa2genError: As the call itself.
    """
    request = read_request(q, k, v, causal=causal, softmax_scale=softmax_scale, backend="auto")
    require_config(request.backend, config)
    if request.backend == "cuda" and not request.is_empty:
        match = match_config(request, request.device.index, config)
        loaded_kernel(request.spec, match.config, request.device.index)
        if gate or (gate is None and match.source != "exact"):
            gate_kernel(request.spec, match.config, request.device)
    attention(q, k, v, causal=causal, softmax_scale=softmax_scale, return_lse=return_lse, config=config)
    return describe_request(request, config)


def warmup_specs(
    calls: Sequence[tuple[KernelSpec, Problem]],
    *,
    device: torch.device | str | int | None = None,
    gate: bool | None = None,
) -> list[Description]:
    """Compile the kernels of many calls at once, in parallel, and load them.

    Args:
        calls: Spec and sizes of each; the sizes decide the config. The spec is what :func:`describe` says of the call:
            a head dim that is no multiple of 8 runs padded to one, with alignment 16.
        device: CUDA device; default the current one.
        gate: As for :func:`warmup`.

    Returns:
        What each call runs, in order.
    """
    index = _device_index(device)
    requests = [_request(spec, problem, torch.device("cuda", index)) for spec, problem in calls]
    matches = [match_config(request, index, None) for request in requests]
    target = device_gpu(index).target
    compiled = compile_many(
        [(kernel_source(request.spec, match.config), target) for request, match in zip(requests, matches, strict=True)]
    )
    descriptions = []
    for request, match, kernel in zip(requests, matches, compiled, strict=True):
        if isinstance(kernel, CompileError):
            raise kernel
        loaded_kernel(request.spec, match.config, index, kernel)
        if gate or (gate is None and match.source != "exact"):
            gate_kernel(request.spec, match.config, request.device)
        descriptions.append(describe_request(request, None))
    return descriptions


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


def gate_kernel(spec: KernelSpec, config: FwdConfig, device: torch.device) -> None:
    """Run the quick gate on a GPU, once for each kernel.

    Raises:
        GateError: The kernel's results are wrong.
    """
    key = (spec, config, device.index)
    if key in _gated:
        return
    cases = forward_cases(spec, config, budget="quick")
    report = run_gate(spec, config, gate_runner(spec, config, device), cases, device=device)
    if not report.passed:
        raise GateError(f"{report.text}. Do not use this kernel; please report it")
    _gated.add(key)


def gate_runner(spec: KernelSpec, config: FwdConfig, device: torch.device) -> Runner:
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


def _request(spec: KernelSpec, problem: Problem, device: torch.device) -> Request:
    if spec.gqa_ratio != problem.gqa_ratio:
        raise ArgumentError(f"calls: {spec.slug()} has gqa_ratio {spec.gqa_ratio}, its problem {problem.gqa_ratio}")
    return Request(spec, problem, spec.head_dim, 1.0 / math.sqrt(spec.head_dim), "cuda", device, {}, {})
