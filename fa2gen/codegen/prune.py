"""Leaves out of kernel text what the kernel does not reach, so that an emitted file can be read from top to bottom.

Text is read as a list of top-level items: functions, templates with their specialisations, structs, aliases, constants,
macros, assertions. An item stays if the kernel names it, directly or through items that stay. Branches that
the file's own constants decide are folded first (:mod:`fa2gen.codegen.fold`), so what only a dead branch uses goes as
well. Comments go with what they explain:

* one that touches an item from above, or follows it on its line, belongs to the item;
* the first one of a part that is followed by a blank line heads the part, every later one a section of it: it stays
  while something under it does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .evaluate import Constant, evaluate
from .fold import fold, mentioned_constants, tidied
from .leftovers import without_leftovers
from .lexer import Code, TemplateError, read_code
from .parameters import unread_parameters, without_parameters

_ATTRIBUTES = ("alignas", "__align__", "__attribute__", "__launch_bounds__")
_TYPES = ("struct", "class", "union")
_BUILT_IN = ("float", "int", "bool", "char", "double")


@dataclass(frozen=True, eq=False)
class Item:
    """One top-level item, or a comment that heads what follows.

    Attributes:
        code: Its text with the comments that belong to it.
        spaced: A blank line precedes it.
        names: What it declares; empty for assertions and headings.
        special: The template argument that an explicit specialisation is for.
        kind: ``"kernel"``, ``"assertion"``, ``"heading"`` or ``"declaration"``.
        references: (name, template argument or None) of everything it mentions.
        conditions: Constants of the file that its choices (``if``, ``? :``) may depend on.
        definitions: Of constants, each name with the words of its value.
    """

    code: Code
    spaced: bool
    names: tuple[str, ...]
    special: str | None
    kind: str
    references: frozenset[tuple[str, str | None]]
    conditions: tuple[str, ...] = ()
    definitions: tuple[tuple[str, tuple[str, ...]], ...] = ()


@functools.lru_cache(maxsize=256)
def parse(text: str) -> tuple[Item, ...]:
    """The items of a text.

    Raises:
        TemplateError: Something at the top level is none of the known items.
    """
    code = read_code(text)
    items: list[Item] = []
    index, previous_end = 0, 0
    while index < len(code):
        first = index
        # Comments of one block: no blank line between them.
        while code.kinds[index] == "comment":
            index += 1
            if index == len(code) or _blank_line(text, code.ends[index - 1], code.starts[index]):
                break
        is_heading = index > first and (
            index == len(code) or _blank_line(text, code.ends[index - 1], code.starts[index])
        )
        if not is_heading:
            index = _item_end(code, index)
            # A comment on the item's last line is its own.
            if index < len(code) and code.kinds[index] == "comment":
                index += "\n" not in text[code.ends[index - 1] : code.starts[index]]
        start = code.starts[first]
        items.append(_item(code.part(first, index), _blank_line(text, previous_end, start), is_heading))
        previous_end = code.ends[index - 1]
    return tuple(items)


def _blank_line(text: str, start: int, end: int) -> bool:
    return text.count("\n", start, end) > 1


def _item_end(code: Code, index: int) -> int:
    """First token after the item whose first token is given."""
    if code.kinds[index] == "directive":
        if code.source(index)[1:].split()[:1] != ["define"]:
            raise code.error(code.starts[index], "at the top level, #define is the only directive that is understood")
        return index + 1
    at, has_parameters, has_value = index, False, False
    if code.word(at) == "template":
        at = code.close_angle(at + 1) + 1
    is_type = code.word(at) in _TYPES
    while at < len(code):
        word = code.word(at)
        if word == ";":
            return at + 1
        has_value = has_value or word == "="
        has_parameters = has_parameters or (word == "(" and code.word(at - 1) not in _ATTRIBUTES)
        at = code.after(at)
        if word == "{" and has_parameters and not has_value and not is_type:
            return at
    raise code.error(code.starts[index], "an item without an end")


def _item(code: Code, spaced: bool, is_heading: bool) -> Item:
    if is_heading:
        return Item(code, spaced, (), None, "heading", frozenset())
    first = code.skip_comments(0)
    kind, special = "declaration", None
    names: tuple[str, ...] = ()
    definitions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    if code.kinds[first] == "directive":
        macro = read_code(code.source(first).split("define", 1)[1].replace("\\\n", "\n"))
        return Item(code, spaced, (macro.word(0),), None, kind, _references(macro, (macro.word(0),)))
    parameters: frozenset[str] = frozenset()
    if code.word(first) == "template":
        closed = code.close_angle(first + 1)
        parameters = frozenset(
            code.word(i) for i in range(first, closed) if code.word(i + 1) in (",", ">", "=") and code.word(i)
        )
        first = closed + 1
    if code.word(first) == "static_assert":
        kind = "assertion"
    elif code.word(first) == "using":
        names = (code.word(first + 1),) if code.word(first + 2) == "=" else ()
    elif code.word(first) in _TYPES:
        names, special = _type_name(code, first + 1)
    else:
        names, special, is_function = _declared(code, first)
        kind = "kernel" if is_function and "__global__" in code.words else kind
        definitions = () if is_function else _definitions(code, names)
    if kind != "assertion" and not (names and all(name.isidentifier() for name in names)):
        raise code.error(code.starts[first], "an item whose name is not found")
    # A template's parameters and the function's own variables hide constants of the file.
    hidden = parameters.union(code.word(i - 1) for i, word in enumerate(code.words) if word == "=")
    # Assertions stay as they are: each speaks of all kernels, and its lines are wrapped for that.
    conditions = tuple(name for name in mentioned_constants(code) if name not in hidden and kind != "assertion")
    return Item(code, spaced, names, special, kind, _references(code, names, parameters), conditions, definitions)


def _type_name(code: Code, at: int) -> tuple[tuple[str, ...], str | None]:
    while code.word(at) in _ATTRIBUTES:
        at = code.partner[at + 1] + 1
    special = None
    if code.word(at + 1) == "<":
        special = "".join(map(code.word, range(at + 2, code.close_angle(at + 1))))
    return (code.word(at),), special


def _declared(code: Code, at: int) -> tuple[tuple[str, ...], str | None, bool]:
    """Names of a function or of variables, the specialisation's argument, and whether it is a function."""
    names: list[str] = []
    while at < len(code):
        word = code.word(at)
        if word == "=":
            before = at - 1
            while code.word(before) == "]":
                before = code.partner[before] - 1
            names.append(code.word(before))
        elif word == "(" and not names and code.word(at - 1) not in _ATTRIBUTES:
            return *_function_name(code, at - 1), True
        at = code.after(at)
    return tuple(names), None, False


def _definitions(code: Code, names: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The value of each constant that a declaration defines, as words."""
    found = []
    for index, word in enumerate(code.words):
        if word != "=" or code.word(index - 1) not in names or "constexpr" not in code.words[:index]:
            continue
        end = index + 1
        while code.word(end) not in (",", ";"):
            end = code.after(end)
        found.append((code.words[index - 1], tuple(code.words[index + 1 : end])))
    return tuple(found)


def _function_name(code: Code, at: int) -> tuple[tuple[str, ...], str | None]:
    if code.word(at) != ">":
        return (code.word(at),), None
    opened = at
    while code.word(opened) != "<":
        opened -= 1
    return (code.word(opened - 1),), "".join(map(code.word, range(opened + 1, at)))


def _references(
    code: Code, own: Iterable[str], parameters: frozenset[str] = frozenset()
) -> frozenset[tuple[str, str | None]]:
    """What an item mentions: (name, argument); the argument where one name is given, and no template parameter."""
    found: set[tuple[str, str | None]] = set()
    for index, name in enumerate(code.words):
        # A template's parameter hides what the file calls by its name.
        if code.kinds[index] != "name" or name in own or name in parameters or code.word(index - 1) in (".", "->"):
            continue
        argument = None
        if code.word(index + 1) == "<" and code.word(index + 3) == ">" and code.word(index + 2) not in parameters:
            argument = code.word(index + 2)
        found.add((name, argument))
    for index, kind in enumerate(code.kinds):
        if kind == "directive":
            # `#pragma unroll kSteps` names a constant.
            found |= {(name, None) for name in re.findall(r"[A-Za-z_]\w*", code.source(index)) if name not in own}
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def _folded(item: Item, values: tuple[Constant | None, ...]) -> Item:
    known = {name: value for name, value in zip(item.conditions, values, strict=True) if value is not None}
    text = fold(item.code, known)
    return item if text == item.code.text else _item(read_code(text), item.spaced, False)


def _fold_all(parts: Sequence[Sequence[Item]]) -> list[list[Item]]:
    """Items with their decided branches folded; constants are known from where they are defined on."""
    known: dict[str, Constant] = {}
    result = []
    for part in parts:
        folded = []
        for item in part:
            if item.conditions:
                item = _folded(item, tuple(known.get(name) for name in item.conditions))
            for name, words in item.definitions:
                value = evaluate(words, known)
                if value is not None:
                    known[name] = value
            folded.append(item)
        result.append(folded)
    return result


def _reached(items: Sequence[Item]) -> set[Item]:
    """Items that the kernels name, directly or through others; with the assertions about them."""
    declared: dict[str, list[Item]] = {}
    aliases: dict[str, str] = {}
    known_types = set(_BUILT_IN)
    for item in items:
        for name in item.names:
            declared.setdefault(name, []).append(item)
        words = [word for word in item.code.words[:8] if word]
        if words[:1] == ["using"] and len(words) == 5:
            aliases[words[1]] = words[3]
        if words[:1] and words[0] in (*_TYPES, "using"):
            known_types |= set(item.names)

    def mentioned(item: Item) -> list[Item]:
        found = []
        for name, argument in item.references:
            others = declared.get(name)
            if others is None:
                continue
            while argument in aliases:
                argument = aliases[argument]
            certain = argument if argument in known_types else None
            found += [x for x in others if x.special is None or certain is None or x.special == certain]
        return found

    reached: set[Item] = set()
    waiting = [item for item in items if item.kind == "kernel"]
    if not waiting:
        raise TemplateError("kernel text without a __global__ function")
    assertions = [item for item in items if item.kind == "assertion"]
    while waiting:
        while waiting:
            item = waiting.pop()
            if item not in reached:
                reached.add(item)
                waiting += mentioned(item)
        waiting = [item for item in assertions if item not in reached and reached.intersection(mentioned(item))]
    return reached


def prune(parts: Sequence[str], *, fixed: int = 0) -> list[str]:
    """Leaves out what no ``__global__`` function of the text reaches, and what nobody reads of what it does.

    Args:
        parts: The text in order, cut where a new subject begins: a part's first heading stands over all of it.
        fixed: So many leading parts keep their signatures: the emulator has twins of them.

    Returns:
        The parts in the same order, each empty or with one newline at its end.

    Raises:
        TemplateError: The text holds something that this module does not understand; nothing passes unpruned.
    """
    parsed = _fold_all([parse(part) for part in parts])
    while True:
        reached = _reached([item for part in parsed for item in part])
        kept = _without_unread(parsed, reached, fixed)
        if kept == parsed:
            return [_text(part, reached) for part in parsed]
        parsed = kept


def _without_unread(parts: list[list[Item]], reached: set[Item], fixed: int) -> list[list[Item]]:
    """Items without parameters and fields that no item which is reached reads; the same items where nothing goes.

    The kernel's parameters stay whole: the host packs them.
    """
    # What goes from one signature may be all that another one was for.
    while True:
        own = [item for part in parts[fixed:] for item in part if item in reached]
        unread = unread_parameters([item.code for item in own])
        read = frozenset().union(*(_fields(item) for item in own))
        packed = {word for item in own if item.kind == "kernel" for word in _packed(item)}
        after = {item: _without(item, *rest) for item in own if (rest := _unread_in(item, unread, read, packed))}
        if all(item is kept for item, kept in after.items()):
            return parts
        parts = [[after.get(item, item) for item in part] for part in parts]
        reached = reached.union(after.values())


def _unread_in(
    item: Item, unread: Mapping[str, frozenset[int]], read: frozenset[str], packed: Collection[str]
) -> tuple[tuple[tuple[str, frozenset[int]], ...], frozenset[str] | None] | None:
    """What :func:`_without` may find in an item; None: nothing."""
    words = _words(item)
    mine = tuple((name, positions) for name, positions in unread.items() if name in words)
    is_struct = "struct" in words and not any(name in packed for name in item.names)
    return (mine, read & words if is_struct else None) if mine or is_struct else None


@functools.lru_cache(maxsize=4096)
def _words(item: Item) -> frozenset[str]:
    return frozenset(item.code.words)


@functools.lru_cache(maxsize=4096)
def _fields(item: Item) -> frozenset[str]:
    """What an item reads or writes as ``x.field``."""
    return frozenset(word for before, word in pairwise(item.code.words) if before in (".", "->"))


def _packed(item: Item) -> list[str]:
    """The type of a kernel's parameter."""
    return [word for before, word in pairwise(item.code.words) if before == "__grid_constant__"]


@functools.lru_cache(maxsize=4096)
def _without(item: Item, unread: tuple[tuple[str, frozenset[int]], ...], read: frozenset[str] | None) -> Item:
    """An item without these parameters and, where ``read`` is given, without the fields that are not in it."""
    text = without_parameters(item.code, dict(unread))
    if text != item.code.text:
        text = tidied(without_leftovers(read_code(text)))
    if read is not None:
        text = _without_unread_fields(text, read)
    return item if text == item.code.text else _item(read_code(text), item.spaced, False)


_STRUCT = re.compile(r"^struct (?P<name>\w+) \{\n(?P<fields>(?:  .*\n)+)\};", re.MULTILINE)


def _without_unread_fields(text: str, read: Collection[str]) -> str:
    """Leaves out fields of a struct that no ``x.field`` names; those that a line declares by itself.

    Structs with a function or an initialiser stay whole.
    """

    def whole(match: re.Match[str]) -> str:
        if re.search(r"[({=]", re.sub(r"//.*", "", match["fields"])):
            return match.group()
        lines = match["fields"].splitlines(keepends=True)
        fields = [re.fullmatch(r"  [^,;/]*?(\w+)(?:\[[^;]*)?;.*\n", line) for line in lines]
        kept = [line for line, field in zip(lines, fields, strict=True) if field is None or field[1] in read]
        return f"struct {match['name']} {{\n{''.join(kept)}}};" if kept else match.group()

    return _STRUCT.sub(whole, text)


def _text(part: Sequence[Item], reached: set[Item]) -> str:
    kept: list[Item] = []
    heading: Item | None = None
    text, spaced, title = "", False, None
    for index, item in enumerate(part):
        spaced = spaced or item.spaced
        if item.kind == "heading":
            if index == 0:
                title = item
            else:
                heading = item
            spaced = True
            continue
        if item not in reached:
            continue
        for above in (title, heading):
            if above is not None:
                text += ("\n" if text else "") + above.code.text + "\n"
                spaced = True
        title = heading = None
        text += ("\n" if spaced and text else "") + item.code.text + "\n"
        kept.append(item)
        spaced = False
    return text
