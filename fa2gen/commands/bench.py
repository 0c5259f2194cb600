"""``fa2gen bench``: kernel time and host time beside the attention libraries found here."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError, Fa2genError, GateError, LaunchError
from ..spec import DTYPES
from ..tuning.defaults import SEQLENS
from .options import config_option, given, json_option, make_specs, parse_config
from .progress import StageProgress
from .tune import parse_sizes

if TYPE_CHECKING:
    from ..bench.cells import Cell
    from ..bench.own import Choice
    from ..bench.peers import Implementation
    from ..bench.rows import Benchmark

_HEAD_DIMS = (64, 128)
_LENGTHS = tuple(map(str, SEQLENS))
# Written out, so that the help needs none of the modules that know them; a test holds them equal to theirs.
PEER_NAMES = ("fa2", "cudnn", "efficient", "flash_attn", "fa3", "fa4", "flashinfer", "xformers")
ONLINE, DETERMINISTIC = "online", "deterministic"
PASS_NAMES = ("fwd", "bwd", "fwd+bwd")
DATA_NAMES = ("normal", "repair-1pct", "repair-all")
# Options that a run of --from takes; all others are about measuring.
_SHOWING = {"rows_path", "plot_path", "as_json"}


class _File(click.Path):
    """A file; an empty name is most often a shell variable that is not set."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


def _lengths(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(dict.fromkeys(size for text in values for size in parse_sizes(text)))


_POSITIVE = click.IntRange(min=1)


@click.command("bench")
@click.option(
    "--pass",
    "passes",
    type=click.Choice(PASS_NAMES),
    multiple=True,
    default=("fwd",),
    help="The forward, the backward of a forward that ran before, or both in a row; may be repeated. [default: fwd]",
)
@click.option(
    "--headdim",
    "headdims",
    type=int,
    multiple=True,
    default=_HEAD_DIMS,
    metavar="D",
    help="Head dimension; may be repeated. [default: 64 and 128]",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    default=("bf16",),
    help="Element type; may be repeated. [default: bf16]",
)
@click.option("--causal/--full", " /--no-causal", default=None, help="With or without the causal mask. [default: both]")
@click.option(
    "--gqa",
    "gqa_ratios",
    type=int,
    multiple=True,
    default=(1,),
    metavar="R",
    help="Query heads per key/value head; may be repeated. [default: 1]",
)
@click.option(
    "--seqlen",
    "lengths",
    multiple=True,
    default=_LENGTHS,
    callback=_lengths,
    metavar="SIZES",
    help="Lengths: 512 (queries and keys), 1x8192 (queries x keys), several with commas; may be repeated. "
    f"[default: {','.join(_LENGTHS)}]",
)
@click.option(
    "--tokens",
    type=_POSITIVE,
    default=16384,
    show_default=True,
    metavar="N",
    help="Tokens of a call: the batch is so many over the length.",
)
@click.option(
    "--hidden",
    type=_POSITIVE,
    default=2048,
    show_default=True,
    metavar="N",
    help="Hidden size: query heads are so many over the head dim.",
)
@click.option("--batch", type=_POSITIVE, metavar="N", help="Sequences, in place of --tokens.")
@click.option("--heads", type=_POSITIVE, metavar="N", help="Query heads, in place of --hidden.")
@click.option(
    "--data",
    type=click.Choice(DATA_NAMES),
    multiple=True,
    default=("normal",),
    help="Inputs: normal numbers, or scores that make a guarded softmax repair 1 % or all of its query tiles; may be "
    "repeated. [default: normal]",
)
@click.option(
    "--peer",
    "peers",
    type=click.Choice((*PEER_NAMES, ONLINE, DETERMINISTIC)),
    multiple=True,
    help="Against whom; may be repeated. online is fa2gen's own config with the online softmax, deterministic its own "
    "backward that gives equal bits from run to run. [default: all that import here, without these two]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=5),
    default=7,
    show_default=True,
    metavar="N",
    help="How often each is timed in each cell, in turn.",
)
@click.option(
    "--host/--no-host",
    default=True,
    show_default=True,
    help="Also measure what an eager call, or step with a backward, costs the CPU.",
)
@config_option("measure")
@json_option
@click.option("--out", type=_File(dir_okay=False, path_type=Path), metavar="FILE", help="Write all rows as JSON.")
@click.option(
    "--plot",
    "plot_path",
    type=_File(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw a chart: .png, .svg or .pdf; needs matplotlib.",
)
@click.option(
    "--from",
    "rows_path",
    type=_File(dir_okay=False, exists=True, path_type=Path),
    metavar="FILE",
    help="Measure nothing: show or plot the rows that --out wrote. Needs no GPU.",
)
def command(
    passes: tuple[str, ...],
    headdims: tuple[int, ...],
    dtypes: tuple[str, ...],
    causal: bool | None,
    gqa_ratios: tuple[int, ...],
    lengths: tuple[tuple[int, int], ...],
    tokens: int,
    hidden: int,
    batch: int | None,
    heads: int | None,
    data: tuple[str, ...],
    peers: tuple[str, ...],
    rounds: int,
    host: bool,
    config: str,
    as_json: bool,
    out: Path | None,
    plot_path: Path | None,
    rows_path: Path | None,
) -> int:
    """Measure fa2gen beside the attention libraries found here, in one run and on the same tensors.

    Kernel time is that of CUDA-graph replays, host time what an eager call costs the CPU; they are never mixed. FLOPs
    count visible query-key pairs only, those of a backward 2.5 times the forward's. Every output, or gradient, is
    compared with fa2gen's and with float64 before it is timed. A library that is not installed, or does not take a
    cell, is listed with the reason.

    \b
    Examples:
      fa2gen bench --headdim 128 --causal --out rows.json --plot chart.png
      fa2gen bench --pass bwd --headdim 128 --peer fa2 --peer cudnn --peer deterministic
      fa2gen bench --headdim 64 --gqa 8 --seqlen 1x8192 --batch 16 --heads 32 --peer fa2 --peer cudnn
      fa2gen bench --headdim 128 --seqlen 8192 --data normal --data repair-all --peer online
      fa2gen bench --from rows.json --plot chart.svg
    """
    if plot_path is not None:
        from ..bench.plot import require_plotting

        require_plotting(plot_path)
    if rows_path is not None:
        return _show_file(rows_path, plot_path, as_json)
    _refuse_both("tokens", "batch")
    _refuse_both("hidden", "heads")
    specs = make_specs(headdims, dtypes, causal, gqa_ratios)
    choice = _parse_choice(config, passes)
    from ..bench.cells import make_cells

    cells = make_cells(specs, lengths, tokens=tokens, hidden=hidden, batch=batch, heads=heads, data=data, passes=passes)
    _require_gpu()
    for path in (out, plot_path):
        if path is not None:
            _require_writable(path)
    return _measure(cells, peers, choice, rounds, host, as_json=as_json, out=out, plot_path=plot_path)


def _show_file(rows_path: Path, plot_path: Path | None, as_json: bool) -> int:
    from ..bench.rows import read

    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name not in _SHOWING and given(str(parameter.name)):
            raise click.UsageError(f"--from measures nothing, so it takes no {parameter.opts[0]}", context)
    benchmark = read(rows_path)
    if plot_path is not None:
        _plot(benchmark, plot_path)
    _show(benchmark, as_json)
    return 0


def _parse_choice(config: str, passes: tuple[str, ...]) -> Choice:
    """The config of the kernels that are measured, of which one names the kind."""
    if config in ("tuned", "default"):
        return config
    kinds = {kind for name in passes for kind in name.split("+")}
    if len(kinds) > 1:
        raise ArgumentError(
            f"--config must be tuned or default for --pass {' and '.join(passes)}, as no config serves both kinds of "
            f"kernels; got {config!r}"
        )
    return parse_config(config, *kinds)


def _refuse_both(size: str, count: str) -> None:
    if given(size) and given(count):
        raise click.UsageError(f"--{size} and --{count} exclude each other", click.get_current_context())


def _require_gpu() -> None:
    from .. import driver

    reason = driver.unavailable_reason()
    if reason is None:
        import torch

        if not torch.cuda.is_available():
            reason = f"torch {torch.__version__} sees none"
    if reason is not None:
        raise LaunchError(f"bench needs a CUDA GPU: {reason}; rows of an earlier run are shown with --from")


def _require_writable(path: Path) -> None:
    """Before minutes of measuring, not after them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def _measure(
    cells: Sequence[Cell],
    names: Sequence[str],
    choice: Choice,
    rounds: int,
    host: bool,
    *,
    as_json: bool,
    out: Path | None,
    plot_path: Path | None,
) -> int:
    from ..bench.machine import CudaMachine
    from ..bench.own import compile_ahead, require_config
    from ..bench.rows import Benchmark, write
    from ..bench.session import run

    require_config(choice, list(dict.fromkeys(spec for cell in cells for spec in cell.specs)))
    machine = CudaMachine()
    benchmark = Benchmark({**machine.provenance(), "rounds": rounds})
    failure: Fa2genError | None = None
    try:
        # Libraries may print while they are imported or compile: standard output is for the result.
        with contextlib.redirect_stdout(sys.stderr), StageProgress() as progress:
            peers = _find(benchmark, names or PEER_NAMES, choice)
            compile_ahead(cells, choice, online=ONLINE in names, deterministic=DETERMINISTIC in names)
            run(
                benchmark,
                cells,
                peers,
                machine,
                config=choice,
                rounds=rounds,
                host=host,
                progress=progress.on_event,
            )
    except KeyboardInterrupt:
        benchmark.complete = False
    except Fa2genError as error:
        benchmark.complete, failure = False, error
    except RuntimeError as error:  # what torch raises when a kernel crashed
        benchmark.complete = False
        failure = LaunchError(f"the GPU failed: {error}")
    # What was measured is not lost with what was not.
    if benchmark.rows:
        if out is not None:
            write(benchmark, out)
            click.echo(f"rows written to {out}", err=True)
        if plot_path is not None:
            _plot(benchmark, plot_path)
        _show(benchmark, as_json)
    if failure is not None:
        raise failure
    wrong = benchmark.wrong()
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise GateError(f"{wrong[0]}{more}")
    return 0 if benchmark.complete else 130


def _find(benchmark: Benchmark, names: Sequence[str], choice: Choice) -> list[Implementation]:
    from ..bench.own import deterministic_peer, online_peer
    from ..bench.peers import PEERS, find_peers

    known = {**PEERS, ONLINE: online_peer(choice), DETERMINISTIC: deterministic_peer(choice)}
    names = list(dict.fromkeys(names))
    found, benchmark.missing = find_peers(names, peers=known)
    benchmark.titles = {"fa2gen": "this version", **{name: known[name].title for name in names}}
    return found


def _show(benchmark: Benchmark, as_json: bool) -> None:
    if as_json:
        from ..bench.rows import to_json

        click.echo(json.dumps(to_json(benchmark), indent=2))
    else:
        from ..bench.report import show

        show(benchmark)


def _plot(benchmark: Benchmark, path: Path) -> None:
    from ..bench.plot import plot

    plot(benchmark, path)
    click.echo(f"chart drawn to {path}", err=True)
