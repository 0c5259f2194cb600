"""Tokens of kernel text: enough C++ to find declarations, statements and names, and an error for anything else."""

from __future__ import annotations

import functools
import re

from ..errors import Fa2genError

# One alternative for each kind of token, in this order. `<` and `>` stay single: they close templates as often as they
# compare. A directive is a whole logical line.
_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<punctuation>&&|\|\||[=!<>]=|->|::|[-+*/%&|^~!=<>?:;,.()\[\]{}])
  | (?P<number>[0-9](?:[eEpP][+-]|[\w.'])*)
  | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)+')
  | (?P<directive>\#(?:\\\n|[^\n])*)
  | (?P<space>\s+)
  | (?P<unknown>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSES = {")": "(", "]": "[", "}": "{"}


class TemplateError(Fa2genError):
    """Kernel text is not written as this package reads it: a mistake in a template, not in a caller's arguments."""


class Code:
    """Text as tokens, without white space.

    Attributes:
        text: What was read.
        kinds: Of each token: comment, name, punctuation, number, string, directive.
        words: Of each token its text; empty for comments, strings and directives, so that they equal no keyword.
        starts, ends: Offsets into ``text``.
        partner: For the index of each bracket ( [ { the index of the one that closes it, and back.
    """

    __slots__ = ("ends", "kinds", "partner", "starts", "text", "words")

    def __init__(self, text: str) -> None:
        """Reads a text.

        Raises:
            TemplateError: A character or a bracket that does not belong, with its line.
        """
        self.text = text
        self.kinds: list[str] = []
        self.words: list[str] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.partner: dict[int, int] = {}
        opened: list[int] = []
        for match in _TOKEN.finditer(text):
            kind = str(match.lastgroup)
            if kind == "space":
                continue
            start, end = match.span()
            word = match.group()
            if kind == "unknown" or (kind == "directive" and text[text.rfind("\n", 0, start) + 1 : start].strip()):
                raise self.error(start, f"a stray {word[0]!r}")
            index = len(self.words)
            self.kinds.append(kind)
            self.words.append(word if kind in ("name", "punctuation", "number") else "")
            self.starts.append(start)
            self.ends.append(end)
            if kind != "punctuation":
                continue
            if word in "([{":
                opened.append(index)
            elif word in _CLOSES:
                if not opened or self.words[opened[-1]] != _CLOSES[word]:
                    raise self.error(start, f"{word!r} closes nothing")
                self.partner[index] = opened[-1]
                self.partner[opened.pop()] = index
        if opened:
            raise self.error(self.starts[opened[-1]], f"{self.words[opened[-1]]!r} is never closed")

    def __len__(self) -> int:
        return len(self.words)

    def part(self, first: int, end: int) -> Code:
        """The tokens from ``first`` to ``end`` with their text; no bracket may reach beyond them."""
        code = Code.__new__(Code)
        offset = self.starts[first]
        code.text = self.text[offset : self.ends[end - 1]]
        code.kinds, code.words = self.kinds[first:end], self.words[first:end]
        code.starts = [start - offset for start in self.starts[first:end]]
        code.ends = [stop - offset for stop in self.ends[first:end]]
        code.partner = {a - first: self.partner[a] - first for a in range(first, end) if a in self.partner}
        return code

    def error(self, offset: int, what: str) -> TemplateError:
        line = self.text.count("\n", 0, offset) + 1
        quoted = self.text.splitlines()[line - 1].strip()
        return TemplateError(f"kernel text, line {line}: {what}: {quoted}")

    def source(self, index: int) -> str:
        """The text of any token."""
        return self.text[self.starts[index] : self.ends[index]]

    def word(self, index: int) -> str:
        """Like ``words[index]``, and empty beyond the ends."""
        return self.words[index] if 0 <= index < len(self.words) else ""

    def skip_comments(self, index: int) -> int:
        """First token from ``index`` on that is no comment."""
        while index < len(self.kinds) and self.kinds[index] == "comment":
            index += 1
        return index

    def after(self, index: int) -> int:
        """The token after this one or, if it opens a bracket, after the bracket's end."""
        return max(index, self.partner.get(index, index)) + 1

    def close_angle(self, index: int) -> int:
        """Index of the ``>`` that closes the ``<`` at ``index``."""
        depth, at = 0, index
        while at < len(self.words):
            word = self.words[at]
            depth += (word == "<") - (word == ">")
            if depth == 0:
                return at
            at = self.after(at)
        raise self.error(self.starts[index], "'<' is never closed")


@functools.lru_cache(maxsize=512)
def read_code(text: str) -> Code:
    """The tokens of a text, which nobody may change: folding reads the same functions again and again."""
    return Code(text)
