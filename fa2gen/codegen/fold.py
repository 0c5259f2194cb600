"""Takes the branches out of kernel text that ``if constexpr`` never takes: an emitted file holds one kernel only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .evaluate import Constant, evaluate
from .lexer import Code

_INDENT = 2


@dataclass(frozen=True)
class _Branch:
    """An ``if constexpr``: token indices. ``end`` is the first token after the statement."""

    start: int
    condition: tuple[str, ...]
    then: int
    then_end: int
    other: int | None
    end: int


class _Folder:
    def __init__(self, code: Code, known: Mapping[str, Constant]) -> None:
        self.code = code
        self.known = known
        self.cuts: list[tuple[int, int]] = []  # character ranges to leave out

    def run(self) -> str:
        self._walk(0, len(self.code))
        if not self.cuts:
            return self.code.text
        pieces, at = [], 0
        for start, end in sorted(self.cuts):
            if end <= at:
                continue
            pieces.append(self.code.text[at : max(at, start)])
            at = end
        text = "".join([*pieces, self.code.text[at:]])
        # What clang-format would do with the blank lines that are left over.
        text = re.sub(r"\n{3,}", "\n\n", text)
        return re.sub(r"\{\n\n", "{\n", re.sub(r"\n\n( *\})", r"\n\1", text))

    def _walk(self, index: int, end: int) -> None:
        """Folds what is decided between two tokens; branches that are left out are not looked at again."""
        while index < end:
            if self._is_constexpr(index):
                branch = self._branch(index)
                value = evaluate(branch.condition, self.known)
                if value is not None:
                    self._fold(branch, bool(value))
                    index = branch.end
                    continue
                self._shorten(index)
            index += 1

    def _is_constexpr(self, index: int) -> bool:
        return self.code.word(index) == "if" and self.code.word(self.code.skip_comments(index + 1)) == "constexpr"

    def _shorten(self, index: int) -> None:
        """Leaves out the parts of an undecided ``a && b && c`` that are true, so that what it depends on is left."""
        code = self.code
        opened = code.skip_comments(code.skip_comments(index + 1) + 1)
        closed = code.partner[opened]
        begin, at = opened + 1, opened + 1
        kept = False
        while at <= closed:
            if at < closed and code.words[at] != "&&":
                at = code.after(at)
                continue
            last = at == closed
            if evaluate(code.words[begin:at], self.known) is True:
                # With the `&&` after it, or the one before it if something is kept already.
                first = code.starts[begin] if not kept else code.ends[begin - 2]
                self.cuts.append((first, code.ends[at - 1] if kept or last else code.starts[at + 1]))
            else:
                kept = True
            begin = at = at + 1

    def _branch(self, index: int) -> _Branch:
        code = self.code
        opened = code.skip_comments(code.skip_comments(index + 1) + 1)
        if code.word(opened) != "(":
            raise code.error(code.starts[index], "if constexpr without a condition")
        closed = code.partner[opened]
        then = closed + 1
        then_end = self._statement_end(then)
        after = code.skip_comments(then_end)
        other = after + 1 if code.word(after) == "else" else None
        end = then_end if other is None else self._statement_end(other)
        return _Branch(index, tuple(map(code.word, range(opened + 1, closed))), then, then_end, other, end)

    def _statement_end(self, index: int) -> int:
        """First token after the statement that begins at a token."""
        code = self.code
        index = code.skip_comments(index)
        word = code.word(index)
        if word == "{":
            return code.partner[index] + 1
        if word in ("if", "for", "while", "switch"):
            index = code.skip_comments(index + 1)
            if code.word(index) == "constexpr":
                index += 1
            end = self._statement_end(code.partner[index] + 1)
            after = code.skip_comments(end)
            return self._statement_end(after + 1) if word == "if" and code.word(after) == "else" else end
        if index < len(code) and code.kinds[index] == "directive":
            return self._statement_end(index + 1)
        while code.word(index) != ";":
            if index >= len(code):
                raise code.error(len(code.text) - 1, "a statement without an end")
            index = code.after(index)
        return index + 1

    def _fold(self, branch: _Branch, value: bool) -> None:
        code = self.code
        if not value and branch.other is not None and self._is_constexpr(code.skip_comments(branch.other)):
            # One chain: what is chosen in its rest stands for all of it.
            rest = self._branch(code.skip_comments(branch.other))
            decided = evaluate(rest.condition, self.known)
            if decided is not None:
                self._fold(replace(rest, start=branch.start), bool(decided))
                return
        before = branch.start - 1
        while before >= 0 and code.kinds[before] == "comment":
            before -= 1
        # The else of an outer `if constexpr` that is folded itself is cut already.
        is_cut = before >= 0 and any(start <= code.starts[before] < end for start, end in self.cuts)
        if not is_cut and code.word(before) == "else":
            self._fold_else(branch, value, before)
            return
        if not is_cut and code.word(before) not in (";", "{", "}"):
            raise code.error(code.starts[branch.start], "if constexpr that is the body of another statement")
        if value:
            first, end = branch.then, branch.then_end
        elif branch.other is not None:
            first, end = branch.other, branch.end
        else:
            first = end = branch.end
        is_block = first < end and code.word(code.skip_comments(first)) == "{"
        if is_block:
            first, end = code.skip_comments(first) + 1, end - 1
        if first >= end:
            self._cut_lines(branch)
            return
        whole = code.starts[branch.start], code.ends[branch.end - 1]
        kept = code.starts[first], code.ends[end - 1]
        if code.kinds[first] == "directive":  # directives begin in the first column
            whole = code.text.rfind("\n", 0, whole[0]) + 1, whole[1]
        self.cuts += [(whole[0], kept[0]), (kept[1], whole[1])]
        on_own_line = not code.text[code.text.rfind("\n", 0, kept[0]) + 1 : kept[0]].strip()
        if is_block or on_own_line:
            self._dedent(*kept)
        self._walk(first, end)

    def _fold_else(self, branch: _Branch, value: bool, before: int) -> None:
        """What follows an ``else`` that stays: the statement that is taken, braces and all, or no ``else`` either."""
        code, end = self.code, branch.then_end if value else branch.end
        first = branch.then if value else branch.other
        if first is None:
            self.cuts.append((code.ends[before - 1], code.ends[branch.end - 1]))
            return
        first = code.skip_comments(first)
        self.cuts += [(code.starts[branch.start], code.starts[first]), (code.ends[end - 1], code.ends[branch.end - 1])]
        self._walk(first, end)

    def _cut_lines(self, branch: _Branch) -> None:
        """Leaves out the lines of a statement, with the comment directly above it."""
        text = self.code.text
        start = text.rfind("\n", 0, self.code.starts[branch.start]) + 1
        if text[start : self.code.starts[branch.start]].strip():
            raise self.code.error(start, "an if constexpr that begins inside a line")
        while start:
            above = text.rfind("\n", 0, start - 1) + 1
            if not text[above:start].lstrip().startswith("//"):
                break
            start = above
        newline = text.find("\n", self.code.ends[branch.end - 1])
        after = self.code.skip_comments(branch.end)
        if after < len(self.code) and (newline < 0 or self.code.starts[after] < newline):
            raise self.code.error(self.code.starts[after], "a line that goes on after an if constexpr that is left out")
        self.cuts.append((start, len(text) if newline < 0 else newline + 1))

    def _dedent(self, start: int, end: int) -> None:
        """Moves the lines that begin between two offsets to the left by one level."""
        at = self.code.text.find("\n", start, end)
        while at >= 0:
            begin = at + 1
            while any(cut[0] == begin and cut[1] - cut[0] == _INDENT for cut in self.cuts):
                begin += _INDENT
            if self.code.text.startswith(" " * _INDENT, begin):
                self.cuts.append((begin, begin + _INDENT))
            at = self.code.text.find("\n", at + 1, end)


def constexpr_conditions(code: Code) -> tuple[str, ...]:
    """Names that the conditions of ``if constexpr`` in this code mention, sorted."""
    names: set[str] = set()
    for index, word in enumerate(code.words):
        if word == "constexpr" and code.word(index - 1) == "if":
            names |= {code.words[i] for i in range(index + 2, code.partner[index + 1]) if code.kinds[i] == "name"}
    return tuple(sorted(names))


def fold(code: Code, known: Mapping[str, Constant]) -> str:
    """The text without the branches of ``if constexpr`` that these constants decide.

    A branch that is taken loses its ``if``, its braces and one level of indentation; conditions that depend on other
    names (a template's parameters) stay. The result is formatted as clang-format would, as far as no statement was
    wrapped for want of the two columns that it gains.

    Raises:
        TemplateError: A decided ``if constexpr`` stands where it cannot be replaced by its statements.
    """
    return _Folder(code, known).run()
