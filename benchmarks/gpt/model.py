"""GPT-3's layers in torch, with an attention of the caller's, and the FLOPs of training them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2gen.bench.peers import first_line
from fa2gen.errors import UnsupportedError
from fa2gen.runtime import attention

from .text import VOCABULARY


@dataclass(frozen=True)
class Shape:
    """A layer's sizes.

    Attributes:
        hidden: Width of the model; the perceptron is four times as wide.
        heads: Attention heads, of ``hidden / heads`` columns each.
        peak_rate: Largest learning rate.
    """

    hidden: int
    heads: int
    peak_rate: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {"1.3b": Shape(2048, 16, 2e-4), "2.7b": Shape(2560, 32, 1.6e-4), "tiny": Shape(32, 2, 3e-4)}
"""Table 2.1 of the GPT-3 paper, its learning rates too, and one for a test. With a rate of 3e-4 roundings alone moved
the 2.7B's losses as far as another seed did, torch's math formula's too. The paper's 24 heads of 128 for the 1.3B do
not make up its hidden size of 2048: implementations have 16."""


@dataclass(frozen=True)
class Attention:
    """Causal attention by one library.

    Attributes:
        title: What it is.
        call: (q, k, v) -> output, all (batch, seqlen, heads, head_dim), differentiable.
        around: Makes the context that a whole training run needs.
    """

    title: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def _fa2gen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTIONS = {
    "fa2gen": Attention("fa2gen", _fa2gen),
    "flash": Attention("FlashAttention-2 as torch ships it", _sdpa, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "cudnn": Attention("cuDNN through torch", _sdpa, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    "math": Attention("torch's formula, all scores in memory", _sdpa, lambda: sdpa_kernel(SDPBackend.MATH)),
}
"""By the name that the command line and the results use."""


def require_working(name: str, shape: Shape, device: torch.device) -> None:
    """Raise unless an attention runs here, forward and backward, so that no series of runs ends in the middle.

    Raises:
        UnsupportedError: A backend of SDPA is missing in this torch, or does not take the shape on this device.
    """
    size = (1, 16, shape.heads, shape.head_dim)
    x = torch.zeros(size, dtype=torch.bfloat16, device=device, requires_grad=True)
    try:
        with ATTENTIONS[name].around():
            ATTENTIONS[name].call(x, x, x).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UnsupportedError(f"--attention {name} does not run on {device}: {first_line(error)}") from None


class Block(nn.Module):
    """Attention and perceptron, each behind a layer norm and beside a residual."""

    def __init__(self, shape: Shape, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._heads = (3, shape.heads, shape.head_dim)
        self._attend = attend
        self.norm_1 = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.proj = nn.Linear(shape.hidden, shape.hidden)
        self.norm_2 = nn.LayerNorm(shape.hidden)
        self.fc = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.out = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        # Views of one projection, which every library here reads in place: (batch, seqlen, heads, head_dim).
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, self._heads).unbind(2)
        x = x + self.proj(self._attend(q, k, v).flatten(2))
        return x + self.out(F.gelu(self.fc(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT with learned positions and one matrix for embedding and output.

    Args:
        shape, layers, context: Its size.
        attend: (q, k, v) -> causal attention, (batch, seqlen, heads, head_dim).
    """

    def __init__(
        self, shape: Shape, layers: int, context: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.positions = nn.Embedding(context, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(layers))
        self.norm = nn.LayerNorm(shape.hidden)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's: what adds to the residual starts smaller, the deeper the model.
                adds = name.endswith(("proj.weight", "out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy (nats per token, float32) of ``targets``; both (batch, seqlen) int64."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def step_flops(shape: Shape, layers: int, context: int, tokens: int, *, causal: bool = False) -> float:
    """FLOPs of a training step, forward and backward, by Megatron-LM's count without recomputation
    (Narayanan et al. 2021, equation 3, whose 96 is 72 then): 72 B S L h^2 (1 + S / 6h + V / 12 L h).

    Args:
        shape, layers, context: The model; context is S.
        tokens: B S, of a step.
        causal: False, as Megatron-LM and the FlashAttention-2 paper count: attention's products in full, though the
            mask spares half of them. True: half of them.
    """
    hidden = shape.hidden
    attention_share = context / (6 * hidden) / (2 if causal else 1)
    return 72 * tokens * layers * hidden**2 * (1 + attention_share + VOCABULARY / (12 * layers * hidden))
