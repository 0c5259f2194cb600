"""Identities: validation, canonical forms, keys, problems and their buckets."""

from __future__ import annotations

import dataclasses

import pytest

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.problem import Bucket, Problem
from fa2gen.spec import FwdConfig, FwdSm90Config, KernelSpec, config_from_slug


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 0),
        ("head_dim", -1),
        ("head_dim", 64.0),
        ("head_dim", True),
        ("dtype", "fp32"),
        ("causal", 1),
        ("gqa_ratio", 0),
        ("alignment", 8),
        ("kind", "decode"),
    ],
)
def test_bad_spec_names_the_field(field, value):
    with pytest.raises(ArgumentError, match=field):
        KernelSpec(**{field: value})


@pytest.mark.parametrize("kind", ["fwd", "bwd"])
@pytest.mark.parametrize("head_dim", [257, 264, 512])
def test_large_head_dims_say_what_is_supported(head_dim, kind):
    with pytest.raises(UnsupportedError, match=f"head_dim {head_dim} is not supported: .* head dims 1 to 256"):
        KernelSpec(kind, head_dim=head_dim)


def test_odd_head_dim_needs_element_alignment():
    with pytest.raises(ArgumentError, match="alignment 2"):
        KernelSpec(head_dim=59)
    assert KernelSpec(head_dim=59, alignment=2).native_head_dim == 64
    # A backward has no alignment 2 to advise.
    with pytest.raises(ArgumentError, match="multiple of 8, got 59; backward kernels run others padded to one"):
        KernelSpec("bwd", head_dim=59)


def test_native_head_dim():
    edges = {1: 32, 32: 32, 33: 64, 64: 64, 65: 96, 96: 96, 97: 128, 128: 128, 129: 192, 192: 192, 193: 256, 256: 256}
    for head_dim, native in edges.items():
        assert KernelSpec(head_dim=head_dim, alignment=2).native_head_dim == native


def test_canonical_form_round_trips_and_leaves_out_defaults():
    spec = KernelSpec(head_dim=40, dtype="fp16", causal=True, gqa_ratio=7, alignment=2)
    assert KernelSpec.from_canonical(spec.canonical()) == spec
    assert "alignment" not in KernelSpec().canonical()
    config = FwdConfig(block_m=64, softmax="guarded")
    assert FwdConfig.from_canonical(config.canonical()) == config
    with pytest.raises(ArgumentError, match="window"):
        KernelSpec.from_canonical({**spec.canonical(), "window": 3})


def test_keys_are_stable_across_releases():
    # Tuned tables and caches of users are keyed by these: they may never change.
    assert KernelSpec(head_dim=128, dtype="bf16", causal=True, gqa_ratio=8).key() == "d6f1dcf4d2d899c1"
    assert FwdConfig().key() == "cdb440121fda3a7b"


@pytest.mark.parametrize(
    ("kind", "slug", "families"),
    [("fwd", "sm100_128x64", "fwd has sm80 and sm90"), ("bwd", FwdSm90Config().slug(), "bwd has sm80")],
)
def test_a_slug_of_another_family_is_named(kind, slug, families):
    with pytest.raises(ArgumentError, match=rf"is of family {slug.split('_')[0]}; {families}$"):
        config_from_slug(kind, slug)


@pytest.mark.parametrize("slug", ["sm80_١٢٨x64s64_w4_st2_qs_online_mb1", "sm80_128x64s64_w4_st2_qs_online_mb1_wn²"])
def test_slugs_have_ascii_digits(slug):
    with pytest.raises(ArgumentError, match="config must read like"):
        FwdConfig.from_slug(slug)


def test_every_part_of_a_slug_is_needed():
    config = FwdSm90Config(p_in_smem=True, overlap_tiles=True, softmax="guarded", section_mib=64)
    parts = config.slug().split("_")
    assert FwdSm90Config.from_slug("_".join(parts)) == config
    optional = {
        "ps": {"p_in_smem": False},
        "ov": {"overlap": False},
        "xt": {"overlap_tiles": False},
        "pp": {"ping_pong": False},
        "guarded": {"softmax": "online"},
        "l2s64": {"section_mib": 0},
    }
    for number, part in enumerate(parts):
        rest = "_".join(parts[:number] + parts[number + 1 :])
        if part in optional:
            assert FwdSm90Config.from_slug(rest) == dataclasses.replace(config, **optional[part])
        else:
            # Without a scheduler the word before it is read as one.
            with pytest.raises(ArgumentError, match=r"config must read like|scheduler must be one of"):
                FwdSm90Config.from_slug(rest)


@pytest.mark.parametrize("fields", [{"alignment": 2.0}, {"alignment": 16.0}, {"dtype": [["bf16"]]}])
def test_equal_specs_are_written_alike(fields):
    """2.0 equals 2, but would have a key and a slug of its own."""
    with pytest.raises(ArgumentError, match="must be one of"):
        KernelSpec(**fields)


def test_every_field_changes_the_key_and_the_slug():
    base = KernelSpec(head_dim=64)
    changed = [
        dataclasses.replace(base, **change)
        for change in ({"head_dim": 72}, {"dtype": "fp16"}, {"causal": True}, {"gqa_ratio": 2}, {"alignment": 2})
    ]
    assert len({spec.key() for spec in [base, *changed]}) == 6
    assert len({spec.slug() for spec in [base, *changed]}) == 6
    config = FwdConfig()
    others = [
        dataclasses.replace(config, **change)
        for change in (
            {"block_m": 64},
            {"block_n": 128},
            {"step_n": 32},
            {"num_warps": 8},
            {"num_stages": 3},
            {"q_in_regs": True},
            {"softmax": "guarded"},
            {"min_blocks": 2},
        )
    ]
    assert len({c.key() for c in [config, *others]}) == 9
    assert len({c.slug() for c in [config, *others]}) == 9


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (5, 2), (2, 5), (1, 7), (7, 1), (0, 3), (3, 0), (113, 203)])
def test_visible_pairs_are_counted_exactly(seqlen_q, seqlen_k):
    problem = Problem(1, seqlen_q, seqlen_k, 1, 1)
    counted = sum(j <= i + seqlen_k - seqlen_q for i in range(seqlen_q) for j in range(seqlen_k))
    assert problem.visible_pairs(True) == counted
    assert problem.visible_pairs(False) == seqlen_q * seqlen_k


def test_flops_and_bytes():
    spec = KernelSpec(head_dim=128, causal=False, gqa_ratio=4)
    problem = Problem(2, 100, 300, 8, 2)
    assert problem.flops(spec) == 4 * 128 * 2 * 8 * 100 * 300
    assert problem.min_bytes(spec) == 2 * 128 * 2 * (2 * 100 * 8 + 2 * 300 * 2) + 4 * 2 * 100 * 8
    # Five products in place of two; do, dq, dk and dv besides.
    backward = KernelSpec("bwd", head_dim=128, causal=False, gqa_ratio=4)
    assert problem.flops(backward) == 2.5 * problem.flops(spec)
    assert problem.min_bytes(backward) == 2 * 128 * 2 * (4 * 100 * 8 + 4 * 300 * 2) + 4 * 2 * 100 * 8


def test_heads_must_divide():
    with pytest.raises(ArgumentError, match="multiple"):
        Problem(1, 4, 4, 3, 2)
    with pytest.raises(ArgumentError, match="num_heads_k"):
        Problem(1, 4, 4, 4, 0)
    assert Problem(0, 0, 0, 0, 0).gqa_ratio == 1


@pytest.mark.parametrize(
    ("problem", "bucket"),
    [
        (Problem(1, 1, 1, 1, 1), Bucket(0, 0, -3)),
        (Problem(2, 8192, 8192, 16, 16), Bucket(13, 13, 3)),
        (Problem(2, 8193, 8192, 16, 16), Bucket(14, 13, 3)),
        (Problem(64, 8192, 100, 16, 16), Bucket(13, 7, 4)),
        (Problem(0, 8192, 100, 16, 16), Bucket(13, 7, -3)),
    ],
)
def test_bucket(problem, bucket):
    assert problem.bucket(132) == bucket


def test_gqa_ratio_has_a_limit():
    assert KernelSpec(gqa_ratio=1024).slug().endswith("gqa1024")
    for ratio in (1025, 2**31, 10**20):
        with pytest.raises(UnsupportedError, match=f"gqa_ratio {ratio} .*1 to 1024"):
            KernelSpec(gqa_ratio=ratio)
