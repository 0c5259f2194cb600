"""The backward's whole gate for kernels of every kind, and a fixed order of additions that holds under load.

What runs is in ``tests/grid_kernels.py``. All kernels are compiled at the beginning, in parallel. ``pytest -s`` shows
how near each comes to its limit.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

from fa2gen.codegen import kernels_of
from fa2gen.compile import compile_many, kernel_source
from fa2gen.errors import CompileError
from fa2gen.gate import GateCase, backward_cases, check_backward, make_gradients, make_inputs, run_backward_gate
from fa2gen.problem import Problem
from fa2gen.reference import attention_forward
from fa2gen.runtime import plan
from fa2gen.runtime.warmup import backward_runner
from fa2gen.spec import BwdConfig, KernelSpec
from tests.grid_kernels import ORDERED, BackwardKernel, backward_kernels, ordered_kernels

# Kernels that every chip has, and those that need compute capability 9.0.
NUM_KERNELS = 13
REPEATS = 100


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def kernels() -> list[BackwardKernel]:
    """All kernels of the file, loaded."""
    index = torch.cuda.current_device()
    gpu = plan.device_gpu(index)
    chosen = backward_kernels(gpu)
    jobs = [(spec, config, name) for spec, config in chosen for name in kernels_of("bwd")]
    compiled = compile_many([(kernel_source(*job), gpu.target) for job in jobs])
    for (spec, config, name), kernel in zip(jobs, compiled, strict=True):
        assert not isinstance(kernel, CompileError), f"{spec.slug()} {config.slug()} {name}: {kernel}"
        plan.loaded_kernel(spec, config, index, kernel, name=name)
    return chosen


@pytest.mark.parametrize("number", range(NUM_KERNELS))
def test_whole_gate(number: int, kernels: list[BackwardKernel]) -> None:
    """Every case, with gradients and workspaces that hold NaN before."""
    if number >= len(kernels):
        pytest.skip(f"{len(kernels)} of the kernels are legal on this GPU")
    spec, config = kernels[number]
    start = time.monotonic()
    cases = backward_cases(spec, config, budget="full")
    report = run_backward_gate(spec, config, backward_runner(spec, config, _device()), cases, device=_device())
    print(f"\n{spec.slug()} {config.slug()}: {report.text}, {time.monotonic() - start:.1f} s")
    assert report.passed, report.text


class _Call:
    """A call's tensors, large enough that blocks which wait for each other do not all fit on the chip."""

    def __init__(self, spec: KernelSpec) -> None:
        self.causal, self.scale = spec.causal, 1.0 / math.sqrt(spec.head_dim)
        case = GateCase(Problem(2, 1500, 1525, 8, 8), "normal", self.scale, dlse=True)
        self.q, self.k, self.v = make_inputs(spec, case, "cuda")
        self.dout, self.dlse = make_gradients(spec, case, "cuda")
        out, lse = attention_forward(self.q, self.k, self.v, causal=spec.causal, softmax_scale=self.scale)
        self.out, self.lse = out.to(self.q.dtype), lse.float()

    def gradients(self, spec: KernelSpec, config: BwdConfig) -> tuple[Tensor, Tensor, Tensor]:
        run = backward_runner(spec, config, _device())
        return run(self.q, self.k, self.v, self.out, self.lse, self.dout, self.dlse, self.scale)

    def changes(self, spec: KernelSpec, config: BwdConfig, first: tuple[Tensor, ...]) -> list[int]:
        """Of many launches beside other work, how many gave another dq, dk, dv than the first, bit for bit."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            factor = torch.randn(4096, 4096, device="cuda").bfloat16()
            product = torch.empty_like(factor)
        count = torch.zeros(3, dtype=torch.int64, device="cuda")
        for _ in range(REPEATS):
            with torch.cuda.stream(side):
                # A matmul that takes about as long as the kernels, and its place on the chip.
                torch.matmul(factor, factor, out=product)
            grads = self.gradients(spec, config)
            pairs = zip(grads, first, strict=True)
            count += torch.stack([(a.view(torch.int16) != b.view(torch.int16)).any() for a, b in pairs])
        torch.cuda.synchronize()
        return count.tolist()


@pytest.mark.parametrize("number", range(len(ORDERED)))
def test_a_fixed_order_gives_equal_bits_beside_other_work(number: int, kernels: list[BackwardKernel]) -> None:
    pairs = ordered_kernels(plan.device_gpu(torch.cuda.current_device()))
    if number >= len(pairs):
        pytest.skip("the vector reduction needs compute capability 9.0")
    (any_order, config), (fixed, _) = pairs[number]
    call = _Call(fixed)
    first = call.gradients(fixed, config)
    report = check_backward(
        first, call.q, call.k, call.v, call.dout, causal=fixed.causal, softmax_scale=call.scale, dlse=call.dlse
    )
    print(f"\n{fixed.slug()} {config.slug()}: {report.worst:.3g} of its limit at {report.where}")
    assert report.passed, report.text
    assert call.changes(fixed, config, first) == [0, 0, 0]
    # Without the order the same conditions change dq; dk and dv are sums of one block.
    dq, dk, dv = call.changes(any_order, config, call.gradients(any_order, config))
    print(f"in any order dq changed in {dq} of {REPEATS} launches")
    assert dq > 0
    assert (dk, dv) == (0, 0)
