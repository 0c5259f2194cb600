"""The public function on a GPU: values by the gate's rule, memory, streams, graphs, threads, devices, limits."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fa2gen.codegen import render_kernel
from fa2gen.compile import compile_many
from fa2gen.errors import ArgumentError, LaunchError
from fa2gen.gate import check_forward, forward_cases, run_gate
from fa2gen.problem import Problem
from fa2gen.reference import attention_forward
from fa2gen.runtime import attention, describe, plan, reset, warmup, warmup_specs
from fa2gen.spec import SOFTMAXES, FwdConfig, KernelSpec

DTYPES = [torch.bfloat16, torch.float16]
# Native; predicated, in the first panel, in the middle and in the last; padded by the runtime.
HEAD_DIMS = [32, 64, 96, 128, 192, 256, 8, 40, 72, 136, 248, 59, 111, 250]
SEQLENS = [(113, 203), (203, 113), (1025, 1025), (1, 129), (129, 1), (64, 65)]
HEAD_RATIOS = [(4, 4), (8, 2), (9, 3), (7, 1), (16, 2), (16, 1)]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _poisoned_allocator() -> Iterator[None]:
    """New allocations hold NaN: blocks of many sizes are filled and handed back."""
    blocks = [torch.full((1 << size,), math.nan, device="cuda") for size in range(7, 22) for _ in range(3)]
    del blocks
    yield
    torch.cuda.synchronize()


def _randn(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def _inputs(
    batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, d: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seqlen_q * 31 + seqlen_k)
    q, k, v = (
        _randn(batch, s, h, d, dtype=dtype) for s, h in ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    )
    return q, k, v


def _check(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> None:
    out, lse = attention(q, k, v, return_lse=True, **kwargs)
    causal, scale = kwargs.get("causal", False), kwargs.get("softmax_scale")
    report = check_forward(out, lse, q, k, v, causal=causal, softmax_scale=scale)
    assert report.passed, f"{describe(q, k, v, causal=causal)}\n{report.text}"
    assert out.is_contiguous()
    alone = attention(q, k, v, **kwargs)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, out)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """What tests of many kernels run, compiled in parallel: one after the other they would take minutes."""
    calls = []
    for d, dtype, causal, seqlens in itertools.product(HEAD_DIMS, ("fp16", "bf16"), (False, True), SEQLENS):
        spec = KernelSpec(head_dim=-(-d // 8) * 8, dtype=dtype, causal=causal, gqa_ratio=7)
        calls.append((spec, Problem(2, *seqlens, 7, 1)))
    for (heads_q, heads_k), causal in itertools.product(HEAD_RATIOS, (False, True)):
        spec = KernelSpec(head_dim=128, causal=causal, gqa_ratio=heads_q // heads_k)
        calls.append((spec, Problem(2, 113, 203, heads_q, heads_k)))
    warmup_specs(calls, gate=False)
    target = plan.device_gpu(torch.cuda.current_device()).target
    gated = [
        KernelSpec(head_dim=128, dtype=dtype, causal=causal) for dtype in ("bf16", "fp16") for causal in (False, True)
    ]
    # Into the cache on disk, from where the gate's runner takes them.
    compile_many([(render_kernel(spec, _gated(softmax)), target) for spec in gated for softmax in SOFTMAXES])


def _gated(softmax: str) -> FwdConfig:
    return FwdConfig(block_m=128, block_n=64, step_n=64, num_warps=4, num_stages=2, softmax=softmax)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seqlens", SEQLENS)
def test_odd_sizes(seqlens: tuple[int, int], head_dim: int, dtype: torch.dtype, causal: bool) -> None:
    _check(*_inputs(2, *seqlens, 7, 1, head_dim, dtype), causal=causal)


def test_last_dimension_not_contiguous() -> None:
    q, k, v = _inputs(2, 33, 65, 4, 2, 64)
    expected = attention(q, k, v)
    odd = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert torch.equal(attention(*odd), expected)


@pytest.mark.slow
def test_long_keys_of_noise() -> None:
    q, k, v = _randn(1, 130, 8, 128), *(_randn(1, 1 << 20, 1, 128) for _ in range(2))
    _check(q, k, v, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads_q", "heads_k"), HEAD_RATIOS)
def test_head_ratios(heads_q: int, heads_k: int, causal: bool) -> None:
    _check(*_inputs(2, 113, 203, heads_q, heads_k, 128), causal=causal)


def test_bl_107_results_repeat_bit_for_bit() -> None:
    q, k, v = _inputs(2, 513, 769, 8, 2, 128)
    first = attention(q, k, v, causal=True)
    assert all(torch.equal(attention(q, k, v, causal=True), first) for _ in range(20))


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gate_of_both_softmaxes(dtype: str, causal: bool, softmax: str) -> None:
    from fa2gen.constraints import infeasible_reason
    from fa2gen.runtime.warmup import gate_runner

    device = torch.device("cuda", torch.cuda.current_device())
    spec = KernelSpec(head_dim=128, dtype=dtype, causal=causal)
    config = _gated(softmax)
    if infeasible_reason(spec, config, plan.device_gpu(device.index).arch) is not None:
        pytest.skip(f"{config.slug()} is not legal here")
    cases = forward_cases(spec, config, budget="full")
    report = run_gate(spec, config, gate_runner(spec, config, device), cases, device=device)
    assert report.passed, report.text


class TestGraphs:
    def test_bl_110_replays_follow_the_data(self) -> None:
        q, k, v = _inputs(2, 113, 203, 4, 2, 64)
        warmup(q, k, v, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attention(q, k, v, causal=True, return_lse=True)
        for _ in range(3):
            for x in (q, k, v):
                x.normal_()
            graph.replay()
            report = check_forward(out, lse, q, k, v, causal=True)
            assert report.passed, report.text

    def test_bl_110_cold_capture_is_refused_and_harmless(self) -> None:
        q, k, v = _inputs(1, 33, 65, 2, 2, 64)
        reset()
        message = r"fa2gen.runtime.warmup\(q, k, v, causal=False\)"
        with pytest.raises(LaunchError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            attention(q, k, v)
        torch.cuda.synchronize()
        _check(q, k, v)

    def test_bl_111_new_sizes_of_a_loaded_kernel_can_be_captured(self) -> None:
        q, k, v = _inputs(1, 300, 300, 2, 2, 64)
        warmup(q, k, v)
        plan.PLANS.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, k, v)
        graph.replay()
        assert isinstance(out, Tensor)
        assert check_forward(out, None, q, k, v, causal=False).passed
        del graph
        _check(q, k, v)


def test_side_stream_sees_its_own_order() -> None:
    q, k, v = _inputs(1, 512, 512, 4, 4, 128)
    expected = attention(q * 2, k, v)
    side = torch.cuda.Stream()
    for _ in range(20):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            doubled = q * 2
            out = attention(doubled, k, v)
            assert isinstance(out, Tensor)
            copy = out.clone()
            del doubled, out
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(copy, expected)


def test_bl_124_other_threads() -> None:
    q, k, v = _inputs(1, 113, 203, 4, 2, 64)
    expected = attention(q, k, v)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(attention(q, k, v)))
    thread.start()
    thread.join()
    assert len(results) == 1
    assert torch.equal(results[0], expected)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(out, expected) for out in pool.map(lambda _: attention(q, k, v), range(64)))


_SCRIPTS = {
    "plain": "out = attention(q, q, q)",
    "a fresh thread first": "t = threading.Thread(target=lambda: attention(q, q, q)); t.start(); t.join()",
    "collected": "out = attention(q, q, q); reset(); gc.collect(); out = attention(q, q, q)",
    "side stream at exit": "with torch.cuda.stream(torch.cuda.Stream()):\n    out = attention(q, q, q)",
}


@pytest.mark.parametrize("name", _SCRIPTS)
def test_bl_126_processes_end_cleanly(name: str) -> None:
    head = "import gc, threading, torch\nfrom fa2gen.runtime import attention, reset\n"
    head += "q = torch.ones(1, 16, 2, 64, device='cuda').half()\n"
    tail = "\ntorch.cuda.synchronize()\nprint('done')"
    done = subprocess.run(
        [sys.executable, "-c", head + _SCRIPTS[name] + tail],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"
    assert "context" not in done.stderr.lower()


def test_an_exception_leaves_the_exit_code_to_python() -> None:
    code = "import torch\nfrom fa2gen.runtime import attention\n"
    code += "q = torch.ones(1, 16, 2, 64, device='cuda').half()\nattention(q, q, q)\nraise SystemExit(7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.returncode == 7, done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
class TestDevices:
    def test_bl_115_tensors_of_another_device(self) -> None:
        x = torch.ones(4, 16, 32, 64, dtype=torch.float16, device="cuda:1")
        assert torch.cuda.current_device() == 0
        for _ in range(2):
            out = attention(x, x, x, softmax_scale=1.0)
            assert isinstance(out, Tensor)
            assert out.device == x.device
            assert out.float().sum().item() == 131072
            assert torch.cuda.current_device() == 0

    def test_bl_115_devices_take_turns(self) -> None:
        tensors = [_randn(1, 65, 2, 64, device=f"cuda:{index}") for index in (0, 1)]
        for _ in range(3):
            for x in tensors:
                assert check_forward(attention(x, x, x), None, x, x, x, causal=False).passed  # type: ignore[arg-type]

    def test_mixed_devices_raise(self) -> None:
        x, y = (_randn(1, 5, 2, 64, device=f"cuda:{index}") for index in (0, 1))
        with pytest.raises(ArgumentError, match="k is on device cuda:1 and q on cuda:0"):
            attention(x, y, y)


def test_warmup_and_describe() -> None:
    q, k, v = _inputs(1, 257, 129, 6, 2, 72)
    reset()
    assert describe(q, k, v).state != "loaded"
    description = warmup(q, k, v)
    assert description.state == "loaded"
    assert description.backend == "cuda"
    assert description.config is not None
    assert description.config.slug() in str(description)
    (again,) = warmup_specs([(description.spec, description.problem)])
    assert again.config == description.config
    _check(q, k, v)


def test_reference_backend_on_the_gpu() -> None:
    q, k, v = _inputs(1, 33, 65, 2, 1, 64)
    out = attention(q, k, v, backend="reference")
    assert isinstance(out, Tensor)
    assert out.is_cuda
    ref, _ = attention_forward(q, k, v)
    torch.testing.assert_close(out.double(), ref, rtol=2.0**-8, atol=0)


def test_compiled() -> None:
    q, k, v = _inputs(2, 113, 203, 4, 2, 64)
    warmup(q, k, v, causal=True)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, causal=True) + 1, rtol=0, atol=0)  # type: ignore[operator]
    torch.library.opcheck(torch.ops.fa2gen.attention_fwd.default, (q, k, v, True, None, True, "auto"))


def test_a_bad_call_leaves_the_context_usable() -> None:
    q, k, v = _inputs(1, 33, 65, 4, 2, 64)
    for bad in ((q.float(), k, v), (q, k.cpu(), v), (q, k[..., :32], v), (q[:, :, :3], k, v)):
        with pytest.raises(ArgumentError):
            attention(*bad)
    _check(q, k, v)
