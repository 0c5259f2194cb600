"""What a time says of itself: doubtful ones are taken twice, kernels that spoil their inputs are wrong, L2 sizes."""

from __future__ import annotations

import pytest
import torch

from fa2gen.errors import LaunchError
from fa2gen.problem import Problem
from fa2gen.reference import attention_forward
from fa2gen.spec import KernelSpec
from fa2gen.tables import Clocks, Measurement
from fa2gen.tuning import measure
from fa2gen.tuning.inputs import make_tensors, read_by
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


FORWARD, BACKWARD = KernelSpec(head_dim=8), KernelSpec("bwd", head_dim=8, causal=True, gqa_ratio=2)


def bench(spec=FORWARD):
    """A bench on the CPU with inputs in place."""
    made = object.__new__(measure.Bench)
    made._device = torch.device("cpu", 3)
    tensors = make_tensors(spec, Problem(1, 5, 7, 2, 2 // spec.gqa_ratio), torch.device("cpu"))
    made._inputs = ("key", tensors, measure._checksum(tensors, read_by(spec)))
    return made


@pytest.mark.parametrize(
    ("spec", "name"), [(FORWARD, "k"), *((BACKWARD, name) for name in ("q", "k", "v", "o", "lse", "dout"))]
)
def test_a_kernel_that_writes_to_its_inputs_is_wrong_and_they_are_made_again(spec, name):
    made = bench(spec)
    made._require_untouched_inputs(spec)
    made._inputs[1][name].view(-1)[-3] += 1
    with pytest.raises(TrialFailure, match="changed an input") as caught:
        made._require_untouched_inputs(spec)
    assert (caught.value.outcome, made._inputs) == ("wrong", None)
    made._require_untouched_inputs(spec)


def test_what_a_kernel_writes_is_no_input():
    for spec in (FORWARD, BACKWARD):
        made = bench(spec)
        for name in {*made._inputs[1]} - {*read_by(spec)}:
            made._inputs[1][name].zero_()
        made._require_untouched_inputs(spec)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 5, 9, 4, 2), (2, 33, 17, 3, 3), (1, 70, 40, 2, 1)])
def test_a_backward_is_timed_on_its_own_output_and_lse(sizes, causal, monkeypatch):
    """By the float64 reference; in several chunks of rows, some of which see no key."""
    monkeypatch.setattr("fa2gen.tuning.inputs._SCORES", 256)
    problem = Problem(*sizes)
    spec = KernelSpec("bwd", head_dim=16, causal=causal, gqa_ratio=problem.gqa_ratio)
    tensors = make_tensors(spec, problem, torch.device("cpu"))
    q, k, v, o, lse = (tensors[name] for name in ("q", "k", "v", "o", "lse"))
    expected, expected_lse = attention_forward(q, k, v, causal=causal)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(o.double(), expected, rtol=2**-8, atol=1e-5)
    assert torch.isfinite(tensors["dout"]).all()


def test_too_little_memory_is_said_clearly(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 << 20, 80 << 30))
    made = bench()
    made._require_memory(90 << 20, "the buffer")
    with pytest.raises(DeviceUnfit, match="device 3 has 90 MiB of free memory, less than the 100 MiB of the buffer"):
        made._require_memory(100 << 20, "the buffer")
