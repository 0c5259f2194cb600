"""The sm90 family on a Hopper GPU: every tunable's value, streams and graphs with drawn tiles, what TMA cannot read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from fa2gen.bench.cells import Cell
from fa2gen.bench.own import count_repairs
from fa2gen.codegen import render_kernel
from fa2gen.compile import compile_many
from fa2gen.constraints import infeasible_reason
from fa2gen.constraints_sm90 import compile_target, consumer_registers, estimate_registers
from fa2gen.errors import CompileError, InfeasibleError
from fa2gen.gate import check_forward
from fa2gen.hardware import arch_limits
from fa2gen.problem import Problem
from fa2gen.runtime import attention, describe, plan
from fa2gen.spec import FwdSm90Config, KernelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# (seqlen_q, seqlen_k): one tile and less, several, rows that see no key, one query, lengths around tile borders.
SHAPES = ((113, 203), (1025, 1025), (300, 129), (1, 700), (193, 191), (64, 1))
HEAD_DIMS = (8, 40, 64, 96, 128, 136, 192, 256)
FAST = {
    64: "sm90_256x64_st4_q2_ov_xt_pp_guarded_{}_tma",
    128: "sm90_128x128_st2_q2r8_ov_xt_pp_guarded_{}_tma",
    256: "sm90_128x64_st2_q1x1r4_ov_xt_pp_guarded_{}_direct",
}


def fast_config(head_dim: int, scheduler: str) -> FwdSm90Config:
    return FwdSm90Config.from_slug(FAST[head_dim].format(scheduler))


def covering_kernels() -> list[tuple[KernelSpec, FwdSm90Config]]:
    """Every value of every tunable, each with one to four warpgroups, over head dims and kinds of specs."""
    kernels = []
    levers = itertools.product((64, 128, 192, 256), ("static", "dynamic"), ("tma", "direct"))
    for number, (block_m, scheduler, epilogue) in enumerate(levers):
        for i, head_dim in enumerate(HEAD_DIMS):
            turn = number + i
            spec = KernelSpec(
                head_dim=head_dim,
                dtype=("bf16", "fp16")[turn // 2 % 2],
                causal=turn % 2 == 0,
                gqa_ratio=(1, 3, 8)[turn % 3],
            )
            overlap, q_stages = turn % 5 != 4, 1 + turn // 2 % 2
            config = FwdSm90Config(
                block_m=block_m,
                block_n=(128, 64, 96, 80, 176, 112)[turn % 6] if block_m < 256 else (64, 48)[turn % 2],
                num_stages=(2, 1, 3)[turn % 3],
                k_extra=turn // 3 % 2,
                q_stages=q_stages,
                q_extra=turn // 4 % 2 if q_stages == 1 and block_m > 64 else 0,
                q_regs=(0, 1, 4, 3)[turn % 4] if head_dim > 40 else 0,
                p_in_smem=turn % 4 == 3,
                overlap=overlap,
                ping_pong=block_m > 64 and turn % 3 != 2,
                softmax="guarded" if overlap and turn % 7 < 5 else "online",
                overlap_tiles=overlap and turn % 3 > 0 and (q_stages == 2 or epilogue == "direct"),
                scheduler=scheduler,
                section_mib=turn // 2 % 2 if spec.causal else 0,
                epilogue=epilogue,
            )
            # ptxas serializes products where the estimate leaves nothing free.
            room = consumer_registers(config) - estimate_registers(spec, config)
            if infeasible_reason(spec, config, arch_limits((9, 0))) is None and room >= 4:
                kernels.append((spec, config))
    return kernels


KERNELS = covering_kernels()


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    index = torch.cuda.current_device()
    if torch.cuda.get_device_capability(index) != (9, 0):
        pytest.skip("the sm90 family needs a GPU of compute capability 9.0")
    jobs = [*KERNELS]
    for head_dim, scheduler, causal in itertools.product(FAST, ("static", "dynamic"), (False, True)):
        jobs.append((KernelSpec(head_dim=head_dim, causal=causal), fast_config(head_dim, scheduler)))
    jobs = list(dict.fromkeys(jobs))
    target = plan.device_gpu(index).target
    compiled = compile_many([(render_kernel(*job), compile_target(job[1], target)) for job in jobs])
    for (spec, config), kernel in zip(jobs, compiled, strict=True):
        assert not isinstance(kernel, CompileError), f"{spec.slug()} {config.slug()}: {kernel}"
        plan.loaded_kernel(spec, config, index, kernel)


def _inputs(spec: KernelSpec, batch: int, seqlen_q: int, seqlen_k: int, heads_k: int) -> list[Tensor]:
    torch.manual_seed(seqlen_q * 31 + seqlen_k)
    return [
        torch.randn(batch, seqlen, heads, spec.head_dim, device="cuda").to(DTYPES[spec.dtype])
        for seqlen, heads in ((seqlen_q, heads_k * spec.gqa_ratio), (seqlen_k, heads_k), (seqlen_k, heads_k))
    ]


def test_every_value_is_covered() -> None:
    assert len(KERNELS) >= 60
    for field in dataclasses.fields(FwdSm90Config):
        values = {getattr(config, field.name) for _, config in KERNELS}
        assert (len(values) > 1) == (field.name != "family"), field.name
    assert {spec.head_dim for spec, _ in KERNELS} == {*HEAD_DIMS}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel[0].slug()}-{kernel[1].slug()}")
def test_configs(kernel: tuple[KernelSpec, FwdSm90Config]) -> None:
    spec, config = kernel
    for seqlen_q, seqlen_k in SHAPES:
        q, k, v = _inputs(spec, 1 if seqlen_q > 1000 else 2, seqlen_q, seqlen_k, 2)
        # The allocator hands these out again.
        poison = (torch.full_like(q, math.nan), torch.full((q.shape[:3].numel(),), math.nan, device="cuda"))
        del poison
        out, lse = attention(q, k, v, causal=spec.causal, return_lse=True, config=config)
        report = check_forward(out, lse, q, k, v, causal=spec.causal, softmax_scale=None)
        assert report.passed, f"{seqlen_q} x {seqlen_k}: {report.text}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", FAST)
def test_scores_that_leave_the_range_of_their_reference(head_dim: int, causal: bool, dtype: str) -> None:
    """Of some rows they grow along the keys as these are taken, of others one key late in that order has the weight."""
    spec = KernelSpec(head_dim=head_dim, dtype=dtype, causal=causal)
    q, k, v = _inputs(spec, 2, 1025, 1025, 4)
    growth = torch.linspace(40.0, 0.1, 1025, device="cuda")[None, :, None, None]
    k[:, :, :2] = (k[:, :, :2].float() * growth).to(k.dtype)
    k[:, 3, 2] = 8 * q[:, 1000, 2]
    config = fast_config(head_dim, "dynamic")
    cell = Cell(spec, Problem(2, 1025, 1025, 4, 4))
    repairs = count_repairs(cell, q, k, v, describe(q, k, v, causal=causal, config=config))
    plain = _inputs(spec, 2, 1025, 1025, 4)
    assert repairs is not None
    assert repairs > 100
    assert count_repairs(cell, *plain, describe(*plain, causal=causal, config=config)) == 0
    out, lse = attention(q, k, v, causal=causal, return_lse=True, config=config)
    report = check_forward(out, lse, q, k, v, causal=causal, softmax_scale=None)
    assert report.passed, report.text


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", FAST)
def test_a_thousand_launches_give_equal_bits(head_dim: int, causal: bool) -> None:
    q, k, v = _inputs(KernelSpec(head_dim=head_dim), 2, 1025, 1025, 8)
    config = fast_config(head_dim, "dynamic" if causal else "static")
    first, first_lse = attention(q, k, v, causal=causal, return_lse=True, config=config)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        out, lse = attention(q, k, v, causal=causal, return_lse=True, config=config)
        same &= (out == first).all() & (lse == first_lse).all()
    assert bool(same)


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_launches_on_several_streams_at_a_time(scheduler: str) -> None:
    q, k, v = _inputs(KernelSpec(), 1, 2049, 2049, 8)
    config = fast_config(128, scheduler)
    expected = attention(q, k, v, causal=True, config=config)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for turn in range(80):
        with torch.cuda.stream(streams[turn % 4]):
            results.append(attention(q, k, v, causal=True, config=config))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in results)


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_launches_of_several_threads(scheduler: str) -> None:
    """All on the default stream: they allocate in one order and may launch in another.

    Outputs are given up soon, so that their memory is taken again, next to what the launches themselves need.
    """
    q, k, v = _inputs(KernelSpec(head_dim=64), 1, 113, 203, 4)
    config = fast_config(64, scheduler)
    expected = attention(q, k, v, config=config)
    wrong = 0
    for _ in range(100):
        with ThreadPoolExecutor(8) as pool:
            outputs = pool.map(lambda _: attention(q, k, v, config=config), range(64))
            wrong += sum(not torch.equal(out, expected) for out in outputs)
    assert wrong == 0, f"{wrong} of 6400"


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_a_graph_may_be_replayed(scheduler: str) -> None:
    q, k, v = _inputs(KernelSpec(), 1, 1025, 1025, 8)
    config = fast_config(128, scheduler)
    expected = attention(q, k, v, causal=True, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What the graph's own memory is used for between the two launches is not their affair.
        first = attention(q, k, v, causal=True, config=config)
        noise = torch.full((1 << 16,), -1, dtype=torch.int64, device="cuda")
        del noise
        second = attention(q, k, v, causal=True, config=config)
    for _ in range(20):
        first.fill_(math.nan)
        second.fill_(math.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


@pytest.mark.parametrize("layout", ["heads_first", "fused", "expanded heads", "expanded rows", "slice"])
@pytest.mark.parametrize("head_dim", FAST)
def test_views_that_tma_reads(head_dim: int, layout: str) -> None:
    def view(seqlen: int) -> Tensor:
        shape = {
            "heads_first": (2, 4, seqlen, head_dim),
            "fused": (2, seqlen, 3, 4, head_dim),
            "expanded heads": (2, seqlen, 1, head_dim),
            "expanded rows": (2, 1, 4, head_dim),
            "slice": (2, seqlen + 8, 4, 2 * head_dim),
        }[layout]
        x = torch.randn(shape, device="cuda").bfloat16()
        if layout == "heads_first":
            return x.transpose(1, 2)
        if layout == "fused":
            return x[:, :, 1]
        if layout == "slice":
            return x[:, 8:, :, head_dim:]
        return x.expand(2, seqlen, 4, head_dim)

    torch.manual_seed(head_dim)
    q, k, v = view(333), view(700), view(700)
    config = fast_config(head_dim, "static")
    assert describe(q, k, v, config=config).obstacle is None
    out, lse = attention(q, k, v, return_lse=True, config=config)
    report = check_forward(out, lse, q, k, v, causal=False, softmax_scale=None)
    assert report.passed, report.text


def test_what_tma_cannot_read_runs_the_other_family_and_says_why() -> None:
    """Few queries of unaligned tensors stay where they are; many are copied, and then TMA reads the copies."""
    room = torch.randn(2, 701, 4, 131, device="cuda").bfloat16()
    k = v = room[:, 1:, :, 1:129]
    q = torch.randn(2, 17, 4, 128, device="cuda").bfloat16()
    said = describe(q, k, v)
    assert said.config is not None
    assert said.config.family == "sm80"
    assert said.obstacle is not None
    assert "k has a batch stride of 367324 elements, which is no multiple of 16 bytes" in said.obstacle
    assert f"family   sm80, since TMA cannot read the tensors: {said.obstacle}" in str(said)
    out, lse = attention(q, k, v, return_lse=True)
    assert check_forward(out, lse, q, k, v, causal=False, softmax_scale=None).passed
    with pytest.raises(InfeasibleError, match="TMA"):
        attention(q, k, v, config=fast_config(128, "static"))
    many = torch.randn(2, 701, 4, 128, device="cuda").bfloat16()
    assert describe(many, k, v).obstacle is None
    assert attention(many, k, v, config=fast_config(128, "static")).shape == many.shape
