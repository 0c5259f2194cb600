"""Sessions without the GPU, with fake compiler and gate: what is compiled, proved, saved and reported."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest

from fa2gen.constraints import default_config
from fa2gen.errors import ToolchainError
from fa2gen.hardware import get_gpu
from fa2gen.spec import KernelSpec
from fa2gen.tables import load_table, save_entries, table_path
from fa2gen.tuning.model import model_version
from fa2gen.tuning.session import tune
from fa2gen.tuning.space import legal_space
from fa2gen.tuning.study import TuningStudy
from tests.tuning_fakes import FakeRooms, ResourceUsage, entry, request_for

SPEC = KernelSpec()


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def rooms():
    return FakeRooms()


def run(rooms, tmp_path, requests=None, gpu="a100", **options):
    return tune(requests or [request_for()], get_gpu(gpu), out=tmp_path / "tables", tools=rooms.tools(), **options)


def saved(tmp_path, gpu="a100"):
    table = load_table(table_path(tmp_path / "tables", gpu, "fwd"))
    return {} if table is None else {(row.spec, row.bucket): row for row in table.entries}


def test_predicted_compiles_12_of_each_spec_and_proves_winner_and_default(rooms, tmp_path):
    specs = [KernelSpec(dtype=dtype, causal=causal) for dtype in ("bf16", "fp16") for causal in (False, True)]
    requests = [request_for(spec, seqlen) for spec in specs for seqlen in (512, 2048, 8192)]
    report = run(rooms, tmp_path, requests, "a100")
    assert not report.measured
    assert not report.interrupted
    assert len(report.entries) == len(saved(tmp_path, "a100")) == 12
    for spec in specs:
        tried = [config for compiled, config in rooms.compiled if compiled == spec]
        assert len(set(tried)) == len(tried) >= 12
        assert default_config(spec) in tried
        proved = {config for proven, config in rooms.proved if proven == spec}
        winners = {row.config for row in report.entries if row.spec == spec}
        assert proved == winners | {default_config(spec)}
    for row in report.entries:
        assert (row.measurement.kind, row.measurement.n) == ("predicted", 0)
        assert row.provenance.model_version == model_version("fwd", "sm80")
        assert row.provenance.numerics.startswith("emulator: passed")
        assert row.provenance.trials >= 12
    assert (report.compiled, report.cached) == (len(rooms.compiled), 0)
    assert report.paths == (tmp_path / "tables" / "a100" / "fwd.json",)


def test_predicted_times_are_kept_in_a_study_of_their_own(rooms, tmp_path):
    rooms.refused = lambda config: config.proof == "block"
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

    with open_study(objective=f"{model_version('fwd', 'sm80')}, nvcc 13.0.88, {request.problem}") as study:
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


def test_a_compiler_that_broke_once_is_forgotten(rooms, tmp_path):
    """Killed for memory, say: that was no answer, and the next session has one."""
    rooms.refused = lambda config: True
    assert run(rooms, tmp_path, trials=4).entries == ()
    reports = [run(FakeRooms(), tmp_path, trials=4, resume=resume) for resume in (True, False)]
    (again,), (fresh,) = (report.entries for report in reports)
    assert (again.config, again.measurement) == (fresh.config, fresh.measurement)
    assert again.provenance.trials == fresh.provenance.trials == fresh.provenance.feasible


def test_a_default_that_the_gate_refused_once_is_no_candidate(rooms, tmp_path):
    assert run(FakeRooms(wrong=lambda config: True), tmp_path, trials=0).entries == ()
    assert run(rooms, tmp_path, trials=0).entries == ()


def test_predicted_reports_refused_kernels(rooms, tmp_path):
    rooms.refused = lambda config: config.pipeline == "ring"
    report = run(rooms, tmp_path, gpu="a100")
    assert report.entries[0].config.pipeline == "barrier"
    assert {f.outcome for f in report.failures} == {"compile_failed"}
    assert "line 3" in report.failures[0].reason


def test_ctrl_c_while_compiling_keeps_what_was_proved(rooms, tmp_path):
    specs = [KernelSpec(), KernelSpec(causal=True), KernelSpec(dtype="fp16")]

    def interrupt(index):
        # Well inside the third spec's 25 configs; proofs of the first two run beside.
        if index >= 55:
            time.sleep(0.05)
        if index == 70:
            raise KeyboardInterrupt

    rooms.on_compiled = interrupt
    report = run(rooms, tmp_path, [request_for(spec) for spec in specs], "a100", trials=24)
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


def test_no_host_compiler_is_noticed_before_anything_is_compiled(rooms, tmp_path):
    from dataclasses import replace

    def missing():
        raise ToolchainError("no g++")

    tools = replace(rooms.tools(), require_emulator=missing)
    with pytest.raises(ToolchainError, match=r"no g\+\+"):
        tune([request_for()], get_gpu("a100"), out=tmp_path, tools=tools)
    assert rooms.compiled == []


def test_progress_counts_every_stage(rooms, tmp_path):
    events = []
    run(rooms, tmp_path, gpu="a100", progress=events.append)
    for stage in ("compile", "prove", "save"):
        mine = [event for event in events if event.stage == stage]
        assert [event.done for event in mine] == list(range(1, len(mine) + 1))
        assert mine[-1].total >= mine[-1].done
    assert max(event.total for event in events if event.stage == "compile") == len(rooms.compiled)


def test_the_report_counts_predictions_that_gave_way(rooms, tmp_path):
    requests = [request_for(seqlen=seqlen) for seqlen in (512, 2048)]
    measured = entry(SPEC, requests[0].problem, kind="measured")
    save_entries(get_gpu("a100"), [measured], root=tmp_path / "tables")
    report = run(rooms, tmp_path, requests, "a100")
    assert (len(report.entries), report.superseded) == (2, 1)
    assert saved(tmp_path, "a100")[measured.key[:2]] == measured
    assert run(rooms, tmp_path / "other", requests, "a100").superseded == 0
