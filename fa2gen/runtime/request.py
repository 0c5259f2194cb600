"""What a call asks for: its arguments checked, and put in the terms of kernels."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.problem import Problem
from fa2gen.spec import FAMILIES, NATIVE_HEAD_DIMS, BwdConfig, ForwardConfig, KernelSpec

from .copies import copy_reasons, is_aligned, padded_head_dim, used_strides

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
BACKENDS = ("auto", "cuda", "emulator", "reference")

Strides = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Request:
    """A call whose arguments are legal.

    Attributes:
        spec: The kernel that it needs, after copies. An empty problem has one too, though nothing is launched for it.
        problem: Its sizes.
        head_dim: The caller's; the kernel's is a multiple of 8.
        softmax_scale: Finite, any sign; where the caller gave none, that of ``head_dim``.
        backend: ``"cuda"``, ``"emulator"`` or ``"reference"``.
        device: Of all three tensors.
        copied: Tensors that have to be copied, by name, and why.
        strides: Element strides (batch, row, head) of q, k, v (and of a backward o and do) as given; 0 where an extent
            is 1.
        unaligned: Which of q, k and v are read in place and begin, or have a stride, between multiples of 16 bytes.
    """

    spec: KernelSpec
    problem: Problem
    head_dim: int
    softmax_scale: float
    backend: str
    device: torch.device
    copied: dict[str, str]
    strides: Strides
    unaligned: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """The result needs no kernel: it has no elements, or there are no keys."""
        p = self.problem
        return 0 in (p.batch, p.seqlen_q, p.num_heads_q, p.seqlen_k)


def backward_request(request: Request, tensors: Mapping[str, Tensor], *, deterministic: bool) -> Request:
    """The request for a call's gradients.

    Args:
        request: For the call.
        tensors: Its q, k and v, and where they are there o and do.
        deterministic: Whether equal inputs must give equal bits.
    """
    spec = dataclasses.replace(request.spec, kind="bwd", alignment=16, deterministic=deterministic)
    strides = {name: used_strides(x) for name, x in tensors.items()}
    return dataclasses.replace(request, spec=spec, copied=copy_reasons(tensors), strides=strides)


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
    causal = read_flag("causal", causal)
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    _, seqlen_k, num_heads_k, _ = k.shape
    problem = _problem(batch, seqlen_q, seqlen_k, num_heads_q, num_heads_k)
    if head_dim == 0:
        raise ArgumentError(f"q, k and v have head_dim 0; 1 to {NATIVE_HEAD_DIMS[-1]} are supported")
    # Any head dim that is supported is legal element by element, so that an error names the caller's.
    asked = KernelSpec(
        head_dim=head_dim,
        dtype=DTYPE_NAMES[q.dtype],
        causal=causal,
        gqa_ratio=max(1, problem.gqa_ratio),
        alignment=2,
    )
    scale = _scale(softmax_scale, head_dim)
    copied, strides = copy_reasons(tensors, problem), {name: used_strides(x) for name, x in tensors.items()}
    # A copy (q is copied to be negated for a negative scale) lies in new, aligned memory.
    replaced = {*copied, "q"} if scale < 0 else copied
    unaligned = tuple(name for name, x in tensors.items() if name not in replaced and not is_aligned(x))
    spec = dataclasses.replace(asked, head_dim=padded_head_dim(head_dim), alignment=2 if unaligned else 16)
    return Request(spec, problem, head_dim, scale, _backend(backend, q.device), q.device, copied, strides, unaligned)


def _check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        form = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise ArgumentError(f"{name} must be a dense (strided) tensor, got {form}")
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


def read_deterministic(value: Any) -> bool | None:
    """None, True or False.

    Raises:
        ArgumentError: It is anything else.
    """
    return None if value is None else read_flag("deterministic", value)


def read_flag(name: str, value: Any) -> bool:
    """True or False, also where it is spelt 1, 0 or ``numpy.True_``.

    Raises:
        ArgumentError: It is anything else.
    """
    try:
        if value in (True, False):
            return bool(value)
    except (RuntimeError, TypeError, ValueError):  # arrays and tensors of several elements have no truth value
        pass
    raise ArgumentError(f"{name} must be True or False, got {value!r}")


def _scale(softmax_scale: Any, head_dim: int) -> float:
    if softmax_scale is None:
        return 1.0 / math.sqrt(head_dim)
    require_number(softmax_scale)
    try:
        scale = float(softmax_scale)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise ArgumentError(f"softmax_scale must be finite, got {scale}")
    return scale


def require_number(softmax_scale: Any) -> None:
    """Raise unless ``softmax_scale`` is a real number, a symbolic one of a traced program included."""
    if not isinstance(softmax_scale, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise ArgumentError(f"softmax_scale must be a number or None, got {type(softmax_scale).__name__}")


def _backend(backend: str, device: torch.device) -> str:
    if not isinstance(backend, str) or backend not in BACKENDS:
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


def require_config(backend: str, config: ForwardConfig | None, backward_config: BwdConfig | None = None) -> None:
    """Raise unless the configs are such that the backend has a use for, or None."""
    for name, given, kind in (("config", config, "fwd"), ("backward_config", backward_config, "bwd")):
        if given is None:
            continue
        kinds = tuple(FAMILIES[kind].values())
        if not isinstance(given, kinds):
            names = ", a ".join(f"fa2gen.{each.__name__}" for each in kinds)
            raise ArgumentError(f"{name} must be a {names} or None, got {type(given).__name__}")
        if backend == "reference":
            raise ArgumentError(f"{name} has no meaning for the reference backend; give backend='cuda' or 'emulator'")


def require_no_tangents(tensors: Mapping[str, Tensor]) -> None:
    """Raise where forward-mode differentiation would have to see through the call.

    Raises:
        UnsupportedError: A tensor carries a tangent.
    """
    for name, x in tensors.items():
        if forward_ad._current_level >= 0 and _has_tangent(x):
            raise UnsupportedError(
                f"{name} carries a forward-mode tangent, but attention has no forward-mode derivative; use backward()"
            )


def _has_tangent(x: Tensor) -> bool:
    try:
        return forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:  # wrapped by vmap: nobody can say
        return True
