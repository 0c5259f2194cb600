"""The GPU as a stop-watch: kernel time by CUDA-graph replay, host time by bursts of eager calls."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fa2gen import __version__
from fa2gen.codegen import template_hash
from fa2gen.driver import device_info
from fa2gen.driver.clocks import ClockSampler, open_clock_reader
from fa2gen.errors import LaunchError
from fa2gen.tables import Clocks

from .peers import Implementation, first_line
from .rows import Refusal

Tensors = tuple[Tensor, ...]

KERNEL_METHOD = (
    "CUDA-graph replay over rotating sets of random inputs that together exceed L2 twice (64 sets at most); "
    "implementations take turns, another one first in each round; median with p20 and p80; a backward is "
    "torch.autograd.grad over a graph that the forward left before, captured alone"
)
HOST_METHOD = (
    "wall time of issuing eager calls on a problem so small that the GPU keeps up, in bursts that fit the launch "
    "queue; implementations take turns, burst by burst; median with p20 and p80; a step is the call and "
    "torch.autograd.grad of it"
)
# A replay takes at least so long, so that the events' resolution of 0.5 us and the graph's own start do not show.
_LEAST_REPLAY_MS = 2.0
# More than any GPU to come in the next years does, to tell how many calls that takes at most.
_FASTEST_TFLOPS, _FASTEST_GBS = 1000.0, 5000.0
_MOST_CALLS = 200
# Calls of a burst; a launch queue holds 1024, and a step with its backward is up to ten launches. Bursts that warm
# caches, allocator and clocks first.
_BURST, _STEP_BURST, _WARM_BURSTS = 200, 80, 5


def _as_they_are(*tensors: Tensor) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Ready:
    """An implementation, ready to be timed in one cell.

    Attributes:
        implementation: Whose.
        call: What is timed, of what ``begin`` returned.
        tensors: Of each input set, as the implementation takes them.
        begin: What comes before and is not timed, on the same stream: the forward of a backward.
        is_step: The call has a forward and a backward.
    """

    implementation: Implementation
    call: Callable[..., object]
    tensors: list[Tensors]
    begin: Callable[..., Tensors] = _as_they_are
    is_step: bool = False


class Machine(Protocol):
    """What a benchmark needs of the machine it runs on."""

    device: str
    l2_bytes: int

    def synchronize(self) -> None: ...
    def provenance(self) -> dict[str, Any]: ...
    def kernel_times(
        self, ready: dict[str, Ready], calls: int, rounds: int
    ) -> tuple[dict[str, list[float] | Refusal], Clocks | None]: ...
    def host_times(self, ready: dict[str, Ready], stream: str, bursts: int) -> dict[str, list[float]]: ...


def provenance(device_index: int | None) -> dict[str, Any]:
    """Machine, versions and time of a measurement.

    Args:
        device_index: torch's index of the GPU; None: the CPU was measured.
    """
    info = None if device_index is None else device_info(device_index)
    machine: dict[str, Any] = {"gpu": "CPU"}
    if info is not None:
        machine = {
            "gpu": info.name,
            "compute_capability": ".".join(map(str, info.compute_capability)),
            "num_sms": info.num_sms,
            "driver": info.driver_version,
        }
    return {
        **machine,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "fa2gen": __version__,
        "templates": template_hash("fwd", "sm80"),
        "templates_sm90": template_hash("fwd", "sm90"),
        "templates_bwd": template_hash("bwd", "sm80"),
        "utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def calls_per_replay(flops: int, min_bytes: int, sets: int) -> int:
    """Calls of one graph: whole rounds over the input sets, and long enough to be timed."""
    least_ms = max(flops / _FASTEST_TFLOPS / 1e9, min_bytes / _FASTEST_GBS / 1e6)
    wanted = min(_MOST_CALLS, int(_LEAST_REPLAY_MS / max(least_ms, 1e-6)) + 1)
    return max(1, -(-wanted // sets)) * sets


def require_working(machine: Machine, name: str, error: Exception) -> None:
    """Raise unless the device still works after an implementation's error: what follows would fail for its sake.

    Raises:
        LaunchError: It does not; the message names the implementation.
    """
    try:
        machine.synchronize()
    except RuntimeError:
        raise LaunchError(f"{name} left the GPU unusable: {first_line(error)}; measure without it (--peer)") from None


class CudaMachine:
    """torch's current CUDA device."""

    def __init__(self) -> None:
        self._index = torch.cuda.current_device()
        self.device = f"cuda:{self._index}"
        self._info = device_info(self._index)
        # Where the driver tells no size (MIG, virtual GPUs): the largest L2 so far, 126 MB on a B200.
        self.l2_bytes = self._info.l2_bytes or 128 << 20
        self._clocks = open_clock_reader(self._index)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def provenance(self) -> dict[str, Any]:
        """What a reader needs to judge the figures, or to get them again."""
        return {**provenance(self._index), "kernel_method": KERNEL_METHOD, "host_method": HOST_METHOD}

    def kernel_times(
        self, ready: dict[str, Ready], calls: int, rounds: int
    ) -> tuple[dict[str, list[float] | Refusal], Clocks | None]:
        """Milliseconds of one call in each round, or why an implementation has none; and the clock meanwhile."""
        graphs: dict[str, _Captured] = {}
        times: dict[str, list[float] | Refusal] = {}
        for name, one in ready.items():
            try:
                with one.implementation.around():
                    graphs[name] = _capture(one, calls)
                times[name] = []
            except Exception as error:
                require_working(self, name, error)
                times[name] = Refusal(f"cannot be captured into a CUDA graph: {first_line(error)}")
        for graph in graphs.values():
            graph.replay()
        self.synchronize()
        names = list(graphs)
        with ClockSampler(self._clocks) as sampler:
            for turn in range(rounds):
                # Whoever comes first finds a cooler chip.
                first = turn % max(1, len(names))
                for name in names[first:] + names[:first]:
                    measured = times[name]
                    assert isinstance(measured, list)
                    measured.append(_replay_ms(graphs[name]) / calls)
        return times, sampler.clocks()

    def host_times(self, ready: dict[str, Ready], stream: str, bursts: int) -> dict[str, list[float]]:
        """Microseconds that one call costs the CPU, in each burst, on the ``"default"`` or a ``"side"`` stream."""
        side = torch.cuda.Stream() if stream == "side" else torch.cuda.default_stream()
        times: dict[str, list[float]] = {name: [] for name in ready}
        with torch.cuda.stream(side):
            inputs = {name: one.begin(*one.tensors[0]) for name, one in ready.items()}
            for burst in range(_WARM_BURSTS + bursts):
                for name, one in ready.items():
                    count = _STEP_BURST if one.is_step else _BURST
                    with one.implementation.around():
                        elapsed = burst_us(one.call, inputs[name], self.synchronize, count)
                    if burst >= _WARM_BURSTS:
                        times[name].append(elapsed)
        self.synchronize()
        return times


def burst_us(call: Callable[..., object], tensors: Tensors, synchronize: Callable[[], None], count: int) -> float:
    """Microseconds that issuing one call takes, over a burst of ``count``."""
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call(*tensors)
    return 1e6 * (time.perf_counter() - start) / count


@dataclass(frozen=True)
class _Captured:
    """A graph, and what it reads: memory that is not its own."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensors]

    def replay(self) -> None:
        self.graph.replay()


def _capture(ready: Ready, calls: int) -> _Captured:
    """A graph of ``calls`` calls, walking over the input sets."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        inputs = [ready.begin(*tensors) for tensors in ready.tensors]
        for tensors in inputs[:2]:
            ready.call(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            ready.call(*inputs[index % len(inputs)])
    return _Captured(graph, inputs)


def _replay_ms(graph: _Captured) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
