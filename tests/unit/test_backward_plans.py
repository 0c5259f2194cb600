"""Gradients on the CUDA path without a GPU: what three kernels that only record their launches are given."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fa2gen.codegen import PARAMS
from fa2gen.errors import ArgumentError
from fa2gen.runtime import attention, plan, reset
from fa2gen.runtime.backward import gradients
from fa2gen.spec import BwdConfig, FwdConfig, KernelSpec
from tests.backward_device import KERNELS, backward_device
from tests.backward_device import grads as _grads
from tests.backward_device import last_backward as _last_backward
from tests.backward_device import leaves as _leaves
from tests.runtime_fakes import FakeDevice
from tests.runtime_fakes import call_inputs as _inputs
from tests.runtime_fakes import unpacked as _unpacked


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDevice]:
    yield from backward_device(monkeypatch, tmp_path)


def test_launches_carry_the_call(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[Tensor] = []

    def remembering(*args: Any) -> Any:
        allocate = plan_empty(*args)
        return lambda *sizes: allocated.append(allocate(*sizes)) or allocated[-1]

    plan_empty = plan._empty_function
    monkeypatch.setattr(plan, "_empty_function", remembering)
    q, k, v = _leaves()
    out = attention(q, k, v, causal=True, softmax_scale=0.25)
    # The LSE that nobody asked for is there for the backward.
    forward = _unpacked(device.order[0][1])
    assert forward["softmax_lse"] == allocated[1].data_ptr()
    dout = torch.ones_like(out)
    dq, dk, dv = _grads(out, [q, k, v], dout)
    assert device.together == [3]
    assert [kernel.name for kernel in device.kernels] == ["fwd", *KERNELS]
    spec = KernelSpec(kind="bwd", head_dim=64, causal=True, gqa_ratio=4)
    assert {kernel.spec for kernel in device.kernels[1:]} == {spec}
    values = _last_backward(device)
    tensors = {"q": q, "k": k, "v": v, "o": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    assert {name: values[name] for name in tensors} == {name: x.data_ptr() for name, x in tensors.items()}
    assert values["lse"] == forward["softmax_lse"]
    assert values["dlse"] == 0
    for name, x in tensors.items():
        assert tuple(values[f"{name}_{axis}_stride"] for axis in ("batch", "row", "head")) == x.stride()[:3]
    assert values["softmax_scale"] == 0.25
    assert all(launch[3] == 1234 for launch in device.launches)
    for x, grad in zip((q, k, v), (dq, dk, dv), strict=True):
        assert (grad.shape, grad.dtype, grad.is_contiguous()) == (x.shape, x.dtype, True)
    # Three gradients and one block for all workspaces, which lie in it one behind the other.
    *gradients, workspace = allocated[2:]
    assert [x.data_ptr() for x in gradients] == [x.data_ptr() for x in (dq, dk, dv)]
    starts = sorted(values[name] - workspace.data_ptr() for name in ("lse_log2", "delta", "dq_accum"))
    assert starts[0] == 0
    assert all(start % 256 == 0 for start in starts)
    assert starts[1] >= 2 * 8 * 113 * 4
    assert starts[2] + 2 * 8 * 113 * 4 <= workspace.numel()
    assert values["dk_accum"] == values["dv_accum"] == values["semaphores"] == 0


def test_a_warm_step_only_launches(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _leaves()
    _grads(attention(q, k, v), [q, k, v])

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a warm call made a plan")

    for module in ("dispatch", "backward"):
        monkeypatch.setattr(f"fa2gen.runtime.{module}.read_request", forbidden)
    others = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    for tensors in ([q, k, v], others):
        out = attention(*tensors)
        dq, dk, dv = _grads(out, tensors)
        values = _last_backward(device)
        assert [values[name] for name in "qkv"] == [x.data_ptr() for x in tensors]
        assert [values[name] for name in ("o", "dq", "dk", "dv")] == [x.data_ptr() for x in (out, dq, dk, dv)]
    assert len(plan.SAVED_PLANS) == 1
    # A forward without gradients has left a plan that serves one with them, and the other way round.
    with torch.no_grad():
        attention(q, k, v)
    assert _unpacked(device.order[-1][1])["softmax_lse"] == 0
    assert len(plan.PLANS) == len(plan.BACKWARD_PLANS) == 1


def test_parameters_are_packed_once_for_the_same_addresses(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _leaves()
    blocks: dict[Any, Tensor] = {}
    build = plan._empty_function
    # An allocator whose blocks come back.
    monkeypatch.setattr(
        plan, "_empty_function", lambda device: lambda *sizes: blocks.setdefault(sizes, build(device)(*sizes))
    )
    out = attention(q, k, v).detach()
    saved = (q.detach(), k.detach(), v.detach(), out, torch.zeros(2, 8, 113))
    options = plan.gradient_options(False, None, False, "auto", None)
    douts = [torch.ones_like(out), torch.ones_like(out)]
    for dout in (*douts, *douts):
        gradients(options, dout, None, saved)
        values = _last_backward(device)
        assert values["dout"] == dout.data_ptr()
        assert values["lse"] == saved[4].data_ptr()
    first, second, third, fourth = (device.order[-3 * i :][:3] for i in (4, 3, 2, 1))
    assert all(a is b for (_, a), (_, b) in zip(first + second, third + fourth, strict=True))
    assert len(plan.PARAMETERS) == 2


def test_the_gradient_of_the_lse(device: FakeDevice) -> None:
    tensors = _leaves()
    for _ in range(2):
        out, lse = attention(*tensors, return_lse=True)
        dlse = torch.ones_like(lse)
        torch.autograd.grad([out, lse], tensors, [torch.ones_like(out), dlse])
        assert _last_backward(device)["dlse"] == dlse.data_ptr()
        out, lse = attention(*tensors, return_lse=True)
        torch.autograd.grad([out.sum() + lse.sum()], tensors)
        assert _last_backward(device)["dlse"] not in (0, dlse.data_ptr())
        out, lse = attention(*tensors, return_lse=True)
        torch.autograd.grad(lse.sum(), tensors)
        values = _last_backward(device)
        assert values["dlse"] != 0
        assert values["dout_row_stride"] == 8 * 64
        out, lse = attention(*tensors, return_lse=True)
        torch.autograd.grad(out.sum(), tensors)
        assert _last_backward(device)["dlse"] == 0
        # A kernel reads it in a row.
        out, lse = attention(*tensors, return_lse=True)
        expanded = torch.ones(()).expand(lse.shape)
        torch.autograd.grad([out, lse], tensors, [torch.ones_like(out), expanded])
        assert _last_backward(device)["dlse"] not in (0, expanded.data_ptr())


def _odd(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


_DOUTS: dict[str, tuple[Any, bool]] = {
    "as it comes": (torch.ones_like, True),
    "heads first": (lambda x: torch.ones_like(x).transpose(1, 2).contiguous().transpose(1, 2), True),
    "rows repeat": (lambda x: torch.ones_like(x[:, :1]).expand(x.shape), True),
    "heads repeat": (lambda x: torch.ones_like(x[:, :, :1]).expand(x.shape), True),
    "one number": (lambda x: torch.ones((), dtype=x.dtype).expand(x.shape), False),
    "columns first": (lambda x: torch.ones_like(x).transpose(2, 3).contiguous().transpose(2, 3), False),
    "odd base": (lambda x: torch.ones(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape), False),
    "odd base and rows": (lambda x: _odd(torch.ones_like(x)), False),
    "negated": (lambda x: torch._neg_view(torch.ones_like(x)), False),
    "zeros without memory": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), False),
}


@pytest.mark.parametrize("name", _DOUTS)
def test_dout_of_every_layout(device: FakeDevice, name: str) -> None:
    """Read where it lies if its rows are aligned; a copy repeats what was repeated."""
    make, in_place = _DOUTS[name]
    tensors = _leaves()
    for _ in range(2):
        out = attention(*tensors)
        dout = make(out.detach())
        _grads(out, tensors, dout)
        values = _last_backward(device)
        assert (values["dout"] == dout.data_ptr()) is in_place
        assert values["dout"] % 16 == 0
        assert values["dout"] != 0
        strides = [values[f"dout_{axis}_stride"] for axis in ("batch", "row", "head")]
        assert [stride == 0 for stride in strides] == [
            stride == 0 and name != "zeros without memory" for stride in dout.stride()[:3]
        ]
    assert len(plan.BACKWARD_PLANS) == 1


def test_a_warm_backward_follows_dout_s_layout(device: FakeDevice) -> None:
    tensors = _leaves()
    out = attention(*tensors)
    for _ in range(3):
        out = attention(*tensors)
        for make, in_place in _DOUTS.values():
            dout = make(out.detach())
            _grads(out, tensors, dout, retain_graph=True)
            values = _last_backward(device)
            assert (values["dout"] == dout.data_ptr()) is in_place
            if in_place:
                strides = [values[f"dout_{axis}_stride"] for axis in ("batch", "row", "head")]
                assert strides == list(dout.stride()[:3])


def test_every_part_of_a_call_is_in_its_key(device: FakeDevice) -> None:
    q, k, v = _leaves(203, 203, 4, 4)
    swapped = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k, v], {}),
        ([q, k, v], {"causal": True}),
        ([q, k, v], {"softmax_scale": 0.5}),
        ([q, k, v], {"deterministic": True}),
        ([q, k, v], {"backward_config": BwdConfig(block_n=128)}),
        ([x.detach().half().requires_grad_() for x in (q, k, v)], {}),
        ([x.detach()[:1].requires_grad_() for x in (q, k, v)], {}),
        ([q.detach()[:, :200].requires_grad_(), k, v], {}),
        ([q, *(x.detach()[:, :200].requires_grad_() for x in (k, v))], {}),
        ([q, swapped[1], v], {}),
        ([q, k, swapped[2]], {}),
        ([swapped[0], k, v], {}),
        ([q, *(x.detach()[:, :, :2].requires_grad_() for x in (k, v))], {}),
    ]
    for _ in range(2):
        for tensors, options in calls:
            _grads(attention(*tensors, **options), tensors)
        assert len(plan.BACKWARD_PLANS) == len(calls)
    for name in KERNELS:
        size = 8 * len(PARAMS[name].pointers)
        tails = [params[size:] for kernel, params in device.order if kernel == name]
        assert tails[: len(calls)] == tails[len(calls) :]
    # A forced forward config is none of the backward's business, nor is the LSE.
    _grads(attention(q, k, v, config=FwdConfig(block_m=64)), [q, k, v])
    _grads(attention(q, k, v, return_lse=True)[0], [q, k, v])
    assert len(plan.BACKWARD_PLANS) == len(calls)


@pytest.mark.parametrize("move", [_odd, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)])
@pytest.mark.parametrize("seqlen_q", [64, 65])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_backward_copies_unaligned_views(device: FakeDevice, move: Any, seqlen_q: int, which: str) -> None:
    """Also those that the forward reads in place: of 64 queries, four heads of which share a key."""
    tensors = dict(zip("qkv", _inputs(seqlen_q=seqlen_q), strict=True))
    tensors[which] = move(tensors[which])
    leaves = [x.detach().requires_grad_() for x in tensors.values()]
    for _ in range(2):
        grads = _grads(attention(*leaves), leaves)
        values = _last_backward(device)
        copies = [name for name, x in zip("qkv", leaves, strict=True) if values[name] != x.data_ptr()]
        assert copies == [which]
        assert values[which] % 16 == 0
        assert all(grad.shape == x.shape and grad.is_contiguous() for grad, x in zip(grads, leaves, strict=True))
    assert len(plan.BACKWARD_PLANS) == 1


@pytest.mark.parametrize(("d", "width"), [(1, 8), (59, 64), (250, 256)])
def test_odd_head_dims_are_padded(device: FakeDevice, d: int, width: int) -> None:
    tensors = _leaves(d=d)
    for _ in range(2):
        grads = _grads(attention(*tensors), tensors)
        values = _last_backward(device)
        assert values["softmax_scale"] == pytest.approx(d**-0.5)
        assert all(values[f"{name}_head_stride"] == width for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv"))
        for grad, x in zip(grads, tensors, strict=True):
            assert grad.shape == x.shape
            # Memory of its own: not that of the kernel's wider gradient.
            assert grad.untyped_storage().nbytes() == 2 * x.numel()
    assert len(plan.BACKWARD_PLANS) == 1


def test_negative_scales_negate_q_and_its_gradient(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _leaves()
    build = plan._empty_function
    # Memory that no kernel writes here: its sign is all that the call changes.
    monkeypatch.setattr(plan, "_empty_function", lambda device: lambda *sizes: build(device)(*sizes).fill_(3))
    dq, dk, dv = _grads(attention(q, k, v, softmax_scale=-0.5), [q, k, v])
    values = _last_backward(device)
    assert values["softmax_scale"] == 0.5
    assert values["q"] != q.data_ptr()
    assert values["k"] == k.data_ptr()
    assert (dq == -3).all()
    assert (dk == 3).all()
    assert (dv == 3).all()


def test_deterministic_gradients(device: FakeDevice) -> None:
    tensors = _leaves()
    cases = [(None, False), (None, True), (True, False), (False, True)]
    try:
        for deterministic, switch in cases:
            torch.use_deterministic_algorithms(switch)
            out = attention(*tensors, deterministic=deterministic)
            torch.use_deterministic_algorithms(not switch)
            _grads(out, tensors)
            expected = switch if deterministic is None else deterministic
            assert (_last_backward(device)["semaphores"] != 0) is expected
    finally:
        torch.use_deterministic_algorithms(False)
    specs = {kernel.spec.deterministic for kernel in device.kernels if kernel.name == "bwd"}
    assert specs == {False, True}
    assert len(plan.BACKWARD_PLANS) == 2


def test_empty_problems_launch_nothing(device: FakeDevice) -> None:
    tensors = _leaves(seqlen_k=0)
    out, lse = attention(*tensors, return_lse=True)
    grads = torch.autograd.grad([out.sum(), lse.nan_to_num(neginf=0).sum()], tensors)
    assert all((grad == 0).all() and grad.shape == x.shape for grad, x in zip(grads, tensors, strict=True))
    assert not device.kernels


def test_plans_are_bounded_and_forgotten(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_PLANS", 5)
    q, k, v = _leaves()
    for seqlen in range(1, 20):
        x = q.detach()[:, :seqlen].requires_grad_()
        _grads(attention(x, k, v), [x])
        assert len(plan.BACKWARD_PLANS) <= 5
        assert len(plan.PARAMETERS) <= 5
    assert len(device.kernels) == 4
    reset()
    assert not plan.BACKWARD_PLANS
    assert not plan.PARAMETERS
    _grads(attention(q, k, v), [q])
    assert len(device.kernels) == 8


@pytest.mark.parametrize("name", ["q", "dout"])
def test_a_view_that_negates_is_copied_though_a_plan_fits(device: FakeDevice, name: str) -> None:
    leaves = _leaves()
    for _ in range(3):
        _grads(attention(*leaves), leaves)
    q = torch._neg_view(leaves[0].detach()).requires_grad_() if name == "q" else leaves[0]
    out = attention(q, *leaves[1:])
    dout = torch.ones_like(out)
    dout = torch._neg_view(dout) if name == "dout" else dout
    _grads(out, [q, *leaves[1:]], dout)
    values = _last_backward(device)
    assert (values["q"] != q.data_ptr()) is (name == "q")
    assert (values["dout"] != dout.data_ptr()) is (name == "dout")


def test_hooks_may_move_what_was_saved(device: FakeDevice) -> None:
    """A plan follows the strides of what comes back, not those of what was saved."""
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in _inputs()]
    back: list[Tensor] = []

    def unpack(x: Tensor) -> Tensor:
        back.append(x.contiguous().clone())
        return back[-1]

    for _ in range(3):
        _grads(attention(*leaves), leaves)
    for hooked in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack if hooked else lambda x: x):
            out = attention(*leaves)
        _grads(out, leaves)
        values = _last_backward(device)
        expected = back[:3] if hooked else leaves
        assert [values[name] for name in "qkv"] == [x.data_ptr() for x in expected]
        assert values["q_row_stride"] == (8 * 64 if hooked else 64)


def test_data_may_be_put_elsewhere(device: FakeDevice) -> None:
    """As offloading does behind autograd's back: with other strides, and none of its versions counted up."""
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in _inputs()]
    for moved in (False, False, False, True):
        tensors = [x * 1 for x in leaves]
        out = attention(*tensors)
        if moved:
            for x in tensors:
                x.data = x.detach().contiguous().clone()
        _grads(out, leaves)
        values = _last_backward(device)
        assert [values[name] for name in "qkv"] == [x.data_ptr() for x in tensors]
        assert values["q_row_stride"] == tensors[0].stride(1) == (8 * 64 if moved else 64)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_data_of_another_dtype_is_refused(device: FakeDevice, which: int) -> None:
    for moved in (False, False, False, True):
        leaves = _leaves()
        out = attention(*leaves)
        if not moved:
            _grads(out, leaves)
    leaves[which].data = leaves[which].detach().half()
    launches = len(device.order)
    with pytest.raises(ArgumentError, match="has dtype torch"):
        _grads(out, leaves)
    assert len(device.order) == launches


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_data_may_lie_otherwise_at_the_same_address(device: FakeDevice, transposed: bool, which: int) -> None:
    """As where memory is freed, and by chance found again."""
    sizes = ((113, 8), (203, 2), (203, 2))
    rows_first = [(seqlen * heads * 64, heads * 64, 64, 1) for seqlen, heads in sizes]
    heads_first = [(seqlen * heads * 64, 64, seqlen * 64, 1) for seqlen, heads in sizes]
    before, after = (heads_first, rows_first) if transposed else (rows_first, heads_first)
    leaves = [torch.as_strided(x.detach(), x.shape, s).requires_grad_() for x, s in zip(_inputs(), before, strict=True)]
    for moved in (False, False, False, True, False):
        out = attention(*leaves)
        x = leaves[which]
        if moved:
            x.data = torch.as_strided(x.detach(), x.shape, after[which])
        _grads(out, leaves)
        values = _last_backward(device)
        assert values["qkv"[which]] == x.data_ptr()
        name = f"{'qkv'[which]}_row_stride"
        assert values[name] == (after if moved else before)[which][1]
        x.data = torch.as_strided(x.detach(), x.shape, before[which])


def test_hooks_may_leave_addresses_alone(device: FakeDevice) -> None:
    leaves = _leaves()
    strides = (113 * 8 * 64, 64, 113 * 64, 1)
    for hooked in (False, False, False, True):
        saved: list[Tensor] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(x) or len(saved) - 1,  # type: ignore[misc]
            lambda i, saved=saved: torch.as_strided(saved[i], saved[i].shape, strides) if i == 3 else saved[i],  # type: ignore[misc]
        )
        with hooks if hooked else contextlib.nullcontext():
            out = attention(*leaves)
        _grads(out, leaves)
        values = _last_backward(device)
        assert values["o"] == out.data_ptr()
        assert values["o_row_stride"] == (64 if hooked else 8 * 64)


def test_hooks_may_come_after_the_call(device: FakeDevice) -> None:
    leaves = _leaves()
    back: list[Tensor] = []

    def unpack(x: Tensor) -> Tensor:
        back.append(x.clone())
        return back[-1]

    for hooked in (False, False, False, True):
        out = attention(*leaves)
        assert out.grad_fn is not None
        if hooked:
            for saved in out.grad_fn._raw_saved_tensors:  # type: ignore[attr-defined]
                saved.register_hooks(lambda x: x, unpack)
        _grads(out, leaves)
    values = _last_backward(device)
    assert [values[name] for name in ("q", "k", "v", "o", "lse")] == [x.data_ptr() for x in back]


def test_a_warm_backward_refuses_tangents(device: FakeDevice) -> None:
    leaves = _leaves()
    for _ in range(3):
        out = attention(*leaves)
        dout = torch.ones_like(out)
        _grads(out, leaves, dout, retain_graph=True)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="dout carries a forward-mode tangent"):
        _grads(out, leaves, forward_ad.make_dual(dout, dout))


def test_a_warm_backward_hides_from_no_observer(device: FakeDevice) -> None:
    seen: list[Any] = []

    class Observer(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    leaves = _leaves()
    for observed in (False, False, False, True):
        out = attention(*leaves)
        dout = torch.ones_like(out)
        with Observer() if observed else contextlib.nullcontext():
            _grads(out, leaves, dout)
    assert torch.ops.fa2gen.attention_bwd.default in seen


def test_threads_share_plans(device: FakeDevice) -> None:
    """Each launch's pointers belong to one call, however calls interleave."""
    sets = [_leaves(5, 7) for _ in range(6)]
    start, errors = threading.Barrier(6), []

    def work(tensors: list[Tensor]) -> None:
        start.wait()
        try:
            for _ in range(50):
                _grads(attention(*tensors), tensors)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(tensors,)) for tensors in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(device.kernels) == 4
    seen = [_unpacked(params, name) for name, params in device.order if name == "bwd"]
    assert len(seen) == 6 * 50
    assert {tuple(values[name] for name in "qkv") for values in seen} == {
        tuple(x.data_ptr() for x in tensors) for tensors in sets
    }
