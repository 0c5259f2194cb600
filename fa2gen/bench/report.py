"""A benchmark as text: a table for each kernel, host times, a summary, and who could not be measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .cells import Cell
from .rows import OWN, Benchmark, HostRow, Outcome, Refusal, Row, Timing
from .summary import summarise

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# A pipe or a log has no width.
_LOG_WIDTH = 180
# Columns of a name, and of "1234 (12.34)" and the space beside it: a narrower terminal wraps lines, but loses none.
_NAME_WIDTH, _FIGURE_WIDTH = 14, 15


def show(benchmark: Benchmark, console: Console | None = None) -> None:
    """Print all of it; a slower cell stays in it, and so does a peer that took none."""
    if console is None:
        console = _console(benchmark)
    names = [OWN, *benchmark.peers]
    _lines(console, *_head(benchmark))
    if benchmark.rows:
        _lines(console, "", "Kernel time: TFLOP/s by seqlen; in brackets fa2gen's speed over the peer's")
    for group in _groups(benchmark.rows):
        _lines(console, "", _title(group))
        console.print(_kernel_table(group, names))
        _lines(console, *_notes(group))
    for host in _host_groups(benchmark.host):
        _lines(console, "", _host_title(host))
        console.print(_host_table(host, names))
        _lines(console, *_refusals([(f"{row.stream} stream", row.outcomes) for row in host]))
    _lines(console, "", *_summary(benchmark))


def _console(benchmark: Benchmark) -> Console:
    from rich.console import Console

    if not sys.stdout.isatty():
        return Console(width=_LOG_WIDTH, highlight=False)
    console = Console(highlight=False)
    lengths = max((len(group) for group in _groups(benchmark.rows)), default=0)
    console.width = max(console.width, _NAME_WIDTH + _FIGURE_WIDTH * max(lengths, 4))
    return console


def _lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _head(benchmark: Benchmark) -> Iterator[str]:
    p = benchmark.provenance
    yield (
        f"{p.get('gpu', 'unknown GPU')}, driver {p.get('driver') or 'unknown'}, CUDA {p.get('cuda')}, "
        f"torch {p.get('torch')}; {p.get('utc')}"
    )
    for name, version in benchmark.versions.items():
        yield f"  {name:<10} {version:<20} {benchmark.titles.get(name, '')}".rstrip()
    for name, reason in benchmark.missing.items():
        yield f"  {name:<10} {'not measured':<20} {benchmark.titles.get(name, '')}: {reason}"


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in their sizes alone, in the order of their first."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell.direction, row.cell.spec, row.cell.data), []).append(row)
    return list(groups.values())


def _host_groups(rows: Sequence[HostRow]) -> list[list[HostRow]]:
    """Rows of one cell: calls, and steps."""
    groups: dict[Cell, list[HostRow]] = {}
    for row in rows:
        groups.setdefault(row.cell, []).append(row)
    return list(groups.values())


def _title(group: Sequence[Row]) -> str:
    cell = group[0].cell
    data = "" if cell.data == "normal" else f", {cell.data} data"
    problems = [row.cell.problem for row in group]
    heads = ", ".join(dict.fromkeys(f"{p.num_heads_q}/{p.num_heads_k}" for p in problems))
    batches = ", ".join(dict.fromkeys(str(p.batch) for p in problems))
    return f"{cell.slug()}{data}; {heads} heads q/k, batch {batches}"


def _kernel_table(group: Sequence[Row], names: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("")
    for row in group:
        table.add_column(row.cell.lengths, justify="right", no_wrap=True)
    for name in names:
        table.add_row(name, *(_cell_text(row, name) for row in group))
    return table


def _cell_text(row: Row, name: str) -> str:
    tflops, ratio = row.tflops(name), row.ratio(name)
    if tflops is None:
        outcome = row.outcomes.get(name)
        return "WRONG" if isinstance(outcome, Refusal) and outcome.wrong else "-"
    # Two digits behind the point where a call is bound by launching or by memory.
    text = f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2f}"
    return text if name == OWN or ratio is None else f"{text} ({ratio:.2f})"


def _notes(group: Sequence[Row]) -> Iterator[str]:
    """Configs, repairs, doubtful spreads and refusals, each with the lengths that it holds for."""
    configs: dict[str, list[str]] = {}
    for row in group:
        how = row.source + (f", {row.known}" if row.known else "") + (", stale" if row.stale else "")
        configs.setdefault(f"config {row.config or 'none'} ({how})", []).append(row.cell.lengths)
    for text, lengths in configs.items():
        yield f"  {', '.join(lengths)}: {text}"
    for row in group:
        if row.repairs:
            yield f"  {row.cell.lengths}: {row.repairs:,} softmax steps repaired in a call"
        for name, outcome in row.outcomes.items():
            if isinstance(outcome, Timing) and outcome.p80 - outcome.p20 > 0.1 * outcome.median:
                spread = f"p20 {outcome.p20:.4g}, p80 {outcome.p80:.4g} ms"
                yield f"  {row.cell.lengths}: {name}'s times are spread widely: {spread}"
    yield from _refusals([(row.cell.lengths, row.outcomes) for row in group])


def _refusals(rows: Sequence[tuple[str, dict[str, Outcome]]]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for where, outcomes in rows:
        for name, outcome in outcomes.items():
            if isinstance(outcome, Refusal):
                reasons.setdefault(f"{name}: {outcome.reason}", []).append(where)
    for text, places in reasons.items():
        yield f"  {', '.join(places)}: {text}"


def _host_title(rows: Sequence[HostRow]) -> str:
    cell = rows[0].cell
    p = cell.problem
    size = f"batch {p.batch}, {p.num_heads_q}/{p.num_heads_k} heads q/k, seqlen {cell.lengths}"
    what = "an eager call" if cell.direction == "fwd" else "an eager forward and backward"
    return f"Host time of {what} in us ({cell.slug()}, {size}); in brackets p20 to p80"


def _host_table(rows: Sequence[HostRow], names: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.stream} stream", justify="right", no_wrap=True)
        table.add_column("to fa2gen's", justify="right", no_wrap=True)
    for name in names:
        cells = []
        for row in rows:
            outcome, ratio = row.outcomes.get(name), row.ratio(name)
            cells.append("-" if not isinstance(outcome, Timing) else _microseconds(outcome))
            cells.append("" if name == OWN or ratio is None else f"{ratio:.2f}")
        table.add_row(name, *cells)
    return table


def _microseconds(timing: Timing) -> str:
    return f"{timing.median:.1f} ({timing.p20:.1f} - {timing.p80:.1f})"


def _summary(benchmark: Benchmark) -> Iterator[str]:
    for summary in summarise(benchmark.rows, benchmark.peers):
        kind = "" if summary.direction == "fwd" else f", {summary.direction}"
        data = kind + ("" if summary.data == "normal" else f" on {summary.data} data")
        taken = f"{summary.cells} cells" + (f" of {summary.of}" if summary.cells < summary.of else "")
        yield (
            f"fa2gen / {summary.peer}{data}: geomean {summary.geomean:.3f}, worst {summary.worst:.3f} "
            f"({summary.worst_cell}), over {taken}"
        )
    for peer in benchmark.peers:
        if benchmark.rows and not any(row.tflops(peer) for row in benchmark.rows):
            yield f"fa2gen / {peer}: nothing to compare, it took no cell"
    if not benchmark.complete:
        yield "INCOMPLETE: the benchmark was ended before its last cell"
