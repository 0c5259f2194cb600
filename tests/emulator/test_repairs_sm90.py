"""Repairs of the guarded softmax in the sm90 family: exact counts, and exact results on data that need them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from fa2gen.constraints import infeasible_reason
from fa2gen.emulator import Counters, run_forward
from fa2gen.gate import check_forward
from fa2gen.hardware import arch_limits
from fa2gen.spec import FwdSm90Config, KernelSpec
from tests.guarded_rows import require_infinite_keys, require_unseen_nan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CONFIGS = (
    (64, "sm90_128x64_st2_q2_ov_pp_guarded_static_tma"),
    (64, "sm90_256x64_st4_q2_ov_xt_pp_guarded_dynamic_tma"),
    (64, "sm90_64x112_st1x1_q1r4_ps_ov_xt_guarded_static_direct"),
    (96, "sm90_128x96_st2_q1x1r2_ov_xt_pp_guarded_static_direct"),
    (128, "sm90_128x64_st2_q2_ov_xt_pp_guarded_dynamic_tma"),
    (128, "sm90_128x176_st1_q1r4_ov_pp_guarded_dynamic_direct"),
    (128, "sm90_192x64_st2x1_q1_ps_ov_guarded_static_tma"),
    (192, "sm90_128x96_st2_q1x1r4_ov_xt_pp_guarded_dynamic_direct"),
    (256, "sm90_128x64_st2_q1r8_ov_pp_guarded_dynamic_direct"),
)
# With and without maxima after a repair, P from registers and from shared memory.
FEW = (CONFIGS[0], CONFIGS[2], CONFIGS[4], CONFIGS[6])
each_config = pytest.mark.parametrize(("head_dim", "slug"), CONFIGS)
most_configs = pytest.mark.parametrize(
    ("head_dim", "slug"),
    [pytest.param(*config, marks=pytest.mark.slow if number % 2 else ()) for number, config in enumerate(CONFIGS)],
)
few_configs = pytest.mark.parametrize(("head_dim", "slug"), FEW)
# More than what a tile may lead the reference by, as a power of e: 2^24, and for fp16's range 2^15.
PAST_RANGE = {"bf16": 20.0, "fp16": 12.0}


def _inputs(head_dim: int, rows: int, keys: int, dtype: str = "bf16") -> tuple[Tensor, Tensor, Tensor]:
    """Small random q and k but for their last columns, which are for a test to set, and normal v."""
    generator = torch.Generator().manual_seed(rows + keys)
    q, k, v = (torch.randn(1, n, 1, head_dim, generator=generator) for n in (rows, keys, keys))
    q[..., -1] = k[..., -1] = 0
    return tuple(x.to(DTYPES[dtype]) for x in (q / head_dim**0.5, k, v))  # type: ignore[return-value]


def _run(
    slug: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float = 1.0, seed: int = 1
) -> tuple[Tensor, Tensor, Counters]:
    dtype = "fp16" if q.dtype == torch.float16 else "bf16"
    spec = KernelSpec(head_dim=q.shape[-1], dtype=dtype, causal=causal)
    config = FwdSm90Config.from_slug(slug)
    return run_forward(spec, config, q, k, v, softmax_scale=scale, num_sms=2, seed=seed)


def _checked(slug: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float = 1.0) -> Counters:
    """What a run counts whose result is right, with wgmma at its issue and at its wait."""
    counted = []
    for seed in (1, 2):
        out, lse, counters = _run(slug, q, k, v, causal=causal, scale=scale, seed=seed)
        report = check_forward(out, lse, q, k, v, causal=causal, softmax_scale=scale)
        assert report.passed, report.text
        counted.append(counters)
    assert counted[0].repairs == counted[1].repairs
    return counted[0]


def _unmasked(config: FwdSm90Config, rows: int, keys: int, causal: bool) -> list[int]:
    """For each warp and query tile with rows: the key tiles after the first that need no mask."""
    found = []
    for first in range(0, rows, 64):
        # Of the 64 rows of a warpgroup: what the last one and what the first one sees.
        ends = [min(keys, max(0, row + 1 + keys - rows)) if causal else keys for row in (first + 63, first)]
        own, whole = max(1, -(-ends[0] // config.block_n)), max(0, ends[1] - causal) // config.block_n
        found += [min(own - 1, whole)] * -(-min(64, rows - first) // 16)
    return found


def _expected(head_dim: int, steps: list[list[bool]]) -> int:
    """Repairs of warps, from what their key tiles do, in order: does the sum leave its range?

    Up to head dim 64 every one of them is repaired. Above, a warp that has repaired takes maxima while they grow.
    """
    if head_dim <= 64:
        return sum(map(sum, steps))
    return sum(grows and not before for warp in steps for before, grows in zip([False, *warp], warp, strict=False))


def test_configs_are_legal() -> None:
    for head_dim, slug in CONFIGS:
        for causal in (False, True):
            spec = KernelSpec(head_dim=head_dim, causal=causal)
            assert infeasible_reason(spec, FwdSm90Config.from_slug(slug), arch_limits((9, 0))) is None, slug
    assert {head_dim for head_dim, _ in CONFIGS} == {64, 96, 128, 192, 256}


@pytest.mark.parametrize("causal", [False, True])
@each_config
def test_normal_data_need_no_repair(head_dim: int, slug: str, causal: bool) -> None:
    """Also where no row of a warp sees a key of the first tile, and where a sum includes columns beyond the keys."""
    block_n = FwdSm90Config.from_slug(slug).block_n
    for rows, keys in ((200, 3 * block_n), (130, 3 * block_n + 5), (300, 2 * block_n + 40)):
        generator = torch.Generator().manual_seed(rows)
        q, k, v = (torch.randn(1, n, 1, head_dim, generator=generator).bfloat16() for n in (rows, keys, keys))
        assert _checked(slug, q, k, v, causal=causal, scale=head_dim**-0.5).repairs == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
@each_config
def test_every_tile_of_every_warp(head_dim: int, slug: str, causal: bool, dtype: str) -> None:
    """Logits grow towards the left from tile to tile, which is the way that the kernel goes."""
    config = FwdSm90Config.from_slug(slug)
    rows, keys = 192, 4 * config.block_n
    q, k, v = _inputs(head_dim, rows, keys, dtype)
    q[..., -1] = 1
    tiles_to_the_right = 3 - torch.arange(keys) // config.block_n
    k[..., -1] = (tiles_to_the_right * PAST_RANGE[dtype])[None, :, None]
    steps = [[True] * tiles for tiles in _unmasked(config, rows, keys, causal)]
    assert len(steps) == rows // 16
    assert any(len(warp) > 1 for warp in steps)
    assert _checked(slug, q, k, v, causal=causal).repairs == _expected(head_dim, steps)


@pytest.mark.parametrize("causal", [False, True])
@most_configs
def test_every_second_tile(head_dim: int, slug: str, causal: bool) -> None:
    """Between two that must be repaired is one that need not: a warp is back with its reference before the second."""
    config = FwdSm90Config.from_slug(slug)
    rows, keys = 64, 5 * config.block_n
    q, k, v = _inputs(head_dim, rows, keys)
    q[..., -1] = 1
    # From the right: two of the first reference, one that leads them, one beside that, and one that leads these.
    k[..., -1] = torch.tensor([40.0, 20, 20, 0, 0]).repeat_interleave(config.block_n)[None, :, None]
    steps = [[False, True, False, True][4 - tiles :] for tiles in _unmasked(config, rows, keys, causal)]
    assert _checked(slug, q, k, v, causal=causal).repairs == _expected(head_dim, steps)


@pytest.mark.parametrize("causal", [False, True])
@most_configs
def test_one_row(head_dim: int, slug: str, causal: bool) -> None:
    """One warp repairs, and the others of its warpgroup, with which it multiplies, do not."""
    config = FwdSm90Config.from_slug(slug)
    q, k, v = _inputs(head_dim, 100, 3 * config.block_n + 60)
    q[:, 77, :, -1] = 1
    k[:, 3, :, -1] = 25
    assert _checked(slug, q, k, v, causal=causal).repairs == 1


@each_config
def test_one_query_tile_of_several(head_dim: int, slug: str) -> None:
    """What a repair leaves behind, such as a wanted maximum, is not the next query tile's."""
    config = FwdSm90Config.from_slug(slug)
    q, k, v = _inputs(head_dim, 4 * config.block_m, 3 * config.block_n)
    q[:, config.block_m : 2 * config.block_m, :, -1] = 1
    k[:, 70, :, -1] = 20
    assert _checked(slug, q, k, v).repairs == config.block_m // 16


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
@most_configs
def test_sharp_logits(head_dim: int, slug: str, causal: bool, dtype: str) -> None:
    """Sixty times as large: most rows attend to one key, and which tile has it is chance."""
    config = FwdSm90Config.from_slug(slug)
    generator = torch.Generator().manual_seed(9)
    keys = 3 * config.block_n + 17
    q, k, v = (torch.randn(1, n, 1, head_dim, generator=generator).to(DTYPES[dtype]) for n in (150, keys, keys))
    assert _checked(slug, q * 60, k, v, causal=causal, scale=head_dim**-0.5).repairs > 0


@pytest.mark.parametrize("amount", [200.0, 3000.0, 100000.0])
@few_configs
def test_large_references(head_dim: int, slug: str, amount: float) -> None:
    """References that the FFMA would round too coarsely, of the first tile, of a repaired one and of those after it."""
    config = FwdSm90Config.from_slug(slug)
    q, k, v = _inputs(head_dim, 64, 4 * config.block_n)
    q[..., -1] = 1
    for leads in ([1, 1, 1, 1], [0, 0, 1, 0], [1, 0.75, 0.5, 0.25], [0, 1, 1, 0], [-1, -1, -1, -1], [1, -1, 1, -1]):
        k[..., -1] = (amount * torch.tensor(leads)).repeat_interleave(config.block_n)[None, :, None]
        _checked(slug, q, k, v)


@few_configs
def test_values_near_the_end_of_bf16(head_dim: int, slug: str) -> None:
    """A key that leads by e^20 and holds values of 3e38: p v overflows, the result does not."""
    q, k, v = _inputs(head_dim, 64, 400)
    q[..., -1] = 1
    k[:, 5, :, -1] = 20
    v[:, 5] = 3e38
    assert _checked(slug, q, k, v).repairs > 0


@pytest.mark.parametrize("lead", [5.0, 11.0, 13.0])
@few_configs
def test_weights_beyond_fp16(head_dim: int, slug: str, lead: float) -> None:
    """65504 is e^11.09; a lane's sum must stay below 32768, e^10.4."""
    q, k, v = _inputs(head_dim, 64, 400, "fp16")
    q[..., -1] = 1
    k[:, :100, :, -1] = lead
    assert (_checked(slug, q, k, v).repairs > 0) == (lead > 10)


@few_configs
def test_infinite_keys(head_dim: int, slug: str) -> None:
    keys = 4 * FwdSm90Config.from_slug(slug).block_n
    run = functools.partial(_run, slug)
    require_infinite_keys(run, lambda: _inputs(head_dim, 64, keys), (keys - 20, keys // 2, keys // 3))


@few_configs
def test_keys_that_a_row_does_not_see_may_be_nan(head_dim: int, slug: str) -> None:
    require_unseen_nan(functools.partial(_run, slug), *_inputs(head_dim, 100, 256))
