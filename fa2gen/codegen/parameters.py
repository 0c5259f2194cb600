"""Takes out of kernel text what nobody reads of a signature: parameters that folding left unused, and their arguments.

A function of the templates serves every config, so in one kernel some of its parameters have no use: the head stride
where no heads are packed, the fragments of Q where they are not kept. What a call would compute for them goes too.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .lexer import Code

_WIDTH = 120


@dataclass(frozen=True)
class _List:
    """A list in parentheses: token indices of its brackets, and of each entry the first token and the one after it."""

    opened: int
    closed: int
    entries: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Function:
    """A function with a body."""

    name: str
    index: int  # of the token that names it
    parameters: _List
    names: tuple[str, ...]
    unread: frozenset[int]


def unread_parameters(codes: Sequence[Code]) -> dict[str, frozenset[int]]:
    """Positions of the parameters that a function does not read, by its name.

    A parameter stays where a call computes its argument by more than operators: calls and increments have effects.

    Args:
        codes: Top-level items that may be changed; of a name that several of them define nothing is said.
    """
    functions: dict[str, _Function] = {}
    ambiguous: set[str] = set()
    for code in codes:
        function = _function(code)
        if function is not None:
            if function.name in functions:
                ambiguous.add(function.name)
            functions[function.name] = function
    unread = {name: set(f.unread) for name, f in functions.items() if f.unread and name not in ambiguous}
    names = frozenset(functions)
    for code in codes:
        for name, arguments in _calls(code, names):
            if name in unread:
                unread[name] -= {i for i in unread[name] if not _is_pure(code, *arguments.entries[i])}
    return {name: frozenset(positions) for name, positions in unread.items() if positions}


def without_parameters(code: Code, unread: Mapping[str, frozenset[int]]) -> str:
    """An item's text without these parameters and their arguments, and without the comment's sentences about them.

    Args:
        code: The item.
        unread: As :func:`unread_parameters` gives them.
    """
    function = _function(code)
    lists = {arguments.opened: (arguments, unread[name]) for name, arguments in _calls(code, frozenset(unread))}
    if function is not None and function.name in unread:
        lists[function.parameters.opened] = (function.parameters, unread[function.name])
    if not lists:
        return code.text
    begin = code.starts[code.skip_comments(0)]
    text = _rewritten(code, begin, len(code.text), lists)
    if function is None or function.name not in unread:
        return code.text[:begin] + text
    return _without_sentences(code.text[:begin], [function.names[i] for i in unread[function.name]]) + text


def _rewritten(code: Code, start: int, end: int, lists: Mapping[int, tuple[_List, frozenset[int]]]) -> str:
    """The text between two offsets without the entries that go."""
    text, at = "", start
    for opened in sorted(lists):
        found, positions = lists[opened]
        if not at <= code.starts[opened] < end:
            continue  # elsewhere, or inside a list that has been rewritten
        text += code.text[at : code.ends[opened]]
        kept = [entry for i, entry in enumerate(found.entries) if i not in positions]
        entries = [_rewritten(code, code.starts[a], code.ends[b - 1], lists) for a, b in kept]
        at = code.starts[found.closed]
        line_end = code.text.find("\n", at, end)
        text = _filled(text, [" ".join(entry.split()) for entry in entries], (line_end if line_end >= 0 else end) - at)
    return text + code.text[at:end]


@functools.lru_cache(maxsize=2048)
def _function(code: Code) -> _Function | None:
    """The function that an item defines; None for another item, a specialisation or one with nameless parameters."""
    at = code.skip_comments(0)
    if code.word(at) == "template":
        at = code.close_angle(at + 1) + 1
    if code.word(at) != "FUNC":
        return None
    while at < len(code) and code.words[at] != "(":
        at += 1
    if code.word(at - 1) == ">" or code.word(code.after(at)) != "{":
        return None
    parameters = _list(code, at)
    names = tuple(_parameter_name(code, *entry) for entry in parameters.entries)
    if not all(names):
        return None
    body = set(code.words[code.after(at) :])
    for index, kind in enumerate(code.kinds):
        if kind == "directive":
            body.update(re.findall(r"\w+", code.source(index)))
    unread = frozenset(i for i, name in enumerate(names) if name not in body)
    return _Function(code.words[at - 1], at - 1, parameters, names, unread)


def _parameter_name(code: Code, first: int, end: int) -> str:
    """Of ``T name``, ``T& name`` or ``T (&name)[n]``; empty where there is none."""
    opened = next((i for i in range(first, end) if code.words[i] == "("), None)
    if opened is not None:
        return code.words[code.partner[opened] - 1]
    named = end - first > 1 and code.kinds[end - 1] == "name" and code.words[end - 2] != "const"
    return code.words[end - 1] if named else ""


def _list(code: Code, opened: int) -> _List:
    closed, entries = code.partner[opened], []
    first = at = opened + 1
    while at < closed:
        if code.words[at] == ",":
            entries.append((first, at))
            first = at + 1
        at = code.close_angle(at) + 1 if _opens_template(code, at) else code.after(at)
    if closed > opened + 1:
        entries.append((first, closed))
    return _List(opened, closed, tuple(entries))


def _opens_template(code: Code, at: int) -> bool:
    """Whether a ``<`` begins arguments of a template: ``gptr<const Element>``, ``f<kFirst>(``."""
    if code.words[at] != "<":
        return False
    end = at + 1
    while code.kinds[end] in ("name", "number") or code.words[end] in (",", "!", "="):
        end += 1
    return code.words[end] == ">" and (code.word(end + 1) in ("(", "&") or code.kinds[end + 1] == "name")


@functools.lru_cache(maxsize=4096)
def _calls(code: Code, names: frozenset[str]) -> tuple[tuple[str, _List], ...]:
    """Every call of these functions: the name and its arguments."""
    own, found = _function(code), []
    for index, word in enumerate(code.words):
        if word not in names or (own is not None and index == own.index):
            continue
        opened = index + 1
        if code.word(opened) == "<":
            opened = code.close_angle(opened) + 1
        if code.word(opened) == "(" and code.word(index - 1) not in (".", "->"):
            found.append((word, _list(code, opened)))
    return tuple(found)


def _is_pure(code: Code, first: int, end: int) -> bool:
    words = code.words[first:end]
    steps = any(a == b and a in ("+", "-") for a, b in pairwise(words))
    opened = (i for i in range(first + 1, end) if code.words[i] == "(")
    calls = any(code.kinds[i - 1] == "name" or code.words[i - 1] == ">" for i in opened)
    return not steps and not calls and "=" not in words


def _filled(before: str, entries: Sequence[str], behind: int) -> str:
    """A list after what precedes it, its lines broken as clang-format does: filled, then aligned.

    Args:
        before: Text up to and with the opening bracket.
        entries: Each on one line.
        behind: Characters that follow the list on its last line.
    """
    column = len(before) - before.rfind("\n") - 1
    lines = [""]
    for index, entry in enumerate(entries):
        is_last = index == len(entries) - 1
        piece = entry if is_last else f"{entry},"
        joined = f"{lines[-1]} {piece}" if lines[-1] else piece
        if lines[-1] and column + len(joined) + is_last * behind > _WIDTH:
            lines.append(piece)
        else:
            lines[-1] = joined
    return before + ("\n" + " " * column).join(lines)


def _without_sentences(comment: str, names: Sequence[str]) -> str:
    """A comment above a function without the sentences that speak of these parameters, in backticks."""
    lines = comment.splitlines()
    if not any(f"`{name}`" in comment for name in names) or not all(line.startswith("//") for line in lines):
        return comment
    sentences = re.split(r"(?<=[.)]) (?=[A-Z`(])", " ".join(line[2:].strip() for line in lines))
    kept = " ".join(text for text in sentences if not any(f"`{name}`" in text for name in names))
    wrapped = textwrap.wrap(kept, _WIDTH - 3, break_long_words=False, break_on_hyphens=False)
    return "".join(f"// {line}\n" for line in wrapped)
