"""Gradients of the public function on CPU tensors: values, what autograd may do with them, what is refused."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.runtime import attention, describe, warmup
from fa2gen.runtime.backward import gradients
from fa2gen.runtime.plan import gradient_options
from fa2gen.spec import BwdConfig
from tests.gradients import assert_rounded, call_inputs, formula_gradients

OPTIONS = gradient_options(False, None, False, "auto", None)


def _grads(loss: Tensor, tensors: list[Tensor], **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, tensors, **kwargs)


def _like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlens", "heads", "head_dim"),
    [((19, 45), (3, 1), 40), ((45, 19), (4, 2), 59), ((1, 33), (2, 2), 128), ((33, 1), (7, 1), 8), ((5, 5), (2, 2), 1)],
)
def test_bl_095_values(
    seqlens: tuple[int, int], heads: tuple[int, int], head_dim: int, causal: bool, dtype: torch.dtype
) -> None:
    tensors = call_inputs(2, *seqlens, *heads, head_dim, dtype)
    out, lse = attention(*tensors, causal=causal, return_lse=True)
    dout, dlse = _like(out), _like(lse)
    for given in ((dout, None), (None, dlse), (dout, dlse)):
        known = formula_gradients(tensors, *given, causal=causal)
        outputs = [x for x, grad in zip((out, lse), given, strict=True) if grad is not None]
        found = torch.autograd.grad(outputs, tensors, [grad for grad in given if grad is not None], retain_graph=True)
        for x, grad, expected in zip(tensors, found, known, strict=True):
            assert (grad.shape, grad.dtype, grad.is_contiguous()) == (x.shape, x.dtype, True)
            assert_rounded(grad, expected)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_bl_008_any_finite_scale(scale: float, causal: bool) -> None:
    tensors = call_inputs(1, 77, 77, 2, 2)
    out = attention(*tensors, causal=causal, softmax_scale=scale)
    dout = _like(out)
    known = formula_gradients(tensors, dout, causal=causal, softmax_scale=float(scale))
    for grad, expected in zip(_grads(out, tensors, grad_outputs=dout), known, strict=True):
        assert_rounded(grad, expected)


def test_bl_099_the_lse_s_gradient_is_the_softmax() -> None:
    """d lse_i / d s_ij = p_ij: so dv is 0, and z-loss and ring attention work."""
    q, k, v = call_inputs(1, 3, 5, 1, 1, 8)
    _, lse = attention(q, k, v, return_lse=True)
    dq, _, dv = torch.autograd.grad(lse.square().mean(), (q, k, v))
    assert (dv == 0).all()
    p = torch.softmax(q[0, :, 0].double() @ k[0, :, 0].double().T / math.sqrt(8), 1)
    assert_rounded(dq[0, :, 0], 2 / 3 * lse[0, 0].double()[:, None] * (p @ k[0, :, 0].double()) / math.sqrt(8))


@pytest.mark.parametrize("needed", [n for n in itertools.product((False, True), repeat=3) if any(n)])
def test_only_what_requires_grad_has_one(needed: tuple[bool, ...]) -> None:
    tensors = call_inputs()
    whole = _grads(attention(*tensors).sum(), tensors)
    some = [x.detach().requires_grad_(needs) for x, needs in zip(tensors, needed, strict=True)]
    attention(*some).sum().backward()
    for x, needs, grad in zip(some, needed, whole, strict=True):
        assert torch.equal(x.grad, grad) if needs else x.grad is None


def test_no_history_where_nobody_asks() -> None:
    tensors = call_inputs()
    assert not attention(*(x.detach() for x in tensors)).requires_grad
    with torch.no_grad():
        assert not attention(*tensors).requires_grad
    with torch.inference_mode():
        assert not attention(*tensors).requires_grad
    out, lse = attention(*tensors, return_lse=True)
    assert out.requires_grad
    assert lse.requires_grad


def test_gradients_of_every_stride() -> None:
    """Expanded, transposed, sliced, negated, and zeros without memory."""
    q, k, v = call_inputs()
    out = attention(q, k, v)
    dout = _like(out)
    expected = _grads(out, [q, k, v], grad_outputs=dout, retain_graph=True)
    gaps = torch.full((*dout.shape[:3], 2 * dout.shape[3] + 1), math.nan, dtype=dout.dtype)
    gaps[..., 1::2] = dout
    for other in (
        dout.transpose(1, 2).contiguous().transpose(1, 2),
        dout.transpose(2, 3).contiguous().transpose(2, 3),
        gaps[..., 1::2],
        torch._neg_view(-dout),
    ):
        found = _grads(out, [q, k, v], grad_outputs=other, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    ones = _grads(out, [q, k, v], grad_outputs=torch.ones_like(out), retain_graph=True)
    found = _grads(out.sum(), [q, k, v], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, ones, strict=True))
    zeros = torch._efficientzerotensor(out.shape, dtype=out.dtype)
    assert all((x == 0).all() for x in _grads(out, [q, k, v], grad_outputs=zeros))


def test_bl_093_a_retained_graph_gives_the_same_again() -> None:
    q, k, v = call_inputs()
    out = attention(q, k, v)
    dout = _like(out)
    out.backward(dout, retain_graph=True)
    assert q.grad is not None
    once = q.grad.clone()
    out.backward(dout)
    assert torch.equal(q.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward(dout)


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_bl_093_changes_of_what_was_saved_are_noticed(which: str) -> None:
    leaves = call_inputs()
    tensors = dict(zip("qkv", [x * 1 for x in leaves], strict=True))
    out = attention(*tensors.values())
    with torch.no_grad():
        {**tensors, "out": out}[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bl_093_a_changed_lse_is_noticed() -> None:
    out, lse = attention(*call_inputs(), return_lse=True)
    with torch.no_grad():
        lse.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("return_lse", [False, True])
def test_results_are_freed_with_their_last_name(return_lse: bool) -> None:
    """Not by the garbage collector, later: nothing that the graph holds leads back to it."""
    tensors = call_inputs()
    gc.disable()
    try:
        result = attention(*tensors, return_lse=return_lse)
        results = list(result) if isinstance(result, tuple) else [result]
        watched = [weakref.ref(x) for x in (*results, results[0].grad_fn)]
        del result, results
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_what_was_saved_is_freed_by_the_backward() -> None:
    out = attention(*call_inputs())
    assert out.grad_fn is not None
    saved = [weakref.ref(x) for x in out.grad_fn.saved_tensors[3:]]
    assert all(ref() is not None for ref in saved)
    out.sum().backward()
    assert [ref() for ref in saved] == [None, None]


def test_double_backward_is_refused() -> None:
    q, k, v = call_inputs()
    plain = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    # Asking for a graph is no mistake (optimizers do), differentiating it is: also where dout is a constant.
    created = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, created, strict=True))
    for gradient in created:
        with pytest.raises(UnsupportedError, match="attention can be differentiated once"):
            gradient.sum().backward(retain_graph=True)
    # A part of the loss that does not lead there is differentiated as ever.
    (gradient,) = torch.autograd.grad(attention(q, k, v).sum() * q.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"SDPBackend\.MATH"):
        torch.autograd.grad(gradient.sum(), q)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    q, k, v = call_inputs()

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(2 * q, k, v, causal=True, return_lse=True)
        return out.float().sum(3).transpose(1, 2) + lse

    expected = _grads(block(q, k, v).square().sum(), [q, k, v])
    checkpoint(block, q, k, v, use_reentrant=use_reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, grad) for x, grad in zip((q, k, v), expected, strict=True))


def test_saved_tensor_hooks() -> None:
    q, k, v = call_inputs()
    expected = _grads(attention(q, k, v).sum(), [q, k, v])
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().transpose(1, 2).contiguous())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i].transpose(1, 2)):
        out = attention(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(_grads(out.sum(), [q, k, v]), expected, strict=True))
    # q, k, v, output and LSE; no copy beside an original.
    assert len(packed) == 5
    with torch.autograd.graph.save_on_cpu():
        out = attention(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(_grads(out.sum(), [q, k, v]), expected, strict=True))


def test_hooks_that_give_back_something_else_are_refused() -> None:
    q, k, v = call_inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.float()):
        out = attention(q, k, v)
    with pytest.raises(ArgumentError, match=r"q has dtype torch.float32"):
        out.sum().backward()


def test_gradients_on_another_device_are_refused() -> None:
    q, k, v = (x.detach() for x in call_inputs())
    out, lse = attention(q, k, v, return_lse=True)
    for dout, dlse, name in ((out.to("meta"), lse, "dout"), (out, lse.to("meta"), "dlse")):
        with pytest.raises(ArgumentError, match=f"{name} is on device meta and q on cpu"):
            gradients(OPTIONS, dout, dlse, (q, k, v, out, lse))


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, 16, 4, 64), (0, 16, 4, 64)),
        ((2, 0, 4, 64), (2, 16, 4, 64)),
        ((2, 16, 0, 64), (2, 16, 4, 64)),
        ((2, 16, 4, 59), (2, 0, 2, 59)),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_bl_017_gradients_of_nothing_are_zero(q_shape: tuple[int, ...], k_shape: tuple[int, ...], backend: str) -> None:
    q, k, v = (torch.ones(shape).half().requires_grad_() for shape in (q_shape, k_shape, k_shape))
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    for x, grad in zip((q, k, v), torch.autograd.grad([out.sum(), lse.sum()], (q, k, v)), strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert (grad == 0).all()


def test_rows_without_keys_have_no_gradient() -> None:
    q, k, v = call_inputs(1, 9, 4, 2, 1)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dout, dlse = torch.full_like(out, 3.0), torch.full_like(lse, 2.0)
    dq, dk, dv = torch.autograd.grad([out, lse], (q, k, v), [dout, dlse])
    assert (dq[:, :5] == 0).all()
    for found, expected in zip((dq, dk, dv), formula_gradients([q, k, v], dout, dlse, causal=True), strict=True):
        assert_rounded(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bl_075_autocast(dtype: torch.dtype) -> None:
    """Inputs in float32, also beside others, are cast; gradients come back in float32."""
    q, k, v = (x.detach().float().requires_grad_() for x in call_inputs())
    with torch.autocast("cpu", dtype=dtype):
        out = attention(q, k.to(torch.bfloat16), v)
    cast = [x.detach().to(torch.bfloat16 if x is k else x.dtype).to(dtype).requires_grad_() for x in (q, k, v)]
    plain = attention(*cast)
    assert out.dtype == dtype
    assert torch.equal(out, plain)
    dout = _like(out)
    found, expected = _grads(out, [q, k, v], grad_outputs=dout), _grads(plain, cast, grad_outputs=dout)
    for x, a, b in zip((q, k, v), found, expected, strict=True):
        assert a.dtype == x.dtype == torch.float32
        assert torch.equal(a, b.to(torch.bfloat16).float() if x is k else b.float())


def test_what_autocast_leaves_alone() -> None:
    q, k, v = call_inputs()
    with torch.autocast("cpu", dtype=torch.float16):
        assert attention(q, k, v).dtype == torch.bfloat16
        with pytest.raises(ArgumentError, match=r"q has dtype torch.float64"):
            attention(q.double(), k.double(), v.double())
    with pytest.raises(ArgumentError, match=r"q has dtype torch.float32"):
        attention(q.float(), k.float(), v.float())
    with torch.autocast("cpu", enabled=False), pytest.raises(ArgumentError, match=r"q has dtype torch.float32"):
        attention(q.float(), k.float(), v.float())
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ArgumentError, match="v is on device meta"):
        attention(q.float(), k.float(), v.to("meta"))


def test_threads() -> None:
    tensors = call_inputs()
    expected = _grads(attention(*tensors).sum(), tensors)

    def work(_: int) -> bool:
        own = [x.detach().requires_grad_() for x in tensors]
        attention(*own).sum().backward()
        return all(torch.equal(x.grad, grad) for x, grad in zip(own, expected, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))
    # A graph made in one thread, differentiated in another.
    out, found = attention(*tensors), []
    thread = threading.Thread(target=lambda: found.extend(_grads(out.sum(), tensors)))
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_gradients() -> None:
    """A vmap over the backward, as functions for Jacobians make it."""
    tensors = call_inputs()
    out = attention(*tensors)
    douts = torch.stack([_like(out), 2 * _like(out)])
    found = torch.autograd.grad(out, tensors, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        for a, b in zip(found, _grads(out, tensors, grad_outputs=dout, retain_graph=True), strict=True):
            assert torch.equal(a[i], b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_through_vmap() -> None:
    q, k, v = call_inputs()
    stacked = torch.stack([q, 2 * q]).detach().requires_grad_()
    torch.vmap(lambda x: attention(x, k, v))(stacked).sum().backward()
    assert stacked.grad is not None
    for i in range(2):
        alone = stacked[i].detach().requires_grad_()
        (expected,) = _grads(attention(alone, k, v).sum(), [alone])
        assert torch.equal(stacked.grad[i], expected)


def test_deterministic_is_checked() -> None:
    tensors = call_inputs()
    for value in (None, True, False, 1):
        attention(*tensors, deterministic=value)
    for bad in ("yes", 2, torch.ones(2)):
        with pytest.raises(ArgumentError, match="deterministic must be True or False"):
            attention(*tensors, deterministic=bad)
    with pytest.raises(ArgumentError, match="backward_config has no meaning for the reference"):
        attention(*tensors, backward_config=BwdConfig())
    with pytest.raises(ArgumentError, match=r"backward_config must be a fa2gen.BwdConfig"):
        attention(*tensors, backward_config="fast", backend="emulator")  # type: ignore[arg-type]


def test_describe_and_warmup() -> None:
    q, k, v = call_inputs(head_dim=59)
    fast = describe(q, k, v, backend="emulator", backward=True)
    assert fast.spec.slug() == "bwd_d64_bf16_full_gqa2"
    assert isinstance(fast.config, BwdConfig)
    assert fast.source == "default"
    assert "config   " + fast.config.slug() + " (default)" in str(fast)
    assert "output and its gradient: padded likewise; gradients: cut back to head_dim 59" in fast.copies
    strict = describe(q, k, v, backend="emulator", backward=True, deterministic=True)
    assert strict.spec.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert describe(q, k, v, backend="emulator", backward=True) == strict
        assert describe(q, k, v, backend="emulator", backward=True, deterministic=False) == fast
    finally:
        torch.use_deterministic_algorithms(False)
    assert describe(q, k, v, backward=True).source == "the definition, in float64"
    assert warmup(q, k, v).backend == "reference"
    assert q.grad is None
    assert warmup(q.detach(), k.detach(), v.detach(), backward=True).spec.kind == "fwd"
