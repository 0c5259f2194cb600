"""Sessions with fake compiler, gate and device: what is tried, proved, saved and reported."""

from __future__ import annotations

import pytest

from fa2gen.constraints import default_config
from fa2gen.driver import DeviceInfo
from fa2gen.errors import ArgumentError, LaunchError, TableError
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tables import load_table, save_entries, table_path
from fa2gen.tuning.defaults import MEASURED_TRIALS
from fa2gen.tuning.session import TuneRequest, default_requests, tune
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
    options = {"families": ("sm80",), **options}
    return tune(requests or [request_for()], get_gpu(gpu), out=tmp_path / "tables", tools=rooms.tools(), **options)


def saved(tmp_path, gpu="h200"):
    table = load_table(table_path(tmp_path / "tables", gpu, "fwd"))
    return {} if table is None else {(row.spec, row.bucket): row for row in table.entries}


def test_default_requests():
    requests = default_requests(128)
    assert len(requests) == len(set(requests)) == 2 * (6 + 3)
    assert {request.spec for request in requests} == {
        KernelSpec(causal=causal, gqa_ratio=ratio) for causal in (False, True) for ratio in (1, 8)
    }
    single = [r.problem for r in requests if r.spec == KernelSpec()]
    assert [(p.batch, p.seqlen_q, p.num_heads_q) for p in single] == [
        (32, 512, 16), (16, 1024, 16), (8, 2048, 16), (4, 4096, 16), (2, 8192, 16), (1, 16384, 16),
    ]  # fmt: skip
    grouped = [r.problem for r in requests if r.spec == KernelSpec(gqa_ratio=8)]
    assert grouped == [Problem(16, 1024, 1024, 16, 2), Problem(2, 8192, 8192, 16, 2), Problem(64, 1, 4096, 16, 2)]
    # Each stands for a size class of its own.
    assert len({(r.spec, r.problem.bucket(132)) for r in requests}) == len(requests)
    few = default_requests(64, dtypes=("fp16",), gqa_ratios=(8,), sizes=[(512, 512), (1, 8192)])
    assert [(r.problem.seqlen_q, r.problem.seqlen_k) for r in few] == 2 * [(512, 512), (1, 8192)]
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


def test_no_trials_means_the_default_alone(rooms, h200, tmp_path):
    report = run(rooms, tmp_path, gpu="a100", trials=0)
    assert [config for _, config in rooms.compiled] == [DEFAULT]
    assert report.entries[0].config == DEFAULT
    report = run(h200, tmp_path, trials=0)
    assert h200.worker.measured == [DEFAULT]
    assert (report.entries[0].config, report.measured) == (DEFAULT, True)


def test_timeout_ends_the_session(rooms, h200, tmp_path):
    report = run(rooms, tmp_path, gpu="a100", timeout=1e-9)
    assert report.interrupted
    assert len(rooms.compiled) == 1
    report = run(h200, tmp_path, timeout=1e-9)
    assert report.interrupted
    assert h200.worker.measured == []


def test_a_table_that_cannot_be_written_is_an_error(rooms, tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a100").write_text("in the way")
    with pytest.raises(TableError, match="cannot be written"):
        run(rooms, tmp_path, gpu="a100")


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
    assert len(h200.worker.measured) == MEASURED_TRIALS + 1
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

    def timed_in(trials=MEASURED_TRIALS, **options):
        h200.worker.measured.clear()
        report = run(h200, tmp_path, trials=trials, **options)
        assert len(report.entries) == 1
        return h200.worker.measured

    assert timed_in() == first
    assert len(timed_in(trials=MEASURED_TRIALS + 4)) == len(first) + 3
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
        if config.pipeline == "ring":
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
    assert (winner.block_n != 96, winner.num_stages < 3, winner.pipeline) == (True, True, "barrier")
    assert winner.softmax == "guarded"


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


def test_equal_code_that_crashed_is_not_run_again(h200, tmp_path, monkeypatch):
    monkeypatch.setattr("fa2gen.tuning.measured.code_digest", lambda kernel: "the same")

    def crash(config):
        raise TrialFailure("timeout", "no answer")

    h200.milliseconds = crash
    report = run(h200, tmp_path, trials=5)
    assert len(h200.worker.measured) == 1
    assert [failure.outcome for failure in report.failures] == ["timeout"] * 6
    assert report.entries == ()


def test_a_hopeless_config_is_compared_with_the_best_so_far(h200, tmp_path):
    """The process stops after a first look at what is clearly slower (``measure.HOPELESS``)."""
    call, best = h200.worker.call, []

    def watch(operation, payload=None, *, timeout):
        if operation == "measure":
            best.append(payload.best_ms)
        return call(operation, payload, timeout=timeout)

    h200.worker.call = watch
    h200.milliseconds = lambda config: 5.0 - 0.1 * len(h200.worker.measured)
    run(h200, tmp_path, trials=5)
    assert best[0] == float("inf")
    assert best[1:] == pytest.approx([4.9, 4.8, 4.7, 4.6, 4.5])
    # An earlier session's best counts from the start.
    best.clear()
    run(h200, tmp_path, trials=5)
    assert best[0] == pytest.approx(4.4)


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
