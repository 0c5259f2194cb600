"""The measuring process: answers, typed failures, crashes, hangs; always ready for the next trial."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fa2gen.tuning.worker import DeviceUnfit, TrialFailure, Worker, _frame

HANDLER = """
import os, signal, sys, time
from fa2gen.tuning.worker import DeviceUnfit, TrialFailure

def make(greeting="hello", slow_start=0):
    time.sleep(slow_start)
    state = {"calls": 0}
    def handle(operation, payload):
        state["calls"] += 1
        if operation == "echo":
            print("noise on standard output")
            return greeting, payload, state["calls"], os.getpid()
        if operation == "segfault":
            sys.stderr.write("about to fall")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
        if operation == "exit":
            os._exit(3)
        if operation == "hang":
            time.sleep(600)
        if operation == "unfit":
            raise DeviceUnfit("too little memory")
        if operation == "failure":
            raise TrialFailure("wrong", "row 3", fatal=payload)
        raise RuntimeError("a bug")
    return handle

def broken():
    raise ImportError("no torch here")

def unfit():
    raise DeviceUnfit("device 0 has 3 MiB of free memory")
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "handler_of_test.py").write_text(HANDLER)
    workers = []

    def start(factory="make", **options):
        workers.append(Worker(f"handler_of_test:{factory}", options, env={"PYTHONPATH": str(tmp_path)}))
        return workers[-1]

    yield start
    for made in workers:
        made.stop()


def test_answers_and_keeps_its_state(worker):
    one = worker(greeting="good day")
    # Larger than any pipe's buffer.
    payload = os.urandom(3_000_000)
    greeting, echoed, calls, pid = one.call("echo", payload, timeout=60)
    assert (greeting, echoed, calls) == ("good day", payload, 1)
    assert one.call("echo", 2, timeout=60)[2:] == (2, pid)
    assert one.starts == 1


def test_typed_failures_keep_the_process(worker):
    one = worker()
    with pytest.raises(TrialFailure, match="row 3") as caught:
        one.call("failure", False, timeout=60)
    assert (caught.value.outcome, caught.value.fatal) == ("wrong", False)
    assert one.call("echo", timeout=60)[2] == 2
    assert one.starts == 1


@pytest.mark.parametrize("operation", ["failure", "bug"])
def test_after_a_fatal_failure_or_a_bug_the_process_is_replaced(worker, operation):
    one = worker()
    with pytest.raises(TrialFailure) as caught:
        one.call(operation, True, timeout=60)
    assert caught.value.fatal
    assert one.call("echo", timeout=60)[2] == 1
    assert one.starts == 2


def test_a_crash_is_contained_and_quoted(worker):
    one = worker()
    with pytest.raises(TrialFailure, match=r"killed by SIGSEGV.*about to fall") as caught:
        one.call("segfault", timeout=60)
    assert caught.value.outcome == "launch_failed"
    with pytest.raises(TrialFailure, match="exit code 3"):
        one.call("exit", timeout=60)
    assert one.call("echo", timeout=60)[2] == 1
    assert one.starts == 3


def test_a_hang_is_killed_by_the_watchdog(worker):
    one = worker()
    pid = one.call("echo", timeout=60)[3]
    start = time.monotonic()
    with pytest.raises(TrialFailure, match="no answer within") as caught:
        one.call("hang", timeout=0.5)
    assert caught.value.outcome == "timeout"
    assert time.monotonic() - start < 5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert one.call("echo", timeout=60)[2] == 1


def test_a_start_that_hangs_does_not_block_a_large_request(worker):
    with pytest.raises(TrialFailure, match="no answer"):
        worker(slow_start=600).call("echo", bytes(1_000_000), timeout=1.5)


def test_a_start_that_fails_says_why(worker):
    with pytest.raises(TrialFailure, match="no torch here"):
        worker("broken").call("echo", timeout=60)


def test_an_interrupted_call_leaves_no_stale_answer(worker):
    one = worker()
    one.call("echo", timeout=60)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            one.call("hang", timeout=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert one.call("echo", "fresh", timeout=60)[1] == "fresh"


def test_the_child_dies_with_its_parent(tmp_path):
    (tmp_path / "handler_of_test.py").write_text(HANDLER)
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        one = Worker("handler_of_test:make", env={"PYTHONPATH": str(tmp_path)})
        os.write(write, str(one.call("echo", timeout=60)[3]).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    pid = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    for _ in range(100):
        if not _alive(pid):
            return
        time.sleep(0.05)
    pytest.fail("the measuring process outlived its parent")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_whose_parent_went_before_it_started_ends(tmp_path):
    """It has asked for no signal yet, and its first request may already lie in the pipe."""
    (tmp_path / "handler_of_test.py").write_text(HANDLER)
    frames = b"".join(_frame(value) for value in (("handler_of_test:make", {}), ("hang", None)))
    child = subprocess.run(
        [sys.executable, "-c", f"from fa2gen.tuning.worker import serve; serve({os.getpid() + 1})"],
        input=frames,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        timeout=60,
    )
    assert (child.returncode, child.stdout) == (0, b"")


def test_a_hung_child_dies_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "handler_of_test.py").write_text(HANDLER)
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            one = Worker("handler_of_test:make", env={"PYTHONPATH": str(tmp_path)})
            os.write(write, str(one.call("echo", timeout=60)[3]).encode())
            one.call("hang", timeout=600)
        finally:
            os._exit(1)
    pid = int(os.read(read, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.close(read)
    os.close(write)
    end = time.monotonic() + 10
    while _alive(pid):
        assert time.monotonic() < end, "the measuring process outlived its parent"
        time.sleep(0.02)


def test_a_device_that_is_unfit_is_an_error_of_its_own(worker):
    one = worker()
    with pytest.raises(DeviceUnfit, match="too little memory"):
        one.call("unfit", timeout=60)
    assert one.call("echo", timeout=60)[2] == 1
    with pytest.raises(DeviceUnfit, match="3 MiB of free memory"):
        worker("unfit").call("echo", timeout=60)


def test_another_thread_can_end_a_call(worker):
    one = worker()
    one.call("echo", timeout=60)
    timer = threading.Timer(0.3, one.kill)
    timer.start()
    start = time.monotonic()
    with pytest.raises(TrialFailure, match="killed by SIGKILL"):
        one.call("hang", timeout=60)
    assert time.monotonic() - start < 10
    timer.join()
    assert one.call("echo", timeout=60)[2] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="sessions of processes")
def test_ctrl_c_does_not_reach_the_child(worker):
    one = worker()
    pid = one.call("echo", timeout=60)[3]
    assert os.getsid(pid) == pid
