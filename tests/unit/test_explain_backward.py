"""``fa2gen explain``, ``list`` and ``table show`` of the backward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fa2gen import driver
from fa2gen.cli import main
from fa2gen.codegen import kernels_of, manifest, template_hash
from fa2gen.commands.explain_json import explanation_json
from fa2gen.commands.explain_text import WIDTH, explanation_text
from fa2gen.constraints import default_config, smem_bytes
from fa2gen.constraints_backward import PREPROCESS_ROWS
from fa2gen.explain import Explanation, explain
from fa2gen.explain_smem import smem_areas
from fa2gen.hardware import Gpu, get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, KernelSpec
from fa2gen.tables import save_entries, store
from fa2gen.tuning.model import model_version, validity
from fa2gen.tuning.space import GRIDS, legal_space
from tests.tuning_fakes import entry

A10, A100, H200 = get_gpu("a10"), get_gpu("a100"), get_gpu("h200")
SPEC, GROUPED = KernelSpec("bwd"), KernelSpec("bwd", gqa_ratio=4)
PROBLEM = Problem(4, 4096, 4096, 16, 16)
PLAIN = BwdConfig(block_m=64, block_n=64, step_m=64, num_warps=4, num_stages=1, roles=2)


@pytest.fixture(autouse=True)
def _no_gpu_and_own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "hidden by a test")
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "tables"))
    monkeypatch.setattr(store, "package_dir", lambda: tmp_path / "package")
    monkeypatch.delenv("FA2GEN_STRICT", raising=False)


def explained(spec=SPEC, problem=PROBLEM, gpu=A100, config=PLAIN) -> Explanation:
    return explain(spec, problem, gpu, config=config, compile=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_work_and_traffic_are_the_backwards() -> None:
    e = explained()
    # Five products of 2 * 4 * 16 * 4096^2 * 128.
    assert e.flops == 5 * 2 * 64 * 4096**2 * 128 == e.executed_flops
    # Without a cache 64 key tiles read and write the float32 sums of dQ: more than matrices of scores would move.
    assert e.memory.tiled.bytes < e.memory.standard.bytes < e.memory.uncached.bytes
    # Q and dO of 4,096 rows of 128 in 16 bits, the sums of dQ in 32: 4 MiB. Half of 40 MiB holds five heads of 64,
    # which 13 sections of five are.
    assert (e.memory.reread_bytes, e.memory.heads_per_section, e.memory.l2_serves) == (4 << 20, 5, True)
    assert not explained(problem=Problem(1, 32768, 32768, 16, 16), gpu=A10).memory.l2_serves


@pytest.mark.parametrize(
    ("spec", "gpu", "sizes"),
    [
        (KernelSpec("bwd", causal=True), H200, (4096, 512)),
        (KernelSpec("bwd", head_dim=40, causal=True, gqa_ratio=3, deterministic=True), A100, (100, 7)),
        (KernelSpec(causal=True), H200, (4096, 512)),
        (KernelSpec(head_dim=40, causal=True, gqa_ratio=3), A100, (100, 7)),
    ],
)
def test_queries_without_keys_are_no_rereads(spec: KernelSpec, gpu: Gpu, sizes: tuple[int, int]) -> None:
    memory = explained(spec, Problem(4, *sizes, 48, 48 // spec.gqa_ratio), gpu, "default").memory
    assert memory.tiled.bytes <= memory.uncached.bytes
    # What each counts for queries that see no key is equal: only what tiles read and add to again differs.
    differing = [one for one, other in zip(memory.tiled.passes, memory.uncached.passes, strict=True) if one != other]
    assert {what.split()[0] for what, _ in differing} <= {"read", "add"}


def l2_row(e: Explanation) -> str:
    return " ".join(explanation_text(e).split("  L2  ")[1].partition("Roofline")[0].split())


def test_heads_at_a_time_against_l2() -> None:
    """Half of L2 and up to half as many heads again; twice that with a causal mask; a fixed order has its own least."""
    text = l2_row(explained())
    assert "query heads 5 at a time: 20 MiB; this fits in 40 MiB of L2, and re-reads hit it" in text
    # Ten heads of 4 MiB, and to 13 for even sections.
    e = explained(KernelSpec("bwd", causal=True))
    assert (e.memory.heads_per_section, e.memory.heads_by_l2, e.memory.section_bytes) == (13, 13, 52 << 20)
    assert e.memory.used_bytes == pytest.approx(26 << 20, rel=1e-3)
    assert "13 at a time: 52 MiB, about 50% of it in use at a time; this fits in 40 MiB of L2" in l2_row(e)
    # Twice as many keys as queries: the mask hides a quarter.
    longer = explained(KernelSpec("bwd", causal=True), Problem(4, 4096, 8192, 16, 16)).memory
    assert longer.used_share == pytest.approx(0.75, abs=1e-3)
    e = explained(KernelSpec("bwd", head_dim=64, causal=True, deterministic=True), Problem(4, 16384, 16384, 32, 32))
    assert (e.memory.reread_bytes, e.memory.section_bytes, e.memory.l2_serves) == (8 << 20, 1 << 30, False)
    text = l2_row(e)
    assert "query heads 128 at a time, for L2 alone it would be 4, but sums in a fixed order wait less" in text
    assert "1 GiB, about 50% of it in use at a time; this does not fit in 40 MiB of L2" in text
    form = explanation_json(e)["traffic"]
    assert (form["heads_per_section"], form["heads_per_section_by_l2"]) == (128, 4)
    assert form["reread_bytes_per_section"] == 1 << 30
    assert form["reread_bytes_in_use"] == e.memory.used_bytes
    assert form["l2_serves_rereads"] is False
    # Where L2 has room for as many, the order asks for nothing.
    short = explained(KernelSpec("bwd", deterministic=True), Problem(16, 512, 512, 16, 16))
    assert short.memory.heads_per_section == short.memory.heads_by_l2
    assert "fixed order" not in l2_row(short)
    # Blocks of a group read one of its heads at a time.
    assert "key/value heads 16 at a time: 16 MiB" in l2_row(explained(GROUPED, Problem(4, 1024, 4096, 16, 4)))


@pytest.mark.parametrize("gpu", ["a10", "h200"])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_areas_fill_the_shared_memory(head_dim: int, gpu: str) -> None:
    spec = KernelSpec("bwd", head_dim=head_dim)
    for config in legal_space(spec, get_gpu(gpu)).configs[::40]:
        end = 0
        for name, offset, size, shape in smem_areas(spec, config):
            assert (offset, bool(name), bool(shape)) == (end, True, True)
            end = offset + size
        assert end == smem_bytes(spec, config)


def test_areas_by_hand() -> None:
    """64 keys or rows of 128 columns are 16 KiB, 64 keys by 64 rows 8 KiB, L and D of 64 rows 512 bytes."""
    kib = 1024
    assert [row[:3] for row in explained().smem_areas()] == [
        ("K, then dK", 0, 16 * kib),
        ("V, then dV", 16 * kib, 16 * kib),
        ("Q [0]", 32 * kib, 16 * kib),
        ("dO [0]", 48 * kib, 16 * kib),
        ("P", 64 * kib, 8 * kib),
        ("dS [0]", 72 * kib, 8 * kib),
        ("L and D", 80 * kib, 512),
    ]


def test_grid_and_launches() -> None:
    e = explained(GROUPED, Problem(4, 4096, 4000, 16, 4), H200)
    # 63 key tiles of 64; a block walks over the four query heads of its group.
    assert e.grid.blocks == 4 * 4 * 63
    assert [launch.kernel for launch in e.plan.launches] == [*kernels_of("bwd")]
    assert e.plan.launches[0].grid[0] == 64 * 4096 // PREPROCESS_ROWS
    text = " ".join(explanation_text(e).split())
    assert "1,008 = 4 x 4 key/value heads x 63 key tiles of 64; each walks over 4 query heads" in text
    assert "workspaces lse_log2 1 MiB, delta 1 MiB, dq_accum 128 MiB" in text
    split = BwdConfig(block_m=64, block_n=64, step_m=64, num_warps=4, num_stages=1, roles=2, split_heads=True)
    apart = explained(GROUPED, Problem(4, 4096, 4000, 16, 4), H200, split)
    assert apart.grid.blocks == 4 * 16 * 63
    assert "4,032 = 4 x 16 heads x 63 key tiles of 64\n" in explanation_text(apart)
    assert {"dk_accum", "dv_accum"} <= {*explanation_json(apart)["workspaces"]}


@pytest.mark.parametrize("gpu", ["a100", "rtx-4090", "h200"])
@pytest.mark.parametrize("causal", [False, True])
def test_text_is_narrow_and_the_document_complete(gpu: str, causal: bool) -> None:
    for spec, problem in (
        (KernelSpec("bwd", causal=causal), PROBLEM),
        (KernelSpec("bwd", head_dim=72, causal=causal, gqa_ratio=8, deterministic=True), Problem(1, 113, 203, 8, 1)),
        (KernelSpec("bwd", head_dim=64, causal=causal), Problem(1, 1, 1, 1, 1)),
        (KernelSpec("bwd", head_dim=256, causal=causal), Problem(64, 131072, 131072, 64, 64)),
    ):
        e = explained(spec, problem, get_gpu(gpu), "default")
        assert e.selection.config == default_config(spec)
        text, form = explanation_text(e), explanation_json(e)
        assert max(map(len, text.splitlines())) <= WIDTH
        assert "Launches, in a row" in text
        assert "10 x head dim x" in text
        assert form["prediction"]["model_version"] == model_version("bwd", "sm80")
        assert form["prediction"]["validity"] == validity(get_gpu(gpu), "bwd", "sm80")
        assert sum(form["space"][name] for name in ("legal", "excluded")) == len(
            GRIDS["bwd"]["sm80"].configs(spec.gqa_ratio > 1)
        )
        json.dumps(form, allow_nan=False)


def test_a_borrowed_config_says_so() -> None:
    ordered = KernelSpec("bwd", deterministic=True)
    row = entry(SPEC, PROBLEM, sms=A10.num_sms, template=template_hash("bwd", "sm80"), **PLAIN.canonical())
    save_entries(A10, [row])
    e = explain(ordered, PROBLEM, A10, compile=False)
    assert (e.selection.match.source, e.selection.config) == ("non-deterministic entry", PLAIN)
    assert e.selection.why.startswith("no entry for deterministic sums")


def test_command_line() -> None:
    result = run(
        "explain", "--kind", "bwd", "--deterministic", "--headdim", "64", "--gpu", "a10", "--no-compile", "--json"
    )
    form = json.loads(result.stdout)
    assert form["spec"]["slug"] == "bwd_d64_bf16_full_gqa1_det"
    assert "semaphores" in form["workspaces"]
    for arguments, words in (
        (("--deterministic",), "--deterministic is for backward kernels"),
        (("--kind", "both"), "--kind"),
        (("--kind", "bwd", "--headdim", "60"), "a call pads 60 columns to 64"),
        (("--kind", "bwd", "--headdim", "257"), "head_dim 257 is not supported: "),
        (("--kind", "bwd", "--config", "sm80_128x64s64_w4_st2_qs_online_mb1"), f"read like {BwdConfig().slug()}"),
    ):
        result = run(
            "explain",
            "--gpu",
            "a10",
            "--no-compile",
            *(("--headdim", "64") * ("--headdim" not in arguments)),
            *arguments,
        )
        (line,) = result.stderr.strip().splitlines()
        assert (result.exit_code in (1, 2), line.startswith("error: "), words in line) == (True, True, True), line


def test_list_kernels() -> None:
    rows = json.loads(run("list", "kernels", "--gpu", "a10", "--json").stdout)
    assert [(row["kind"], row["family"]) for row in rows] == [("fwd", "sm80"), ("fwd", "sm90"), ("bwd", "sm80")]
    (row,) = json.loads(run("list", "kernels", "--kind", "bwd", "--gpu", "a10", "--json").stdout)
    assert row == rows[2]
    assert row["kernels"] == [*kernels_of("bwd")]
    assert row["templates"] == [*manifest("bwd", "sm80")]
    assert row["template_hash"] == template_hash("bwd", "sm80")
    assert (row["head_dims"], row["alignments"]) == ([8, 256], [16])
    for head_dim, count in row["legal_configs"].items():
        assert count == len(legal_space(KernelSpec("bwd", head_dim=int(head_dim)), A10).configs)
    text = run("list", "kernels").stdout
    assert "bwd_preprocess, bwd, bwd_postprocess, in this order" in text
    assert max(map(len, text.splitlines())) <= 100


def test_table_show_by_order_of_the_sums() -> None:
    ordered = KernelSpec("bwd", causal=True, deterministic=True)
    save_entries(A10, [entry(KernelSpec()), entry(SPEC), entry(GROUPED), entry(ordered)])
    for options, count in (
        (("--deterministic",), 1),
        (("--no-deterministic",), 2),
        (("--deterministic", "--kind", "bwd", "--no-causal"), 0),
        ((), 4),
    ):
        form = json.loads(run("table", "show", *options, "--json").stdout)
        assert sum(len(table["entries"]) for table in form["tables"]) == count
        lines = run("table", "show", *options).stdout.splitlines()
        assert sum(line.startswith(("fwd_", "bwd_")) for line in lines) == count
        assert sum("_det " in line for line in lines) == (count if "--deterministic" in options else not options)
    for option in ("--deterministic", "--no-deterministic"):
        result = run("table", "show", "--kind", "fwd", option)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: --deterministic and --no-deterministic are for backward kernels")


def test_table_show_by_kind() -> None:
    save_entries(A10, [entry(KernelSpec()), entry(SPEC), entry(KernelSpec("bwd", gqa_ratio=16, deterministic=True))])
    for kind, count in (("fwd", 1), ("bwd", 2)):
        form = json.loads(run("table", "show", "--kind", kind, "--json").stdout)
        kernels = [row["kernel"] for table in form["tables"] for row in table["entries"]]
        assert len(kernels) == count
        assert all(kernel.startswith(kind) for kernel in kernels)
    lines = run("table", "show").stdout.splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("a10 ")] == ["a10 bwd", "a10 fwd"]
    assert all(len(line) <= 80 for line in lines if "table /" not in line), max(lines, key=len)
    # TFLOP/s of five products.
    form = json.loads(run("table", "show", "--kind", "bwd", "--json").stdout)
    row = form["tables"][0]["entries"][0]
    assert row["tflops"] == pytest.approx(10 * 128 * 64 * 4096**2 / 1.5 / 1e9)
