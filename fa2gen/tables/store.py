"""Table files: where they lie, how they are read fast and written so that no crash or second writer damages them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import itertools
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fa2gen.data import data_dir, user_folder
from fa2gen.errors import TableError
from fa2gen.hardware import Gpu
from fa2gen.spec import Config, KernelSpec

from .document import NewerSchemaError, parse_table, recover_entries, render_table
from .locks import locked
from .merge import TemplateHash, merge_entries
from .schema import Table, TunedEntry, utc_now

_Signature = tuple[int, int, int, int]
_MAX_BYTES = 64 << 20  # an entry is about a kilobyte
_cache: dict[Path, tuple[_Signature, Table | None]] = {}


def package_dir() -> Path:
    """Folder of the tables that ship with fa2gen; never written at run time."""
    return data_dir("tuned_tables")


def user_dir() -> Path:
    """Folder of the user's own tables: ``$FA2GEN_TABLES_DIR``, else ``fa2gen/tables`` in the XDG data directory.

    Raises:
        Fa2genError: The user has no home; or $FA2GEN_TABLES_DIR names that of an unknown one.
    """
    folder = _user_dir()
    if folder is None:
        raise TableError("there is no home folder for tuned tables: set FA2GEN_TABLES_DIR")
    return folder


def _user_dir() -> Path | None:
    folder = user_folder("FA2GEN_TABLES_DIR", "XDG_DATA_HOME", "~/.local/share")
    return folder if folder is None or os.environ.get("FA2GEN_TABLES_DIR") else folder / "tables"


def search_dirs() -> tuple[Path, ...]:
    """Folders that lookups read: the user's, where there is a home for one, then the package's."""
    own = _user_dir()
    return (package_dir(),) if own is None else (own, package_dir())


def table_path(root: Path, gpu: str, kind: str) -> Path:
    """File of one GPU's tuned entries for one kernel kind."""
    return root / gpu / f"{kind}.json"


def load_table(path: Path) -> Table | None:
    """Reads a table file; None if there is none.

    Raises:
        TableError: The file cannot be read or is not a valid table of the GPU and kind that its path names.
    """
    try:
        data = _read(path)
    except OSError as error:
        raise TableError(f"{path} cannot be read: {error.strerror or error}") from None
    return None if data is None else _parse(path, data)


def _parse(path: Path, data: bytes) -> Table:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not a tuned table: {error}") from None
    return parse_table(text, str(path), gpu=path.parent.name, kind=path.stem)


def _read(path: Path) -> bytes | None:
    """The bytes of a table file, None if there is none. What stands in its place never hangs or floods a reader.

    Raises:
        OSError: It cannot be read, is no file, or is far larger than any table.
    """
    try:
        # O_NONBLOCK: a pipe in its place must not hang.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        if status.st_size > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"it holds {status.st_size} bytes, a table at most {_MAX_BYTES}")
        return file.read()


def cached_table(path: Path) -> Table | None:
    """Like :func:`load_table`, but for run time: cached until the file changes, and a bad file counts as none.

    A bad file is named in one warning for each state of the file, so that an application neither crashes nor is
    flooded.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    # The time of the last change as well: of rights, which another time of writing does not tell.
    signature = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
    hit = _cache.get(path)
    if hit is not None and hit[0] == signature:
        return hit[1]
    try:
        table = load_table(path)
    except TableError as error:
        table = None
        warnings.warn(f"ignoring a tuned table: {error}", RuntimeWarning, stacklevel=2)
    _cache[path] = (signature, table)
    return table


def require_writable(gpu: Gpu, kinds: Iterable[str], *, root: Path | None = None) -> None:
    """Raises now what :func:`save_entries` would raise after hours of tuning.

    Args:
        gpu: The GPU whose tables are to be written.
        kinds: Kernel kinds.
        root: Folder of tables; default :func:`user_dir`.

    Raises:
        TableError: As :func:`save_entries`. A table that is merely damaged is none of these reasons.
    """
    root = user_dir() if root is None else Path(root)
    for kind in sorted(set(kinds)):
        path = table_path(root, gpu.name, kind)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(_lock_file(path)):
                pass
            _read(path)
        except OSError as error:
            raise TableError(f"{path} cannot be written: {error}") from None
        try:
            load_table(path)
        except NewerSchemaError:
            raise
        except TableError:
            # Merely damaged: the save keeps a copy and what is whole in it.
            pass


def save_entries(
    gpu: Gpu,
    entries: Sequence[TunedEntry],
    *,
    root: Path | None = None,
    template_hash: TemplateHash | None = None,
    refused: Collection[tuple[KernelSpec, Config]] = (),
) -> list[Path]:
    """Merges entries into a GPU's tables (:func:`merge_entries`), atomically and safe against other writers.

    Args:
        gpu: The GPU they hold for.
        entries: Entries of any kinds.
        root: Folder of tables; default :func:`user_dir`.
        template_hash, refused: For the merge rule.

    Returns:
        The files written.

    Raises:
        TableError: A file cannot be written, or was written by a newer fa2gen (NewerSchemaError). A file that is
            damaged is copied to ``<name>.damaged-<utc>-<pid>`` before it is replaced; its whole entries are kept.
    """
    paths = []
    for kind in sorted({entry.spec.kind for entry in entries}):
        mine = tuple(entry for entry in entries if entry.spec.kind == kind)
        table = Table(gpu.name, gpu.target, kind, mine)
        paths.append(save_table(table, root=root, template_hash=template_hash, refused=refused))
    return paths


def save_table(
    table: Table,
    *,
    root: Path | None = None,
    template_hash: TemplateHash | None = None,
    refused: Collection[tuple[KernelSpec, Config]] = (),
) -> Path:
    """Merges a table into the one of its GPU and kind, as :func:`save_entries` does."""
    path = table_path(user_dir() if root is None else Path(root), table.gpu, table.kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(_lock_file(path)):
            _sweep(path)
            present = _present_entries(path, table.target)
            merged = merge_entries(present, table.entries, template_hash=template_hash, refused=refused)
            _write_atomically(path, render_table(dataclasses.replace(table, entries=merged)))
    except OSError as error:
        raise TableError(f"{path} cannot be written: {error}") from None
    return path


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _present_entries(path: Path, target: str) -> tuple[TunedEntry, ...]:
    data = _read(path)
    if data is None:
        return ()
    try:
        table = _parse(path, data)
    except NewerSchemaError:
        raise
    except TableError as error:
        backup = free_name(path, "damaged")
        shutil.copy2(path, backup)
        # Before the table is replaced: a power cut leaves one of the two.
        with open(backup, "rb") as copy:
            os.fsync(copy.fileno())
        saved = recover_entries(data.decode(errors="replace"), str(path), gpu=path.parent.name, kind=path.stem)
        warnings.warn(
            f"{error}; it is kept as {backup.name} and replaced, with {len(saved)} whole entries taken over",
            RuntimeWarning,
            stacklevel=3,
        )
        return saved
    if table.target != target:
        raise TableError(f"{path} is for target {table.target}, the entries to be saved are for {target}")
    return table.entries


def free_name(path: Path, why: str) -> Path:
    """A name for what is put aside, ``<name>.<why>-<utc>-<pid>``; counted where one process does so often."""
    stem = f"{path.name}.{why}-{utc_now().replace(':', '')}-{os.getpid()}"
    names = itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2)))
    return next(aside for aside in map(path.with_name, names) if not os.path.lexists(aside))


def _sweep(path: Path) -> None:
    """Removes the temporary files of killed writers; under the table's lock there is no live one."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def _write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, also after a power cut: data before name, name before return."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
