"""2,000 random calls, right or refused as they should be, in one process whose context survives all of them.

``FA2GEN_FUZZ_SEED`` is the seed of the first call and ``FA2GEN_FUZZ_CALLS`` their number; call n has seed + n, and a
seed alone makes its call, so that a failing one can be repeated by itself. The generator is ``tests/fuzz_calls.py``.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fa2gen.codegen import render_kernel
from fa2gen.compile import compile_many
from fa2gen.constraints_sm90 import compile_target
from fa2gen.errors import CompileError
from fa2gen.runtime import attention, plan
from fa2gen.runtime.request import Request, read_request
from fa2gen.spec import FwdConfig, KernelSpec
from tests.fuzz_calls import (
    Call,
    bad_call,
    check_result,
    draw_call,
    is_followed_by_a_bad_call,
    kernel_pool,
    make_tensors,
)

FIRST_SEED = int(os.environ.get("FA2GEN_FUZZ_SEED", "0"))
NUM_CALLS = int(os.environ.get("FA2GEN_FUZZ_CALLS", "2000"))
POOL_KERNELS, FROM_TABLES = 88, 8
# Calls that are launched before the first of them is looked at.
IN_FLIGHT = 16


def _kernel_of(call: Call, index: int) -> tuple[KernelSpec, FwdConfig]:
    """What the call runs; the tables' choice depends on its sizes."""
    config = call.kernel.config
    if config is None:
        device = torch.device("cuda", index)
        scale = 1.0 / math.sqrt(call.head_dim)
        request = Request(call.spec, call.problem, call.head_dim, scale, "cuda", device, {}, {})
        config = plan.match_config(request, index, None).config
    return call.spec, config


def _compile_ahead(calls: Sequence[Call], index: int) -> int:
    jobs = list(dict.fromkeys(_kernel_of(call, index) for call in calls if not call.is_empty))
    target = plan.device_gpu(index).target
    compiled = compile_many([(render_kernel(*job), compile_target(job[1], target)) for job in jobs])
    for (spec, config), kernel in zip(jobs, compiled, strict=True):
        assert not isinstance(kernel, CompileError), f"{spec.slug()} {config.slug()}: {kernel}"
        plan.loaded_kernel(spec, config, index, kernel)
    return len(jobs)


def _run(call: Call, tensors: tuple[Tensor, Tensor, Tensor]) -> Any:
    """The call itself, and the refused one that may follow it, after which the context must be alive."""
    q, k, v = tensors
    needed = read_request(q, k, v, causal=call.spec.causal, softmax_scale=call.softmax_scale, backend="cuda")
    assert needed.is_empty or needed.spec == call.spec, "the call needs the kernel that was compiled"
    poison = (torch.full_like(q, math.nan), torch.full((q.shape[:3].numel(),), math.nan, device=q.device))
    del poison
    result = attention(q, k, v, **call.options)
    if is_followed_by_a_bad_call(call):
        name, bad, options, error = bad_call(call, q, k, v, "auto")
        with pytest.raises(error) as caught:
            attention(*bad, **options)
        assert type(caught.value) is error, f"bad call ({name}) raised {caught.value!r}"
        torch.cuda.synchronize()
    return result


def test_fuzz() -> None:
    index = torch.cuda.current_device()
    pool = kernel_pool(plan.device_gpu(index).arch, count=POOL_KERNELS, from_tables=FROM_TABLES)
    calls = [draw_call(seed, pool) for seed in range(FIRST_SEED, FIRST_SEED + NUM_CALLS)]
    num_kernels = _compile_ahead(calls, index)
    print(f"fuzz: seeds {FIRST_SEED} to {FIRST_SEED + NUM_CALLS - 1}, {num_kernels} kernels")
    todo, right, worst = iter(calls), 0, 0.0
    while flight := list(itertools.islice(todo, IN_FLIGHT)):
        call = flight[0]
        try:
            launched = []
            for call in flight:
                tensors = make_tensors(call, "cuda")
                launched.append((call, tensors, _run(call, tensors)))
            for call, tensors, result in launched:
                report = check_result(call, result, *tensors)
                assert report.passed, report.text
                right, worst = right + 1, max(worst, report.worst)
        except BaseException as error:
            raise AssertionError(
                f"{error!r}\n{call}\nafter {right} right calls; in flight since seed {flight[0].seed}. To repeat it: "
                f"FA2GEN_FUZZ_SEED={call.seed} FA2GEN_FUZZ_CALLS=1 pytest tests/gpu/test_fuzz.py"
            ) from error
    assert torch.ones(4, device="cuda").sum().item() == 4
    assert right == NUM_CALLS
    print(f"fuzz: {right} calls right, the worst at {worst:.3g} of its limit")
