"""Cache of compiled kernels (cubins), by content.

``key`` hashes the source text, the nvcc build, the target and the flags; ``source key`` leaves out the nvcc build. So a
machine without nvcc lists one folder to find every build of a source, and takes the one by the newest nvcc. Where and
how entries are stored: :mod:`.store` and :mod:`.entry`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .entry import FORMAT, Contents, Entry, sha256
from .location import cache_root
from .locks import LOCK_SECONDS
from .ptxas import ResourceUsage
from .store import EntryStore

SECTION = "kernels"
SOURCE, CUBIN = "kernel.cu", "kernel.cubin"


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
    target: str
    flags: tuple[str, ...]


def cache_key(text: str, nvcc_build_id: str, target: str, flags: Sequence[str]) -> CacheKey:
    """Key of a compilation; for a source whose nvcc is unknown, pass an empty ``nvcc_build_id`` and use ``.source``."""
    source = sha256(json.dumps([FORMAT, text, target, list(flags)]).encode())
    return CacheKey(source, sha256(f"{source} {nvcc_build_id}".encode()), target, tuple(flags))


class CubinCache:
    """Compiled kernels below one folder, or in memory only.

    Args:
        root: Folder of all caches (:func:`cache_root`), or None: builds are kept in memory for the process.
        lock_seconds: How long to wait for another process that builds the same kernel.

    An instance may be used by several threads. It never raises because of the disk: what cannot be stored is kept in
    memory, with one warning.
    """

    def __init__(self, root: Path | None, *, lock_seconds: float = LOCK_SECONDS) -> None:
        self.root = root
        self._store = EntryStore(root, SECTION, lock_seconds=lock_seconds) if root is not None else None
        self._memory: dict[str, Build] = {}

    def get(self, key: CacheKey) -> Build | None:
        """The build stored under ``key``, checked; None if there is none or it is damaged."""
        build = self._memory.get(key.full)
        if build is None and self._store is not None:
            build = _build(self._store.read(_name(key.source, key.full), (CUBIN,)))
        return build

    def get_any(self, source_key: str) -> tuple[str, Build] | None:
        """The newest build of a source by any nvcc: (full key, build). For machines that have no nvcc."""
        best: tuple[tuple[Any, ...], str, Build] | None = None
        if self._store is None:
            return None
        try:
            names = sorted(os.listdir(self._store.folder / source_key))
        except OSError:
            return None
        for name in names:
            build = _build(self._store.read(_name(source_key, name), (CUBIN,)))
            if build is not None and (best is None or (build.nvcc_version, name) > best[0]):
                best = ((build.nvcc_version, name), name, build)
        return (best[1], best[2]) if best else None

    def get_or_build(
        self, key: CacheKey, text: str, build: Callable[[], Build], *, kernel: str = ""
    ) -> tuple[Build, bool]:
        """The build stored under ``key``, else the result of ``build``, which is then stored.

        Args:
            key: From :func:`cache_key`.
            text: The source, stored beside the cubin for people.
            build: Compiles; called at most once, and by one process at a time unless a lock is waited for in vain.
            kernel: Its name, for people.

        Returns:
            The build, and whether it came from the cache. Errors of ``build`` pass through; nothing is stored then.
        """
        found = self.get(key)
        if found is not None:
            return found, True
        built: list[Build] = []

        def contents() -> Contents:
            built.append(build())
            return _contents(built[0], text, key, kernel)

        if self._store is None:
            contents()
        else:
            entry, there = self._store.read_or_build(_name(key.source, key.full), (CUBIN,), contents)
            found = _build(entry)
            if found is not None and there:
                return found, True
            if found is not None and entry.folder is not None:
                return built[0], False
            if not built:
                contents()  # whole, but with facts that no version of this format writes
        self._memory[key.full] = built[0]
        return built[0], False


def _name(source_key: str, key: str) -> str:
    return f"{source_key}/{key}"


def _contents(build: Build, text: str, key: CacheKey, kernel: str) -> Contents:
    facts = {
        "kernel": kernel,
        "target": key.target,
        "flags": list(key.flags),
        "resources": asdict(build.resources),
        "nvcc_version": list(build.nvcc_version),
        "nvcc_build_id": build.nvcc_build_id,
        "seconds": round(build.seconds, 3),
        "log": build.log,
    }
    return Contents({SOURCE: text.encode(), CUBIN: build.cubin}, facts)


def _build(entry: Entry | None) -> Build | None:
    """The build of an entry, which is let go; None if its facts are not what :func:`_contents` writes."""
    if entry is None:
        return None
    if entry.lease is not None:
        entry.lease.close()
    facts = entry.facts
    try:
        major, minor, patch = facts["nvcc_version"]
        resources = ResourceUsage(**facts["resources"])
        build_id, seconds, log = facts["nvcc_build_id"], facts["seconds"], facts["log"]
        return Build(entry.files[CUBIN], resources, log, (major, minor, patch), build_id, seconds)
    except (KeyError, TypeError, ValueError):
        return None


def key_of_entry(files: Mapping[str, bytes], facts: Mapping[str, Any]) -> str | None:
    """The key that the content of a cubin's entry has, from its source on; None where facts are missing."""
    try:
        text = files[SOURCE].decode()
        return cache_key(text, facts["nvcc_build_id"], facts["target"], facts["flags"]).full
    except (KeyError, TypeError, ValueError):
        return None


_open_caches: dict[Path | None, CubinCache] = {}


def default_cache() -> CubinCache:
    """The cache below :func:`cache_root`; one instance per folder and process.

    Raises:
        CacheError: $FA2GEN_CACHE_DIR cannot be used safely.
    """
    root = cache_root()
    return _open_caches.setdefault(root, CubinCache(root))
