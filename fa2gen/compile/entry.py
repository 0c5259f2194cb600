"""Format of a cache entry: a folder with files and ``build.json``, which tells what they are and their checksums.

``build.json`` holds the format's version, the entry's key, size and SHA-256 of every file, facts about the build, and
the SHA-256 of its own other fields. What is read is checked against it, and must be a plain file that belongs to this
user or to root and that nobody else may write to.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .location import unsafe_reason
from .locks import Lease, hold, same_file

#: Part of every key: versions of fa2gen that write different formats share a cache without seeing each other's entries.
FORMAT = 2
MANIFEST = "build.json"
_MAX_MANIFEST_BYTES = 64 << 20  # a log is a few kilobytes
#: An entry's last use is the time of its folder, renewed at most once in so many seconds: a hit seldom writes.
USE_SECONDS = 24 * 3600.0


class DamageError(Exception):
    """An entry may not be used; the text says why. Never leaves the cache."""


class OtherFormatError(DamageError):
    """A whole entry that another version of fa2gen wrote."""


@dataclass(frozen=True)
class Contents:
    """What a build made.

    Attributes:
        files: Name -> bytes.
        facts: What JSON can hold.
        executable: Names of files that are programs.
    """

    files: Mapping[str, bytes]
    facts: Mapping[str, Any]
    executable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """An entry that was read and checked, or one that could not be stored.

    Attributes:
        files: The files that were asked for.
        facts: As they were stored.
        folder: Where it lies; None if it is in memory only.
        lease: Keeps the folder from being removed; None if it is in memory only.
    """

    files: Mapping[str, bytes]
    facts: Mapping[str, Any]
    folder: Path | None = None
    lease: Lease | None = None


def write_entry(folder: Path, key: str, contents: Contents) -> None:
    """Writes an entry's files into ``folder``, which exists, and flushes them to the disk.

    Raises:
        OSError: The disk refuses; what was written stays.
    """
    files = {}
    for name, data in contents.files.items():
        program = name in contents.executable
        files[name] = {"sha256": sha256(data), "bytes": len(data), **({"executable": True} if program else {})}
        write_file(folder / name, data, 0o700 if program else 0o600)
    fields = {"format": FORMAT, "key": key, "built": int(time.time()), "files": files, "facts": dict(contents.facts)}
    manifest = json.dumps({**fields, "checksum": checksum(fields)}, indent=1)
    write_file(folder / MANIFEST, manifest.encode(), 0o600)
    flush(folder)


def read_entry(folder: Path, key: str, wanted: Sequence[str] | None) -> Entry | None:
    """Reads an entry and holds it; notes the use.

    Args:
        folder: Where it lies.
        key: The key that it must have been stored under.
        wanted: Names of the files to read; None for all, and then no other file may lie beside them.

    Returns:
        The entry; None if there is none. Its lease is for the caller to close.

    Raises:
        DamageError: It may not be used.
        OSError: It cannot be read now, for a reason that is none of its own: too many open files, no memory.
    """
    lease = _hold(folder)
    if lease is None:
        return None
    try:
        status = os.fstat(lease.handle)
        reason = unsafe_reason(status)
        if reason is not None:
            raise DamageError(f"its folder {reason}")
        manifest = _read_manifest(lease.handle, key)
        files = manifest["files"] if wanted is None else {name: manifest["files"][name] for name in wanted}
        if wanted is None:
            strange = sorted(set(os.listdir(lease.handle)) - {*files, MANIFEST})
            if strange:
                raise DamageError(f"{strange[0]} does not belong to it")
        data = {name: _read_listed(lease.handle, name, listed) for name, listed in files.items()}
        facts = manifest["facts"]
        if not isinstance(facts, dict):
            raise DamageError(f"{MANIFEST} has no facts")
    except BaseException as error:
        gone = not same_file(lease.handle, folder)
        lease.close()
        if isinstance(error, (DamageError, OSError)) and gone:
            return None  # removed while it was read, by one who could not lock
        if isinstance(error, OSError):
            raise _judged(error, "it") from None
        if isinstance(error, (KeyError, TypeError, AttributeError)):
            raise DamageError(f"{MANIFEST} is wrong: {type(error).__name__} {error}") from None
        raise
    if wanted is not None and abs(time.time() - status.st_mtime) > USE_SECONDS:
        _note_use(lease.handle)
    return Entry(data, facts, folder, lease)


def read_manifest(folder: Path, key: str) -> dict[str, Any] | None:
    """The fields of ``build.json``, checked; the files that it lists are not, and no use is noted. None: no entry.

    Raises:
        DamageError, OSError: As :func:`read_entry`.
    """
    lease = _hold(folder)
    if lease is None:
        return None
    with lease:
        return _read_manifest(lease.handle, key)


def _hold(folder: Path) -> Lease | None:
    try:
        return hold(folder)
    except OSError as error:
        raise DamageError("it is not a folder") if error.errno in _WRONG_TYPE else _judged(error, "it") from None


_WRONG_TYPE = (errno.ENOTDIR, errno.ELOOP)
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _judged(error: OSError, what: str) -> Exception:
    """The error to raise for a read that failed: a shortage of this process says nothing about the entry."""
    return error if error.errno in _SHORTAGES else DamageError(f"{what} cannot be read: {error.strerror or error}")


def _read_manifest(folder: int, key: str) -> dict[str, Any]:
    text = _read_file(folder, MANIFEST, None)
    try:
        fields = json.loads(text)
        own = fields.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamageError(f"{MANIFEST} cannot be read") from None
    if own != checksum(fields):
        raise DamageError(f"{MANIFEST} does not match its checksum")
    if fields.get("format") != FORMAT:
        raise OtherFormatError(f"it has format {fields.get('format')}, this version writes {FORMAT}")
    if fields.get("key") != key:
        raise DamageError(f"{MANIFEST} describes another kernel")
    return fields  # type: ignore[no-any-return]


def _read_listed(folder: int, name: str, listed: Mapping[str, Any]) -> bytes:
    data = _read_file(folder, name, listed["bytes"], executable=listed.get("executable", False))
    if sha256(data) != listed["sha256"]:
        raise DamageError(f"{name} does not match its checksum")
    return data


def _read_file(folder: int, name: str, size: int | None, *, executable: bool = False) -> bytes:
    if os.path.basename(name) != name:
        raise DamageError(f"{name} does not belong to it")
    try:
        # O_NONBLOCK: a pipe in its place must not hang.
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise DamageError(f"{name} is missing") from None
    except OSError as error:
        raise DamageError(f"{name} is a link") if error.errno == errno.ELOOP else _judged(error, name) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise DamageError(f"{name} is not a file")
        reason = unsafe_reason(status)
        if reason is not None:
            raise DamageError(f"{name} {reason}")
        if executable and not status.st_mode & stat.S_IXUSR:
            raise DamageError(f"{name} is not executable")
        # Before reading: what grew to many gigabytes is not read to find that out.
        if status.st_size != size if size is not None else status.st_size > _MAX_MANIFEST_BYTES:
            raise DamageError(f"{name} holds {status.st_size} bytes" + (f", not {size}" if size is not None else ""))
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise _judged(error, name) from None
    finally:
        os.close(handle)


def read_trusted(path: Path) -> bytes:
    """A file that lies in the cache folder itself.

    Raises:
        OSError: It cannot be read, or somebody else may have written it.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _read_file(folder, path.name, None)
    except DamageError as error:
        raise OSError(str(error)) from None
    finally:
        os.close(folder)


def _note_use(folder: int) -> None:
    with contextlib.suppress(OSError):  # read-only, or root's
        os.utime(folder)


def checksum(fields: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, whatever the order and the layout of its fields."""
    return sha256(json.dumps(fields, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Writes a new file and flushes it to the disk. ``mode`` holds whatever the umask: a cache is private."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)


def flush(folder: Path) -> None:
    """Flushes a folder's list of names to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
