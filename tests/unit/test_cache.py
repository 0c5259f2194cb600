"""The cubin cache: one build a key under concurrency, no damaged entry loaded, no error because of the disk."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from fa2gen.compile import cache as cache_module
from fa2gen.compile.cache import Build, CacheKey, CubinCache, cache_key, cache_root
from fa2gen.compile.ptxas import ResourceUsage
from fa2gen.errors import CacheError

RESOURCES = ResourceUsage(168, 0, 8, 16, 32, 1)
FLAGS = ["-O3", "-arch", "sm_80"]


def key_of(text: str, build_id: str = "13.0.88-a") -> CacheKey:
    return cache_key(text, build_id, "sm_80", FLAGS)


def build_of(text: str, version: tuple[int, int, int] = (13, 0, 88), size: int = 5000) -> Build:
    """A fake compilation: bytes that depend on the text."""
    return Build(random.Random(text).randbytes(size), RESOURCES, f"log of {text}", version, "13.0.88-a", 1.25)


def fail() -> Build:
    raise AssertionError("built although cached")


def entry_folder(root: Path, key: CacheKey) -> Path:
    return root / "kernels" / key.source / key.full


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_warned", set())


def test_stored_and_found_again_by_another_instance(tmp_path: Path) -> None:
    key = key_of("a")
    assert CubinCache(tmp_path).get(key) is None
    assert CubinCache(tmp_path).get_or_build(key, "a", lambda: build_of("a")) == (build_of("a"), False)
    assert CubinCache(tmp_path).get_or_build(key, "a", fail) == (build_of("a"), True)
    folder = entry_folder(tmp_path, key)
    assert (folder / "kernel.cu").read_text() == "a"
    assert json.loads((folder / "build.json").read_text())["resources"]["registers"] == 168
    assert sorted(path.name for path in folder.parent.iterdir()) == [key.full], "the lock file is gone"
    assert not list((tmp_path / "tmp").iterdir())


def test_key_depends_on_text_build_target_and_flags() -> None:
    keys = {
        cache_key("a", "x", "sm_80", FLAGS).full,
        cache_key("b", "x", "sm_80", FLAGS).full,
        cache_key("a", "y", "sm_80", FLAGS).full,
        cache_key("a", "x", "sm_90", FLAGS).full,
        cache_key("a", "x", "sm_80", [*FLAGS, "-g"]).full,
    }
    assert len(keys) == 5
    assert cache_key("a", "x", "sm_80", FLAGS).source == cache_key("a", "y", "sm_80", FLAGS).source
    assert cache_key("a", "x", "sm_80", FLAGS).source != cache_key("a", "x", "sm_90", FLAGS).source


def test_error_of_the_build_passes_and_nothing_is_stored(tmp_path: Path) -> None:
    def refuse() -> Build:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        CubinCache(tmp_path).get_or_build(key_of("a"), "a", refuse)
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


def _truncate(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def _flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(bytes(data))


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _edit_registers(path: Path) -> None:
    text = path.read_text()
    assert '"registers": 168' in text
    path.write_text(text.replace('"registers": 168', '"registers": 128'))


DAMAGE = {
    "empty": lambda path: _truncate(path, 0),
    "half": lambda path: _truncate(path, 0.5),
    "bit": _flip_bit,
    "folder": _folder_instead,
    "missing": lambda path: path.unlink(),
    "null": lambda path: path.write_text("null"),
    "brackets": lambda path: path.write_text("{}"),
    "list": lambda path: path.write_text("[]"),
}


@pytest.mark.parametrize("name", ["build.json", "kernel.cubin"])
@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_entry_is_built_again_with_one_warning(tmp_path: Path, name: str, damage: str) -> None:
    key = key_of("a")
    CubinCache(tmp_path).get_or_build(key, "a", lambda: build_of("a"))
    DAMAGE[damage](entry_folder(tmp_path, key) / name)
    assert CubinCache(tmp_path).get(key) is None
    with pytest.warns(RuntimeWarning, match="damaged") as caught:
        assert CubinCache(tmp_path).get_or_build(key, "a", lambda: build_of("a")) == (build_of("a"), False)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CubinCache(tmp_path).get_or_build(key, "a", fail) == (build_of("a"), True)


def test_every_flipped_bit_of_the_manifest_is_seen(tmp_path: Path) -> None:
    key = key_of("a")
    CubinCache(tmp_path).get_or_build(key, "a", lambda: build_of("a"))
    path = entry_folder(tmp_path, key) / "build.json"
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        damaged = bytearray(good)
        damaged[position] ^= 4
        path.write_bytes(bytes(damaged))
        found = CubinCache(tmp_path).get(key)
        # A flip in white space changes nothing that is read.
        assert found is None or found == build_of("a")
    path.write_bytes(good)
    _edit_registers(path)
    assert CubinCache(tmp_path).get(key) is None


def test_file_in_place_of_the_entry(tmp_path: Path) -> None:
    key = key_of("a")
    folder = entry_folder(tmp_path, key)
    folder.parent.mkdir(parents=True)
    folder.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert CubinCache(tmp_path).get_or_build(key, "a", lambda: build_of("a"))[1] is False
    assert CubinCache(tmp_path).get_or_build(key, "a", fail)[1] is True


def test_entry_of_another_key_is_not_loaded(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    cache.get_or_build(key_of("a"), "a", lambda: build_of("a"))
    other = entry_folder(tmp_path, key_of("b"))
    other.parent.mkdir()
    shutil.copytree(entry_folder(tmp_path, key_of("a")), other)
    assert cache.get(key_of("b")) is None


# ---- disks that refuse


def _refusing(number: int, after: int = 0) -> Any:
    """A _write_file that fails with an errno, the first ``after`` bytes of the file written."""

    def write(path: Path, data: bytes) -> None:
        path.write_bytes(data[:after])
        raise OSError(number, os.strerror(number), str(path))

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_build_is_kept_in_memory_when_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    cache = CubinCache(tmp_path)
    monkeypatch.setattr(cache_module, "_write_file", _refusing(number, after=10))
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert cache.get_or_build(key_of("a"), "a", lambda: build_of("a")) == (build_of("a"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning, not one a kernel
        assert cache.get_or_build(key_of("b"), "b", lambda: build_of("b")) == (build_of("b"), False)
    for text in ("a", "b"):
        assert cache.get_or_build(key_of(text), text, fail) == (build_of(text), True)
    monkeypatch.undo()
    assert not list((tmp_path / "tmp").iterdir()), "nothing half written stays"
    assert CubinCache(tmp_path).get(key_of("a")) is None


def test_small_file_system_fills_up(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(root)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root and the right to mount")
    try:
        cache = CubinCache(root)
        texts = [str(number) for number in range(12)]
        with pytest.warns(RuntimeWarning, match="No space left"):
            builds = [
                cache.get_or_build(key_of(text), text, lambda text=text: build_of(text, size=9000))[0] for text in texts
            ]
        assert builds == [build_of(text, size=9000) for text in texts]
        stored = [text for text in texts if CubinCache(root).get(key_of(text)) is not None]
        assert 0 < len(stored) < 12, "some fitted, some did not"
        for text in stored:
            assert CubinCache(root).get(key_of(text)) == build_of(text, size=9000)
    finally:
        subprocess.run(["umount", str(root)], check=False)


def test_read_only_folder_serves_hits_and_builds_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))

    # Root may write anywhere, so a read-only file system is played: every way in which the cache writes fails.
    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    real_open = os.open
    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(os, "rename", read_only)
    monkeypatch.setattr(os, "unlink", read_only)
    monkeypatch.setattr(
        os, "open", lambda path, flags, *rest: read_only() if flags & os.O_CREAT else real_open(path, flags, *rest)
    )
    cache = CubinCache(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(key_of("a"), "a", fail) == (build_of("a"), True)
    with pytest.warns(RuntimeWarning, match="Read-only"):
        assert cache.get_or_build(key_of("b"), "b", lambda: build_of("b"))[1] is False
    assert cache.get_or_build(key_of("b"), "b", fail)[1] is True


def test_without_a_folder_builds_are_kept_in_memory() -> None:
    cache = CubinCache(None)
    assert cache.get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False
    assert cache.get_or_build(key_of("a"), "a", fail) == (build_of("a"), True)
    assert cache.get_any(key_of("a").source) is None


# ---- whose folder


def test_explicit_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert cache_root() == tmp_path / "new" / "cache"
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700


def test_xdg_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA2GEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "fa2gen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "fa2gen"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    root = tmp_path / "fa2gen"
    root.mkdir()
    root.chmod(mode)
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(root))
    with pytest.raises(CacheError, match=f"others may write to .mode {mode:04o}"):
        cache_root()
    monkeypatch.delenv("FA2GEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="kept in memory only"):
        assert cache_root() is None


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "cache"))
    assert cache_root() is not None
    owner = (tmp_path / "cache").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        assert cache_root() is not None, "root's folders are trusted: root can write anywhere"
        os.chown(tmp_path / "cache", 12345, -1)
        owner = 12345
    with pytest.raises(CacheError, match=f"belongs to another user .uid {owner}"):
        cache_root()


def test_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be made"):
        assert cache_root() is None


# ---- several processes


def _build_all(root: str, number: int, counts: str) -> None:
    order = [str(index) for index in range(5)]
    random.Random(number).shuffle(order)
    for text in order:

        def build(text: str = text) -> Build:
            with open(Path(counts) / text, "a") as file:  # one line a build
                file.write(f"{os.getpid()}\n")
            time.sleep(0.05)
            return build_of(text)

        assert CubinCache(Path(root)).get_or_build(key_of(text), text, build)[0] == build_of(text)


def test_eight_processes_build_each_kernel_once(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fa2gen.compile.cache"])
    processes = [
        context.Process(target=_build_all, args=(str(tmp_path / "cache"), number, str(counts))) for number in range(8)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    assert {path.name: len(path.read_text().splitlines()) for path in counts.iterdir()} == {
        str(index): 1 for index in range(5)
    }


def test_lock_held_too_long_means_double_work_and_no_error(tmp_path: Path) -> None:
    import fcntl

    key = key_of("a")
    lock = entry_folder(tmp_path, key).with_name(key.full + ".lock")
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        assert CubinCache(tmp_path, lock_seconds=0.2).get_or_build(key, "a", lambda: build_of("a"))[1] is False
        assert 0.2 <= time.monotonic() - start < 5
    assert CubinCache(tmp_path).get_or_build(key, "a", fail)[1] is True


def test_lost_race_drops_its_own_copy(tmp_path: Path) -> None:
    key = key_of("a")

    def slow() -> Build:
        # Another process, which did not get the lock in time, stores the same entry meanwhile.
        CubinCache(tmp_path, lock_seconds=0).get_or_build(key, "a", lambda: build_of("a"))
        return build_of("a")

    assert CubinCache(tmp_path).get_or_build(key, "a", slow) == (build_of("a"), False)
    assert CubinCache(tmp_path).get(key) == build_of("a")
    assert not list((tmp_path / "tmp").iterdir())


# Forks writers and kills them one after the other. A process of its own, since forking is safe only before threads.
_KILLER = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fa2gen.compile import cache
from fa2gen.compile.ptxas import ResourceUsage

def write_in_pieces(path, data):  # so that a kill hits the middle of a file
    with open(path, "xb") as file:
        for start in range(0, len(data), 512):
            file.write(data[start:start + 512])
            file.flush()

def write_for_ever():
    cache._write_file = write_in_pieces
    for number in range(10**6):
        text = f"{os.getpid()} {number}"
        cubin = random.Random(text).randbytes(200_000)
        build = cache.Build(cubin, ResourceUsage(1, 0, 0, 0, 0, 0), "", (13, 0, 88), "b", 1.0)
        key = cache.cache_key(text, "b", "sm_80", [])
        cache.CubinCache(Path(sys.argv[2])).get_or_build(key, text, lambda: build)

for kill in range(40):
    child = os.fork()
    if child == 0:
        write_for_ever()
    time.sleep(random.Random(kill).uniform(0.02, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_kill_while_writing_never_leaves_a_damaged_entry(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", _KILLER, str(Path(__file__).resolve().parents[2]), str(tmp_path)]
    subprocess.run(arguments, check=True, timeout=120)
    entries = [path for path in (tmp_path / "kernels").glob("*/*") if path.suffix != ".lock"]
    for folder in entries:
        build, damage = cache_module._read_entry(folder, folder.name)
        assert damage is None
        assert build is not None
        text = (folder / "kernel.cu").read_text()
        assert build.cubin == random.Random(text).randbytes(200_000)
    torn = list((tmp_path / "tmp").iterdir())
    assert len(entries) > 20, "too few whole entries to judge by"
    assert torn, "no kill hit a write: the test shows nothing"


def test_leftovers_of_killed_processes_are_swept(tmp_path: Path) -> None:
    old, young = tmp_path / "tmp" / "1-old", tmp_path / "tmp" / "2-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "kernel.cu").write_text("x")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))
    assert not old.exists()
    assert young.exists()
