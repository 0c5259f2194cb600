"""Which config stays: the incumbent unless it is clearly beaten, in one session and under the same conditions."""

from __future__ import annotations

import dataclasses

import pytest

from fa2gen.constraints import default_config
from fa2gen.driver import DeviceInfo
from fa2gen.hardware import get_gpu
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import Clocks, load_table, save_entries, table_path
from fa2gen.tuning.measured import objective
from fa2gen.tuning.session import tune
from fa2gen.tuning.shortlist import shortlist
from fa2gen.tuning.space import legal_space
from fa2gen.tuning.study import TuningStudy
from fa2gen.tuning.timing import Timing, stored_timing
from fa2gen.tuning.tools import Tools
from fa2gen.tuning.winner import find_incumbent, find_relatives, ranking
from fa2gen.tuning.worker import TrialFailure
from tests.tuning_fakes import FakeRooms, entry, request_for

H200 = get_gpu("h200")
DEVICE = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 1980.0, (13, 0), "580.95")
SPEC = KernelSpec()
DEFAULT = default_config(SPEC)
REQUEST = request_for()
BUCKET = REQUEST.problem.bucket(132)
OLD = FwdConfig(block_m=64, block_n=64, step_n=32, num_warps=4, num_stages=3, softmax="guarded")
OTHER = dataclasses.replace(OLD, num_stages=2)


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def h200():
    return FakeRooms(device=DEVICE)


def hold(root, config=OLD, template="old templates", **options):
    row = entry(problem=REQUEST.problem, template=template, **{"kind": "measured", **options, **config.canonical()})
    save_entries(H200, [dataclasses.replace(row, bucket=BUCKET)], root=root)


def run(rooms, tmp_path, **options):
    return tune(
        [REQUEST], H200, out=tmp_path / "tables", tools=rooms.tools(), **{"trials": 4, "families": ("sm80",), **options}
    )


def in_table(tmp_path):
    (row,) = load_table(table_path(tmp_path / "tables", "h200", "fwd")).entries
    return row


def test_ranking():
    a, b, c = DEFAULT, OLD, OTHER
    times = {a: 1.0, b: 0.985, c: 1.5}
    assert ranking(times, None, times) == [b, a, c]
    # 1.5 % is noise, 3 % is not; times of an earlier session never push the incumbent out.
    assert ranking(times, a, times) == [a, b, c]
    assert ranking({**times, b: 0.97}, a, times) == [b, a, c]
    assert ranking({**times, b: 0.97}, a, [a, c]) == [a, b, c]
    assert ranking(times, a, times, noise_band=0.0) == [b, a, c]
    # What cannot be timed any more holds nothing up.
    assert ranking({b: 1.0, c: 2.0}, a, [b, c]) == [b, c]


def test_the_incumbent_comes_from_the_nearest_table(tmp_path):
    first, second = tmp_path / "user", tmp_path / "package"
    assert find_incumbent(SPEC, BUCKET, "sm80", H200, [first, second]) is None
    hold(second, OTHER)
    assert find_incumbent(SPEC, BUCKET, "sm80", H200, [first, second]) == OTHER
    hold(first, OLD, kind="predicted")
    # As in a lookup: a prediction hides no time.
    assert find_incumbent(SPEC, BUCKET, "sm80", H200, [first, second]) == OTHER
    assert find_incumbent(SPEC, BUCKET, "sm80", H200, [first]) == OLD
    hold(first, OLD)
    assert find_incumbent(SPEC, BUCKET, "sm80", H200, [first, second]) == OLD
    assert find_incumbent(KernelSpec(causal=True), BUCKET, "sm80", H200, [first, second]) is None
    assert find_incumbent(SPEC, request_for(seqlen=512).problem.bucket(132), "sm80", H200, [first, second]) is None


def test_an_incumbent_that_is_not_legal_any_more_is_none(tmp_path):
    hold(tmp_path, FwdConfig(block_m=256, block_n=256, num_warps=8, num_stages=3))
    assert find_incumbent(SPEC, BUCKET, "sm80", H200, [tmp_path]) is None


def put(root, config, spec=SPEC, seqlen=4096, kind="measured", ms=1.5):
    problem = request_for(spec, seqlen).problem
    row = entry(spec, problem, kind=kind, ms=ms, **config.canonical())
    save_entries(H200, [dataclasses.replace(row, bucket=problem.bucket(132))], root=root)


def test_relatives_are_the_nearest_winners_made_legal(tmp_path):
    def relatives(spec=SPEC, count=6):
        return find_relatives(spec, BUCKET, "sm80", H200, [tmp_path], count)

    a, b, c, d = (dataclasses.replace(OTHER, step_n=step, min_blocks=blocks) for blocks in (1, 2) for step in (32, 64))
    e = dataclasses.replace(OLD, proof="block")
    put(tmp_path, OLD)  # the incumbent is none
    put(tmp_path, b, KernelSpec(dtype="fp16"))
    put(tmp_path, c, seqlen=8192)
    put(tmp_path, d, KernelSpec(gqa_ratio=8), seqlen=16384)
    for other in (KernelSpec(causal=True), KernelSpec(head_dim=96), KernelSpec(alignment=2)):
        put(tmp_path, a, other)
    put(tmp_path, a, seqlen=512, kind="predicted")
    assert relatives() == (b, c, d)
    assert relatives(count=2) == (b, c)
    # A nearer entry of the same config counts once; of equally near ones the same dtype's comes first.
    put(tmp_path, c, seqlen=2048)
    put(tmp_path, a, KernelSpec(dtype="fp16"), seqlen=8192)
    put(tmp_path, e, seqlen=8192, ms=1.0)
    assert relatives() == (b, c, e, a, d)
    # fp16 cannot prove a whole block: it takes the config with a proof for each step.
    found = relatives(KernelSpec(dtype="fp16"))
    assert dataclasses.replace(e, proof="step") in found
    assert e not in found


def test_relatives_are_timed_before_the_models_favourites(h200, tmp_path):
    hold(tmp_path / "tables", OLD)
    odd = legal_space(SPEC, H200).configs[-1]
    put(tmp_path / "tables", odd, seqlen=16384)
    run(h200, tmp_path)
    assert h200.worker.measured[:3] == [DEFAULT, OLD, odd]


def test_relatives_take_half_of_the_trials_at_most(h200, tmp_path):
    space = legal_space(SPEC, H200).configs
    relatives = space[-5:]
    for seqlen, config in zip((512, 1024, 2048, 8192, 16384), relatives, strict=True):
        put(tmp_path / "tables", config, seqlen=seqlen)
    run(h200, tmp_path, trials=4)
    tried = h200.worker.measured[1:5]
    assert len(set(tried) & set(relatives)) == 2
    assert tried[2] == shortlist(SPEC, [REQUEST.problem], H200, 1)[0]


def test_sessions_look_in_the_output_folder_then_the_users_then_the_package(monkeypatch, tmp_path):
    from fa2gen.tables import package_dir

    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "user"))
    assert Tools().table_roots(tmp_path / "out") == (tmp_path / "out", tmp_path / "user", package_dir())
    assert Tools().table_roots(None) == (tmp_path / "user", package_dir())


@pytest.mark.parametrize(("old_ms", "wins"), [(1.0, True), (1.015, True), (1.05, False)])
def test_default_and_incumbent_first_and_the_incumbent_stays_within_the_noise(h200, tmp_path, old_ms, wins):
    hold(tmp_path / "tables")
    h200.milliseconds = lambda config: {DEFAULT: 2.0, OLD: old_ms}.get(config, 1.0)
    report = run(h200, tmp_path)
    assert h200.worker.measured[:2] == [DEFAULT, OLD]
    assert len(h200.worker.measured) == 6
    row = in_table(tmp_path)
    assert (row.config == OLD) == wins
    assert (row.provenance.incumbent.config, row.provenance.incumbent.ms) == (OLD, old_ms)
    assert row.provenance.template_hash == "t"
    assert report.default_ms == {row.key: 2.0}
    # Both are proved with today's templates.
    assert {DEFAULT, row.config} <= set(h200.worker.gated)


def test_no_trials_means_default_and_incumbent(h200, tmp_path):
    hold(tmp_path / "tables")
    h200.milliseconds = lambda config: 1.0 if config == DEFAULT else 3.0
    report = run(h200, tmp_path, trials=0)
    assert h200.worker.measured == [DEFAULT, OLD]
    assert (report.entries[0].config, in_table(tmp_path).config) == (DEFAULT, DEFAULT)


def test_a_predicted_incumbent_is_timed_too(h200, tmp_path):
    hold(tmp_path / "tables", kind="predicted", ms=0.001)
    run(h200, tmp_path, trials=0)
    row = in_table(tmp_path)
    assert (row.config, row.measurement.kind, row.measurement.ms) == (OLD, "measured", 1.0)


@pytest.mark.parametrize("trouble", ["wrong", "crash"])
def test_an_incumbent_that_fails_gives_way(h200, tmp_path, trouble):
    hold(tmp_path / "tables")

    def time(config):
        if config == OLD and trouble == "crash":
            raise TrialFailure("launch_failed", "illegal address", fatal=True)
        return 1.0 if config == OLD else 2.0

    h200.milliseconds = time
    h200.wrong = lambda config: config == OLD and trouble == "wrong"
    report = run(h200, tmp_path)
    assert in_table(tmp_path).config != OLD
    assert (OLD, "wrong" if trouble == "wrong" else "launch_failed") in [(f.config, f.outcome) for f in report.failures]


def test_times_of_an_earlier_session_are_taken_again_before_they_win(h200, tmp_path):
    hot = {DEFAULT: 2.0}
    h200.milliseconds = lambda config: hot.get(config, 1.0 + config.block_m / 1000)
    first = run(h200, tmp_path, trials=6).entries[0]
    # The table forgets it; the chip is slower today, and its old time would win everything.
    table_path(tmp_path / "tables", "h200", "fwd").unlink()
    hold(tmp_path / "tables")
    h200.milliseconds = lambda config: 10.0 if config == first.config else 1.5
    h200.worker.measured.clear()
    run(h200, tmp_path, trials=0)
    assert first.config in h200.worker.measured
    row = in_table(tmp_path)
    assert row.config == OLD
    assert row.measurement.ms == 1.5


def test_clocks_and_doubts_are_kept_with_the_entry(h200, tmp_path):
    clocks = Clocks(1755, 1740, 1980, ("sw_power_cap",))

    def call(operation, payload=None, *, timeout):
        if operation == "measure":
            return Timing(1.0, 0.8, 1.1, 9, clocks=clocks, unsettled="p20 to p80 spread of 30%")
        return (True, "passed") if operation == "gate" else None

    h200.worker.call = call
    run(h200, tmp_path, trials=2)
    row = in_table(tmp_path)
    assert row.measurement.clocks == clocks
    assert row.measurement.spread == pytest.approx(0.3)
    assert "doubtful: p20 to p80 spread of 30%" in row.measurement.method
    # And in the study, for a session that has no time to measure again.
    space = legal_space(SPEC, H200)
    key = objective(request_for().problem, h200.tools())
    with TuningStudy(H200, SPEC, BUCKET, template_hash="t", space=space, objective=key) as study:
        kept = [stored_timing(ms, study.attrs(config)) for config, ms in study.times().items()]
    assert len(kept) >= 2
    assert set(kept) == {Timing(1.0, 0.8, 1.1, 9, clocks=clocks, unsettled="p20 to p80 spread of 30%")}
