"""Random calls through the emulator: the generator of ``tests/gpu/test_fuzz.py`` on the CPU, and what it covers."""

from __future__ import annotations

from collections import Counter

import pytest

from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import arch_limits
from fa2gen.runtime import attention
from fa2gen.runtime.request import read_request
from fa2gen.spec import FwdConfig, FwdSm90Config
from tests.fuzz_calls import (
    LAYOUTS,
    Call,
    PoolKernel,
    bad_call,
    check_result,
    draw_call,
    is_followed_by_a_bad_call,
    kernel_pool,
    make_tensors,
)

POOL = kernel_pool(arch_limits((8, 0)), count=8, from_tables=1, max_head_dim=64)
# The last one reads single elements.
KERNELS = [0, 5, 7]
SM90_POOL = [
    kernel
    for kernel in kernel_pool(arch_limits((9, 0)), count=40, from_tables=1, max_head_dim=64)
    if isinstance(kernel.config, FwdSm90Config)
]
# One to three warpgroups, both schedulers, both epilogues, P from registers and from shared memory.
SM90_KERNELS = [2, 8, 10]


def _calls(kernel: PoolKernel, number: int, count: int) -> list[Call]:
    pool, first = [kernel], 8 * number
    return [
        draw_call(seed, pool, max_length=130, max_pairs=8_000, max_elements=60_000)
        for seed in range(first, first + count)
    ]


@pytest.mark.parametrize(
    ("kernel", "number"),
    [(POOL[number], number) for number in KERNELS] + [(SM90_POOL[number], number) for number in SM90_KERNELS],
    ids=[f"sm80-{number}" for number in KERNELS] + [f"sm90-{number}" for number in SM90_KERNELS],
)
def test_random_calls(kernel: PoolKernel, number: int) -> None:
    """Five seeds of each kernel; a call after the fourth is refused."""
    for call in _calls(kernel, number, 5):
        q, k, v = make_tensors(call, "cpu")
        result = attention(q, k, v, backend="emulator", **call.options)
        report = check_result(call, result, q, k, v)
        assert report.passed, f"{call}\n{report.text}"
        if is_followed_by_a_bad_call(call):
            _, tensors, options, error = bad_call(call, q, k, v, "emulator")
            with pytest.raises(error):
                attention(*tensors, **options)


def test_every_bad_call_raises_its_own_error() -> None:
    """Over the reference's inputs nothing is built: an error comes before the kernel does."""
    seen: Counter[str] = Counter()
    for seed in range(3, 1200, 8):
        call = draw_call(seed, POOL, max_length=40, max_pairs=5_000)
        q, k, v = make_tensors(call, "cpu")
        name, tensors, options, error = bad_call(call, q, k, v, "emulator")
        seen[name] += 1
        if name == "scale too large" and seen[name] > 1:
            continue  # known to the launch plan alone, which a kernel that is built comes before
        with pytest.raises(error) as caught:
            attention(*tensors, **options)
        assert type(caught.value) is error, (name, call)
    assert len(seen) == 21


def test_calls_need_the_kernel_that_they_name() -> None:
    """Or else a run would compile kernels that nobody counted."""
    pool = kernel_pool(arch_limits((9, 0)), count=88, from_tables=8)
    layouts, data, lengths = set(), set(), set()
    for seed in range(150):
        call = draw_call(seed, pool, max_length=300, max_pairs=20_000, max_elements=50_000)
        q, k, v = make_tensors(call, "cpu")
        options = {"causal": call.spec.causal, "softmax_scale": call.softmax_scale}
        request = read_request(q, k, v, backend="emulator", **options)
        assert request.is_empty == call.is_empty
        assert request.is_empty or request.spec == call.spec, call
        assert request.problem == call.problem
        layouts.update(call.layouts)
        data.add(call.data)
        lengths.add((call.seqlen_q, call.seqlen_k))
    assert layouts == set(LAYOUTS)
    assert len(data) == 6
    assert any(0 in pair for pair in lengths)


def test_the_pool_is_broad_and_legal() -> None:
    arch = arch_limits((9, 0))
    pool = kernel_pool(arch, count=88, from_tables=8)
    assert kernel_pool(arch, count=88, from_tables=8) == pool
    configs = [kernel.config for kernel in pool if kernel.config is not None]
    assert len(configs) == 80
    assert all(infeasible_reason(k.spec, k.config, arch) is None for k in pool if k.config is not None)
    sm80 = [config for config in configs if isinstance(config, FwdConfig)]
    assert {config.pipeline for config in sm80} == {"barrier", "ring"}
    assert {config.proof for config in sm80} == {"step", "block"}
    assert {config.num_stages for config in sm80} == {1, 2, 3}
    assert {config.warps_n for config in sm80} == {1, 2}
    assert {config.pack_gqa for config in sm80} == {False, True}
    sm90 = [config for config in configs if isinstance(config, FwdSm90Config)]
    assert len(sm90) > 20
    assert {config.warpgroups for config in sm90} == {1, 2, 3, 4}
    assert {config.softmax for config in sm90} == {"online", "guarded"}
    assert {config.overlap_tiles for config in sm90} == {False, True}
    assert {config.q_regs for config in sm90} == {0, 4, 8}
    assert {config.k_extra for config in sm90} == {0, 1}
    assert {config.q_extra for config in sm90} == {0, 1}
    assert {config.scheduler for config in sm90} == {"static", "dynamic"}
    assert {config.epilogue for config in sm90} == {"tma", "direct"}
    assert {config.p_in_smem for config in sm90} == {False, True}
    assert {kernel.spec.alignment for kernel in pool} == {2, 16}
    assert {32, 64, 96, 128, 192, 256} <= {kernel.spec.head_dim for kernel in pool}


def test_a_seed_repeats_its_call() -> None:
    assert draw_call(17, POOL) == draw_call(17, POOL)
    first, again = (make_tensors(draw_call(17, POOL), "cpu") for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
