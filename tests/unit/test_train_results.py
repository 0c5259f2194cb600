"""The committed training runs: whole, in agreement, told by README as they are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.gpt import report
from benchmarks.gpt.gradients import LIMIT, GradientErrors, largest_ratio
from benchmarks.gpt.runs import Run, read_csv
from benchmarks.gpt.verdict import smooth

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "train_gpt"
README = " ".join((ROOT / "README.md").read_text().split())
SETTINGS = ["1.3b_2k", "1.3b_2k_800steps", "1.3b_8k", "2.7b_2k", "2.7b_8k"]
CHECKED = ["1.3b_2k", "1.3b_8k", "2.7b_2k", "2.7b_8k"]
"""Whose gradients were compared."""


def runs_of(setting: str) -> list[Run]:
    document = json.loads((RESULTS / f"{setting}.json").read_text())
    return read_csv([RESULTS / told["csv"] for told in document["runs"]])


def test_every_file_belongs_to_a_setting() -> None:
    known = {run.file_name() for setting in SETTINGS for run in runs_of(setting)}
    known |= {f"{setting}.{ending}" for setting in SETTINGS for ending in ("json", "png")}
    assert {path.name for path in RESULTS.iterdir()} - known == {f"{setting}_gradients.json" for setting in CHECKED}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_summary_is_that_of_the_runs(setting: str) -> None:
    runs = runs_of(setting)
    document = json.loads((RESULTS / f"{setting}.json").read_text())
    assert {"gpu", "driver", "torch", "utc", "command", "text", "method"} <= set(document["provenance"])
    assert document["provenance"]["method"] == report.METHOD
    assert len(runs[0].losses) == document["setting"]["steps"] >= 200
    assert document["provenance"]["text"]["sha256"].startswith(runs[0].setting.text)
    assert runs[0].setting.flops() == document["setting"]["flops_per_step"]
    assert runs[0].setting.slug() == setting
    for run, told in zip(runs, document["runs"], strict=True):
        assert run.step_ms.median == pytest.approx(told["ms"]["median"], abs=1e-4)
        assert run.mfu() == pytest.approx(told["mfu"], rel=1e-5)
    for verdict, told in zip(report.judge_all(runs), document["verdicts"], strict=True):
        assert (verdict.attention, verdict.seeds, verdict.step) == (told["attention"], told["seeds"], told["step"])
        assert verdict.ratio == pytest.approx(told["ratio"], rel=1e-2)
        assert verdict.agrees
        assert told["agrees"]
    assert (RESULTS / f"{setting}.png").stat().st_size > 10_000


@pytest.mark.parametrize("setting", CHECKED)
def test_gradients_agree(setting: str) -> None:
    document = json.loads((RESULTS / f"{setting}_gradients.json").read_text())
    assert (document["reference"], document["limit"]) == ("flash", LIMIT)
    assert document["provenance"]["method"] == report.GRADIENTS_METHOD
    assert dataclasses.asdict(runs_of(setting)[0].setting) == document["setting"]
    errors = {
        one["attention"]: GradientErrors(one["attention"], [tuple(layer.values()) for layer in one["relative"]])
        for one in document["gradients"]
    }
    for one in document["gradients"]:
        assert one["ratio"] == largest_ratio(errors[one["attention"]], errors["flash"])[0] <= LIMIT
        assert len(one["relative"]) == document["setting"]["layers"]
    # README: a gradient of half its size would stand out.
    assert 0.5 / max(errors["flash"].worst(part) for part in range(3)) > 30


@pytest.mark.parametrize("setting", SETTINGS)
def test_readme_s_line(setting: str) -> None:
    runs = runs_of(setting)
    firsts = {run.attention: run for run in reversed(runs)}
    columns = [_throughput(firsts.get(name)) for name in ("fa2gen", "flash", "cudnn", "math")]
    columns += [f"{_losses_apart(setting, 'fa2gen'):.2g}", _gradients(setting)]
    shape, length, *_ = setting.split("_")
    line = f"| {shape.upper()}, {length}, {runs[0].setting.steps} | {' | '.join(columns)} |"
    assert line in README, f"README lacks {line}"


def test_readme_s_sentences() -> None:
    causal = [100 * (runs_of(setting)[0].mfu(causal=True) or 0) for setting in SETTINGS]
    cudnn = [f"{_losses_apart(setting, 'cudnn'):.2g}" for setting in SETTINGS]
    ends = [float(smooth(run.losses)[-1]) for setting in SETTINGS for run in runs_of(setting) if run.seed == 0]
    for text in (
        f"fa2gen's are {_listed([f'{share:.1f}' for share in causal])} %",
        f"cuDNN's are at {_listed(cudnn)}.",
        f"They end at {min(ends):.2f} to {max(ends):.2f} nats a byte",
    ):
        assert text in README, f"README lacks: {text}"


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _losses_apart(setting: str, attention: str) -> float:
    (verdict,) = (one for one in report.judge_all(runs_of(setting)) if one.attention == attention)
    return verdict.ratio


def _gradients(setting: str) -> str:
    if setting not in CHECKED:
        return "-"
    document = json.loads((RESULTS / f"{setting}_gradients.json").read_text())
    (ratio,) = (one["ratio"] for one in document["gradients"] if one["attention"] == "fa2gen")
    return f"{ratio:.2f}"


def _throughput(run: Run | None) -> str:
    if run is None:
        return "-"
    mfu = run.mfu()
    assert mfu is not None
    return f"{run.tokens_per_s / 1e3:.1f} ({100 * mfu:.1f} %)"
