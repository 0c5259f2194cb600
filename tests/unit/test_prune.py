"""Pruning: what stays, what goes, comments with what they explain, and errors for what is not understood."""

from __future__ import annotations

import itertools
import os
import re

import pytest

from fa2gen.codegen import render_kernel
from fa2gen.codegen.lexer import TemplateError
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


_CHOICES = (((128, 16), (64, 16), (40, 2), (40, 16)), ("bf16", "fp16"), (False, True), (1, 2, 3), ("online", "guarded"))
# Every fourth diagonal holds each pair of choices: 24 of 96, and each takes 0.1 s to render, parse and search.
_PLACES = [
    places
    for places in itertools.product(*(range(len(choice)) for choice in _CHOICES))
    if sum(places) % 4 == 0 or os.environ.get("FA2GEN_TEST_FULL")
]
CASES = [
    (KernelSpec(head_dim=d, dtype=dtype, causal=causal, alignment=align), FwdConfig(num_stages=stages, softmax=softmax))
    for (d, align), dtype, causal, stages, softmax in (
        [choice[place] for choice, place in zip(_CHOICES, places, strict=True)] for places in _PLACES
    )
]


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
