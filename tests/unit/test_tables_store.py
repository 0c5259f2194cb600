"""Table files: merge rule, atomic writes among processes and kills, damaged files kept, fast and quiet reads."""

from __future__ import annotations

import multiprocessing
import signal
import time
import warnings

import pytest

from fa2gen.errors import TableError
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tables import (
    load_table,
    merge_entries,
    package_dir,
    render_table,
    require_writable,
    save_entries,
    table_path,
    user_dir,
)
from fa2gen.tables.store import cached_table
from tests.tuning_fakes import entry, table

GPU = get_gpu("a100")
# Writers that start at once and, unlike threads, can be killed.
FORK = multiprocessing.get_context("fork")


def test_the_user_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "own"))
    assert user_dir() == tmp_path / "own"
    monkeypatch.delenv("FA2GEN_TABLES_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_dir() == tmp_path / "data" / "fa2gen" / "tables"
    assert (package_dir() / "__init__.py").exists()


def test_a_save_is_read_back(tmp_path):
    rows = [entry(), entry(KernelSpec(causal=True), kind="measured")]
    (path,) = save_entries(GPU, rows, root=tmp_path)
    assert path == tmp_path / "a100" / "fwd.json"
    loaded = load_table(path)
    assert sorted(loaded.entries, key=repr) == sorted(rows, key=repr)
    assert (loaded.gpu, loaded.target, loaded.kind) == ("a100", "sm_80", "fwd")
    assert load_table(tmp_path / "h100" / "fwd.json") is None


OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


@pytest.mark.parametrize(
    ("present", "incoming", "winner"),
    [
        ({"kind": "predicted", "utc": OLD}, {"kind": "predicted", "utc": NEW}, 1),
        ({"kind": "predicted", "utc": NEW}, {"kind": "predicted", "utc": OLD}, 0),
        ({"kind": "measured", "utc": OLD}, {"kind": "measured", "utc": NEW}, 1),
        ({"kind": "measured", "utc": NEW}, {"kind": "measured", "utc": OLD}, 0),
        ({"kind": "predicted", "utc": NEW}, {"kind": "measured", "utc": OLD}, 1),
        # Also when the measured entry's templates are gone.
        ({"kind": "measured", "utc": OLD, "template": "old"}, {"kind": "predicted", "utc": NEW, "template": "new"}, 0),
        ({"kind": "predicted", "utc": OLD}, {"kind": "predicted", "utc": OLD}, 1),
    ],
)
def test_merge_rule(present, incoming, winner):
    pair = (entry(ms=1.0, **present), entry(ms=2.0, **incoming))
    assert merge_entries(pair[:1], pair[1:]) == (pair[winner],)


def test_merging_keeps_the_rest(tmp_path):
    first, second = entry(), entry(KernelSpec(dtype="fp16"))
    other_bucket = entry(problem=Problem(1, 512, 512, 16, 16))
    for row in (first, second, other_bucket):
        save_entries(GPU, [row], root=tmp_path)
    entries = load_table(table_path(tmp_path, "a100", "fwd")).entries
    assert sorted(entries, key=repr) == sorted([first, second, other_bucket], key=repr)


def test_a_damaged_file_is_kept_aside(tmp_path):
    path = table_path(tmp_path, "a100", "fwd")
    path.parent.mkdir()
    for number, damage in enumerate((b"", render_table(table(entry()))[:-40].encode(), b"\xff\xfe\x00")):
        path.write_bytes(damage)
        with pytest.warns(RuntimeWarning, match="kept as fwd.json.damaged"):
            save_entries(GPU, [entry(ms=1.0 + number)], root=tmp_path)
        assert [row.measurement.ms for row in load_table(path).entries] == [1.0 + number]
        (backup,) = (file for file in path.parent.glob("fwd.json.damaged-*"))
        assert backup.read_bytes() == damage
        backup.unlink()


def test_a_newer_table_is_not_touched(tmp_path):
    path = table_path(tmp_path, "a100", "fwd")
    path.parent.mkdir()
    newer = render_table(table(entry())).replace('"schema": 2', '"schema": 99')
    path.write_text(newer)
    with pytest.raises(TableError, match="install a newer fa2gen"):
        save_entries(GPU, [entry()], root=tmp_path)
    assert path.read_text() == newer


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "a100").write_text("a file in the way")
    with pytest.raises(TableError, match="cannot be written"):
        save_entries(GPU, [entry()], root=tmp_path)


def test_run_time_reads_are_cached_until_the_file_changes(tmp_path, monkeypatch):
    (path,) = save_entries(GPU, [entry()], root=tmp_path)
    first = cached_table(path)
    assert cached_table(path) is first
    save_entries(GPU, [entry(KernelSpec(dtype="fp16"))], root=tmp_path)
    assert len(cached_table(path).entries) == 2
    path.unlink()
    assert cached_table(path) is None


def test_run_time_ignores_a_bad_table_with_one_warning(tmp_path):
    path = table_path(tmp_path, "a100", "fwd")
    path.parent.mkdir()
    path.write_text("{")
    with pytest.warns(RuntimeWarning, match="ignoring a tuned table"):
        assert cached_table(path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cached_table(path) is None
    save = path.with_name("fwd.json")
    with pytest.warns(RuntimeWarning):
        save_entries(GPU, [entry()], root=tmp_path)
    assert len(cached_table(save).entries) == 1


def _write(root, first, count, started=None, head_dim=128):
    for ratio in range(first, first + count):
        spec = KernelSpec(head_dim=head_dim, gqa_ratio=ratio, alignment=2)
        save_entries(GPU, [entry(spec, ms=float(ratio))], root=root)
        if started is not None:
            started.set()


def test_eight_processes_merge_into_one_file(tmp_path):
    writers = [FORK.Process(target=_write, args=(tmp_path, 1 + 5 * number, 5)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    entries = load_table(table_path(tmp_path, "a100", "fwd")).entries
    assert {row.spec.gqa_ratio: row.measurement.ms for row in entries} == {
        ratio: float(ratio) for ratio in range(1, 41)
    }


def test_kills_in_the_middle_of_saves_lose_nothing_that_was_saved(tmp_path):
    path = table_path(tmp_path, "a100", "fwd")
    kept = set()
    for attempt in range(25):
        started = FORK.Event()
        writer = FORK.Process(target=_write, args=(tmp_path, 1, 1000, started, 1 + attempt))
        writer.start()
        assert started.wait(60)
        time.sleep(0.0007 * attempt)
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        # The file is whole after every kill and holds all that was there, and the dead writer blocks nobody.
        present = {row.spec for row in load_table(path).entries}
        assert present > kept
        mine = KernelSpec(gqa_ratio=1 + attempt)
        save_entries(GPU, [entry(mine)], root=tmp_path)
        kept = {row.spec for row in load_table(path).entries}
        assert kept == present | {mine}


def test_what_cannot_be_written_is_known_beforehand(tmp_path):
    require_writable(GPU, ["fwd"], root=tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["a100"]
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    with pytest.raises(TableError, match="cannot be written"):
        require_writable(GPU, ["fwd"], root=blocked)
    path = table_path(tmp_path, "a100", "fwd")
    path.mkdir(parents=True)
    with pytest.raises(TableError, match="cannot be written"):
        require_writable(GPU, ["fwd"], root=tmp_path)
    path.rmdir()
    newer = '{"schema": 99, "gpu": "a100", "target": "sm_80", "kind": "fwd", "entries": []}'
    path.write_text(newer)
    with pytest.raises(TableError, match="newer fa2gen"):
        require_writable(GPU, ["fwd"], root=tmp_path)
    assert path.read_text() == newer
    # Damage is repaired by the save, which keeps a copy.
    path.write_text("{")
    require_writable(GPU, ["fwd"], root=tmp_path)
    assert path.read_text() == "{"
