"""The sm90 family: where it serves, its default, and what is compiled for it."""

from __future__ import annotations

import dataclasses

import pytest

from fa2gen.constraints import (
    default_config,
    default_config_of,
    default_config_on,
    families_on,
    infeasible_reason,
)
from fa2gen.constraints_sm90 import (
    compile_target,
    config_reason,
    consumer_registers,
    estimate_registers,
    most_skipped,
    register_split,
    smem_plan,
)
from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.hardware import arch_limits, supported_compute_capabilities
from fa2gen.spec import BwdConfig, FwdConfig, FwdSm90Config, KernelSpec, config_from_slug

HOPPER = arch_limits((9, 0))
OTHERS = [arch_limits(capability) for capability in supported_compute_capabilities() if capability != (9, 0)]


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_the_default_is_legal_wherever_the_family_serves(head_dim):
    for dtype in ("bf16", "fp16"):
        for causal in (False, True):
            for gqa_ratio in (1, 7):
                spec = KernelSpec(head_dim=head_dim, dtype=dtype, causal=causal, gqa_ratio=gqa_ratio)
                config = default_config_on(spec, HOPPER)
                assert config == default_config_of(spec, "sm90")
                assert infeasible_reason(spec, config, HOPPER) is None
                assert config.scheduler == ("dynamic" if causal else "static")


def test_defaults_by_head_dim():
    tiles = {d: default_config_of(KernelSpec(head_dim=d), "sm90").slug() for d in (64, 96, 128, 192, 256)}
    assert tiles == {
        64: "sm90_256x64_st4_q2_ov_xt_pp_guarded_static_tma",
        96: "sm90_128x128_st2_q2r4_ov_xt_pp_guarded_static_tma",
        128: "sm90_128x128_st2_q2r8_ov_xt_pp_guarded_static_tma",
        192: "sm90_128x64_st2x1_q2r8_ov_xt_pp_guarded_static_tma",
        256: "sm90_128x64_st2_q1r4_ov_pp_guarded_static_direct",
    }


def test_where_families_serve():
    spec = KernelSpec()
    assert families_on(spec, HOPPER) == ("sm80", "sm90")
    assert families_on(KernelSpec(alignment=2), HOPPER) == ("sm80",)
    assert families_on(KernelSpec("bwd"), HOPPER) == ("sm80",)
    for arch in OTHERS:
        assert families_on(spec, arch) == ("sm80",)
        assert default_config_on(spec, arch) == default_config(spec)


def test_the_default_of_the_families_asked_for():
    spec = KernelSpec()
    assert default_config_on(spec, HOPPER, ["sm80"]) == default_config(spec)
    assert default_config_on(KernelSpec("bwd"), HOPPER) == default_config(KernelSpec("bwd"))
    for families in (["sm90"], []):
        with pytest.raises(UnsupportedError, match="does not serve fwd_d128_bf16_full_gqa1 on sm_80: sm80 does"):
            default_config_on(spec, arch_limits((8, 0)), families)


def test_only_wgmma_needs_the_variant_of_a_target():
    assert compile_target(FwdSm90Config(), "sm_90") == "sm_90a"
    for config in (FwdConfig(), BwdConfig()):
        assert compile_target(config, "sm_90") == "sm_90"


@pytest.mark.parametrize(("block_n", "legal"), [(192, True), (208, False)])
def test_a_product_fits_in_the_launch_s_registers(block_n, legal):
    """Of 192 rows at head dim 32, ptxas compiles tiles of 192 keys and refuses 208: it has 128 registers."""
    config = FwdSm90Config(block_m=192, block_n=block_n, p_in_smem=True)
    reason = infeasible_reason(KernelSpec(head_dim=32), config, HOPPER)
    assert (reason is None) == legal
    assert legal or "128 registers of the launch" in reason


@pytest.mark.parametrize(
    ("head_dim", "block_n", "p_in_smem", "legal"),
    [(192, 32, False, True), (200, 64, True, False), (208, 16, False, False), (256, 16, True, False)],
)
def test_the_second_product_fits_in_the_launch_s_registers(head_dim, block_n, p_in_smem, legal):
    """Three consumers are launched with 128; ptxas asks for 130 at head dim 200, 134 at 208 and 154 at 256."""
    config = FwdSm90Config(block_m=192, block_n=block_n, q_stages=1, num_stages=1, p_in_smem=p_in_smem, epilogue="tma")
    reason = infeasible_reason(KernelSpec(head_dim=head_dim), config, HOPPER)
    assert (reason is None) == legal, reason
    assert legal or "P V takes more than the 128 registers of the launch" in reason
    two = dataclasses.replace(config, block_m=128)
    assert infeasible_reason(KernelSpec(head_dim=head_dim), two, HOPPER) is None


SLUGS = {
    "sm90_128x128_st2_q1_ov_pp_static_tma": {},
    "sm90_128x64_st2x1_q1x1_ov_xt_pp_guarded_dynamic_direct_l2s8": {
        "block_n": 64, "k_extra": 1, "q_extra": 1, "overlap_tiles": True, "softmax": "guarded", "scheduler": "dynamic",
        "epilogue": "direct", "section_mib": 8,
    },
    "sm90_256x48_st4_q2r4_ps_ov_static_tma": {
        "block_m": 256, "block_n": 48, "num_stages": 4, "q_stages": 2, "q_regs": 4, "p_in_smem": True,
        "ping_pong": False,
    },
    "sm90_192x96_st3_q1x2r1_guarded_dynamic_direct": {
        "block_m": 192, "block_n": 96, "num_stages": 3, "q_extra": 2, "q_regs": 1, "overlap": False, "ping_pong": False,
        "softmax": "guarded", "scheduler": "dynamic", "epilogue": "direct",
    },
}  # fmt: skip


@pytest.mark.parametrize("slug", SLUGS)
def test_slugs_say_everything(slug):
    config = FwdSm90Config(**SLUGS[slug])
    assert config.slug() == slug
    assert FwdSm90Config.from_slug(slug) == config_from_slug("fwd", slug) == config
    assert FwdSm90Config.from_canonical(config.canonical()) == config
    # What older configs had no word for is in neither slug nor key where it is off.
    said = config.canonical().keys() - FwdSm90Config().canonical().keys()
    assert said == {name for name in SLUGS[slug] if name not in FwdSm90Config().canonical()}


def test_every_field_changes_the_slug_and_the_key():
    base = FwdSm90Config()
    other = {
        "block_m": 256, "block_n": 64, "num_stages": 3, "q_stages": 2, "p_in_smem": True, "overlap": False,
        "ping_pong": False, "scheduler": "dynamic", "epilogue": "direct", "softmax": "guarded", "overlap_tiles": True,
        "section_mib": 32, "q_extra": 1, "k_extra": 1, "q_regs": 2,
    }  # fmt: skip
    assert other.keys() == {field.name for field in dataclasses.fields(base)} - {"family"}
    changed = [base, *(dataclasses.replace(base, **{name: value}) for name, value in other.items())]
    assert len({config.slug() for config in changed}) == len({config.key() for config in changed}) == len(changed)
    for config in changed:
        assert FwdSm90Config.from_slug(config.slug()) == config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"softmax": "fast"}, "softmax must be one of"),
        ({"softmax": True}, "softmax must be one of"),
        ({"overlap_tiles": 1}, "overlap_tiles must be"),
        ({"section_mib": -1}, "section_mib must be"),
        ({"section_mib": 0.5}, "section_mib must be"),
        ({"q_extra": -1}, "q_extra must be"),
        ({"k_extra": True}, "k_extra must be"),
        ({"q_regs": "4"}, "q_regs must be"),
        ({"num_stages": 0}, "num_stages must be"),
    ],
)
def test_a_bad_value_is_named(fields, named):
    with pytest.raises(ArgumentError, match=named):
        FwdSm90Config(**fields)


@pytest.mark.parametrize(
    "slug",
    [
        "sm90_128x128_st2x_q1_ov_pp_static_tma",
        "sm90_128x128_st2_q1r_ov_pp_static_tma",
        "sm90_128x128_st2_q1_xt_ov_pp_static_tma",
        "sm90_128x128_st2_q1_ov_guarded_pp_static_tma",
        "sm90_128x128_st2_q1_ov_pp_static_tma_l2s",
        "sm90_128x128_st2_q1_ov_pp_static_tma_l2s-1",
        "sm90_128x128_st2_q1_l2s8_ov_pp_static_tma",
    ],
)
def test_a_slug_that_says_nothing_is_refused(slug):
    with pytest.raises(ArgumentError, match="config must read like"):
        FwdSm90Config.from_slug(slug)


DIRECT = FwdSm90Config(epilogue="direct")


@pytest.mark.parametrize(
    ("config", "fields", "reason"),
    [
        (DIRECT, {"softmax": "guarded", "overlap": False}, "softmax guarded needs overlap"),
        (DIRECT, {"overlap_tiles": True, "overlap": False}, "overlap_tiles needs overlap"),
        # The output leaves through a Q tile while the next query tile's is multiplied with.
        (FwdSm90Config(), {"overlap_tiles": True}, "overlap_tiles needs 2 q_stages with epilogue tma"),
        (FwdSm90Config(q_stages=2), {"overlap_tiles": True}, None),
        (DIRECT, {"overlap_tiles": True}, None),
        (DIRECT, {"q_extra": 1}, None),
        # As many more as consumers are a second stage.
        (DIRECT, {"q_extra": 2}, "q_extra 2: beside 1 q_stages there may be 1 for 2 consumers, beside 2 none"),
        (DIRECT, {"q_extra": 1, "q_stages": 2}, "q_extra 1: beside 1 q_stages there may be 1 for 2 consumers"),
        (DIRECT, {"q_extra": 1, "block_m": 64, "ping_pong": False}, "there may be 0 for 1 consumers"),
        (DIRECT, {"q_extra": 3, "block_m": 256, "block_n": 64}, None),
        (DIRECT, {"k_extra": 1}, None),
        (DIRECT, {"k_extra": 2}, "k_extra 2 is above 1"),
        (DIRECT, {"q_stages": 3}, "q_stages 3 is above 2"),
        (DIRECT, {"num_stages": 5}, "num_stages 5 is above 4"),
        (DIRECT, {"block_m": 320}, "block_m 320 is not 64 rows for each of 1 to 4 warpgroups"),
        # Launched with 96 registers a thread: of these a product of 144 keys takes 72 and 26.
        (DIRECT, {"block_m": 256, "block_n": 128}, None),
        (DIRECT, {"block_m": 256, "block_n": 144}, "block_n 144: its product takes more than the 96 registers"),
    ],
)
def test_what_no_spec_can_take(config, fields, reason):
    config = dataclasses.replace(config, **fields)
    got = config_reason(config)
    assert (got is None) == (reason is None), got
    if reason is not None:
        assert reason in got
        assert infeasible_reason(KernelSpec(), config, HOPPER) == got


def test_four_consumers_have_few_registers():
    """128 * 24 + 512 * 112 is what 640 threads are launched with: 96 each."""
    config = FwdSm90Config(block_m=256, block_n=64, softmax="guarded", epilogue="direct")
    split = register_split(config)
    assert (config.warpgroups, config.num_threads, config.num_warps) == (4, 640, 20)
    assert (split.producer, split.consumer) == (24, 112)
    assert 128 * split.producer + 512 * split.consumer <= 640 * 96 <= 65536
    assert infeasible_reason(KernelSpec(head_dim=64), config, HOPPER) is None
    # Accumulators of O and S, P of the tile before and 24: 40 + 32 + 16 + 24 are 112.
    assert estimate_registers(KernelSpec(head_dim=80), config) == 112 == consumer_registers(config)
    assert infeasible_reason(KernelSpec(head_dim=80), config, HOPPER) is None
    assert infeasible_reason(KernelSpec(head_dim=96), config, HOPPER) == (
        "at least 120 registers a thread, 4 consumers have 112"
    )


@pytest.mark.parametrize(
    ("block_m", "block_n", "skipped"),
    [(64, 64, 0), (128, 128, 1), (128, 64, 1), (128, 48, 2), (192, 64, 2), (256, 48, 4)],
)
def test_causal_query_tiles_overlap_only_with_stages_for_what_is_skipped(block_m, block_n, skipped):
    """A consumer in its turn waits for the first key tile that it sees, the others hold the ones before."""
    spec = KernelSpec(head_dim=64, causal=True)
    for num_stages in range(1, 5):
        config = FwdSm90Config(
            block_m=block_m, block_n=block_n, num_stages=num_stages, ping_pong=block_m > 64, overlap_tiles=True,
            epilogue="direct",
        )  # fmt: skip
        assert most_skipped(config) == skipped
        reason = infeasible_reason(spec, config, HOPPER)
        assert (reason is None) == (num_stages > skipped), reason
        if reason is not None:
            assert f"overlap_tiles with {skipped} key tiles of {block_n} that not all consumers see" in reason
            assert f"num_stages is {num_stages}" in reason
        # Without a mask all consumers see all key tiles, and tiles one after the other have no turns to wait for.
        assert infeasible_reason(dataclasses.replace(spec, causal=False), config, HOPPER) is None
        assert infeasible_reason(spec, dataclasses.replace(config, overlap_tiles=False), HOPPER) is None


def test_extra_tiles_take_their_shared_memory():
    """At head dim 128 a tile of 64 rows or keys is 16 KiB, and has two mbarriers of 8 bytes."""
    base = FwdSm90Config(block_n=64, epilogue="direct")
    plan = smem_plan(KernelSpec(), base)
    assert (plan.k, plan.v, plan.p, plan.total) == (2 << 14, 4 << 14, 6 << 14, (6 << 14) + 16 * 6)
    assert (base.q_tiles, base.k_stages) == (2, 2)
    more = dataclasses.replace(base, q_extra=1, k_extra=1)
    plan = smem_plan(KernelSpec(), more)
    assert (plan.k, plan.v, plan.p, plan.total) == (3 << 14, 6 << 14, 8 << 14, (8 << 14) + 16 * 8)
    assert (more.q_tiles, more.k_stages, more.num_stages) == (3, 3, 2)
    spec = KernelSpec(head_dim=256)
    assert infeasible_reason(spec, dataclasses.replace(base, q_extra=1), HOPPER) is None
    assert "262272 bytes of shared memory" in str(infeasible_reason(spec, more, HOPPER))


def test_q_in_registers_are_steps_of_the_head_dim():
    config = FwdSm90Config(block_n=64, softmax="guarded", epilogue="direct")
    without = estimate_registers(KernelSpec(head_dim=40), config)
    for q_regs in range(5):
        some = dataclasses.replace(config, q_regs=q_regs)
        assert estimate_registers(KernelSpec(head_dim=40), some) == without + 4 * q_regs
        reason = infeasible_reason(KernelSpec(head_dim=40), some, HOPPER)
        assert reason == ("q_regs 4 is above the 3 k16 steps of head_dim 40" if q_regs > 3 else None)


def test_sections_are_of_causal_masks_and_of_an_l2_that_may_be():
    config = FwdSm90Config(section_mib=8)
    assert infeasible_reason(KernelSpec(causal=True), config, HOPPER) is None
    assert "there is none" in infeasible_reason(KernelSpec(), config, HOPPER)
    huge = FwdSm90Config(section_mib=1025)
    assert infeasible_reason(KernelSpec(causal=True), huge, HOPPER) == "section_mib 1025 is above 1024"
