"""Field cases of tuners, each under its name: what went wrong elsewhere, and what happens here."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fa2gen.compile import ResourceUsage
from fa2gen.constraints import default_config
from fa2gen.driver import DeviceInfo
from fa2gen.errors import ArgumentError, LaunchError
from fa2gen.gate import forward_cases, run_gate
from fa2gen.hardware import get_gpu
from fa2gen.reference import attention_forward
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import load_table, table_path
from fa2gen.tuning.measured import objective
from fa2gen.tuning.session import tune
from fa2gen.tuning.space import legal_space
from fa2gen.tuning.study import TuningStudy
from fa2gen.tuning.worker import TrialFailure
from tests.tuning_fakes import FakeRooms, request_for

H200 = get_gpu("h200")
DEVICE = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 1980.0, (13, 0), "580.95")
SPEC = KernelSpec(head_dim=64)
DEFAULT = default_config(SPEC)
REQUEST = request_for(SPEC)
BUCKET = REQUEST.problem.bucket(132)


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def rooms():
    return FakeRooms(device=DEVICE)


def run(rooms, tmp_path, **options):
    return tune(
        [REQUEST], H200, out=tmp_path / "tables", tools=rooms.tools(), **{"trials": 6, "families": ("sm80",), **options}
    )


def open_study():
    key = objective(REQUEST.problem, FakeRooms().tools())
    return TuningStudy(H200, SPEC, BUCKET, template_hash="t", space=legal_space(SPEC, H200), objective=key)


def outcomes(report):
    return {failure.config: failure.outcome for failure in report.failures}


def test_BL_150_too_many_registers_to_launch(rooms, tmp_path):
    """By ptxas's figures where they tell; by the driver's refusal, which costs one trial and no process, elsewhere."""
    greedy = FwdConfig(block_m=128, block_n=64, num_warps=8, num_stages=1)
    assert greedy in legal_space(SPEC, H200).configs

    def refuse(config):
        if config.num_warps == 4 and config != DEFAULT:
            raise TrialFailure("launch_failed", "too many resources requested for launch", fatal=False)
        return 0.5 if config.num_warps == 8 else 1.0

    rooms.resources = lambda config: ResourceUsage(
        288 if config.num_warps == 8 and config != DEFAULT else 200, 0, 0, 0, 0, 1
    )
    rooms.milliseconds = refuse
    report = run(rooms, tmp_path, trials=20)
    failed = outcomes(report)
    wide = {config for config in failed if config.num_warps == 8}
    refused = {config for config in failed if config.num_warps == 4}
    assert wide
    assert refused
    assert set(failed.values()) == {"launch_failed"}
    assert not wide & set(rooms.worker.measured), "known before it was launched"
    reasons = {failure.config: failure.reason for failure in report.failures}
    assert "256 threads of 288 registers (an SM has 65536)" in reasons[min(wide, key=lambda c: c.slug())]
    # The run went on and saved what works.
    assert report.entries[0].config not in failed


def test_BL_151_a_bad_trial_poisons_the_context(rooms, tmp_path):
    """A crashed and a hung trial are results, kept with their text; the run goes on, and so does a resumed one."""

    def trouble(config):
        if config.num_stages == 3:
            raise TrialFailure("launch_failed", "an illegal memory access", fatal=True)
        if config.softmax == "online":
            raise TrialFailure("timeout", "no answer within 60 s", fatal=False)
        return 1.0

    rooms.milliseconds = trouble
    report = run(rooms, tmp_path, trials=16)
    assert set(outcomes(report).values()) == {"launch_failed", "timeout"}
    (entry,) = report.entries
    assert entry.config.num_stages != 3
    assert entry.config.softmax == "guarded"
    with open_study() as study:
        kept = {config: row for config, row in study.failures().items() if row[0] != "infeasible"}
    assert {config: outcome for config, (outcome, _) in kept.items()} == outcomes(report)
    assert {"an illegal memory access", "no answer within 60 s"} == {reason for _, reason in kept.values()}
    measured = set(rooms.worker.measured)
    rooms.worker.measured.clear()
    run(rooms, tmp_path, trials=20)
    assert not set(rooms.worker.measured) & set(outcomes(report)), "what crashed is not tried again"
    assert set(rooms.worker.measured) - measured


def test_BL_151_a_lost_gpu_stops_the_session_and_blames_no_config(rooms, tmp_path):
    call, state = rooms.worker.call, {"dead": False}

    def break_down(operation, payload=None, *, timeout):
        if operation == "measure" and len(rooms.worker.measured) == 3:
            state["dead"] = True
        if state["dead"]:
            raise TrialFailure("launch_failed", "GPU has fallen off the bus", fatal=True)
        return call(operation, payload, timeout=timeout)

    rooms.worker.call = break_down
    with pytest.raises(LaunchError, match=r"3 measuring processes in a row failed to start.*fallen off the bus"):
        run(rooms, tmp_path)
    assert load_table(table_path(tmp_path / "tables", "h200", "fwd")) is None, "no garbage was picked"
    with open_study() as study:
        assert all(outcome == "infeasible" for outcome, _ in study.failures().values())
        assert len(study.times()) == 3
    # With the GPU back the session resumes.
    rooms.worker.call = call
    report = run(rooms, tmp_path)
    assert (len(report.entries), report.failures) == (1, ())


@pytest.mark.parametrize("outcome", ["timeout", "launch_failed"])
def test_BL_151_a_gate_that_crashes_says_nothing_of_the_results(rooms, tmp_path, outcome):
    fast = next(config for config in legal_space(SPEC, H200).configs if config.num_warps == 8)
    rooms.milliseconds = lambda config: 0.1 + config.block_n / 1e3 if config.num_warps == 8 else 1.0
    call, gated = rooms.worker.call, []

    def crash(operation, payload=None, *, timeout):
        if operation == "gate" and payload.config.num_warps == 8:
            gated.append(payload.config)
            raise TrialFailure(outcome, "the gate's process died", fatal=True)
        return call(operation, payload, timeout=timeout)

    rooms.worker.call = crash
    report = run(rooms, tmp_path, trials=20)
    assert report.entries[0].config.num_warps != 8
    assert set(outcomes(report).values()) == {outcome}
    assert gated[0] == gated[1], "tried again in a fresh process"
    # A later session, in which nothing crashes, proves it and takes it.
    rooms.worker.call = call
    winner = run(rooms, tmp_path, trials=20).entries[0].config
    assert winner in gated
    assert winner.num_warps == fast.num_warps


@pytest.mark.usefixtures("one_thread")
def test_BL_152_a_fast_but_wrong_config_never_wins(rooms, tmp_path):
    """Configs that skip a ragged last key tile are the fastest; the real gate, on its real cases, finds them out."""

    def sabotaged(config):
        return config.num_stages == 2

    def gate(config, cases=None):
        def runner(q, k, v, scale):
            ragged = k.shape[1] % config.block_n
            if sabotaged(config) and ragged and k.shape[1] > config.block_n:
                k, v = k[:, :-ragged], v[:, :-ragged]
            out, lse = attention_forward(q, k, v, causal=SPEC.causal, softmax_scale=scale)
            return out.to(q.dtype), lse.float()

        report = run_gate(SPEC, config, runner, cases or forward_cases(SPEC, config, budget="quick"))
        return report.passed, report.text

    rooms.worker.gate = gate
    rooms.milliseconds = lambda config: (0.5 if sabotaged(config) else 1.0) + config.block_m / 1e4
    report = run(rooms, tmp_path, trials=12)
    wrong = {config for config, outcome in outcomes(report).items() if outcome == "wrong"}
    assert wrong
    assert all(map(sabotaged, wrong))
    (entry,) = report.entries
    assert not sabotaged(entry.config)
    assert entry.provenance.numerics.startswith("GPU: passed")
    assert entry.config in rooms.worker.gated
    # Whole tiles alone would have let it pass.
    one = min(wrong, key=lambda config: config.slug())
    whole = [case for case in forward_cases(SPEC, one, budget="quick") if case.problem.seqlen_k % one.block_n == 0]
    assert whole
    assert gate(one, whole)[0]


def test_BL_155_zero_device_seed_and_trials_are_honoured(tmp_path, monkeypatch):
    seeds = []

    class Recorded(TuningStudy):
        def __init__(self, *arguments, seed, **options):
            seeds.append(seed)
            super().__init__(*arguments, seed=seed, **options)

    monkeypatch.setattr("fa2gen.tuning.measured.TuningStudy", Recorded)
    two = FakeRooms(device=DEVICE, count=2)
    report = run(two, tmp_path, devices=[0], seed=0, trials=0)
    assert report.devices == (0,)
    assert two.workers[0].measured == [DEFAULT], "no trial, but the default"
    assert two.workers[1].measured == []
    run(two, tmp_path, devices=[1], seed=7, trials=0)
    assert seeds == [0, 7]
    # Predicting honours no trials as well.
    none = FakeRooms()
    tune([REQUEST], get_gpu("a100"), out=tmp_path / "a100", tools=none.tools(), trials=0)
    assert [config for _, config in none.compiled] == [DEFAULT]


def test_BL_155_trial_number_zero_is_a_trial(rooms, tmp_path):
    """The first trial of a study has number 0; its time counts like any other."""
    best = {}

    def time(config):
        best.setdefault("first", config)
        return 0.5 if config == best["first"] else 1.0

    rooms.milliseconds = time
    assert run(rooms, tmp_path, trials=2).entries[0].config == best["first"]
    with open_study() as study:
        asked = study.ask()
        assert asked is not None
        study.complete(asked, 0.25)
        assert study.times()[asked.config] == 0.25


@pytest.mark.parametrize("timeout", [0, 0.0, -1.0, math.nan])
def test_BL_155_a_timeout_of_zero_is_refused(rooms, tmp_path, timeout):
    with pytest.raises(ArgumentError, match="timeout must be above 0 seconds"):
        run(rooms, tmp_path, timeout=timeout)
    assert rooms.compiled == []


@pytest.mark.parametrize("options", [{"seed": -1}, {"seed": 1.0}, {"seed": None}, {"trials": False}])
def test_BL_155_what_is_no_count_is_refused(rooms, tmp_path, options):
    with pytest.raises(ArgumentError, match=f"{next(iter(options))} must be an integer of at least 0"):
        run(rooms, tmp_path, **options)


def test_BL_155_a_threshold_of_zero_is_a_threshold():
    from fa2gen.tuning.timing import Timing, settled
    from fa2gen.tuning.winner import ranking

    other = dataclasses.replace(DEFAULT, num_stages=2)
    times = {DEFAULT: 1.0, other: 0.999}
    assert ranking(times, DEFAULT, times, noise_band=0.0)[0] == other
    assert ranking(times, DEFAULT, times)[0] == DEFAULT
    wobble = Timing(1.0, 0.9999, 1.0001, 9)
    assert settled(lambda: wobble, spread_limit=0.0).unsettled
    assert not settled(lambda: wobble).unsettled
