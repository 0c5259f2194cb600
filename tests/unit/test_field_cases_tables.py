"""Defects of other tuners' tables and studies (each test names its case), as this one meets them."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from fa2gen.constraints import default_config
from fa2gen.hardware import Gpu, get_gpu, match_device
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import SOURCES, TunedEntry, load_table, lookup, parse_table, render_table, save_entries, table_path
from fa2gen.tables.store import cached_table
from fa2gen.tuning.space import GRIDS, Space, legal_space
from fa2gen.tuning.storage import Database, Journal
from fa2gen.tuning.study import TuningStudy
from tests.tuning_fakes import PROBLEM, entry, table

GPU = get_gpu("a100")
SPEC = KernelSpec()
BUCKET = PROBLEM.bucket(GPU.num_sms)
FORK = multiprocessing.get_context("fork")


def together(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Runs ``work(number, *arguments)`` in so many processes that start at once; none may fail."""
    barrier = FORK.Barrier(count)

    def run(number: int) -> None:
        barrier.wait(60)
        work(number, *arguments)

    processes = [FORK.Process(target=run, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count


def every_key() -> list[TunedEntry]:
    """One entry for every combination of what a key holds, each with a config of its own."""
    specs = [
        KernelSpec(head_dim=head_dim, dtype=dtype, causal=causal, gqa_ratio=ratio, alignment=alignment)
        for head_dim, dtype, causal, ratio, alignment in itertools.product(
            (64, 80, 128), ("bf16", "fp16"), (False, True), (1, 2, 8), (16, 2)
        )
    ]
    rows = []
    for number, (spec, lengths) in enumerate(itertools.product(specs, ((512, 512), (4096, 512), (4096, 4096)))):
        problem = Problem(1, *lengths, 2 * spec.gqa_ratio, 2)
        shape = {"block_m": 64 * (1 + number % 2), "num_warps": 4, "block_n": 32, "step_n": 32}
        rows.append(entry(spec, problem, ms=1.0 + number, min_blocks=1 + number % 2, **shape))
    return rows


def test_bl_128_every_key_round_trips(tmp_path: Path) -> None:
    rows = every_key()
    assert len({row.key for row in rows}) == len(rows) == 216
    save_entries(GPU, rows, root=tmp_path)
    for row in rows:
        match = lookup(row.spec, row.bucket, GPU, roots=[tmp_path], strict=True)
        assert (match.source, match.entry, match.config) == ("exact", row, row.config)


def test_bl_131_an_entry_is_exact_on_its_own_device_only(tmp_path: Path) -> None:
    h200, pcie = get_gpu("h200"), get_gpu("h100-pcie")
    assert h200.target == pcie.target
    save_entries(h200, [entry(block_n=128)], root=tmp_path)
    assert lookup(SPEC, BUCKET, h200, roots=[tmp_path]).source == "exact"
    # Another product, and a slice that calls itself by the same name.
    for other in (pcie, match_device("NVIDIA H200", h200.compute_capability, 60, h200.l2_bytes)):
        match = lookup(SPEC, BUCKET, other, roots=[tmp_path])
        assert (match.source, match.gpu, match.config.block_n) == ("other gpu", "h200", 128)
        assert "other gpu" in match.describe()
        assert "from h200" in match.describe()
    # Equal capability to nothing here: the default, and it says so.
    assert lookup(SPEC, BUCKET, get_gpu("rtx-4090"), roots=[tmp_path]).describe().endswith(": default")
    assert "other gpu" in SOURCES


def _save_own(number: int, root: Path) -> None:
    for step in range(6):
        own = KernelSpec(gqa_ratio=1 + 6 * number + step)
        shared = KernelSpec(dtype="fp16")
        utc = f"2026-01-01T00:{step:02d}:{number:02d}Z"
        save_entries(GPU, [entry(own, ms=1.0 + number), entry(shared, ms=1.0 + number, utc=utc)], root=root)
        read = load_table(table_path(root, GPU.name, "fwd"))
        assert read is not None
        assert own in {row.spec for row in read.entries}


def test_bl_138_eight_processes_write_one_table(tmp_path: Path) -> None:
    together(8, _save_own, tmp_path)
    path = table_path(tmp_path, GPU.name, "fwd")
    read = load_table(path)
    assert read is not None
    times = {row.spec.gqa_ratio: row.measurement.ms for row in read.entries if row.spec.dtype == "bf16"}
    assert times == {1 + 6 * number + step: 1.0 + number for number in range(8) for step in range(6)}
    (shared,) = (row for row in read.entries if row.spec.dtype == "fp16")
    assert (shared.provenance.utc, shared.measurement.ms) == ("2026-01-01T00:05:07Z", 8.0)
    assert [file.name for file in path.parent.iterdir()] == ["fwd.json"]


def _home(kind: str, folder: Path, number: int = 0) -> Journal | Database:
    sampler = optuna.samplers.RandomSampler(seed=number)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if kind == "journal":
        return Journal(folder, "study", sampler, resume=True)
    return Database(f"sqlite:///{folder / 'study.db'}", "study", sampler, resume=True)


def _try(number: int, kind: str, folder: Path, trials: int) -> None:
    home = _home(kind, folder, number)
    for step in range(trials):
        trial = home.study.ask(
            {"num_warps": optuna.distributions.CategoricalDistribution(GRIDS["fwd"]["sm80"].values["num_warps"])}
        )
        home.begin(trial)
        trial.set_user_attr("mine", f"{number}/{step}")
        home.study.tell(trial, float(number))
    home.close()


@pytest.mark.parametrize(
    ("kind", "processes", "trials"),
    [
        ("journal", 8, 25),
        ("sqlite", 4, 5),
        pytest.param("journal", 32, 100, marks=pytest.mark.slow),
        # 100 trials each pass as well, in ten minutes on two cores: each trial is a dozen synced transactions.
        pytest.param("sqlite", 32, 10, marks=pytest.mark.slow),
    ],
)
def test_bl_156_many_processes_on_one_study(tmp_path: Path, kind: str, processes: int, trials: int) -> None:
    together(processes, _try, kind, tmp_path, trials)
    home = _home(kind, tmp_path)
    done = home.study.get_trials(deepcopy=False)
    assert {trial.state for trial in done} == {optuna.trial.TrialState.COMPLETE}
    assert len(done) == processes * trials
    assert {trial.user_attrs["mine"] for trial in done} == {
        f"{number}/{step}" for number in range(processes) for step in range(trials)
    }
    assert sorted(trial.number for trial in done) == list(range(processes * trials))
    home.close()


def _create(number: int, kind: str, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        home = _home(kind, folder, number)
    assert home.study.study_name == "study"
    home.close()


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_bl_157_sixteen_processes_create_one_study(tmp_path: Path, kind: str) -> None:
    together(16, _create, kind, tmp_path)
    home = _home(kind, tmp_path)
    assert [study.study_name for study in optuna.get_all_study_summaries(home.study._storage)] == ["study"]
    assert home.study.get_trials() == []
    home.close()


def _table_text() -> str:
    return render_table(table(entry(), entry(KernelSpec(causal=True)), entry(KernelSpec(dtype="fp16"), ms=2.5)))


# What is wrong with a file -> (its text, how many of its three entries can be saved).
DAMAGES: dict[str, tuple[str, int]] = {
    "0 bytes": ("", 0),
    "cut after a comma": (_table_text()[: _table_text().rindex(",\n") + 2], 2),
    "cut in an entry": (_table_text()[:-100], 2),
    "wrong device": (_table_text().replace('"gpu": "a100"', '"gpu": "h100"'), 0),
    "duplicate keys": (_table_text().replace('"ms": 1.5', '"ms": 1.5, "ms": 1.0', 1), 2),
    "duplicate entries": (_table_text().replace("]}\n", ",\n" + _table_text().splitlines()[1].rstrip(",") + "]}\n"), 3),
    "not a number": (_table_text().replace('"ms": 2.5', '"ms": NaN'), 2),
    "infinite": (_table_text().replace('"ms": 2.5', '"ms": 1e999'), 2),
    "binary": ("\x00\x01\x7f" * 50, 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bl_161_run_time_ignores_a_damaged_table_with_one_warning(tmp_path: Path, damage: str) -> None:
    path = table_path(tmp_path, GPU.name, "fwd")
    path.parent.mkdir()
    path.write_text(DAMAGES[damage][0])
    with pytest.warns(RuntimeWarning, match="ignoring a tuned table") as caught:
        matches = [lookup(SPEC, BUCKET, GPU, roots=[tmp_path]) for _ in range(3)]
    assert len(caught) == 1
    assert {(match.source, match.config) for match in matches} == {("default", default_config(SPEC))}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bl_161_the_tuner_backs_up_a_damaged_table_and_keeps_whole_entries(tmp_path: Path, damage: str) -> None:
    text, whole = DAMAGES[damage]
    path = table_path(tmp_path, GPU.name, "fwd")
    path.parent.mkdir()
    path.write_text(text)
    new = entry(KernelSpec(gqa_ratio=4))
    with pytest.warns(RuntimeWarning, match=f"with {whole} whole entries taken over"):
        save_entries(GPU, [new], root=tmp_path)
    (backup,) = path.parent.glob("fwd.json.damaged-*")
    assert backup.read_text() == text
    read = load_table(path)
    assert read is not None
    originals = parse_table(_table_text(), "f").entries
    assert len(read.entries) == whole + 1
    assert set(map(repr, read.entries)) <= set(map(repr, (*originals, new)))


def test_bl_161_a_table_of_a_newer_version_is_ignored_and_never_replaced(tmp_path: Path) -> None:
    path = table_path(tmp_path, GPU.name, "fwd")
    path.parent.mkdir()
    path.write_text(_table_text().replace('"schema": 2', '"schema": 4'))
    with pytest.warns(RuntimeWarning, match="install a newer fa2gen") as caught:
        matches = [lookup(SPEC, BUCKET, GPU, roots=[tmp_path]) for _ in range(3)]
    assert len(caught) == 1
    assert {match.source for match in matches} == {"default"}
    before = path.read_bytes()
    with pytest.raises(Exception, match="install a newer fa2gen"):
        save_entries(GPU, [entry()], root=tmp_path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["fwd.json"]


def test_bl_162_a_config_that_left_the_space_is_not_offered_again(tmp_path: Path) -> None:
    whole = legal_space(SPEC, GPU)
    best = whole.configs[5]

    def open_study(space: Space) -> TuningStudy:
        return TuningStudy(GPU, SPEC, BUCKET, template_hash="t", space=space, directory=tmp_path)

    with open_study(whole) as study:
        study.record(best, 0.5)
        assert next(iter(study.times())) == best
    less = Space(tuple(config for config in whole.configs if config.block_m != best.block_m), ())
    with open_study(less) as study:
        assert study.times() == {}
        for _ in range(5):
            asked = study.ask()
            assert asked is not None
            study.complete(asked, 1.0)
        assert best not in study.times()
    with open_study(whole) as study:
        assert list(study.times()) == [best]


def test_bl_162_a_config_that_became_illegal_is_not_run(tmp_path: Path) -> None:
    row = entry(block_m=128, block_n=128, num_stages=3)
    save_entries(GPU, [row], root=tmp_path)
    small: Gpu = dataclasses.replace(GPU, compute_capability=(8, 6))
    match = lookup(SPEC, BUCKET, small, roots=[tmp_path])
    assert match.config != row.config
    assert match.config == default_config(SPEC)
    assert isinstance(match.config, FwdConfig)


def test_bl_161_reading_costs_nothing_once_it_is_known_bad(tmp_path: Path) -> None:
    path = table_path(tmp_path, GPU.name, "fwd")
    path.parent.mkdir()
    path.write_text(_table_text()[:-100] * 200)
    with pytest.warns(RuntimeWarning):
        cached_table(path)
    start = time.perf_counter()
    for _ in range(100):
        assert cached_table(path) is None
    assert time.perf_counter() - start < 0.5
