"""Sizes and times as people write them on a command line."""

from __future__ import annotations

import re

import click

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """An option's bytes: ``500M``, ``1.5G``, ``0``; powers of 1024."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size; write 500M, 1.5G or 0")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def parse_age(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """An option's seconds: ``30d``, ``12h``, ``2w``, ``0d``."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not an age; write 30d, 12h or 2w (s, m, h, d, w)")
    return float(match[1]) * _TIMES[match[2]]


def size_text(size: float) -> str:
    """``"1.4 MB"``; powers of 1024, as :func:`parse_size` reads them."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def age_text(seconds: float) -> str:
    """``"3 d"``: the largest unit of which it holds two; what lies in the future is now."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def count_text(count: int, one: str, many: str = "") -> str:
    """``"1 entry"``, ``"2,000 entries"``; ``many`` is ``one`` with an s if left out."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
