"""Content-addressed cache of compiled kernels.

Layout, below ``$FA2GEN_CACHE_DIR`` or ``$XDG_CACHE_HOME/fa2gen``::

    kernels/<source key>/<key>/kernel.cu, kernel.cubin, build.json
    kernels/<source key>/<key>.lock    while a process builds that entry
    tmp/                               entries being written

``key`` hashes the source text, the nvcc build, the target and the flags; ``source key`` leaves out the nvcc build. So a
machine without nvcc lists one folder to find every build of a source, and takes the one by the newest nvcc.

An entry appears complete or not at all: its files are written below ``tmp/``, flushed to the disk, and the folder is
renamed. ``build.json`` holds the SHA-256 of the cubin and of its own other fields; an entry that does not agree is
deleted and built again. A lock keeps processes from building the same entry twice; nothing else depends on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CacheError
from .ptxas import ResourceUsage

_FORMAT = 1
#: Seconds to wait for another process that builds the same kernel before building it here as well.
LOCK_SECONDS = 60.0
_POLL_SECONDS = 0.01
_STALE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Build:
    """What a compilation produced, as it is stored.

    Attributes:
        cubin: The binary.
        resources: From ptxas.
        log: Everything the compiler wrote.
        nvcc_version, nvcc_build_id: The compiler.
        seconds: Wall time of the compilation.
    """

    cubin: bytes
    resources: ResourceUsage
    log: str
    nvcc_version: tuple[int, int, int]
    nvcc_build_id: str
    seconds: float


@dataclass(frozen=True)
class CacheKey:
    """``source``: hash of text, target and flags; ``full``: of these and the nvcc build."""

    source: str
    full: str


def cache_key(text: str, nvcc_build_id: str, target: str, flags: list[str]) -> CacheKey:
    """Key of a compilation; for a source whose nvcc is unknown, pass an empty ``nvcc_build_id`` and use ``.source``."""
    source = _sha256(json.dumps([text, target, flags]).encode())
    return CacheKey(source, _sha256(json.dumps([text, nvcc_build_id, target, flags]).encode()))


def cache_root() -> Path | None:
    """The folder of all caches, made if need be; None where there is none that can be trusted or made.

    $FA2GEN_CACHE_DIR, else ``fa2gen`` in the user's cache folder. No third place is tried: without one, kernels are
    kept in memory. A folder that exists must belong to this user or to root (a read-only cache that came with an
    image), and nobody else may be able to write to it, since what lies there is run.

    Raises:
        CacheError: $FA2GEN_CACHE_DIR names a folder that fails that test.
    """
    explicit = os.environ.get("FA2GEN_CACHE_DIR")
    if explicit:
        root = Path(explicit).expanduser().absolute()
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG rules: a relative path is ignored.
        root = (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))) / "fa2gen"
    if not root.is_absolute() and not explicit:
        return None  # no home folder
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        _warn_once(
            str(root), f"the cache folder {root} cannot be made ({error.strerror}): kernels are kept in memory only"
        )
        return None
    reason = _unsafe_reason(status)
    if reason is None:
        return root
    if explicit:
        raise CacheError(f"FA2GEN_CACHE_DIR is {root}, which {reason}; use a folder of your own with mode 0700")
    _warn_once(
        str(root),
        f"the cache folder {root} {reason}: kernels are kept in memory only; repair it, or set FA2GEN_CACHE_DIR",
    )
    return None


def _unsafe_reason(status: os.stat_result) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


class CubinCache:
    """Compiled kernels below one folder, or in memory only.

    Args:
        root: Folder of all caches (:func:`cache_root`), or None: builds are kept in memory for the process.

    An instance may be used by several threads. It never raises because of the disk: what cannot be stored is kept in
    memory, with one warning.
    """

    def __init__(self, root: Path | None, *, lock_seconds: float = LOCK_SECONDS) -> None:
        self.root = root
        self._lock_seconds = lock_seconds
        self._memory: dict[str, Build] = {}

    def get(self, key: CacheKey) -> Build | None:
        """The build stored under ``key``, checked; None if there is none or it is damaged."""
        build = self._memory.get(key.full)
        if build is None and self.root is not None:
            build = _read_entry(self._folder(key), key.full)[0]
        return build

    def get_any(self, source_key: str) -> tuple[str, Build] | None:
        """The newest build of a source by any nvcc: (full key, build). For machines that have no nvcc."""
        best: tuple[tuple[Any, ...], str, Build] | None = None
        if self.root is None:
            return None
        try:
            entries = sorted(os.listdir(self.root / "kernels" / source_key))
        except OSError:
            return None
        for name in entries:
            build = None if name.endswith(".lock") else _read_entry(self.root / "kernels" / source_key / name, name)[0]
            if build is not None and (best is None or (build.nvcc_version, name) > best[0]):
                best = ((build.nvcc_version, name), name, build)
        return (best[1], best[2]) if best else None

    def get_or_build(self, key: CacheKey, text: str, build: Callable[[], Build]) -> tuple[Build, bool]:
        """The build stored under ``key``, else the result of ``build``, which is then stored.

        Args:
            key: From :func:`cache_key`.
            text: The source, stored beside the cubin for people.
            build: Compiles; called at most once, and by one process at a time unless a lock is waited for in vain.

        Returns:
            The build, and whether it came from the cache. Errors of ``build`` pass through; nothing is stored then.
        """
        found = self.get(key)
        if found is not None:
            return found, True
        if self.root is None:
            return self._remember(key, build()), False
        folder = self._folder(key)
        with _build_lock(folder.with_name(folder.name + ".lock"), self._lock_seconds):
            # Again, now alone: another process may have stored it, or have replaced the damaged one seen above.
            found, damage = _read_entry(folder, key.full)
            if found is not None:
                return found, True
            if damage is not None:
                self._discard(folder, damage)
            built = build()
            try:
                self._publish(folder, key, text, built)
            except OSError as error:
                _warn_once(
                    f"{self.root} {error.errno}",
                    f"the kernel cache {self.root} cannot be written ({error.strerror}): "
                    "new kernels are kept in memory only",
                )
                self._remember(key, built)
        return built, False

    def _folder(self, key: CacheKey) -> Path:
        assert self.root is not None
        return self.root / "kernels" / key.source / key.full

    def _remember(self, key: CacheKey, build: Build) -> Build:
        self._memory[key.full] = build
        return build

    def _discard(self, folder: Path, damage: str) -> None:
        warnings.warn(f"cached kernel {folder} is damaged ({damage}): building it again", RuntimeWarning, stacklevel=4)
        with contextlib.suppress(OSError):
            # Out of the way in one step, so that nobody sees it half deleted.
            aside = self._temporary()
            os.rename(folder, aside)
            _remove(aside)

    def _temporary(self) -> Path:
        assert self.root is not None
        parent = self.root / "tmp"
        parent.mkdir(mode=0o700, exist_ok=True)
        return parent / f"{os.getpid()}-{uuid.uuid4().hex}"

    def _publish(self, folder: Path, key: CacheKey, text: str, build: Build) -> None:
        temporary = self._temporary()
        try:
            temporary.mkdir(mode=0o700)
            _write_file(temporary / "kernel.cu", text.encode())
            _write_file(temporary / "kernel.cubin", build.cubin)
            _write_file(temporary / "build.json", _manifest(key.full, build))
            _flush(temporary)
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                os.rename(temporary, folder)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # A lost race: the other copy was complete when it appeared, and is as good as this one. (Or damage that
                # could not be deleted: then this process at least does not build again.)
                self._remember(key, build)
            else:
                _flush(folder.parent)
        finally:
            _remove(temporary)
        self._sweep()

    def _sweep(self) -> None:
        """Removes what processes that were killed left in ``tmp/`` more than a day ago."""
        assert self.root is not None
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.root / "tmp"):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                    _remove(Path(entry.path))


_open_caches: dict[Path | None, CubinCache] = {}


def default_cache() -> CubinCache:
    """The cache below :func:`cache_root`; one instance per folder and process.

    Raises:
        CacheError: $FA2GEN_CACHE_DIR cannot be used safely.
    """
    root = cache_root()
    return _open_caches.setdefault(root, CubinCache(root))


def _manifest(key: str, build: Build) -> bytes:
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "key": key,
        "cubin_sha256": _sha256(build.cubin),
        "resources": asdict(build.resources),
        "nvcc_version": list(build.nvcc_version),
        "nvcc_build_id": build.nvcc_build_id,
        "seconds": round(build.seconds, 3),
        "log": build.log,
    }
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=1).encode()


def _checksum(fields: dict[str, Any]) -> str:
    return _sha256(json.dumps(fields, sort_keys=True).encode())


def _read_entry(folder: Path, key: str) -> tuple[Build | None, str | None]:
    """(build, None), or (None, what is wrong with it); (None, None) if there is no entry."""
    try:
        fields = json.loads((folder / "build.json").read_bytes())
        checksum = fields.pop("checksum")
        if checksum != _checksum(fields):
            return None, "build.json does not match its checksum"
        if fields["format"] != _FORMAT or fields["key"] != key:
            return None, "build.json describes another kernel"
        cubin = (folder / "kernel.cubin").read_bytes()
        if _sha256(cubin) != fields["cubin_sha256"]:
            return None, "kernel.cubin does not match its checksum"
        major, minor, patch = fields["nvcc_version"]
        resources = ResourceUsage(**fields["resources"])
        build_id, seconds, log = fields["nvcc_build_id"], fields["seconds"], fields["log"]
        return Build(cubin, resources, log, (major, minor, patch), build_id, seconds), None
    except FileNotFoundError as error:
        # The folder appears whole, so a missing file is damage, unless the whole folder is missing.
        return None, f"{Path(error.filename).name} is missing" if os.path.lexists(folder) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _build_lock(path: Path, seconds: float) -> Iterator[None]:
    """Holds the lock file ``path``; after ``seconds`` in vain, or where locks do not work, goes on without it.

    The holder deletes the file, so a lock counts only if the file that was locked is still the one at ``path``.
    """
    deadline = time.monotonic() + seconds
    handle: int | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while handle is None:
            candidate = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(candidate, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(candidate, path):
                    handle = candidate
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
            finally:
                if handle is None:
                    os.close(candidate)
    except OSError:
        pass  # read-only, full, or a file system without locks: duplicate work is all that can happen
    try:
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        ours, there = os.fstat(handle), os.stat(path)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Deletes a file or a folder; what cannot be deleted stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_warned: set[str] = set()
_warned_lock = threading.Lock()


def _warn_once(topic: str, message: str) -> None:
    with _warned_lock:
        if topic in _warned:
            return
        _warned.add(topic)
    warnings.warn(message, RuntimeWarning, stacklevel=4)
