"""Values of the constant expressions in kernel text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Constant = int | bool
# Binary operators, the ones that bind least first.
_LEVELS = (("||",), ("&&",), ("==", "!="), ("<", ">", "<=", ">="), ("+", "-"), ("*", "/", "%"))


class _NotUnderstood(Exception):
    pass


def evaluate(words: Sequence[str], known: Mapping[str, Constant]) -> Constant | None:
    """Value of a C++ integer or boolean expression, or None where it depends on a name that is not known.

    ``false && x`` and ``true || x`` have a value whatever x is. None also for what is not such an expression.
    """
    try:
        value, end = _conditional(words, 0, known)
    except _NotUnderstood:
        return None
    return value if end == len(words) else None


def _conditional(words: Sequence[str], at: int, known: Mapping[str, Constant]) -> tuple[Constant | None, int]:
    value, at = _binary(words, at, known, 0)
    if at == len(words) or words[at] != "?":
        return value, at
    chosen, at = _conditional(words, at + 1, known)
    if at == len(words) or words[at] != ":":
        raise _NotUnderstood
    other, at = _conditional(words, at + 1, known)
    return (None if value is None else chosen if value else other), at


def _binary(words: Sequence[str], at: int, known: Mapping[str, Constant], level: int) -> tuple[Constant | None, int]:
    if level == len(_LEVELS):
        return _unary(words, at, known)
    left, at = _binary(words, at, known, level + 1)
    while at < len(words) and words[at] in _LEVELS[level]:
        operator = words[at]
        right, at = _binary(words, at + 1, known, level + 1)
        left = _apply(operator, left, right)
    return left, at


def _apply(operator: str, left: Constant | None, right: Constant | None) -> Constant | None:
    if operator in ("&&", "||"):
        decides = operator == "||"
        if any(side is not None and bool(side) == decides for side in (left, right)):
            return decides
        return None if left is None or right is None else not decides
    if left is None or right is None:
        return None
    if operator in ("/", "%"):
        # C++ rounds towards zero; kernel constants are not negative, so a negative operand is left alone.
        if left < 0 or right <= 0:
            return None
        return left // right if operator == "/" else left % right
    value: Constant = {
        "==": left == right, "!=": left != right, "<": left < right, ">": left > right, "<=": left <= right,
        ">=": left >= right, "+": left + right, "-": left - right, "*": left * right,
    }[operator]  # fmt: skip
    # Beyond an int C++ has other rules (longer types, wrapping, no meaning at all).
    return value if -(2**31) <= value < 2**31 else None


def _unary(words: Sequence[str], at: int, known: Mapping[str, Constant]) -> tuple[Constant | None, int]:
    if at == len(words):
        raise _NotUnderstood
    word = words[at]
    if word in ("!", "-"):
        value, at = _unary(words, at + 1, known)
        return (None if value is None else not value if word == "!" else -value), at
    if word == "(":
        value, at = _conditional(words, at + 1, known)
        if at == len(words) or words[at] != ")":
            raise _NotUnderstood
        return value, at + 1
    # Unsigned literals are left alone, as they make unsigned what they meet; so are octal ones.
    if re.fullmatch(r"0[xX][0-9a-fA-F]+|0|[1-9][0-9]*", word):
        return int(word, 0), at + 1
    if word in ("true", "false"):
        return word == "true", at + 1
    after = words[at + 1] if at + 1 < len(words) else ""
    # What is known is a constant, so `<` compares it; after another name it may begin a template's arguments.
    if not re.fullmatch(r"[A-Za-z_]\w*", word) or after in ("(", "::") or (after == "<" and word not in known):
        raise _NotUnderstood
    return known.get(word), at + 1
