"""One training run: bf16 weights with float32 master weights, AdamW, a warm-up and a cosine, and a clock.

The weights that the layers see are bf16 and so are their gradients; AdamW's moments and the weights that it updates are
float32, as Megatron-LM trains. Autocast would keep float32 weights and cast them and the residual stream in every
layer: more memory traffic in each step, for the same products in bf16.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import GPT, Attention, Shape
from .text import Batches

PRECISION = "bf16 weights and gradients, float32 master weights and AdamW moments"
_LAST_RATE, _RATE_WARMUP = 0.1, 20  # of the peak; steps
_BETAS, _WEIGHT_DECAY, _CLIP = (0.9, 0.95), 0.1, 1.0
# Reading a loss waits for the GPU, which then idles until the next step is issued: seldom.
_STEPS_PER_REPORT = 10


@dataclass(frozen=True)
class Measured:
    """What a run gave.

    Attributes:
        losses: Cross entropy of each step's batch before its update, nats per token.
        ms: Wall time of each step: between CUDA events at the ends of consecutive steps; on the CPU, its clock.
        peak_bytes: Most memory that torch held allocated; None on the CPU.
    """

    losses: list[float]
    ms: list[float]
    peak_bytes: int | None


class MasterAdamW:
    """AdamW on float32 copies of a model's weights.

    Args:
        model: Its weights are overwritten by each step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = list(model.parameters())
        self._masters = [weight.detach().float().clone() for weight in self._weights]
        # Biases and norms do not decay.
        groups = [
            {"params": [x for x in self._masters if x.dim() > 1], "weight_decay": _WEIGHT_DECAY},
            {"params": [x for x in self._masters if x.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, betas=_BETAS, fused=True)

    def step(self, rate: float) -> None:
        """Update the weights from their gradients, which are dropped."""
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, _CLIP)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, self._weights, strict=True):
                weight.copy_(master)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up from near 0 to the peak in a straight line, down to a tenth along a cosine."""
    if step < _RATE_WARMUP:
        return peak * (step + 1) / _RATE_WARMUP
    share = (step - _RATE_WARMUP) / max(1, steps - _RATE_WARMUP)
    return peak * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share)))


class _Laps:
    """Times between consecutive calls of :meth:`lap`, without waiting for the GPU at each."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []

    def lap(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        if self._cuda:
            torch.cuda.synchronize()
        return [
            start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else 1e3 * (end - start)
            for start, end in zip(self._marks, self._marks[1:])  # noqa: B905 (one shorter)
        ]


def train(
    shape: Shape,
    layers: int,
    attention: Attention,
    batches: Batches,
    *,
    steps: int,
    context: int,
    seed: int,
    device: torch.device,
    compiled: bool = False,
    progress: Callable[[int, float], None] = lambda _steps, _loss: None,
    finish: Callable[[GPT], None] = lambda _model: None,
) -> Measured:
    """Train a fresh model.

    Args:
        shape, layers, context: The model.
        steps: How many.
        attention: Who computes its attention.
        batches: A step each, at least ``steps`` of them.
        seed: Of the model's first weights, and of nothing else: the batches are every run's.
        device: Where.
        compiled: Through ``torch.compile``.
        progress: Called now and then with the steps done and the last loss.
        finish: Called with the trained model.
    """
    free_memory(device)
    torch.manual_seed(seed)
    with device:
        model = GPT(shape, layers, context, attention.call).bfloat16()
    if compiled:
        # A program compiled for another run would serve this one, and with it the kernels that SDPA chose then.
        torch.compiler.reset()
    forward: Callable[[Tensor, Tensor], Tensor] = torch.compile(model) if compiled else model
    optimizer, laps = MasterAdamW(model), _Laps(device)
    losses = torch.zeros(steps, device=device)
    with attention.around():
        laps.lap()
        for step in range(steps):
            loss = forward(*batches[step])
            loss.backward()
            optimizer.step(learning_rate(step, steps, shape.peak_rate))
            losses[step] = loss.detach()
            laps.lap()
            if (step + 1) % _STEPS_PER_REPORT == 0 or step + 1 == steps:
                progress(step + 1, float(loss.detach()))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    finish(model)
    return Measured(losses.tolist(), laps.milliseconds(), peak)


def free_memory(device: torch.device) -> None:
    """The run before this one is to leave no trace: its model sits in reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
