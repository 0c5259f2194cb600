"""Studies: resume, several processes, typed failures, damage, databases; kills are in test_store_kills.py."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from fa2gen.constraints import infeasible_reason
from fa2gen.errors import StudyError
from fa2gen.hardware import get_gpu
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tuning.space import GRIDS, Space, legal_space
from fa2gen.tuning.storage import require_storage
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


@pytest.mark.parametrize("seed", [2**32 - 1, 10**30])
def test_seeds_have_any_size(seed, tmp_path):
    with open_study(tmp_path, seed=seed) as study:
        run(study, 1)


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


STORAGES = ("journal", "sqlite")


def home(kind, folder):
    """Options of ``open_study`` for a journal or a database in the folder."""
    return {} if kind == "journal" else {"storage": f"sqlite:///{folder / 'studies.db'}"}


@pytest.mark.parametrize("kind", STORAGES)
def test_every_outcome_is_kept_with_its_text(tmp_path, kind):
    assert set(OUTCOMES) == {"infeasible", "compile_failed", "spilled", "launch_failed", "wrong", "timeout"}
    texts = {outcome: f'because {outcome}:\n"line 2" \u00b5 ' + "x" * 3000 for outcome in OUTCOMES}
    with open_study(tmp_path, **home(kind, tmp_path)) as study:
        asked = {outcome: study.ask() for outcome in OUTCOMES}
        for outcome, trial in asked.items():
            study.fail(trial, outcome, texts[outcome])
        recorded = [config for config in legal_space(SPEC, GPU).configs if config not in study.failures()][:2]
        study.record_failure(recorded[0], "spilled", "12 bytes")
        study.record(recorded[1], 3.0, p20=2.5)
        study.reject(recorded[1], "row 3")
        with pytest.raises(ValueError, match="outcome must be one of"):
            study.fail(study.ask(), "bad luck", "x")
    with open_study(tmp_path, **home(kind, tmp_path)) as study:
        failures = study.failures()
        for outcome, trial in asked.items():
            assert failures[trial.config] == (outcome, texts[outcome])
        assert failures[recorded[0]] == ("spilled", "12 bytes")
        assert failures[recorded[1]] == ("wrong", "row 3")
        assert study.attrs(recorded[1]) == {"p20": 2.5}


def test_a_small_space_ends(tmp_path):
    space = Space(legal_space(SPEC, GPU).configs[::80], ())
    with open_study(tmp_path, space=space) as study:
        seen = set()
        while (asked := study.ask()) is not None:
            seen.add(asked.config)
            study.complete(asked, 1.0)
        assert seen >= set(space.configs)


def test_another_grid_is_another_study(monkeypatch):
    # Optuna refuses a study whose parameters had other values.
    arguments = ("a100", SPEC, BUCKET, "sm80", "t", "s", "measured")
    before = study_name(*arguments)
    grid = GRIDS[SPEC.kind]["sm80"]
    monkeypatch.setitem(GRIDS[SPEC.kind], "sm80", replace(grid, values={**grid.values, "num_warps": (4,)}))
    assert study_name(*arguments) != before


OTHERS = {"spec": KernelSpec(causal=True), "bucket": PROBLEM.bucket(10**6), "family": "sm90"}


@pytest.mark.parametrize("change", ["gpu", "spec", "bucket", "family", "template", "space", "objective"])
def test_a_study_belongs_to_everything_that_makes_times_comparable(change):
    base = {"gpu": "a100", "spec": SPEC, "bucket": BUCKET, "family": "sm80", "template": "t", "space": "s"}
    base["objective"] = "measured"
    other = {**base, change: OTHERS.get(change, "other")}
    assert study_name(*base.values()) != study_name(*other.values())


def _add(folder, count, seed):
    with open_study(folder, seed=seed) as study:
        for _ in range(count):
            asked = study.ask()
            study.complete(asked, fake_ms(asked.config), n=seed)


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


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2] + b"garbage\n" + text[len(text) // 2 :],
        lambda text: text + b"garbage",
        lambda text: b"\xff\x00\x9f" * 500,
        lambda text: b"\n" + text,
        lambda text: text + b"[]\n",
        lambda text: text + b'{"op_code": 77}\n',
        lambda text: text + b'{"op_code": 4}\n',
        lambda text: text.replace(b'"op_code":0', b'"op_code":"0"', 1),
        lambda text: text[:-20] + b"\n",
        lambda text: text.replace(b"datetime_complete", b"datetime_complexe"),
        lambda text: text.replace(b"[64, 128, 192, 256]", b"[64, 128, 193, 256]"),
    ],
    ids=["line in the middle", "end", "binary", "empty line", "list", "unknown operation", "no fields", "type"]
    + ["last line", "no end of a trial", "another grid"],
)
def test_a_damaged_journal_costs_that_study_only(tmp_path, damage):
    with open_study(tmp_path) as study:
        run(study, 3)
        path = study.path
    with open_study(tmp_path, template_hash="other") as study:
        others = run(study, 2)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.warns(RuntimeWarning, match="is damaged") as caught:
        study = open_study(tmp_path)
    with study:
        assert len(caught) == 1
        assert study.times() == {}
        run(study, 1)
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == damaged
    assert str(aside.name) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_study(tmp_path) as study:
            assert len(study.times()) == 1
        with open_study(tmp_path, template_hash="other") as study:
            assert set(study.times()) == set(others)


@pytest.mark.parametrize("rest", [b"", b'{"op_code":4,"wor', b"\0" * 4096])
def test_a_kill_or_a_power_cut_in_a_line_costs_that_line(tmp_path, rest):
    with open_study(tmp_path) as study:
        configs = run(study, 3)
        path = study.path
    path.write_bytes(path.read_bytes() + rest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_study(tmp_path) as study:
            assert set(study.times()) == set(configs)
            run(study, 1)
    path.write_bytes(b"")
    with open_study(tmp_path) as study:
        assert study.times() == {}


def test_a_damaged_journal_is_not_taken_from_under_others(tmp_path):
    with open_study(tmp_path) as study:
        run(study, 3)
        study.path.write_bytes(b"not json\n" + study.path.read_bytes())
        before = study.path.read_bytes()
        with pytest.raises(StudyError, match=r"damaged .* another process works on it"):
            open_study(tmp_path)
        assert study.path.read_bytes() == before
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_study_leaves_its_journal_alone_behind(tmp_path):
    (tmp_path / "dead.session").touch()
    with open_study(tmp_path) as first, open_study(tmp_path) as second:
        path = first.path
        run(second, 1)
        second.close()
        assert path.with_suffix(".session").exists()
    assert list(tmp_path.iterdir()) == [path]


def test_a_study_in_use_is_not_put_aside(tmp_path):
    with open_study(tmp_path) as first:
        configs = run(first, 2)
        with pytest.warns(RuntimeWarning, match="another process works on it"):
            second = open_study(tmp_path, resume=False)
        with second:
            assert set(second.times()) == set(configs)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StudyError, match=r"the study .*file/a100.* cannot be opened"):
        open_study(tmp_path / "file")


def test_a_database_takes_the_journal_s_place(tmp_path):
    place = home("sqlite", tmp_path)
    with open_study(tmp_path, **place) as study:
        assert study.path is None
        configs = run(study, 3)
        # Another process's trial is not asked for again while it runs.
        with open_study(tmp_path, **place) as other:
            running = study.ask()
            assert other.ask().config != running.config
            assert set(other.times()) == set(configs)
    assert not list(tmp_path.glob("*.journal"))
    with open_study(tmp_path, **place) as study:
        assert set(study.times()) == set(configs)
        with pytest.warns(RuntimeWarning, match="another process works on it"):
            open_study(tmp_path, resume=False, **place).close()


def test_a_database_s_old_study_is_put_aside(tmp_path):
    place = home("sqlite", tmp_path)
    with open_study(tmp_path, **place) as study:
        run(study, 2)
        name = study.name
    with open_study(tmp_path, resume=False, **place) as study:
        assert study.times() == {}
    names = [summary.study_name for summary in optuna.get_all_study_summaries(place["storage"])]
    assert sorted(names)[0] == name
    assert sorted(names)[1].startswith(f"{name}.old-")


def test_a_dead_host_s_trial_is_given_back(tmp_path, monkeypatch):
    place = home("sqlite", tmp_path)
    with open_study(tmp_path, **place) as study:
        lost = study.ask().config
    with open_study(tmp_path, **place) as study:
        assert lost in study._running()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 4000)
    with open_study(tmp_path, **place) as study:
        assert study._running() == set()
        assert study.enqueue(lost)
        assert study.ask().config == lost


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("studies.db", "is no URL"),
        ("", "is no URL"),
        ("nosuch://host/db", "is no URL that Optuna takes"),
        ("sqlite:////nowhere/at/all.db", "cannot be opened.*unable to open database file"),
        ("postgresql://user:secret@127.0.0.1:1/db", "postgresql://user@127.0.0.1:1/db needs the package psycopg"),
    ],
)
def test_a_storage_that_leads_nowhere_is_a_clear_error(tmp_path, monkeypatch, url, message):
    monkeypatch.setattr("fa2gen.tuning.storage.time.sleep", lambda seconds: None)
    if url.startswith("postgresql") and importlib.util.find_spec("psycopg"):
        pytest.skip("psycopg is installed")
    for attempt in (lambda: open_study(tmp_path, storage=url), lambda: require_storage(url)):
        with pytest.raises(StudyError, match=message) as caught:
            attempt()
        assert "secret" not in str(caught.value)


def test_optuna_says_nothing(tmp_path):
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.unit.test_tuning_study import open_study; from pathlib import Path\n"
        f"open_study(Path({str(tmp_path)!r})).ask()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_dead_process_leaves_no_running_trial(tmp_path):
    with open_study(tmp_path) as study:
        abandoned = study.ask()
    with open_study(tmp_path) as study:
        assert study.enqueue(abandoned.config)
        assert study.ask().config == abandoned.config


def test_the_state_folder_follows_the_environment(tmp_path):
    code = "from fa2gen.tuning.study import state_dir; print(state_dir())"
    inherited = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    for env, expected in (
        ({"FA2GEN_STATE_DIR": str(tmp_path)}, tmp_path / "studies"),
        ({"XDG_STATE_HOME": str(tmp_path)}, tmp_path / "fa2gen" / "studies"),
    ):
        out = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PATH": "", **inherited, **env},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == str(expected)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+pysqlite:///:memory:"])
def test_a_database_in_memory_keeps_nothing(url):
    with pytest.raises(StudyError, match="names no file: the study would end with this process"):
        require_storage(url)
