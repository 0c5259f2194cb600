"""``fa2gen cache``: what is in the kernel cache, whether it is whole, and what may go."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import CacheError
from .options import json_option
from .units import age_text, count_text, parse_age, parse_size, size_text

if TYPE_CHECKING:
    from ..compile.admin import CacheEntry


@click.group("cache", no_args_is_help=False)
def command() -> None:
    """List, check and clean the kernel cache.

    It holds kernels, as text and compiled, and the emulator's programs, in $FA2GEN_CACHE_DIR or fa2gen in the user's
    cache folder. Everything in it can be made again: deleting the folder costs compile time and nothing else.

    \b
    Examples:
      fa2gen cache ls
      fa2gen cache gc --max-size 2G --max-age 30d
      fa2gen cache verify --delete
    """


@command.command("ls", short_help="List the entries.")
@json_option
def ls(as_json: bool) -> None:
    """List the entries: kernel, target, compiler, size, age and last use (to a day).

    \b
    Examples:
      fa2gen cache ls
      fa2gen cache ls --json
    """
    from ..compile import admin

    root = _root()
    found = admin.entries(root)
    size = sum(entry.size for entry in found)
    if as_json:
        _print_json({"root": str(root), "entries": [_record(e) for e in found], "count": len(found), "bytes": size})
        return
    now = time.time()
    rows = [("kernel", "target", "compiler", "size", "age", "last use", "")]
    for entry in sorted(found, key=lambda entry: (entry.section, entry.kernel, entry.target, entry.path)):
        compiler = entry.compiler if len(entry.compiler) <= 40 else f"{entry.compiler[:37]}..."
        age = age_text(now - entry.built) if entry.built else ""
        state = "" if entry.status == admin.OK else f"{entry.status}: {entry.reason}"
        name = entry.kernel or f"{entry.path.name[:12]}..."
        rows.append((name, entry.target, compiler, size_text(entry.size), age, age_text(now - entry.last_use), state))
    if found:
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        for row in rows:
            cells = [f"{cell:>{width}}" if 3 <= i <= 5 else f"{cell:<{width}}" for i, (cell, width) in
                     enumerate(zip(row, widths, strict=False))]  # fmt: skip
            click.echo("  ".join([*cells, row[6]]).rstrip())
    click.echo(f"{count_text(len(found), 'entry', 'entries')}, {size_text(size)}, in {root}")


@command.command("gc", short_help="Remove old entries and leftovers.")
@click.option("--max-size", "max_bytes", callback=parse_size, metavar="SIZE", help="Keep at most so much, e.g. 2G.")
@click.option(
    "--max-age", "max_age", callback=parse_age, metavar="AGE", help="Remove what was not used for so long, e.g. 30d."
)
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@json_option
def gc(max_bytes: int | None, max_age: float | None, dry_run: bool, as_json: bool) -> None:
    """Remove entries, least recently used first, and what killed processes left.

    Without a limit only leftovers go. What a process builds or uses now stays, so this may run beside anything.

    \b
    Examples:
      fa2gen cache gc --max-size 2G
      fa2gen cache gc --max-age 30d --dry-run
    """
    from ..compile import admin

    root = _root()
    result = admin.collect(root, max_bytes=max_bytes, max_age_seconds=max_age, dry_run=dry_run)
    freed = sum(entry.size for entry in result.removed)
    if as_json:
        _print_json(
            {
                "root": str(root),
                "dry_run": dry_run,
                "removed": [_record(entry) for entry in result.removed],
                "removed_bytes": freed,
                "busy": [_record(entry) for entry in result.busy],
                "leftovers": result.swept,
                "kept": result.kept,
                "kept_bytes": result.kept_bytes,
            }
        )
        return
    for entry in result.removed if dry_run else ():
        name = f"{entry.kernel} {entry.target}" if entry.kernel else entry.path.name
        click.echo(f"would remove {name}: {size_text(entry.size)}, used {age_text(time.time() - entry.last_use)} ago")
    removed = count_text(len(result.removed), "entry", "entries")
    left = count_text(result.swept, "leftover")
    click.echo(f"{'would remove' if dry_run else 'removed'} {removed} ({size_text(freed)}) and {left}")
    if result.busy:
        click.echo(f"kept {count_text(len(result.busy), 'entry', 'entries')} in use, or that cannot be removed")
    click.echo(f"{'would keep' if dry_run else 'kept'} {count_text(result.kept, 'entry', 'entries')}, "
               f"{size_text(result.kept_bytes)}, in {root}")  # fmt: skip


@command.command("verify", short_help="Check every file of every entry.")
@click.option("--delete", is_flag=True, help="Remove damaged entries; they are built again when they are needed.")
@json_option
def verify(delete: bool, as_json: bool) -> int:
    """Check every file of every entry against its checksum, owner and key.

    The exit code is 1 if damaged entries remain.

    \b
    Examples:
      fa2gen cache verify
      fa2gen cache verify --delete
    """
    from ..compile import admin

    root = _root()
    verdict = admin.verify(root, delete=delete)
    remain = len(verdict.bad) - len(verdict.removed)
    if as_json:
        document = {
            "root": str(root),
            "checked": verdict.checked,
            "other_format": verdict.other,
            "damaged": [_record(entry) for entry in verdict.bad],
            "removed": len(verdict.removed),
            "remain": remain,
        }
        _print_json(document)
        return 1 if remain else 0
    for entry in verdict.bad:
        click.echo(f"damaged{', removed' if entry in verdict.removed else ''}: {entry.path}: {entry.reason}")
    other = f", {verdict.other} of another version of fa2gen passed over" if verdict.other else ""
    click.echo(f"{count_text(verdict.checked, 'entry', 'entries')} checked{other}, {len(verdict.bad)} damaged, "
               f"{remain} of them left, in {root}")  # fmt: skip
    return 1 if remain else 0


def _root() -> Path:
    from ..compile.location import cache_root

    root = cache_root()
    if root is None:
        raise CacheError("there is no cache folder that can be used: set FA2GEN_CACHE_DIR to a folder of your own")
    return root


def _record(entry: CacheEntry) -> dict[str, Any]:
    return {**asdict(entry), "path": str(entry.path)}


def _print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2))
