"""How well predicted times rank configs: over (predicted, measured) milliseconds of one case."""

from __future__ import annotations

import math
from collections.abc import Sequence

Times = Sequence[tuple[float, float]]


def regret(times: Times, count: int) -> float:
    """How much slower than the fastest the best of the first few by prediction is."""
    ranked = sorted(times)
    return min(ms for _, ms in ranked[:count]) / min(ms for _, ms in ranked) - 1


def kendall_tau(times: Times) -> float:
    """Of the pairs that differ by more than the measurement's noise, 2 %."""
    pairs = [(a, b) for i, a in enumerate(times) for b in times[:i] if abs(math.log(a[1] / b[1])) > 0.02]
    agree = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    return 2 * agree / len(pairs) - 1
