"""Train GPT-3 layers with fa2gen's attention and with torch's: do the losses agree, and how fast is a step?

    python benchmarks/train_gpt.py run --shape 1.3b --context 8192
    python benchmarks/train_gpt.py plot benchmarks/results/train_gpt/1.3b_8k_*.csv

Every run of a setting sees the same batches of real text (the sources of Python and torch, byte by byte) and has the
same model, optimizer and precision; attention alone differs. Torch's FlashAttention-2 runs with several seeds, whose
losses span a band: another library's curve must stay as near to the one of the same seed.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpt import figure, report  # noqa: E402
from benchmarks.gpt.model import ATTENTIONS, SHAPES  # noqa: E402
from benchmarks.gpt.runs import FEWEST_STEPS, Run, Setting, ordered, read_csv, write_csv  # noqa: E402
from benchmarks.gpt.text import Batches, Text, read_text  # noqa: E402
from benchmarks.gpt.training import PRECISION, Measured, train  # noqa: E402
from benchmarks.gpt.verdict import Verdict  # noqa: E402
from fa2gen.bench.machine import provenance  # noqa: E402
from fa2gen.driver.clocks import ClockSampler, open_clock_reader  # noqa: E402
from fa2gen.errors import ArgumentError, Fa2genError, GateError, LaunchError, ToolchainError  # noqa: E402
from fa2gen.runtime import describe  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "train_gpt"
# What --dry-run trains, on one thread: two sequences of 32 tokens a step take 10 ms on a CPU.
_DRY = Setting("CPU", "tiny", layers=1, context=32, tokens=64)
_DRY_BYTES = 1 << 18
_DRY_ATTENTIONS = ("fa2gen", "math")
# Formulas that keep all scores in memory: 4 bytes times heads times tokens times context, several times a layer.
_MATH_MOST_CONTEXT = 2048
_POSITIVE = click.IntRange(min=1)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Train GPT-3 layers with fa2gen's attention and with torch's."""


@cli.command()
@click.option("--shape", type=click.Choice(["1.3b", "2.7b"]), default="1.3b", show_default=True, help="Of the layers.")
@click.option("--context", type=_POSITIVE, default=2048, show_default=True, metavar="N", help="Tokens of a sequence.")
@click.option(
    "--layers", type=_POSITIVE, default=4, show_default=True, metavar="N", help="Depth; the models have 24 and 32."
)
@click.option("--batch", "tokens", type=_POSITIVE, default=16384, show_default=True, metavar="N", help="Tokens a step.")
@click.option(
    "--attention",
    "attentions",
    type=click.Choice(list(ATTENTIONS)),
    multiple=True,
    help="By whom; may be repeated. [default: fa2gen, flash and cudnn]",
)
@click.option("--steps", type=click.IntRange(min=FEWEST_STEPS), default=200, show_default=True, metavar="N")
@click.option(
    "--seeds",
    type=_POSITIVE,
    default=5,
    show_default=True,
    metavar="N",
    help="Seeds of flash, or of another of torch's attentions without it; the rest run the first. A verdict needs 3.",
)
@click.option("--compile/--no-compile", "compiled", default=False, show_default=True, help="Through torch.compile.")
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the CSV of each run, the summary and the figure. [default: benchmarks/results/train_gpt; for a "
    "dry run a new temporary one]",
)
@click.option("--dry-run", is_flag=True, help="A tiny model on the CPU, fa2gen and math: whether all of it works.")
def run(
    shape: str,
    context: int,
    layers: int,
    tokens: int,
    attentions: tuple[str, ...],
    steps: int,
    seeds: int,
    compiled: bool,
    out: Path | None,
    dry_run: bool,
) -> int:
    """Train, measure and compare; the exit code is 1 if fa2gen's losses do not agree."""
    if dry_run:
        _refuse_given("shape", "context", "layers", "tokens")
        shape, layers, context, tokens = _DRY.shape, _DRY.layers, _DRY.context, _DRY.tokens
    if tokens % context:
        raise ArgumentError(f"--batch {tokens} is not a multiple of --context {context}")
    attentions = tuple(dict.fromkeys(attentions)) or (_DRY_ATTENTIONS if dry_run else ("fa2gen", "flash", "cudnn"))
    if "math" in attentions and context > _MATH_MOST_CONTEXT:
        raise ArgumentError(
            f"--attention math keeps all scores in memory: --context must be {_MATH_MOST_CONTEXT} or less"
        )
    device = _device(dry_run)
    out = _results_folder(out, dry_run)
    setting = Setting(_gpu_name(device), shape, layers, context, tokens)
    text = read_text(_DRY_BYTES if dry_run else None)
    batches = Batches(text, steps, tokens // context, context, device)
    runs: list[Run] = []
    details: dict[tuple[str, int], dict[str, Any]] = {}
    with _progress() as bar, _one_thread(dry_run):
        for attention, seed in schedule(attentions, seeds):
            task = bar.add_task(f"{attention}, seed {seed}", total=steps, loss="")
            measured, clocks = _train(setting, attention, seed, batches, device, compiled, bar, task)
            runs.append(Run(setting, attention, seed, measured.losses, measured.ms))
            details[attention, seed] = {"peak_memory_gb": _gigabytes(measured.peak_bytes), "clocks": clocks}
            if attention == "fa2gen":
                details[attention, seed]["kernels"] = _kernels(setting, device)
            write_csv(runs[-1], out)
    runs = ordered(runs)
    verdicts = report.judge_all(runs)
    document = report.summary(runs, verdicts, details, _provenance(device, text, compiled))
    report.write(document, out / f"{setting.slug()}.json")
    return _show(runs, verdicts, out)


@cli.command()
@click.argument("files", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the figure. [default: that of the first file]",
)
def plot(files: tuple[Path, ...], out: Path | None) -> int:
    """Show runs again and draw their figure, from the CSVs alone; needs no GPU."""
    figure.require_plotting()
    runs = read_csv(files)
    return _show(runs, report.judge_all(runs), out or files[0].parent)


def schedule(attentions: Sequence[str], seeds: int) -> list[tuple[str, int]]:
    """(attention, seed) of each run: the reference's seeds lie between the others, so that a chip that grows warm slows
    none alone."""
    reference = report.reference_of(attentions)
    others = [(name, 0) for name in attentions if name != reference]
    band = [(reference, seed) for seed in range(seeds)] if reference is not None else []
    plan = []
    for index in range(max(len(others), len(band))):
        plan += band[index : index + 1] + others[index : index + 1]
    return plan


def _results_folder(out: Path | None, dry_run: bool) -> Path:
    """Where the results go, made if need be; those of a dry run are not left beside the committed ones."""
    if out is None and dry_run:
        out = Path(tempfile.mkdtemp(prefix="train_gpt-"))
        click.echo(f"results go to {out}", err=True)
    out = out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    return out


def _refuse_given(*names: str) -> None:
    context = click.get_current_context()
    for parameter in context.command.params:
        if (
            parameter.name in names
            and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        ):
            raise click.UsageError(f"--dry-run has a model of its own, so it takes no {parameter.opts[0]}", context)


@contextlib.contextmanager
def _one_thread(on: bool) -> Iterator[None]:
    """Products this small take 50 times as long on two threads of a busy machine as on one."""
    threads = torch.get_num_threads()
    if on:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _device(dry_run: bool) -> torch.device:
    if dry_run:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(f"training needs a CUDA GPU, torch {torch.__version__} sees none; --dry-run needs none")
    return torch.device("cuda", torch.cuda.current_device())


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _train(
    setting: Setting,
    attention: str,
    seed: int,
    batches: Batches,
    device: torch.device,
    compiled: bool,
    bar: Progress,
    task: Any,
) -> tuple[Measured, dict[str, Any] | None]:
    """A run, and what the chip's clock did meanwhile."""
    reader = open_clock_reader(device.index) if device.type == "cuda" else None
    with ClockSampler(reader, interval=0.25) as sampler:
        measured = train(
            SHAPES[setting.shape],
            setting.layers,
            ATTENTIONS[attention],
            batches,
            context=setting.context,
            seed=seed,
            device=device,
            compiled=compiled,
            progress=lambda steps, loss: bar.update(task, completed=steps, loss=f"loss {loss:.3f}"),
        )
    clocks = sampler.clocks()
    return measured, None if clocks is None else {**vars(clocks), "throttle": list(clocks.throttle)}


def _kernels(setting: Setting, device: torch.device) -> dict[str, Any]:
    """What fa2gen ran, forward and backward, and how its tables came to it."""
    shape = SHAPES[setting.shape]
    size = (setting.tokens // setting.context, setting.context, shape.heads, shape.head_dim)
    q = torch.empty(size, dtype=torch.bfloat16, device=device)
    found = {"fwd": describe(q, q, q, causal=True), "bwd": describe(q, q, q, causal=True, backward=True)}
    return {
        name: {"config": one.config.slug() if one.config else None, "source": one.source, "known": one.known}
        for name, one in found.items()
    }


def _gigabytes(size: int | None) -> float | None:
    return None if size is None else round(size / 1e9, 2)


def _provenance(device: torch.device, text: Text, compiled: bool) -> dict[str, Any]:
    return {
        **provenance(device.index if device.type == "cuda" else None),
        "command": _command_line(),
        "precision": PRECISION,
        "compiled": compiled,
        "text": {"bytes": len(text.tokens), "files": text.files, "sha256": text.sha256},
    }


def _command_line() -> str:
    """What was typed, without the folder for the results, which is the reader's own affair."""
    context = click.get_current_context()
    words = ["python", "benchmarks/train_gpt.py", str(context.info_name)]
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name == "out" or source is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = context.params[str(parameter.name)]
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, bool):
                words.append((parameter.opts if one else parameter.secondary_opts)[0])
            else:
                words += [parameter.opts[0], str(one)]
    return shlex.join(words)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        console=Console(stderr=True),
    )


def _show(runs: Sequence[Run], verdicts: Sequence[Verdict], out: Path) -> int:
    """Print and draw; raises if fa2gen's curve is not the reference's."""
    report.show(runs, verdicts, Console(width=None if sys.stdout.isatty() else 140, highlight=False))
    path = out / f"{runs[0].setting.slug()}.png"
    try:
        figure.draw(runs, report.reference_of([one.attention for one in runs]), path)
        click.echo(f"figure drawn to {path}", err=True)
    except ToolchainError as error:
        click.echo(f"{error}; then: python benchmarks/train_gpt.py plot {out}/*.csv", err=True)
    wrong = [verdict for verdict in verdicts if verdict.attention == "fa2gen" and not verdict.agrees]
    if wrong:
        raise GateError(str(wrong[0]))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; errors are one line, as those of ``fa2gen``."""
    try:
        return int(cli.main(arguments, prog_name="train_gpt.py", standalone_mode=False) or 0)
    except click.ClickException as error:
        return _failed(error.format_message(), error.exit_code)
    except Fa2genError as error:
        return _failed(str(error), 1)
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}", 1)
    except torch.cuda.OutOfMemoryError as error:
        return _failed(f"{str(error).partition('.')[0]}: take a smaller --batch or fewer --layers", 1)
    except (click.Abort, KeyboardInterrupt):
        return _failed("interrupted; the CSVs of whole runs are written", 130)


def _failed(message: str, code: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
