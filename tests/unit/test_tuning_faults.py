"""Tuning sessions in which things go wrong at random: failures of every type, lost devices, Ctrl-C, late compilers."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from concurrent.futures import Future

import pytest

from fa2gen.constraints import default_config
from fa2gen.driver import DeviceInfo
from fa2gen.errors import CompileError, Fa2genError, LaunchError
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import NOISE_BAND, load_table, save_entries, table_path
from fa2gen.tuning.device import MAX_STARTS
from fa2gen.tuning.measured import objective
from fa2gen.tuning.predicted import _harvest
from fa2gen.tuning.report import TuneRequest
from fa2gen.tuning.session import tune
from fa2gen.tuning.space import legal_space
from fa2gen.tuning.study import OUTCOMES, TuningStudy
from fa2gen.tuning.worker import TrialFailure
from tests.tuning_fakes import FakeRooms, entry, request_for

H200 = get_gpu("h200")
DEVICE = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 1980.0, (13, 0), "580.95")
SPEC = KernelSpec()
DEFAULT = default_config(SPEC)
REQUEST = request_for(SPEC, 4096)
OTHER = request_for(SPEC, 512)
BUCKET = REQUEST.problem.bucket(132)


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))


def run(rooms, tmp_path, requests=(REQUEST,), **options):
    return tune(
        list(requests),
        H200,
        out=tmp_path / "tables",
        tools=rooms.tools(),
        **{"trials": 8, "families": ("sm80",), **options},
    )


def rows(tmp_path):
    table = load_table(table_path(tmp_path / "tables", "h200", "fwd"))
    return {} if table is None else {row.key: row for row in table.entries}


def study_of(request, rooms):
    return TuningStudy(
        H200,
        request.spec,
        request.problem.bucket(132),
        template_hash="t",
        space=legal_space(request.spec, H200),
        objective=objective(request.problem, rooms.tools()),
    )


class Chaos:
    """Seeded trouble. What a config does is fixed (a time, or a failure that it always has); when Ctrl-C and the loss
    of a device come is drawn on the way.
    """

    def __init__(self, seed, devices):
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.seed, self.lost, self.interrupts = seed, set(), self.random.choice((0, 0, 1, 1, 2))
        self.lose = self.random.random() < 0.3
        self.rooms = FakeRooms(
            device=DEVICE, count=devices, refused=lambda config: self.fate(config) == "compile_failed"
        )
        self.rooms.wrong = lambda config: self.fate(config) == "wrong"
        self.rooms.milliseconds = self.time
        workers = self.rooms.workers or [self.rooms.worker]
        self.workers = workers
        for index, worker in enumerate(workers):
            worker.call = self.watched(worker, index)

    def of(self, config):
        return random.Random(f"{self.seed} {config.slug()}")

    def fate(self, config):
        """Its failure, or None."""
        draw = self.of(config).random()
        shares = (("compile_failed", 0.1), ("launch_failed", 0.2), ("timeout", 0.25), ("wrong", 0.4))
        return next((outcome for outcome, share in shares if draw < share), None)

    def true_time(self, config):
        return 1.0 + round(self.of(config).uniform(0, 1), 2)

    def time(self, config):
        fate = self.fate(config)
        if fate in ("launch_failed", "timeout"):
            raise TrialFailure(fate, f"{fate} of {config.slug()}", fatal=fate == "launch_failed")
        return self.true_time(config)

    def watched(self, worker, index):
        original = worker.call

        def call(operation, payload=None, *, timeout):
            with self.lock:
                draw = self.random.random()
                if self.lose and draw < 0.02:
                    self.lost.add(index)
                interrupt = draw > 0.95 and self.interrupts > 0
                self.interrupts -= interrupt
            if index in self.lost:
                raise TrialFailure("launch_failed", "the GPU has fallen off the bus", fatal=True)
            if interrupt:
                raise KeyboardInterrupt
            return original(operation, payload, timeout=timeout)

        return call


@pytest.mark.parametrize("seed", range(16))
def test_random_trouble(seed, tmp_path):
    chaos = Chaos(seed, devices=1 + seed % 2)
    requests = [REQUEST, OTHER][: 1 + seed % 3]
    if seed % 4 == 3:
        # Something to defend, fast or hopeless.
        old = sorted(legal_space(SPEC, H200).configs, key=FwdConfig.slug)[seed]
        save_entries(H200, [bucketed(entry(SPEC, REQUEST.problem, kind="measured", ms=1.2, **old.canonical()))],
                     root=tmp_path / "tables")  # fmt: skip
    before, threads = rows(tmp_path), set(threading.enumerate())
    sessions = []
    for trials in (6, 0, 10):
        try:
            sessions.append(run(chaos.rooms, tmp_path, requests, trials=trials))
        except LaunchError:
            assert chaos.lost >= set(range(min(len(chaos.workers), len(requests))))
        assert not any(worker.running for worker in chaos.workers)
        chaos.lost.clear()
    assert not {thread for thread in threading.enumerate() if thread.name.startswith("fa2gen")} - threads

    table = rows(tmp_path)
    reported = {failure.config: failure for report in sessions for failure in report.failures}
    assert all(chaos.fate(config) == failure.outcome for config, failure in reported.items())
    for request in requests:
        key = request.spec, request.problem.bucket(132)
        with study_of(request, chaos.rooms) as study:
            times, failures = study.times(), study.failures()
        for config, (outcome, reason) in failures.items():
            assert outcome in OUTCOMES
            assert reason
            if outcome != "infeasible":
                assert chaos.fate(config) == outcome
        assert all(ms == chaos.true_time(config) for config, ms in times.items())
        if key not in table or table[key] == before.get(key):
            continue
        kept = table[key]
        assert chaos.fate(kept.config) is None, "saved without a proof"
        assert kept.config in {config for worker in chaos.workers for config in worker.gated}
        assert kept.measurement.ms == chaos.true_time(kept.config)
        assert kept.provenance.feasible <= kept.provenance.trials
        if not any(report.interrupted for report in sessions) and len(sessions) == 3:
            right = [ms for config, ms in times.items() if chaos.fate(config) is None]
            assert kept.measurement.ms * (1 - NOISE_BAND) <= min(right) + 1e-9, "a faster right one is known"


def bucketed(row):
    return dataclasses.replace(row, bucket=BUCKET)


def test_every_reported_failure_is_in_a_study(tmp_path):
    chaos = Chaos(5, devices=1)
    chaos.interrupts, chaos.lose = 0, False
    report = run(chaos.rooms, tmp_path, trials=30)
    with study_of(REQUEST, chaos.rooms) as study:
        kept = {config: row[0] for config, row in study.failures().items() if row[0] != "infeasible"}
    assert {failure.config: failure.outcome for failure in report.failures} == kept
    assert {*kept.values()} >= {"compile_failed", "launch_failed", "wrong"}
    # Counted once each, and only this bucket's.
    assert report.entries[0].provenance.trials == 30 + 1
    assert report.entries[0].provenance.feasible == 31 - len(kept)


def test_failures_of_another_bucket_are_not_counted(tmp_path):
    chaos = Chaos(5, devices=1)
    chaos.interrupts, chaos.lose = 0, False
    report = run(chaos.rooms, tmp_path, [REQUEST, OTHER], trials=12)
    assert [row.provenance.trials for row in report.entries] == [13, 13]


def test_times_of_another_problem_of_the_bucket_do_not_count(tmp_path):
    """As many tokens of shorter sequences are less work: 1.0 ms there says nothing of 2.0 ms here."""
    short = TuneRequest(SPEC, Problem(7, 2100, 2100, 16, 16))
    assert short.problem.bucket(132) == BUCKET
    rooms = FakeRooms(device=DEVICE)
    run(rooms, tmp_path, [short], trials=10)
    rooms.milliseconds = lambda config: 2.0 if config.num_stages == 2 else 2.2
    rooms.worker.measured.clear()
    report = tune([REQUEST], H200, out=tmp_path / "elsewhere", tools=rooms.tools(), trials=10, families=("sm80",))
    assert len(rooms.worker.measured) == 11, "it has trials of its own"
    assert report.entries[0].measurement.ms == 2.0
    assert report.entries[0].measurement.problem == REQUEST.problem


def test_an_incumbent_that_cannot_run_any_more_gives_way(tmp_path):
    """By the noise band alone the table would keep a config that crashes today."""
    old = FwdConfig(block_m=64, block_n=64, step_n=32, num_warps=4, num_stages=3)
    save_entries(
        H200,
        [bucketed(entry(SPEC, REQUEST.problem, kind="measured", ms=1.0, **old.canonical()))],
        root=tmp_path / "tables",
    )
    rooms = FakeRooms(device=DEVICE)

    def crash(config):
        if config == old:
            raise TrialFailure("launch_failed", "an illegal memory access", fatal=True)
        return 1.0

    rooms.milliseconds = crash
    report = run(rooms, tmp_path)
    assert rows(tmp_path)[SPEC, BUCKET, "sm80"].config == report.entries[0].config != old
    assert report.superseded == 0


def test_a_wrong_verdict_on_a_known_time_is_kept(tmp_path):
    """The default was timed yesterday; today it is seen to write to its inputs."""
    rooms = FakeRooms(device=DEVICE)
    run(rooms, tmp_path, trials=2)

    def caught(config):
        if config == DEFAULT:
            raise TrialFailure("wrong", "the kernel changed an input while it was timed")
        return 1.0

    rooms.milliseconds = caught
    rooms.worker.gated.clear()
    run(rooms, tmp_path, trials=2)
    with study_of(REQUEST, rooms) as study:
        assert study.failures()[DEFAULT] == ("wrong", "the kernel changed an input while it was timed")
    assert DEFAULT not in rooms.worker.gated, "known already"


@pytest.mark.parametrize("where", ["compile", "measure"])
def test_the_timeout_is_kept_inside_a_batch(tmp_path, where):
    """What must be known to save anything is finished, and no more."""
    rooms = FakeRooms(device=DEVICE)
    if where == "compile":
        rooms.on_compiled = lambda index: time.sleep(0.15)
    else:
        rooms.milliseconds = lambda config: time.sleep(0.15) or 1.0
    report = run(rooms, tmp_path, trials=30, timeout=0.4)
    assert report.interrupted
    assert 1 <= len(rooms.worker.measured) <= 5
    assert len(rooms.compiled) <= (6 if where == "compile" else 40)
    assert len(report.entries) == 1
    with study_of(REQUEST, rooms) as study:
        assert not study._running(), "given back"


def test_a_request_that_a_lost_device_gave_back_goes_on_with_its_study(tmp_path):
    rooms = FakeRooms(device=DEVICE, count=2)
    first = rooms.workers[0]
    original, starts = first.call, []

    def dies(operation, payload=None, *, timeout):
        if starts or (operation == "measure" and len(first.measured) == 5):
            starts.append(operation)
            raise TrialFailure("launch_failed", "the GPU has fallen off the bus", fatal=True)
        return original(operation, payload, timeout=timeout)

    first.call = dies
    timed = []
    for worker in rooms.workers:

        def note(operation, payload=None, *, timeout, call=worker.call):
            reply = call(operation, payload, timeout=timeout)
            if operation == "measure":
                timed.append((payload.problem, payload.config))
                # Both work until the first is lost.
                time.sleep(0.02)
            return reply

        worker.call = note
    run(rooms, tmp_path, [REQUEST, OTHER], trials=12, resume=False)
    assert len(starts) > MAX_STARTS
    assert set(rows(tmp_path)) == {(r.spec, r.problem.bucket(132), "sm80") for r in (REQUEST, OTHER)}
    # The default and the best of the stored times, which would win, but not all five.
    assert len({trial for trial in timed if timed.count(trial) > 1}) <= 2


@pytest.mark.parametrize("during", ["start", "import"])
def test_ctrl_c_before_the_first_request_leaves_no_process(tmp_path, monkeypatch, during):
    rooms = FakeRooms(device=DEVICE)
    worker = rooms.worker

    def interrupt(*arguments, **options):
        worker.running = True
        raise KeyboardInterrupt

    if during == "start":
        worker.start = interrupt
    else:
        monkeypatch.setattr("fa2gen.tuning.devices.tune_measured", interrupt)
    assert run(rooms, tmp_path).interrupted
    assert not worker.running


def test_no_requests_is_an_error(tmp_path):
    with pytest.raises(Fa2genError, match="requests must hold at least one"):
        run(FakeRooms(device=DEVICE), tmp_path, [])


def test_a_compiler_that_fails_in_a_proof_costs_that_config_alone(tmp_path):
    rooms = FakeRooms()
    tools = rooms.tools()
    broken: list[FwdConfig] = []

    def prove(spec, config):
        if config != default_config(spec) and (not broken or config in broken):
            broken.append(config)
            raise CompileError("g++ failed", "internal compiler error")
        return "passed"

    object.__setattr__(tools, "prove", prove)
    report = tune([REQUEST], H200, out=tmp_path / "tables", tools=tools, measured=False, trials=8, families=("sm80",))
    assert [(f.config, f.outcome) for f in report.failures] == [(broken[0], "compile_failed")]
    assert report.entries[0].config not in broken


@pytest.mark.parametrize("measured", [True, False])
def test_the_compilers_words_are_reported_once(measured, tmp_path):
    rooms = FakeRooms(device=DEVICE)
    tools = rooms.tools()

    def compile_many(jobs, on_done):
        for index in range(len(jobs)):
            on_done(index, CompileError("nvcc 13.0.88 failed: fatal : boom", "nvcc: line 1\nfatal : boom\n"))

    object.__setattr__(tools, "compile_many", compile_many)
    report = tune(
        [REQUEST], H200, out=tmp_path / "tables", tools=tools, measured=measured, trials=2, families=("sm80",)
    )
    assert {failure.reason for failure in report.failures} == {"nvcc 13.0.88 failed: fatal : boom\nnvcc: line 1"}


def test_what_did_not_compile_is_tried_again_in_the_next_session(tmp_path):
    """The compiler may have been killed for memory; what the gate or the GPU said of a config stands."""
    rooms = FakeRooms(device=DEVICE)
    asked = []
    with study_of(REQUEST, rooms) as study:
        for outcome in ("compile_failed", "compile_failed", "compile_failed", "wrong", "timeout"):
            asked.append(study.ask())
            study.fail(asked[-1], outcome, "why")
            assert not study.enqueue(asked[-1].config), "once a session is enough"
        study.abandon(left := study.ask())
        study.enqueue(left.config)  # this trial waits for the next session
    with study_of(REQUEST, rooms) as study:
        assert len([row for row in study.failures().values() if row[0] == "compile_failed"]) == 3, "still on record"
        assert [study.enqueue(trial.config) for trial in asked] == [True, True, True, False, False]
        again = [study.ask() for _ in range(4)]
        assert [trial.config for trial in again] == [left.config, *(trial.config for trial in asked[:3])]
        study.fail(again[0], "compile_failed", "its trial is of the session before")
        study.fail(again[1], "compile_failed", "once more")
        study.complete(again[2], 1.0)
        study.fail(again[3], "wrong", "row 3")
        assert not any(study.enqueue(trial.config) for trial in again)
        assert study.failures()[asked[0].config] == ("compile_failed", "once more")
    with study_of(REQUEST, rooms) as study:
        assert [study.enqueue(trial.config) for trial in again] == [True, True, False, False]


def test_a_measured_session_times_what_a_broken_compiler_refused(tmp_path):
    rooms = FakeRooms(device=DEVICE)
    rooms.refused = lambda config: True
    assert run(rooms, tmp_path, trials=6).entries == ()
    refused = {config for _, config in rooms.compiled}
    later = FakeRooms(device=DEVICE)
    (found,) = run(later, tmp_path, trials=6).entries
    assert len(refused & set(later.worker.measured)) >= 4, "the model's favourites among them"
    assert found.provenance.trials == found.provenance.feasible == len(later.worker.measured)


def test_an_error_in_one_proof_loses_no_other():
    """A disk that fills up, say: what the others proved is saved before the session ends."""

    saved = []

    class Account:
        def save(self, entries):
            saved.extend(entries)

        def late(self):
            return False

    proofs = {Future(): None, Future(): None}
    first, second = proofs
    first.set_exception(OSError("no space left"))
    second.set_result([entry(SPEC)])
    with pytest.raises(OSError, match="no space left"):
        _harvest(proofs, Account(), wait=True)
    assert saved == [entry(SPEC)]
    assert not proofs, "told once"
