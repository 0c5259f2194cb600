"""The sm90 forward in the emulator: tiles, masks and odd lengths, both ways of running wgmma, every tunable's value."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os

import pytest
import torch
from torch import Tensor

from fa2gen.constraints import infeasible_reason
from fa2gen.emulator import run_forward
from fa2gen.errors import InfeasibleError
from fa2gen.gate import check_forward
from fa2gen.hardware import arch_limits
from fa2gen.launch import heads_per_section
from fa2gen.problem import Problem
from fa2gen.spec import FwdSm90Config, KernelSpec

FULL = bool(os.environ.get("FA2GEN_TEST_FULL"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# (head dim, config): one to four warpgroups; key tiles of one and a half panels and of several; each tunable's values
# with each other's. The seeds of a case are two: wgmma runs when it is issued, and when it is waited for.
TILES = (
    (64, "sm90_64x64_st2_q1_ov_static_tma"),
    (64, "sm90_192x128_st3_q2_ov_pp_dynamic_tma"),
    (64, "sm90_128x176_st2_q2_ov_pp_static_direct"),
    (128, "sm90_128x128_st2_q2_ov_pp_static_tma"),
    (128, "sm90_128x96_st1_q1_ov_dynamic_direct"),
    (128, "sm90_192x80_st2_q1_static_tma"),
    (128, "sm90_128x112_st2_q1_ps_ov_pp_dynamic_tma"),
    (128, "sm90_64x144_st2_q2_ps_static_direct"),
    (96, "sm90_128x128_st2_q1_ov_pp_dynamic_tma"),
    (40, "sm90_192x48_st4_q2_pp_static_direct"),
    (192, "sm90_128x112_st2_q1_ov_pp_static_tma"),
    (256, "sm90_128x80_st2_q1_ov_pp_dynamic_direct"),
    (256, "sm90_64x64_st2_q1_ps_ov_static_tma"),
    (64, "sm90_256x64_st4_q2_ov_xt_pp_guarded_dynamic_tma"),
    (64, "sm90_256x64_st4x1_q1x3_ov_xt_pp_static_direct"),
    (40, "sm90_256x48_st3x1_q1x1_pp_dynamic_tma"),
    (64, "sm90_64x64_st1x1_q2r4_ov_xt_guarded_static_tma"),
    (128, "sm90_128x64_st2x1_q1x1_ov_xt_pp_guarded_dynamic_direct_l2s8"),
    (128, "sm90_128x128_st2_q2r8_ov_xt_pp_guarded_static_tma"),
    (128, "sm90_128x176_st1_q1_ov_pp_guarded_dynamic_tma"),
    (128, "sm90_192x64_st3_q1x2_ps_ov_xt_pp_guarded_static_direct_l2s1"),
    (128, "sm90_64x112_st1x1_q1_ps_ov_xt_dynamic_direct"),
    (96, "sm90_128x96_st2_q2r3_ov_xt_guarded_static_direct"),
    (192, "sm90_128x96_st2_q1x1r4_ov_xt_pp_guarded_dynamic_direct"),
    (192, "sm90_128x64_st1x1_q1x1_ps_ov_pp_guarded_static_tma"),
    (256, "sm90_128x64_st2_q1r4_ov_pp_guarded_dynamic_direct"),
)
# One key, one query; several tiles; more queries than keys, where rows and whole tiles see none; just above and below
# the borders of tiles; several query tiles of four warpgroups, and most of them without a key.
SHAPES = ((1, 1), (113, 203), (203, 113), (300, 333), (65, 257), (193, 64), (513, 129), (321, 40))
CASES = [
    (head_dim, slug, causal, seqlens)
    for number, (head_dim, slug) in enumerate(TILES)
    for causal in (False, True)
    if causal or "_l2s" not in slug
    for seqlens in SHAPES[(number + causal) % 3 :: 3]
]


def _inputs(spec: KernelSpec, seqlen_q: int, seqlen_k: int, heads_k: int = 1, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 31 + seqlen_k)
    return [
        torch.randn(batch, seqlen, heads, spec.head_dim, generator=generator).to(DTYPES[spec.dtype])
        for seqlen, heads in ((seqlen_q, heads_k * spec.gqa_ratio), (seqlen_k, heads_k), (seqlen_k, heads_k))
    ]


def _check(spec: KernelSpec, config: FwdSm90Config, q: Tensor, k: Tensor, v: Tensor, **options: object) -> None:
    scale = spec.head_dim**-0.5
    out, lse, counters = run_forward(spec, config, q, k, v, softmax_scale=scale, **options)
    report = check_forward(out, lse, q, k, v, causal=spec.causal, softmax_scale=scale)
    assert report.passed, report.text
    assert counters.ldmatrix_conflicts == counters.st_shared_conflicts == 0


def test_there_are_enough_cases_and_they_are_legal() -> None:
    assert len(CASES) >= 120
    for head_dim, slug, causal, _ in CASES:
        spec, config = KernelSpec(head_dim=head_dim, causal=causal), FwdSm90Config.from_slug(slug)
        assert infeasible_reason(spec, config, arch_limits((9, 0))) is None, slug
    configs = [FwdSm90Config.from_slug(slug) for _, slug in TILES]
    for name in (field.name for field in dataclasses.fields(FwdSm90Config) if field.name != "family"):
        assert len({getattr(config, name) for config in configs}) > 1, name


@pytest.mark.parametrize(("head_dim", "slug", "causal", "seqlens"), CASES)
def test_tiles_masks_and_lengths(head_dim: int, slug: str, causal: bool, seqlens: tuple[int, int]) -> None:
    number = CASES.index((head_dim, slug, causal, seqlens))
    spec = KernelSpec(
        head_dim=head_dim, dtype=("bf16", "fp16")[number // 3 % 2], causal=causal, gqa_ratio=1 + number // 6 % 2
    )
    config = FwdSm90Config.from_slug(slug)
    q, k, v = _inputs(spec, *seqlens)
    for seed in (1, 2):
        _check(spec, config, q, k, v, seed=seed, num_sms=1 + number % 3)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("num_sms", [1, 2, 5])
@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_blocks_share_the_tiles(scheduler: str, num_sms: int, threads: int) -> None:
    """Two sections of heads, several query tiles of each, blocks in turns and at the same time."""
    spec = KernelSpec(head_dim=64, causal=True, gqa_ratio=3)
    config = FwdSm90Config(block_m=64, block_n=64, q_stages=2, ping_pong=False, scheduler=scheduler)
    _check(spec, config, *_inputs(spec, 130, 150, 2, 2), num_sms=num_sms, threads=threads)


@pytest.mark.parametrize("epilogue", ["tma", "direct"])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 72, 88, 104, 136, 200, 248])
def test_head_dims_that_fill_no_panel(head_dim: int, epilogue: str) -> None:
    """Columns beyond are zeros of TMA's, and are not written: the emulator forbids what lies between the rows."""
    spec = KernelSpec(head_dim=head_dim, causal=True)
    config = FwdSm90Config(block_m=64, block_n=64, ping_pong=False, epilogue=epilogue)
    q, k, v = _inputs(spec, 70, 90)
    out = torch.full((1, 70, 1, head_dim + 8), math.nan).to(q.dtype)[..., :head_dim]
    _check(spec, config, q, k, v, out=out)


@pytest.mark.parametrize("layout", ["heads first", "slices of NaN", "repeated heads"])
def test_views_that_tma_reads(layout: str) -> None:
    spec = KernelSpec(head_dim=64, gqa_ratio=2)
    config = FwdSm90Config(block_m=64, block_n=64, ping_pong=False)

    def view(x: Tensor) -> Tensor:
        batch, seqlen, heads, head_dim = x.shape
        if layout == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "repeated heads":
            return x[:, :, :1].expand(-1, -1, heads, -1)
        room = torch.full((batch, seqlen + 1, heads, head_dim + 8), math.nan).to(x.dtype)
        return room[:, :seqlen, :, 8:].copy_(x)

    _check(spec, config, *map(view, _inputs(spec, 70, 90, 2, 2)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("amount", [60.0, 3000.0, 1e6])
def test_logits_that_grow_along_the_keys(amount: float, overlap: bool) -> None:
    """Every tile brings a new maximum; the largest references take the other form of the exponent."""
    spec = KernelSpec(head_dim=64)
    config = FwdSm90Config(block_m=64, block_n=64, ping_pong=False, overlap=overlap)
    q, k, v = _inputs(spec, 70, 300)
    # Tiles are taken from the right, so that keys grow to the left.
    k = (k.float() * torch.linspace(amount, 0.1, 300)[None, :, None, None]).to(k.dtype)
    _check(spec, config, q, k, v)


def test_many_small_weights_count_beside_a_large_one() -> None:
    """A weight of e^-17 is below half a unit in the last place of 1: added one by one to it, all are lost.

    The lane that has the large one would then lack a quarter of the others: 1.7e-4 of the sum, where 1e-4 is allowed.
    """
    spec = KernelSpec(head_dim=8)
    config = FwdSm90Config(block_m=64, block_n=128, ping_pong=False)
    q, k, v = (torch.zeros(1, seqlen, 1, 8, dtype=torch.bfloat16) for seqlen in (1, 16384, 16384))
    q[..., 0], k[:, -1, :, 0] = 17.0 * math.sqrt(8), 1.0
    _check(spec, config, q, k, v)


def test_a_config_for_other_chips_is_refused() -> None:
    spec = KernelSpec(head_dim=59, alignment=2)
    with pytest.raises(InfeasibleError, match="TMA, which needs 16-byte alignment"):
        run_forward(spec, FwdSm90Config(), *_inputs(spec, 4, 4), softmax_scale=1.0)
    config = FwdSm90Config()
    for capability in ((8, 0), (10, 0)):
        reason = infeasible_reason(KernelSpec(), config, arch_limits(capability))
        assert reason is not None
        assert "compute capability 9.0" in reason


@pytest.mark.parametrize("softmax", ["online", "guarded"])
@pytest.mark.parametrize("causal", [False, True])
def test_levers_meet_each_other(causal: bool, softmax: str) -> None:
    """All combinations of what decides the order of waits, on one shape with several tiles for each block."""
    spec = KernelSpec(head_dim=64, causal=causal)
    q, k, v = _inputs(spec, 200, 230, 2)
    number = 0
    for p_in_smem, overlap, overlap_tiles, ping_pong, epilogue, (q_stages, q_extra), (
        num_stages,
        k_extra,
    ) in itertools.product(*((False, True),) * 4, ("tma", "direct"), ((1, 0), (1, 1), (2, 0)), ((1, 1), (2, 0))):
        config = FwdSm90Config(
            block_m=128, block_n=64, num_stages=num_stages, q_stages=q_stages, p_in_smem=p_in_smem, overlap=overlap,
            ping_pong=ping_pong, scheduler=("static", "dynamic")[number // 2 % 2], epilogue=epilogue, softmax=softmax,
            overlap_tiles=overlap_tiles, q_extra=q_extra, k_extra=k_extra,
        )  # fmt: skip
        if infeasible_reason(spec, config, arch_limits((9, 0))) is not None:
            continue
        number += 1
        # A part of them for each choice of the parameters, another one each time.
        if number % (3 if FULL else 12) == causal + (softmax == "guarded"):
            _check(spec, config, q, k, v, num_sms=1 + number % 2, seed=number)
    assert number >= 40


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(
    "levers",
    [
        {"epilogue": "tma", "q_stages": 1},
        {"epilogue": "tma", "q_stages": 2},
        {"epilogue": "direct", "q_stages": 1},
        {"epilogue": "direct", "q_stages": 2, "softmax": "guarded"},
        {"epilogue": "tma", "q_stages": 2, "softmax": "guarded", "overlap_tiles": True},
        {"epilogue": "direct", "q_stages": 1, "overlap_tiles": True},
        {"epilogue": "tma", "q_stages": 1, "overlap": False},
    ],
    ids=lambda levers: "-".join(map(str, levers.values())),
)
@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_blocks_that_walk_over_tiles_without_visible_keys(
    scheduler: str, levers: dict[str, object], block_m: int
) -> None:
    """They lie next to tiles with keys, at the start, between two sections and at the end of what a block takes."""
    spec = KernelSpec(head_dim=16, causal=True)
    config = FwdSm90Config(
        block_m=block_m, block_n=block_m // 4, num_stages=4, ping_pong=block_m > 64, scheduler=scheduler, **levers
    )
    # Of eight tiles of 64 rows, or four of 128, the last one or two see a key, of each of three heads.
    for seqlen_k in (20, 70):
        q, k, v = _inputs(spec, 500, seqlen_k, 3)
        for seed in range(4):
            _check(spec, config, q, k, v, num_sms=1 + seed % 3, seed=seed)


def test_sections_by_size() -> None:
    """K and V of 1 MiB are those of four heads: five go in two sections."""
    spec = KernelSpec(head_dim=256, causal=True)
    assert heads_per_section(spec, Problem(1, 65, 256, 5, 5), 1 << 20) == 4
    config = FwdSm90Config(block_m=64, block_n=64, ping_pong=False, section_mib=1)
    _check(spec, config, *_inputs(spec, 65, 256, 5), num_sms=2)
