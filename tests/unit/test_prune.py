"""Pruning: what stays, what goes, comments with what they explain, and errors for what is not understood."""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest

from fa2gen.codegen import render_kernel
from fa2gen.codegen.evaluate import evaluate
from fa2gen.codegen.fold import fold
from fa2gen.codegen.lexer import Code, TemplateError
from fa2gen.codegen.prune import parse, prune
from fa2gen.codegen.render import full_parts
from fa2gen.spec import FwdConfig, KernelSpec

KERNEL = 'extern "C" __global__ void __launch_bounds__(kThreads) k(const __grid_constant__ P p) {{\n  {}\n}}\n'


def pruned(text: str, use: str = "f();") -> str:
    """The text without its kernel, whose body is `use`."""
    kernel = KERNEL.format(use)
    first, last = prune([text, kernel])
    assert last == kernel
    return first


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


def test_functions_constants_and_types_go_when_nothing_names_them():
    text = """\
#define FUNC __device__ \\
  inline
#define GONE 1

using u32 = unsigned int;
using gone = int;
struct Used {
  u32 f;
};
struct Gone {
  u32 x;
};
constexpr int kA = 1, kB = kA + 1;
constexpr int kGone[2] = {1, 2};

FUNC int helper(Used u) { return u.helper_gone + kB; }
FUNC int helper_gone() { return 0; }
FUNC int f() { return helper(Used{1}); }
"""
    assert pruned(text) == re.sub(
        r"(#define GONE 1\n|using gone.*\n|struct Gone(.|\n)*?};\n|.*kGone.*\n|.*_gone\(\).*\n)", "", text
    )


def test_a_templates_parameter_hides_a_constant():
    text = "constexpr int kA = 1;\n\ntemplate <int kA>\nint f() {\n  g();\n  return kA;\n}\n"
    assert pruned(text, "f<2>();") == text.split("\n\n")[1]


def test_a_constant_that_only_a_pragma_names_stays():
    text = "constexpr int kSteps = 4;\n\nvoid f() {\n#pragma unroll kSteps\n  for (;;) g();\n}\n"
    assert pruned(text) == text


def test_comments_go_with_what_they_explain():
    text = """\
// ---- Part: over all of it

// A section with nothing left.

// Of gone.
int gone() { return 0; }  // trailing

// A section.
// Two lines.

int other_gone() { return 0; }
// Of f,
// two lines.
int f() { return 0; }  // end
"""
    assert (
        pruned(text)
        == """\
// ---- Part: over all of it

// A section.
// Two lines.

// Of f,
// two lines.
int f() { return 0; }  // end
"""
    )
    assert pruned(text, "") == ""


def test_specialisations_are_chosen_by_the_argument():
    text = """\
struct bf16 {};
struct fp16 {};
using Element = bf16;

template <class T>
float f(T x);
template <>
float f<bf16>(bf16 x) {
  return 1;
}
template <>
float f<fp16>(fp16 x) {
  return 2;
}
template <class T>
float g(T x) {
  return f<T>(x);
}
"""
    bf16_only = re.sub(
        r"struct fp16 {};\n|template <>\nfloat f<fp16>(.|\n)*?\n}\n|template <class T>\nfloat g(.|\n)*", "", text
    )
    assert pruned(text, "f<Element>(x);") == bf16_only
    # Without an argument, or with a template's parameter, any may be meant.
    assert pruned(text, "f(x);").count("template <>") == 2
    assert pruned(text, "g(x);").count("template <>") == 2


def test_assertions_stay_with_what_they_speak_of():
    text = 'constexpr int kA = 1;\nconstexpr int kB = 2;\nstatic_assert(kA < kB, "order");\nint f() { return kA; }\n'
    assert pruned(text) == text
    assert pruned(text, "") == ""


def test_dead_branches_take_their_helpers_along():
    text = """\
constexpr int kStages = 2;
constexpr bool kOne = kStages == 1;

int one() { return 1; }
int two() { return 2; }
template <bool kOne>
int three() {
  if constexpr (kOne) return one();
  return 3;
}
int f() {
  if constexpr (kOne) return one();
  return two();
}
"""
    assert pruned(text) == "int two() { return 2; }\nint f() { return two(); }\n"
    # A template's own parameter hides the constant of that name.
    assert "if constexpr (kOne) return one();" in pruned(text, "three<true>();")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("#include <x>\n", "line 1: .*#define"),
        ("\n#if 1\nint a = 1;\n#endif\n", "line 2: .*#define"),
        ("int f() { return 1; ", "line 1: '{' is never closed"),
        ("int f) { return 1; }", "closes nothing"),
        ("int a = 1; #define X", "stray '#'"),
        ("int a = `1`;", "stray '`'"),
        ('const char* a = "x;\n', "stray '\"'"),
        ("int a = 1", "without an end"),
        ("struct { int a; };", "name is not found"),
        ("enum class E { kOne };", "name is not found"),
        ("using namespace x;", "name is not found"),
        ("template <class T;", "never closed"),
    ],
)
def test_what_is_not_understood_is_an_error(text, match):
    with pytest.raises(TemplateError, match=match):
        prune([text, KERNEL.format("")])


def test_text_without_a_kernel_is_an_error():
    with pytest.raises(TemplateError, match="__global__"):
        prune(["int f() { return 1; }\n"])


CASES = [
    (KernelSpec(head_dim=d, dtype=dtype, causal=causal, alignment=align), FwdConfig(num_stages=stages, softmax=softmax))
    for (d, align), dtype, causal, stages, softmax in itertools.product(
        ((128, 16), (64, 16), (40, 2), (40, 16)), ("bf16", "fp16"), (False, True), (1, 2, 3), ("online", "guarded")
    )
]  # fmt: skip


@pytest.mark.parametrize("platform", ["cuda", "host"])
def test_every_item_of_a_kernel_is_named_by_another(platform):
    for spec, config in CASES:
        source = render_kernel(spec, config, platform)
        text = source.body if platform == "host" else source.text
        items = [item for item in parse(text) if item.kind != "heading"]
        words = re.findall(r"[A-Za-z_]\w*", re.sub(r"//[^\n]*", "", text))
        for item in items:
            own = re.findall(r"[A-Za-z_]\w*", re.sub(r"//[^\n]*", "", item.code.text))
            for name in item.names:
                assert item.kind == "kernel" or words.count(name) > own.count(name), (source.entry, name)


def test_a_kernel_holds_no_decided_branch():
    constants = re.compile(r"\bk(HeadDim|HeadDimPadded|VectorBytes|Causal|QInRegs|Guarded|NumStages|Fp16)\b")
    for spec, config in CASES:
        conditions = re.findall(r"if constexpr \((.*)\)", render_kernel(spec, config).text)
        assert not [condition for condition in conditions if constants.search(condition)]


def test_what_a_kernel_does_not_use_is_not_in_it():
    d128 = render_kernel(KernelSpec(), FwdConfig()).text
    for name in (
        "fp16",
        "ld_global",
        "atomic_add",
        "guarded_softmax",
        "kGuardLimit",
        "bar_arrive",
        "kChunks",
        "min_f32",
    ):
        assert not re.search(rf"^[^/\n]*\b{name}\b(?!\.)", d128, re.M), name
    other = render_kernel(KernelSpec(head_dim=40, dtype="fp16", alignment=2), FwdConfig(softmax="guarded")).text
    for name in ("ld_global", "atomic_add<u32>", "guarded_softmax", "kGuardLimit", "kChunks"):
        assert name in other, name
    for name in ("bf16", "cp_async16", "atomic_add<float>"):
        assert not re.search(rf"^[^/\n]*\b{re.escape(name)}", other, re.M), name


def test_pruning_again_changes_nothing():
    for spec, config in CASES[::7]:
        parts = prune(full_parts(spec, config))
        assert prune([part for part in parts if part]) == [part for part in parts if part]


def test_pruning_takes_milliseconds():
    render_kernel(KernelSpec(), FwdConfig())
    configs = [FwdConfig(block_m=m, block_n=n, step_n=n) for m in (64, 128, 256) for n in (32, 64, 96, 128)]
    texts = [full_parts(KernelSpec(), config) for config in configs]
    prune(texts[0])
    start = time.process_time()
    for parts in texts:
        prune(parts)
    # 2.5 ms on a desktop; the bound leaves room for a slow machine.
    assert (time.process_time() - start) / len(texts) < 0.02
