"""From a request to a function that launches it: config, loaded kernel, launch plan. Everything here is remembered."""

from __future__ import annotations

import struct
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa2gen.codegen import template_hash
from fa2gen.compile import CompiledKernel, compile_kernel, default_cache, kernel_source
from fa2gen.compile.cache import cache_key
from fa2gen.compile.nvcc import key_flags
from fa2gen.constraints import infeasible_reason
from fa2gen.driver import LoadedKernel, device_info, load
from fa2gen.errors import InfeasibleError, LaunchError
from fa2gen.hardware import Gpu, match_device
from fa2gen.launch import POINTERS, fwd_plan
from fa2gen.problem import Bucket
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import Match, lookup

from .request import Request

# (addresses of q, k, v) -> output, or (output, LSE).
Plan = Callable[[int, int, int], Any]

# Calls seen before, by everything that decides what is launched. Lengths vary freely in serving, so it is emptied at a
# cap: refilling an entry takes tens of microseconds.
PLANS: dict[tuple[Any, ...], Plan] = {}
MAX_PLANS = 4096

_gpus: dict[int, Gpu] = {}
# GPUs whose stale tables a warning has named.
_warned: set[str] = set()
_matches: dict[tuple[KernelSpec, Bucket, int], Match] = {}
_kernels: dict[tuple[KernelSpec, FwdConfig, int], LoadedKernel] = {}
_build_lock = threading.RLock()

_pack_pointers = struct.Struct(f"<{len(POINTERS)}Q").pack
_POINTER_BYTES = 8 * len(POINTERS)


def reset() -> None:
    """Forget plans, table look-ups and loaded kernels: after tuning in this process, or to free device memory."""
    for remembered in (PLANS, _matches, _kernels):
        remembered.clear()
    _warned.clear()


def remember(key: tuple[Any, ...], plan: Plan) -> None:
    """Make ``plan`` the answer to calls with this key."""
    if len(PLANS) >= MAX_PLANS:
        PLANS.clear()
    PLANS[key] = plan


def device_gpu(device_index: int) -> Gpu:
    """The GPU with this index of torch, as the tables know it."""
    gpu = _gpus.get(device_index)
    if gpu is None:
        info = device_info(device_index)
        gpu = match_device(info.name, info.compute_capability, info.num_sms, info.l2_bytes)
        _gpus[device_index] = gpu
    return gpu


def match_config(request: Request, device_index: int, config: FwdConfig | None) -> Match:
    """The config to run: the caller's if given, else what the tables say.

    Raises:
        InfeasibleError: The caller's config breaks a limit of this GPU; the message is the reason.
        TableError: ``FA2GEN_STRICT`` is set and no entry is exact.
    """
    gpu = device_gpu(device_index)
    if config is not None:
        require_feasible(request.spec, config, gpu)
        return Match(config, "forced by the caller", 0.0, False, None)
    key = (request.spec, request.problem.bucket(gpu.num_sms), device_index)
    match = _matches.get(key)
    if match is None:
        match = lookup(request.spec, key[1], gpu, template_hash=template_hash)
        _matches[key] = match
        if match.stale and match.entry is None and gpu.name not in _warned:
            _warned.add(gpu.name)
            warnings.warn(
                f"the tuned entries for {gpu.name} are stale (the kernel templates have changed since) and passed "
                f"over: {request.spec.slug()} runs its default config. To use them again: fa2gen table check "
                f"--gpu {gpu.name} --regate",
                RuntimeWarning,
                stacklevel=2,
            )
    return match


def require_feasible(spec: KernelSpec, config: FwdConfig, gpu: Gpu) -> None:
    """Raise unless ``config`` is a legal config for ``spec`` on ``gpu``."""
    reason = infeasible_reason(spec, config, gpu.arch)
    if reason is not None:
        raise InfeasibleError(f"config {config.slug()} cannot run {spec.slug()} on {gpu.name}: {reason}")


def kernel_state(spec: KernelSpec, config: FwdConfig, device_index: int) -> str:
    """``"loaded"``: a launch is all that is left to do; ``"compiled"``: in the cache on disk; ``"not compiled"``."""
    if (spec, config, device_index) in _kernels:
        return "loaded"
    target = device_gpu(device_index).target
    key = cache_key(kernel_source(spec, config).text, "", target, key_flags(target))
    return "compiled" if default_cache().get_any(key.source) is not None else "not compiled"


def loaded_kernel(
    spec: KernelSpec, config: FwdConfig, device_index: int, compiled: CompiledKernel | None = None
) -> LoadedKernel:
    """The kernel on a device, compiled (or taken from the cache) and loaded if it is not there yet.

    Raises:
        LaunchError: It is not there and the current stream is being captured into a CUDA graph.
        ToolchainError, CompileError, CacheError: It cannot be compiled.
    """
    key = (spec, config, device_index)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    # Compiling would stall the capture and loading a module is illegal in it: refuse before either touches the context.
    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"kernel {spec.slug()} is not loaded and cannot be while a CUDA graph is captured. Before the capture call "
            f"fa2gen.runtime.warmup(q, k, v, causal={spec.causal}) with tensors of the same shapes, strides and dtype"
        )
    with _build_lock:
        kernel = _kernels.get(key)
        if kernel is None:
            if compiled is None:
                compiled = compile_kernel(kernel_source(spec, config), device_gpu(device_index).target)
            kernel = load(compiled, device_index)
            _kernels[key] = kernel
    return kernel


def build_plan(request: Request, config: FwdConfig, *, return_lse: bool, repairs: Tensor | None = None) -> Plan:
    """A function that launches this request on tensors like the request's.

    Args:
        request: On a CUDA device, not empty, nothing to copy, softmax_scale at least 0.
        config: Legal for it.
        return_lse: Whether the LSE is computed and returned.
        repairs: One uint32-sized element that counts repaired softmax steps.
    """
    index, p, head_dim = request.device.index, request.problem, request.spec.head_dim
    out_strides = (p.seqlen_q * p.num_heads_q * head_dim, p.num_heads_q * head_dim, head_dim, 1)
    kernel = loaded_kernel(request.spec, config, index)
    (launch,) = fwd_plan(
        request.spec,
        config,
        p,
        strides={**request.strides, "o": out_strides[:3]},
        softmax_scale=request.softmax_scale,
        l2_bytes=device_gpu(index).l2_bytes,
    ).launches
    # Locals of a closure: the warm path looks nothing up in objects or modules. The launch itself sees to threads that
    # have no context yet and to devices that are not the current one.
    run_kernel, grid, block = kernel.launch, launch.grid, (launch.num_threads, 1, 1)
    tail = launch.params[_POINTER_BYTES:]
    dtype = _torch_dtype(request.spec)
    out_shape, lse_shape = (p.batch, p.seqlen_q, p.num_heads_q, head_dim), (p.batch, p.num_heads_q, p.seqlen_q)
    lse_strides = (p.num_heads_q * p.seqlen_q, p.seqlen_q, 1)
    repairs_ptr = 0 if repairs is None else repairs.data_ptr()
    empty, pack, raw_stream, float32 = (
        _empty_function(request.device),
        _pack_pointers,
        _raw_stream_function(),
        torch.float32,
    )

    # The parameter bytes are new for every call, so threads may share a plan; one concatenation costs 0.1 us.
    def run(q_ptr: int, k_ptr: int, v_ptr: int) -> Tensor:
        out = empty(out_shape, out_strides, dtype)
        run_kernel(grid, block, pack(q_ptr, k_ptr, v_ptr, out.data_ptr(), 0, repairs_ptr) + tail, raw_stream(index))
        return out

    def run_with_lse(q_ptr: int, k_ptr: int, v_ptr: int) -> tuple[Tensor, Tensor]:
        out = empty(out_shape, out_strides, dtype)
        lse = empty(lse_shape, lse_strides, float32)
        pointers = pack(q_ptr, k_ptr, v_ptr, out.data_ptr(), lse.data_ptr(), repairs_ptr)
        run_kernel(grid, block, pointers + tail, raw_stream(index))
        return out, lse

    return run_with_lse if return_lse else run


def _torch_dtype(spec: KernelSpec) -> torch.dtype:
    return torch.float16 if spec.dtype == "fp16" else torch.bfloat16


def _empty_function(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """``(shape, strides, dtype)`` -> uninitialised tensor from torch's allocator, on the device.

    What torch's own compiled code allocates with takes 1.2 us, ``torch.empty_strided`` 1.8, ``torch.empty`` 5; it
    allocates on the current device, so it serves where there is only one.
    """
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if fast is not None and device.type == "cuda" and torch.cuda.device_count() == 1:
        return fast  # type: ignore[no-any-return]
    empty_strided = torch.empty_strided
    return lambda shape, strides, dtype: empty_strided(shape, strides, dtype=dtype, device=device)


def _raw_stream_function() -> Callable[[int], int]:
    """Handle of torch's current stream of a device; the private function takes 0.1 us, a Stream object 2 us."""
    private = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if private is not None:
        return private  # type: ignore[no-any-return]
    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)
