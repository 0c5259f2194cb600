"""What a time says of itself: doubtful ones are taken twice, kernels that spoil their inputs are wrong, L2 sizes."""

from __future__ import annotations

import pytest
import torch

from fa2gen.errors import LaunchError
from fa2gen.tables import Clocks, Measurement
from fa2gen.tuning import measure
from fa2gen.tuning.measure import handler
from fa2gen.tuning.timing import SPREAD_LIMIT, Timing, disturbance, flush_bytes, settled
from fa2gen.tuning.worker import DeviceUnfit, TrialFailure
from tests.tuning_fakes import PROBLEM


def timing(spread=0.02, *throttle, ms=1.0):
    return Timing(ms, ms * (1 - spread / 2), ms * (1 + spread / 2), 20, clocks=Clocks(1700, 1600, 1800, throttle))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (timing(), ""),
        # An H200 is at its power cap whenever its tensor cores are busy.
        (timing(0.02, "sw_power_cap"), ""),
        (timing(0.02, "applications_clocks_setting"), ""),
        (timing(0.02, "sw_power_cap", "sw_thermal_slowdown"), "throttled: sw_thermal_slowdown"),
        (timing(0.02, "hw_slowdown", "hw_thermal_slowdown"), "throttled: hw_slowdown, hw_thermal_slowdown"),
        (timing(0.3), "spread of 30%"),
        (Timing(1.0, 1.0, 1.0, 9), ""),
    ],
)
def test_what_is_doubtful(sample, words):
    found = disturbance(sample)
    assert words in found
    assert bool(found) == bool(words)


def test_a_table_entry_is_judged_alike():
    clocks = Clocks(1700, 1600, 1800, ("hw_slowdown",))
    assert disturbance(Measurement("measured", 1.0, 0.9, 1.2, 9, "m", PROBLEM, clocks=clocks)) == (
        "throttled: hw_slowdown; p20 to p80 spread of 30%"
    )


def test_doubtful_times_are_taken_twice():
    def take(*samples):
        waiting = list(samples)
        return settled(lambda: waiting.pop(0)), len(samples) - len(waiting)

    sound, wide, wider = timing(), timing(0.2), timing(0.5)
    assert take(sound, wide) == (sound, 1)
    assert take(wide, sound) == (sound, 2)
    kept, count = take(wider, wide)
    assert (kept.p20, kept.unsettled, count) == (wide.p20, "p20 to p80 spread of 20%", 2)
    hot = timing(0.01, "hw_thermal_slowdown")
    kept, _ = take(hot, wide)
    assert "hw_thermal_slowdown" in kept.unsettled
    assert SPREAD_LIMIT > 0.07, "shipped timings reach 7 %"


def test_a_limit_of_zero_is_a_limit():
    assert disturbance(timing(0.001), 0.0)
    assert not disturbance(Timing(1.0, 1.0, 1.0, 9), 0.0)


def test_the_flush_is_sized_from_the_device():
    assert flush_bytes(50 << 20) == 100 << 20
    assert flush_bytes(0) >= 2 * 126e6, "MIG tells no size: more than any L2"


class FakeBench:
    """What the handler asks; ``error`` is raised by every kernel, ``dead`` by the GPU itself."""

    def __init__(self, error=None, dead=False):
        self.error, self.dead = error, dead

    def check(self):
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def measure(self, payload):
        if self.error:
            raise self.error
        return payload

    gate = measure


@pytest.fixture
def handle(monkeypatch):
    monkeypatch.setattr(measure, "is_sticky", lambda message: "illegal address" in message)
    return lambda *bench: handler(FakeBench(*bench))


@pytest.mark.parametrize("operation", ["measure", "gate"])
@pytest.mark.parametrize(
    ("error", "dead", "fatal"),
    [
        (LaunchError("too many resources requested for launch"), False, False),
        (LaunchError("too many resources requested for launch"), True, True),
        (LaunchError("illegal address: CUDA is lost to this process"), False, True),
        (RuntimeError("CUDA error: misaligned address"), False, True),
    ],
)
def test_only_errors_that_ruin_the_context_cost_the_process(handle, operation, error, dead, fatal):
    with pytest.raises(TrialFailure, match=str(error)) as caught:
        handle(error, dead)(operation, None)
    assert (caught.value.outcome, caught.value.fatal) == ("launch_failed", fatal)


def test_the_handler_passes_answers_and_typed_errors_on(handle):
    assert handle()("measure", 3) == 3
    assert handle()("ready", None) is None
    with pytest.raises(TrialFailure, match="changed an input"):
        handle(TrialFailure("wrong", "the kernel changed an input"))("measure", None)
    with pytest.raises(DeviceUnfit, match="MiB"):
        handle(DeviceUnfit("200 MiB"))("measure", None)
    with pytest.raises(ValueError, match="unknown operation"):
        handle()("dance", None)


@pytest.fixture
def bench():
    """A bench on the CPU with inputs in place."""
    made = object.__new__(measure.Bench)
    made._device = torch.device("cpu", 3)
    inputs = tuple(torch.randn(1, 5, 2, 8).bfloat16() for _ in range(3))
    made._inputs = ("key", inputs, measure._checksum(*inputs))
    return made


def test_a_kernel_that_writes_to_its_inputs_is_wrong_and_they_are_made_again(bench):
    bench._require_untouched_inputs()
    bench._inputs[1][1][0, 4, 1, 7] += 1
    with pytest.raises(TrialFailure, match="changed an input") as caught:
        bench._require_untouched_inputs()
    assert (caught.value.outcome, bench._inputs) == ("wrong", None)
    bench._require_untouched_inputs()


def test_too_little_memory_is_said_clearly(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 << 20, 80 << 30))
    bench._require_memory(90 << 20, "the buffer")
    with pytest.raises(DeviceUnfit, match="device 3 has 90 MiB of free memory, less than the 100 MiB of the buffer"):
        bench._require_memory(100 << 20, "the buffer")
