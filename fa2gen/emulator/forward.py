"""The forward kernel on CPU tensors, through the emulator."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ..codegen import render_kernel
from ..constraints import infeasible_reason
from ..errors import ArgumentError, InfeasibleError
from ..hardware import arch_limits
from ..launch import POINTERS, fwd_plan
from ..problem import Problem
from ..spec import FwdConfig, KernelSpec
from .builder import build
from .runner import Buffer, Counters, run

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The limits of the chip that grants a block most; a kernel that breaks a rule of its family would be reported for what
# follows, such as a race.
_LARGEST = arch_limits((9, 0))


def run_forward(
    spec: KernelSpec,
    config: FwdConfig,
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
        seed, random_schedule, checks, timeout, threads: See :func:`~fa2gen.emulator.run`.

    Returns:
        ``out``, the LSE (batch, num_heads_q, seqlen_q) in float32, and the counters.

    Raises:
        ArgumentError: A tensor does not fit the spec.
        InfeasibleError: The config is legal for the spec on no GPU; the message is the reason.
        EmulatorError: The kernel broke a rule, crashed or did not end.
    """
    problem = _problem(spec, q, k, v)
    if (reason := infeasible_reason(spec, config, _LARGEST)) is not None:
        raise InfeasibleError(f"config {config.slug()} cannot run {spec.slug()}: {reason}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    elif out.shape != q.shape or out.dtype != q.dtype or out.device.type != "cpu" or out.stride(-1) != 1:
        raise ArgumentError("out must have q's shape and dtype, be on the CPU and contiguous in its last dimension")
    lse = np.full((problem.batch, problem.num_heads_q, problem.seqlen_q), np.nan, np.float32)
    if out.numel() == 0:
        return out, torch.from_numpy(lse), Counters()

    kernel = build(render_kernel(spec, config, "host"))
    # (batch, row, head): the order of a (batch, seqlen, heads, head_dim) tensor's own strides.
    strides = {name: _used_strides(t) for name, t in (("q", q), ("k", k), ("v", v), ("o", out))}
    plan = fwd_plan(
        spec, config, problem, strides=strides, softmax_scale=softmax_scale, l2_bytes=_l2_bytes(spec, problem)
    )
    output = _tensor_buffer("o", out, output=True)
    repairs = np.zeros(1, np.uint32)
    buffers = [
        *(_tensor_buffer(name, t) for name, t in (("q", q), ("k", k), ("v", v))),
        output,
        Buffer("softmax_lse", lse.reshape(-1).view(np.uint8), POINTERS.index("softmax_lse"), output=True),
        Buffer("repairs", repairs.view(np.uint8), POINTERS.index("repairs")),
    ]
    counters = Counters()
    for launch in plan.launches:
        counters = run(
            kernel,
            launch,
            buffers,
            seed=seed,
            random_schedule=random_schedule,
            checks=checks,
            timeout=timeout,
            threads=threads,
        )
    _bits(out)[...] = _strided(output.data, output.start, out)
    return out, torch.from_numpy(lse), dataclasses.replace(counters, repairs=int(repairs[0]))


def _problem(spec: KernelSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != _DTYPES[spec.dtype] or tensor.device.type != "cpu":
            raise ArgumentError(f"{name} must be a CPU tensor of {spec.dtype}, got {tensor.dtype} on {tensor.device}")
        if tensor.dim() != 4 or tensor.shape[-1] != spec.head_dim:
            raise ArgumentError(f"{name} must be (batch, seqlen, heads, {spec.head_dim}), got {tuple(tensor.shape)}")
        if tensor.stride(-1) != 1 and tensor.numel() > 0 and spec.head_dim > 1:
            raise ArgumentError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    if k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise ArgumentError(f"k and v must have one shape and q's batch: {tuple(k.shape)}, {tuple(v.shape)}")
    return Problem(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def _l2_bytes(spec: KernelSpec, problem: Problem) -> int:
    """An L2 whose half holds K and V of two thirds of the heads, so that there are two sections, the second smaller.

    The order of the blocks depends on it, results do not.
    """
    heads = -(-2 * problem.batch * problem.num_heads_k // 3)
    return 2 * heads * 4 * max(1, problem.seqlen_k) * spec.head_dim


def _used_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head); 0 for an axis of one element, whose stride is arbitrary and may be odd."""
    batch, row, head = (s if n > 1 else 0 for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True))
    return batch, row, head


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(torch.int16).numpy().view(np.uint16)


def _strided(data: np.ndarray, start: int, tensor: torch.Tensor, per_element: int = 2) -> np.ndarray:
    """The tensor's elements in flat memory that starts at byte `start`: per_element bytes each."""
    flat = data[start:].view(np.uint16) if per_element == 2 else data[start:]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [per_element * s for s in tensor.stride()])


def _tensor_buffer(name: str, tensor: torch.Tensor, output: bool = False) -> Buffer:
    """A buffer that holds the tensor at its own alignment and strides; only its elements are in view."""
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    start = tensor.data_ptr() % 256
    data = np.full(start + 2 * elements, 0xFF, np.uint8)
    in_view = np.zeros(data.size // 2, np.bool_)
    if elements:
        _strided(in_view, start // 2, tensor, per_element=1)[...] = True
        if not output:
            _strided(data, start, tensor)[...] = _bits(tensor)
    data.flags.writeable = output
    return Buffer(name, data, POINTERS.index(name), start=start, readable=in_view, output=output)
