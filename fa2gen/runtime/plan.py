"""From a request to a function that launches it: config, loaded kernels, launch plan. Everything here is remembered."""

from __future__ import annotations

import functools
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fa2gen.codegen import kernels_of, template_hash
from fa2gen.compile import CompiledKernel, compile_kernel, compile_many, default_cache, kernel_source
from fa2gen.compile.cache import cache_key
from fa2gen.compile.nvcc import key_flags
from fa2gen.constraints import infeasible_reason
from fa2gen.constraints_sm90 import compile_target
from fa2gen.driver import LoadedKernel, device_info, load
from fa2gen.errors import CompileError, InfeasibleError, LaunchError
from fa2gen.hardware import Gpu, match_device
from fa2gen.problem import Bucket
from fa2gen.spec import BwdConfig, Config, KernelSpec
from fa2gen.tables import Match, lookup

from .families import require_tma, tma_obstacle
from .request import Request

# (addresses of q, k, v) -> output, or (output, LSE).
Plan = Callable[[int, int, int], Any]
# Addresses of q, k, v, output and LSE.
Addresses = tuple[int, int, int, int, int]
# (addresses of q, k, v) -> (output, LSE, addresses).
RecordedPlan = Callable[[int, int, int], tuple[Tensor, Tensor, Addresses]]
# (shape, strides, dtype) -> uninitialised tensor.
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
# Addresses of q, k, v, o, lse, do and dlse (0: it is zero) -> dq, dk, dv.
BackwardPlan = Callable[[int, int, int, int, int, int, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class GradientOptions:
    """What gradients depend on besides tensors. Equal options are one object, so that it is hashed by its address.

    Attributes:
        causal, softmax_scale, backend: The call's.
        deterministic: Equal inputs give equal bits.
        config: Forced for the backward; None takes the tuned tables' choice.
    """

    causal: bool
    softmax_scale: float | None
    deterministic: bool
    backend: str
    config: BwdConfig | None


@dataclass(frozen=True, eq=False, slots=True)
class Differentiable:
    """A call that autograd records. Calls with one key of ``PLANS`` have one of these, hashed by its address.

    Attributes:
        options: Of its gradients.
        return_lse: The LSE is returned too.
    """

    options: GradientOptions
    return_lse: bool


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """How calls with one key are served.

    Attributes:
        run: Launches, and returns what the caller asked for.
        record: Launches, and returns what autograd is to keep.
        differentiable: The call, where torch asks for no deterministic algorithms and where it does.
    """

    run: Plan
    record: RecordedPlan
    differentiable: tuple[Differentiable, Differentiable]


# Calls seen before, by everything that decides what is launched. Lengths vary freely in serving, so each is emptied at
# a cap: refilling an entry takes tens of microseconds.
PLANS: dict[tuple[Any, ...], ForwardPlan] = {}
BACKWARD_PLANS: dict[tuple[Any, ...], BackwardPlan] = {}
# The same plans by the call and strides, where nothing else can have changed.
SAVED_PLANS: dict[tuple[Any, ...], BackwardPlan] = {}
# Parameters of a backward's launches, by what launches them and the addresses.
PARAMETERS: dict[tuple[Any, ...], tuple[bytes, ...]] = {}
MAX_PLANS = 4096


def pointer_packer(count: int) -> Callable[..., bytes]:
    """A function that packs ``count`` addresses; the native format takes 60 % of the time of 8-byte integers."""
    return struct.Struct(f"{count}P").pack


_gpus: dict[int, Gpu] = {}
# GPUs whose stale tables a warning has named.
_warned: set[str] = set()
# The last: whether TMA can read the tensors.
_matches: dict[tuple[KernelSpec, Bucket, int, bool], Match] = {}
# The last is the kernel's name.
_kernels: dict[tuple[KernelSpec, Config, int, str], LoadedKernel] = {}
_build_lock = threading.RLock()


def reset() -> None:
    """Forget plans, table look-ups and loaded kernels: after tuning in this process, or to free device memory."""
    for remembered in (PLANS, BACKWARD_PLANS, SAVED_PLANS, PARAMETERS, _matches, _kernels):
        remembered.clear()
    _warned.clear()


def remember(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Any) -> None:
    """Make ``plan`` the answer to calls with this key."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


@functools.lru_cache(MAX_PLANS)
def gradient_options(
    causal: bool, softmax_scale: float | None, deterministic: bool, backend: str, config: BwdConfig | None
) -> GradientOptions:
    """The one object of these options."""
    return GradientOptions(causal, softmax_scale, deterministic, backend, config)


def device_gpu(device_index: int) -> Gpu:
    """The GPU with this index of torch, as the tables know it."""
    gpu = _gpus.get(device_index)
    if gpu is None:
        info = device_info(device_index)
        gpu = match_device(info.name, info.compute_capability, info.num_sms, info.l2_bytes)
        _gpus[device_index] = gpu
    return gpu


def match_config(request: Request, device_index: int, config: Config | None) -> Match:
    """The config to run: the caller's if given, else what the tables say; of the sm80 family where TMA cannot read.

    Raises:
        InfeasibleError: The caller's config breaks a limit of this GPU, or TMA cannot read what it is to read; the
            message is the reason.
        TableError: ``FA2GEN_STRICT`` is set and no entry is exact.
    """
    gpu = device_gpu(device_index)
    obstacle = tma_obstacle(request)
    if config is not None:
        require_tma(request, config, gpu.arch)
        require_feasible(request.spec, config, gpu)
        return Match(config, "forced by the caller", 0.0, False, None)
    key = (request.spec, request.problem.bucket(gpu.num_sms), device_index, obstacle is None)
    match = _matches.get(key)
    if match is None:
        families = None if obstacle is None else ("sm80",)
        match = lookup(request.spec, key[1], gpu, template_hash=template_hash, families=families)
        _matches[key] = match
        if match.stale and (match.entry is None or match.lost_family) and gpu.name not in _warned:
            _warned.add(gpu.name)
            warnings.warn(_staleness(request.spec, match, gpu), RuntimeWarning, stacklevel=2)
    return match


def _staleness(spec: KernelSpec, match: Match, gpu: Gpu) -> str:
    """What a call loses by stale entries, and what to do."""
    if match.lost_family is None:
        entries, runs = "tuned entries", "its default config"
    else:
        entries, runs = f"tuned entries of the {match.lost_family} family", f"a slower one of {match.config.family}"
    return (
        f"the {entries} for {gpu.name} are stale (the kernel templates have changed since) and passed over: "
        f"{spec.slug()} runs {runs}. To use them again: fa2gen table check --gpu {gpu.name} --regate"
    )


def require_feasible(spec: KernelSpec, config: Config, gpu: Gpu) -> None:
    """Raise unless ``config`` is a legal config for ``spec`` on ``gpu``."""
    reason = infeasible_reason(spec, config, gpu.arch)
    if reason is not None:
        raise InfeasibleError(f"config {config.slug()} cannot run {spec.slug()} on {gpu.name}: {reason}")


def kernel_state(spec: KernelSpec, config: Config, device_index: int) -> str:
    """``"loaded"``: a launch is all that is left to do; ``"compiled"``: in the cache on disk; ``"not compiled"``.

    Of several kernels, the state of the one that is furthest from a launch.
    """
    missing = _missing(spec, config, device_index, kernels_of(spec.kind))
    target = compile_target(config, device_gpu(device_index).target)
    keys = [cache_key(kernel_source(spec, config, name).text, "", target, key_flags(target)) for name in missing]
    if not all(default_cache().get_any(key.source) for key in keys):
        return "not compiled"
    return "compiled" if missing else "loaded"


def loaded_kernel(
    spec: KernelSpec,
    config: Config,
    device_index: int,
    compiled: CompiledKernel | None = None,
    *,
    name: str | None = None,
) -> LoadedKernel:
    """A kernel on a device, compiled (or taken from the cache) and loaded if it is not there yet.

    Args:
        spec, config, device_index: Which, and where.
        compiled: Its binary, if the caller has it.
        name: Of several kernels in a row, this one; default the main one, named like the kind.

    Raises:
        LaunchError: It is not there and the current stream is being captured into a CUDA graph.
        ToolchainError, CompileError, CacheError: It cannot be compiled.
    """
    name = name or spec.kind
    key = (spec, config, device_index, name)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    _require_no_capture(spec)
    with _build_lock:
        kernel = _kernels.get(key)
        if kernel is None:
            if compiled is None:
                target = compile_target(config, device_gpu(device_index).target)
                compiled = compile_kernel(kernel_source(spec, config, name), target)
            kernel = load(compiled, device_index)
            _kernels[key] = kernel
    return kernel


def loaded_kernels(
    spec: KernelSpec, config: Config, device_index: int, names: Sequence[str]
) -> dict[str, LoadedKernel]:
    """Several kernels as :func:`loaded_kernel` gives them; what has to be compiled is compiled at once, in parallel."""
    if _missing(spec, config, device_index, names):
        _require_no_capture(spec)
    with _build_lock:
        missing = _missing(spec, config, device_index, names)
        binaries = dict(zip(missing, _compiled(spec, config, device_index, missing), strict=True))
        return {name: loaded_kernel(spec, config, device_index, binaries.get(name), name=name) for name in names}


def _compiled(
    spec: KernelSpec, config: Config, device_index: int, names: Sequence[str]
) -> Sequence[CompiledKernel | None]:
    """Binaries of several kernels; of a single one None: it needs no pool of compilers."""
    if len(names) < 2:
        return [None] * len(names)
    target = compile_target(config, device_gpu(device_index).target)
    compiled = compile_many([(kernel_source(spec, config, name), target) for name in names])
    for result in compiled:
        if isinstance(result, CompileError):
            raise result
    return cast(list[CompiledKernel], compiled)


def _missing(spec: KernelSpec, config: Config, device_index: int, names: Sequence[str]) -> list[str]:
    return [name for name in names if (spec, config, device_index, name) not in _kernels]


def _require_no_capture(spec: KernelSpec) -> None:
    """Compiling would stall the capture and loading a module is illegal in it: refuse before either is tried."""
    if not torch.cuda.is_current_stream_capturing():
        return
    options = f"causal={spec.causal}"
    if spec.kind == "bwd":
        options += f", backward=True, deterministic={spec.deterministic}"
    raise LaunchError(
        f"kernel {spec.slug()} is not loaded and cannot be while a CUDA graph is captured. Before the capture call "
        f"fa2gen.runtime.warmup(q, k, v, {options}) with tensors of the same shapes, strides and dtype"
    )


def _torch_dtype(spec: KernelSpec) -> torch.dtype:
    return torch.float16 if spec.dtype == "fp16" else torch.bfloat16


def _empty_function(device: torch.device) -> Empty:
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
