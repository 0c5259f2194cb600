"""Repairs of the guarded softmax: exact counts, and exact results where its range is left or nothing is finite."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from fa2gen.emulator import Counters, run_forward
from fa2gen.gate import check_forward
from fa2gen.spec import FwdConfig, KernelSpec
from tests.guarded_rows import require_infinite_keys, require_unseen_nan

TILES = 4  # of 64 keys
STEP = "sm80_64x64s32_w4_st2_qs_guarded_mb1"
BLOCK = "sm80_64x64s32_w4_st2_qs_guarded_mb1_pb"
CONFIGS = (STEP, f"{STEP}_ring", f"{STEP}_wn2", BLOCK, f"{BLOCK}_ring", f"{BLOCK}_ring_wn2")
FEW = (STEP, f"{STEP}_wn2", BLOCK, f"{BLOCK}_ring_wn2")
# What a step, and what a block, may lead its reference by, as powers of e: 2^24, and float32's range.
PAST_RANGE = {"step": 20.0, "block": 95.0}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _inputs(rows: int, dtype: str = "bf16", keys: int = 64 * TILES) -> tuple[Tensor, Tensor, Tensor]:
    """Small random q and k but for their last columns, which are for a test to set, and normal v."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(1, n, 1, 128, generator=generator) for n in (rows, keys, keys))
    q[..., -1] = k[..., -1] = 0
    return tuple(x.to(DTYPES[dtype]) for x in (q / 8, k, v))  # type: ignore[return-value]


def _run(
    slug: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor, Counters]:
    dtype = "fp16" if q.dtype == torch.float16 else "bf16"
    spec = KernelSpec(head_dim=128, dtype=dtype, causal=causal)
    return run_forward(spec, FwdConfig.from_slug(slug), q, k, v, softmax_scale=scale)


def _checked(slug: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Counters:
    out, lse, counters = _run(slug, q, k, v, causal=causal)
    report = check_forward(out, lse, q, k, v, causal=causal, softmax_scale=1.0)
    assert report.passed, report.text
    return counters


@pytest.mark.parametrize("slug", CONFIGS)
def test_a_quarter_of_the_blocks(slug: str) -> None:
    """Of four query blocks one sees a key that leads by too much: so many steps, or that block, are done again."""
    config = FwdConfig.from_slug(slug)
    q, k, v = _inputs(256)
    assert _checked(slug, q, k, v).repairs == 0
    q[:, 64:128, :, -1] = 1
    k[:, 70, :, -1] = PAST_RANGE[config.proof]
    steps = 1 if config.proof == "step" else TILES * 2
    assert _checked(slug, q, k, v).repairs == config.num_warps * steps


@pytest.mark.parametrize("slug", CONFIGS)
def test_every_step_of_every_block(slug: str) -> None:
    """Logits grow towards the left from step to step, which is the way that the kernel goes."""
    config = FwdConfig.from_slug(slug)
    q, k, v = _inputs(128)
    q[..., -1] = 1
    steps_to_the_right = (k.shape[1] - 1 - torch.arange(k.shape[1])) // 32
    k[..., -1] = (steps_to_the_right * PAST_RANGE[config.proof])[None, :, None]
    # The first step sets the reference, so it is right.
    repaired = TILES * 2 - 1 if config.proof == "step" else TILES * 2
    assert _checked(slug, q, k, v).repairs == 2 * config.num_warps * repaired


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slug", CONFIGS)
def test_one_row_of_one_block(slug: str, causal: bool) -> None:
    config = FwdConfig.from_slug(slug)
    q, k, v = _inputs(100)
    q[:, 77, :, -1] = 1
    k[:, 3, :, -1] = PAST_RANGE[config.proof]
    counters = _checked(slug, q, k, v, causal=causal)
    if config.proof == "step":
        assert counters.repairs == config.warps_n
    else:
        assert counters.repairs == config.num_warps * TILES * 2


@pytest.mark.parametrize("slug", FEW)
def test_values_near_the_end_of_bf16(slug: str) -> None:
    """A key that leads by e^20 and holds values of 3e38: p v overflows, the result does not."""
    q, k, v = _inputs(64)
    q[..., -1] = 1
    k[:, 5, :, -1] = 20
    v[:, 5] = 3e38
    counters = _checked(slug, q, k, v)
    assert counters.repairs > 0


@pytest.mark.parametrize("slug", [STEP, f"{STEP}_wn2"])
def test_values_as_large_as_unrepaired_steps_may_be(slug: str) -> None:
    """Every step but the first has sums just below the limit: |v| times the number of steps may be 2e30."""
    q, k, v = _inputs(64)
    keys_of_a_lane = 32 // 4 // FwdConfig.from_slug(slug).warps_n
    q[..., :-1], q[..., -1] = 0, 1
    k[:, -32:, :, -1] = -math.log(2.0**24 / keys_of_a_lane) + 0.1
    v[:] = 2e30 / (TILES * 2)
    assert _checked(slug, q, k, v).repairs == 0


@pytest.mark.parametrize("lead", [5.0, 11.0, 13.0])
def test_weights_beyond_fp16(lead: float) -> None:
    """65504 is e^11.09; a lane's sum must stay below 32768, e^10.4."""
    q, k, v = _inputs(64, "fp16")
    q[..., -1] = 1
    k[:, :64, :, -1] = lead
    counters = _checked(STEP, q, k, v)
    assert (counters.repairs > 0) == (lead > 10)


@pytest.mark.parametrize("slug", FEW)
def test_infinite_keys(slug: str) -> None:
    require_infinite_keys(functools.partial(_run, slug), lambda: _inputs(64), (224, 192, 96))


@pytest.mark.parametrize("slug", FEW)
def test_keys_that_a_row_does_not_see_may_be_nan(slug: str) -> None:
    require_unseen_nan(functools.partial(_run, slug), *_inputs(100))
