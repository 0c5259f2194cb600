"""Gradients of a trained model by each attention beside those in float32.

Loss curves show that training goes the same way. What they cannot show is a gradient that is somewhat wrong: a model
learns on, past it. Here it shows at once, as its distance from the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .model import ATTENTIONS, GPT, Attention, Shape
from .training import free_memory

PARTS = ("q", "k", "v")
LIMIT = 2.0
"""How many times as far off as the reference's a gradient may be. Right libraries are at 0.98 to 1.09 (H200), as all
else in the model is rounded alike, to 0.3 to 1.4 %; so a gradient of half the size is at 30 and more."""
CHECKED_TOKENS = 8192
"""Whose loss the gradients are of; at least one sequence. The float32 formula keeps 4 bytes times heads times these
times the context, several times, of one layer at a time."""

# (inputs, targets) of a batch.
Batch = tuple[Tensor, Tensor]
# Of each layer, those of the weights that make q, k and v.
Gradients = list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class GradientErrors:
    """How far the gradients of one attention's model are from those in float32.

    Attributes:
        attention: Whose.
        relative: Norm of the difference over the exact norm, by layer and part.
    """

    attention: str
    relative: list[tuple[float, ...]]

    def worst(self, part: int) -> float:
        """Largest of the layers."""
        return max(layer[part] for layer in self.relative)


def gradient_errors(
    shape: Shape,
    layers: int,
    context: int,
    weights: Mapping[str, Tensor],
    batch: Batch,
    attentions: Mapping[str, Attention],
) -> list[GradientErrors]:
    """Errors of the gradients that reach a model's q, k and v projections, for each attention.

    Args:
        shape, layers, context: The model.
        weights: Its bf16 state; all models here have just these values.
        batch: What the loss is of.
        attentions: By name.
    """

    def gradients(attend: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> Gradients:
        free_memory(batch[0].device)
        with batch[0].device:
            model = GPT(shape, layers, context, attend).to(dtype)
        model.load_state_dict(weights)
        model(*batch).backward()
        return [_of_the_projection(block).double().chunk(len(PARTS)) for block in model.blocks]

    exact = gradients(_exact_attention, torch.float32)
    found = []
    for name, attention in attentions.items():
        with attention.around():
            own = gradients(attention.call, torch.bfloat16)
        pairs = zip(own, exact, strict=True)
        found.append(GradientErrors(name, [tuple(map(_relative, *layer)) for layer in pairs]))
    return found


def largest_ratio(own: GradientErrors, reference: GradientErrors) -> tuple[float, int, str]:
    """How many times as far off as the reference's the own gradients are where that is most; its layer and part."""
    return max(
        (_ratio(one, other), layer, part)
        for layer, (ours, theirs) in enumerate(zip(own.relative, reference.relative, strict=True))
        for part, one, other in zip(PARTS, ours, theirs, strict=True)
    )


def sentence(own: GradientErrors, reference: GradientErrors) -> str:
    """The verdict in words."""
    ratio, layer, part = largest_ratio(own, reference)
    return (
        f"the gradients of {own.attention} {'agree' if ratio <= LIMIT else 'DO NOT AGREE'} with those of "
        f"{reference.attention}: at most {ratio:.3g} times as far from float32 (of {part} in layer {layer + 1}); up to "
        f"{LIMIT:g} times is agreement"
    )


def _ratio(one: float, other: float) -> float:
    """What is not a number is infinitely far off."""
    if not math.isfinite(one):
        return math.inf
    return one / other if other else math.inf if one else 0.0


def _of_the_projection(block: nn.Module) -> Tensor:
    return cast(Tensor, block.get_parameter("qkv.weight").grad)


def _exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's formula. All scores of a layer are in memory, but of one layer at a time."""

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with ATTENTIONS["math"].around():
            return ATTENTIONS["math"].call(q, k, v)

    return cast(Tensor, checkpoint(formula, q, k, v, use_reentrant=False))


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
