"""Train GPT-3 layers with fa2gen's attention and with torch's: do the losses agree, and how fast is a step?

    python benchmarks/train_gpt.py run --shape 1.3b --context 8192
    python benchmarks/train_gpt.py gradients --shape 1.3b --context 8192
    python benchmarks/train_gpt.py plot benchmarks/results/train_gpt/1.3b_8k_*.csv

Every run of a setting sees the same batches of real text (the sources of Python and torch, byte by byte) and has the
same model, optimizer and precision; attention alone differs. Torch's FlashAttention-2 runs with several seeds, whose
losses span a band: another library's curve must stay as near to the one of the same seed. The gradients of a trained
model are compared by themselves: they must be about as near to those in float32 as FlashAttention-2's.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpt import figure, report  # noqa: E402
from benchmarks.gpt.gradients import CHECKED_TOKENS, LIMIT, gradient_errors, largest_ratio, sentence  # noqa: E402
from benchmarks.gpt.model import ATTENTIONS, GPT, SHAPES, require_working  # noqa: E402
from benchmarks.gpt.runs import (  # noqa: E402
    DEFAULT_LAYERS,
    DEFAULT_STEPS,
    DEFAULT_TOKENS,
    FEWEST_STEPS,
    Run,
    Setting,
    ordered,
    read_csv,
    write_csv,
)
from benchmarks.gpt.text import Batches, Text, read_text  # noqa: E402
from benchmarks.gpt.training import PRECISION, Measured, train  # noqa: E402
from benchmarks.gpt.verdict import Verdict  # noqa: E402
from fa2gen.bench.machine import provenance  # noqa: E402
from fa2gen.driver.clocks import ClockSampler, open_clock_reader  # noqa: E402
from fa2gen.errors import ArgumentError, Fa2genError, GateError, LaunchError, ToolchainError  # noqa: E402
from fa2gen.runtime import describe  # noqa: E402

# Not where the committed results are: those of another GPU or depth do not belong between them.
RESULTS = Path("train_gpt_results")
# Of the text's SHA-256, in the identity of a run.
_DIGITS = 12
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


def _model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of what is trained, and of where its results go."""
    shapes = click.Choice(["1.3b", "2.7b"])
    for option in reversed(
        [
            click.option("--shape", type=shapes, default="1.3b", show_default=True, help="Of the layers."),
            click.option(
                "--context", type=_POSITIVE, default=2048, show_default=True, metavar="N", help="Tokens of a sequence."
            ),
            click.option(
                "--layers",
                type=_POSITIVE,
                default=DEFAULT_LAYERS,
                show_default=True,
                metavar="N",
                help="Depth; the models have 24 and 32.",
            ),
            click.option(
                "--batch",
                "tokens",
                type=_POSITIVE,
                default=DEFAULT_TOKENS,
                show_default=True,
                metavar="N",
                help="Tokens a step.",
            ),
            click.option(
                "--attention",
                "attentions",
                type=click.Choice(list(ATTENTIONS)),
                multiple=True,
                help="By whom; may be repeated. [default: fa2gen, flash and cudnn]",
            ),
            click.option(
                "--steps",
                type=click.IntRange(min=FEWEST_STEPS),
                default=DEFAULT_STEPS,
                show_default=True,
                metavar="N",
            ),
            click.option(
                "-o",
                "--out",
                type=click.Path(file_okay=False, path_type=Path),
                metavar="DIR",
                help=f"Folder for the results. [default: {RESULTS}; for a dry run a new temporary one]",
            ),
            click.option(
                "--dry-run", is_flag=True, help="A tiny model on the CPU, fa2gen and math: whether all of it works."
            ),
        ]
    ):
        command = option(command)
    return command


@cli.command()
@_model_options
@click.option(
    "--seeds",
    type=_POSITIVE,
    default=5,
    show_default=True,
    metavar="N",
    help="Seeds of flash, or of another of torch's attentions without it; the rest run the first. A verdict needs 3.",
)
@click.option("--compile/--no-compile", "compiled", default=False, show_default=True, help="Through torch.compile.")
def run(seeds: int, compiled: bool, **options: Any) -> int:
    """Train, measure and compare; the exit code is 1 if fa2gen's losses do not agree.

    Writes the CSV of each run, a summary and a figure.
    """
    job = _prepare(compiled=compiled, **options)
    runs: list[Run] = []
    details: dict[tuple[str, int], dict[str, Any]] = {}
    with _progress() as bar, _one_thread(job.dry_run):
        for attention, seed in schedule(job.attentions, seeds):
            measured, clocks = _train(job, attention, seed, bar)
            runs.append(Run(job.setting, attention, seed, measured.losses, measured.ms))
            details[attention, seed] = {"peak_memory_gb": _gigabytes(measured.peak_bytes), "clocks": clocks}
            if attention == "fa2gen":
                details[attention, seed]["kernels"] = _kernels(job.setting, job.device)
            write_csv(runs[-1], job.out)
    runs = ordered(runs)
    verdicts = report.judge_all(runs)
    document = report.summary(runs, verdicts, details, _provenance(job))
    report.write(document, job.out / f"{job.setting.slug()}.json")
    return _show(runs, verdicts, job.out)


@cli.command()
@_model_options
def gradients(**options: Any) -> int:
    """Train once with flash, or another of torch's attentions without it; compare the gradients of all at the end.

    The exit code is 1 if fa2gen's do not agree. Writes a summary.
    """
    if options["attentions"] and report.reference_of(options["attentions"]) is None:
        raise ArgumentError("--attention must name one of torch's attentions too: gradients are compared with its own")
    job = _prepare(compiled=False, **options)
    name = str(report.reference_of(job.attentions))
    weights: dict[str, Tensor] = {}
    with _progress() as bar, _one_thread(job.dry_run):
        measured, _ = _train(job, name, 0, bar, finish=lambda model: weights.update(model.state_dict()))
        setting = job.setting
        batch = [x[: max(1, CHECKED_TOKENS // setting.context)] for x in job.batches[setting.steps]]
        errors = gradient_errors(
            SHAPES[setting.shape],
            setting.layers,
            setting.context,
            weights,
            (batch[0], batch[1]),
            {attention: ATTENTIONS[attention] for attention in job.attentions},
        )
    reference = next(one for one in errors if one.attention == name)
    document = report.gradients_summary(setting, measured.losses[-1], errors, reference, _provenance(job))
    report.write(document, job.out / f"{setting.slug()}_gradients.json")
    report.show_gradients(setting, errors, _console())
    others = [one for one in errors if one is not reference]
    for one in others:
        click.echo(sentence(one, reference))
    wrong = [one for one in others if one.attention == "fa2gen" and largest_ratio(one, reference)[0] > LIMIT]
    if wrong:
        raise GateError(sentence(wrong[0], reference))
    return 0


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


@dataclass(frozen=True)
class _Job:
    """What a command was asked to train."""

    setting: Setting
    attentions: tuple[str, ...]
    text: Text
    batches: Batches
    device: torch.device
    out: Path
    dry_run: bool


def _prepare(
    *,
    shape: str,
    context: int,
    layers: int,
    tokens: int,
    attentions: tuple[str, ...],
    steps: int,
    compiled: bool,
    out: Path | None,
    dry_run: bool,
) -> _Job:
    """Check the options, and make everything that needs no training."""
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
    for attention in attentions:
        require_working(attention, SHAPES[shape], device)
    text = read_text(_DRY_BYTES if dry_run else None)
    digest = text.sha256[:_DIGITS]
    setting = Setting(_gpu_name(device), shape, layers, context, tokens, steps, compiled, digest)
    # One more, for what is done after the training.
    batches = Batches(text, steps + 1, tokens // context, context, device)
    return _Job(setting, attentions, text, batches, device, _results_folder(out, dry_run), dry_run)


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
    job: _Job, attention: str, seed: int, bar: Progress, finish: Callable[[GPT], None] = lambda _: None
) -> tuple[Measured, dict[str, Any] | None]:
    """A run, and what the chip's clock did meanwhile."""
    setting = job.setting
    task = bar.add_task(f"{attention}, seed {seed}", total=setting.steps, loss="")
    reader = open_clock_reader(job.device.index) if job.device.type == "cuda" else None
    with ClockSampler(reader, interval=0.25) as sampler:
        measured = train(
            SHAPES[setting.shape],
            setting.layers,
            ATTENTIONS[attention],
            job.batches,
            steps=setting.steps,
            context=setting.context,
            seed=seed,
            device=job.device,
            compiled=setting.compiled,
            progress=lambda steps, loss: bar.update(task, completed=steps, loss=f"loss {loss:.3f}"),
            finish=finish,
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


def _provenance(job: _Job) -> dict[str, Any]:
    text = job.text
    return {
        **provenance(job.device.index if job.device.type == "cuda" else None),
        "command": _command_line(),
        "precision": PRECISION,
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
    report.show(runs, verdicts, _console())
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


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


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
