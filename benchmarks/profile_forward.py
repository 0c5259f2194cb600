"""What bounds the forward kernels that the tables choose: Nsight Compute's counters of one launch each, as a table.

    $(python benchmarks/profile_forward.py command) > profile.csv   # needs a GPU, and ncu with access to its counters
    python benchmarks/profile_forward.py table profile.csv          # needs neither

The kernels are those of 2 x 8192 tokens, hidden size 2048, bf16: head dims 64, 128 and 256, full and causal; for each
the same config with the online softmax besides. `hopper_forward.md` beside this says what was learnt from them.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

BATCH, SEQLEN, HIDDEN = 2, 8192, 2048
HEAD_DIMS = (64, 128, 256)

_SHARE = ".avg.pct_of_peak_sustained_elapsed"
# Column -> (metric, factor).
COLUMNS = {
    "ms": ("gpu__time_duration.sum", 1e-6),
    "Mclk": ("sm__cycles_elapsed.max", 1e-6),
    "tensor": ("sm__pipe_tensor_cycles_active" + _SHARE, 1.0),
    "smem": ("l1tex__throughput" + _SHARE, 1.0),
    "ex2": ("sm__inst_executed_pipe_xu" + _SHARE, 1.0),
    "issue": ("smsp__issue_active" + _SHARE, 1.0),
    "L2": ("lts__throughput" + _SHARE, 1.0),
    "DRAM": ("dram__throughput" + _SHARE, 1.0),
}
_STALL, _PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
STALLS = ("barrier", "dispatch_stall", "gmma", "long_scoreboard", "mio_throttle", "not_selected", "wait")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Profile the forward kernels that the tables choose."""


@cli.command()
def command() -> None:
    """Print the ncu command that runs them and writes the counters."""
    metrics = [metric for metric, _ in COLUMNS.values()] + [f"{_STALL}{name}{_PER_ISSUE}" for name in STALLS]
    # The clock as the power limit leaves it: locked to its base, other stages would bound.
    click.echo(
        f"ncu --clock-control none -k regex:fa2gen_fwd --metrics {','.join(metrics)} --page raw --csv "
        f"{sys.executable} {Path(__file__).resolve()} run"
    )


@cli.command()
def run() -> None:
    """Launch each kernel once."""
    import torch

    from fa2gen.driver import unavailable_reason
    from fa2gen.runtime import attention, describe
    from fa2gen.spec import FwdSm90Config

    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"no GPU can be used: {reason}")
    for head_dim in HEAD_DIMS:
        shape = (BATCH, SEQLEN, HIDDEN // head_dim, head_dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for causal in (False, True):
            config = describe(q, k, v, causal=causal).config
            attention(q, k, v, causal=causal, config=config)
            if isinstance(config, FwdSm90Config) and config.softmax == "guarded":
                attention(q, k, v, causal=causal, config=dataclasses.replace(config, softmax="online"))
    torch.cuda.synchronize()


@cli.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def table(path: Path) -> None:
    """Print what ncu wrote as a Markdown table: shares in percent of the peak, and the warps that wait for an issue."""
    try:
        rows = list(read(path.read_text().splitlines()))
    except (KeyError, ValueError) as error:
        raise click.ClickException(f"{path} is not what the ncu command writes: {error}") from None
    click.echo("| kernel | " + " | ".join(COLUMNS) + " | warps that wait, for each that issues |")
    click.echo("| --- |" + " --- |" * (len(COLUMNS) + 1))
    for name, values, stalls in rows:
        most = sorted(stalls, key=lambda stall: -stalls[stall])[:3]
        said = ", ".join(f"{stall} {stalls[stall]:.1f}" for stall in most)
        numbers = " | ".join(
            f"{value:.2f}" if column in ("ms", "Mclk") else f"{value:.0f}" for column, value in values.items()
        )
        click.echo(f"| `{name}` | {numbers} | {said} |")


def read(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, float], dict[str, float]]]:
    """Name, columns and stalls of each launch in ncu's raw CSV, whose header follows what the program printed.

    Raises:
        KeyError: A column is missing.
        ValueError: There is no header, or a value is no number.
    """
    rows = iter(csv.reader(lines))
    header = next((row for row in rows if row[:1] == ["ID"]), None)
    if header is None:
        raise ValueError("no line begins with ID")
    for row in rows:
        launch = dict(zip(header, row))  # noqa: B905 (a line of warnings is shorter)
        if not launch["ID"].isdigit():
            continue  # units
        values = {column: factor * _number(launch[metric]) for column, (metric, factor) in COLUMNS.items()}
        stalls = {name: _number(launch[f"{_STALL}{name}{_PER_ISSUE}"]) for name in STALLS}
        yield launch["Kernel Name"].removeprefix("fa2gen_fwd_"), values, stalls


def _number(text: str) -> float:
    return float(text.replace(",", ""))


if __name__ == "__main__":
    cli()
