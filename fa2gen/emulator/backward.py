"""The backward kernels on CPU tensors, through the emulator."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import ArgumentError
from ..launch import bwd_plan
from ..problem import Problem
from ..spec import BwdConfig, KernelSpec
from .launches import run_plan
from .runner import Counters
from .tensors import (
    copy_back,
    float_buffer,
    problem_of,
    require_legal,
    require_tensor,
    tensor_buffer,
    used_strides,
    workspace_buffer,
)


def run_backward(
    spec: KernelSpec,
    config: BwdConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    *,
    softmax_scale: float,
    dlse: torch.Tensor | None = None,
    seed: int = 1,
    random_schedule: bool = True,
    checks: bool = True,
    timeout: float = 120.0,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Counters]:
    """Renders, builds and runs the backward kernels on the CPU, with every access checked.

    The kernels see each tensor at its own alignment and with its own strides. Workspaces start without values; a read
    of one that no launch has written is reported, and so is an addition to it.

    Args:
        spec, config: The kernels.
        q: (batch, seqlen_q, num_heads_q, head_dim) on the CPU, of the spec's dtype; the last dimension is contiguous,
            the other strides are free.
        k, v: (batch, seqlen_k, num_heads_k, head_dim), likewise.
        o: The forward's output, shaped like q.
        lse: The forward's LSE, (batch, num_heads_q, seqlen_q), float32, contiguous, natural logarithm.
        do: The gradient of ``o``, shaped like it; strides may be 0.
        softmax_scale: At least 0.
        dlse: The gradient of ``lse``, likewise; default: zero.
        seed, random_schedule, checks, timeout, threads: See :func:`~fa2gen.emulator.run`.

    Returns:
        The gradients of q, k and v, contiguous, and what all launches together did.

    Raises:
        ArgumentError: A tensor does not fit the spec.
        InfeasibleError: The config is legal for the spec on no GPU; the message is the reason.
        EmulatorError: A kernel broke a rule, crashed or did not end.
    """
    problem = problem_of(spec, q, k, v)
    for name, tensor in (("o", o), ("do", do)):
        require_tensor(spec, name, tensor)
        if tensor.shape != q.shape:
            raise ArgumentError(f"{name} must have q's shape {tuple(q.shape)}, got {tuple(tensor.shape)}")
    rows = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    for name, tensor in (("lse", lse), *([("dlse", dlse)] if dlse is not None else [])):
        if tensor.shape != rows or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ArgumentError(f"{name} must be float32, contiguous and of shape {rows}, got {tuple(tensor.shape)}")
    require_legal(spec, config)
    gradients = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if q.numel() == 0 or k.numel() == 0:
        return (*(gradient.zero_() for gradient in gradients.values()), Counters())  # type: ignore[return-value]

    inputs = {"q": q, "k": k, "v": v, "o": o, "dout": do}
    plan = bwd_plan(
        spec,
        config,
        problem,
        strides={name: used_strides(tensor) for name, tensor in (*inputs.items(), *gradients.items())},
        softmax_scale=softmax_scale,
        section=_section(config, problem),
    )
    outputs = {name: tensor_buffer(name, gradient, output=True) for name, gradient in gradients.items()}
    floats = {"lse": lse, "dlse": dlse}
    counters = run_plan(
        spec,
        config,
        plan,
        [
            *(tensor_buffer(name, tensor) for name, tensor in inputs.items()),
            *(float_buffer(name, np.asarray(x.detach())) for name, x in floats.items() if x is not None),
            *(workspace_buffer(workspace.pointer, workspace.num_bytes) for workspace in plan.workspaces),
            *outputs.values(),
        ],
        seed=seed,
        random_schedule=random_schedule,
        checks=checks,
        timeout=timeout,
        threads=threads,
    )
    for name, gradient in gradients.items():
        copy_back(outputs[name], gradient)
    return gradients["dq"], gradients["dk"], gradients["dv"], counters


def _section(config: BwdConfig, problem: Problem) -> int:
    """Two thirds of the heads, so that there are two sections, the second smaller.

    The order of the blocks depends on it, results hardly do.
    """
    heads = problem.num_heads_q if config.split_heads else problem.num_heads_k
    return -(-2 * problem.batch * heads // 3)
