"""The committed training runs: whole, in agreement, told by README as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpt import report
from benchmarks.gpt.runs import Run, read_csv

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "train_gpt"
README = " ".join((ROOT / "README.md").read_text().split())
SETTINGS = ["1.3b_2k", "1.3b_8k", "2.7b_2k", "2.7b_8k"]


def runs_of(setting: str) -> list[Run]:
    return read_csv(sorted(RESULTS.glob(f"{setting}_*.csv")))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_summary_is_that_of_the_runs(setting: str) -> None:
    runs = runs_of(setting)
    document = json.loads((RESULTS / f"{setting}.json").read_text())
    assert {"gpu", "driver", "torch", "utc", "command", "text", "method"} <= set(document["provenance"])
    assert len(runs[0].losses) == document["setting"]["steps"] >= 200
    assert runs[0].setting.flops() == document["setting"]["flops_per_step"]
    assert [run.file_name() for run in runs] == [told["csv"] for told in document["runs"]]
    for run, told in zip(runs, document["runs"], strict=True):
        assert run.step_ms.median == pytest.approx(told["ms"]["median"], abs=1e-4)
        assert run.mfu() == pytest.approx(told["mfu"], rel=1e-5)
    for verdict, told in zip(report.judge_all(runs), document["verdicts"], strict=True):
        assert (verdict.attention, verdict.seeds, verdict.step) == (told["attention"], told["seeds"], told["step"])
        assert verdict.ratio == pytest.approx(told["ratio"], rel=1e-2)
        assert verdict.agrees
        assert told["agrees"]
    assert (RESULTS / f"{setting}.png").stat().st_size > 10_000


@pytest.mark.parametrize("setting", SETTINGS)
def test_readme_s_line(setting: str) -> None:
    runs = runs_of(setting)
    firsts = {run.attention: run for run in reversed(runs)}
    (verdict,) = (one for one in report.judge_all(runs) if one.attention == "fa2gen")
    columns = [_throughput(firsts.get(name)) for name in ("fa2gen", "flash", "cudnn", "math")]
    shape, length = setting.split("_")
    line = f"| {shape.upper()}, {length} | {' | '.join(columns)} | {verdict.ratio:.2g} |"
    assert line in README, f"README lacks {line}"


def _throughput(run: Run | None) -> str:
    if run is None:
        return "-"
    mfu = run.mfu()
    assert mfu is not None
    return f"{run.tokens_per_s / 1e3:.1f} ({100 * mfu:.1f} %)"
