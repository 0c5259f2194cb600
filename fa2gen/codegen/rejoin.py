"""Puts back on one line what folding made short enough for it, as clang-format would."""

from __future__ import annotations

import re

_COLUMNS = 120
_IF = re.compile(r"( *)(?:\} else )?if (?:constexpr )?\(.*\)")


def rejoin(text: str) -> str:
    """Kernel text in which broken conditions, and bare ``if`` statements without ``else``, fill their line again."""
    lines = text.split("\n")
    joined: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        while at + 1 < len(lines) and _belongs(line, lines, at + 1):
            at += 1
            line = f"{line} {lines[at].lstrip()}"
        joined.append(line)
        at += 1
    return "\n".join(joined)


def _belongs(line: str, lines: list[str], at: int) -> bool:
    """Whether line ``at`` continues ``line`` and fits beside it."""
    following = lines[at]
    if len(line) + 1 + len(following.lstrip()) > _COLUMNS or "//" in line:
        return False
    if line.endswith(" &&"):
        return True
    head = _IF.fullmatch(line)
    if head is None or line.count("(") != line.count(")") or not following.endswith(";"):
        return False
    inside = following.startswith(f"{head[1]}  ") and not following.lstrip().startswith(("#", "//", "if ", "for "))
    return inside and (at + 1 == len(lines) or not lines[at + 1].lstrip().startswith("else"))
