"""``fa2gen cache``: listing, cleaning and checking the kernel cache, beside processes that use it."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fa2gen.cli import main
from fa2gen.commands import doctor
from fa2gen.commands.units import age_text, size_text
from fa2gen.compile import admin, entry
from fa2gen.compile.cache import CubinCache
from fa2gen.compile.locks import hold, new_folder
from fa2gen.compile.store import EntryStore
from tests.cache_fakes import (
    DAMAGE,
    build_of,
    entry_folder,
    key_of,
    program_name,
    program_of,
    store_one,
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder.mkdir(mode=0o700)
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["cache", *arguments])


def run_json(*arguments: str, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def store_program(root: Path, number: int = 1) -> Path:
    made = EntryStore(root, "emulator").read_or_build(program_name(number), ("kernel",), lambda: program_of("p"))[0]
    assert made.folder is not None
    return made.folder


def used_days_ago(folder: Path, days: float) -> None:
    os.utime(folder, (time.time() - days * 86400,) * 2)


# ---- ls


def test_ls_shows_kernels_and_programs(root: Path) -> None:
    used_days_ago(store_one(root, "a"), 3.1)
    store_program(root)
    lines = run("ls").stdout.splitlines()
    assert lines[0].split() == ["kernel", "target", "compiler", "size", "age", "last", "use"]
    assert lines[1].split()[:2] == ["program_p", "host"]
    assert "g++ 12" in lines[1]
    assert lines[2].split()[:4] == ["kernel_a", "sm_80", "nvcc", "13.0.88"]
    assert lines[2].endswith("3 d")
    assert lines[3].startswith("2 entries, ")
    listed = run_json("ls")
    assert listed["count"] == 2
    assert {(e["kernel"], e["section"], e["status"]) for e in listed["entries"]} == {
        ("kernel_a", "kernels", "ok"),
        ("program_p", "emulator", "ok"),
    }
    sizes = [sum(file.stat().st_size for file in Path(e["path"]).iterdir()) for e in listed["entries"]]
    assert [e["size"] for e in listed["entries"]] == sizes
    assert listed["bytes"] == sum(sizes) == admin.totals(root)[1]


def test_ls_of_an_empty_cache_and_of_none(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("ls").stdout == f"0 entries, 0 B, in {root}\n"
    assert run_json("ls") == {"root": str(root), "entries": [], "count": 0, "bytes": 0}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "file"))
    result = run("ls")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: there is no cache folder that can be used")


def test_ls_notes_no_use(root: Path) -> None:
    folder = store_one(root)
    used_days_ago(folder, 100)
    before = folder.stat().st_mtime
    run("ls")
    run("verify")
    assert folder.stat().st_mtime == before


def test_ls_names_damage_and_other_formats(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (store_one(root, "a") / "build.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(entry, "FORMAT", entry.FORMAT + 1)
        path = store_one(root, "b")
        assert path.is_dir()
    text = run("ls").stdout
    assert "damaged: build.json cannot be read" in text
    assert "other format: it has format 3, this version writes 2" in text
    assert run_json("verify", code=1)["other_format"] == 1


# ---- verify


@pytest.mark.parametrize("name", ["build.json", "kernel.cubin", "kernel.cu"])
@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_verify_finds_and_deletes_damage_in_every_file(root: Path, name: str, damage: str) -> None:
    good, bad = store_one(root, "a"), store_one(root, "b")
    DAMAGE[damage](bad / name)
    verdict = run_json("verify", code=1)
    assert (verdict["checked"], verdict["removed"], verdict["remain"]) == (2, 0, 1)
    assert [each["path"] for each in verdict["damaged"]] == [str(bad)]
    assert name in verdict["damaged"][0]["reason"]
    assert run("verify").exit_code == 1
    deleted = run("verify", "--delete")
    assert deleted.exit_code == 0
    assert f"damaged, removed: {bad}" in deleted.stdout
    assert not bad.parent.exists()
    assert good.exists()
    assert run_json("verify") == {
        "root": str(root), "checked": 1, "other_format": 0, "damaged": [], "removed": 0, "remain": 0,
    }  # fmt: skip


def test_verify_knows_a_source_that_does_not_fit_the_key(root: Path) -> None:
    # Whole by all its checksums, but the text is another one's: only the key tells.
    folder = store_one(root, "a")
    (folder / "kernel.cu").write_text("b")
    manifest = json.loads((folder / "build.json").read_text())
    del manifest["checksum"]
    manifest["files"]["kernel.cu"] = {"sha256": entry.sha256(b"b"), "bytes": 1}
    (folder / "build.json").write_text(json.dumps({**manifest, "checksum": entry.checksum(manifest)}))
    (found,) = run_json("verify", code=1)["damaged"]
    assert found["reason"] == "kernel.cu is not the source that its key names"


def test_verify_knows_foreign_entries_and_files(root: Path) -> None:
    folder = store_one(root, "a")
    (folder / "stray").write_text("x")
    store_one(root, "b").rename(folder.with_name(key_of("c").full))
    store_program(root).rename(root / "emulator" / program_name(9))
    (root / "emulator" / program_name(8)).write_text("a file in place of an entry")
    verdict = run_json("verify", code=1)
    assert sorted(each["reason"] for each in verdict["damaged"]) == [
        "build.json describes another kernel",
        "build.json describes another kernel",
        "it is not a folder",
        "stray does not belong to it",
    ]
    assert run("verify", "--delete").exit_code == 0
    assert run_json("ls")["count"] == 0


def test_what_is_not_the_caches_is_left_alone(root: Path) -> None:
    # $FA2GEN_CACHE_DIR may name a folder that holds other things, even in folders of these names.
    mine = [root / "kernels" / "linux" / "6.1" / "notes", root / "emulator" / "qemu", root / "tmp" / "draft"]
    for path in (*mine, root / "notes"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not the cache's")
    store_one(root)
    assert run_json("verify", "--delete")["checked"] == 1
    assert len(run_json("gc", "--max-size", "0")["removed"]) == 1
    assert all(path.exists() for path in (*mine, root / "notes"))


# ---- gc


def test_gc_removes_the_least_recently_used_first(root: Path) -> None:
    folders = {text: store_one(root, text, size=10_000) for text in "abcd"}
    for text, days in (("a", 1), ("b", 9), ("c", 5), ("d", 7)):
        used_days_ago(folders[text], days)
    size = run_json("ls")["bytes"]
    dry = run_json("gc", "--max-size", str(size // 2), "--dry-run")
    assert [each["kernel"] for each in dry["removed"]] == ["kernel_b", "kernel_d"]
    assert run_json("ls")["count"] == 4
    assert "would remove kernel_b sm_80: " in run("gc", "--max-size", str(size // 2), "--dry-run").stdout
    done = run_json("gc", "--max-size", str(size // 2))
    assert {**dry, "dry_run": False} == done
    assert done["kept_bytes"] == run_json("ls")["bytes"] <= size // 2
    assert not folders["b"].parent.exists(), "empty parents go too"
    assert [each["kernel"] for each in run_json("gc", "--max-age", "3d")["removed"]] == ["kernel_c"]
    assert run("gc", "--max-age", "0s", "--max-size", "0").stdout.startswith("removed 1 entry (")
    assert run_json("ls")["count"] == 0


def test_gc_without_a_limit_sweeps_only(root: Path, tmp_path: Path) -> None:
    used_days_ago(store_one(root), 1000)
    dead, lock = root / "tmp" / f"1-{'a' * 32}", root / "locks" / f"{'b' * 64}.lock"
    dead.mkdir()
    lock.touch()
    scratch = tmp_path / f"fa2gen-scratch-1-{'c' * 32}"
    scratch.mkdir()
    _alive, _lease = new_folder(root / "tmp")
    assert run_json("gc", "--dry-run")["leftovers"] == 4, "who is alive is not tried in a dry run"
    assert dead.exists()
    result = run_json("gc")
    assert (result["removed"], result["leftovers"], result["kept"]) == ([], 3, 1)
    assert not dead.exists()
    assert not lock.exists()
    assert not scratch.exists()


def test_gc_keeps_what_is_in_use(root: Path) -> None:
    folder = store_one(root)
    lease = hold(folder)
    assert lease is not None
    with lease:
        result = run_json("gc", "--max-size", "0")
        assert [each["kernel"] for each in result["busy"]] == ["kernel_a"]
        assert result["removed"] == []
        assert "kept 1 entry in use" in run("gc", "--max-size", "0").stdout
    assert CubinCache(root).get(key_of("a")) == build_of("a")
    assert len(run_json("gc", "--max-size", "0")["removed"]) == 1


def test_gc_beside_builders_and_another_gc(root: Path) -> None:
    stop, errors, rounds = threading.Event(), [], [0] * 5

    def work(index: int, collect: bool) -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                if collect:
                    admin.collect(root, max_bytes=0)
                    continue
                text = str(number % 3)
                built, _ = CubinCache(root).get_or_build(key_of(text), text, lambda text=text: build_of(text))
                assert built == build_of(text)
        except BaseException as error:
            errors.append(error)
        rounds[index] = number

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=work, args=(index, index < 2)) for index in range(5)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert min(rounds) > 5
    assert admin.verify(root).bad == ()


@pytest.mark.parametrize("option", ["--max-size", "--max-age"])
@pytest.mark.parametrize("value", ["", "-1", "much", "1X", "nan", "inf", "1e3d", "5"])
def test_odd_limits_are_refused(root: Path, option: str, value: str) -> None:
    store_one(root)
    result = run("gc", option, value)
    if (option, value) == ("--max-size", "5"):
        assert result.exit_code == 0
        return
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert option in result.stderr
    assert entry_folder(root, key_of("a")).exists()


def test_sizes_and_ages_as_text() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 150 << 10, 3 << 30, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KB", "150 KB", "3.0 GB", "5120 GB",
    ]  # fmt: skip
    assert [age_text(s) for s in (-5, 1, 119, 7199, 7200, 172800)] == ["0 s", "1 s", "119 s", "120 min", "2 h", "2 d"]


def test_every_command_explains_itself_with_an_example(root: Path) -> None:
    for arguments in ((), ("ls",), ("gc",), ("verify",)):
        text = run(*arguments, "--help").stdout
        assert f"fa2gen {' '.join(('cache', *arguments))}" in text
        assert "Examples:" in text


def test_doctor_shows_size_and_leftovers(root: Path) -> None:
    store_one(root)
    (root / "locks" / f"{'b' * 64}.lock").touch()
    (check,) = doctor._cache()
    assert (check.name, check.status) == ("cache", "ok")
    assert "1 entry, " in check.detail
    assert "1 leftover" in check.detail
    assert "fa2gen cache gc" in check.fix
