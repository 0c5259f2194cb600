"""Sessions with fake compiler, gate and device: what is tried, proved, saved and reported."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest

from fa2gen.constraints import default_config
from fa2gen.driver import DeviceInfo
from fa2gen.errors import ArgumentError, LaunchError, TableError, ToolchainError
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tables import load_table, save_entries, table_path
from fa2gen.tuning.model import MODEL_VERSION
from fa2gen.tuning.session import TuneRequest, default_requests, tune
from fa2gen.tuning.space import legal_space
from fa2gen.tuning.study import TuningStudy
from fa2gen.tuning.worker import TrialFailure
from tests.tuning_fakes import FakeRooms, ResourceUsage, entry, request_for

H200 = get_gpu("h200")
DEVICE = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 1980.0, (13, 0), "580.95")
SPEC = KernelSpec()
DEFAULT = default_config(SPEC)


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def rooms():
    return FakeRooms()


@pytest.fixture
def h200():
    return FakeRooms(device=DEVICE)


def run(rooms, tmp_path, requests=None, gpu="h200", **options):
    return tune(requests or [request_for()], get_gpu(gpu), out=tmp_path / "tables", tools=rooms.tools(), **options)


def saved(tmp_path, gpu="h200"):
    table = load_table(table_path(tmp_path / "tables", gpu, "fwd"))
    return {} if table is None else {(row.spec, row.bucket): row for row in table.entries}


def test_default_requests():
    requests = default_requests(128)
    assert len(requests) == len(set(requests)) == 8 * 3
    assert {request.spec for request in requests} == {
        KernelSpec(dtype=dtype, causal=causal, gqa_ratio=ratio)
        for dtype in ("fp16", "bf16")
        for causal in (False, True)
        for ratio in (1, 8)
    }
    assert {(r.problem.batch, r.problem.seqlen_q, r.problem.num_heads_q) for r in requests} == {
        (32, 512, 16), (8, 2048, 16), (2, 8192, 16),
    }  # fmt: skip
    for head_dim in range(1, 129):
        for request in default_requests(head_dim):
            assert request.problem.gqa_ratio == request.spec.gqa_ratio


@pytest.mark.parametrize("bad", [Problem(0, 1, 1, 1, 1), Problem(1, 1, 1, 8, 1), Problem(1, 5, 0, 1, 1)])
def test_requests_must_make_sense(bad):
    with pytest.raises(ArgumentError, match="problem"):
        TuneRequest(SPEC, bad)


@pytest.mark.parametrize("options", [{"trials": -1}, {"trials": 1.5}, {"trials": True}, {"timeout": 0}])
def test_bad_arguments(rooms, tmp_path, options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        run(rooms, tmp_path, **options)


def test_predicted_compiles_24_of_each_spec_and_proves_winner_and_default(rooms, tmp_path):
    specs = [KernelSpec(dtype=dtype, causal=causal) for dtype in ("bf16", "fp16") for causal in (False, True)]
    requests = [request_for(spec, seqlen) for spec in specs for seqlen in (512, 2048, 8192)]
    report = run(rooms, tmp_path, requests, "a100")
    assert not report.measured
    assert not report.interrupted
    assert len(report.entries) == len(saved(tmp_path, "a100")) == 12
    for spec in specs:
        tried = [config for compiled, config in rooms.compiled if compiled == spec]
        assert len(set(tried)) == len(tried) >= 24
        assert default_config(spec) in tried
        proved = {config for proven, config in rooms.proved if proven == spec}
        winners = {row.config for row in report.entries if row.spec == spec}
        assert proved == winners | {default_config(spec)}
    for row in report.entries:
        assert (row.measurement.kind, row.measurement.n) == ("predicted", 0)
        assert row.provenance.model_version == MODEL_VERSION
        assert row.provenance.numerics.startswith("emulator: passed")
        assert row.provenance.trials >= 24
    assert (report.compiled, report.cached) == (len(rooms.compiled), 0)
    assert report.paths == (tmp_path / "tables" / "a100" / "fwd.json",)


def test_predicted_times_are_kept_in_a_study_of_their_own(rooms, tmp_path):
    rooms.refused = lambda config: config.block_m == 128
    run(rooms, tmp_path, gpu="a100", trials=40)
    request = request_for()

    def open_study(**options):
        gpu = get_gpu("a100")
        return TuningStudy(
            gpu,
            request.spec,
            request.problem.bucket(gpu.num_sms),
            template_hash="t",
            space=legal_space(request.spec, gpu),
            **options,
        )

    with open_study(objective=f"{MODEL_VERSION}, nvcc 13.0.88") as study:
        times, failures = study.times(), study.failures()
    assert len(times) + len(failures) >= 40
    assert times
    assert {outcome for outcome, _ in failures.values()} == {"compile_failed"}
    with open_study() as study:
        assert not study.times(), "measured and predicted times met"
    # A shorter session still knows what the longer one found; without resume it does not.
    report = run(rooms, tmp_path, gpu="a100", trials=2)
    assert report.entries[0].measurement.ms == min(times.values())
    assert report.entries[0].provenance.trials >= 40
    report = run(rooms, tmp_path, gpu="a100", trials=2, resume=False)
    assert report.entries[0].provenance.trials <= 3


def test_predicted_uses_what_ptxas_says(rooms, tmp_path):
    best = run(rooms, tmp_path, gpu="a100").entries[0].config
    spilling = FakeRooms(resources=lambda c: ResourceUsage(255, 4000 * (c == best), 4000 * (c == best), 0, 0, 1))
    report = run(spilling, tmp_path, gpu="a100")
    assert report.entries[0].config != best
    assert [(f.config, f.outcome) for f in report.failures] == [(best, "spilled")]
    arrays = FakeRooms(resources=lambda c: ResourceUsage(200, 0, 0, 384 * (c == best), 0, 1))
    report = run(arrays, tmp_path, gpu="a100")
    assert report.entries[0].config != best
    assert "not unrolled" in report.failures[0].reason


def test_predicted_never_saves_a_config_that_failed_the_gate(rooms, tmp_path):
    best = run(rooms, tmp_path, gpu="a100").entries[0].config
    wrong = FakeRooms(wrong=lambda config: config == best)
    report = run(wrong, tmp_path / "second", gpu="a100")
    assert report.entries[0].config != best
    assert (best, "wrong") in [(f.config, f.outcome) for f in report.failures]
    all_wrong = FakeRooms(wrong=lambda config: True)
    report = run(all_wrong, tmp_path / "third", gpu="a100")
    assert report.entries == ()
    assert saved(tmp_path / "third", "a100") == {}
    assert len(all_wrong.proved) <= 4


def test_predicted_reports_refused_kernels(rooms, tmp_path):
    rooms.refused = lambda config: config.softmax == "guarded"
    report = run(rooms, tmp_path, gpu="a100")
    assert report.entries[0].config.softmax == "online"
    assert {f.outcome for f in report.failures} == {"compile_failed"}
    assert "line 3" in report.failures[0].reason


def test_no_trials_means_the_default_alone(rooms, h200, tmp_path):
    report = run(rooms, tmp_path, gpu="a100", trials=0)
    assert [config for _, config in rooms.compiled] == [DEFAULT]
    assert report.entries[0].config == DEFAULT
    report = run(h200, tmp_path, trials=0)
    assert h200.worker.measured == [DEFAULT]
    assert (report.entries[0].config, report.measured) == (DEFAULT, True)


def test_ctrl_c_while_compiling_keeps_what_was_proved(rooms, tmp_path):
    specs = [KernelSpec(), KernelSpec(causal=True), KernelSpec(dtype="fp16")]

    def interrupt(index):
        # Well inside the third spec's 25 configs; proofs of the first two run beside.
        if index >= 55:
            time.sleep(0.05)
        if index == 70:
            raise KeyboardInterrupt

    rooms.on_compiled = interrupt
    report = run(rooms, tmp_path, [request_for(spec) for spec in specs], "a100")
    assert report.interrupted
    assert {row.spec for row in report.entries} == set(specs[:2])
    assert {(row.spec, row.bucket) for row in report.entries} == set(saved(tmp_path, "a100"))


@pytest.mark.parametrize(
    ("stage", "number", "times"), [("compile", 20, 1), ("prove", 1, 2), ("prove", 4, 1), ("save", 1, 1), ("save", 1, 2)]
)
def test_ctrl_c_while_predicting_leaves_a_good_table(rooms, tmp_path, stage, number, times):
    """Proofs that run are waited for and saved, none begins, and no default takes the place of an unproved choice."""
    sent = []

    def progress(event):
        if event.stage == stage and event.done >= number and len(sent) < times:
            sent.append(event)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)

    def prove(spec, config):
        time.sleep(0.05)
        return rooms._prove(spec, config)

    specs = [
        KernelSpec(head_dim=64, dtype=dtype, causal=causal) for dtype in ("bf16", "fp16") for causal in (False, True)
    ]
    requests = [request_for(spec, seqlen) for spec in specs for seqlen in (512, 4096)]
    tools = dataclasses.replace(rooms.tools(), prove=prove)
    options = {"out": tmp_path / "tables", "tools": tools, "trials": 12}
    report = tune(requests, get_gpu("a100"), progress=progress, **options)
    assert report.interrupted
    assert {(row.spec, row.bucket) for row in report.entries} == set(saved(tmp_path, "a100"))
    full = tune(requests, get_gpu("a100"), **options)
    assert len(full.entries) == len(requests)
    found = {row.key: row.config for row in full.entries}
    assert all(found[row.key] == row.config for row in report.entries)


def test_interrupted_at_once(rooms, tmp_path):
    def interrupt(index):
        raise KeyboardInterrupt

    rooms.on_compiled = interrupt
    report = run(rooms, tmp_path, gpu="a100")
    assert report.interrupted
    assert report.entries == ()


def test_timeout_ends_the_session(rooms, h200, tmp_path):
    report = run(rooms, tmp_path, gpu="a100", timeout=1e-9)
    assert report.interrupted
    assert len(rooms.compiled) == 1
    report = run(h200, tmp_path, timeout=1e-9)
    assert report.interrupted
    assert h200.worker.measured == []


def test_no_host_compiler_is_noticed_before_anything_is_compiled(rooms, tmp_path):
    from dataclasses import replace

    def missing():
        raise ToolchainError("no g++")

    tools = replace(rooms.tools(), require_emulator=missing)
    with pytest.raises(ToolchainError, match=r"no g\+\+"):
        tune([request_for()], get_gpu("a100"), out=tmp_path, tools=tools)
    assert rooms.compiled == []


def test_a_table_that_cannot_be_written_is_an_error(rooms, tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a100").write_text("in the way")
    with pytest.raises(TableError, match="cannot be written"):
        run(rooms, tmp_path, gpu="a100")


def test_progress_counts_every_stage(rooms, tmp_path):
    events = []
    run(rooms, tmp_path, gpu="a100", progress=events.append)
    for stage in ("compile", "prove", "save"):
        mine = [event for event in events if event.stage == stage]
        assert [event.done for event in mine] == list(range(1, len(mine) + 1))
        assert mine[-1].total >= mine[-1].done
    assert max(event.total for event in events if event.stage == "compile") == len(rooms.compiled)


def test_which_gpu_is_measured(rooms, h200, tmp_path):
    with pytest.raises(ArgumentError, match="this machine's GPUs are: none"):
        run(rooms, tmp_path, measured=True)
    with pytest.raises(ArgumentError, match="NVIDIA H200"):
        run(h200, tmp_path, gpu="a100", measured=True)
    assert not run(h200, tmp_path, gpu="a100").measured
    assert not run(h200, tmp_path, measured=False).measured
    assert run(h200, tmp_path).measured


def test_measured_saves_the_fastest(h200, tmp_path):
    h200.milliseconds = lambda c: 2.0 if c == DEFAULT else 1.0 + abs(c.block_n - 64) / 64 + 0.1 * (c.num_stages - 1)
    report = run(h200, tmp_path)
    (row,) = report.entries
    assert row.measurement.ms == min(map(h200.milliseconds, h200.worker.measured))
    assert (row.measurement.kind, row.measurement.n, row.provenance.driver) == ("measured", 9, "580.95")
    assert row.measurement.p20 < row.measurement.ms < row.measurement.p80
    assert row.provenance.model_version is None
    assert row.provenance.numerics == "GPU: passed 20 cases"
    assert set(h200.worker.gated) == {DEFAULT, row.config}
    assert h200.worker.measured[0] == DEFAULT
    assert len(h200.worker.measured) == 41
    assert not h200.worker.running


def test_measured_starts_with_the_incumbent(h200, tmp_path):
    incumbent = DEFAULT.__class__(block_m=64, block_n=64, step_n=32, num_stages=3, softmax="guarded")
    row = entry(problem=request_for().problem, kind="measured", **incumbent.canonical())
    row = row.__class__(row.spec, request_for().problem.bucket(132), row.config, row.measurement, row.provenance)
    save_entries(H200, [row], root=tmp_path / "tables")
    run(h200, tmp_path, trials=4)
    assert h200.worker.measured[:2] == [DEFAULT, incumbent]


def test_measured_resumes(h200, tmp_path):
    run(h200, tmp_path)
    winner = saved(tmp_path)[SPEC, request_for().problem.bucket(132)].config
    # The default and what the table holds are timed anew in every session, and count as known configs after the first.
    first = [DEFAULT, winner]

    def timed_in(trials=40, **options):
        h200.worker.measured.clear()
        report = run(h200, tmp_path, trials=trials, **options)
        assert len(report.entries) == 1
        return h200.worker.measured

    assert timed_in() == first
    assert len(timed_in(trials=44)) == len(first) + 44 - 41
    again = timed_in(trials=3, resume=False)
    assert again[:2] == first
    assert len(again) == 5
    # Other templates make other kernels: nothing but the incumbent carries over.
    h200.template = "edited"
    assert len(timed_in(trials=3)) == 5


def test_measured_never_saves_a_config_that_failed_the_gate(h200, tmp_path):
    best = run(h200, tmp_path).entries[0].config
    h200.wrong = lambda config: config == best
    report = run(h200, tmp_path)
    assert report.entries[0].config != best
    assert (best, "wrong") in [(f.config, f.outcome) for f in report.failures]
    # Not in a later session either, though its time is in the study.
    h200.worker.gated.clear()
    assert run(h200, tmp_path).entries[0].config != best
    assert best not in h200.worker.gated
    h200.wrong = lambda config: True
    before = saved(tmp_path)
    assert run(h200, tmp_path).entries == ()
    assert saved(tmp_path) == before


def test_measured_failures_are_typed_and_do_not_stop_the_session(h200, tmp_path):
    def time(config):
        if config.block_n == 32:
            raise TrialFailure("timeout", "hung")
        if config.num_stages == 3:
            raise TrialFailure("launch_failed", "illegal address", fatal=True)
        return 1.0

    h200.milliseconds = time
    h200.refused = lambda config: config.block_n == 96
    h200.resources = lambda config: ResourceUsage(255, 5000 * (config.softmax == "online"), 0, 0, 0, 1)
    report = run(h200, tmp_path)
    assert {f.outcome for f in report.failures} == {"timeout", "launch_failed", "compile_failed", "spilled"}
    winner = report.entries[0].config
    assert (winner.block_n in (64, 128), winner.num_stages < 3, winner.softmax) == (True, True, "guarded")


def test_ctrl_c_while_measuring_proves_and_saves_what_was_timed(h200, tmp_path):
    def time(config):
        if len(h200.worker.measured) == 5:
            raise KeyboardInterrupt
        return 1.0 + len(h200.worker.measured)

    h200.milliseconds = time
    requests = [request_for(seqlen=4096), request_for(seqlen=512)]
    report = run(h200, tmp_path, requests)
    assert report.interrupted
    assert len(report.entries) == 1
    assert set(saved(tmp_path)) == {(SPEC, requests[0].problem.bucket(132))}
    assert not h200.worker.running


def test_a_worker_that_never_starts_is_an_error(h200, tmp_path, monkeypatch):
    def call(operation, payload=None, *, timeout):
        raise TrialFailure("launch_failed", "no torch here", fatal=True)

    h200.worker.call = call
    with pytest.raises(LaunchError, match="no torch here"):
        run(h200, tmp_path)


def test_equal_code_is_timed_once(h200, tmp_path, monkeypatch):
    monkeypatch.setattr("fa2gen.tuning.measured.code_digest", lambda kernel: "the same")
    run(h200, tmp_path)
    assert len(h200.worker.measured) == 1


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_a_table_that_cannot_be_written_stops_the_session_at_once(gpu, h200, tmp_path):
    path = table_path(tmp_path / "tables", gpu, "fwd")
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 99}')
    with pytest.raises(TableError, match="newer fa2gen"):
        run(h200, tmp_path, gpu=gpu)
    assert h200.compiled == []
    assert not h200.worker.running
    assert path.read_text() == '{"schema": 99}'


def test_the_report_counts_predictions_that_gave_way(rooms, tmp_path):
    requests = [request_for(seqlen=seqlen) for seqlen in (512, 2048)]
    measured = entry(SPEC, requests[0].problem, kind="measured")
    save_entries(get_gpu("a100"), [measured], root=tmp_path / "tables")
    report = run(rooms, tmp_path, requests, "a100")
    assert (len(report.entries), report.superseded) == (2, 1)
    assert saved(tmp_path, "a100")[measured.key] == measured
    assert run(rooms, tmp_path / "other", requests, "a100").superseded == 0
