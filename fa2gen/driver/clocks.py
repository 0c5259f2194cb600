"""What a GPU's clock does while kernels are timed, by NVML (package ``nvidia-ml-py``), where that is installed."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..tables import Clocks

# NVML's bits (nvmlClocksEventReason*); gpu_idle, 1, is left out: it says that nothing ran.
_REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
SLOWDOWNS = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
"""Reasons that say that a time is not the chip's usual one. The power cap is none of them: an H200 meets it whenever
its tensor cores are busy."""

# Seconds between samples: about ten in the 40 ms that a config is timed for.
_INTERVAL = 0.004


class ClockReader:
    """Reads one device's SM clock and throttle reasons.

    Args:
        nvml: The module ``pynvml``, initialised.
        handle: The device's handle.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        # The newer name of the same call; bindings before version 12 have the older alone.
        newer = hasattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons")
        name = "nvmlDeviceGetCurrentClocksEventReasons" if newer else "nvmlDeviceGetCurrentClocksThrottleReasons"
        self._reasons: Callable[[Any], int] = getattr(nvml, name)

    def read(self) -> tuple[int, int] | None:
        """(SM clock in MHz, bits of the throttle reasons), or None where NVML does not answer."""
        nvml = self._nvml
        try:
            return int(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)), int(self._reasons(self._handle))
        except nvml.NVMLError:
            return None


def open_clock_reader(device_index: int) -> ClockReader | None:
    """The reader of a CUDA device; None without the package, without NVML, or where it does not know the device.

    NVML counts every GPU of the machine, CUDA those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order: the PCI bus id
    is what both know a device by.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(_pci_bus_id(device_index).encode())
        reader = ClockReader(pynvml, handle)
        return reader if reader.read() is not None else None
    except (pynvml.NVMLError, AttributeError):
        return None


def _pci_bus_id(device_index: int) -> str:
    import pycuda.driver as cuda

    return str(cuda.Device(device_index).pci_bus_id())


class ClockSampler:
    """Context manager that samples a device's clock in a thread of its own until it is left.

    Args:
        reader: None: nothing is sampled and ``clocks()`` is None.
        interval: Seconds between samples.
    """

    def __init__(self, reader: ClockReader | None, interval: float = _INTERVAL) -> None:
        self._reader, self._interval = reader, interval
        self._samples: list[tuple[int, int]] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ClockSampler:
        if self._reader is not None:
            self._thread = threading.Thread(target=self._run, args=(self._reader,), name="fa2gen-clocks", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()

    def _run(self, reader: ClockReader) -> None:
        while True:
            sample = reader.read()
            if sample is not None:
                self._samples.append(sample)
            if self._end.wait(self._interval):
                return

    def clocks(self) -> Clocks | None:
        """What was sampled; None if nothing was."""
        if not self._samples:
            return None
        mhz = [sample[0] for sample in self._samples]
        bits = 0
        for _, reasons in self._samples:
            bits |= reasons
        throttle = sorted(name for bit, name in _REASONS.items() if bits & bit)
        return Clocks(statistics.median_low(mhz), min(mhz), max(mhz), tuple(throttle))
