"""Studies: resume, several processes, kills, typed failures."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import get_gpu
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tuning.space import Space, legal_space
from fa2gen.tuning.study import OUTCOMES, TuningStudy, study_name
from tests.tuning_fakes import PROBLEM

GPU = get_gpu("a100")
SPEC = KernelSpec()
BUCKET = PROBLEM.bucket(GPU.num_sms)
FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).resolve().parents[2]


def fake_ms(config):
    return 1.0 + abs(config.block_m - 128) / 64 + abs(config.block_n - 64) / 32 + (config.softmax == "online")


def open_study(folder, **options):
    options = {"template_hash": "t", "space": legal_space(SPEC, GPU), "directory": folder, **options}
    return TuningStudy(GPU, SPEC, BUCKET, **options)


def run(study, count):
    configs = []
    for _ in range(count):
        asked = study.ask()
        configs.append(asked.config)
        study.complete(asked, fake_ms(asked.config), n=7)
    return configs


def test_asked_configs_are_legal_and_never_repeat(tmp_path):
    with open_study(tmp_path) as study:
        configs = run(study, 30)
        assert len(set(configs)) == 30
        assert all(infeasible_reason(SPEC, config, GPU.arch) is None for config in configs)
        times = study.times()
        assert list(times.values()) == sorted(fake_ms(config) for config in configs)
        assert study.attrs(configs[0]) == {"n": 7}
        # What the sampler proposed in vain is on record with its reason.
        failures = study.failures()
        assert failures
        assert all(outcome == "infeasible" and reason for outcome, reason in failures.values())


def test_the_sampler_finds_good_configs(tmp_path):
    with open_study(tmp_path) as study:
        run(study, 60)
        space = legal_space(SPEC, GPU).configs
        better = sum(fake_ms(config) < min(study.times().values()) for config in space)
        assert better / len(space) < 0.05


def test_resume_keeps_times_and_failures(tmp_path):
    with open_study(tmp_path) as study:
        first = run(study, 5)
        failed = study.ask()
        study.fail(failed, "launch_failed", "too many resources")
        study.reject(first[0], "row 3 is wrong")
    with open_study(tmp_path) as study:
        assert set(study.times()) == set(first[1:])
        assert study.failures()[failed.config] == ("launch_failed", "too many resources")
        assert study.failures()[first[0]] == ("wrong", "row 3 is wrong")
        again = run(study, 5)
        assert not set(again) & {*first, failed.config}


def test_without_resume_the_old_study_is_put_aside(tmp_path):
    with open_study(tmp_path) as study:
        run(study, 3)
    with open_study(tmp_path, resume=False) as study:
        assert study.times() == {}
    assert len(list(tmp_path.glob("*.journal.old-*"))) == 1


def test_enqueued_configs_come_first(tmp_path):
    config = FwdConfig(block_m=128, block_n=64, step_n=32, num_stages=1, softmax="guarded")
    config = next(c for c in legal_space(SPEC, GPU).configs if c.softmax == "guarded" and c.q_in_regs) or config
    with open_study(tmp_path) as study:
        assert study.enqueue(config)
        asked = study.ask()
        assert asked.config == config
        study.complete(asked, 1.0)
        assert not study.enqueue(config)
        assert not study.enqueue(FwdConfig(block_m=112))


def test_every_outcome_is_kept_with_its_text(tmp_path):
    with open_study(tmp_path) as study:
        for outcome in OUTCOMES:
            asked = study.ask()
            study.fail(asked, outcome, f"because {outcome}")
            assert study.failures()[asked.config] == (outcome, f"because {outcome}")
        with pytest.raises(ValueError, match="outcome must be one of"):
            study.fail(study.ask(), "bad luck", "x")


def test_a_small_space_ends(tmp_path):
    space = Space(legal_space(SPEC, GPU).configs[::80], ())
    with open_study(tmp_path, space=space) as study:
        seen = set()
        while (asked := study.ask()) is not None:
            seen.add(asked.config)
            study.complete(asked, 1.0)
        assert seen >= set(space.configs)


@pytest.mark.parametrize("change", ["gpu", "spec", "bucket", "family", "template", "space", "objective"])
def test_a_study_belongs_to_everything_that_makes_times_comparable(change):
    base = {"gpu": "a100", "spec": SPEC, "bucket": BUCKET, "family": "sm80", "template": "t", "space": "s"}
    base["objective"] = "measured"
    other = {**base, change: {"spec": KernelSpec(causal=True), "bucket": PROBLEM.bucket(10**6)}.get(change, "other")}
    assert study_name(*base.values()) != study_name(*other.values())


def _add(folder, count, seed, ready=None):
    with open_study(folder, seed=seed) as study:
        for _ in range(count):
            asked = study.ask()
            study.complete(asked, fake_ms(asked.config), n=seed)
            if ready is not None:
                ready.set()


def test_processes_create_and_share_a_study(tmp_path):
    processes = [FORK.Process(target=_add, args=(tmp_path, 4, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    with open_study(tmp_path) as study:
        # A config that two processes asked at the same moment is timed twice, and counts once.
        assert 8 <= len(study.times()) <= 12


def test_a_kill_loses_at_most_the_running_trial(tmp_path):
    known = 0
    for attempt in range(8):
        ready = FORK.Event()
        process = FORK.Process(target=_add, args=(tmp_path, 1000, attempt, ready))
        process.start()
        assert ready.wait(60)
        time.sleep(0.02 * attempt)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with open_study(tmp_path) as study:
            assert len(study.times()) > known
            known = len(study.times()) + 1
            asked = study.ask()
            study.complete(asked, fake_ms(asked.config))


def test_a_torn_last_line_is_cut_off(tmp_path):
    with open_study(tmp_path) as study:
        run(study, 3)
        path, times = study.path, study.times()
    with open(path, "ab") as journal:
        journal.write(b'{"op_code": 6, "worker')
    with open_study(tmp_path) as study:
        assert study.times() == times
        run(study, 1)
    with open_study(tmp_path) as study:
        assert len(study.times()) == 4


def test_a_dead_process_leaves_no_running_trial(tmp_path):
    with open_study(tmp_path) as study:
        abandoned = study.ask()
    with open_study(tmp_path) as study:
        assert study.enqueue(abandoned.config)
        assert study.ask().config == abandoned.config


def test_the_state_folder_follows_the_environment(tmp_path):
    code = "from fa2gen.tuning.study import state_dir; print(state_dir())"
    for env, expected in (
        ({"FA2GEN_STATE_DIR": str(tmp_path)}, tmp_path / "studies"),
        ({"XDG_STATE_HOME": str(tmp_path)}, tmp_path / "fa2gen" / "studies"),
    ):
        out = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PATH": "", **env}, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == str(expected)
