"""Gradients of the public function on a GPU: values by the gate's rule, memory, streams, graphs, threads, devices."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa2gen.errors import ArgumentError, LaunchError
from fa2gen.gate import check_backward
from fa2gen.problem import Problem
from fa2gen.runtime import attention, describe, plan, reset, warmup, warmup_specs
from fa2gen.runtime.warmup import gate_kernel
from fa2gen.spec import KernelSpec

BF16, FP16 = torch.bfloat16, torch.float16
# Native; predicated, in the first panel, in the middle and in the last; padded by the runtime.
HEAD_DIMS = [32, 64, 96, 128, 192, 256, 8, 40, 136, 248, 59, 250]
SEQLENS = [(113, 203), (203, 113), (1025, 1025), (1, 129), (129, 1), (64, 65)]
HEAD_RATIOS = [(4, 4), (8, 2), (9, 3), (7, 1), (16, 1)]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _poisoned_allocator() -> Iterator[None]:
    """New allocations hold NaN: blocks of many sizes are filled and handed back."""
    blocks = [torch.full((1 << size,), math.nan, device="cuda") for size in range(7, 24) for _ in range(3)]
    del blocks
    yield
    torch.cuda.synchronize()


def _leaves(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    heads_k: int,
    d: int,
    dtype: torch.dtype = BF16,
    device: str = "cuda",
) -> list[Tensor]:
    torch.manual_seed(seqlen_q * 31 + seqlen_k)
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    return [torch.randn(batch, s, h, d, device=device).to(dtype).requires_grad_() for s, h in shapes]


def _check(tensors: list[Tensor], dout: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Gradients by the gate's rule, with and without that of the LSE; returns the first ones."""
    causal, scale = options.get("causal", False), options.get("softmax_scale")
    out, lse = attention(*tensors, return_lse=True, **options)
    dout = torch.randn_like(out) if dout is None else dout
    dlse = torch.randn_like(lse)
    plain = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    both = torch.autograd.grad([out, lse], tensors, [dout, dlse])
    inputs = [x.detach() for x in tensors]
    for grads, given in ((plain, None), (both, dlse)):
        report = check_backward(grads, *inputs, dout, causal=causal, softmax_scale=scale, dlse=given)
        assert report.passed, f"{describe(*tensors, causal=causal, backward=True)}\n{report.text}"
        assert all(grad.is_contiguous() for grad in grads)
    return list(plain)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """What tests of many kernels run, compiled in parallel: one after the other they would take minutes."""
    calls = []
    for kind in ("fwd", "bwd"):
        for d, dtype, causal, seqlens in itertools.product(HEAD_DIMS, ("fp16", "bf16"), (False, True), SEQLENS):
            spec = KernelSpec(kind=kind, head_dim=-(-d // 8) * 8, dtype=dtype, causal=causal, gqa_ratio=7)
            calls.append((spec, Problem(2, *seqlens, 7, 1)))
        for (heads_q, heads_k), causal in itertools.product(HEAD_RATIOS, (False, True)):
            spec = KernelSpec(kind=kind, head_dim=128, causal=causal, gqa_ratio=heads_q // heads_k)
            calls.append((spec, Problem(2, 113, 203, heads_q, heads_k)))
    warmup_specs(calls, gate=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seqlens", SEQLENS)
def test_odd_sizes(seqlens: tuple[int, int], head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    _check(_leaves(2, *seqlens, 7, 1, head_dim, dtype), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads_q", "heads_k"), HEAD_RATIOS)
def test_head_ratios(heads_q: int, heads_k: int, causal: bool) -> None:
    _check(_leaves(2, 113, 203, heads_q, heads_k, 128), causal=causal)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gate(dtype: str, deterministic: bool) -> None:
    """The gate's own cases, with gradients and workspaces that held NaN."""
    spec = KernelSpec(kind="bwd", head_dim=128, dtype=dtype, causal=True, deterministic=deterministic)
    tensors = _leaves(1, 300, 300, 2, 2, 128, BF16 if dtype == "bf16" else FP16)
    described = describe(*tensors, causal=True, backward=True, deterministic=deterministic)
    assert described.spec == spec
    assert described.config is not None
    gate_kernel(spec, described.config, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("scale", [0.0, -0.125, 1.0, 1e-30])
def test_bl_008_scales_of_any_sign(scale: float) -> None:
    _check(_leaves(1, 77, 77, 2, 2, 64), causal=True, softmax_scale=scale)


def test_a_loss_that_drops_the_lse_of_rows_without_keys() -> None:
    """By a factor of 0, which makes NaN of the gradient of their -inf."""
    tensors = _leaves(1, 300, 200, 4, 2, 64)
    out, lse = attention(*tensors, causal=True, return_lse=True)
    kept = torch.where(lse > -math.inf, lse.square(), 0.0)
    grads = torch.autograd.grad([out.float().sum(), kept.sum()], tensors)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :100] == 0).all()


def test_layouts_of_dout() -> None:
    tensors = _leaves(2, 113, 203, 8, 2, 128)
    dout = torch.randn(tensors[0].shape, device="cuda").to(BF16)
    gaps = torch.full((2, 114, 8, 131), math.nan, dtype=BF16, device="cuda")
    gaps[:, 1:, :, 1:129] = dout
    for layout in (
        dout.transpose(1, 2).contiguous().transpose(1, 2),
        dout.transpose(2, 3).contiguous().transpose(2, 3),
        gaps[:, 1:, :, 1:129],
        dout[:, :1].expand(dout.shape),
        dout[:, :, :1].expand(dout.shape),
        dout[0, 0, 0, 0].expand(dout.shape),
        torch._neg_view(-dout),
    ):
        _check(tensors, layout)


@pytest.mark.parametrize("seqlen_q", [1, 256, 257])
def test_bl_034_unaligned_views(seqlen_q: int) -> None:
    """The forward reads some in place, the backward copies; what lies around them is NaN."""

    def view(seqlen: int) -> Tensor:
        storage = torch.full((2, seqlen + 1, 4, 131), math.nan, dtype=BF16, device="cuda")
        x = storage[:, 1:, :, 1:129]
        return x.copy_(torch.randn(x.shape, device="cuda")).detach().requires_grad_()

    _check([view(seqlen_q), view(203), view(203)], causal=True)


def test_bl_107_deterministic_gradients_repeat_bit_for_bit() -> None:
    tensors = _leaves(2, 513, 1025, 8, 2, 128)
    dout = torch.randn(tensors[0].shape, device="cuda").to(BF16)

    def grads(**options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*tensors, causal=True, **options), tensors, dout)

    first = grads(deterministic=True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(grads(deterministic=True), first, strict=True))
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(a, b) for a, b in zip(grads(), first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


class TestGraphs:
    def test_bl_110_a_step_s_replays_follow_the_data(self) -> None:
        tensors = _leaves(2, 113, 203, 4, 2, 64)
        dout = torch.randn(tensors[0].shape, device="cuda").to(BF16)
        warmup(*tensors, causal=True)
        assert all(x.grad is None for x in tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(*tensors, causal=True)
            grads = torch.autograd.grad(out, tensors, dout)
        for _ in range(3):
            with torch.no_grad():
                for x in (*tensors, dout):
                    x.normal_()
            graph.replay()
            report = check_backward(grads, *(x.detach() for x in tensors), dout, causal=True)
            assert report.passed, report.text

    def test_bl_110_a_cold_backward_is_refused_and_harmless(self) -> None:
        tensors = _leaves(1, 33, 65, 2, 2, 64)
        reset()
        warmup(*(x.detach() for x in tensors))
        message = r"fa2gen.runtime.warmup\(q, k, v, causal=False, backward=True, deterministic=False\)"
        with pytest.raises(LaunchError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            attention(*tensors).sum().backward()
        torch.cuda.synchronize()
        _check(tensors)

    def test_bl_111_new_sizes_of_loaded_kernels_can_be_captured(self) -> None:
        tensors = _leaves(1, 300, 300, 2, 2, 64)
        warmup(*tensors)
        plan.PLANS.clear()
        plan.BACKWARD_PLANS.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            grads = torch.autograd.grad(attention(*tensors).sum(), tensors)
        graph.replay()
        inputs = [x.detach() for x in tensors]
        report = check_backward(grads, *inputs, torch.ones_like(inputs[0]), causal=False)
        assert report.passed, report.text

    def test_graphed_callables(self) -> None:
        tensors = _leaves(2, 113, 203, 4, 2, 64)
        warmup(*tensors, causal=True)
        samples = tuple(x.detach().clone().requires_grad_() for x in tensors)
        graphed = torch.cuda.make_graphed_callables(lambda q, k, v: attention(q, k, v, causal=True), samples)
        out = graphed(*tensors)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, tensors, dout)
        report = check_backward(grads, *(x.detach() for x in tensors), dout, causal=True)
        assert report.passed, report.text


class TestStreams:
    def test_a_step_on_a_side_stream_sees_its_own_order(self) -> None:
        q, k, v = _leaves(1, 512, 512, 4, 4, 128)
        dout = torch.randn_like(q)
        side = torch.cuda.Stream()
        for _ in range(5):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                doubled = (q.detach() * 2).requires_grad_()
                grads = torch.autograd.grad(attention(doubled, k, v), (doubled, k, v), dout)
                torch.cuda._sleep(2_000_000)
            torch.cuda.current_stream().wait_stream(side)
            report = check_backward(grads, doubled.detach(), k.detach(), v.detach(), dout, causal=False)
            assert report.passed, report.text

    def test_a_backward_runs_where_its_forward_ran(self) -> None:
        tensors = _leaves(1, 512, 512, 4, 4, 128)
        dout = torch.randn_like(tensors[0])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            out = attention(*tensors)
        grads = torch.autograd.grad(out, tensors, dout)
        report = check_backward(grads, *(x.detach() for x in tensors), dout, causal=False)
        assert report.passed, report.text


def test_bl_124_other_threads() -> None:
    tensors = _leaves(1, 113, 203, 4, 2, 64)
    dout = torch.randn_like(tensors[0])

    def work(_: int) -> tuple[Tensor, ...]:
        own = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(attention(*own, deterministic=True), own, dout)

    expected = work(0)
    with ThreadPoolExecutor(8) as pool:
        for grads in pool.map(work, range(64)):
            assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


_STEP = "x = q.detach().requires_grad_(); attention(x, x, x).sum().backward(); assert x.grad.isfinite().all()"
_SCRIPTS = {
    "plain": _STEP,
    "everything first in a thread": (
        f"t = threading.Thread(target=lambda: exec({_STEP!r}, globals()))\nt.start()\nt.join()"
    ),
    "collected": f"{_STEP}; reset(); gc.collect(); {_STEP}",
    "a side stream at exit": f"with torch.cuda.stream(torch.cuda.Stream()):\n    {_STEP}",
    "a graph that is never differentiated": "x = q.detach().requires_grad_(); out = attention(x, x, x)",
}


@pytest.mark.parametrize("name", _SCRIPTS)
def test_bl_126_processes_end_cleanly(name: str) -> None:
    head = "import gc, threading, torch\nfrom fa2gen.runtime import attention, reset\n"
    head += "q = torch.ones(1, 16, 2, 64, device='cuda').half()\n"
    done = subprocess.run(
        [sys.executable, "-c", head + _SCRIPTS[name] + "\ntorch.cuda.synchronize()\nprint('done')"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
    assert "context" not in done.stderr.lower()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
class TestDevices:
    def test_bl_115_tensors_of_another_device(self) -> None:
        assert torch.cuda.current_device() == 0
        for _ in range(2):
            _check(_leaves(2, 113, 203, 4, 2, 64, device="cuda:1"), causal=True)
            assert torch.cuda.current_device() == 0

    def test_bl_115_one_backward_over_two_devices(self) -> None:
        """Each device has an autograd thread of its own."""
        sets = [_leaves(2, 113, 203, 4, 2, 64, device=f"cuda:{index}") for index in (0, 1)]
        for _ in range(3):
            outs = [attention(*tensors) for tensors in sets]
            loss = sum(out.float().sum().to("cuda:0") for out in outs)
            grads = torch.autograd.grad(loss, [x for tensors in sets for x in tensors])  # type: ignore[arg-type]
            for tensors, out, found in zip(sets, outs, (grads[:3], grads[3:]), strict=True):
                inputs = [x.detach() for x in tensors]
                report = check_backward(found, *inputs, torch.ones_like(out.detach()), causal=False)
                assert report.passed, report.text


def test_autocast() -> None:
    tensors = [x.detach().float().requires_grad_() for x in _leaves(2, 113, 203, 4, 2, 64)]
    for dtype in (BF16, FP16):
        cast = [x.detach().to(dtype).requires_grad_() for x in tensors]
        with torch.autocast("cuda", dtype=dtype):
            out = attention(*tensors, deterministic=True)
        assert out.dtype == dtype
        dout = torch.randn_like(out)
        expected = torch.autograd.grad(attention(*cast, deterministic=True), cast, dout)
        for found, grad in zip(torch.autograd.grad(out, tensors, dout), expected, strict=True):
            assert torch.equal(found, grad.float())
    with pytest.raises(ArgumentError, match=r"q has dtype torch.float32"):
        attention(*tensors)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    tensors = _leaves(2, 113, 203, 4, 2, 64)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v, causal=True, deterministic=True).float().square().sum()

    expected = torch.autograd.grad(block(*tensors), tensors)
    checkpoint(block, *tensors, use_reentrant=use_reentrant).backward()
    assert all(torch.equal(x.grad, grad) for x, grad in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training(mode: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(2 * q, k, v, causal=True, deterministic=True)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    lengths = [(113, 203), (65, 300), (200, 129)] if mode == "default" else [(113, 203)] * 4
    warmup(*_leaves(2, *lengths[0], 4, 2, 64), causal=True, deterministic=True)
    for seqlens in lengths:
        tensors = _leaves(2, *seqlens, 4, 2, 64)
        dout = torch.randn_like(tensors[0])
        expected = torch.autograd.grad(step(*tensors), tensors, dout)
        found = torch.autograd.grad(compiled(*tensors), tensors, dout)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), seqlens


def test_bl_121_operators_keep_their_promises() -> None:
    q, k, v = _leaves(2, 113, 203, 4, 2, 64)
    torch.library.opcheck(torch.ops.fa2gen.attention_fwd.default, (q, k, v, True, None, True, "auto"))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    arguments = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, True, None, True, "auto")
    torch.library.opcheck(torch.ops.fa2gen.attention_bwd.default, arguments)


def test_a_bad_backward_leaves_the_context_usable() -> None:
    tensors = _leaves(1, 33, 65, 4, 2, 64)
    q, k, v = (x.detach() for x in tensors)
    out, lse = attention(q, k, v, return_lse=True)
    for dout, dlse in (
        (out[:, 1:], None),
        (out.float(), None),
        (out.cpu(), None),
        (out, lse.half()),
        (out, lse[:1, 1:]),
    ):
        with pytest.raises(ArgumentError, match=r"^d(out|lse) "):
            torch.ops.fa2gen.attention_bwd(dout, dlse, q, k, v, out, lse, False, None, False, "auto")
    changed = attention(*tensors)
    changed.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.sum().backward()
    _check(tensors)


def test_bl_049_workspaces_are_given_back() -> None:
    tensors = _leaves(1, 4096, 4096, 16, 16, 128)
    dout = torch.randn_like(tensors[0])
    torch.autograd.grad(attention(*tensors, causal=True), tensors, dout)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(attention(*tensors, causal=True), tensors, dout)
    size = tensors[0].numel() * 2
    assert torch.cuda.memory_allocated() - before <= 3 * size + (1 << 21)
    # Output, three gradients, dq in float32, and what grows with the rows alone.
    assert torch.cuda.max_memory_allocated() - before <= 6 * size + (1 << 23)
    del grads
    assert torch.cuda.memory_allocated() <= before


def test_gradients_of_more_than_2_31_elements() -> None:
    """q, its gradient and that of the output; parts on both sides of element 2^31 are compared."""
    free, _ = torch.cuda.mem_get_info()
    if free < 80 << 30:
        pytest.skip(f"needs 80 GiB of GPU memory, {free / 2**30:.0f} are free")
    batch = 16_500
    q = torch.empty(batch, 1024, 1, 128, dtype=BF16, device="cuda").normal_().requires_grad_()
    k, v = (torch.empty(batch, 65, 1, 128, dtype=BF16, device="cuda").normal_().requires_grad_() for _ in range(2))
    out = attention(q, k, v)
    dout = torch.empty_like(out).normal_()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert q.numel() > 2**31
    border = 2**31 // (1024 * 128)
    for at in (0, border - 1, border, batch - 1):
        part = slice(at, at + 1)
        inputs = [x.detach()[part] for x in (q, k, v)]
        report = check_backward([x[part] for x in grads], *inputs, dout[part], causal=False)
        assert report.passed, f"batch {at}: {report.text}"
