"""From a request for gradients to a function that launches their kernels in a row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from fa2gen.codegen import PARAMS
from fa2gen.driver import row_launcher
from fa2gen.launch import LaunchPlan, bwd_plan
from fa2gen.spec import BwdConfig

from . import plan
from .plan import BackwardPlan
from .request import Request

# Addresses in the order of a plan's arguments and results, then one that is null.
_TENSORS = ("q", "k", "v", "o", "lse", "dout", "dlse", "dq", "dk", "dv", "null")

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
    pack = _packer(launch_plan, (0, *ends[:-1]))
    # Locals of a closure, as in the forward's plan.
    launch = row_launcher(
        *((kernels[step.kernel], step.grid, (step.num_threads, 1, 1)) for step in launch_plan.launches)
    )
    dtype, uint8, size, stride = plan._torch_dtype(request.spec), torch.uint8, (ends[-1],), (1,)
    empty, raw_stream, packed = plan._empty_function(request.device), plan._raw_stream_function(), plan.PARAMETERS
    empty = _poisoned(empty) if poisoned else empty

    def run(
        q_ptr: int, k_ptr: int, v_ptr: int, o_ptr: int, lse_ptr: int, dout_ptr: int, dlse_ptr: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = empty(q_shape, q_strides, dtype)
        dk = empty(k_shape, k_strides, dtype)
        dv = empty(k_shape, k_strides, dtype)
        # Freed when this returns: torch's allocator hands it to later work of this stream only.
        workspace = empty(size, stride, uint8)
        addresses = (
            q_ptr,
            k_ptr,
            v_ptr,
            o_ptr,
            lse_ptr,
            dout_ptr,
            dlse_ptr,
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            workspace.data_ptr(),
        )
        # Torch's allocator hands out the same blocks step after step. Packing anew takes 3 us in a step.
        params = packed.get((launch, addresses))
        if params is None:
            params = pack(*addresses)
            plan.remember(packed, (launch, addresses), params)
        launch(params, raw_stream(index))
        return dq, dk, dv

    return run


def _packer(launch_plan: LaunchPlan, offsets: tuple[int, ...]) -> Callable[..., tuple[bytes, ...]]:
    """A function from a call's addresses to the parameters of each launch.

    Args:
        launch_plan: Its launches have null pointers. Those that are neither a tensor's nor a workspace's stay null.
        offsets: Of its workspaces, in bytes.
    """
    names = _TENSORS + tuple(workspace.pointer for workspace in launch_plan.workspaces)
    steps = []
    for launch in launch_plan.launches:
        pointers = PARAMS[launch.kernel].pointers
        picked = itemgetter(*(names.index(name if name in names else "null") for name in pointers))
        steps.append((plan.pointer_packer(len(pointers)), picked, launch.params[8 * len(pointers) :]))

    def pack(*addresses: int) -> tuple[bytes, ...]:
        *tensors, start = addresses
        values = (*tensors, 0, *(start + offset for offset in offsets))
        return tuple(pack_pointers(*picked(values)) + tail for pack_pointers, picked, tail in steps)

    return pack


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
