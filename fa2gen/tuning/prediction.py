"""What the performance models are told and what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """What ptxas and the launch rule say of a kernel; of a backward, of its main kernel.

    Attributes:
        registers: Registers per thread.
        spill_bytes: Spill stores plus loads, bytes per thread.
        smem_bytes: Shared memory of a block.
    """

    registers: int
    spill_bytes: int
    smem_bytes: int


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a call: of all its kernels.

    Attributes:
        ms: Milliseconds.
        blocks_per_sm: Resident blocks; with 0 the kernel cannot run and ``ms`` is infinite.
        shares: Resource to its time in milliseconds if it were alone: ``"issue"`` (tensor instructions included where
            they block the scheduler), ``"tensor"``, ``"mufu"``, ``"shared memory"``, ``"l2"``, ``"hbm"``.
    """

    ms: float
    blocks_per_sm: int
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> str:
        """The resource that takes longest."""
        return max(self.shares, key=lambda name: self.shares[name]) if self.shares else "nothing fits"


def soft_max(*times: float, sharpness: float) -> float:
    """Combined time of resources that overlap: the largest, more where others come near it."""
    largest = max(times)
    if largest == 0:
        return 0.0
    total = 0.0
    for time in times:
        total += math.pow(time / largest, sharpness)
    return largest * math.pow(total, 1 / sharpness)
