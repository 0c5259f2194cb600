"""Several devices side by side, devices that are lost, and Ctrl-C at every stage, with stand-ins for the GPUs."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import pytest

from fa2gen.driver import DeviceInfo
from fa2gen.errors import ArgumentError, LaunchError
from fa2gen.hardware import get_gpu
from fa2gen.spec import KernelSpec
from fa2gen.tables import load_table, table_path
from fa2gen.tuning import device as device_module
from fa2gen.tuning.device import MeasuringDevice
from fa2gen.tuning.session import tune
from fa2gen.tuning.worker import DeviceUnfit, TrialFailure
from tests.tuning_fakes import FakeRooms, request_for

H200 = get_gpu("h200")
DEVICE = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 1980.0, (13, 0), "580.95")
REQUESTS = [request_for(KernelSpec(causal=causal), seqlen) for causal in (False, True) for seqlen in (512, 4096)]


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def two():
    return FakeRooms(device=DEVICE, count=2)


def run(rooms, tmp_path, requests=REQUESTS, **options):
    return tune(
        requests, H200, out=tmp_path / "tables", tools=rooms.tools(), **{"trials": 2, "families": ("sm80",), **options}
    )


def saved(tmp_path):
    table = load_table(table_path(tmp_path / "tables", "h200", "fwd"))
    return set() if table is None else {row.key for row in table.entries}


def keys(requests=REQUESTS):
    return {(request.spec, request.problem.bucket(132), "sm80") for request in requests}


def gone(*_, **__):
    raise TrialFailure("launch_failed", "no CUDA device", fatal=True)


def test_every_device_takes_part(two, tmp_path):
    together = threading.Barrier(2, timeout=30)
    for worker in two.workers:
        call = worker.call

        def meet(operation, payload=None, *, timeout, call=call, worker=worker):
            if operation == "measure" and not worker.measured:
                # Passes only if both measure at the same time.
                together.wait()
            return call(operation, payload, timeout=timeout)

        worker.call = meet
    events = []
    report = run(two, tmp_path, progress=events.append)
    assert report.devices == (0, 1)
    assert all(worker.measured for worker in two.workers)
    assert saved(tmp_path) == keys()
    assert not any(worker.running for worker in two.workers)
    for stage in ("compile", "measure", "prove", "save"):
        counts = [event.done for event in events if event.stage == stage]
        assert counts == list(range(1, len(counts) + 1))


def test_devices_can_be_chosen(two, tmp_path):
    run(two, tmp_path, devices=[1])
    assert not two.workers[0].measured
    assert saved(tmp_path) == keys()
    two.workers[1].measured.clear()
    # Zero is a device like any other.
    assert run(two, tmp_path, devices=[0]).devices == (0,)
    assert two.workers[0].measured
    assert not two.workers[1].measured


def test_no_more_devices_than_requests(two, tmp_path):
    assert run(two, tmp_path, REQUESTS[:1]).devices == (0,)
    assert not two.workers[1].running


@pytest.mark.parametrize(
    ("devices", "options", "words"),
    [
        ([2], {}, "device 2 does not exist: this machine's GPUs are: 0 NVIDIA H200, 1 NVIDIA H200"),
        ([-1], {}, "device -1 does not exist"),
        ([], {}, "at least one device"),
        ([0], {"measured": False}, "devices are for measuring"),
    ],
)
def test_bad_devices(two, tmp_path, devices, options, words):
    with pytest.raises(ArgumentError, match=words):
        run(two, tmp_path, devices=devices, **options)


def test_a_device_of_another_product_is_refused(two, tmp_path):
    other = dataclasses.replace(DEVICE, index=1, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0), num_sms=108)
    tools = dataclasses.replace(two.tools(), devices=lambda: [DEVICE, other])
    with pytest.raises(ArgumentError, match=r"device 1 is the NVIDIA A100.*not the H200"):
        tune(REQUESTS, H200, out=tmp_path, tools=tools, devices=[1])
    assert tune(REQUESTS[:1], H200, out=tmp_path, tools=tools, trials=0, families=("sm80",)).devices == (0,)


def test_a_lost_device_leaves_its_request_to_the_other(two, tmp_path):
    two.workers[1].call = gone
    report = run(two, tmp_path)
    assert saved(tmp_path) == keys()
    assert not report.failures, "the GPU is to blame, no config"
    assert two.workers[0].measured


def test_a_device_lost_at_the_very_end_is_replaced_by_one_that_was_done(two, tmp_path):
    slow = two.workers[1]
    done = threading.Event()

    def call(operation, payload=None, *, timeout):
        # The other has finished everything else by now.
        done.wait(timeout=60)
        gone()

    slow.call = call

    def progress(event):
        if event.stage == "save" and event.done == len(REQUESTS) - 1:
            threading.Timer(0.3, done.set).start()

    run(two, tmp_path, progress=progress)
    assert saved(tmp_path) == keys()


def test_no_device_left_is_an_error_that_keeps_what_was_saved(two, tmp_path):
    both = []

    def progress(event):
        if event.stage == "save":
            both.append(event)
            for worker in two.workers:
                worker.call = gone

    with pytest.raises(LaunchError, match=r"3 measuring processes in a row.*no CUDA device; \d entries had been saved"):
        run(two, tmp_path, progress=progress)
    assert both
    assert saved(tmp_path) < keys()
    assert not any(worker.running for worker in two.workers)


def test_too_little_memory_is_an_error_of_its_own(tmp_path):
    one = FakeRooms(device=DEVICE)

    def call(operation, payload=None, *, timeout):
        if operation == "measure":
            raise DeviceUnfit("device 0 has 90 MiB of free memory")

    one.worker.call = call
    with pytest.raises(DeviceUnfit, match="90 MiB of free memory; 0 entries"):
        run(one, tmp_path)
    # No config was blamed: the next session times them all.
    again = FakeRooms(device=DEVICE)
    assert not run(again, tmp_path).failures
    assert len(again.worker.measured) == 4 * 3


class Process:
    """A measuring process that follows a script: a list of (operation, answer or exception)."""

    def __init__(self, *script):
        self.script, self.stops = list(script), 0

    def start(self): ...

    def stop(self):
        self.stops += 1

    kill = stop

    def call(self, operation, payload=None, *, timeout):
        expected, answer = self.script.pop(0)
        assert operation == expected
        if isinstance(answer, BaseException):
            raise answer
        return answer


HANG, CRASH = TrialFailure("timeout", "no answer"), TrialFailure("launch_failed", "illegal address", fatal=True)


@pytest.mark.parametrize("trouble", [HANG, CRASH])
def test_a_gate_that_does_not_end_is_tried_in_a_fresh_process(trouble):
    process = Process(("ready", None), ("gate", trouble), ("ready", None), ("gate", (True, "passed")))
    verdict = MeasuringDevice(0, "", process).gate(None)
    assert (verdict.outcome, verdict.text, process.stops) == (None, "GPU: passed", 1)
    process = Process(("ready", None), ("gate", trouble), ("ready", None), ("gate", trouble), ("ready", None))
    verdict = MeasuringDevice(0, "", process).gate(None)
    assert verdict.outcome == trouble.outcome
    assert str(trouble) in verdict.text
    assert process.script == []


def test_a_wrong_kernel_is_not_tried_twice():
    process = Process(("ready", None), ("gate", (False, "row 3")))
    assert MeasuringDevice(0, "", process).gate(None).outcome == "wrong"


def test_a_crash_is_blamed_on_the_kernel_only_while_the_gpu_works():
    process = Process(("ready", None), ("measure", CRASH), ("ready", None))
    with pytest.raises(TrialFailure, match="illegal address"):
        MeasuringDevice(0, "", process).measure(None)
    starts = [("ready", CRASH)] * device_module.MAX_STARTS
    process = Process(("ready", None), ("measure", CRASH), *starts)
    with pytest.raises(device_module.DeviceLost, match="device 0 cannot be used"):
        MeasuringDevice(0, "", process).measure(None)
    # A start that fails once is no loss.
    process = Process(("ready", CRASH), ("ready", None), ("measure", "time"))
    assert MeasuringDevice(0, "", process).measure(None) == "time"


def test_a_refused_launch_costs_no_new_process():
    refused = TrialFailure("launch_failed", "too many resources", fatal=False)
    process = Process(("ready", None), ("measure", refused), ("ready", None), ("measure", "time"))
    device = MeasuringDevice(0, "", process)
    with pytest.raises(TrialFailure, match="too many resources"):
        device.measure(None)
    assert device.measure(None) == "time"
    assert process.stops == 0


def interrupt_at(rooms, stage, number, times=1):
    """A progress callback: Ctrl-C to this process, ``times`` in a row, at the given step of a stage."""
    sent = []

    def progress(event):
        if event.stage == stage and number <= event.done and len(sent) < times:
            sent.append(event)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    return progress


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("stage", "number"), [("compile", 2), ("measure", 2), ("prove", 1), ("save", 1)])
@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_at_every_stage_leaves_a_good_table(tmp_path, count, stage, number, times):
    rooms = FakeRooms(device=DEVICE, count=count)
    report = run(rooms, tmp_path, progress=interrupt_at(rooms, stage, number, times))
    assert report.interrupted
    assert {row.key for row in report.entries} == saved(tmp_path)
    assert saved(tmp_path) < keys()
    if times == 1 and stage != "compile":
        assert saved(tmp_path), "what was timed is proved and saved"
    for worker in [rooms.worker, *rooms.workers]:
        assert not worker.running
    # The studies are fit to go on with, and no config took the blame.
    again = run(FakeRooms(device=DEVICE, count=count), tmp_path)
    assert saved(tmp_path) == keys()
    assert again.failures == report.failures == ()


def test_ctrl_c_twice_ends_a_trial_that_hangs_on_one_of_two_devices(two, tmp_path):
    killed = threading.Event()
    two.workers[1].kill = killed.set

    def call(operation, payload=None, *, timeout):
        if operation == "measure":
            assert killed.wait(60), "the hung process was not ended"
            raise CRASH

    two.workers[1].call = call

    def interrupt():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    timer = threading.Timer(1.0, interrupt)
    timer.start()
    start = time.monotonic()
    report = run(two, tmp_path)
    timer.join()
    assert report.interrupted
    assert time.monotonic() - start < 20
    assert report.failures == ()
    assert {row.key for row in report.entries} == saved(tmp_path)
