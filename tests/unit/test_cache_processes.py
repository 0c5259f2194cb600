"""The kernel cache used by several processes at once, and by processes that are killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import warnings
from pathlib import Path

import pytest

from fa2gen.compile import admin, locks, store
from fa2gen.compile.cache import Build, CubinCache
from fa2gen.compile.locks import Lease, hold, new_folder, remove_if_free
from fa2gen.compile.store import EntryStore, leftovers, scratch_folder, sweep_scratch
from tests import cache_fakes
from tests.cache_fakes import (
    build_of,
    check_clean,
    entry_folder,
    fail,
    key_of,
    program_name,
    program_of,
    run_processes,
    store_one,
)
from tests.kills import kill_at_random


def _lock_path(root: Path, text: str = "a") -> Path:
    return root / "locks" / f"{key_of(text).full}.lock"


# ---- several builders


def test_eight_processes_build_each_of_fifty_kernels_once(tmp_path: Path) -> None:
    assert run_processes(tmp_path, 8, 50, slow_disk=False) == {str(index): 1 for index in range(50)}
    check_clean(tmp_path / "cache", 50)


def test_without_locks_work_is_doubled_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    barrier = threading.Barrier(4)
    results = []

    def build() -> Build:
        barrier.wait(30)  # all four compile, then all four store
        return build_of("a")

    def work() -> None:
        results.append(CubinCache(tmp_path).get_or_build(key_of("a"), "a", build))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(build_of("a"), False)] * 4
    check_clean(tmp_path, 1)
    assert admin.collect(tmp_path, max_bytes=0).removed == [], "who uses it is not known, so age decides: it is new"
    os.utime(entry_folder(tmp_path, key_of("a")), (time.time() - 2 * locks.STALE_SECONDS,) * 2)
    assert len(admin.collect(tmp_path, max_bytes=0).removed) == 1


# ---- locks


def test_lock_held_too_long_means_double_work_and_no_error(tmp_path: Path) -> None:
    lock = _lock_path(tmp_path)
    lock.parent.mkdir()
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        cache = CubinCache(tmp_path, lock_seconds=0.2)
        assert cache.get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False
        assert 0.2 <= time.monotonic() - start < 5
        assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", fail)[1] is True


def test_who_waits_for_a_hanging_builder_takes_what_another_one_stored(tmp_path: Path) -> None:
    lock = _lock_path(tmp_path)
    lock.parent.mkdir()
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # hangs for good
        results: list[tuple[Build, bool]] = []
        waiter = threading.Thread(
            target=lambda: results.append(CubinCache(tmp_path, lock_seconds=60).get_or_build(key_of("a"), "a", fail))
        )
        waiter.start()
        time.sleep(0.1)
        CubinCache(tmp_path, lock_seconds=0).get_or_build(key_of("a"), "a", lambda: build_of("a"))
        waiter.join(10)
        assert results == [(build_of("a"), True)]


def test_clock_that_jumps_changes_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = _lock_path(tmp_path)
    lock.parent.mkdir()
    now = time.time()
    steps = iter(range(1, 10**6))
    # A clock that jumps back and forth by days at every look.
    monkeypatch.setattr(time, "time", lambda: now + (-1) ** next(steps) * 10 * 86400)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        cache = CubinCache(tmp_path, lock_seconds=0.3)
        assert cache.get_or_build(key_of("a"), "a", lambda: build_of("a")) == (build_of("a"), False)
        assert 0.3 <= time.monotonic() - start < 5
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", fail)[1] is True
    with scratch_folder() as folder:
        sweep_scratch()
        assert folder.is_dir(), "a held folder stays, whatever the clock says"


@pytest.mark.parametrize("what", ["folder", "dead link", "left by a killed process"])
def test_odd_lock_files_do_not_hinder(tmp_path: Path, what: str) -> None:
    lock = _lock_path(tmp_path)
    lock.parent.mkdir()
    if what == "folder":
        lock.mkdir()
    elif what == "dead link":
        lock.symlink_to(tmp_path / "not made")
    else:
        lock.touch()
    start = time.monotonic()
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False
    assert time.monotonic() - start < 5
    assert not (tmp_path / "not made").exists()
    assert leftovers(tmp_path) == []


def test_lock_file_that_its_holder_deleted_is_no_lock(tmp_path: Path) -> None:
    """The race: B opens the file, A deletes it and lets go, C makes a new one and locks it, B locks the old one."""
    path = tmp_path / "x.lock"
    real_flock, opened = fcntl.flock, []

    def flock(handle: int, operation: int) -> None:
        if not opened:
            opened.append(handle)
            os.unlink(path)  # A's end, just between B's open and B's lock
            opened.append(os.open(path, os.O_RDWR | os.O_CREAT))
            real_flock(opened[1], fcntl.LOCK_EX)  # C
        real_flock(handle, operation)

    looks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)

        def is_there() -> bool:
            looks.append(1)
            if len(looks) == 3:
                os.unlink(path)
                os.close(opened[1])  # C's end
            return False

        with locks.build_lock(path, 30, is_there):
            assert len(looks) == 3, "B waited for C"
            assert path.exists()
    assert not path.exists()


# ---- in use


def test_what_is_in_use_is_not_removed(tmp_path: Path) -> None:
    folder, lease = new_folder(tmp_path)
    assert not remove_if_free(folder)
    again = hold(folder)
    assert isinstance(again, Lease)
    lease.close()
    assert not remove_if_free(folder), "the second one holds it still"
    again.close()
    assert remove_if_free(folder)
    assert hold(folder) is None


def test_folder_swept_before_it_was_held_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = []

    def hold_too_late(folder: Path) -> Lease | None:
        if not swept:
            assert remove_if_free(folder)
            swept.append(folder)
        return hold(folder)

    monkeypatch.setattr(locks, "hold", hold_too_late)
    folder, _lease = new_folder(tmp_path)
    assert swept[0] != folder
    assert folder.is_dir()


def test_entry_read_while_it_is_removed_is_missing_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store_one(tmp_path)
    real_open = os.open

    def open_late(path: object, *arguments: object, **options: object) -> int:
        if path == "kernel.cubin" and folder.exists():
            shutil.rmtree(folder)  # by one who could not lock
        return real_open(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_late)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False


def test_clean_up_of_empty_folders_while_an_entry_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_rename, removed = os.rename, []

    def rename(source: Path, target: Path) -> None:
        if len(removed) < 2:
            Path(target).parent.rmdir()
            removed.append(target)
        real_rename(source, target)

    monkeypatch.setattr(store.os, "rename", rename)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store_one(tmp_path)
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", fail)[1] is True


def test_lost_race_drops_its_own_copy(tmp_path: Path) -> None:
    def slow() -> Build:
        # Another process, which did not get the lock in time, stores the same entry meanwhile.
        CubinCache(tmp_path, lock_seconds=0).get_or_build(key_of("a"), "a", lambda: build_of("a"))
        return build_of("a")

    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", slow) == (build_of("a"), False)
    check_clean(tmp_path, 1)


# ---- killed


def test_two_hundred_kills_leave_no_damaged_entry_and_nothing_that_hinders(tmp_path: Path) -> None:
    root, system = tmp_path / "cache", tmp_path / "system"
    root.mkdir(mode=0o700)
    system.mkdir()
    killed = kill_at_random(
        "cache_fakes:use_cache_for_ever",
        {"root": str(root), "temporary": str(system)},
        kills=250,
        longest=0.05,
    )
    assert killed >= 200
    verdict = admin.verify(root)
    assert verdict.bad == ()
    assert verdict.checked >= 10, "too few entries to judge by"

    size = cache_fakes.KILLED_CUBIN_BYTES

    def build(text: str) -> Build:
        return build_of(text, size=size)

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr("tempfile.tempdir", str(system))
        programs = EntryStore(root, "emulator", lock_seconds=0)
        for number in range(cache_fakes.KILLED_KERNELS):
            text = str(number)
            start = time.monotonic()
            cache = CubinCache(root)
            built, _ = cache.get_or_build(key_of(text), text, lambda text=text: build(text))
            assert built == build(text)
            found, _ = programs.read_or_build(program_name(number), ("kernel",), lambda text=text: program_of(text))
            assert found.files["kernel"] == program_of(text).files["kernel"]
            assert time.monotonic() - start < 5, "a dead process's lock is not waited for"
        with scratch_folder():
            assert len(list(system.iterdir())) == 1
        admin.collect(root)
    check_clean(root, 2 * cache_fakes.KILLED_KERNELS)
    assert list(system.iterdir()) == []


def test_leftovers_go_and_what_is_not_the_caches_stays(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    dead = tmp / f"1-{'a' * 32}"
    dead.mkdir()
    (dead / "kernel.cu").write_text("x")
    (tmp / f"2-{'b' * 32}").symlink_to(tmp_path / "nowhere")
    (tmp / "my notes").write_text("a user who named a folder that holds other things too")
    alive, _lease = new_folder(tmp)
    store_one(tmp_path)
    assert sorted(path.name for path in tmp.iterdir()) == sorted([alive.name, "my notes"])
