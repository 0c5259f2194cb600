"""Gradients of the public function through the emulator: the generated kernels, run on the CPU, beneath autograd.

One spec serves almost all of it: head dims that are padded to 64, causal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fa2gen.errors import InfeasibleError
from fa2gen.gate import check_backward
from fa2gen.runtime import attention, describe
from fa2gen.spec import BwdConfig, KernelSpec
from tests.gradients import call_inputs


def _randn(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def _check(tensors: list[Tensor], dout: Tensor, dlse: Tensor | None = None, scale: float | None = None) -> Any:
    """Gradients by the gate's rule; returns them."""
    out, lse = attention(*tensors, causal=True, softmax_scale=scale, return_lse=True, backend="emulator")
    outputs, given = [out], [dout]
    if dlse is not None:
        outputs, given = [out, lse], [dout, dlse]
    grads = torch.autograd.grad(outputs, tensors, given)
    report = check_backward(grads, *tensors, dout, causal=True, softmax_scale=scale, dlse=dlse)
    assert report.passed, report.text
    assert all(grad.is_contiguous() for grad in grads)
    return grads


@pytest.mark.parametrize(
    ("d", "scale", "seqlens"), [(64, None, (33, 77)), (59, -0.2, (33, 77)), (64, 0.0, (17, 5)), (57, 0.3, (1, 65))]
)
def test_values(d: int, scale: float | None, seqlens: tuple[int, int]) -> None:
    tensors = call_inputs(1, *seqlens, 2, 2, d)
    assert describe(*tensors, causal=True, backend="emulator", backward=True).spec == KernelSpec(
        kind="bwd", head_dim=64, causal=True
    )
    dout = _randn(tensors[0].shape, torch.bfloat16)
    _check(tensors, dout, None, scale)
    _check(tensors, dout, _randn(torch.Size((1, 2, seqlens[0])), torch.float32), scale)


def test_layouts_of_every_tensor() -> None:
    """Transposed, repeated, between NaN, negated, columns first: the same gradients as of contiguous tensors."""
    q, k, v = (x.detach() for x in call_inputs(1, 17, 33, 2, 2, 64))
    dout = _randn(q.shape, q.dtype)
    expected = _check([x.requires_grad_() for x in (q, k, v)], dout)
    between_nan = torch.full((1, 33, 3, 131), torch.nan, dtype=k.dtype)
    between_nan[:, :, 1:, 1:65] = k.detach()
    views = [
        q.detach().transpose(1, 2).contiguous().transpose(1, 2),
        between_nan[:, :, 1:, 1:65],
        torch._neg_view(-v.detach()),
    ]
    found = _check([x.requires_grad_() for x in views], dout.transpose(2, 3).contiguous().transpose(2, 3))
    # The order of float32 additions is free: compared by the rule, and here to three bits of bf16.
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-5, atol=2.0**-8)
    for repeated in (dout[:, :1].expand(q.shape), dout[:, :, :1].expand(q.shape), dout[0, 0, 0, 0].expand(q.shape)):
        _check([q, k, v], repeated)


def test_keys_that_repeat_have_gradients_of_their_own() -> None:
    q, k, v = (x.detach() for x in call_inputs(1, 17, 33, 2, 1, 64))
    one = [x.requires_grad_() for x in (k, v)]
    repeated = [x.expand(1, 33, 2, 64) for x in one]
    out = attention(q, *repeated, causal=True, backend="emulator")
    dout = _randn(out.shape, out.dtype)
    dk, dv = torch.autograd.grad(out, one, dout)
    leaves = [q, *(x.detach().clone().requires_grad_() for x in repeated)]
    _, *each = _check([q.requires_grad_(), *leaves[1:]], dout)
    for grad, parts in zip((dk, dv), each, strict=True):
        torch.testing.assert_close(grad, parts.float().sum(2, keepdim=True).to(grad.dtype), rtol=2.0**-5, atol=2.0**-6)


def test_deterministic_bits() -> None:
    tensors = call_inputs(1, 97, 161, 1, 1, 128)

    def grads() -> tuple[Tensor, ...]:
        out = attention(*tensors, causal=True, deterministic=True, backend="emulator")
        return torch.autograd.grad(out.sum(), tensors)

    assert all(torch.equal(a, b) for a, b in zip(grads(), grads(), strict=True))


def test_configs() -> None:
    tensors = call_inputs(1, 17, 33, 2, 2, 64)
    forced = BwdConfig(block_n=4096)
    assert describe(*tensors, backend="emulator").source == "default"
    with pytest.raises(InfeasibleError, match=r"config sm80_64x4096\S* cannot run bwd_d64_bf16_causal_gqa1 on sm_80"):
        attention(*tensors, causal=True, backend="emulator", backward_config=forced)
    with pytest.raises(InfeasibleError, match="sm80_64x4096"):
        describe(*tensors, causal=True, backend="emulator", backward_config=forced, backward=True)


def test_compiled_training() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v, causal=True, backend="emulator").float().square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seqlens in ((17, 33), (5, 40)):
        tensors = call_inputs(1, *seqlens, 2, 2, 64)
        found, expected = (torch.autograd.grad(run(*tensors), tensors) for run in (compiled, step))
        torch.testing.assert_close(found, expected, rtol=2.0**-5, atol=2.0**-6)
