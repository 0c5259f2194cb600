"""``fa2gen table``: what is tuned, whether it still holds, and tables of other machines."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import TableError
from ..spec import DTYPES, FAMILIES, KINDS
from .options import gpu_option, json_option, out_option

if TYPE_CHECKING:
    from ..tables import TableFile
    from ..tuning.regate import EntryStatus, RegateResult


@click.group("table", no_args_is_help=False)
def command() -> None:
    """Show, check and gate tuned tables, and take in those of other machines.

    There are two folders of tables: the user's, which tune writes to, and the package's. At equal distance a call takes
    the user's entry, unless it is predicted and the package's is measured.

    \b
    Examples:
      fa2gen table show --gpu h200 --headdim 128
      fa2gen table check
    """


@command.command("show", short_help="Show tuned entries.")
@gpu_option("Only this GPU's. [default: all]")
@click.option("--kind", type=click.Choice(KINDS), help="Only forward or only backward kernels. [default: both]")
@click.option("--headdim", "headdims", type=int, multiple=True, metavar="D", help="Only these head dimensions.")
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="Only this element type.")
@click.option("--causal/--no-causal", default=None, help="Only with, or only without the causal mask.")
@click.option(
    "--deterministic/--no-deterministic",
    default=None,
    help="Only backward kernels that give equal bits from run to run, or only those that do not.",
)
@click.option(
    "--family",
    type=click.Choice(tuple(dict.fromkeys(family for each in FAMILIES.values() for family in each))),
    help="Only kernels of this family. [default: all]",
)
@json_option
def show(
    gpu_name: str | None,
    kind: str | None,
    headdims: tuple[int, ...],
    dtypes: tuple[str, ...],
    causal: bool | None,
    deterministic: bool | None,
    family: str | None,
    as_json: bool,
) -> None:
    """Show tuned entries: time, rate, how it is known, and whether the templates have changed since.

    A bucket is a size class: q12_k12_w3 is up to 2^12 queries and keys a sequence, and at least 2^3 (w4: or more)
    query tiles of 128 rows for each SM. The spread is that of the middle 60 % of the launches, relative to the median.
    A stale entry is passed over; one that passed the gate again is used. Where a kernel and size have entries of
    several families, a call runs the fastest that can serve it.

    \b
    Examples:
      fa2gen table show --gpu h200 --headdim 128 --causal
      fa2gen table show --gpu h200 --kind bwd --json
      fa2gen table show --headdim 128 --deterministic
    """
    if deterministic is not None and kind == "fwd":
        raise click.UsageError(
            "--deterministic and --no-deterministic are for backward kernels, the forward always is: leave out "
            "--kind fwd",
            click.get_current_context(),
        )

    def wanted(status: EntryStatus) -> bool:
        spec = status.entry.spec
        return (
            (kind is None or spec.kind == kind)
            and (not headdims or spec.head_dim in headdims)
            and (not dtypes or spec.dtype in dtypes)
            and (causal is None or spec.causal == causal)
            and (deterministic is None or (spec.kind, spec.deterministic) == ("bwd", deterministic))
            and (family is None or status.entry.config.family == family)
        )

    files, statuses = _read(gpu_name)
    statuses = [status for status in statuses if wanted(status)]
    if as_json:
        click.echo(json.dumps(_document(files, statuses), indent=2))
        return
    for file in files:
        mine = [status for status in statuses if status.file is file]
        if file.table is None:
            click.echo(_unreadable(file))
        elif mine:
            click.echo(f"{file.gpu} {file.path.stem}, the {file.source} table {file.path}")
            _show_entries(mine)
    if not statuses:
        click.echo("no tuned entries" + (" like these" if files else ": fa2gen tune makes them"))


@command.command("check", short_help="Check that entries are legal and of today's templates.")
@gpu_option("Only this GPU's. [default: all]")
@click.option(
    "--regate", is_flag=True, help="Put the stale entries through the gate again, and mark those that pass as usable."
)
@json_option
def check_command(gpu_name: str | None, regate: bool, as_json: bool) -> int:
    """Check that every tuned entry can be read, is legal and was made with today's templates.

    Templates count for the kernels made from them only. With --regate the config of each stale entry is compiled with
    today's templates and must meet the tolerance rule, on its GPU if that is here, else in the emulator. What passes is
    saved to the user's table, keeps its old time and is used again; tune measures it anew. The exit code is 1 if stale
    or illegal entries, or files that cannot be read, remain.

    \b
    Examples:
      fa2gen table check
      fa2gen table check --gpu a100 --regate
    """
    files, statuses = _read(gpu_name)
    results: list[RegateResult] = []
    if regate and any(status.state == "stale" for status in statuses):
        from ..tuning.regate import regate as run_gate
        from .progress import StageProgress

        with StageProgress() as progress:
            results = run_gate(statuses, progress=progress.on_event)
        files, statuses = _read(gpu_name)
    remains = [status for status in statuses if status.fails]
    damaged = [file for file in files if file.table is None]
    if as_json:
        document = _document(files, statuses)
        document["regated"] = [
            {"gpu": r.status.file.gpu, **_name(r.status), "passed": r.passed, "text": r.text} for r in results
        ]
        document["ok"] = not (remains or damaged)
        click.echo(json.dumps(document, indent=2))
    else:
        _show_check(files, statuses, results)
        if any(status.state == "stale" for status in remains) and not regate:
            gpu = f" --gpu {gpu_name}" if gpu_name else ""
            click.echo(
                f"stale entries are passed over; to gate them and use them again:\n  fa2gen table check{gpu} --regate"
            )
    return 1 if remains or damaged else 0


@command.command("import", short_help="Merge table files of other machines into yours.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@out_option("Folder of tables to write to. [default: the user's data folder]")
@json_option
def import_command(files: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Merge table files of other machines into the user's tables.

    The merge rule, for the entries of each family, is that of tune: measured over predicted, newer over older, and no
    change of config for a difference that is within the noise. Files are checked whole before anything is written.

    \b
    Example:
      fa2gen table import node1/h200/fwd.json node2/h200/fwd.json
    """
    from ..codegen import template_hash
    from ..tables import load_table, save_table

    tables = [_foreign_table(file) for file in files]
    rows: list[dict[str, Any]] = []
    for file, table in zip(files, tables, strict=True):
        path = save_table(table, root=out, template_hash=template_hash)
        merged = load_table(path)
        there = {entry.key: entry for entry in merged.entries} if merged else {}
        kept = sum(there.get(entry.key) == entry for entry in table.entries)
        rows.append({"file": str(file), "path": str(path), "entries": len(table.entries), "kept": kept})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        gave_way = row["entries"] - row["kept"]
        click.echo(
            f"{row['file']}: {row['kept']} of {row['entries']} entries taken into {row['path']}"
            + (f", {gave_way} gave way to those there" if gave_way else "")
        )


def _foreign_table(path: Path) -> Any:
    from ..constraints import infeasible_reason
    from ..hardware import arch_limits, list_gpus, supported_compute_capabilities
    from ..tables import parse_table

    try:
        table = parse_table(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not a tuned table: {error}") from None
    # The name becomes a folder's.
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", table.gpu):
        raise TableError(f"{path} is for gpu {table.gpu!r}, which is no name of a GPU")
    archs = {arch_limits(capability).target: arch_limits(capability) for capability in supported_compute_capabilities()}
    if table.target not in archs:
        raise TableError(f"{path} is for target {table.target!r}; known are {', '.join(archs)}")
    for gpu in list_gpus():
        if gpu.name == table.gpu and gpu.target != table.target:
            raise TableError(f"{path} is for target {table.target!r}, and {gpu.name} is {gpu.target}")
    for entry in table.entries:
        reason = infeasible_reason(entry.spec, entry.config, archs[table.target])
        if reason is not None:
            raise TableError(f"{path}: {entry.config.slug()} cannot run {entry.spec.slug()} on {table.gpu}: {reason}")
    return table


def _read(gpu_name: str | None) -> tuple[list[TableFile], list[EntryStatus]]:
    from ..hardware import get_gpu
    from ..tables import scan_tables
    from ..tuning.regate import check

    known = {file.gpu for file in scan_tables()} if gpu_name else set()
    # A device that is not in the database has tables all the same.
    gpu = gpu_name if gpu_name is None or gpu_name in known else get_gpu(gpu_name).name
    files = scan_tables(gpu)
    return files, check(files=files)


def _unreadable(file: TableFile) -> str:
    what = "newer" if file.newer else "damaged"
    return f"{what}: the {file.source} table {' '.join(file.problem.split())}"


def _tflops(status: EntryStatus) -> float:
    entry = status.entry
    return float(entry.measurement.problem.flops(entry.spec) / entry.measurement.ms / 1e9)


def _show_entries(statuses: Sequence[EntryStatus]) -> None:
    """Two lines an entry, within 80 columns, the second begins with the family; a third for what is unusual."""
    kernels = max(len(status.entry.spec.slug()) for status in statuses)
    buckets = max(len(status.entry.bucket.label()) for status in statuses)
    click.echo(f"{'kernel':<{kernels}}  {'bucket':<{buckets}}  {'ms':>9}  {'TFLOP/s':>7}  kind")
    for status in statuses:
        entry, m = status.entry, status.entry.measurement
        click.echo(
            f"{entry.spec.slug():<{kernels}}  {entry.bucket.label():<{buckets}}  {m.ms:>9.4f}  "
            f"{_tflops(status):>7.1f}  {m.kind}"
        )
        details = [entry.config.slug()]
        if m.kind == "measured":
            details.append(f"spread {100 * m.spread:.1f} %")
        if m.clocks is not None:
            details.append(f"{m.clocks.sm_mhz} MHz")
        click.echo(f"    {', '.join([*details, entry.provenance.utc[:10]])}")
        if m.clocks is not None and m.clocks.throttle:
            click.echo(f"    throttled: {', '.join(m.clocks.throttle)}")
        if status.state != "current":
            click.echo(f"    {status.state}: {_short_reason(status)}")


def _short_reason(status: EntryStatus) -> str:
    regate = status.entry.provenance.regate
    if status.state == "gated" and regate is not None:
        return f"the templates have changed, passed the gate again {regate.utc[:10]}"
    if status.state == "stale":
        return "the templates have changed since"
    return "a usable entry takes its place" if status.state == "replaced" else status.reason


def _show_check(files: Sequence[TableFile], statuses: Sequence[EntryStatus], results: Sequence[RegateResult]) -> None:
    for result in results:
        entry = result.status.entry
        verdict = "passed" if result.passed else "FAILED"
        name = f"{entry.spec.slug()} {entry.bucket.label()} {entry.config.family}"
        click.echo(f"{verdict}: {result.status.file.gpu} {name}")
        if not result.passed:
            click.echo(f"    {entry.config.slug()}: {' '.join(result.text.split())}")
    for file in files:
        if file.table is None:
            click.echo(_unreadable(file))
            continue
        mine = [status for status in statuses if status.file is file]
        kinds = Counter(status.entry.measurement.kind for status in mine)
        states = Counter(status.state for status in mine)
        counts = [f"{count} {name}" for name, count in (*sorted(kinds.items()), *sorted(states.items()))]
        click.echo(f"{file.gpu} {file.path.stem}, the {file.source} table {file.path}")
        click.echo(f"    {', '.join(counts) or 'no entries'}")
        for status in mine:
            if status.state != "current":
                entry = status.entry
                click.echo(f"  {status.state}: {entry.spec.slug()} {entry.bucket.label()}, {entry.measurement.kind}")
                click.echo(f"    {entry.config.slug()}")
                if status.state == "illegal":
                    click.echo(f"    {status.reason}")
    if not files:
        click.echo("no tuned tables: fa2gen tune makes them")


def _name(status: EntryStatus) -> dict[str, Any]:
    return {
        "kernel": status.entry.spec.slug(),
        "bucket": status.entry.bucket.label(),
        "family": status.entry.config.family,
        "config": status.entry.config.slug(),
    }


def _document(files: Sequence[TableFile], statuses: Sequence[EntryStatus]) -> dict[str, Any]:
    from ..tables.document import entry_form

    def row(status: EntryStatus) -> dict[str, Any]:
        return {
            **_name(status),
            "state": status.state,
            "reason": status.reason,
            "tflops": _tflops(status),
            "spread": status.entry.measurement.spread,
            "entry": entry_form(status.entry),
        }

    return {
        "tables": [
            {
                "gpu": file.gpu,
                "kind": file.path.stem,
                "target": file.table.target,
                "source": file.source,
                "path": str(file.path),
                "entries": [row(status) for status in statuses if status.file is file],
            }
            for file in files
            if file.table is not None
        ],
        "unreadable": [
            {"path": str(file.path), "source": file.source, "problem": file.problem, "newer": file.newer}
            for file in files
            if file.table is None
        ],
    }
