"""How the thread blocks of a call, or the tiles that they walk over, fall on the SMs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Thread blocks of the call's main kernel and how they fall on the SMs.

    Where as many blocks as SMs walk over all tiles, a wave is a tile of each of them.

    Attributes:
        blocks: Thread blocks.
        wave: Blocks that the chip holds at a time; 0 if none fits.
        tiles: Query tiles that the blocks walk over; None: each block has one.
    """

    blocks: int
    wave: int
    tiles: int | None = None

    @property
    def persistent(self) -> bool:
        """Whether blocks walk over tiles."""
        return self.tiles is not None

    @property
    def work(self) -> int:
        """What the waves consist of: blocks, or tiles."""
        return self.blocks if self.tiles is None else self.tiles

    @property
    def at_a_time(self) -> int:
        """How many of them the chip has under way; 0 if no block fits."""
        return self.wave if self.tiles is None else min(self.blocks, self.wave)

    @property
    def waves(self) -> float:
        return self.work / self.at_a_time if self.wave else 0.0

    @property
    def full_waves(self) -> int:
        return self.work // self.at_a_time if self.wave else 0

    @property
    def tail(self) -> int:
        """Blocks, or tiles, of the last wave, if it is not full."""
        return self.work % self.at_a_time if self.wave else 0

    @property
    def efficiency(self) -> float:
        """Waves over waves rounded up: the share of the slots that equal blocks, or tiles, would fill."""
        return self.waves / (self.full_waves + bool(self.tail)) if self.wave else 0.0
