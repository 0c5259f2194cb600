"""CPU tensors as the memory of an emulated launch: each at its own alignment and with its own strides."""

from __future__ import annotations

import numpy as np
import torch

from ..constraints import infeasible_reason
from ..errors import ArgumentError, InfeasibleError
from ..hardware import arch_limits
from ..problem import Problem
from ..spec import Config, KernelSpec
from .runner import Buffer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The limits of the chip that grants a block most; a kernel that breaks a rule of its family would be reported for what
# follows, such as a race.
_LARGEST = arch_limits((9, 0))


def require_legal(spec: KernelSpec, config: Config) -> None:
    """Raises InfeasibleError with the reason if the config is legal for the spec on no GPU."""
    if (reason := infeasible_reason(spec, config, _LARGEST)) is not None:
        raise InfeasibleError(f"config {config.slug()} cannot run {spec.slug()}: {reason}")


def problem_of(spec: KernelSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
    """The sizes of a call.

    Raises:
        ArgumentError: A tensor does not fit the spec or the others.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(spec, name, tensor)
    if k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise ArgumentError(f"k and v must have one shape and q's batch: {tuple(k.shape)}, {tuple(v.shape)}")
    return Problem(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def require_tensor(spec: KernelSpec, name: str, tensor: torch.Tensor) -> None:
    """Raises ArgumentError unless a kernel of the spec can take the tensor."""
    if tensor.dtype != _DTYPES[spec.dtype] or tensor.device.type != "cpu":
        raise ArgumentError(f"{name} must be a CPU tensor of {spec.dtype}, got {tensor.dtype} on {tensor.device}")
    if tensor.dim() != 4 or tensor.shape[-1] != spec.head_dim:
        raise ArgumentError(f"{name} must be (batch, seqlen, heads, {spec.head_dim}), got {tuple(tensor.shape)}")
    if tensor.stride(-1) != 1 and tensor.numel() > 0 and spec.head_dim > 1:
        raise ArgumentError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def used_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head); 0 for an axis of one element, whose stride is arbitrary and may be odd."""
    batch, row, head = (s if n > 1 else 0 for n, s in zip(tensor.shape[:3], tensor.stride()[:3], strict=True))
    return batch, row, head


def tensor_buffer(name: str, tensor: torch.Tensor, output: bool = False) -> Buffer:
    """A buffer that holds a 16-bit tensor at its own alignment and strides; only its elements are in view."""
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    start = tensor.data_ptr() % 256
    data = np.full(start + 2 * elements, 0xFF, np.uint8)
    in_view = np.zeros(data.size // 2, np.bool_)
    if elements:
        _strided(in_view, start // 2, tensor, per_element=1)[...] = True
        if not output:
            _strided(data, start, tensor)[...] = _bits(tensor)
    data.flags.writeable = output
    return Buffer(name, data, start=start, readable=in_view, output=output)


def float_buffer(name: str, values: np.ndarray, output: bool = False) -> Buffer:
    """A buffer over a contiguous float32 array; an output is written into it."""
    data = values.reshape(-1).view(np.uint8)
    data.flags.writeable = output
    return Buffer(name, data, output=output)


def workspace_buffer(name: str, num_bytes: int) -> Buffer:
    """Scratch memory that starts without values and is NaN to those who read it all the same."""
    return Buffer(name, np.full(num_bytes, 0xFF, np.uint8), initialised=np.zeros(num_bytes // 2, np.bool_))


def copy_back(buffer: Buffer, tensor: torch.Tensor) -> None:
    """Copies what a launch wrote into the tensor that :func:`tensor_buffer` was made from."""
    if tensor.numel():
        _bits(tensor)[...] = _strided(buffer.data, buffer.start, tensor)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(torch.int16).numpy().view(np.uint16)


def _strided(data: np.ndarray, start: int, tensor: torch.Tensor, per_element: int = 2) -> np.ndarray:
    """The tensor's elements in flat memory that starts at byte `start`: per_element bytes each."""
    flat = data[start:].view(np.uint16) if per_element == 2 else data[start:]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [per_element * s for s in tensor.stride()])
