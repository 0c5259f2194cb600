"""Whether two loss curves agree: the difference between two libraries beside that between seeds of one of them.

All runs see the same batches, so a seed changes the first weights only. Curves of other arithmetic drift apart as the
rounding of each step feeds the next; curves of other weights start apart. A library whose curve stays within the band
that the seeds span changes training no more than other first weights do. Whether its gradients are right, curves show
poorly, and ``gradients.py`` well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fa2gen.errors import ArgumentError

from .runs import Run

SMOOTHING = 20
"""Steps of the moving average: batches differ by more than libraries do."""
FEWEST_SEEDS = 3

Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Verdict:
    """A run beside the reference's run of the same seed.

    Attributes:
        attention, reference: Names of the two.
        seeds: How many of the reference span the band.
        agrees: ``ratio`` is at most 1.
        ratio: Largest difference relative to the band's width at that step.
        step: Last step of the average in which that is.
        difference, spread: There: the difference, and the width of the band, nats per token.
        last_difference, last_spread: The same over the last steps.
    """

    attention: str
    reference: str
    seeds: int
    agrees: bool
    ratio: float
    step: int
    difference: float
    spread: float
    last_difference: float
    last_spread: float

    def __str__(self) -> str:
        return (
            f"{self.attention} {'agrees' if self.agrees else 'DOES NOT AGREE'} with {self.reference}: their curves "
            f"differ by at most {self.ratio:.2g} times the spread of {self.reference}'s {self.seeds} seeds "
            f"({self.difference:.2g} of {self.spread:.2g} nats around step {self.step}; "
            f"{self.last_difference:.2g} of {self.last_spread:.2g} at the end)"
        )


def smooth(losses: Sequence[float]) -> Curve:
    """Moving average over ``SMOOTHING`` steps; the first value is that of the first so many steps."""
    return np.convolve(np.asarray(losses, dtype=np.float64), np.full(SMOOTHING, 1 / SMOOTHING), mode="valid")


def spread(seeds: Sequence[Run]) -> Curve:
    """Width of the band that smoothed curves span: the widest within ``SMOOTHING`` steps on either side, since curves
    of three seeds cross."""
    curves = np.stack([smooth(run.losses) for run in seeds])
    width = curves.max(axis=0) - curves.min(axis=0)
    padded = np.pad(width, SMOOTHING, mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * SMOOTHING + 1).max(axis=-1)


def judge(run: Run, seeds: Sequence[Run]) -> Verdict:
    """Compare a run with the reference's.

    Args:
        run: To be judged.
        seeds: The reference's runs: at least three seeds, one of them ``run``'s.

    Raises:
        ArgumentError: Too few seeds, none like the run's, or runs of different lengths.
    """
    reference = seeds[0].attention if seeds else "the reference"
    if len({one.seed for one in seeds}) < FEWEST_SEEDS:
        raise ArgumentError(f"a verdict needs {FEWEST_SEEDS} seeds of {reference}, there are {len(seeds)}")
    if len({len(one.losses) for one in [run, *seeds]}) > 1:
        raise ArgumentError(f"{run.attention} and {reference} ran different numbers of steps")
    twin = next((one for one in seeds if one.seed == run.seed), None)
    if twin is None:
        raise ArgumentError(f"{reference} has no run of seed {run.seed}, which {run.attention} ran")
    difference, width = np.abs(smooth(run.losses) - smooth(twin.losses)), spread(seeds)
    # Equal curves agree, however narrow the band; what is not a number agrees with nothing.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(difference == 0, 0.0, difference / width)
    ratio = np.where(np.isfinite(difference) & np.isfinite(width), ratio, np.inf)
    worst = int(ratio.argmax())
    return Verdict(
        run.attention,
        reference,
        len(seeds),
        bool(ratio[worst] <= 1),
        float(ratio[worst]),
        worst + SMOOTHING - 1,
        float(difference[worst]),
        float(width[worst]),
        float(difference[-1]),
        float(width[-1]),
    )
