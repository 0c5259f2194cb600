"""Clock sampling with a stand-in for NVML: the right device, the samples' summary, silence where NVML is missing."""

from __future__ import annotations

import sys
import time
import types

import pytest

from fa2gen.driver import clocks
from fa2gen.driver.clocks import ClockReader, ClockSampler, open_clock_reader
from fa2gen.tables import Clocks


class NvmlError(Exception):
    pass


def fake_nvml(devices, *, older=False, broken=False):
    """A module like pynvml; ``devices``: PCI bus id -> its samples of (MHz, reasons), the last one for ever."""
    module = types.ModuleType("pynvml")
    module.NVML_CLOCK_SM, module.NVMLError = 1, NvmlError

    def init():
        if broken:
            raise NvmlError("driver not loaded")

    def by_bus_id(bus_id):
        if bus_id.decode() not in devices:
            raise NvmlError("not found")
        return bus_id.decode()

    def clock(handle, domain):
        assert domain == module.NVML_CLOCK_SM
        return devices[handle][0][0]

    def reasons(handle):
        samples = devices[handle]
        return samples.pop(0)[1] if len(samples) > 1 else samples[0][1]

    module.nvmlInit, module.nvmlDeviceGetHandleByPciBusId, module.nvmlDeviceGetClockInfo = init, by_bus_id, clock
    name = "nvmlDeviceGetCurrentClocksThrottleReasons" if older else "nvmlDeviceGetCurrentClocksEventReasons"
    setattr(module, name, reasons)
    return module


@pytest.fixture
def bus_ids(monkeypatch):
    # As with CUDA_VISIBLE_DEVICES=1,0: CUDA's device 0 is not the first that NVML lists.
    monkeypatch.setattr(clocks, "_pci_bus_id", ["0000:2A:00.0", "0000:1B:00.0"].__getitem__)


@pytest.mark.parametrize("older", [False, True])
def test_the_device_is_found_by_its_bus_id(monkeypatch, bus_ids, older):
    nvml = fake_nvml({"0000:1B:00.0": [(1000, 0)], "0000:2A:00.0": [(1980, 4)]}, older=older)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert open_clock_reader(0).read() == (1980, 4)
    assert open_clock_reader(1).read() == (1000, 0)


def test_without_nvml_nothing_is_sampled(monkeypatch, bus_ids):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_clock_reader(0) is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml({}, broken=True))
    assert open_clock_reader(0) is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml({"0000:99:00.0": [(1, 0)]}))
    assert open_clock_reader(0) is None
    with ClockSampler(None) as sampler:
        pass
    assert sampler.clocks() is None


def test_samples_are_summed_up():
    nvml = fake_nvml({"gpu": [(345, 1), (1755, 4), (1980, 0), (1770, 0x44)]})
    with ClockSampler(ClockReader(nvml, "gpu"), interval=0.001) as sampler:
        end = time.monotonic() + 10
        while len(sampler._samples) < 9:
            assert time.monotonic() < end, "the sampler does not sample"
            time.sleep(0.001)
    found = sampler.clocks()
    assert (found.sm_mhz, found.sm_mhz_min, found.sm_mhz_max) == (1770, 345, 1980)
    # Idleness is no reason to name.
    assert found.throttle == ("hw_thermal_slowdown", "sw_power_cap")
    count = len(sampler._samples)
    time.sleep(0.02)
    assert len(sampler._samples) == count, "the thread outlived its block"


def test_one_sample_at_least_is_taken_of_the_shortest_block():
    with ClockSampler(ClockReader(fake_nvml({"gpu": [(1500, 0)]}), "gpu"), interval=60) as sampler:
        pass
    assert sampler.clocks() == Clocks(1500, 1500, 1500, ())


def test_a_device_that_stops_answering_is_left_out():
    nvml = fake_nvml({"gpu": [(1500, 0)]})

    def lost(handle, domain):
        raise NvmlError("GPU is lost")

    nvml.nvmlDeviceGetClockInfo = lost
    with ClockSampler(ClockReader(nvml, "gpu"), interval=0.001) as sampler:
        time.sleep(0.01)
    assert sampler.clocks() is None
