"""What ``fa2gen tune`` prints: the plan of a dry run, the results of a session; as text and as JSON."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from .units import count_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..spec import Config
    from ..tables import TunedEntry
    from ..tuning.plan import Plan, PlannedRequest
    from ..tuning.session import TuneReport

# Columns that the table of results takes.
_WIDE = 165
# The table cannot be read in fewer; a narrower terminal wraps its lines.
_NARROWEST = 72
# Failures of one kind that are told in full.
_EXAMPLES = 3


def _console() -> Console:
    from rich.console import Console

    if sys.stdout.isatty():
        console = Console(highlight=False)
        return console if console.width >= _NARROWEST else Console(width=_NARROWEST, highlight=False)
    # A pipe or a log has no width.
    return Console(width=180, highlight=False)


def _how(report: TuneReport) -> str:
    if report.measured:
        count = len(report.devices)
        return f"measured on {count} of this machine's GPUs" if count > 1 else "measured on this machine's GPU"
    return "PREDICTED by the performance model, not measured"


def _tflops(entry: TunedEntry) -> float:
    return float(entry.measurement.problem.flops(entry.spec) / entry.measurement.ms / 1e9)


def _speedups(report: TuneReport, entry: TunedEntry) -> tuple[float | None, float | None]:
    """How many times faster than the default config and than the one that the tables held; None where unknown."""
    default, incumbent = report.default_ms.get(entry.key), entry.provenance.incumbent
    return (
        None if default is None else default / entry.measurement.ms,
        None if incumbent is None else incumbent.ms / entry.measurement.ms,
    )


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def _clock(entry: TunedEntry) -> str:
    clocks = entry.measurement.clocks
    return "-" if clocks is None else str(clocks.sm_mhz)


def _results(report: TuneReport, *, wide: bool) -> Table:
    """The entries, fastest first; a narrow table has the kernel, its sizes and its config in one column."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.HEAVY_HEAD if wide else box.SIMPLE_HEAD)
    sizes = ("kernel", "batch", "heads q/k", "seqlen q/k", "best config") if wide else ("kernel, sizes, best config",)
    others = ("vs default", *(("vs before", "SM MHz") if report.measured else ())) if wide else ()
    unit = "ms" if report.measured else "ms predicted" if wide else "ms\npredicted"
    for name in ("rank", *sizes, *others, unit, "TFLOP/s"):
        left = "kernel" in name or "config" in name
        table.add_column(name, justify="left" if left else "right", no_wrap=wide, overflow="fold")
    for rank, entry in enumerate(sorted(report.entries, key=_tflops, reverse=True), 1):
        problem = entry.measurement.problem
        heads, seqlens = f"{problem.num_heads_q}/{problem.num_heads_k}", f"{problem.seqlen_q}/{problem.seqlen_k}"
        cells = [entry.spec.slug(), str(problem.batch), heads, seqlens, entry.config.slug()]
        default, before = map(_times, _speedups(report, entry))
        if wide:
            cells += [default, *([before, _clock(entry)] if report.measured else [])]
        else:
            more = f", {before} before, {_clock(entry)} MHz" if report.measured else ""
            cells = [f"{cells[0]}\n  {problem.batch} x {heads} x {seqlens}\n  {cells[-1]}\n  {default} default{more}"]
        table.add_row(str(rank), *cells, f"{entry.measurement.ms:.4f}", f"{_tflops(entry):.1f}")
    return table


def show_report(report: TuneReport) -> None:
    """Prints a session's results, failures and files."""
    from ..tuning.timing import disturbance

    console = _console()

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    if report.entries:
        line(f"{report.gpu.title}: {_how(report)}")
        console.print(_results(report, wide=console.width >= _WIDE))
    for entry in report.entries:
        if report.measured and (doubt := disturbance(entry.measurement)):
            line(f"doubtful although timed twice: {entry.spec.slug()} {entry.bucket.label()}: {doubt}")
    counts = Counter(failure.outcome for failure in report.failures)
    if counts:
        line(f"failed: {', '.join(f'{count} {name}' for name, count in counts.most_common())}; --json lists them all")
    for outcome in counts:
        for failure in [failure for failure in report.failures if failure.outcome == outcome][:_EXAMPLES]:
            reason = " ".join(failure.reason.split())[:160]
            line(f"{outcome}: {failure.spec.slug()} {failure.config.slug()}: {reason}")
    for path in report.paths:
        text = f"saved {count_text(len(report.entries) - report.superseded, 'entry', 'entries')} to {path}"
        if report.superseded:
            text += f"; {report.superseded} gave way to measured or newer ones there"
        line(text)
    line(
        f"{count_text(report.compiled, 'kernel')} compiled, {report.cached} from the cache, {report.seconds:.0f} s; "
        + _how(report)
        + ("" if report.measured else f" (the model is {_validity(report)})")
        + ("; ended early" if report.interrupted else "")
    )


def _validity(report: TuneReport) -> str:
    """What is known of the models that a session's predictions are of."""
    from ..tuning.model import CALIBRATED_ON, validity

    tuned = {(entry.spec.kind, entry.config.family) for entry in report.entries}
    tuned |= {(failure.spec.kind, failure.config.family) for failure in report.failures}
    known = {model: validity(report.gpu, *model) for model in CALIBRATED_ON if model in tuned or not tuned}
    # Mostly one kind is tuned, and what is known of all may be the same.
    if len({*known.values()}) == 1:
        return next(iter(known.values()))
    return "; ".join(f"{kind} {family}: {words}" for (kind, family), words in known.items())


def report_as_json(report: TuneReport) -> dict[str, Any]:
    """A session's results as JSON takes them."""
    return {
        "gpu": report.gpu.name,
        "kind": "measured" if report.measured else "predicted",
        **({"devices": list(report.devices)} if report.measured else {"model": _validity(report)}),
        "entries": [_entry_as_json(report, entry) for entry in report.entries],
        "failures": [
            {"spec": f.spec.canonical(), "config": f.config.canonical(), "outcome": f.outcome, "reason": f.reason}
            for f in report.failures
        ],
        "failures_by_outcome": dict(Counter(failure.outcome for failure in report.failures)),
        "paths": [str(path) for path in report.paths],
        "superseded": report.superseded,
        "compiled": report.compiled,
        "cached": report.cached,
        "seconds": report.seconds,
        "interrupted": report.interrupted,
    }


def _entry_as_json(report: TuneReport, entry: TunedEntry) -> dict[str, Any]:
    measurement, incumbent = entry.measurement, entry.provenance.incumbent
    default, before = _speedups(report, entry)
    form: dict[str, Any] = {
        "spec": entry.spec.canonical(),
        "bucket": entry.bucket.label(),
        "family": entry.config.family,
        "config": entry.config.canonical(),
        "ms": measurement.ms,
        "tflops": _tflops(entry),
        "kind": measurement.kind,
        "method": measurement.method,
        "default_ms": report.default_ms.get(entry.key),
        "times_faster_than_default": default,
        "incumbent": None if incumbent is None else {"config": incumbent.config.canonical(), "ms": incumbent.ms},
        "times_faster_than_incumbent": before,
    }
    if measurement.kind == "measured":
        clocks = measurement.clocks
        form["spread"] = measurement.spread
        form["clocks"] = None if clocks is None else {**vars(clocks), "throttle": list(clocks.throttle)}
    return form


def _estimate(plan: Plan) -> str:
    what = "to compile them, and the measuring besides," if plan.devices else "in all"
    return (
        f"at most {count_text(plan.kernels, 'kernel')} to compile; about {plan.seconds:.0f} s {what} on "
        f"{count_text(plan.cores, 'core')} if none is cached"
    )


def show_plan(plan: Plan) -> None:
    """Prints what a session would do."""
    console = _console()

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    how = f"measured on device {', '.join(map(str, plan.devices))}" if plan.devices else "predicted"
    # Families of a kernel and size are rows of their own.
    sizes = len({row.request for row in plan.requests})
    work = count_text(sizes, "kernel and size", "kernels and sizes")
    line(f"{plan.gpu.title}: {work} to tune, {how}")
    for row in plan.requests:
        problem = row.request.problem
        line(
            f"{row.request.spec.slug()} {row.bucket.label()}: {problem.batch} x {problem.num_heads_q}/"
            f"{problem.num_heads_k} heads x {problem.seqlen_q}/{problem.seqlen_k}, {row.legal:,} legal configs of "
            f"{row.family}, {row.excluded:,} excluded"
        )
        for name, config in _first(row):
            line(f"  {name:<9} {config.slug()}")
    line(_estimate(plan))


def _first(row: PlannedRequest) -> list[tuple[str, Config]]:
    """What comes first, in order, each with the reason."""
    first = [("default", row.default)]
    if row.incumbent is not None:
        first.append(("incumbent", row.incumbent))
    first += [("relative", config) for config in row.relatives]
    return first + [("model", config) for config in row.favourites]


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """What a session would do, as JSON takes it."""
    return {
        "gpu": plan.gpu.name,
        "kind": "measured" if plan.devices else "predicted",
        "devices": list(plan.devices),
        "requests": [
            {
                "kernel": row.request.spec.slug(),
                "bucket": row.bucket.label(),
                **vars(row.request.problem),
                "family": row.family,
                "legal_configs": row.legal,
                "excluded_configs": row.excluded,
                "default": row.default.canonical(),
                "incumbent": None if row.incumbent is None else row.incumbent.canonical(),
                "relatives": [config.canonical() for config in row.relatives],
                "model_favourites": [config.canonical() for config in row.favourites],
            }
            for row in plan.requests
        ],
        "kernels_to_compile": plan.kernels,
        "estimated_seconds": plan.seconds,
        "estimate": _estimate(plan),
    }
