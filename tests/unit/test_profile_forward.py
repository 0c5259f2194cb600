"""``benchmarks/profile_forward.py`` on the committed counters: what the document shows is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import profile_forward

ROOT = Path(__file__).resolve().parents[2]
COUNTERS = ROOT / "benchmarks" / "results" / "h200_forward_profile.csv"


def _table(path: Path) -> tuple[int, str]:
    done = CliRunner().invoke(profile_forward.cli, ["table", str(path)])
    return done.exit_code, done.output


def test_the_document_s_table_is_that_of_the_counters() -> None:
    code, text = _table(COUNTERS)
    assert code == 0
    assert text.count("\n| `d") == 12
    assert text in (ROOT / "benchmarks" / "hopper_forward.md").read_text()


def test_what_ncu_prints_around_the_counters_is_passed_over(tmp_path: Path) -> None:
    header, *rows = COUNTERS.read_text().splitlines()
    path = tmp_path / "profile.csv"
    path.write_text("\n".join(["==PROF== Connected to process 1", header, *rows]) + "\n")
    assert _table(path) == _table(COUNTERS)


@pytest.mark.parametrize("damage", ["", "nothing of the kind", "header alone", "cut row", "no number"])
def test_other_files_are_refused(damage: str, tmp_path: Path) -> None:
    header, _, row, *_ = COUNTERS.read_text().splitlines()
    texts = {
        "header alone": header.replace("sm__cycles_elapsed.max", "x") + "\n" + row,
        "cut row": f"{header}\n{row.rpartition(',')[0]}\n",
        "no number": f"{header}\n{row.rpartition(',')[0]},\n",
    }
    path = tmp_path / "profile.csv"
    path.write_text(texts.get(damage, damage))
    code, text = _table(path)
    assert code == 1
    assert "is not what the ncu command writes" in text


def test_the_command_asks_for_what_the_table_shows() -> None:
    text = CliRunner().invoke(profile_forward.cli, ["command"]).output
    assert all(metric in text for metric, _ in profile_forward.COLUMNS.values())
    assert all(name in text for name in profile_forward.STALLS)
