"""The kernel cache on disks that refuse, and in folders that belong to others."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fa2gen.compile import admin, location
from fa2gen.compile import entry as entry_module
from fa2gen.compile.cache import CubinCache
from fa2gen.compile.location import cache_root
from fa2gen.errors import CacheError
from tests.cache_fakes import build_of, fail, key_of, mounted, store_one


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "_warned", set())


# ---- disks that refuse


def _check_kept_in_memory(root: Path, message: str) -> CubinCache:
    """Builds two kernels on a disk that refuses; whoever writes wrongly, raises or warns twice fails here."""
    cache = CubinCache(root)
    with pytest.warns(RuntimeWarning, match=message):
        assert cache.get_or_build(key_of("a"), "a", lambda: build_of("a")) == (build_of("a"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning, not one a kernel
        assert cache.get_or_build(key_of("b"), "b", lambda: build_of("b")) == (build_of("b"), False)
    for text in ("a", "b"):
        assert cache.get_or_build(key_of(text), text, fail) == (build_of(text), True)
    return cache


def _check_nothing_half_written(root: Path) -> None:
    assert not list((root / "tmp").glob("*"))
    assert not list((root / "kernels").glob("*/*"))
    assert CubinCache(root).get(key_of("a")) is None


def _failing(function: Callable[..., Any], number: int, after: int) -> Callable[..., Any]:
    """``function``, which fails with an errno from its call number ``after`` on."""
    calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return function(*arguments, **options)

    return call


# Every call through which an entry comes onto the disk: kernel.cu, kernel.cubin and build.json are each opened, written
# and flushed, then the folder is; mkdir is of tmp/ (locks/ is made before), of the entry, and of its two parents.
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize(
    ("name", "after"),
    [
        *(("fsync", after) for after in range(4)),
        *(("mkdir", after) for after in range(5)),
        ("rename", 0),
        ("write", 0),
        ("write", 1),
        ("write", 2),
    ],
)
def test_every_step_of_storing_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int, number: int
) -> None:
    if name == "write":
        real = entry_module.write_file
        failing = _failing(lambda *_: None, number, after)

        def write_half(path: Path, data: bytes, mode: int) -> None:
            real(path, data[: len(data) // 2], mode)
            failing(path)
            path.unlink()
            real(path, data, mode)

        monkeypatch.setattr(entry_module, "write_file", write_half)
    else:
        monkeypatch.setattr(os, name, _failing(getattr(os, name), number, after))
    _check_kept_in_memory(tmp_path, "cannot be written")
    monkeypatch.undo()
    _check_nothing_half_written(tmp_path)
    store_one(tmp_path)
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", fail)[1] is True


def test_limit_on_the_size_of_files(tmp_path: Path) -> None:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        _check_kept_in_memory(tmp_path, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    _check_nothing_half_written(tmp_path)


def test_small_file_system_fills_up(tmp_path: Path) -> None:
    root = tmp_path / "small"
    with mounted(root, "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs"):
        cache = CubinCache(root)
        texts = [str(number) for number in range(12)]
        with pytest.warns(RuntimeWarning, match="No space left"):
            builds = [
                cache.get_or_build(key_of(text), text, lambda text=text: build_of(text, size=150_000))[0]
                for text in texts
            ]
        assert builds == [build_of(text, size=150_000) for text in texts]
        stored = [text for text in texts if CubinCache(root).get(key_of(text)) is not None]
        assert 0 < len(stored) < 12, "some fitted, some did not"
        for text in stored:
            assert CubinCache(root).get(key_of(text)) == build_of(text, size=150_000)
        assert not list((root / "tmp").iterdir())
        assert len(list(root.glob("kernels/*/*"))) == len(stored)


def test_read_only_file_system_serves_hits_and_builds_in_memory(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    os.utime(store_one(root, "stored"), (0, 0))  # a use of long ago, which cannot be noted
    with mounted(root, "--bind", "-o", "ro", str(root)):
        with pytest.raises(OSError, match="Read-only"):
            (root / "file").touch()
        cache = _check_kept_in_memory(root, "Read-only")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cache.get_or_build(key_of("stored"), "stored", fail) == (build_of("stored"), True)
    _check_nothing_of(root, "a", "b")


def _check_nothing_of(root: Path, *texts: str) -> None:
    assert all(CubinCache(root).get(key_of(text)) is None for text in texts)


def test_folder_without_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_one(tmp_path, "stored")

    # Root may write anywhere, so a folder without permission is played: every way in which the cache writes fails.
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    real_open = os.open
    for name in ("mkdir", "rename", "unlink", "utime"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *rest, **more: refuse() if flags & os.O_CREAT else real_open(path, flags, *rest, **more),
    )
    cache = _check_kept_in_memory(tmp_path, "Permission denied")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_build(key_of("stored"), "stored", fail) == (build_of("stored"), True)


def _with_open_files(function: Callable[[], object], spare: int) -> None:
    """Calls ``function`` while this process may open so many files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 8, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        function()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for handle in taken:
            os.close(handle)


@pytest.mark.parametrize("spare", range(5))
def test_too_many_open_files_are_no_damage(tmp_path: Path, spare: int) -> None:
    folder = store_one(tmp_path)

    def use() -> None:
        assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))[0] == build_of("a")
        with contextlib.suppress(OSError):  # which the command prints
            assert admin.verify(tmp_path, delete=True).checked == 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _with_open_files(use, spare)
    assert not [warning for warning in caught if "damaged" in str(warning.message)]
    assert CubinCache(tmp_path).get(key_of("a")) == build_of("a")
    assert folder.is_dir()


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_one(tmp_path)
    monkeypatch.setattr(os, "listdir", _failing(os.listdir, errno.EACCES, 0))
    for call in (admin.entries, admin.totals, admin.verify, admin.collect):
        with pytest.raises(PermissionError, match="kernels"):
            call(tmp_path)


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
    for explicit in (None, ""):
        if explicit is None:
            monkeypatch.delenv("FA2GEN_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("FA2GEN_CACHE_DIR", explicit)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_root() == tmp_path / "fa2gen"
        for ignored in ("relative", ""):
            monkeypatch.setenv("XDG_CACHE_HOME", ignored)
            monkeypatch.setenv("HOME", str(tmp_path / "home"))
            assert cache_root() == tmp_path / "home" / ".cache" / "fa2gen"


@pytest.mark.parametrize("home", ["here", ""])
def test_a_home_that_is_no_absolute_path_is_none(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA2GEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(RuntimeWarning, match="no home folder.*FA2GEN_CACHE_DIR"):
        assert cache_root() is None
    monkeypatch.setenv("FA2GEN_CACHE_DIR", "~/cache")
    with pytest.raises(CacheError, match=r"FA2GEN_CACHE_DIR is ~/cache, which names no folder: .* no home"):
        cache_root()
    assert not list(tmp_path.iterdir())


def test_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for text, folder in (
        ("relative", "relative"),
        ("~/of home", "of home"),
        (" ", " "),
        ("Müller's [1]\n", "Müller's [1]\n"),
        ("a/../b", "a/../b"),
        ("%s{}$HOME", "%s{}$HOME"),
    ):
        (tmp_path / "a").mkdir(exist_ok=True)
        monkeypatch.setenv("FA2GEN_CACHE_DIR", text)
        root = cache_root()
        assert root == tmp_path / folder
        store_one(root)
        assert CubinCache(root).get(key_of("a")) == build_of("a")
    monkeypatch.setenv("FA2GEN_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(CacheError, match="FA2GEN_CACHE_DIR is ~no-such-user/cache, which names no folder"):
        cache_root()
    monkeypatch.setenv("FA2GEN_CACHE_DIR", "x" * 300)
    with pytest.warns(RuntimeWarning, match="cannot be made .File name too long"):
        assert cache_root() is None


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
    own = tmp_path / f"fa2gen-{os.geteuid()}"
    with pytest.warns(RuntimeWarning, match=f"others may write to .* {own} is used instead"):
        assert cache_root() == own
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(mode)
    monkeypatch.setattr(location, "_warned", set())
    with pytest.warns(RuntimeWarning, match="kept in memory only"):
        assert cache_root() is None


def test_folder_of_root_that_the_user_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``sudo`` with the user's $HOME makes it so: the user gets one beside it."""
    monkeypatch.delenv("FA2GEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "fa2gen").mkdir(mode=0o700)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path / "fa2gen")
    with pytest.warns(RuntimeWarning, match="you cannot read: .* is used instead"):
        assert cache_root() == tmp_path / f"fa2gen-{os.geteuid()}"
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "fa2gen"))
    with pytest.raises(CacheError, match="which you cannot read; use a folder of your own"):
        cache_root()


def test_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be made"):
        assert cache_root() is None
