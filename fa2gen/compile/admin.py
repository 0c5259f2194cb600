"""Looking after the cache: what is in it, whether it is whole, and what may go."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import cache
from .entry import MANIFEST, DamageError, OtherFormatError, read_entry, read_manifest
from .locks import new_folder, remove, remove_if_free
from .store import ENTRY, SECTIONS, discard, leftovers, make_folder, scratch_leftovers, sweep, sweep_scratch

OK, DAMAGED, OTHER_FORMAT = "ok", "damaged", "other format"


@dataclass(frozen=True)
class CacheEntry:
    """One entry.

    Attributes:
        path: Its folder.
        section: ``"kernels"`` (cubins), ``"emulator"`` (host programs) or ``"sources"`` (rendered text).
        kernel: Its name; empty where it cannot be read.
        target: E.g. ``"sm_80"``; ``"host"``; ``"any"`` for a text.
        compiler: Which nvcc or C++ compiler made it.
        size: Bytes of its files.
        built: When, seconds since 1970; 0 where that cannot be read.
        last_use: When it was last read, seconds since 1970, to a day.
        status: ``"ok"``, ``"damaged"``, or ``"other format"``: another version of fa2gen wrote it.
        reason: What is wrong with it.
    """

    path: Path
    section: str
    kernel: str
    target: str
    compiler: str
    size: int
    built: int
    last_use: int
    status: str
    reason: str = ""


def entries(root: Path, *, check: bool = False) -> list[CacheEntry]:
    """Every entry of a cache, by path.

    Args:
        root: Folder of all caches.
        check: Read every file and compare it with its checksum, and cubins' sources with their keys. Otherwise only
            ``build.json`` is read.

    Raises:
        OSError: A folder cannot be listed, or an entry not be read for a reason that is none of its own.
    """
    found = (_look(path, section, check) for section in SECTIONS for path in _folders(root, section))
    return [entry for entry in found if entry is not None]


def totals(root: Path) -> tuple[int, int]:
    """(number, bytes) of a cache's entries, without reading any."""
    sizes = [_size(path) for section in SECTIONS for path in _folders(root, section)]
    return len(sizes), sum(sizes)


def _folders(root: Path, section: str) -> Iterator[Path]:
    def below(folder: Path, depth: int) -> Iterator[Path]:
        # Gone by now, or not one of ours; any other error is the caller's: a folder that cannot be listed is not empty.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in sorted(os.listdir(folder)):
                yield from below(folder / name, depth - 1) if depth > 1 else (folder / name,)

    top = root / section
    # What has another name is none of the cache's business: its folder may hold other things.
    return (path for path in below(top, SECTIONS[section]) if ENTRY.fullmatch(str(path.relative_to(top))))


def _size(path: Path) -> int:
    size = 0
    with contextlib.suppress(OSError), os.scandir(path) as files:
        for file in files:
            with contextlib.suppress(OSError):
                size += file.stat(follow_symlinks=False).st_size
    return size


def _look(path: Path, section: str, check: bool) -> CacheEntry | None:
    """The entry at ``path``; None if it is gone by now."""
    try:
        last_use = int(os.lstat(path).st_mtime)
    except OSError:
        return None
    facts: dict[str, Any] = {}
    built, status, reason = 0, OK, ""
    try:
        manifest = read_manifest(path, path.name)
        if manifest is None:
            return None
        built, facts = int(manifest["built"]), dict(manifest["facts"])
        if check:
            _check(path, section)
    except OtherFormatError as error:
        status, reason = OTHER_FORMAT, str(error)
    except DamageError as error:
        if not os.path.lexists(path):
            return None
        status, reason = DAMAGED, str(error)
    except (KeyError, TypeError, ValueError) as error:
        status, reason = DAMAGED, f"{MANIFEST} lacks {error}"
    compiler = facts.get("compiler") or (f"nvcc {_version(facts)}" if "nvcc_version" in facts else "")
    kernel, target = (str(facts.get(name, "")) for name in ("kernel", "target"))
    return CacheEntry(path, section, kernel, target, str(compiler), _size(path), built, last_use, status, reason)


def _version(facts: dict[str, Any]) -> str:
    version = facts["nvcc_version"]
    return ".".join(map(str, version)) if isinstance(version, list) else str(version)


def _check(path: Path, section: str) -> None:
    entry = read_entry(path, path.name, None)
    if entry is None:
        return
    if entry.lease is not None:
        entry.lease.close()
    if section == cache.SECTION and cache.key_of_entry(entry.files, entry.facts) != path.name:
        raise DamageError(f"{cache.SOURCE} is not the source that its key names")


@dataclass(frozen=True)
class Verdict:
    """Result of :func:`verify`.

    Attributes:
        checked: How many entries were checked.
        other: Entries of another version of fa2gen, which were not.
        bad: Damaged entries, those removed included.
        removed: Those of them that are gone.
    """

    checked: int
    other: int
    bad: tuple[CacheEntry, ...]
    removed: tuple[CacheEntry, ...]


def verify(root: Path, *, delete: bool = False) -> Verdict:
    """Checks every file of every entry; with ``delete``, removes damaged entries.

    Args:
        root: Folder of all caches.
        delete: Remove what is damaged, in use or not.
    """
    found = entries(root, check=True)
    bad = tuple(entry for entry in found if entry.status == DAMAGED)
    other = sum(entry.status == OTHER_FORMAT for entry in found)
    removed = []
    for entry in bad if delete else ():
        # Looked at once more: a builder may have replaced it meanwhile.
        again = _look(entry.path, entry.section, check=True)
        if again is None or again.status != DAMAGED or discard(root, entry.path):
            removed.append(entry)
            _drop_empty_parent(root, entry)
    return Verdict(len(found) - other, other, bad, tuple(removed))


@dataclass
class Collected:
    """Result of :func:`collect`.

    Attributes:
        removed: Entries that went, or would go in a dry run, least recently used first.
        busy: Entries that should go but are in use.
        kept, kept_bytes: What stays.
        swept: Files and folders of killed processes that went; in a dry run, of all processes.
    """

    removed: list[CacheEntry] = field(default_factory=list)
    busy: list[CacheEntry] = field(default_factory=list)
    kept: int = 0
    kept_bytes: int = 0
    swept: int = 0


def collect(
    root: Path, *, max_bytes: int | None = None, max_age_seconds: float | None = None, dry_run: bool = False
) -> Collected:
    """Removes entries until the cache is as small and as young as asked, and what killed processes left.

    Least recently used entries go first; none goes that a process holds. Builders and other clean-ups may run
    meanwhile.

    Args:
        root: Folder of all caches.
        max_bytes: Largest size of all entries together.
        max_age_seconds: Entries whose last use is longer ago go.
        dry_run: Remove nothing.
    """
    result = Collected()
    by_use = sorted(entries(root), key=lambda entry: (entry.last_use, entry.path))
    size, now = sum(entry.size for entry in by_use), time.time()
    for entry in by_use:
        too_old = max_age_seconds is not None and now - entry.last_use > max_age_seconds
        if too_old or (max_bytes is not None and size > max_bytes):
            if dry_run or _remove(root, entry):
                result.removed.append(entry)
                size -= entry.size
                continue
            if os.path.lexists(entry.path):
                result.busy.append(entry)
            else:
                size -= entry.size  # another clean-up was faster
                continue
        result.kept += 1
    result.kept_bytes = size
    if dry_run:
        result.swept = len(leftovers(root)) + len(scratch_leftovers())
    else:
        result.swept = sweep(root) + sweep_scratch()
    return result


def _remove(root: Path, entry: CacheEntry) -> bool:
    try:
        make_folder(root / "tmp")
        aside, lease = new_folder(root / "tmp")
    except OSError:
        return False
    try:
        gone = remove_if_free(entry.path, aside / "entry")
    finally:
        lease.close()
        remove(aside)
    if gone:
        _drop_empty_parent(root, entry)
    return gone


def _drop_empty_parent(root: Path, entry: CacheEntry) -> None:
    if entry.path.parent != root / entry.section:
        with contextlib.suppress(OSError):
            entry.path.parent.rmdir()
