"""1,000 random calls with their gradients, in one process.

``FA2GEN_FUZZ_SEED`` is the seed of the first call and ``FA2GEN_FUZZ_CALLS`` their number, as for ``test_fuzz.py``.
"""

from __future__ import annotations

import math
import os

import torch

from fa2gen.codegen import kernels_of, render_kernel
from fa2gen.compile import compile_many
from fa2gen.errors import CompileError
from fa2gen.runtime import plan
from tests.fuzz_gradients import draw_gradient_call, gradient_pool, run_gradient_call

FIRST_SEED = int(os.environ.get("FA2GEN_FUZZ_SEED", "0"))
NUM_CALLS = int(os.environ.get("FA2GEN_FUZZ_CALLS", "1000"))
POOL_KERNELS = 48


def test_fuzz_gradients() -> None:
    index = torch.cuda.current_device()
    gpu = plan.device_gpu(index)
    pool = gradient_pool(gpu.arch, count=POOL_KERNELS)
    wanted = dict.fromkeys((k.forward.spec, k.forward.config) for k in pool)
    wanted |= dict.fromkeys((k.spec, k.config) for k in pool)
    jobs = [(spec, config, name) for spec, config in wanted for name in kernels_of(spec.kind)]
    compiled = compile_many([(render_kernel(spec, config, kernel=name), gpu.target) for spec, config, name in jobs])
    for (spec, config, name), kernel in zip(jobs, compiled, strict=True):
        assert not isinstance(kernel, CompileError), f"{spec.slug()} {config.slug()}: {kernel}"
        plan.loaded_kernel(spec, config, index, kernel, name=name)
    worst = 0.0
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_CALLS):
        drawn = draw_gradient_call(seed, pool)
        # What is allocated next holds NaN.
        poison = [torch.full((1 << size,), math.nan, device="cuda") for size in (12, 16, 20, 22)]
        del poison
        try:
            report = run_gradient_call(drawn, "cuda")
            assert report.passed, report.text
        except BaseException as error:
            raise AssertionError(
                f"{error!r}\n{drawn}\nTo repeat it: FA2GEN_FUZZ_SEED={seed} FA2GEN_FUZZ_CALLS=1 pytest "
                "tests/gpu/test_fuzz_gradients.py"
            ) from error
        worst = max(worst, report.worst)
    print(f"fuzz: gradients of {NUM_CALLS} calls right, the worst at {worst:.3g} of its limit")
