"""Random calls with their gradients on the CPU: the generator of ``tests/gpu/test_fuzz_gradients.py``."""

from __future__ import annotations

import pytest

from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import arch_limits
from fa2gen.runtime import describe
from tests.fuzz_calls import LAYOUTS, make_tensors
from tests.fuzz_gradients import draw_gradient_call, gradient_pool, run_gradient_call

ARCH = arch_limits((8, 0))


@pytest.mark.slow
def test_random_gradients() -> None:
    """Five calls of one set of kernels."""
    pool = gradient_pool(ARCH, count=1, max_head_dim=64)
    for seed in range(5):
        drawn = draw_gradient_call(seed, pool, max_length=130, max_pairs=8_000, max_elements=60_000)
        report = run_gradient_call(drawn, "cpu", "emulator")
        assert report.passed, f"{drawn}\n{report.text}"


def test_calls_are_fair_and_need_the_kernels_that_they_name() -> None:
    """The float64 formula, rounded once, passes for each."""
    pool = gradient_pool(arch_limits((9, 0)), count=48)
    worst = 0.0
    for seed in range(24):
        drawn = draw_gradient_call(seed, pool, max_length=130, max_pairs=4_000, max_elements=20_000)
        report = run_gradient_call(drawn, "cpu", "reference")
        assert report.passed, f"{drawn}\n{report.text}"
        worst = max(worst, report.worst)
        if drawn.call.is_empty:
            continue
        q, k, v = make_tensors(drawn.call, "cpu")
        options = {"causal": drawn.call.spec.causal, "softmax_scale": drawn.call.softmax_scale, "backend": "emulator"}
        strict = drawn.kernels.spec.deterministic
        described = describe(q, k, v, backward=True, deterministic=strict, **options)
        assert described.spec == drawn.kernels.spec, drawn
    assert {draw_gradient_call(seed, pool).dout_layout for seed in range(200)} == set(LAYOUTS)
    assert 0 < worst <= 0.5


def test_the_pool_is_broad_and_legal() -> None:
    arch = arch_limits((9, 0))
    pool = gradient_pool(arch, count=48)
    assert gradient_pool(arch, count=48) == pool
    assert all(infeasible_reason(kernels.spec, kernels.config, arch) is None for kernels in pool)
    configs = [kernels.config for kernels in pool]
    for name in ("roles", "num_stages", "warps_d", "kv_in_regs", "reduction", "split_heads"):
        assert len({getattr(config, name) for config in configs}) == 2, name
    assert {kernels.spec.deterministic for kernels in pool} == {False, True}
    assert {32, 64, 96, 128, 192, 256} <= {kernels.spec.head_dim for kernels in pool}
