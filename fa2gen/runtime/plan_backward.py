"""From a request for gradients to a function that launches their kernels in a row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fa2gen.codegen import PARAMS
from fa2gen.driver import row_launcher
from fa2gen.launch import LaunchPlan, bwd_plan
from fa2gen.spec import BwdConfig

from . import plan
from .plan import BackwardPlan
from .request import Request

# Pointers lead each kernel's parameters.
_PACKERS = {
    name: plan.pointer_packer(len(PARAMS[name].pointers)) for name in ("bwd_preprocess", "bwd", "bwd_postprocess")
}

_Strides = tuple[int, int, int]
_Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def build_backward_plan(request: Request, config: BwdConfig, *, poisoned: bool = False) -> BackwardPlan:
    """A function that launches the gradients of this request on tensors like the request's.

    Args:
        request: For gradients, with the strides of q, k, v, o and dout; on a CUDA device, not empty, nothing to copy,
            softmax_scale at least 0. lse, and dlse where it is given, are contiguous.
        config: Legal for it.
        poisoned: Fill gradients and workspaces with NaN first, so that what no kernel writes shows.
    """
    index, p, head_dim = request.device.index, request.problem, request.spec.head_dim
    q_shape, k_shape = (
        (p.batch, p.seqlen_q, p.num_heads_q, head_dim),
        (p.batch, p.seqlen_k, p.num_heads_k, head_dim),
    )
    q_strides, k_strides = contiguous_strides(q_shape), contiguous_strides(k_shape)
    launch_plan = plan_launches(request, config, q_strides[:3], k_strides[:3], plan.device_gpu(index).l2_bytes)
    names = tuple(launch.kernel for launch in launch_plan.launches)
    kernels = plan.loaded_kernels(request.spec, config, index, names)
    # All workspaces are parts of one allocation; each part's size is a multiple of 256 bytes.
    ends = list(itertools.accumulate(workspace.num_bytes for workspace in launch_plan.workspaces))
    offsets = dict(zip((workspace.pointer for workspace in launch_plan.workspaces), (0, *ends), strict=False))
    lse_log2_at, delta_at, dq_accum_at = offsets["lse_log2"], offsets["delta"], offsets["dq_accum"]
    dk_accum_at, dv_accum_at, semaphores_at = (offsets.get(name, 0) for name in ("dk_accum", "dv_accum", "semaphores"))
    has_accum, has_semaphores = "dk_accum" in offsets, "semaphores" in offsets
    # Locals of a closure, as in the forward's plan.
    launch = row_launcher(
        *((kernels[step.kernel], step.grid, (step.num_threads, 1, 1)) for step in launch_plan.launches)
    )
    pack_preprocess, pack_main, pack_postprocess = (_PACKERS[name] for name in names)
    preprocess_tail, main_tail, postprocess_tail = (
        step.params[8 * len(PARAMS[step.kernel].pointers) :] for step in launch_plan.launches
    )
    dtype, uint8, size, stride = plan._torch_dtype(request.spec), torch.uint8, (ends[-1],), (1,)
    empty, raw_stream = plan._empty_function(request.device), plan._raw_stream_function()
    empty = _poisoned(empty) if poisoned else empty

    # Written out, pointer by pointer: packing by lists of names took twice the time, 2 us of a step.
    def run(q: int, k: int, v: int, out: int, lse: int, dout: int, dlse: int) -> tuple[Tensor, Tensor, Tensor]:
        dq_tensor = empty(q_shape, q_strides, dtype)
        dk_tensor = empty(k_shape, k_strides, dtype)
        dv_tensor = empty(k_shape, k_strides, dtype)
        # Freed when this returns: torch's allocator hands it to later work of this stream only.
        workspace = empty(size, stride, uint8)
        start = workspace.data_ptr()
        lse_log2, delta, dq_accum = start + lse_log2_at, start + delta_at, start + dq_accum_at
        dk_accum, dv_accum = (start + dk_accum_at, start + dv_accum_at) if has_accum else (0, 0)
        semaphores = start + semaphores_at if has_semaphores else 0
        dq, dk, dv = dq_tensor.data_ptr(), dk_tensor.data_ptr(), dv_tensor.data_ptr()
        launch(
            pack_preprocess(out, dout, lse, dlse, lse_log2, delta, dq_accum, dk_accum, dv_accum, semaphores)
            + preprocess_tail,
            pack_main(q, k, v, dout, dk, dv, lse_log2, delta, dq_accum, dk_accum, dv_accum, semaphores) + main_tail,
            pack_postprocess(dq_accum, dk_accum, dv_accum, dq, dk, dv) + postprocess_tail,
            raw_stream(index),
        )
        return dq_tensor, dk_tensor, dv_tensor

    return run


def plan_launches(
    request: Request, config: BwdConfig, q_strides: _Strides, k_strides: _Strides, l2_bytes: int
) -> LaunchPlan:
    """The launches for a request's gradients, whose strides (batch, row, head) are given for dq and for dk and dv."""
    return bwd_plan(
        request.spec,
        config,
        request.problem,
        strides={**request.strides, "dq": q_strides, "dk": k_strides, "dv": k_strides},
        softmax_scale=request.softmax_scale,
        l2_bytes=l2_bytes,
    )


def contiguous_strides(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Strides of a new tensor."""
    _, rows, heads, head_dim = shape
    return (rows * heads * head_dim, heads * head_dim, head_dim, 1)


def _poisoned(empty: _Empty) -> _Empty:
    # Bytes of ones are NaN in every floating-point type.
    return lambda shape, strides, dtype: empty(shape, strides, dtype).fill_(255 if dtype == torch.uint8 else math.nan)
