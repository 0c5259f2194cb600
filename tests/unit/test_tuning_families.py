"""Sessions in which families compete: each has its trials, its study, its incumbent and its entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fa2gen.codegen import template_hash
from fa2gen.constraints import default_config_of
from fa2gen.driver import DeviceInfo
from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.hardware import get_gpu
from fa2gen.spec import FwdSm90Config, KernelSpec
from fa2gen.tables import load_table, lookup, save_entries, table_path
from fa2gen.tuning.model import model_version
from fa2gen.tuning.plan import make_plan
from fa2gen.tuning.regate import check, regate
from fa2gen.tuning.report import TuneJob
from fa2gen.tuning.session import make_jobs, tune
from fa2gen.tuning.shortlist import shortlist
from fa2gen.tuning.winner import find_incumbent, find_relatives
from tests.tuning_fakes import FakeRooms, entry, request_for

H200, H100 = get_gpu("h200"), get_gpu("h100")
DEVICE = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 1980.0, (13, 0), "580.95")
SPEC = KernelSpec()
REQUEST = request_for()
BUCKET = REQUEST.problem.bucket(132)
DEFAULTS = {family: default_config_of(SPEC, family) for family in ("sm80", "sm90")}


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def rooms():
    rooms = FakeRooms(device=DEVICE)
    rooms.milliseconds = lambda config: 1.0 if config.family == "sm90" else 2.0
    return rooms


def run(rooms, tmp_path, requests=(REQUEST,), gpu=H200, **options):
    return tune(list(requests), gpu, out=tmp_path / "tables", tools=rooms.tools(), **{"trials": 4, **options})


def saved(tmp_path, gpu="h200"):
    table = load_table(table_path(tmp_path / "tables", gpu, "fwd"))
    return {} if table is None else {row.key: row for row in table.entries}


def studies(tmp_path):
    names = {path.name.split("_sm")[1][:2] for path in (tmp_path / "state" / "studies").iterdir()}
    return sorted(names)


def test_jobs_are_requests_times_families():
    backward, unaligned = request_for(KernelSpec("bwd")), request_for(KernelSpec(alignment=2))
    assert make_jobs([REQUEST, backward, unaligned, REQUEST], H200) == [
        TuneJob(REQUEST, "sm80"),
        TuneJob(REQUEST, "sm90"),
        TuneJob(backward, "sm80"),
        TuneJob(unaligned, "sm80"),
    ]
    assert make_jobs([REQUEST], H200, ["sm90"]) == [TuneJob(REQUEST, "sm90")]
    with pytest.raises(ArgumentError, match="family must be one of sm80, sm90, got sm70"):
        make_jobs([REQUEST], H200, ["sm70"])
    with pytest.raises(UnsupportedError, match="family sm90 does not serve fwd_d128_bf16_full_gqa1 on a100: sm80 does"):
        make_jobs([REQUEST], get_gpu("a100"), ["sm90"])


def test_both_families_are_measured_and_the_faster_serves(rooms, tmp_path):
    report = run(rooms, tmp_path)
    rows = saved(tmp_path)
    assert set(rows) == {(SPEC, BUCKET, "sm80"), (SPEC, BUCKET, "sm90")}
    assert {row.key for row in report.entries} == set(rows)
    families = [config.family for config in rooms.worker.measured]
    assert families == 5 * ["sm80"] + 5 * ["sm90"]
    assert [rooms.worker.measured[0], rooms.worker.measured[5]] == [*DEFAULTS.values()]
    assert report.default_ms == {(SPEC, BUCKET, "sm80"): 2.0, (SPEC, BUCKET, "sm90"): 1.0}
    assert {*rooms.worker.gated} >= {*DEFAULTS.values()}
    match = lookup(SPEC, BUCKET, H200, roots=[tmp_path / "tables"], strict=True)
    assert match.entry == rows[SPEC, BUCKET, "sm90"]
    unaligned = lookup(KernelSpec(alignment=2), BUCKET, H200, roots=[tmp_path / "tables"])
    assert unaligned.entry == rows[SPEC, BUCKET, "sm80"]
    assert studies(tmp_path) == ["80", "90"]


def test_one_family_alone(rooms, tmp_path):
    report = run(rooms, tmp_path, families=["sm90"])
    assert {config.family for config in rooms.worker.measured} == {"sm90"}
    assert [row.config.family for row in report.entries] == ["sm90"]
    run(rooms, tmp_path, families=["sm80"])
    assert len(saved(tmp_path)) == 2


def test_each_family_has_its_own_incumbent_and_study(rooms, tmp_path):
    first = run(rooms, tmp_path)
    rooms.worker.measured.clear()
    again = run(rooms, tmp_path)
    incumbents = {row.config.family: row.provenance.incumbent.config for row in again.entries}
    assert incumbents == {row.config.family: row.config for row in first.entries}
    # Resumed: of each family the default and what the table holds alone are timed anew.
    known = {*DEFAULTS.values(), *(row.config for row in first.entries)}
    assert {*rooms.worker.measured} == known
    assert len(rooms.worker.measured) == len(known)


def test_edited_templates_of_one_family_leave_the_other_s_study(rooms, tmp_path):
    hashes = {"sm80": "t", "sm90": "t"}

    def session():
        rooms.worker.measured.clear()
        tools = rooms.tools()
        object.__setattr__(tools, "template_hash", lambda kind, family: hashes[family])
        return tune([REQUEST], H200, out=tmp_path / "tables", tools=tools, trials=4)

    session()
    hashes["sm90"] = "edited"
    report = session()
    assert sum(config.family == "sm80" for config in rooms.worker.measured) <= 2
    assert sum(config.family == "sm90" for config in rooms.worker.measured) >= 4
    assert {row.config.family: row.provenance.template_hash for row in report.entries} == hashes


def test_a_family_without_a_right_config_leaves_the_other_its_entry(rooms, tmp_path):
    rooms.wrong = lambda config: config.family == "sm90"
    report = run(rooms, tmp_path)
    assert [row.config.family for row in report.entries] == ["sm80"]
    assert {failure.outcome for failure in report.failures} == {"wrong"}
    assert {failure.config.family for failure in report.failures} == {"sm90"}


def test_devices_share_the_families_of_one_request(tmp_path):
    two = FakeRooms(device=DEVICE, count=2)
    report = run(two, tmp_path)
    assert report.devices == (0, 1)
    assert len(report.entries) == 2


def test_predictions_of_both_families(tmp_path):
    rooms = FakeRooms()
    requests = [request_for(seqlen=seqlen) for seqlen in (512, 8192)]
    report = run(rooms, tmp_path, requests, H100, trials=6)
    assert not report.measured
    assert len(report.entries) == len(saved(tmp_path, "h100")) == 4
    for row in report.entries:
        assert row.provenance.model_version == model_version("fwd", row.config.family)
        assert "unvalidated" in row.measurement.method
        match = lookup(SPEC, row.bucket, H100, roots=[tmp_path / "tables"], strict=True)
        assert match.config.family == "sm90"
    compiled = [config for _, config in rooms.compiled]
    assert {*DEFAULTS.values()} <= {*compiled}
    assert {*shortlist(SPEC, [r.problem for r in requests], H100, 6, "sm90")} <= {*compiled}
    assert {config for _, config in rooms.proved} >= {*DEFAULTS.values()}


def test_a_plan_has_a_row_for_each_family(rooms, tmp_path):
    plan = make_plan([REQUEST], H200, trials=4, tools=rooms.tools())
    assert [row.family for row in plan.requests] == ["sm80", "sm90"]
    assert [row.default for row in plan.requests] == [*DEFAULTS.values()]
    assert {config.family for config in plan.requests[1].favourites} == {"sm90"}
    one = make_plan([REQUEST], H200, trials=4, tools=rooms.tools(), families=["sm90"])
    assert (len(one.requests), 2 * one.kernels) == (1, plan.kernels)
    predicted = make_plan([REQUEST, request_for(seqlen=512)], H100, trials=4, tools=FakeRooms().tools())
    assert predicted.kernels == 10


def test_tables_know_winners_by_family(tmp_path):
    fast = FwdSm90Config(scheduler="dynamic")
    old = entry(problem=REQUEST.problem, kind="measured", sms=132)
    new = entry(problem=REQUEST.problem, kind="measured", sms=132, **fast.canonical())
    save_entries(H200, [old, new], root=tmp_path)
    for family, row in (("sm80", old), ("sm90", new)):
        assert find_incumbent(SPEC, BUCKET, family, H200, [tmp_path]) == row.config
        related = find_relatives(KernelSpec(dtype="fp16"), BUCKET, family, H200, [tmp_path], 4)
        assert related == (row.config,)


def test_stale_entries_are_gated_by_family(tmp_path):
    rooms = FakeRooms(device=DEVICE)
    today = template_hash("fwd", "sm80")
    rows = [
        entry(problem=REQUEST.problem, sms=132, template=today),
        entry(problem=REQUEST.problem, sms=132, template="old", family="sm90"),
    ]
    save_entries(H200, rows, root=tmp_path)

    def states(tools_hash):
        statuses = check("h200", roots=[tmp_path], template_hash=tools_hash)
        return statuses, {status.entry.config.family: status.state for status in statuses}

    tools = rooms.tools()
    object.__setattr__(tools, "template_hash", template_hash)
    statuses, found = states(template_hash)
    assert found == {"sm80": "current", "sm90": "stale"}
    (result,) = regate(statuses, tools, out=tmp_path)
    assert (result.passed, result.status.entry.config.family) == (True, "sm90")
    assert states(template_hash)[1] == {"sm80": "current", "sm90": "gated"}
    document = json.loads(Path(table_path(tmp_path, "h200", "fwd")).read_text())
    assert len(document["entries"]) == 2
