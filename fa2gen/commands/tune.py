"""``fa2gen tune``: find the fastest config of each kernel and size class, and save it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..problem import MAX_SEQLEN
from ..spec import FAMILIES
from ..tuning.defaults import MEASURED_TRIALS, PREDICTED_TRIALS, SEQLENS
from .options import (
    gpu_option,
    json_option,
    kind_options,
    kinds_of,
    make_specs,
    out_option,
    resolve_gpu,
    seqlen_options,
    spec_options,
)
from .progress import StageProgress

if TYPE_CHECKING:
    from ..tuning.session import TuneRequest

_Lengths = tuple[tuple[int, int], ...]
_DEFAULT = "512,2048,8192"


def parse_sizes(text: str) -> _Lengths:
    """``"512,1x8192"`` to ((512, 512), (1, 8192)); repeats count once."""
    sizes: list[tuple[int, int]] = []
    for word in text.split(","):
        name = word.strip().lower()
        if name == "all":
            sizes += [(length, length) for length in SEQLENS]
            continue
        numbers = name.split("x")
        if len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise click.BadParameter(
                f"{word.strip()!r} is no size: give a length (512), queries x keys (1x8192), or all"
            )
        lengths = [int(number) for number in numbers]
        if not all(1 <= length <= MAX_SEQLEN for length in lengths):
            raise click.BadParameter(f"{word.strip()!r}: lengths must be 1 to {MAX_SEQLEN}")
        sizes.append((lengths[0], lengths[-1]))
    return tuple(dict.fromkeys(sizes))


def _finite(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds")
    return value


@click.command("tune")
@kind_options
@spec_options(gqa=(1, 8))
@gpu_option("GPU to tune for. [default: the one found]")
@click.option(
    "--buckets",
    callback=lambda context, option, text: None if text is None else parse_sizes(text),
    metavar="SIZES",
    help=f"Size classes, separated by commas: 512 (queries and keys), 1x8192 (queries x keys), or all: "
    f"{', '.join(map(str, SEQLENS))}. [default: {_DEFAULT}]",
)
@seqlen_options(None, minimum=1)
@click.option(
    "--family",
    "families",
    type=click.Choice(tuple(dict.fromkeys(family for each in FAMILIES.values() for family in each))),
    multiple=True,
    help="Only kernels of this family; may be repeated. [default: all that the GPU runs]",
)
@out_option("Folder of tables to write to. [default: the user's data folder]")
@click.option(
    "--trials",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"Configs of each family to try: measured, for each kernel and size [default: {MEASURED_TRIALS}]; predicted, "
    f"to compile for each kernel [default: {PREDICTED_TRIALS}]. The default config and the one in the tables are tried "
    "besides; 0: those alone.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    metavar="SECONDS",
    help="Stop after so long, and save what is found.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on with the studies of an earlier run, or put them aside.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Seed of the samplers."
)
@click.option(
    "--device",
    "devices",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="I",
    help="Device to measure on; may be repeated. [default: all that are the GPU]",
)
@click.option("--storage", metavar="URL", help="Optuna database of the studies. [default: a journal file each]")
@click.option("--dry-run", is_flag=True, help="Only tell what would be tried first, and how much of it.")
@json_option
def command(
    kind: str,
    deterministic: bool,
    headdims: tuple[int, ...],
    dtypes: tuple[str, ...],
    causal: bool | None,
    gqa_ratios: tuple[int, ...],
    gpu_name: str | None,
    buckets: _Lengths | None,
    seqlen_q: int | None,
    seqlen_k: int | None,
    families: tuple[str, ...],
    out: Path | None,
    trials: int | None,
    timeout: float | None,
    resume: bool,
    seed: int,
    devices: tuple[int, ...],
    storage: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Find the fastest config of each kernel, family and size class, and save it to a table.

    If the GPU named is at hand, configs are measured on it, or on several of it side by side. Otherwise they are
    compiled for it and ranked by a performance model, and the table says that they are predicted. Either way a config
    is saved only after its results met the tolerance rule, and one that the tables hold already stays unless another
    is clearly faster. On Hopper forwards have two families, sm80 and sm90: a call runs the faster of their best configs
    that can serve it.

    \b
    Examples:
      fa2gen tune --headdim 128 --gpu a100
      fa2gen tune --headdim 64 --headdim 128 --dtype bf16 --causal --seqlen-q 4096
      fa2gen tune --headdim 128 --kind both
      fa2gen tune --headdim 128 --gpu h200 --family sm90
      fa2gen tune --headdim 128 --buckets 2048,1x8192 --gpu a100 --dry-run
    """
    context = click.get_current_context()
    kinds = kinds_of(kind, deterministic=deterministic)
    specs = make_specs(headdims, dtypes, causal, gqa_ratios, kinds, deterministic=deterministic)
    if seqlen_k is not None and seqlen_q is None:
        raise click.UsageError("--seqlen-k needs --seqlen-q", context)
    if buckets is not None and seqlen_q is not None:
        raise click.UsageError("--buckets and --seqlen-q exclude each other", context)
    gpu = resolve_gpu(gpu_name)
    if seqlen_q is not None:
        buckets = ((seqlen_q, seqlen_q if seqlen_k is None else seqlen_k),)
    requests = _requests(specs, parse_sizes(_DEFAULT) if buckets is None else buckets)
    from . import tune_output as output

    chosen, wanted = devices or None, families or None
    if dry_run:
        from ..tuning.plan import make_plan

        plan = make_plan(requests, gpu, out=out, trials=trials, devices=chosen, families=wanted)
        if as_json:
            click.echo(json.dumps(output.plan_as_json(plan), indent=2))
        else:
            output.show_plan(plan)
        return 0
    from ..tuning.session import tune as run_tuning

    with StageProgress() as progress:
        report = run_tuning(
            requests,
            gpu,
            out=out,
            trials=trials,
            timeout=timeout,
            resume=resume,
            progress=progress.on_event,
            devices=chosen,
            seed=seed,
            storage=storage,
            families=wanted,
        )
    if as_json:
        click.echo(json.dumps(output.report_as_json(report), indent=2))
    else:
        output.show_report(report)
    timed_out = timeout is not None and report.seconds >= timeout
    if report.interrupted and not timed_out:
        return 130
    if not report.entries:
        why = "the time was up before a config was proved" if report.interrupted else "no config could be used"
        click.echo(f"error: nothing was saved: {why}", err=True)
        return 1
    return 0


def _requests(specs: Sequence[Any], lengths: _Lengths) -> list[TuneRequest]:
    from ..tuning.report import TuneRequest, usual_problem

    return [TuneRequest(spec, usual_problem(spec, *pair)) for spec in specs for pair in lengths]
