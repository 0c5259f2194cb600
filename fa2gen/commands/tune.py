"""``fa2gen tune``: find the fastest config of each kernel and size class, and save it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..hardware import Gpu
from .options import gpu_option, json_option, make_specs, resolve_gpu, seqlen_options, spec_options
from .progress import StageProgress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..tuning.session import TuneReport, TuneRequest


@click.command("tune")
@spec_options(gqa=(1, 8))
@gpu_option("GPU to tune for. [default: the one found]")
@seqlen_options(None, minimum=1)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of tables to write to. [default: the user's data folder]",
)
@click.option(
    "--trials",
    type=click.IntRange(min=0),
    metavar="N",
    help="Configs to try: measured, for each kernel and size [default: 40]; predicted, to compile for each kernel"
    " [default: 24].",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop after; save what is found."
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on with the studies of an earlier run, or put them aside.",
)
@click.option("--dry-run", is_flag=True, help="Only list the kernels, sizes and numbers of legal configs.")
@json_option
def command(
    headdims: tuple[int, ...],
    dtypes: tuple[str, ...],
    causal: bool | None,
    gqa_ratios: tuple[int, ...],
    gpu_name: str | None,
    seqlen_q: int | None,
    seqlen_k: int | None,
    out: Path | None,
    trials: int | None,
    timeout: float | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Find the fastest config of each kernel and size class, and save it to a table.

    If the GPU named is the one at hand, configs are measured on it. Otherwise they are compiled for it and ranked by a
    performance model, and the table says that they are predicted. Either way a config is saved only after its results
    met the tolerance rule. Without --seqlen-q, three lengths are tuned: 512, 2048 and 8192.

    \b
    Examples:
      fa2gen tune --headdim 128 --gpu a100
      fa2gen tune --headdim 64 --headdim 128 --dtype bf16 --causal --seqlen-q 4096
    """
    specs = make_specs(headdims, dtypes, causal, gqa_ratios)
    if seqlen_k is not None and seqlen_q is None:
        raise click.UsageError("--seqlen-k needs --seqlen-q", click.get_current_context())
    gpu = resolve_gpu(gpu_name)
    requests = _requests(specs, seqlen_q, seqlen_k)
    if dry_run:
        _show_plan(requests, gpu, as_json)
        return 0
    from ..tuning.session import tune as run_tuning

    with StageProgress() as progress:
        report = run_tuning(
            requests, gpu, out=out, trials=trials, timeout=timeout, resume=resume, progress=progress.on_event
        )
    if as_json:
        click.echo(json.dumps(_as_json(report), indent=2))
    else:
        _show(report)
    timed_out = timeout is not None and report.seconds >= timeout
    if report.interrupted and not timed_out:
        return 130
    if not report.entries:
        why = "the time was up before a config was proved" if report.interrupted else "no config could be used"
        click.echo(f"error: nothing was saved: {why}", err=True)
        return 1
    return 0


def _requests(specs: Sequence[Any], seqlen_q: int | None, seqlen_k: int | None) -> list[TuneRequest]:
    from ..tuning.session import TuneRequest, default_requests

    if seqlen_q is not None:
        from ..emit import typical_problem

        lengths = seqlen_q, seqlen_q if seqlen_k is None else seqlen_k
        return [TuneRequest(spec, typical_problem(spec, *lengths)) for spec in specs]
    wanted = set(specs)
    requests: list[TuneRequest] = []
    for head_dim in dict.fromkeys(spec.head_dim for spec in specs):
        mine = [spec for spec in specs if spec.head_dim == head_dim]
        requests += default_requests(
            head_dim,
            dtypes=tuple(dict.fromkeys(spec.dtype for spec in mine)),
            causal=tuple(dict.fromkeys(spec.causal for spec in mine)),
            gqa_ratios=tuple(dict.fromkeys(spec.gqa_ratio for spec in mine)),
        )
    return [request for request in requests if request.spec in wanted]


# Columns that the table of results takes.
_WIDE = 135


def _console() -> Console:
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    # A pipe or a log has no width.
    return Console(width=150, highlight=False)


def _show_plan(requests: Sequence[TuneRequest], gpu: Gpu, as_json: bool) -> None:
    from ..tuning.space import legal_space

    rows = []
    for request in requests:
        space = legal_space(request.spec, gpu)
        rows.append(
            {
                "kernel": request.spec.slug(),
                "bucket": request.problem.bucket(gpu.num_sms).label(),
                "batch": request.problem.batch,
                "seqlen_q": request.problem.seqlen_q,
                "seqlen_k": request.problem.seqlen_k,
                "num_heads_q": request.problem.num_heads_q,
                "num_heads_k": request.problem.num_heads_k,
                "legal_configs": len(space.configs),
                "excluded_configs": len(space.excluded),
            }
        )
    if as_json:
        click.echo(json.dumps({"gpu": gpu.name, "requests": rows}, indent=2))
        return
    from rich.table import Table

    table = Table(title=f"{gpu.title}: {len(rows)} kernels and sizes to tune", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in ("kernel", "bucket") else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    _console().print(table)


def _tflops(entry: Any) -> float:
    return float(entry.measurement.problem.flops(entry.spec) / entry.measurement.ms / 1e9)


def _results(report: TuneReport, *, wide: bool) -> Table:
    """The entries, fastest first; a narrow table has the kernel, its sizes and its config in one column."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.HEAVY_HEAD if wide else box.SIMPLE_HEAD)
    sizes = ("kernel", "batch", "heads q/k", "seqlen q/k", "best config") if wide else ("kernel, sizes, best config",)
    unit = "ms" if report.measured else "ms predicted" if wide else "ms\npredicted"
    for name in ("rank", *sizes, unit, "TFLOP/s"):
        left = "kernel" in name or "config" in name
        table.add_column(name, justify="left" if left else "right", no_wrap=wide, overflow="fold")
    for rank, entry in enumerate(sorted(report.entries, key=_tflops, reverse=True), 1):
        problem = entry.measurement.problem
        heads, seqlens = f"{problem.num_heads_q}/{problem.num_heads_k}", f"{problem.seqlen_q}/{problem.seqlen_k}"
        cells = [entry.spec.slug(), str(problem.batch), heads, seqlens, entry.config.slug()]
        if not wide:
            cells = [f"{cells[0]}\n  {problem.batch} x {heads} x {seqlens}\n  {cells[-1]}"]
        table.add_row(str(rank), *cells, f"{entry.measurement.ms:.4f}", f"{_tflops(entry):.1f}")
    return table


def _show(report: TuneReport) -> None:
    console = _console()
    how = "measured on this machine's GPU" if report.measured else "PREDICTED by the performance model, not measured"
    if report.entries:
        console.print(f"{report.gpu.title}: {how}", markup=False, soft_wrap=True)
        console.print(_results(report, wide=console.width >= _WIDE))
    for failure in report.failures[:10]:
        reason = " ".join(failure.reason.split())[:160]
        console.print(f"{failure.outcome}: {failure.spec.slug()} {failure.config.slug()}: {reason}", markup=False)
    if len(report.failures) > 10:
        console.print(f"... and {len(report.failures) - 10} failed trials more; --json lists them all")
    for path in report.paths:
        text = f"saved {len(report.entries) - report.superseded} entries to {path}"
        if report.superseded:
            text += f"; {report.superseded} gave way to measured or newer ones there"
        console.print(text, markup=False, soft_wrap=True)
    console.print(
        f"{report.compiled} kernels compiled, {report.cached} from the cache, {report.seconds:.0f} s; {how}"
        + ("; ended early" if report.interrupted else "")
    )


def _as_json(report: TuneReport) -> dict[str, Any]:
    return {
        "gpu": report.gpu.name,
        "kind": "measured" if report.measured else "predicted",
        "entries": [
            {
                "spec": entry.spec.canonical(),
                "bucket": entry.bucket.label(),
                "config": entry.config.canonical(),
                "ms": entry.measurement.ms,
                "tflops": _tflops(entry),
                "kind": entry.measurement.kind,
            }
            for entry in report.entries
        ],
        "failures": [
            {"spec": f.spec.canonical(), "config": f.config.canonical(), "outcome": f.outcome, "reason": f.reason}
            for f in report.failures
        ],
        "paths": [str(path) for path in report.paths],
        "superseded": report.superseded,
        "compiled": report.compiled,
        "cached": report.cached,
        "seconds": report.seconds,
        "interrupted": report.interrupted,
    }
