"""A benchmark in a line for each peer: the geometric mean of the ratios, and the worst cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .rows import Row


@dataclass(frozen=True)
class Summary:
    """How many times faster than a peer fa2gen is, over the cells that both took, of one pass and one kind of data.

    Attributes:
        peer, direction, data: Which.
        cells: How many; ``of``: rows there are.
        geomean: Geometric mean of the ratios; below 1 fa2gen is slower.
        worst: Smallest ratio, in ``worst_cell``.
    """

    peer: str
    direction: str
    data: str
    cells: int
    of: int
    geomean: float
    worst: float
    worst_cell: str


def summarise(rows: Sequence[Row], peers: Sequence[str]) -> list[Summary]:
    """By pass and data, then peer; a peer that took no cell has none."""
    summaries = []
    for direction, data in dict.fromkeys((row.cell.direction, row.cell.data) for row in rows):
        alike = [row for row in rows if (row.cell.direction, row.cell.data) == (direction, data)]
        for peer in peers:
            ratios = [(ratio, row) for row in alike if (ratio := row.ratio(peer)) is not None]
            if not ratios:
                continue
            worst, where = min(ratios, key=lambda pair: pair[0])
            geomean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
            label = where.cell.label()
            summaries.append(Summary(peer, direction, data, len(ratios), len(alike), geomean, worst, label))
    return summaries
