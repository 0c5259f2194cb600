"""A benchmark as a chart: TFLOP/s over length, a panel for each head dim and mask, a line for each implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa2gen.errors import ArgumentError, ToolchainError

from .rows import OWN, Benchmark, Row

FORMATS = (".pdf", ".png", ".svg")
# Okabe and Ito's colours, which the common kinds of colour blindness tell apart; markers tell them apart in grey.
# The order belongs to the names, so that a peer keeps its colour in every chart.
_STYLES = {
    OWN: ("#D55E00", "o"),
    "fa2": ("#0072B2", "s"),
    "cudnn": ("#009E73", "^"),
    "efficient": ("#56B4E9", "v"),
    "flash_attn": ("#CC79A7", "D"),
    "fa3": ("#E69F00", "P"),
    "fa4": ("#000000", "X"),
    "flashinfer": ("#F0E442", "<"),
    "xformers": ("#999999", ">"),
    "online": ("#882255", "d"),
    "deterministic": ("#AA4499", "p"),
}

_WORDS = {"fwd": "attention forward", "bwd": "attention backward", "fwd+bwd": "attention forward and backward"}


def require_plotting(path: Path) -> None:
    """Raise unless a chart can be drawn to ``path``; to be called before a benchmark, not after it.

    Raises:
        ArgumentError: The file's name has another ending than ``FORMATS``.
        ToolchainError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ArgumentError(f"--plot {path}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ToolchainError(f"--plot needs matplotlib ({error}): pip install 'fa2gen[report]'") from None


def plot(benchmark: Benchmark, path: Path) -> None:
    """Draw the chart.

    Raises:
        ArgumentError: There are no rows to draw, or a wrong ending.
        ToolchainError: matplotlib is not installed.
    """
    require_plotting(path)
    if not benchmark.rows:
        raise ArgumentError("--plot: the benchmark has no rows")
    # Without pyplot: no global state, no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines, columns = _grid(benchmark.rows)
    figure = Figure(figsize=(4.2 * len(columns) + 0.6, 3.1 * len(lines) + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lines), len(columns), squeeze=False, sharey="row")
    names = [OWN, *benchmark.peers]
    handles: dict[str, Any] = {}
    for i, line in enumerate(lines):
        for j, column in enumerate(columns):
            rows = [row for row in benchmark.rows if (_line(row), _column(row)) == (line, column)]
            if not rows:
                axes[i][j].set_visible(False)
                continue
            handles |= _panel(axes[i][j], rows, names)
            axes[i][j].set_title(f"{column}, {line}", fontsize=10)
            if j == 0:
                axes[i][j].set_ylabel("TFLOP/s (kernel time)")
            if i == len(lines) - 1:
                axes[i][j].set_xlabel("sequence length")
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(3 * len(columns), max(1, len(handles))),
        frameon=False,
    )
    p = benchmark.provenance
    passes = ", ".join(dict.fromkeys(_WORDS[row.cell.direction] for row in benchmark.rows))
    figure.suptitle(f"{passes}, {p.get('gpu', 'unknown GPU')}, {str(p.get('utc', ''))[:10]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _line(row: Row) -> str:
    """What a line of panels has in common: pass and mask."""
    mask = "causal" if row.cell.spec.causal else "full"
    return mask if row.cell.direction == "fwd" else f"{mask}, {row.cell.direction}"


def _column(row: Row) -> str:
    spec, data = row.cell.spec, row.cell.data
    parts = [f"head dim {spec.head_dim}", *([f"GQA {spec.gqa_ratio}"] if spec.gqa_ratio > 1 else []), spec.dtype]
    return ", ".join([*parts, *([] if data == "normal" else [data])])


def _grid(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(map(_line, rows))), list(dict.fromkeys(map(_column, rows)))


def _panel(axis: Any, rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """Draws a panel's lines; a gap where an implementation has no time. Returns the lines by name."""
    labels = list(dict.fromkeys(row.cell.lengths for row in rows))
    drawn = {}
    for name in names:
        figures = {row.cell.lengths: row.tflops(name) for row in rows}
        if not any(figures.values()):
            continue
        color, marker = _STYLES.get(name, ("#666666", "."))
        heights = [figures[label] or float("nan") for label in labels]
        width, order = (2.4, 3) if name == OWN else (1.4, 2)
        (drawn[name],) = axis.plot(
            range(len(labels)), heights, color=color, marker=marker, markersize=5, linewidth=width, zorder=order
        )
    axis.set_xticks(range(len(labels)), labels)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    return drawn
