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
from fa2gen.constraints_sm90 import compile_target
from fa2gen.errors import UnsupportedError
from fa2gen.hardware import arch_limits, supported_compute_capabilities
from fa2gen.spec import BwdConfig, FwdConfig, FwdSm90Config, KernelSpec

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
        64: "sm90_192x128_st3_q2_ov_pp_static_tma",
        96: "sm90_128x128_st2_q2_ov_pp_static_tma",
        128: "sm90_128x128_st2_q2_ov_pp_static_tma",
        192: "sm90_128x112_st2_q1_ov_pp_static_direct",
        256: "sm90_128x80_st2_q1_ov_pp_static_direct",
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
