"""Random calls with their gradients: those of ``tests/fuzz_calls.py``, and what a backward adds to them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa2gen.constraints import default_config
from fa2gen.gate import GateReport, check_backward
from fa2gen.hardware import ArchLimits
from fa2gen.runtime import attention
from fa2gen.spec import NATIVE_HEAD_DIMS, BwdConfig, KernelSpec
from tests.fuzz_calls import LAYOUTS, Call, PoolKernel, draw_call, make_tensors, memory, random_config

POOL_SEED = 50


@dataclass(frozen=True)
class Kernels:
    """The kernels of a call: one of the forward, three of the backward."""

    forward: PoolKernel
    spec: KernelSpec
    config: BwdConfig


@dataclass(frozen=True)
class GradientCall:
    """One call and its gradients; ``repr`` is what a failing test prints.

    Attributes:
        call: Inputs and options of the forward.
        kernels: What it needs.
        dout_layout: Of the output's gradient, one of ``LAYOUTS``.
        dlse: The LSE has a gradient too.
    """

    call: Call
    kernels: Kernels
    dout_layout: str
    dlse: bool


def gradient_pool(arch: ArchLimits, *, count: int, max_head_dim: int = 256) -> list[Kernels]:
    """``count`` sets of kernels, the same for every run; a forward runs its default config."""
    rng = random.Random(POOL_SEED)
    pool = []
    for _ in range(count):
        head_dims = [d for d in (NATIVE_HEAD_DIMS if rng.random() < 0.6 else range(8, 257, 8)) if d <= max_head_dim]
        spec = KernelSpec(
            kind="bwd",
            head_dim=rng.choice(head_dims),
            dtype=rng.choice(("bf16", "bf16", "fp16")),
            causal=rng.random() < 0.5,
            gqa_ratio=rng.choice((1, 1, 2, 3, 4, 7, 8)),
            deterministic=rng.random() < 0.4,
        )
        config = random_config(spec, arch, rng) if rng.random() < 0.9 else default_config(spec)
        assert isinstance(config, BwdConfig)
        forward = dataclasses.replace(spec, kind="fwd", deterministic=False)
        pool.append(Kernels(PoolKernel(forward, default_config(forward)), spec, config))
    return pool


def draw_gradient_call(seed: int, pool: Sequence[Kernels], **limits: int) -> GradientCall:
    """The call of a seed; ``limits`` are those of :func:`tests.fuzz_calls.draw_call`."""
    rng = random.Random(f"gradients {seed}")
    kernels = rng.choice(pool)
    call = draw_call(seed, [kernels.forward], **limits)
    # A hidden infinity meets a weight of 0 in dq too: NaN there is no fault of the kernel.
    call = dataclasses.replace(call, data="normal", hidden=0) if call.data == "hidden" else call
    dout_layout = rng.choice(LAYOUTS)
    if dout_layout == "expanded_rows" and (call.layouts[0] == "expanded_rows" or call.data == "constant"):
        # Every row is the same: its roundings do not cancel, as the gate's rule has it, but add up over all queries.
        dout_layout = "contiguous"
    return GradientCall(call, kernels, dout_layout, rng.random() < 0.3)


def run_gradient_call(drawn: GradientCall, device: str | torch.device, backend: str = "auto") -> GateReport:
    """Forward, backward, and every element of the gradients by the gate's rule."""
    call = drawn.call
    tensors = [x.detach().requires_grad_() for x in make_tensors(call, device)]
    generator = torch.Generator(device).manual_seed(call.seed + 1)
    base, dout = memory(tuple(tensors[0].shape), drawn.dout_layout, call, device)  # type: ignore[arg-type]
    base.copy_(torch.randn(base.shape, generator=generator, device=device))
    options: dict[str, Any] = {**call.options, "return_lse": True, "backend": backend}
    if backend == "reference":
        options["config"] = None
    else:
        options |= {"backward_config": drawn.kernels.config, "deterministic": drawn.kernels.spec.deterministic}
    out, lse = attention(*tensors, **options)
    outputs, given, dlse = [out], [dout], None
    if drawn.dlse:
        dlse = torch.randn(lse.shape, generator=generator, device=device)
        outputs, given = [out, lse], [dout, dlse]
    grads = torch.autograd.grad(outputs, tensors, given)
    assert all(grad.is_contiguous() for grad in grads)
    inputs: list[Tensor] = [x.detach() for x in tensors]
    scale = call.softmax_scale
    return check_backward(grads, *inputs, dout, causal=call.spec.causal, softmax_scale=scale, dlse=dlse)
