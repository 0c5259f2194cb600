"""What a call asks for: its arguments checked, and put in the terms of kernels."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
BACKENDS = ("auto", "cuda", "emulator", "reference")

Strides = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Request:
    """A call whose arguments are legal.

    Attributes:
        spec: The kernel that it needs, after copies. An empty problem has one too, though nothing is launched for it.
        problem: Its sizes.
        softmax_scale: Finite, any sign.
        backend: ``"cuda"``, ``"emulator"`` or ``"reference"``.
        device: Of all three tensors.
        copied: Names of the tensors that have to be copied because their last dimension is not contiguous.
        strides: Element strides (batch, row, head) of q, k, v as given and of the new output; 0 where an extent is 1.
    """

    spec: KernelSpec
    problem: Problem
    softmax_scale: float
    backend: str
    device: torch.device
    copied: tuple[str, ...]
    strides: Strides

    @property
    def is_empty(self) -> bool:
        """The result needs no kernel: it has no elements, or there are no keys."""
        p = self.problem
        return 0 in (p.batch, p.seqlen_q, p.num_heads_q, p.seqlen_k)


def read_request(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None, backend: str
) -> Request:
    """Check the arguments of a call.

    Raises:
        ArgumentError: An argument is not legal; the message names it and says what is.
        UnsupportedError: A legal request that no kernel of this version can serve.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        _check_tensor(name, x)
    _check_alike(tensors)
    if causal not in (True, False):
        raise ArgumentError(f"causal must be True or False, got {causal!r}")
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    _, seqlen_k, num_heads_k, _ = k.shape
    problem = _problem(batch, seqlen_q, seqlen_k, num_heads_q, num_heads_k)
    copied = tuple(name for name, x in tensors.items() if _needs_copy(x))
    strides = {name: _strides(x) for name, x in tensors.items()}
    strides["o"] = (seqlen_q * num_heads_q * head_dim, num_heads_q * head_dim, head_dim)
    if head_dim == 0:
        raise ArgumentError("q, k and v have head_dim 0; 1 to 128 are supported")
    scale = _scale(softmax_scale, head_dim)
    # A copy (q is copied to be negated for a negative scale) lies in new, aligned memory.
    replaced = (*copied, "q") if scale < 0 else copied
    vectors = head_dim % 8 == 0 and all(
        name in replaced or _is_aligned(x, strides[name]) for name, x in tensors.items()
    )
    spec = KernelSpec(
        head_dim=head_dim,
        dtype=DTYPE_NAMES[q.dtype],
        causal=bool(causal),
        gqa_ratio=max(1, problem.gqa_ratio),
        alignment=16 if vectors else 2,
    )
    return Request(spec, problem, scale, _backend(backend, q.device), q.device, copied, strides)


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise ArgumentError(f"{name} must be a dense (strided) tensor, got layout {x.layout}")
    if x.dim() != 4:
        raise ArgumentError(f"{name} must be (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}")
    if x.dtype not in DTYPE_NAMES:
        raise ArgumentError(f"{name} has dtype {x.dtype}; torch.float16 and torch.bfloat16 are supported")


def _check_alike(tensors: dict[str, Tensor]) -> None:
    q = tensors["q"]
    for name in ("k", "v"):
        x = tensors[name]
        if x.dtype != q.dtype:
            raise ArgumentError(f"{name} has dtype {x.dtype} and q {q.dtype}; all three must be the same")
        if x.device != q.device:
            raise ArgumentError(
                f"{name} is on device {x.device} and q on {q.device}; all three must be on the same one"
            )
        if x.shape[0] != q.shape[0]:
            raise ArgumentError(f"{name} has batch {x.shape[0]} and q {q.shape[0]}; they must be equal")
        if x.shape[3] != q.shape[3]:
            raise ArgumentError(f"{name} has head_dim {x.shape[3]} and q {q.shape[3]}; they must be equal")
    k, v = tensors["k"], tensors["v"]
    if k.shape != v.shape:
        raise ArgumentError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they must be equal")


def _problem(batch: int, seqlen_q: int, seqlen_k: int, num_heads_q: int, num_heads_k: int) -> Problem:
    if num_heads_q and (num_heads_k == 0 or num_heads_q % num_heads_k):
        raise ArgumentError(
            f"q has {num_heads_q} heads and k and v have {num_heads_k}; the first must be a multiple of the second"
        )
    return Problem(int(batch), int(seqlen_q), int(seqlen_k), int(num_heads_q), int(num_heads_k))


def _scale(softmax_scale: Any, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not isinstance(softmax_scale, numbers.Real):
        raise ArgumentError(f"softmax_scale must be a number or None, got {type(softmax_scale).__name__}")
    if not math.isfinite(softmax_scale):
        raise ArgumentError(f"softmax_scale must be finite, got {softmax_scale}")
    return float(softmax_scale)


def _backend(backend: str, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise ArgumentError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if device.type not in ("cuda", "cpu"):
        raise ArgumentError(f"q, k and v are on device {device}; cuda and cpu are supported")
    if backend == "auto":
        return "cuda" if device.type == "cuda" else "reference"
    if backend == "cuda" and device.type != "cuda":
        raise ArgumentError(f"backend cuda needs CUDA tensors, but q, k and v are on {device}")
    if backend == "emulator" and device.type != "cpu":
        raise ArgumentError(f"backend emulator needs CPU tensors, but q, k and v are on {device}")
    return backend


def _needs_copy(x: Tensor) -> bool:
    # A pending negation (the imaginary part of a conjugate) goes with the copy: such views have a last stride of 2.
    return x.shape[3] > 1 and x.stride(3) != 1


def _strides(x: Tensor) -> tuple[int, int, int]:
    # The stride of an axis of one element is arbitrary and never used: it must not decide which kernel runs.
    batch, row, head = (stride if extent > 1 else 0 for extent, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    return batch, row, head


def _is_aligned(x: Tensor, strides: tuple[int, int, int]) -> bool:
    return x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)


def refuse_gradients(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise where autograd would have to differentiate the call.

    Raises:
        UnsupportedError: Grad mode is on and an input requires grad.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad, but this version has no backward: call under torch.no_grad() or detach it"
            )
