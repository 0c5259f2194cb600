"""Launch plans: grid, section order, parameters, limits."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest

from fa2gen.codegen import BWD_PARAMS, FWD_PARAMS, FWD_SM90_PARAMS
from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.launch import bwd_plan, fwd_plan, heads_per_section
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, FwdConfig, FwdSm90Config, KernelSpec

SPEC = KernelSpec(head_dim=64, gqa_ratio=2)
CONFIG = FwdConfig(block_m=128, block_n=64, num_warps=4)
SM90_CONFIG = FwdSm90Config()
STRIDES = {"q": (7, 8, 9), "k": (10, 11, 12), "v": (13, 14, 15), "o": (16, 17, 18)}


def plan(problem: Problem, *, scale: float = 0.125, spec: KernelSpec = SPEC, l2_bytes: int = 2**22) -> dict:
    launch_plan = fwd_plan(spec, CONFIG, problem, strides=STRIDES, softmax_scale=scale, l2_bytes=l2_bytes, num_sms=132)
    (launch,) = launch_plan.launches
    assert launch_plan.workspaces == ()
    values = struct.unpack(FWD_PARAMS.format, launch.params)
    fields = dict(zip((field.name for field in FWD_PARAMS.fields), values, strict=True))
    return {"grid": launch.grid, "threads": launch.num_threads, "smem": launch.smem_bytes, **fields}


def test_forward_plan():
    got = plan(Problem(3, 300, 500, 4, 2))
    assert got["grid"] == (3 * 4 * 3, 1, 1)
    assert got["threads"] == 128
    assert got["smem"] == 128 * 64 * 2 + 2 * 2 * 64 * 64 * 2
    assert [got[name] for name in FWD_PARAMS.pointers] == [0] * 6
    assert [got[f"v_{axis}_stride"] for axis in ("batch", "row", "head")] == [13, 14, 15]
    assert (got["k_pass_bytes"], got["v_pass_bytes"]) == (16 * 11 * 2, 16 * 14 * 2)
    assert (got["k_tile_bytes"], got["v_tile_bytes"]) == (64 * 11 * 2, 64 * 14 * 2)
    assert (got["batch"], got["num_heads"], got["seqlen_q"], got["seqlen_k"]) == (3, 4, 300, 500)
    assert got["num_m_blocks"] == 3
    assert got["softmax_scale"] == 0.125
    assert math.isclose(got["scale_log2"], 0.125 * math.log2(math.e), rel_tol=1e-6)


def test_zero_scale_keeps_masked_scores_apart():
    got = plan(Problem(1, 4, 4, 2, 1), scale=0.0)
    assert got["softmax_scale"] == 0.0
    assert 0 < got["scale_log2"] < 1e-30
    # float32's largest score still has weight 2^0 within float32's precision of it.
    assert got["scale_log2"] * 2.0**128 < 2.0**-20


def test_tiny_and_huge_scales():
    # A score of 1e37 times a scale of 1e-37 counts.
    assert plan(Problem(1, 4, 4, 2, 1), scale=1e-37)["scale_log2"] == pytest.approx(1e-37 * math.log2(math.e), rel=1e-6)
    assert plan(Problem(1, 4, 4, 2, 1), scale=1e-300)["scale_log2"] > 0
    assert math.isfinite(plan(Problem(1, 4, 4, 2, 1), scale=2.3e38)["scale_log2"])
    for scale in (3e38, 1e39, 1e300):
        with pytest.raises(UnsupportedError, match="softmax_scale"):
            plan(Problem(1, 4, 4, 2, 1), scale=scale)


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_bad_scale(scale):
    with pytest.raises(ArgumentError, match="softmax_scale"):
        plan(Problem(1, 4, 4, 2, 1), scale=scale)


def test_sections_have_the_size_asked_for_and_keep_groups_together():
    # K and V of one head at 1024 keys: 256 KiB; 2 MiB hold 8, each for 2 query heads.
    assert heads_per_section(SPEC, Problem(4, 128, 1024, 32, 16), 2**21) == 16
    assert heads_per_section(SPEC, Problem(1, 128, 2**20, 32, 16), 2**21) == 2  # one group at least
    assert heads_per_section(SPEC, Problem(1, 128, 0, 4, 2), 2**21) == 4  # all heads at most


def test_sections_fit_a_part_of_l2():
    # Half of 4 MiB holds 16 of the 128 heads; Hopper's forward takes a quarter.
    problem = Problem(4, 128, 1024, 32, 16)
    assert plan(problem)["heads_per_section"] == 16
    assert sm90_plan(problem)["heads_per_section"] == 8
    # 6 heads at a time would leave 2 for the last of four sections of 20: all have 5.
    assert sm90_plan(Problem(1, 128, 1024, 20, 10), l2_bytes=4 * 3 * 2**18)["heads_per_section"] == 5


def sm90_plan(
    problem: Problem, *, config: FwdSm90Config = SM90_CONFIG, causal: bool = False, l2_bytes: int = 2**22
) -> dict:
    spec = dataclasses.replace(SPEC, causal=causal)
    launch_plan = fwd_plan(
        spec, config, problem, strides=STRIDES, softmax_scale=0.125, l2_bytes=l2_bytes, num_sms=132
    )  # fmt: skip
    (launch,) = launch_plan.launches
    values = struct.unpack(FWD_SM90_PARAMS.format, launch.params)
    fields = dict(zip((field.name for field in FWD_SM90_PARAMS.fields), values, strict=True))
    return {"grid": launch.grid, "maps": launch.tensor_maps, "workspaces": launch_plan.workspaces, **fields}


def test_sections_of_a_config_s_own_size():
    problem = Problem(4, 128, 1024, 32, 16)
    for mib, heads in ((1, 8), (4, 32), (1000, 128)):
        config = FwdSm90Config(section_mib=mib)
        # Whatever L2 the chip has.
        assert {sm90_plan(problem, config=config, l2_bytes=l2)["heads_per_section"] for l2 in (1, 2**30)} == {heads}


@pytest.mark.parametrize(("block_m", "m_blocks", "tail"), [(64, 5, 2), (128, 3, 1), (192, 2, 1), (256, 2, 1)])
def test_short_causal_tiles_come_last(block_m: int, m_blocks: int, tail: int):
    problem, config = Problem(3, 300, 500, 4, 2), FwdSm90Config(block_m=block_m, ping_pong=False)
    causal, full = (sm90_plan(problem, config=config, causal=causal) for causal in (True, False))
    assert (causal["num_m_blocks"], causal["num_tiles"], causal["tail_m_blocks"]) == (m_blocks, 12 * m_blocks, tail)
    assert full["tail_m_blocks"] == 0
    assert causal["grid"] == (min(12 * m_blocks, 132), 1, 1)
    # One tile is not put off.
    assert sm90_plan(Problem(3, block_m, 500, 4, 2), config=config, causal=True)["tail_m_blocks"] == 0


@pytest.mark.parametrize(("batch", "tail"), [(1, 16), (4, 12), (63, 3), (5000, 1)])
def test_the_tail_levels_the_ends_of_the_sms(batch: int, tail: int):
    """n short tiles of each head, n^2 / 2 units long together, for 132 SMs that differ by up to 32 units each."""
    problem = Problem(batch, 4096, 4096, 16, 8)
    got = sm90_plan(problem, causal=True)
    assert (got["num_m_blocks"], got["tail_m_blocks"]) == (32, tail)
    heads = 16 * batch
    assert tail == 16 or (tail - 1) ** 2 / 2 * heads < 132 * 32 <= tail**2 / 2 * heads


@pytest.mark.parametrize("epilogue", ["tma", "direct"])
def test_the_output_has_strides_however_it_leaves(epilogue: str):
    """Query tiles that see no key get zeros by address."""
    got = sm90_plan(Problem(3, 300, 500, 4, 2), config=FwdSm90Config(epilogue=epilogue))
    assert [got[f"o_{axis}_stride"] for axis in ("batch", "row", "head")] == [16, 17, 18]
    assert [got[name] for name in FWD_SM90_PARAMS.pointers] == [0] * 4
    assert [each is not None for each in got["maps"]] == [True, True, True, epilogue == "tma"]
    assert got["workspaces"] == ()


@pytest.mark.parametrize("problem", [Problem(0, 4, 4, 2, 1), Problem(1, 0, 4, 2, 1), Problem(1, 4, 4, 0, 0)])
def test_empty_output_needs_no_launch(problem):
    with pytest.raises(ArgumentError, match="no launch"):
        plan(problem)


def test_limits():
    with pytest.raises(UnsupportedError, match="grid"):
        plan(Problem(2**20, 128, 1, 4096, 2048))
    with pytest.raises(UnsupportedError, match="seqlen_k"):
        plan(Problem(1, 1, 2**31 - 1, 2, 1))
    packed = KernelSpec(head_dim=8, gqa_ratio=1024), FwdConfig(pack_gqa=True), Problem(1, 1, 1, 2**31, 2**21)
    with pytest.raises(UnsupportedError, match="num_heads_q"):
        fwd_plan(*packed, strides=STRIDES, softmax_scale=1.0, l2_bytes=2**22, num_sms=132)
    with pytest.raises(ArgumentError, match="gqa_ratio"):
        plan(Problem(1, 4, 4, 2, 2))
    # The kernel's largest index: the last row of a tile of any legal size, and the last key of the tile that it sees.
    largest = 2**31 - 2048
    for name, problem in (("seqlen_q", (1, largest, 1, 2, 1)), ("seqlen_k", (1, 1, largest, 2, 1))):
        assert plan(Problem(*problem))[name] + 16 * 64 + 256 < 2**31
        with pytest.raises(UnsupportedError, match=name):
            plan(Problem(*(n + (n > 2) for n in problem)))
    # Beyond 65535 batches or heads the grid is still one-dimensional.
    assert plan(Problem(100_000, 10, 10, 2, 1))["grid"] == (200_000, 1, 1)
    assert plan(Problem(1, 3, 3, 142_560, 71_280))["grid"] == (142_560, 1, 1)


def test_section_products_stay_in_32_bits():
    got = plan(Problem(1, 2**27, 1, 64, 32), l2_bytes=2**30)
    assert got["num_m_blocks"] * got["heads_per_section"] < 2**31


@pytest.mark.parametrize(
    ("batch", "seqlen", "causal", "deterministic", "expected"),
    [
        # Half of 60 MiB of L2 holds Q, dO and sums of dQ of 7 heads of 4096 rows of 128; 8 make 8 equal sections.
        (4, 4096, False, False, 8),
        # With a causal mask 15, of which half is in use; 16 make 4.
        (4, 4096, True, False, 16),
        # In a fixed order at least 16 and 64.
        (4, 4096, False, True, 16),
        (4, 4096, True, True, 64),
        (16, 1024, False, True, 32),
        (16, 1024, True, True, 64),
        # All there are.
        (1, 16384, True, True, 16),
        (1, 16384, False, False, 1),
    ],
)
def test_sections_of_a_backward(batch: int, seqlen: int, causal: bool, deterministic: bool, expected: int) -> None:
    spec = KernelSpec("bwd", 128, causal=causal, deterministic=deterministic)
    names = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
    launch_plan = bwd_plan(
        spec,
        BwdConfig(block_m=64, block_n=128),
        Problem(batch, seqlen, seqlen, 16, 16),
        strides=dict.fromkeys(names, (1, 1, 1)),
        softmax_scale=0.125,
        l2_bytes=60 * 2**20,
    )
    values = struct.unpack(BWD_PARAMS.format, launch_plan.launches[1].params)
    assert values[[field.name for field in BWD_PARAMS.fields].index("heads_per_section")] == expected
