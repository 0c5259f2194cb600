"""From one block's time to a grid's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """Tiles that a mean block visits, those of them on the masked path, and all of the longest block."""

    tiles: float
    masked: float
    longest: int


def grid_clocks(
    block_clocks: Callable[[int, float, float], float],
    counts: Counts,
    blocks: int,
    resident: int,
    num_sms: int,
    rest_share: float | None,
) -> float:
    """Clocks of the whole grid.

    Args:
        block_clocks: (blocks on an SM, their tiles, the masked of them) -> SM time until all are done.
        counts: Of the blocks.
        blocks, resident, num_sms: Of the grid, on an SM, of the chip.
        rest_share: Causal, where blocks differ in length, the longest first: what is left over at the end, in mean
            blocks. None: blocks are alike.
    """
    waves, rest = divmod(blocks, num_sms * resident)
    mean = block_clocks(resident, counts.tiles, counts.masked)
    if rest_share is not None:
        # The short blocks at the end fill the gaps.
        even = mean * blocks / (num_sms * resident)
        on_busiest = min(resident, math.ceil(blocks / num_sms))
        longest = block_clocks(on_busiest if waves == 0 else 1, counts.longest, counts.masked)
        return max(even + rest_share * mean / resident if waves else 0.0, longest)
    # The last wave spreads over the SMs: fewer blocks on an SM run faster, but not in proportion.
    return waves * mean + (block_clocks(math.ceil(rest / num_sms), counts.tiles, counts.masked) if rest else 0.0)
