"""Folding: what constants decide is gone from a template's text, the rest means the same as before."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from fa2gen.codegen.evaluate import evaluate
from fa2gen.codegen.fold import fold
from fa2gen.codegen.lexer import Code, TemplateError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("7 / 2 - 7 % 2", 2),
        ("-7 / 2", None),
        ("1 / 0", None),
        ("kN == 1 ? 0 : kN - 2", 1),
        ("kN > 1 && !kOff", True),
        ("kN >= 4 || kOff", False),
        ("!kOff == kN", False),  # (!kOff) == kN, as in C++
        ("x && kOff", False),
        ("kOff && x", False),
        ("x || kN == 3", True),
        ("x && !kOff", None),
        ("x", None),
        ("kOff ? x : 5", 5),
        ("sizeof(int) == 4", None),
        ("f<3>(kN) == 4", None),
        ("0x10 + 1", 17),
        ("0u - 1 > 0", None),
        ("010", None),
        ("1'000", None),
        ("2147483647 + kN > 0", None),
        ("3 - -3", 6),
        ("-2 > -kN", True),
        ("kN < 4", True),
        ("x < 4", None),  # could be a template's argument list
        ("2.5f", None),
        ("1 +", None),
        ("1 2", None),
    ],
)
def test_evaluate(text, value):
    got = evaluate(Code(text).words, {"kN": 3, "kOff": False})
    assert (got, type(got)) == (value, type(value)) or (got == value and isinstance(got, bool) and text.startswith("!"))


FOLDED = [
    ("if constexpr (kA) one();\ntwo();", "one();\ntwo();"),
    ("if constexpr (!kA) one();\ntwo();", "two();"),
    ("if constexpr (!kA)\n  one();\nelse\n  two();\nthree();", "two();\nthree();"),
    (
        "// Why.\nif constexpr (kA) {\n  // Inside.\n  one();\n\n  two();\n}  // End.",
        "// Why.\n// Inside.\none();\n\ntwo();  // End.",
    ),
    ("zero();\n\n// Why.\n// More.\nif constexpr (!kA) {\n  one();\n}\n\ntwo();", "zero();\n\ntwo();"),
    (
        "if constexpr (kA) {\n  if constexpr (kB == 2) {\n    one();\n    two();\n  }\n} else {\n  three();\n}",
        "one();\ntwo();",
    ),
    ("if constexpr (!kA) {\n  one();\n} else if constexpr (kB == 2) {\n  two();\n} else {\n  three();\n}", "two();"),
    ("if constexpr (!kA) {\n  one();\n} else if (x) {\n  two();\n}", "if (x) {\n  two();\n}"),
    ("if constexpr (kUnknown) {\n  if constexpr (kA) one();\n}", "if constexpr (kUnknown) {\n  one();\n}"),
    ("if constexpr (kA) {\n#pragma unroll\n  for (;;) f();\n}", "#pragma unroll\nfor (;;) f();"),
    ("if constexpr (!kUnknown && kA && kB == 2) f();", "if constexpr (!kUnknown) f();"),
    ("if constexpr (kA && !kUnknown) f();", "if constexpr (!kUnknown) f();"),
    ("if constexpr (kA && x == 1 && kA && y(2, 3)) f();", "if constexpr (x == 1 && y(2, 3)) f();"),
    ('s("if constexpr (kA) {");  // if constexpr (kA) {', 's("if constexpr (kA) {");  // if constexpr (kA) {'),
    ("if constexpr (!kA) {\n  one();\n} else if constexpr (kB == 3) {\n  two();\n}\nthree();", "three();"),
    (
        "if constexpr (x) {\n  one();\n} else if constexpr (kA) {\n  two();\n} else {\n  three();\n}",
        "if constexpr (x) {\n  one();\n} else {\n  two();\n}",
    ),
    (
        "if constexpr (x) {\n  one();\n} else if constexpr (!kA) {\n  two();\n} else {\n  three();\n}",
        "if constexpr (x) {\n  one();\n} else {\n  three();\n}",
    ),
    ("if constexpr (x) {\n  one();\n} else if constexpr (!kA) {\n  two();\n}", "if constexpr (x) {\n  one();\n}"),
    ("if (x) one();\nelse\n  if constexpr (kA) two();", "if (x) one();\nelse\n  two();"),
    ("if constexpr (kA) {\n} else {\n  one();\n}\ntwo();", "two();"),
    ("if constexpr (kA) {\n  auto f = [&](int i) {\n    return i;\n  };\n}", "auto f = [&](int i) {\n  return i;\n};"),
    # Plain conditions, as far as constants decide them.
    ("if (kA) one();\ntwo();", "one();\ntwo();"),
    ("if (x.y && !kA && f()) {\n  one();\n} else if (z) {\n  two();\n}", "if (z) {\n  two();\n}"),
    ("if (kA && f(x)) one();", "if (f(x)) one();"),
    ("if (x.y || z && !kA) one();", "if (x.y || z && !kA) one();"),
    ("if (x || kA && y.z) one();", "if (x || kA && y.z) one();"),
    ("if (!kA || x.y || f() || kB == 3) one();", "if (x.y || f()) one();"),
    ("if (x.y || kA) one();", "one();"),
    ("for (;;)\n  if (kA) one();", "for (;;)\n  if (kA) one();"),
    ("if (x) {\n  one();\n} else {\n  // Why.\n  if constexpr (!kA) two();\n}", "if (x) {\n  one();\n}"),
    ("if constexpr (kA) {\n  if constexpr (!kA) one();\n}\ntwo();", "two();"),
    # Operands of `? :`.
    ("x = kA ? one : two;", "x = one;"),
    ("f(y, !kA ? one : kB > 2 ? two : x ? three : four);", "f(y, x ? three : four);"),
    ("x = y + (kA ? 0 : z);", "x = y;"),
    ("x = y - (kA ? 0 : z);", "x = y - 0;"),
    ("x = f(kA ? 0 : z) + (kA ? y * 2 : z);", "x = f(0) + (y * 2);"),
    ("return x ? (kA ? one : two) : three;", "return x ? one : three;"),
    ("x =\n    kA ? one : two;", "x = one;"),
    # A function's own constants, and what they leave behind.
    ("constexpr bool kC = kA && kB == 2;\nif (kC && x) one();", "if (x) one();"),
    ("constexpr bool kC = kA && x;\nif (kC) one();", "constexpr bool kC = x;\nif (kC) one();"),
    ("const bool c = !kA && (x || p.y);\nif (c) one();\ntwo();", "two();"),
    ("const bool c = kA && (!kA || x < y) && p.y;\nif (c) one();", "const bool c = x < y && p.y;\nif (c) one();"),
    ("bool b = false;\nif (!b && x.y) one();\nif (x || b) g();\nif (kA) h();", "if (x.y) one();\nif (x) g();\nh();"),
    ("bool b = false;\nif (kA) g(b);\nif (!b) one();", "bool b = false;\ng(b);\nif (!b) one();"),
    ("// Why.\nint a = max_i32(x, 1);\nif (!kA) g(a);\ntwo();", "two();"),
    ("bool done = true;\nif constexpr (!kA) done = g();\nif (done) one();", "one();"),
    ("bool f = true;\nif (x) f = g();\nif (f) one();", "bool f = true;\nif (x) f = g();\nif (f) one();"),
    ("// One.\nint a = x + 1;\n// Two.\nint b = f();\nif (!kA) g(a);\ntwo();", "// Two.\nint b = f();\ntwo();"),
    ("// Both.\nint a = x + 1;\nint b = 2;\nif (!kA) g(a);\ntwo(b);", "// Both.\nint b = 2;\ntwo(b);"),
    ("#pragma unroll 1\nfor (;;) {\n  one();\n  if constexpr (kA) break;\n}\ntwo();", "one();\ntwo();"),
    (
        "for (;;) {\n  if (x) break;\n  if constexpr (kA) break;\n}",
        "for (;;) {\n  if (x) break;\n  break;\n}",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "result"), FOLDED)
def test_fold(text, result):
    def function(statements: str) -> str:
        lines = [line if line.startswith("#") else f"  {line}".rstrip() for line in statements.split("\n")]
        return "\n".join(["void f() {", "  zero();", *lines, "  end();", "}"])

    assert fold(Code(function(text)), {"kA": True, "kB": 2}) == function(result)


def test_fold_refuses_what_it_cannot_replace():
    for text, words in (
        ("for (;;)\n  if constexpr (kA) f();", "body of another statement"),
        ("if constexpr (!kA) { f(); } g();", "a line that goes on"),
    ):
        with pytest.raises(TemplateError, match=words):
            fold(Code(f"void f() {{\n{text}\n}}"), {"kA": True})


class Program:
    """Random nested branches, as text and as what they call."""

    def __init__(self, seed: int) -> None:
        self.random, self.calls = random.Random(seed), 0
        self.text = "void f() {\n" + self.statements(1, 3) + "}\n"

    def condition(self, depth: int = 2) -> str:
        pick = self.random.randrange(7 if depth else 3)
        if pick < 3:
            return self.random.choice(
                ("kA", "!kB", "kN == 2", "3 > kN", "-1 < kN - 2", "x", "!y", "true", "kN % 2 == 1")
            )
        operator = self.random.choice(("&&", "||"))
        inner = f"{self.condition(depth - 1)} {operator} {self.condition(depth - 1)}"
        return f"({inner})" if pick < 6 else f"!({inner})"

    def statements(self, level: int, depth: int) -> str:
        return "".join(self.statement(level, depth) for _ in range(self.random.randint(1, 3)))

    def call(self, level: int) -> str:
        self.calls += 1
        return f"{'  ' * level}c{self.calls}();\n"

    def statement(self, level: int, depth: int) -> str:
        pad = "  " * level
        if depth == 0 or self.random.random() < 0.3:
            return self.call(level)
        if self.random.random() < 0.2:
            text = f"{pad}if constexpr ({self.condition()})\n{self.call(level + 1)}"
            return text + (f"{pad}else\n{self.call(level + 1)}" if self.random.random() < 0.5 else "")
        text = f"{pad}if constexpr ({self.condition()}) {{\n{self.statements(level + 1, depth - 1)}{pad}}}"
        for _ in range(self.random.randrange(3)):
            text += f" else if constexpr ({self.condition()}) {{\n{self.statements(level + 1, depth - 1)}{pad}}}"
        if self.random.random() < 0.5:
            text += f" else {{\n{self.statements(level + 1, depth - 1)}{pad}}}"
        return text + "\n"


def called(text: str, values: dict[str, int | bool]) -> list[str]:
    """What a program calls, every name having a value."""
    code = Code(text)
    words = code.words

    def statement(at: int, runs: bool) -> int:
        if words[at] == "{":
            at += 1
            while words[at] != "}":
                at = statement(at, runs)
            return at + 1
        if words[at] != "if":
            if runs:
                calls.append(words[at])
            return at + 4
        end = code.partner[at + 2]
        value = evaluate(words[at + 3 : end], values)
        assert value is not None
        at = statement(end + 1, runs and bool(value))
        return statement(at + 1, runs and not value) if words[at] == "else" else at

    calls: list[str] = []
    statement(words.index("{"), True)
    return calls


@pytest.mark.parametrize("seed", range(60))
def test_folding_keeps_the_meaning(seed):
    text = Program(seed).text
    known = {"kA": bool(seed & 1), "kB": bool(seed & 2), "kN": seed % 5}
    folded = fold(Code(text), known)
    assert fold(Code(folded), known) == folded
    for x, y in itertools.product((False, True), repeat=2):
        assert called(folded, known | {"x": x, "y": y}) == called(text, known | {"x": x, "y": y})
    decided = [
        part for part in re.findall(r"if constexpr \((.*)\)", folded) if evaluate(Code(part).words, known) is not None
    ]
    assert not decided
