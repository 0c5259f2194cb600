"""Takes out of kernel text what its constants decide: an emitted file holds one kernel only.

Branches of ``if``, operands of ``? :`` and what they leave behind (a local value that nobody reads, an endless loop
that ends in ``break``) go, so that the text reads as if it had been written for these constants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .evaluate import Constant, evaluate
from .leftovers import without_leftovers
from .lexer import Code, read_code

_INDENT = 2
_WIDTH = 120
# Where the condition of `? :` begins, and where the expression ends.
_BEFORE_CONDITION = frozenset(("=", "(", "[", "{", ",", ";", "}", "return", "?", ":"))
_AFTER_EXPRESSION = frozenset((")", "]", "}", ",", ";"))


@dataclass(frozen=True)
class _Branch:
    """An ``if``: token indices. ``end`` is the first token after the statement."""

    start: int
    is_constexpr: bool
    opened: int
    then: int
    then_end: int
    other: int | None
    end: int


class _Folder:
    def __init__(self, code: Code, known: Mapping[str, Constant]) -> None:
        self.code = code
        self.known = dict(known)
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
        return "".join([*pieces, self.code.text[at:]])

    def _walk(self, index: int, end: int) -> None:
        """Folds what is decided between two tokens; branches that are left out are not looked at again."""
        code = self.code
        while index < end:
            word = code.word(index)
            if word == "if":
                branch = self._branch(index)
                value = self._decide_branch(branch)
                if value is not None and (branch.is_constexpr or self._stands_alone(index)):
                    self._fold(branch, value)
                    index = branch.end
                    continue
                if value is None:
                    self._shorten(branch.opened + 1, code.partner[branch.opened])
            elif word == "else" and (rest := self._vanishing_else(index)):
                self.cuts.append((code.ends[index - 1], code.ends[rest - 1]))
                index = rest
                continue
            elif word == "?":
                self._choose(index)
            elif _is_own_constant(code, index):
                self._learn(index)
            index += 1

    def _decide_branch(self, branch: _Branch) -> bool | None:
        value = self._decide(branch.opened + 1, self.code.partner[branch.opened])
        return None if value is None else bool(value)

    def _decide(self, begin: int, end: int) -> Constant | None:
        """Value of an expression: also where one part of ``a && b`` is false and another is not understood."""
        words = self.code.words
        value = evaluate(words[begin:end], self.known)
        if value is None:
            operator, parts = self._parts(begin, end)
            decides = operator == "||"
            if any(evaluate(words[first:last], self.known) is decides for first, last in parts):
                return decides
        return value

    def _parts(self, begin: int, end: int) -> tuple[str, list[tuple[int, int]]]:
        """The parts of an expression ``a && b && c`` or ``a || b || c``; none if it is neither."""
        operators: set[str] = set()
        parts, first, at = [], begin, begin
        while at < end:
            word = self.code.words[at]
            if word in ("&&", "||", "?", ";"):
                operators.add(word)
                parts.append((first, at))
                first = at + 1
            at = self.code.after(at)
        operator = operators.pop() if len(operators) == 1 else ""
        return (operator, [*parts, (first, end)]) if operator in ("&&", "||") else ("", [])

    def _shorten(self, begin: int, end: int) -> int:
        """Leaves out the parts of an undecided ``a && b && c`` that are true, so that what it depends on is left.

        Likewise those of ``a || b || c`` that are false, and both inside brackets.

        Returns:
            How many parts are left; 0 for an expression without parts.
        """
        code, kept = self.code, 0
        operator, parts = self._parts(begin, end)
        for first, last in parts:
            if evaluate(code.words[first:last], self.known) is not (operator == "&&"):
                kept += 1
                is_group = code.word(first) == "(" and code.partner[first] == last - 1
                if is_group and self._shorten(first + 1, last - 1) == 1:
                    self.cuts += [(code.starts[first], code.ends[first]), (code.starts[last - 1], code.ends[last - 1])]
                continue
            # With the operator after it, or the one before it if something is kept already.
            start = code.starts[first] if not kept else code.ends[first - 2]
            self.cuts.append((start, code.ends[last - 1] if kept or last == end else code.starts[last + 1]))
        return kept

    def _branch(self, index: int) -> _Branch:
        code = self.code
        opened = code.skip_comments(index + 1)
        is_constexpr = code.word(opened) == "constexpr"
        if is_constexpr:
            opened = code.skip_comments(opened + 1)
        if code.word(opened) != "(":
            raise code.error(code.starts[index], "an if without a condition")
        then = code.partner[opened] + 1
        then_end = self._statement_end(then)
        after = code.skip_comments(then_end)
        other = after + 1 if code.word(after) == "else" else None
        end = then_end if other is None else self._statement_end(other)
        return _Branch(index, is_constexpr, opened, then, then_end, other, end)

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

    def _before(self, index: int) -> int:
        before = index - 1
        while before >= 0 and self.code.kinds[before] == "comment":
            before -= 1
        return before

    def _stands_alone(self, index: int) -> bool:
        return self.code.word(self._before(index)) in (";", "{", "}", "else")

    def _chosen(self, branch: _Branch, value: bool) -> tuple[int, int]:
        """The statements that are taken, without braces; an empty range where there are none."""
        first, end = (branch.then, branch.then_end) if value else (branch.other or branch.end, branch.end)
        if first < end and self.code.word(self.code.skip_comments(first)) == "{":
            first, end = self.code.skip_comments(first) + 1, end - 1
        return first, end

    def _vanishes(self, index: int, end: int) -> bool:
        """Whether nothing is left of the statements between two tokens."""
        while (index := self.code.skip_comments(index)) < end:
            if self.code.word(index) != "if":
                return False
            branch = self._branch(index)
            value = self._decide_branch(branch)
            if value is None or not self._vanishes(*self._chosen(branch, value)):
                return False
            index = branch.end
        return True

    def _vanishing_else(self, index: int) -> int | None:
        """First token after an else whose block comes to nothing."""
        opened = self.code.skip_comments(index + 1)
        if self.code.word(opened) != "{" or not self._vanishes(opened + 1, self.code.partner[opened]):
            return None
        return self.code.partner[opened] + 1

    def _fold(self, branch: _Branch, value: bool) -> None:
        code = self.code
        if not value and branch.other is not None and code.word(code.skip_comments(branch.other)) == "if":
            # One chain: what is chosen in its rest stands for all of it.
            rest = self._branch(code.skip_comments(branch.other))
            decided = self._decide_branch(rest)
            if decided is not None:
                self._fold(replace(rest, start=branch.start), decided)
                return
        before = self._before(branch.start)
        # The else of an outer `if` that is folded itself is cut already.
        is_cut = before >= 0 and any(start <= code.starts[before] < end for start, end in self.cuts)
        if not is_cut and code.word(before) == "else":
            self._fold_else(branch, value, before)
            return
        if not is_cut and code.word(before) not in (";", "{", "}"):
            raise code.error(code.starts[branch.start], "if constexpr that is the body of another statement")
        first, end = self._chosen(branch, value)
        is_block = code.word(first - 1) == "{" and code.partner[first - 1] == end
        if self._vanishes(first, end):
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
        if first is None or self._vanishes(*self._chosen(branch, value)):
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

    def _choose(self, mark: int) -> None:
        """Leaves one operand of a ``? :`` whose condition is decided."""
        code, words = self.code, self.code.words
        start = _condition_start(code, mark)
        value = evaluate(words[start:mark], self.known)
        if value is None:
            return
        colon = self._operand_end(mark + 1)
        end = self._operand_end(colon + 1)
        first, last = (mark + 1, colon) if value else (colon + 1, end)
        left, right = code.starts[start], code.ends[end - 1]
        is_group = words[start - 1] == "(" and code.word(end) == ")" and code.kinds[start - 2] == "punctuation"
        if is_group and last == first + 1 and code.word(start - 2) not in (")", "]", ">"):
            left, right = code.starts[start - 1], code.ends[end]
            if (code.word(start - 2), words[first]) == ("+", "0"):
                self.cuts.append((code.ends[start - 3], right))
                return
        self.cuts += [(left, code.starts[first]), (code.ends[last - 1], right)]

    def _operand_end(self, at: int) -> int:
        """The ``:`` or the end of the expression after an operand of ``? :``."""
        depth = 0
        while at < len(self.code):
            word = self.code.words[at]
            if word in _AFTER_EXPRESSION or (word == ":" and depth == 0):
                return at
            depth += (word == "?") - (word == ":")
            at = self.code.after(at)
        return at

    def _learn(self, index: int) -> None:
        """A constant of the function's own: ``constexpr bool kName = ...;`` or ``const bool name = ...;``."""
        begin = index + 4
        end = _initialiser_end(self.code, begin)
        value = self._decide(begin, end)
        if value is None:
            self._shorten(begin, end)
        else:
            self.known[self.code.words[index + 2]] = value


def _is_own_constant(code: Code, index: int) -> bool:
    """Whether ``constexpr`` or ``const`` begins the declaration of a number or a truth value."""
    return (
        code.word(index) in ("const", "constexpr")
        and code.word(index + 1) in ("bool", "int")
        and code.word(index + 3) == "="
    )


def _initialiser_end(code: Code, at: int) -> int:
    while code.word(at) not in (",", ";", ""):
        at = code.after(at)
    return at


def _condition_start(code: Code, mark: int) -> int:
    """First token of the condition before a ``?``."""
    start = mark
    while start and code.words[start - 1] not in _BEFORE_CONDITION:
        start = code.partner[start - 1] if code.words[start - 1] in (")", "]") else start - 1
    return start


def mentioned_constants(code: Code) -> tuple[str, ...]:
    """Names that choices in this code (``if``, ``? :``, constants of its own) may depend on, sorted."""
    names: set[str] = set()
    for index, word in enumerate(code.words):
        if word == "if":
            opened = index + 1 + (code.word(index + 1) == "constexpr")
            begin, end = opened, code.partner.get(opened, opened)
        elif word == "?":
            begin, end = _condition_start(code, index), index
        elif _is_own_constant(code, index):
            begin, end = index + 2, _initialiser_end(code, index + 4)
        else:
            continue
        names.update(name for name in code.words[begin:end] if name[:1] == "k" and name[1:2].isupper())
    return tuple(sorted(names))


def fold(code: Code, known: Mapping[str, Constant]) -> str:
    """The text without what these constants decide: branches of ``if``, operands of ``? :``, what only those needed.

    A branch that is taken loses its ``if``, its braces and one level of indentation; conditions that depend on other
    names (a template's parameters) stay. The result is formatted as clang-format would, as far as no statement was
    wrapped for want of the two columns that it gains.

    Raises:
        TemplateError: A decided ``if constexpr`` stands where it cannot be replaced by its statements.
    """
    text = _Folder(code, known).run()
    while text != code.text:
        text = tidied(without_leftovers(read_code(text)))
        code = read_code(text)
        text = _Folder(code, known).run()
    return text


def tidied(text: str) -> str:
    """As clang-format would leave it: blank lines, short functions and assignments on one line."""
    text = re.sub(r"\n[ \t]+(?=\n)", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"\{\n\n", "{\n", re.sub(r"\n\n( *\})", r"\n\1", text))
    text = re.sub(r"^(.* =)\n +(.*)$", _joined, text, flags=re.MULTILINE)
    # Not below a line of its own for `template <...>`: there clang-format joins nothing.
    return re.sub(r"(?<!>\n)^(\w[^\n/]*\) \{)\n  ([^\n/{}]*;)\n(\})\Z", _joined, text, flags=re.MULTILINE)


def _joined(match: re.Match[str]) -> str:
    line = " ".join(match.groups())
    return line if len(line) <= _WIDTH else match.group()
