"""From a request to a function that launches the forward's kernel."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from fa2gen.codegen import param_struct
from fa2gen.driver.tensor_maps import map_packer
from fa2gen.errors import ArgumentError
from fa2gen.launch import Launch, LaunchPlan, fwd_plan
from fa2gen.spec import ForwardConfig, FwdSm90Config
from fa2gen.tensor_map import BYTES

from . import plan
from .plan import Addresses, Plan, RecordedPlan
from .request import Request

# Packed parameters and a raw stream handle.
_LaunchKernel = Callable[[bytes, int], None]
# Packs the addresses of q, k, v, output and LSE, and launches. Parameters are new for every call, so that threads may
# share a plan.
_Launcher = Callable[[int, int, int, int, int], None]


def build_plan(request: Request, config: ForwardConfig, *, return_lse: bool, repairs: Tensor | None = None) -> Plan:
    """A function that launches this request on tensors like the request's.

    Args:
        request: On a CUDA device, not empty, nothing to copy, softmax_scale at least 0.
        config: Legal for it.
        return_lse: Whether the LSE is computed and returned.
        repairs: One uint32-sized element that counts repaired steps of a guarded softmax.

    Raises:
        ArgumentError: ``repairs`` for a config whose softmax repairs nothing.
    """
    return build_plans(request, config, repairs)[return_lse]


def build_plans(
    request: Request, config: ForwardConfig, repairs: Tensor | None = None
) -> tuple[Plan, Plan, RecordedPlan]:
    """:func:`build_plan` without and with the LSE, and what autograd records."""
    index, p, head_dim = request.device.index, request.problem, request.spec.head_dim
    out_strides = (p.seqlen_q * p.num_heads_q * head_dim, p.num_heads_q * head_dim, head_dim, 1)
    kernel = plan.loaded_kernel(request.spec, config, index)
    gpu = plan.device_gpu(index)
    launch_plan = fwd_plan(
        request.spec,
        config,
        p,
        strides={**request.strides, "o": out_strides[:3]},
        softmax_scale=request.softmax_scale,
        l2_bytes=gpu.l2_bytes,
        num_sms=gpu.num_sms,
    )
    (launch,) = launch_plan.launches
    # Locals of a closure: the warm path looks nothing up in objects or modules. The launch itself sees to threads that
    # have no context yet and to devices that are not the current one.
    launch_kernel = kernel.launcher(launch.grid, (launch.num_threads, 1, 1))
    dtype = plan._torch_dtype(request.spec)
    out_shape, lse_shape = (p.batch, p.seqlen_q, p.num_heads_q, head_dim), (p.batch, p.num_heads_q, p.seqlen_q)
    lse_strides = (p.num_heads_q * p.seqlen_q, p.seqlen_q, 1)
    empty, float32 = plan._empty_function(request.device), torch.float32
    if repairs is not None and config.softmax == "online":
        raise ArgumentError(f"config {config.slug()} repairs nothing: its softmax is online")
    repairs_ptr = 0 if repairs is None else repairs.data_ptr()
    if isinstance(config, FwdSm90Config):
        run_kernel = _sm90_launcher(launch_plan, launch_kernel, index, repairs_ptr, empty)
    else:
        run_kernel = _sm80_launcher(launch, launch_kernel, index, repairs_ptr)

    def run(q_ptr: int, k_ptr: int, v_ptr: int) -> Tensor:
        out = empty(out_shape, out_strides, dtype)
        run_kernel(q_ptr, k_ptr, v_ptr, out.data_ptr(), 0)
        return out

    def record(q_ptr: int, k_ptr: int, v_ptr: int) -> tuple[Tensor, Tensor, Addresses]:
        out = empty(out_shape, out_strides, dtype)
        lse = empty(lse_shape, lse_strides, float32)
        out_ptr, lse_ptr = out.data_ptr(), lse.data_ptr()
        run_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr)
        return out, lse, (q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr)

    def run_with_lse(q_ptr: int, k_ptr: int, v_ptr: int) -> tuple[Tensor, Tensor]:
        out, lse, _ = record(q_ptr, k_ptr, v_ptr)
        return out, lse

    return run, run_with_lse, record


def _sm80_launcher(launch: Launch, launch_kernel: _LaunchKernel, index: int, repairs_ptr: int) -> _Launcher:
    pointers = param_struct(launch.kernel, "sm80").pointers
    pack_pointers, raw_stream = plan.pointer_packer(len(pointers)), plan._raw_stream_function()
    tail = launch.params[8 * len(pointers) :]

    def run_kernel(q_ptr: int, k_ptr: int, v_ptr: int, out_ptr: int, lse_ptr: int) -> None:
        # One concatenation costs 0.1 us.
        launch_kernel(pack_pointers(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, repairs_ptr) + tail, raw_stream(index))

    return run_kernel


def _sm90_launcher(
    launch_plan: LaunchPlan, launch_kernel: _LaunchKernel, index: int, repairs_ptr: int, empty: plan.Empty
) -> _Launcher:
    (launch,) = launch_plan.launches
    struct_of = param_struct(launch.kernel, "sm90")
    q_map, k_map, v_map, o_map = launch.tensor_maps
    q, k, v = (map_packer(each, index) for each in (q_map, k_map, v_map) if each is not None)
    o = _no_map if o_map is None else map_packer(o_map, index)
    pack_pointers = struct.Struct(f"{len(struct_of.pointers)}P").pack
    tail = launch.params[struct_of.pointers_at + 8 * len(struct_of.pointers) :]
    raw_stream, int64, join = plan._raw_stream_function(), torch.int64, b"".join  # a third less time than adding up

    def run_kernel(q_ptr: int, k_ptr: int, v_ptr: int, out_ptr: int, lse_ptr: int) -> None:
        params = join((q(q_ptr), k(k_ptr), v(v_ptr), o(out_ptr), pack_pointers(out_ptr, lse_ptr, 0, repairs_ptr), tail))
        launch_kernel(params, raw_stream(index))

    def run_with_tickets(q_ptr: int, k_ptr: int, v_ptr: int, out_ptr: int, lse_ptr: int) -> None:
        # A word of each call's own: launches of several streams must not share one. It is held until the kernel is
        # launched: from then on the allocator hands it only to what runs later on this stream. Given up before, it may
        # become part of another thread's output, whose kernel is launched first.
        tickets = empty((1,), (1,), int64)
        pointers = pack_pointers(out_ptr, lse_ptr, tickets.data_ptr(), repairs_ptr)
        launch_kernel(join((q(q_ptr), k(k_ptr), v(v_ptr), o(out_ptr), pointers, tail)), raw_stream(index))

    return run_with_tickets if launch_plan.workspaces else run_kernel


def _no_map(address: int) -> bytes:
    return _NO_MAP


_NO_MAP = bytes(BYTES)
