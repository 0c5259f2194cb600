"""A measured time, and when it is worth a second try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fa2gen.driver.clocks import SLOWDOWNS
from fa2gen.tables import Clocks

METHOD = (
    "median of single launches, CUDA events, L2 flushed by writing twice its size before each "
    "(256 MiB where the driver tells no size), random normal inputs"
)

# Of 36 shipped H200 timings nine of ten have a p20 to p80 spread below 3.6 % of the median, and all are below 7 %.
SPREAD_LIMIT = 0.10
# What is written between launches where the driver tells no L2 size (MIG, virtual GPUs): twice the largest L2 so far,
# 126 MB on a B200.
_UNKNOWN_L2_FLUSH = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median, 20 % and 80 % quantiles of ``n`` launches.

    Attributes:
        stopped: The config was hopeless and only looked at.
        clocks: The chip's clock meanwhile; None where NVML does not answer.
        unsettled: Why the time is doubtful although it was taken twice (see :func:`settled`); else ``""``.
    """

    ms: float
    p20: float
    p80: float
    n: int
    stopped: bool = False
    clocks: Clocks | None = None
    unsettled: str = ""

    @property
    def spread(self) -> float:
        """(p80 - p20) / median."""
        return (self.p80 - self.p20) / self.ms


def stored_timing(ms: float, attrs: Mapping[str, Any]) -> Timing:
    """A time of an earlier session, from what its study holds."""
    clocks = attrs.get("clocks")
    return Timing(
        ms,
        attrs["p20"],
        attrs["p80"],
        attrs["n"],
        clocks=None if clocks is None else Clocks(**{**clocks, "throttle": tuple(clocks["throttle"])}),
        unsettled=attrs.get("unsettled", ""),
    )


class Timed(Protocol):
    """What a time must say of itself to be judged; a ``tables.Measurement`` does too."""

    @property
    def clocks(self) -> Clocks | None: ...
    @property
    def spread(self) -> float: ...


def disturbance(timing: Timed, spread_limit: float = SPREAD_LIMIT) -> str:
    """Why a time may not be the chip's usual one (heat, a hardware slowdown, a wide spread), else ``""``."""
    slowed = sorted(SLOWDOWNS & set(timing.clocks.throttle)) if timing.clocks is not None else []
    reasons = [f"throttled: {', '.join(slowed)}"] if slowed else []
    if timing.spread > spread_limit:
        reasons.append(f"p20 to p80 spread of {timing.spread:.0%}")
    return "; ".join(reasons)


def settled(sample: Callable[[], Timing], spread_limit: float = SPREAD_LIMIT) -> Timing:
    """A time that looks sound, of two tries at most; of two doubtful ones the tighter, marked as unsettled."""
    first = sample()
    if not disturbance(first, spread_limit):
        return first
    second = sample()
    if not disturbance(second, spread_limit):
        return second
    tighter = min(first, second, key=lambda timing: timing.spread)
    return replace(tighter, unsettled=disturbance(tighter, spread_limit))


def flush_bytes(l2_bytes: int) -> int:
    """Bytes to write so that nothing of the last launch is left in the L2."""
    return 2 * l2_bytes if l2_bytes > 0 else _UNKNOWN_L2_FLUSH
