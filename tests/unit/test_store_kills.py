"""kill -9 at 200 random moments: no table and no study is damaged, and what was reported done is there."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path

from fa2gen.tables import load_table, save_entries, table_path
from tests.kills import kill_at_random
from tests.store_writers import GPU, SPACE, fake_ms, open_study
from tests.tuning_fakes import entry

KILLS = 200


def _lines(path: Path) -> list[list[str]]:
    """What was reported; a line that a kill tore tells nothing."""
    return [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _kill(target: str, root: Path, reported: Path) -> None:
    """Kills 200 processes at their work; where a busy machine gave them no time for any, as many more, later."""
    reported.touch()
    for longest in (0.12, 0.5, 2.0, 8.0):
        arguments = {"root": str(root), "reported": str(reported)}
        assert kill_at_random(target, arguments, kills=KILLS, longest=longest) == KILLS
        if len(_lines(reported)) >= 10:
            return
    raise AssertionError("200 processes of 4 seconds each reported next to nothing")


def test_tables_survive_kills(tmp_path: Path) -> None:
    reported = tmp_path / "reported"
    _kill("tests.store_writers:save_for_ever", tmp_path / "tables", reported)
    path = table_path(tmp_path / "tables", GPU.name, "fwd")
    # Raises on any damage.
    table = load_table(path)
    assert table is not None
    saved = {int(ratio): (utc, float(ms)) for ratio, ms, utc in _lines(reported)}
    present = {row.spec.gqa_ratio: (row.provenance.utc, row.measurement.ms) for row in table.entries}
    # A newer one may have come between the save and its report.
    assert all(present[ratio] >= row for ratio, row in saved.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_entries(GPU, [entry()], root=tmp_path / "tables")
    assert [file.name for file in path.parent.iterdir()] == ["fwd.json"]


def test_studies_survive_kills_and_lose_the_running_trial_at_most(tmp_path: Path) -> None:
    reported = tmp_path / "reported"
    _kill("tests.store_writers:try_for_ever", tmp_path / "studies", reported)
    told = defaultdict(set)
    for folder, outcome, key in _lines(reported):
        told[folder].add((outcome, key))
    for folder, outcomes in told.items():
        with warnings.catch_warnings():
            # A damaged journal would be put aside with a warning.
            warnings.simplefilter("error")
            study = open_study(tmp_path / "studies" / folder)
        with study:
            times, failures = study.times(), study.failures()
            present = {("complete", config.key()) for config in times}
            present |= {(outcome, config.key()) for config, (outcome, _) in failures.items()}
            assert outcomes <= present
            assert all(ms == fake_ms(config) for config, ms in times.items())
            launches = [text for outcome, text in failures.values() if outcome == "launch_failed"]
            assert all(text.startswith("no sm80_") for text in launches)
            # What ran when the kill came can be asked again.
            if len(times) + len(failures) < len(SPACE.configs):
                assert study.ask() is not None
        assert [file.suffix for file in (tmp_path / "studies" / folder).iterdir()] == [".journal"]
