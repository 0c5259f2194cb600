"""``benchmarks/train_gpt.py gradients``: right gradients agree, and what curves would not show does not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import train_gpt
from benchmarks.gpt.gradients import LIMIT, PARTS, GradientErrors, gradient_errors, largest_ratio, sentence
from benchmarks.gpt.model import ATTENTIONS, GPT, SHAPES, Attention
from fa2gen.runtime import attention

LAYERS, CONTEXT = 2, 32


class Scaled(torch.autograd.Function):
    """Its argument, with a gradient that is wrong by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


def scaled(x: Tensor, factor: float) -> Tensor:
    result: Tensor = Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return result


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def errors_of(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[GradientErrors, GradientErrors]:
    torch.manual_seed(0)
    model = GPT(SHAPES["tiny"], LAYERS, CONTEXT, own).bfloat16()
    tokens = torch.randint(1, 256, (2, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    attentions = {"fa2gen": Attention("", call), "math": ATTENTIONS["math"]}
    found = gradient_errors(
        SHAPES["tiny"], LAYERS, CONTEXT, model.state_dict(), (tokens[:, :-1], tokens[:, 1:]), attentions
    )
    assert [one.attention for one in found] == ["fa2gen", "math"]
    return found[0], found[1]


def test_right_gradients_agree() -> None:
    ours, theirs = errors_of(own)
    ratio, _, part = largest_ratio(ours, theirs)
    assert 0.5 < ratio < 1.5
    assert part in PARTS
    assert "the gradients of fa2gen agree with those of math" in sentence(ours, theirs)
    for one in (ours, theirs):
        assert len(one.relative) == LAYERS
        assert all(0 < error < 0.05 for layer in one.relative for error in layer)
        assert one.worst(1) == max(one.relative[0][1], one.relative[1][1])


@pytest.mark.parametrize("wrong", ["zero", "half", "sign", "nan"])
@pytest.mark.parametrize("part", range(3), ids=PARTS)
def test_wrong_gradients_do_not(part: int, wrong: str) -> None:
    factor = {"zero": 0.0, "half": 0.5, "sign": -1.0, "nan": math.nan}[wrong]

    def call(*tensors: Tensor) -> Tensor:
        changed = [scaled(x, factor) if index == part else x for index, x in enumerate(tensors)]
        return own(changed[0], changed[1], changed[2])

    ours, theirs = errors_of(call)
    ratio, layer, found = largest_ratio(ours, theirs)
    assert ratio > 10 * LIMIT
    # What reaches the last layer's projections has met this layer's error only.
    last = [one / other for one, other in zip(ours.relative[-1], theirs.relative[-1], strict=True)]
    assert max(range(3), key=last.__getitem__) == part or wrong == "nan"
    assert f"DO NOT AGREE with those of math: at most {ratio:.3g} times" in sentence(ours, theirs)
    assert f"of {found} in layer {layer + 1}" in sentence(ours, theirs)


def test_no_error_at_all() -> None:
    exact, near = GradientErrors("math", [(0.0, 0.0, 0.0)]), GradientErrors("fa2gen", [(0.0, 1e-9, 0.0)])
    assert largest_ratio(exact, exact)[0] == 0
    assert largest_ratio(near, exact) == (math.inf, 0, "k")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train_gpt.main(["gradients", "--dry-run", "--steps", "40", "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "the gradients of fa2gen agree with those of math" in captured.out
    (path,) = tmp_path.iterdir()
    assert path.name == "tiny_32_1layers_64tokens_40steps_gradients.json"
    document = json.loads(path.read_text())
    assert (document["reference"], document["limit"]) == ("math", LIMIT)
    assert [one["attention"] for one in document["gradients"]] == ["fa2gen", "math"]
    assert document["gradients"][1]["ratio"] == 1
    assert document["loss"] < 5.6
    assert {"gpu", "torch", "command", "text", "method"} <= set(document["provenance"])


def test_wrong_gradients_fail_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Attention("", lambda q, k, v: own(q, k.detach(), v))
    monkeypatch.setitem(train_gpt.ATTENTIONS, "fa2gen", broken)
    code = train_gpt.main(["gradients", "--dry-run", "--steps", "40", "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == 1
    assert "error: the gradients of fa2gen DO NOT AGREE with those of math" in captured.err
    # The measurement is kept all the same.
    assert json.loads(next(tmp_path.iterdir()).read_text())["gradients"][0]["ratio"] > LIMIT
