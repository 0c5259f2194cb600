"""The facts of ``fa2gen explain``: plans and waves worked by hand, what the lookup picks and why, what is excluded."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fa2gen.codegen import template_hash
from fa2gen.commands.explain_json import explanation_json
from fa2gen.commands.explain_text import WIDTH, explanation_text
from fa2gen.constraints import default_config, default_config_of, infeasible_reason
from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.explain import Explanation, explain, group_exclusions
from fa2gen.hardware import Gpu, get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import Measurement, Provenance, TunedEntry, save_entries, utc_now
from fa2gen.tuning.space import GRIDS, exclusion_reason, legal_space

# No table ships for sm_86, so that these see only what a test saves.
A10, A40 = get_gpu("a10"), get_gpu("a40")
A100 = get_gpu("a100")
SPEC = KernelSpec()
PROBLEM = Problem(4, 4096, 4096, 16, 16)
PLAIN = FwdConfig(block_m=128, block_n=64, step_n=64, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "tables"))
    monkeypatch.delenv("FA2GEN_STRICT", raising=False)


def explained(spec: KernelSpec = SPEC, problem: Problem = PROBLEM, gpu: Gpu = A100, **options: Any) -> Explanation:
    return explain(spec, problem, gpu, compile=False, **options)


def entry(
    spec: KernelSpec = SPEC,
    problem: Problem = PROBLEM,
    config: FwdConfig = PLAIN,
    *,
    gpu: Gpu = A10,
    kind: str = "measured",
    templates: str | None = None,
    ms: float = 5.0,
) -> TunedEntry:
    n = 50 if kind == "measured" else 0
    return TunedEntry(
        spec,
        problem.bucket(gpu.num_sms),
        config,
        Measurement(kind, ms, 0.99 * ms, 1.01 * ms, n, "test", problem),
        Provenance(
            templates or template_hash(spec.kind, config.family),
            "13.0",
            "",
            3,
            2,
            "test",
            utc_now(),
            model_version=None if kind == "measured" else "1",
        ),
    )


def test_shared_memory_plan_by_hand() -> None:
    # Rows of 128 elements are 256 bytes: Q 128 rows, K and V two stages of 64 rows each.
    e = explained(config=PLAIN.slug())
    assert [(name, offset, size) for name, offset, size, _ in e.smem_areas()] == [
        ("Q, then O", 0, 32768),
        ("K [0]", 32768, 16384),
        ("K [1]", 49152, 16384),
        ("V [0]", 65536, 16384),
        ("V [1]", 81920, 16384),
    ]
    assert e.smem_bytes == 98304


def test_shared_memory_of_shared_rows_and_a_ring_by_hand() -> None:
    # Rows of 256 elements are 512 bytes. P: two tiles of 128 rows of 64 keys, 128 bytes each; a float for 2 x 128 rows;
    # two mbarriers of 8 bytes for each stage.
    config = "sm80_128x64s64_w8_st2_qs_guarded_mb1_ring_wn2"
    e = explained(KernelSpec(head_dim=256), config=config, gpu=get_gpu("h200"))
    assert [(name, offset, size) for name, offset, size, _ in e.smem_areas()] == [
        ("Q, then O", 0, 65536),
        ("K [0]", 65536, 32768),
        ("K [1]", 98304, 32768),
        ("V [0]", 131072, 32768),
        ("V [1]", 163840, 32768),
        ("P [0]", 196608, 16384),
        ("P [1]", 212992, 16384),
        ("rows", 229376, 1024),
        ("mbarriers", 230400, 32),
    ]
    assert e.smem_bytes == 230432
    assert "mbarriers" in explanation_text(e)


def test_packed_heads_share_tiles_by_hand() -> None:
    # 16 queries of 8 heads are 128 rows: one tile for each of 4 x 2 key/value heads.
    spec, problem = KernelSpec(gqa_ratio=8), Problem(4, 16, 4096, 16, 2)
    e = explained(spec, problem, config=PLAIN.slug() + "_pack")
    assert e.grid.blocks == 8
    text = " ".join(explanation_text(e).split())
    assert "8 = 4 x 2 key/value heads x 1 query tile of 128; the rows of 8 query heads share them" in text


def test_waves_by_hand() -> None:
    # 96 KB + 1 KB reserved: one block on an SM of 164 KB. 4 * 16 heads * 32 tiles of 128 rows = 2,048 blocks on 108
    # SMs: 18 waves of 108 are 1,944, 104 are left.
    e = explained(config=PLAIN.slug())
    assert (e.occupancy.blocks_per_sm, e.occupancy.limiter) == (1, "shared memory")
    assert (e.grid.blocks, e.grid.wave, e.grid.full_waves, e.grid.tail) == (2048, 108, 18, 104)
    assert e.grid.waves == pytest.approx(18.963, abs=1e-3)
    assert e.grid.efficiency == pytest.approx(2048 / (19 * 108))
    # Two blocks of 48 KB: 108 * 2 a wave, a multiple of 216 has no tail.
    even = explained(problem=Problem(1, 128, 128, 216, 216), config="sm80_128x32s32_w4_st1_qs_online_mb1")
    assert even.occupancy.blocks_per_sm == 2
    assert (even.grid.full_waves, even.grid.tail, even.grid.efficiency) == (1, 0, 1.0)


def test_registers_are_an_estimate_without_compiling() -> None:
    # 32 rows a warp: acc_o 32 * 128 / 32 = 128, acc_s 32 * 64 / 32 = 64, and 24 besides. 65,536 / 128 threads is more
    # than a thread can name.
    registers = explained(config=PLAIN.slug()).registers
    assert (registers.least, registers.cap, registers.compiled) == (216, 255, None)
    assert registers.facts.registers >= 216
    assert registers.note == "not compiled"


def test_missing_nvcc_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FA2GEN_NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "cache"))
    e = explain(SPEC, PROBLEM, A100)
    assert e.registers.compiled is None
    assert "nvcc" in e.registers.note
    assert "estimated" in explanation_text(e)


def test_l2_serves_what_fits() -> None:
    # K and V of 4,096 keys of 128 are 2 MiB; half of 40 MiB holds ten heads.
    memory = explained().memory
    assert (memory.reread_bytes, memory.heads_per_section, memory.l2_serves) == (2 << 20, 10, True)
    # 16 MiB of 32,768 keys fit 20 MiB of an A100, not the 3 MiB of an A10.
    long = Problem(1, 32768, 32768, 16, 16)
    assert explained(problem=long).memory.l2_serves
    assert not explained(problem=long, gpu=A10).memory.l2_serves
    text = l2_row(explained(problem=long, gpu=A10))
    assert "query heads 1 at a time: 16 MiB; this does not fit in 6 MiB of L2, and re-reads miss it in part" in text
    assert "10 at a time: 20 MiB; this fits in 40 MiB of L2, and re-reads hit it" in l2_row(explained())


def test_l2_holds_what_sections_of_groups_read() -> None:
    # Half of 6 MiB holds K and V of three groups of 4 heads. Of 20 heads there are two sections of 10: the first ends
    # inside of a group.
    memory = explained(KernelSpec(gqa_ratio=4), Problem(1, 512, 2048, 20, 5), A10).memory
    assert (memory.reread_bytes, memory.heads_per_section, memory.section_bytes) == (1 << 20, 10, 3 << 20)
    # It holds two of 1.5 MiB. Of three sections of 7 heads the second, 7 to 13, reads of three groups.
    memory = explained(KernelSpec(gqa_ratio=4), Problem(1, 512, 3072, 20, 5), A10).memory
    assert (memory.heads_per_section, memory.section_bytes, memory.l2_serves) == (7, 3 * 3 << 19, True)


def test_the_short_half_of_a_causal_mask_is_of_all_heads_together() -> None:
    # Its 16 query blocks of 32 see half of the keys: 1 MiB of each of 64 heads, against sections of ten.
    e = explained(KernelSpec(causal=True))
    assert (e.memory.section_bytes, e.memory.tail_bytes, e.memory.l2_serves) == (20 << 20, 64 << 20, False)
    text = l2_row(e)
    assert "the short half of the query blocks comes last, of all heads together: up to 64 MiB; this does not" in text
    few = explained(KernelSpec(causal=True), Problem(1, 4096, 4096, 16, 16))
    assert (few.memory.tail_bytes, few.memory.l2_serves) == (16 << 20, True)
    # Of 8,192 keys and 4,096 queries the first 2,048 see 6,144; of 1,024 keys they see none.
    assert explained(KernelSpec(causal=True), Problem(1, 4096, 8192, 1, 1)).memory.tail_bytes == 3 << 20
    assert explained(KernelSpec(causal=True), Problem(1, 4096, 1024, 1, 1)).memory.tail_bytes == 0
    # A single query block has no short half.
    assert explained(KernelSpec(causal=True), Problem(1, 64, 4096, 64, 64)).memory.tail_bytes == 0
    packed = FwdConfig(pack_gqa=True)
    grouped = explained(KernelSpec(causal=True, gqa_ratio=4), Problem(1, 4096, 4096, 16, 4), config=packed)
    assert grouped.memory.tail_bytes == 4 << 20
    form = explanation_json(e)["traffic"]
    assert (form["reread_bytes_of_tail"], form["l2_serves_rereads"]) == (64 << 20, False)


def l2_row(e: Explanation) -> str:
    return " ".join(explanation_text(e).split("  L2  ")[1].partition("Roofline")[0].split())


def test_default_without_a_table() -> None:
    e = explained(gpu=A10)
    assert e.selection.config == default_config(SPEC)
    assert (e.selection.origin, e.selection.match.source) == ("tuned", "default")
    assert "no table" in e.selection.why
    assert e.measured == ()


def test_exact_entry_with_its_measured_time() -> None:
    save_entries(A10, [entry()])
    e = explained(gpu=A10)
    assert e.selection.config == PLAIN
    assert "this kernel and size class q12_k12_w4; the entry is measured" in e.selection.why
    (time,) = e.measured
    assert (time.entry.measurement.ms, time.stale) == (5.0, False)
    assert time.predicted_ms == e.prediction.ms
    text = explanation_text(e)
    # 4 * 128 * 64 heads * 4096^2 FLOPs in 5 ms.
    assert "measured              5.000 ms, 110.0 TFLOP/s (p20 4.950 ms, p80 5.050 ms, n 50)" in text
    assert json.loads(json.dumps(explanation_json(e)))["measured"][0]["tflops"] == pytest.approx(109.95, abs=0.01)


def test_measured_time_of_another_config_and_problem() -> None:
    other = FwdConfig(block_m=64, num_warps=4)
    problem = Problem(5, 4000, 4090, 16, 16)
    save_entries(A10, [entry(problem=problem, config=other, ms=7.0)])
    e = explained(gpu=A10, config=PLAIN.slug())
    (time,) = e.measured
    assert time.entry.config == other
    assert time.predicted_ms != e.prediction.ms
    text = " ".join(explanation_text(e).split())
    assert f"config {other.slug()}" in text
    assert "batch 5, 16 query heads over 16, seqlen 4000 x 4090" in text


def test_predicted_entries_are_no_measurement() -> None:
    save_entries(A10, [entry(kind="predicted")])
    e = explained(gpu=A10)
    assert (e.selection.config, e.measured) == (PLAIN, ())
    assert e.selection.why.endswith("; the entry is predicted")


def test_stale_entries_are_passed_over_and_shown() -> None:
    save_entries(A10, [entry(templates="0" * 16)])
    e = explained(gpu=A10)
    assert e.selection.config == default_config(SPEC)
    assert "stale" in e.selection.why
    (time,) = e.measured
    assert time.stale
    assert "made with older templates" in " ".join(explanation_text(e).split())


@pytest.mark.parametrize(
    ("saved", "on", "source", "words"),
    [
        (
            entry(problem=Problem(4, 8192, 8192, 16, 16)),
            A10,
            "nearest bucket",
            ("q12_k12_w4", "q13_k13_w4", "2 powers"),
        ),
        (entry(KernelSpec(dtype="fp16")), A10, "other dtype", ("no entry for bf16", "fp16")),
        (entry(KernelSpec(gqa_ratio=4), Problem(4, 4096, 4096, 16, 4)), A10, "nearest gqa ratio", ("ratio 1", "4 is")),
        (entry(), A40, "other gpu", ("no table of a40", "a10", "sm_86")),
    ],
)
def test_why_the_lookup_borrows(saved: TunedEntry, on: Gpu, source: str, words: tuple[str, ...]) -> None:
    save_entries(A10, [saved])
    e = explained(gpu=on)
    assert (e.selection.match.source, e.selection.config) == (source, PLAIN)
    assert all(word in e.selection.why for word in words), e.selection.why


def test_why_a_narrow_head_dim_borrows() -> None:
    save_entries(A10, [entry()])
    narrow = explained(KernelSpec(head_dim=104), gpu=A10).selection
    assert "head dim 104; its tiles are those of head dim 128" in narrow.why
    unaligned = explained(KernelSpec(head_dim=128, alignment=2), gpu=A10).selection
    assert unaligned.match.source == "alignment"
    assert "16-byte aligned" in unaligned.why


def test_strict_mode_is_explained_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2GEN_STRICT", "1")
    assert explained(gpu=A10).selection.match.source == "default"


def test_config_names() -> None:
    for config in [*legal_space(SPEC, A100).configs, default_config(SPEC), FwdConfig(block_m=256, q_in_regs=True)]:
        assert FwdConfig.from_slug(config.slug()) == config
    assert explained(config=PLAIN.slug()).selection.config == explained(config=PLAIN).selection.config == PLAIN
    assert explained(config="default").selection.config == default_config(SPEC)
    assert explained(config="default", gpu=get_gpu("h200")).selection.config == default_config_of(SPEC, "sm90")
    for bad in ("", "fastest", PLAIN.slug() + "x", PLAIN.slug().replace("online", "none"), "sm90_" + PLAIN.slug()[5:]):
        with pytest.raises(ArgumentError):
            explained(config=bad)


def test_an_excluded_config_says_why() -> None:
    # 256 * 256 bytes of Q and 6 * 128 * 256 of K and V: 256 KB.
    e = explained(gpu=get_gpu("rtx-4090"), config="sm80_256x128s64_w8_st3_qs_guarded_mb1")
    assert e.selection.illegal
    assert e.selection.excluded == "262144 bytes of shared memory, sm_89 grants a block 101376"
    assert e.occupancy.blocks_per_sm == e.grid.wave == 0
    assert math.isinf(e.prediction.ms)
    text, form = explanation_text(e), explanation_json(e)
    assert "excluded, illegal     262144 bytes" in text
    assert "no block fits an SM" in text
    assert form["prediction"]["ms"] is None
    assert form["prediction"]["tflops"] == 0
    assert form["config"]["illegal"]
    json.dumps(form, allow_nan=False)


def test_legal_configs_that_the_tuner_leaves_out() -> None:
    same = explained(config="sm80_64x32s32_w2_st1_qs_online_mb2").selection
    assert not same.illegal
    assert "same code" in str(same.excluded)
    outside = explained(config="sm80_64x48s48_w2_st1_qs_online_mb1").selection
    assert (outside.illegal, outside.excluded) == (False, "not in the tuner's grid")
    assert explained(config=PLAIN.slug()).selection.excluded is None


def test_excluded_configs_are_grouped_and_all_there() -> None:
    e = explained()
    members = [member for group in e.excluded for member in group.configs]
    assert e.legal + len(members) == len(GRIDS["fwd"]["sm80"].configs(False))
    assert dict(members) == dict(legal_space(SPEC, A100).excluded)
    assert all(reason == exclusion_reason(SPEC, config, A100.arch) for config, reason in members)
    sizes = [len(group.configs) for group in e.excluded]
    assert sizes == sorted(sizes, reverse=True)
    assert 4 <= len(e.excluded) <= 12
    # 256 rows of Q, three stages of 128 keys and two tiles of P are the most; what fits 163 KB is none of the group.
    (smem,) = (group for group in e.excluded if "shared memory, sm_80" in group.reason)
    assert smem.reason.endswith("to 329776 bytes of shared memory, sm_80 grants a block 166912")
    assert int(smem.reason.split()[0]) > 166912
    listed = explanation_text(e, list_excluded=True).splitlines()
    assert len(listed) == len(explanation_text(e).splitlines()) + len(members)
    form = explanation_json(e, list_excluded=True)["space"]
    assert sum(len(group["configs"]) for group in form["groups"]) == form["excluded"] == len(members)
    assert all("configs" not in group for group in explanation_json(e)["space"]["groups"])


def test_groups_give_the_range_of_each_number() -> None:
    configs = [FwdConfig(min_blocks=count) for count in (1, 2, 3)]
    groups = group_exclusions(
        [(configs[0], "7 of sm_80's 9 apples"), (configs[1], "no pears"), (configs[2], "11 of sm_80's 9 apples")]
    )
    assert [(group.reason, len(group.configs)) for group in groups] == [
        ("7 to 11 of sm_80's 9 apples", 2),
        ("no pears", 1),
    ]
    assert group_exclusions([]) == ()


def test_predicted_time_by_resource() -> None:
    e = explained(config=PLAIN.slug())
    assert e.tflops == pytest.approx(e.flops / e.prediction.ms / 1e9)
    assert all(ms <= e.prediction.ms for ms in e.prediction.shares.values())
    text = explanation_text(e)
    for name in e.prediction.shares:
        assert f"{name} alone" in text
    assert "transfer to the A100 SXM4 80GB is unvalidated" in " ".join(text.split())
    assert "unvalidated" not in explanation_text(explained(gpu=get_gpu("h200")))


@pytest.mark.parametrize("gpu", ["a100", "rtx-4090", "h200", "b200"])
@pytest.mark.parametrize("causal", [False, True])
def test_text_is_narrow_and_the_document_complete(gpu: str, causal: bool) -> None:
    for spec, problem in (
        (KernelSpec(causal=causal), PROBLEM),
        (KernelSpec(head_dim=59, causal=causal, gqa_ratio=8, alignment=2), Problem(1, 113, 203, 8, 1)),
        (KernelSpec(head_dim=64, causal=causal), Problem(64, 1, 131072, 64, 64)),
        (KernelSpec(head_dim=64, causal=causal), Problem(1, 1, 1, 1, 1)),
        (KernelSpec(head_dim=128, causal=causal), Problem(4096, 131072, 131072, 64, 64)),
    ):
        e = explained(spec, problem, get_gpu(gpu))
        text, form = explanation_text(e), explanation_json(e)
        assert max(map(len, text.splitlines())) <= WIDTH
        for title in (
            "Work",
            "HBM traffic",
            "Roofline",
            "Config",
            "Shared memory",
            "Registers",
            "Occupancy",
            "Grid",
            "Time",
        ):
            assert any(line.startswith(title) for line in text.splitlines())
        assert infeasible_reason(spec, e.selection.config, get_gpu(gpu).arch) is None
        assert form["work"]["flops"] == problem.flops(spec)
        assert (
            form["traffic"]["tiled"]["bytes"] == problem.min_bytes(spec) <= form["traffic"]["tiled_without_l2"]["bytes"]
        )
        assert form["problem"] == {
            **dataclasses.asdict(problem),
            "bucket": problem.bucket(get_gpu(gpu).num_sms).label(),
        }
        json.dumps(form, allow_nan=False)


def test_problems_that_no_grid_takes() -> None:
    with pytest.raises(UnsupportedError, match="grid's limit"):
        explained(problem=Problem(2**20, 64, 64, 2**12, 2**12))
    with pytest.raises(ArgumentError, match="gqa_ratio"):
        explained(problem=Problem(1, 64, 64, 8, 1))
