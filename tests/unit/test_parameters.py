"""Parameters that nobody reads go, with their arguments; what may have an effect stays."""

from __future__ import annotations

import itertools
import re

import pytest

from fa2gen.codegen import render_kernel
from fa2gen.codegen.lexer import Code
from fa2gen.codegen.parameters import unread_parameters, without_parameters
from fa2gen.codegen.prune import parse, prune
from fa2gen.constraints import default_config
from fa2gen.spec import FwdConfig, KernelSpec

KERNEL = """\
extern "C" __global__ void kernel(const __grid_constant__ Params p) {{
  State state;
  {}
}}
"""


def _trimmed(*texts: str) -> list[str]:
    codes = [Code(text) for text in texts]
    unread = unread_parameters(codes)
    return [without_parameters(code, unread) for code in codes]


def test_a_parameter_goes_with_its_arguments() -> None:
    function = "FUNC int f(int a, float (&b)[2], const T<x, y>& c, u32 d) { return a + d; }\n"
    callers = [
        "FUNC int g(int a) { return f(a, m[f(1, b, c, 2)], t, a * (a + 1)) + f(f(1, b, c, a), b, p.c[3], 1); }\n",
        "template <int n>\nFUNC int h() { return f(n, b, c, n < 3); }\n",
    ]
    assert _trimmed(function, *callers) == [
        "FUNC int f(int a, float (&b)[2], u32 d) { return a + d; }\n",
        # The call in m's index keeps b.
        "FUNC int g(int a) { return f(a, m[f(1, b, 2)], a * (a + 1)) + f(f(1, b, a), b, 1); }\n",
        "template <int n>\nFUNC int h() { return f(n, b, n < 3); }\n",
    ]


@pytest.mark.parametrize("argument", ["i++", "--i", "i = 3", "next()", "load<4>(x)"])
def test_an_argument_with_an_effect_keeps_its_parameter(argument: str) -> None:
    texts = [
        "FUNC int f(int a, int b) { return a; }\n",
        f"FUNC int g(int i) {{ return f(i, {argument}) + f(i, 1); }}\n",
    ]
    assert _trimmed(*texts) == texts


def test_what_is_not_understood_stays() -> None:
    texts = [
        "FUNC void nameless(const char*, u32 b) {}\n",
        "template <>\nFUNC int f<2>(int a) { return 1; }\n",
        "FUNC int twice(int a) { return 1; }\n",
        "FUNC int twice(float a) { return 1; }\n",
        "FUNC void pragma(int n) {\n#pragma unroll n\n  for (;;) g();\n}\n",
        "FUNC int caller() { return f<2>(1) + twice(1) + twice(1.f); }\n",
    ]
    assert _trimmed(*texts) == texts


def test_lists_are_filled_as_clang_format_does() -> None:
    long = [f"a_rather_long_argument_{i}" for i in range(6)]
    call = f"  const int result = function(unread, {', '.join(long[:3])},\n{' ' * 30}{', '.join(long[3:])});"
    _, text = _trimmed("FUNC int function(int no, int a, int b, int c, int d, int e, int f) { return a+b+c+d+e+f; }\n",
                       f"FUNC int caller() {{\n{call}\n  return result;\n}}\n")  # fmt: skip
    lines = text.splitlines()
    assert lines[1] == f"  const int result = function({', '.join(long[:3])},"
    assert lines[2] == f"                              {', '.join(long[3:])});"
    assert max(map(len, lines)) <= 120
    assert len(lines[1]) + len(f" {long[3]},") > 120


def test_sentences_about_it_go() -> None:
    text = (
        "// Adds the numbers `a` and 1. `b` is where the caller (`c`) lies. `a` is any number; a sentence that is\n"
        "// long enough to be broken.\nFUNC int f(int a, int b) { return a + 1; }\n"
    )
    assert _trimmed(text) == [
        "// Adds the numbers `a` and 1. `a` is any number; a sentence that is long enough to be broken.\n"
        "FUNC int f(int a) { return a + 1; }\n"
    ]


def test_what_an_argument_was_for_goes_too() -> None:
    text = """\
struct State {
  int kept;
  int lost;  // (read by f alone)
};

FUNC int f(int a, int b) { return a; }

FUNC int g(State& s, int c, int d) {
  const int only = d + 1;
  float unused[3][2];
  return f(s.kept, s.lost + only);
}

"""
    kernel = KERNEL.format("g(state, p.a, p.b);")
    assert prune([text, kernel]) == [
        "struct State {\n  int kept;\n};\n\nFUNC int f(int a) { return a; }\n\n"
        "FUNC int g(State& s) { return f(s.kept); }\n",
        KERNEL.format("g(state);"),
    ]
    assert "int f(int a, int b)" in prune([text, kernel], fixed=1)[0]


@pytest.mark.parametrize("spec", [KernelSpec(), KernelSpec(head_dim=40, causal=True, gqa_ratio=3, alignment=2)])
def test_no_kernel_has_an_unread_parameter(spec: KernelSpec) -> None:
    configs = [default_config(spec)] + [
        FwdConfig(block_m=64, step_n=step, num_stages=stages, softmax=softmax, q_in_regs=in_regs)
        for step, stages, softmax, in_regs in itertools.product((32, 64), (1, 2), ("online", "guarded"), (False, True))
        if stages > 1 or step == FwdConfig.block_n
    ]
    for config in configs:
        body = render_kernel(spec, config).body
        assert not unread_parameters([item.code for item in parse(body) if item.kind == "declaration"])
        assert not re.search(r"\b(frag_q|guard_limit)\b", body) or config.q_in_regs or config.softmax == "guarded"
