"""What folded branches leave behind in a function: local values that nobody reads, loops that run once."""

from __future__ import annotations

import re

from .lexer import Code, read_code

_INDENT = 2
_VALUE_TYPES = ("bool", "int", "u32", "float")
# Functions that do nothing but compute.
_PURE = ("max_i32", "min_i32")
_DECLARATION = re.compile(r" *(?:const |constexpr )*(?:" + "|".join(_VALUE_TYPES) + r") \w+ = [^\n]*;")


def without_leftovers(code: Code) -> str:
    """A function's text without them. Other text is returned as it is."""
    text = _without_single_loops(code)
    if text == code.text:
        text = _without_constant_flags(code)
    if text == code.text:
        text = _without_unread_values(code)
    return text if text == code.text else without_leftovers(read_code(text))


def _declarations(code: Code) -> list[tuple[int, int, int]]:
    """Local ``type name = value;`` inside braces: index of the name, of the value's first token and of the ``;``."""
    found = []
    depth = 0
    for index, word in enumerate(code.words):
        depth += (word == "{") - (word == "}")
        if depth and word in _VALUE_TYPES and code.word(index + 2) == "=" and code.kinds[index + 1] == "name":
            before = index - 1
            while code.word(before) in ("const", "constexpr"):
                before -= 1
            while before >= 0 and code.kinds[before] in ("comment", "directive"):
                before -= 1
            if code.word(before) not in (";", "{", "}"):
                continue
            end = index + 3
            while code.word(end) not in (";", ",", ""):
                end = code.after(end)
            if code.word(end) == ";":
                found.append((index + 1, index + 3, end))
    return found


def _without_unread_values(code: Code) -> str:
    """Cuts declarations of values that nobody reads and whose computing does nothing else."""
    for name, end in _uninitialised(code):
        if code.words.count(code.words[name]) == 1:
            return _cut_declaration(code.text, code.starts[name], code.ends[end])
    for name, first, end in _declarations(code):
        if code.words.count(code.words[name]) > 1:
            continue
        # `<` compares, unless a `>` closes a template's arguments.
        closes = any(code.words[i : i + 2] == [">", "("] for i in range(first, end))
        marks = ("(", "[", "<") if closes else ("(", "[")
        names = [i for i in range(first, end) if code.kinds[i] == "name" and code.words[i] not in _PURE]
        calls = any(code.word(i + 1) in marks for i in names)
        if not calls and not any(code.kinds[i] in ("string", "directive") for i in range(first, end)):
            return _cut_declaration(code.text, code.starts[name], code.ends[end])
    return code.text


def _uninitialised(code: Code) -> list[tuple[int, int]]:
    """Local ``type name[n];`` inside a function: index of the name and of the ``;``."""
    found = []
    is_function = "(" in code.words and code.word(code.skip_comments(0)) not in ("struct", "union")
    for index, word in enumerate(code.words if is_function else ()):
        if word in _VALUE_TYPES and code.word(index - 1) in (";", "{", "}") and code.word(index + 2) in ("[", ";"):
            end = index + 2
            while code.word(end) == "[":
                end = code.after(end)
            if code.word(end) == ";":
                found.append((index + 1, end))
    return found


def _cut_declaration(text: str, start: int, end: int) -> str:
    """Leaves out the lines of a declaration; with the comment above, unless it is about more declarations."""
    start = text.rfind("\n", 0, start) + 1
    newline = text.find("\n", end) + 1
    above, below = text[:start].splitlines(keepends=True), text[newline:].splitlines()
    alone = not (below and _DECLARATION.match(below[0]))
    while alone and above and above[-1].lstrip().startswith("//"):
        above.pop()
    return "".join(above) + text[newline:]


def _without_constant_flags(code: Code) -> str:
    """Puts ``true`` or ``false`` for a local flag that is never set again and only asked for by ``if``."""
    for name, first, end in _declarations(code):
        word = code.words[name]
        if end != first + 1 or code.words[first] not in ("true", "false"):
            continue
        others = [i for i, other in enumerate(code.words) if other == word and i != name]
        if others and all(_is_asked(code, i) for i in others):
            pieces, at = [], 0
            for i in others:
                pieces += [code.text[at : code.starts[i]], code.words[first]]
                at = code.ends[i]
            return "".join([*pieces, code.text[at:]])
    return code.text


def _is_asked(code: Code, index: int) -> bool:
    """Whether a name stands in an ``if``'s own brackets, by itself: not in a call, not beside ``=`` or ``&``."""
    opened = index - 1
    while opened >= 0 and code.words[opened] not in ("(", "{", "}", ";"):
        opened = code.partner[opened] - 1 if code.words[opened] in (")", "]") else opened - 1
    around = {code.word(index - 1), code.word(index + 1)}
    return code.word(opened) == "(" and code.word(opened - 1) == "if" and around <= {"(", ")", "&&", "||", "!"}


def _without_single_loops(code: Code) -> str:
    """Unwraps ``for (;;) { ...; break; }`` that nothing else leaves or repeats."""
    for index, word in enumerate(code.words):
        if word != "for" or code.words[index + 1 : index + 6] != ["(", ";", ";", ")", "{"]:
            continue
        opened, closed = index + 5, code.partner[index + 5]
        jumps = [i for i in range(opened, closed) if code.words[i] in ("break", "continue")]
        if jumps != [closed - 2] or code.words[closed - 2] != "break":
            continue
        first = index - 1 if index and code.kinds[index - 1] == "directive" else index
        start = code.text.rfind("\n", 0, code.starts[first]) + 1
        begin = code.text.find("\n", code.ends[opened]) + 1
        end = code.text.rfind("\n", 0, code.starts[closed - 2]) + 1
        after = code.text.find("\n", code.ends[closed]) + 1
        body = re.sub(rf"^ {{{_INDENT}}}", "", code.text[begin:end], flags=re.MULTILINE)
        return code.text[:start] + body + code.text[after:]
    return code.text
