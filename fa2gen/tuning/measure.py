"""GPU timing and the gate on the GPU: what the measuring process does (see ``worker.py``).

A time is the median of single launches with a cold L2: before each launch a buffer of twice the L2's size is written,
which also keeps the GPU busy while the host enqueues the launch and its events, so that launch latency stays outside.
Inputs are random normal: matrix work on zeros runs up to 13 % faster than on real data. A kernel that writes to them
is wrong, and they are made again. The chip's clock is sampled meanwhile; a doubtful time is taken twice.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fa2gen.compile import CompiledKernel
from fa2gen.driver import LoadedKernel, device_info, load
from fa2gen.driver.clocks import ClockSampler, open_clock_reader
from fa2gen.driver.libcuda import is_sticky
from fa2gen.errors import Fa2genError, LaunchError
from fa2gen.gate import forward_cases, run_gate
from fa2gen.launch import POINTERS, fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec

from .timing import Timing, flush_bytes, settled
from .worker import DeviceUnfit, TrialFailure

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Launches whose time settles the median to about 1 %: 20 ms of them, but not fewer or more than this.
_TARGET_MS, _MIN_LAUNCHES, _MAX_LAUNCHES = 20.0, 7, 60
# A config whose faster of two first launches takes this many times the best median so far is not worth more.
HOPELESS = 1.3


@dataclass(frozen=True)
class MeasureRequest:
    """One kernel to time on one problem; ``best_ms`` is the best time so far, or infinity."""

    compiled: CompiledKernel
    spec: KernelSpec
    config: FwdConfig
    problem: Problem
    best_ms: float


@dataclass(frozen=True)
class GateRequest:
    """One kernel to prove."""

    compiled: CompiledKernel
    spec: KernelSpec
    config: FwdConfig
    budget: str = "quick"


def device_handler(device_index: int = 0) -> Callable[[str, Any], Any]:
    """The measuring process's handler of ``"ready"``, ``"measure"`` and ``"gate"``; see ``worker.Worker``."""
    torch.cuda.set_device(device_index)
    return handler(Bench(device_index))


def handler(bench: Any) -> Callable[[str, Any], Any]:
    """Answers with what ``bench`` (:class:`Bench`) says; an error of the GPU becomes a typed failure.

    A kernel that the driver merely refuses to launch (too many registers for its threads, say) leaves the context as it
    was, and the process goes on. Anything else may have ruined it, and the process is replaced.
    """
    operations = {"ready": lambda _: bench.check(), "measure": bench.measure, "gate": bench.gate}

    def handle(operation: str, payload: Any) -> Any:
        if operation not in operations:
            raise ValueError(f"unknown operation {operation!r}")
        try:
            return operations[operation](payload)
        except (TrialFailure, DeviceUnfit):
            raise
        except LaunchError as error:
            raise TrialFailure("launch_failed", str(error), fatal=is_sticky(str(error)) or not _works(bench)) from None
        except RuntimeError as error:
            # torch reports a kernel's crash as RuntimeError at its next call; the context is lost either way.
            raise TrialFailure("launch_failed", f"{type(error).__name__}: {error}", fatal=True) from None

    return handle


def _works(bench: Any) -> bool:
    try:
        bench.check()
    except (LaunchError, RuntimeError):
        return False
    return True


class Bench:
    """Times and proves kernels on one device; keeps the inputs of the last problem."""

    def __init__(self, device_index: int) -> None:
        self._device = torch.device("cuda", device_index)
        self._l2_bytes = device_info(device_index).l2_bytes
        size = flush_bytes(self._l2_bytes)
        self._require_memory(size, "the buffer that clears the L2 cache")
        self._flush = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._inputs: tuple[Any, tuple[torch.Tensor, ...], int] | None = None
        self._clocks = open_clock_reader(device_index)

    def check(self) -> None:
        """Uses the GPU; raises RuntimeError if it does not work."""
        self._flush.zero_()
        torch.cuda.synchronize(self._device)

    def measure(self, request: MeasureRequest) -> Timing:
        """Times one kernel.

        Raises:
            TrialFailure: ``wrong``: the kernel writes to its inputs.
            LaunchError: The driver refuses the kernel. RuntimeError: It crashed.
            DeviceUnfit: Too little memory for the problem.
        """
        spec, problem = request.spec, request.problem
        q, k, v, out, lse = self._tensors(spec, problem)
        kernel = load(request.compiled, self._device.index)
        try:
            scale = 1 / math.sqrt(spec.head_dim)
            launch = _launcher(kernel, spec, request.config, q, k, v, out, lse, scale, self._l2_bytes)
            launch()
            first = self._time(launch, 2)
            ms = min(first)
            if ms > HOPELESS * request.best_ms:
                timing = Timing(ms, ms, max(first), len(first), stopped=True)
            else:
                count = min(_MAX_LAUNCHES, max(_MIN_LAUNCHES, math.ceil(_TARGET_MS / max(ms, 1e-3))))
                timing = settled(lambda: self._sample(launch, count))
        finally:
            kernel.unload()
        self._require_untouched_inputs()
        return timing

    def _sample(self, launch: Callable[[], None], count: int) -> Timing:
        with ClockSampler(self._clocks) as sampler:
            times = sorted(self._time(launch, count))
        median, p20, p80 = (_quantile(times, share) for share in (0.5, 0.2, 0.8))
        return Timing(median, p20, p80, len(times), clocks=sampler.clocks())

    def gate(self, request: GateRequest) -> tuple[bool, str]:
        """Proves one kernel on the gate's cases; (passed, text)."""
        spec, config = request.spec, request.config
        kernel = load(request.compiled, self._device.index)

        def runner(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # NaN shows every element that the kernel does not write.
            out = torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device)
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, dtype=torch.float32, device=q.device)
            if out.numel():
                _launcher(kernel, spec, config, q, k, v, out, lse, softmax_scale, self._l2_bytes)()
            torch.cuda.synchronize(self._device)
            return out, lse

        try:
            cases = forward_cases(spec, config, budget=request.budget)
            report = run_gate(spec, config, runner, cases, device=self._device)
        finally:
            kernel.unload()
        return report.passed, report.text

    def _tensors(self, spec: KernelSpec, problem: Problem) -> tuple[torch.Tensor, ...]:
        key = (spec.dtype, spec.head_dim, problem)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None
            self._require_memory(problem.min_bytes(spec), f"the inputs and outputs of {spec.slug()}, {problem}")
            generator = torch.Generator(self._device).manual_seed(0)

            def normal(seqlen: int, heads: int) -> torch.Tensor:
                shape = (problem.batch, seqlen, heads, spec.head_dim)
                return torch.randn(shape, generator=generator, device=self._device, dtype=_DTYPES[spec.dtype])

            q = normal(problem.seqlen_q, problem.num_heads_q)
            k, v = (normal(problem.seqlen_k, problem.num_heads_k) for _ in range(2))
            lse = torch.empty(
                (problem.batch, problem.num_heads_q, problem.seqlen_q), dtype=torch.float32, device=self._device
            )
            self._inputs = (key, (q, k, v, torch.empty_like(q), lse), _checksum(q, k, v))
        return self._inputs[1]

    def _require_memory(self, size: int, what: str) -> None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        if free < size:
            raise DeviceUnfit(
                f"device {self._device.index} has {free >> 20} MiB of free memory, less than the {size >> 20} MiB of "
                f"{what}: end other programs on it, or take another device or size"
            )

    def _require_untouched_inputs(self) -> None:
        """A kernel that wrote to its inputs is wrong, and would have later ones timed on other numbers."""
        if self._inputs is not None and _checksum(*self._inputs[1][:3]) != self._inputs[2]:
            self._inputs = None
            raise TrialFailure("wrong", "the kernel changed an input while it was timed")

    def _time(self, launch: Callable[[], None], count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self._device)
        return [float(start.elapsed_time(end)) for start, end in pairs]


def _launcher(
    kernel: LoadedKernel,
    spec: KernelSpec,
    config: FwdConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    l2_bytes: int,
) -> Callable[[], None]:
    """A call that launches the kernel on torch's current stream, everything packed beforehand."""
    problem = Problem(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    tensors = {"q": q, "k": k, "v": v, "o": out}
    strides = {name: (x.stride(0), x.stride(1), x.stride(2)) for name, x in tensors.items()}
    plan = fwd_plan(spec, config, problem, strides=strides, softmax_scale=softmax_scale, l2_bytes=l2_bytes)
    if plan.workspaces or len(plan.launches) != 1:
        raise Fa2genError("a forward plan has one launch and no workspace")
    (step,) = plan.launches
    addresses = {**{name: x.data_ptr() for name, x in tensors.items()}, "softmax_lse": lse.data_ptr()}
    params = bytearray(step.params)
    for index, name in enumerate(POINTERS):
        struct.pack_into("<Q", params, 8 * index, addresses.get(name, 0))
    packed, block = bytes(params), (step.num_threads, 1, 1)
    stream = torch.cuda.current_stream(q.device).cuda_stream

    def launch() -> None:
        kernel.launch(step.grid, block, packed, stream)

    return launch


def _checksum(*inputs: torch.Tensor) -> int:
    return sum(int(x.view(torch.int16).sum(dtype=torch.int64).item()) for x in inputs)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
