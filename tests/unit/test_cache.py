"""The kernel cache: keys, and that no damaged entry is loaded."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest

from fa2gen.compile import entry as entry_module
from fa2gen.compile import location
from fa2gen.compile.cache import Build, CubinCache, cache_key
from fa2gen.compile.entry import checksum
from fa2gen.compile.store import EntryStore
from tests.cache_fakes import (
    DAMAGE,
    FLAGS,
    build_of,
    entry_folder,
    fail,
    key_of,
    program_name,
    program_of,
    store_one,
)


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "_warned", set())


def test_stored_and_found_again_by_another_instance(tmp_path: Path) -> None:
    key = key_of("a")
    assert CubinCache(tmp_path).get(key) is None
    assert CubinCache(tmp_path).get_or_build(key, "a", lambda: build_of("a")) == (build_of("a"), False)
    assert CubinCache(tmp_path).get_or_build(key, "a", fail) == (build_of("a"), True)
    folder = entry_folder(tmp_path, key)
    assert (folder / "kernel.cu").read_text() == "a"
    manifest = json.loads((folder / "build.json").read_text())
    assert manifest["facts"]["resources"]["registers"] == 168
    assert manifest["facts"]["target"] == "sm_80"
    assert manifest["files"]["kernel.cubin"]["bytes"] == 5000
    assert sorted(path.name for path in folder.parent.iterdir()) == [key.full]
    assert not list((tmp_path / "tmp").iterdir())
    assert not list((tmp_path / "locks").iterdir())


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_written_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store_one(tmp_path)
        EntryStore(tmp_path, "emulator").read_or_build(program_name(1), ("kernel",), lambda: program_of("a"))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}
    assert modes["kernel"] == 0o700
    assert CubinCache(tmp_path).get(key_of("a")) == build_of("a")


def test_key_depends_on_text_build_target_flags_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> set[str]:
        return {
            cache_key("a", "x", "sm_80", FLAGS).full,
            cache_key("b", "x", "sm_80", FLAGS).full,
            cache_key("a", "y", "sm_80", FLAGS).full,
            cache_key("a", "x", "sm_90", FLAGS).full,
            cache_key("a", "x", "sm_80", [*FLAGS, "-g"]).full,
        }

    before = keys()
    assert len(before) == 5
    assert cache_key("a", "x", "sm_80", FLAGS).source == cache_key("a", "y", "sm_80", FLAGS).source
    assert cache_key("a", "x", "sm_80", FLAGS).source != cache_key("a", "x", "sm_90", FLAGS).source
    monkeypatch.setattr("fa2gen.compile.cache.FORMAT", entry_module.FORMAT + 1)
    assert not before & keys()


def test_error_of_the_build_passes_and_nothing_is_stored(tmp_path: Path) -> None:
    def refuse() -> Build:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CubinCache(tmp_path).get_or_build(key_of("a"), "a", refuse)
    assert not list((tmp_path / "locks").iterdir())
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False


def test_newest_nvcc_is_served_when_there_is_none(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    assert cache.get_any(key_of("a").source) is None
    for version in ((12, 9, 86), (13, 0, 88), (13, 0, 9)):
        key = key_of("a", str(version))
        cache.get_or_build(key, "a", lambda version=version: build_of("a", version))
    found = cache.get_any(key_of("a").source)
    assert found is not None
    assert found[0] == key_of("a", "(13, 0, 88)").full
    assert found[1].nvcc_version == (13, 0, 88)
    (entry_folder(tmp_path, key_of("a", "(13, 0, 88)")) / "kernel.cubin").write_bytes(b"")
    found = cache.get_any(key_of("a").source)
    assert found is not None
    assert found[1].nvcc_version == (13, 0, 9), "a damaged entry is passed over"


# ---- damage


@pytest.mark.parametrize("name", ["build.json", "kernel.cubin"])
@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_entry_is_built_again_with_one_warning(tmp_path: Path, name: str, damage: str) -> None:
    DAMAGE[damage](store_one(tmp_path) / name)
    key = key_of("a")
    assert CubinCache(tmp_path).get(key) is None
    with pytest.warns(RuntimeWarning, match="damaged") as caught:
        assert CubinCache(tmp_path).get_or_build(key, "a", lambda: build_of("a")) == (build_of("a"), False)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CubinCache(tmp_path).get_or_build(key, "a", fail) == (build_of("a"), True)
    assert not list((tmp_path / "tmp").iterdir()), "the damaged entry is gone"


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_program_is_built_again(tmp_path: Path, damage: str) -> None:
    store = EntryStore(tmp_path, "emulator")
    name = program_name(7)
    stored, _ = store.read_or_build(name, ("kernel",), lambda: program_of("a"))
    assert stored.folder is not None
    DAMAGE[damage](stored.folder / "kernel")
    assert store.read(name, ("kernel",)) is None
    with pytest.warns(RuntimeWarning, match="damaged"):
        again, there = store.read_or_build(name, ("kernel",), lambda: program_of("a"))
    assert not there
    assert again.folder == stored.folder
    assert again.files == {"kernel": program_of("a").files["kernel"]}


def test_program_that_may_not_be_executed_is_damaged(tmp_path: Path) -> None:
    store = EntryStore(tmp_path, "emulator")
    stored, _ = store.read_or_build(program_name(7), ("kernel",), lambda: program_of("a"))
    assert stored.folder is not None
    (stored.folder / "kernel").chmod(0o600)
    assert store.read(program_name(7), ("kernel",)) is None


def test_every_flipped_bit_of_the_manifest_is_seen(tmp_path: Path) -> None:
    path = store_one(tmp_path) / "build.json"
    good = path.read_bytes()
    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(bytes(damaged))
        found = CubinCache(tmp_path).get(key_of("a"))
        # A flip in white space changes nothing that is read.
        assert found is None or found == build_of("a")
    path.write_bytes(good)
    assert CubinCache(tmp_path).get(key_of("a")) == build_of("a")
    path.write_bytes(good.replace(b'"registers": 168', b'"registers": 128'))
    assert CubinCache(tmp_path).get(key_of("a")) is None


@pytest.mark.parametrize("where", ["entry", "source", "section", "tmp", "locks"])
@pytest.mark.parametrize("what", ["file", "dead link"])
def test_something_in_place_of_a_folder(tmp_path: Path, where: str, what: str) -> None:
    entry = store_one(tmp_path)
    place = {"entry": entry, "source": entry.parent, "section": entry.parents[1]}.get(where, tmp_path / where)
    shutil.rmtree(place)
    if what == "file":
        place.write_text("not a folder")
    else:
        place.symlink_to("nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))
        CubinCache(tmp_path).get_or_build(key_of("b"), "b", lambda: build_of("b"))
    for text in "ab":
        assert CubinCache(tmp_path).get_or_build(key_of(text), text, fail) == (build_of(text), True)


def test_link_to_a_whole_entry_is_not_followed(tmp_path: Path) -> None:
    entry = store_one(tmp_path)
    shutil.move(entry, tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert CubinCache(tmp_path).get(key_of("a")) is None
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False
    assert (tmp_path / "elsewhere" / "kernel.cubin").exists(), "the link goes, not what it names"
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", fail)[1] is True


def test_entry_of_another_key_is_not_loaded(tmp_path: Path) -> None:
    entry = store_one(tmp_path)
    other = entry_folder(tmp_path, key_of("b"))
    other.parent.mkdir()
    shutil.copytree(entry, other)
    assert CubinCache(tmp_path).get(key_of("b")) is None
    store_one(tmp_path, "c")
    shutil.copy(entry / "kernel.cubin", entry_folder(tmp_path, key_of("c")))
    assert CubinCache(tmp_path).get(key_of("c")) is None


def test_facts_of_no_known_shape_are_built_again(tmp_path: Path) -> None:
    path = store_one(tmp_path) / "build.json"
    fields = json.loads(path.read_text())
    del fields["checksum"], fields["facts"]["resources"]
    path.write_text(json.dumps({**fields, "checksum": checksum(fields)}))
    assert CubinCache(tmp_path).get(key_of("a")) is None
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a")) == (build_of("a"), False)


# ---- last use


def test_use_is_noted_once_a_day(tmp_path: Path) -> None:
    entry = store_one(tmp_path)
    now = entry.stat().st_mtime
    os.utime(entry, (now - 3600,) * 2)
    assert CubinCache(tmp_path).get(key_of("a")) is not None
    assert entry.stat().st_mtime == now - 3600, "not yet a day: nothing is written"
    for days in (-3, 3):  # a clock that jumped may leave a time in the future
        os.utime(entry, (now + days * 86400,) * 2)
        assert CubinCache(tmp_path).get(key_of("a")) is not None
        assert abs(entry.stat().st_mtime - now) < 60


def test_use_that_cannot_be_noted_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(store_one(tmp_path), (0, 0))

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert CubinCache(tmp_path).get(key_of("a")) == build_of("a")
