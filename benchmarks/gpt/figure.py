"""Training runs as a picture: loss curves, their difference beside the spread of seeds, and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fa2gen.errors import ToolchainError

from .runs import Run
from .verdict import FEWEST_SEEDS, SMOOTHING, smooth, spread

# Okabe and Ito's colours, those of `fa2gen bench`'s charts.
_COLORS = {"fa2gen": "#D55E00", "flash": "#0072B2", "cudnn": "#009E73", "math": "#CC79A7"}
# Smallest difference of losses that is shown, nats per token: files hold six digits.
_FLOOR = 1e-5


def require_plotting() -> None:
    """Raise unless a figure can be drawn.

    Raises:
        ToolchainError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ToolchainError(f"no figure: it needs matplotlib ({error}): pip install 'fa2gen[report]'") from None


def draw(runs: Sequence[Run], reference: str | None, path: Path) -> None:
    """Draw the runs of one setting.

    Args:
        runs: Any number of attentions; the first run of each is its curve and its bar.
        reference: Whose seeds span the band; None: no band.
        path: Of the picture, .png.

    Raises:
        ToolchainError: matplotlib is not installed.
    """
    require_plotting()
    # Without pyplot: no global state, no window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    firsts = list({run.attention: run for run in reversed(runs)}.values())[::-1]
    seeds = [run for run in runs if run.attention == reference]
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, differences, bars = figure.subplots(1, 3, width_ratios=(1.3, 1.1, 1))
    _losses(losses, firsts, seeds)
    _differences(differences, firsts, seeds)
    _throughput(bars, firsts)
    for axis in (losses, differences, bars):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
    figure.suptitle(runs[0].setting.title(), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _losses(axis: Any, firsts: Sequence[Run], seeds: Sequence[Run]) -> None:
    for run in seeds[1:]:
        axis.plot(_steps(run), smooth(run.losses), color="#bbbbbb", linewidth=1, zorder=1)
    for order, run in enumerate(firsts):
        # Curves that agree hide each other: later ones are thinner.
        axis.plot(
            _steps(run),
            smooth(run.losses),
            color=_COLORS.get(run.attention),
            linewidth=3.2 - 0.8 * min(order, 3),
            label=f"{run.attention}, seed {run.seed}",
            zorder=2 + order,
        )
    if len(seeds) > 1:
        axis.plot([], [], color="#bbbbbb", linewidth=1, label=f"{seeds[0].attention}, other seeds")
    axis.set_xlabel("step")
    axis.set_ylabel(f"loss, nats per token (mean of {SMOOTHING} steps)")
    axis.legend(frameon=False)


def _differences(axis: Any, firsts: Sequence[Run], seeds: Sequence[Run]) -> None:
    twin = seeds[0] if seeds else None
    others = [run for run in firsts if twin is not None and run.attention != twin.attention]
    if twin is None or not others or len(seeds) < FEWEST_SEEDS:
        axis.set_visible(False)
        return
    label = f"spread of {len(seeds)} seeds of {twin.attention}, widest within {SMOOTHING} steps"
    axis.fill_between(_steps(twin), spread(seeds), _FLOOR, facecolor="#dddddd", edgecolor="#888888", label=label)
    for run in others:
        difference = np.maximum(np.abs(smooth(run.losses) - smooth(twin.losses)), _FLOOR)
        axis.plot(_steps(run), difference, color=_COLORS.get(run.attention), linewidth=1.6, label=run.attention)
    axis.set_yscale("log")
    axis.set_ylim(bottom=_FLOOR)
    axis.set_xlabel("step")
    axis.set_ylabel(f"difference from {twin.attention}'s loss, nats per token")
    axis.legend(frameon=False)


def _throughput(axis: Any, firsts: Sequence[Run]) -> None:
    names = [run.attention for run in firsts]
    heights = [run.tokens_per_s / 1e3 for run in firsts]
    bars = axis.bar(names, heights, color=[_COLORS.get(name, "#666666") for name in names], width=0.6)
    labels = []
    for run in firsts:
        mfu = run.mfu()
        labels.append(f"{run.tflops():.0f} TFLOP/s" + ("" if mfu is None else f"\nMFU {100 * mfu:.1f} %"))
    axis.bar_label(bars, labels, padding=2, fontsize=9)
    axis.margins(y=0.18)
    axis.set_ylabel("thousand tokens per second")


def _steps(run: Run) -> range:
    return range(SMOOTHING - 1, len(run.losses))
