"""The forward kernel on CPU tensors, through the emulator."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ..errors import ArgumentError
from ..launch import L2_PARTS, fwd_plan
from ..problem import Problem
from ..spec import ForwardConfig, KernelSpec
from .launches import run_plan
from .runner import Buffer, Counters
from .tensors import (
    copy_back,
    float_buffer,
    problem_of,
    require_legal,
    tensor_buffer,
    used_strides,
    workspace_buffer,
)


def run_forward(
    spec: KernelSpec,
    config: ForwardConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    out: torch.Tensor | None = None,
    seed: int = 1,
    random_schedule: bool = True,
    checks: bool = True,
    timeout: float = 120.0,
    threads: int | None = None,
    num_sms: int = 3,
) -> tuple[torch.Tensor, torch.Tensor, Counters]:
    """Renders, builds and runs the forward kernel on the CPU, with every access checked.

    The kernel sees each tensor at its own alignment and with its own strides. What lies between the tensor's rows is
    NaN and may not be touched, nor may anything around the tensor.

    Args:
        spec, config: The kernel.
        q: (batch, seqlen_q, num_heads_q, head_dim) on the CPU, of the spec's dtype; the last dimension is contiguous,
            the other strides are free.
        k, v: (batch, seqlen_k, num_heads_k, head_dim), likewise.
        softmax_scale: At least 0.
        out: Where to write the output, shaped like q; default: a new contiguous tensor.
        num_sms: Blocks that walk over all tiles, where the kernel's do.
        seed, random_schedule, checks, timeout, threads: See :func:`~fa2gen.emulator.run`.

    Returns:
        ``out``, the LSE (batch, num_heads_q, seqlen_q) in float32, and the counters.

    Raises:
        ArgumentError: A tensor does not fit the spec.
        InfeasibleError: The config is legal for the spec on no GPU; the message is the reason.
        EmulatorError: The kernel broke a rule, crashed or did not end.
    """
    problem = problem_of(spec, q, k, v)
    require_legal(spec, config)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    elif out.shape != q.shape or out.dtype != q.dtype or out.device.type != "cpu" or out.stride(-1) != 1:
        raise ArgumentError("out must have q's shape and dtype, be on the CPU and contiguous in its last dimension")
    lse = np.full((problem.batch, problem.num_heads_q, problem.seqlen_q), np.nan, np.float32)
    if out.numel() == 0:
        return out, torch.from_numpy(lse), Counters()

    inputs = {"q": q, "k": k, "v": v}
    # (batch, row, head): the order of a (batch, seqlen, heads, head_dim) tensor's own strides.
    strides = {name: used_strides(tensor) for name, tensor in (*inputs.items(), ("o", out))}
    plan = fwd_plan(
        spec,
        config,
        problem,
        strides=strides,
        softmax_scale=softmax_scale,
        l2_bytes=_l2_bytes(spec, config, problem),
        num_sms=num_sms,
    )
    output = tensor_buffer("o", out, output=True)
    repairs = np.zeros(1, np.uint32)
    counters = run_plan(
        spec,
        config,
        plan,
        [
            *(tensor_buffer(name, tensor) for name, tensor in inputs.items()),
            output,
            float_buffer("softmax_lse", lse, output=True),
            Buffer("repairs", repairs.view(np.uint8)),
            *(workspace_buffer(workspace.pointer, workspace.num_bytes) for workspace in plan.workspaces),
        ],
        seed=seed,
        random_schedule=random_schedule,
        checks=checks,
        timeout=timeout,
        threads=threads,
    )
    copy_back(output, out)
    return out, torch.from_numpy(lse), dataclasses.replace(counters, repairs=int(repairs[0]))


def _l2_bytes(spec: KernelSpec, config: ForwardConfig, problem: Problem) -> int:
    """An L2 in which two thirds of the heads are a section, so that there are two, the second smaller.

    The order of the blocks depends on it, results do not.
    """
    heads = -(-2 * problem.batch * problem.num_heads_k // 3)
    return L2_PARTS[config.family] * heads * 4 * max(1, problem.seqlen_k) * spec.head_dim
