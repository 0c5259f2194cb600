"""Table files: merge rule, atomic writes, damaged files, fast and quiet reads; kills are in test_store_kills.py."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import signal
import time
import warnings

import pytest

from fa2gen.errors import Fa2genError, StudyError, TableError
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tables import (
    Incumbent,
    Regate,
    load_table,
    merge_entries,
    package_dir,
    render_table,
    require_writable,
    save_entries,
    scan_tables,
    table_path,
    user_dir,
)
from fa2gen.tables.locks import locked
from fa2gen.tables.store import cached_table, search_dirs
from fa2gen.tuning.study import state_dir
from tests.tuning_fakes import entry, table

GPU = get_gpu("a100")


def test_the_user_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "own"))
    assert user_dir() == tmp_path / "own"
    monkeypatch.delenv("FA2GEN_TABLES_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_dir() == tmp_path / "data" / "fa2gen" / "tables"
    assert (package_dir() / "__init__.py").exists()


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_the_user_may_have_no_home(home, monkeypatch, tmp_path):
    """A container that runs under a uid of which it knows nothing: look-ups read the package's tables."""
    monkeypatch.delenv("FA2GEN_TABLES_DIR", raising=False)
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert search_dirs() == (package_dir(),)
    assert {file.source for file in scan_tables()} == {"package"}
    for call in (user_dir, lambda: require_writable(GPU, ["fwd"]), lambda: save_entries(GPU, [entry()])):
        with pytest.raises(TableError, match="no home folder for tuned tables: set FA2GEN_TABLES_DIR"):
            call()
    monkeypatch.delenv("FA2GEN_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "")
    with pytest.raises(StudyError, match="no home folder for studies: set FA2GEN_STATE_DIR"):
        state_dir()
    for folder in ("~nobody-of-this-name/tables", "~/tables", "~"):
        monkeypatch.setenv("FA2GEN_TABLES_DIR", folder)
        with pytest.raises(Fa2genError, match=f"FA2GEN_TABLES_DIR is {folder}, which names no folder"):
            search_dirs()


@pytest.mark.parametrize(("home", "folder"), [("/", "/tables"), ("/root/", "/root/tables")])
def test_a_tilde_is_the_home(home, folder, monkeypatch):
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("FA2GEN_TABLES_DIR", "~/tables")
    assert str(user_dir()) == folder
    monkeypatch.setenv("FA2GEN_TABLES_DIR", "~root/tables")
    assert str(user_dir()) == os.path.expanduser("~root/tables")


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
        ({"kind": "predicted", "utc": NEW, "template": "new"}, {"kind": "measured", "utc": OLD, "template": "old"}, 1),
        ({"kind": "predicted", "utc": OLD}, {"kind": "predicted", "utc": OLD}, 1),
        # Of predictions one of today's templates wins, whatever its age; of two stale ones the newer.
        ({"utc": NEW, "template": "old"}, {"utc": OLD, "template": "new"}, 1),
        ({"utc": OLD, "template": "new"}, {"utc": NEW, "template": "old"}, 0),
        ({"utc": OLD, "template": "old"}, {"utc": NEW, "template": "older"}, 1),
        # Of measured ones the newer, stale or not.
        ({"kind": "measured", "utc": OLD, "template": "new"}, {"kind": "measured", "utc": NEW, "template": "old"}, 1),
    ],
)
def test_merge_rule(present, incoming, winner):
    pair = (entry(ms=1.0, **present), entry(ms=2.0, **incoming))
    assert merge_entries(pair[:1], pair[1:], template_hash=lambda kind, family: "new") == (pair[winner],)
    if present.get("template") is None:
        assert merge_entries(pair[:1], pair[1:]) == (pair[winner],)


def measured(ms, *, spread=0.0, **options):
    row = entry(kind="measured", ms=ms, **options)
    times = dataclasses.replace(row.measurement, p20=ms * (1 - spread), p80=ms * (1 + spread))
    return dataclasses.replace(row, measurement=times)


def with_provenance(row, **fields):
    return dataclasses.replace(row, provenance=dataclasses.replace(row.provenance, **fields))


@pytest.mark.parametrize(
    ("ms", "options", "winner"),
    [
        # Within 2 %, faster or slower, another config changes nothing.
        (0.99, {"block_n": 128}, 0),
        (1.01, {"block_n": 128}, 0),
        (0.97, {"block_n": 128}, 1),
        (1.03, {"block_n": 128}, 1),
        # Ranges that overlap.
        (0.95, {"block_n": 128, "spread": 0.06}, 0),
        (0.95, {"block_n": 128, "spread": 0.01}, 1),
        # The same config is measured again; other templates are another kernel.
        (0.99, {}, 1),
        (0.99, {"block_n": 128, "template": "other"}, 1),
        # Never an older one.
        (0.5, {"block_n": 128, "utc": "2025-01-01T00:00:00Z"}, 0),
    ],
)
def test_noise_is_no_reason_to_change_a_config(ms, options, winner):
    present = measured(1.0, utc=OLD)
    incoming = measured(ms, **{"utc": NEW, **options})
    assert merge_entries([present], [incoming]) == ((present, incoming)[winner],)


def test_a_config_timed_beside_the_incumbent_may_win_within_the_noise():
    present = measured(1.0, utc=OLD)
    incoming = measured(0.99, utc=NEW, block_n=128)
    assert merge_entries([present], [incoming]) == (present,)
    beside = with_provenance(incoming, incumbent=Incumbent(present.config, 1.0))
    assert merge_entries([present], [beside]) == (beside,)


def test_a_gate_passed_again_is_kept():
    present = measured(1.0, utc=OLD, template="old")
    gated = with_provenance(present, regate=Regate("new", "passed", NEW))
    assert merge_entries([present], [gated]) == (gated,)
    assert merge_entries([gated], [present]) == (gated,)
    later = with_provenance(present, regate=Regate("newer", "passed", "2026-03-01T00:00:00Z"))
    assert merge_entries([later], [gated]) == (later,)
    assert merge_entries([gated], [later]) == (later,)


def test_a_save_knows_today_s_templates(tmp_path):
    save_entries(GPU, [entry(utc=OLD, template="new")], root=tmp_path)
    stale = entry(utc=NEW, template="old", ms=3.0)
    save_entries(GPU, [stale], root=tmp_path, template_hash=lambda kind, family: "new")
    path = table_path(tmp_path, "a100", "fwd")
    assert load_table(path).entries[0].provenance.template_hash == "new"


def test_merging_keeps_the_rest(tmp_path):
    first, second = entry(), entry(KernelSpec(dtype="fp16"))
    other_bucket = entry(problem=Problem(1, 512, 512, 16, 16))
    for row in (first, second, other_bucket):
        save_entries(GPU, [row], root=tmp_path)
    entries = load_table(table_path(tmp_path, "a100", "fwd")).entries
    assert sorted(entries, key=repr) == sorted([first, second, other_bucket], key=repr)


def test_every_backup_has_a_name_of_its_own(tmp_path):
    path = table_path(tmp_path, "a100", "fwd")
    path.parent.mkdir()
    for damage in ("first", "second", "third"):
        path.write_text(damage)
        with pytest.warns(RuntimeWarning, match="kept as"):
            save_entries(GPU, [entry()], root=tmp_path)
    backups = path.parent.glob("fwd.json.damaged-*")
    assert sorted(backup.read_text() for backup in backups) == ["first", "second", "third"]


def test_what_killed_writers_left_is_swept(tmp_path):
    (path,) = save_entries(GPU, [entry()], root=tmp_path)
    mine = path.with_name("notes.tmp")
    for leftover in (path.with_name(".fwd.json.abc123.tmp"), path.with_name(".fwd.json.lock"), mine):
        leftover.write_text("half")
    save_entries(GPU, [entry(KernelSpec(dtype="fp16"))], root=tmp_path)
    assert sorted(file.name for file in path.parent.iterdir()) == ["fwd.json", "notes.tmp"]


def test_data_is_on_disk_before_its_name(tmp_path, monkeypatch):
    steps = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(os.readlink(f"/proc/self/fd/{fd}")), real["fsync"](fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(f"{a} -> {b}"), real["replace"](a, b)))
    (path,) = save_entries(GPU, [entry()], root=tmp_path)
    data, rename, folder = steps
    assert rename == f"{data} -> {path}"
    assert folder == str(path.parent)


def test_a_newer_table_is_not_touched(tmp_path):
    path = table_path(tmp_path, "a100", "fwd")
    path.parent.mkdir()
    newer = render_table(table(entry())).replace('"schema": 2', '"schema": 99')
    path.write_text(newer)
    with pytest.raises(TableError, match="install a newer fa2gen"):
        save_entries(GPU, [entry()], root=tmp_path)
    assert path.read_text() == newer


def test_entries_of_another_target_are_refused(tmp_path):
    (path,) = save_entries(GPU, [entry()], root=tmp_path)
    before = path.read_text()
    with pytest.raises(TableError, match="for target sm_80, the entries to be saved are for sm_90"):
        save_entries(dataclasses.replace(GPU, compute_capability=(9, 0)), [entry()], root=tmp_path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a file"),
        (lambda path: os.truncate(os.open(path, os.O_RDWR | os.O_CREAT), 1 << 40), "a table at most"),
    ],
)
def test_what_stands_in_a_table_s_place_neither_hangs_nor_floods(tmp_path, make, why):
    path = table_path(tmp_path, "a100", "fwd")
    path.parent.mkdir()
    make(path)
    with pytest.warns(RuntimeWarning, match=why):
        assert cached_table(path) is None
    for call in (require_writable, save_entries):
        with pytest.raises(TableError, match=f"cannot be written.*{why}"):
            call(GPU, ["fwd"] if call is require_writable else [entry()], root=tmp_path)
    assert os.path.lexists(path)


def test_a_file_system_without_locks_is_known_beforehand(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(TableError, match=r"cannot be written.*No locks available"):
        require_writable(GPU, ["fwd"], root=tmp_path)


def test_a_child_forked_under_the_lock_does_not_keep_it(tmp_path):
    name = tmp_path / "lock"
    with locked(name):
        waiting = os.open(name, os.O_RDONLY)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        # Whoever waited for this very file must get it to see that it is gone.
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(waiting)


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
