"""GPU timing and the gate on the GPU: what the measuring process does (see ``worker.py``).

A time is the median of single calls with a cold L2, a call being all kernels of a config in a row. Before each a buffer
of twice the L2's size is written, which also keeps the GPU busy while the host enqueues the launches and its events, so
that launch latency stays outside. A kernel that writes to the inputs is wrong, and they are made again. The chip's
clock is sampled meanwhile; a doubtful time is taken twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa2gen.driver import LoadedKernel, device_info
from fa2gen.driver.clocks import ClockSampler, open_clock_reader
from fa2gen.driver.libcuda import is_sticky
from fa2gen.errors import LaunchError
from fa2gen.gate import backward_cases, forward_cases, run_backward_gate, run_gate
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, Config, KernelSpec

from .builds import Build
from .inputs import make_tensors, read_by
from .launcher import bind, loaded, make_plan, workspace_bytes
from .timing import Timing, flush_bytes, settled
from .worker import DeviceUnfit, TrialFailure

# Launches whose time settles the median to about 1 %: 20 ms of them, but not fewer or more than this.
_TARGET_MS, _MIN_LAUNCHES, _MAX_LAUNCHES = 20.0, 7, 60
# A config whose faster of two first launches takes this many times the best median so far is not worth more.
HOPELESS = 1.3
# The gate's cases have fewer tiles than a GPU has SMs, and blocks that walk over tiles would have one each; on so few
# SMs they walk, as in the emulator. A warp of the direct epilogue was once left behind by the third tile, not before.
_GATE_SMS = 3


@dataclass(frozen=True)
class MeasureRequest:
    """One config to time on one problem; ``best_ms`` is the best time so far, or infinity."""

    build: Build
    spec: KernelSpec
    config: Config
    problem: Problem
    best_ms: float


@dataclass(frozen=True)
class GateRequest:
    """One config to prove."""

    build: Build
    spec: KernelSpec
    config: Config
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
        info = device_info(device_index)
        self._l2_bytes, self._num_sms = info.l2_bytes, info.num_sms
        size = flush_bytes(self._l2_bytes)
        self._require_memory(size, "the buffer that clears the L2 cache")
        self._flush = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._inputs: tuple[Any, dict[str, Tensor], int] | None = None
        self._clocks = open_clock_reader(device_index)

    def check(self) -> None:
        """Uses the GPU; raises RuntimeError if it does not work."""
        self._flush.zero_()
        torch.cuda.synchronize(self._device)

    def measure(self, request: MeasureRequest) -> Timing:
        """Times one config.

        Raises:
            TrialFailure: ``wrong``: the kernel writes to its inputs.
            LaunchError: The driver refuses the kernel. RuntimeError: It crashed.
            DeviceUnfit: Too little memory for the problem.
        """
        spec, problem = request.spec, request.problem
        tensors = self._tensors(spec, problem)
        with loaded(request.build, self._device.index) as kernels:
            scale = 1 / math.sqrt(spec.head_dim)
            launch = self._launcher(kernels, spec, request.config, tensors, scale, self._num_sms)
            launch()
            first = self._time(launch, 2)
            ms = min(first)
            if ms > HOPELESS * request.best_ms:
                timing = Timing(ms, ms, max(first), len(first), stopped=True)
            else:
                count = min(_MAX_LAUNCHES, max(_MIN_LAUNCHES, math.ceil(_TARGET_MS / max(ms, 1e-3))))
                timing = settled(lambda: self._sample(launch, count))
        self._require_untouched_inputs(spec)
        return timing

    def _sample(self, launch: Callable[[], None], count: int) -> Timing:
        with ClockSampler(self._clocks) as sampler:
            times = sorted(self._time(launch, count))
        median, p20, p80 = (_quantile(times, share) for share in (0.5, 0.2, 0.8))
        return Timing(median, p20, p80, len(times), clocks=sampler.clocks())

    def gate(self, request: GateRequest) -> tuple[bool, str]:
        """Proves one config on the gate's cases; (passed, text)."""
        spec, config = request.spec, request.config
        with loaded(request.build, self._device.index) as kernels:

            def run(tensors: Mapping[str, Tensor], softmax_scale: float) -> None:
                batch, seqlen_q, heads, _ = tensors["q"].shape
                walked = batch * heads * math.ceil(seqlen_q / config.block_m) > self._num_sms
                if tensors["q"].numel():
                    num_sms = self._num_sms if walked else _GATE_SMS
                    self._launcher(kernels, spec, config, tensors, softmax_scale, num_sms)()
                torch.cuda.synchronize(self._device)

            def run_output(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
                out = _unwritten(q.shape, q)
                lse = _unwritten((q.shape[0], q.shape[2], q.shape[1]), q, torch.float32)
                run({"q": q, "k": k, "v": v, "o": out, "softmax_lse": lse}, scale)
                return out, lse

            def run_gradients(
                q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, scale: float
            ) -> tuple[Tensor, Tensor, Tensor]:
                dq, dk, dv = (_unwritten(x.shape, x) for x in (q, k, v))
                tensors = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "dout": do, "dq": dq, "dk": dk, "dv": dv}
                run(tensors if dlse is None else {**tensors, "dlse": dlse}, scale)
                return dq, dk, dv

            if isinstance(config, BwdConfig):
                gradients = backward_cases(spec, config, budget=request.budget)
                report = run_backward_gate(spec, config, run_gradients, gradients, device=self._device)
            else:
                cases = forward_cases(spec, config, budget=request.budget)
                report = run_gate(spec, config, run_output, cases, device=self._device)
        return report.passed, report.text

    def _launcher(
        self,
        kernels: Mapping[str, LoadedKernel],
        spec: KernelSpec,
        config: Config,
        tensors: Mapping[str, Tensor],
        softmax_scale: float,
        num_sms: int,
    ) -> Callable[[], None]:
        plan = make_plan(spec, config, tensors, softmax_scale, self._l2_bytes, num_sms)
        if size := workspace_bytes(plan):
            self._require_memory(size, f"the workspaces of {spec.slug()} {config.slug()}")
        return bind(kernels, plan, tensors, config.family)

    def _tensors(self, spec: KernelSpec, problem: Problem) -> dict[str, Tensor]:
        key = (spec.kind, spec.dtype, spec.head_dim, spec.causal and spec.kind == "bwd", problem)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None
            # Of a backward's scores too, some at a time.
            scores = 0 if spec.kind == "fwd" else 1 << 30
            needed = problem.min_bytes(spec) + scores
            self._require_memory(needed, f"the inputs and outputs of {spec.slug()}, {problem}")
            tensors = make_tensors(spec, problem, self._device)
            self._inputs = (key, tensors, _checksum(tensors, read_by(spec)))
        return self._inputs[1]

    def _require_memory(self, size: int, what: str) -> None:
        free, _ = torch.cuda.mem_get_info(self._device)
        if free < size:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._device)
        if free < size:
            raise DeviceUnfit(
                f"device {self._device.index} has {free >> 20} MiB of free memory, less than the {size >> 20} MiB of "
                f"{what}: end other programs on it, or take another device or size"
            )

    def _require_untouched_inputs(self, spec: KernelSpec) -> None:
        """A kernel that wrote to its inputs is wrong, and would have later ones timed on other numbers."""
        if self._inputs is not None and _checksum(self._inputs[1], read_by(spec)) != self._inputs[2]:
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


def _unwritten(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """NaN, which shows every element that a kernel does not write."""
    return torch.full(tuple(shape), math.nan, dtype=dtype or like.dtype, device=like.device)


def _checksum(tensors: Mapping[str, Tensor], names: Sequence[str]) -> int:
    return sum(int(tensors[name].view(torch.int16).sum(dtype=torch.int64).item()) for name in names)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
