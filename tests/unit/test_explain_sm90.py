"""The facts of ``fa2gen explain`` for Hopper's forward, by hand: areas, registers, walk over tiles, roofline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fa2gen import explain as explain_module
from fa2gen.commands.explain_json import explanation_json
from fa2gen.commands.explain_text import WIDTH, explanation_text
from fa2gen.errors import InfeasibleError
from fa2gen.explain import Explanation, explain
from fa2gen.explain_grid import Grid
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.roofline import Roofline, executed_flops, tile_work
from fa2gen.spec import FwdConfig, FwdSm90Config, KernelSpec, config_from_slug
from fa2gen.tables import save_entries
from fa2gen.tuning.prediction import Facts, Prediction
from tests.tuning_fakes import entry

H200 = get_gpu("h200")
SPEC = KernelSpec(causal=True)
PROBLEM = Problem(4, 4096, 4096, 16, 16)
CONFIG = FwdSm90Config()


@pytest.fixture(autouse=True)
def _own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "tables"))
    monkeypatch.delenv("FA2GEN_STRICT", raising=False)
    # The tuner's grid and its model have tests of their own.
    monkeypatch.setattr(explain_module, "exclusion_reason", lambda *_: None)
    monkeypatch.setattr(explain_module, "estimate_facts", lambda spec, config, gpu: Facts(168, 0, 163920))
    monkeypatch.setattr(explain_module, "predict", lambda *_: Prediction(1.0, 1, {"tensor": 0.9}))


def explained(spec: KernelSpec = SPEC, problem: Problem = PROBLEM, config: Any = CONFIG) -> Explanation:
    return explain(spec, problem, H200, config=config, compile=False)


def areas(e: Explanation) -> list[tuple[str, int, int]]:
    return [(name, offset, size) for name, offset, size, _ in e.smem_areas()]


def test_shared_memory_by_hand() -> None:
    # Rows of 128 elements are 256 bytes: tiles of 128 rows are 32 KiB. Five stages with two mbarriers of 8 bytes each.
    assert areas(explained()) == [
        ("Q, then O", 0, 32768),
        ("K [0]", 32768, 32768),
        ("K [1]", 65536, 32768),
        ("V [0]", 98304, 32768),
        ("V [1]", 131072, 32768),
        ("mbarriers", 163840, 80),
    ]


def test_shared_memory_of_drawn_tiles_and_p_by_hand() -> None:
    # 40 columns fill a panel of 64: 128 bytes a row. P: two panels of 64 rows for each of two consumers. Two tile
    # numbers have mbarriers as well.
    config = FwdSm90Config(
        block_n=96, num_stages=1, q_stages=2, p_in_smem=True, scheduler="dynamic", epilogue="direct"
    )  # fmt: skip
    e = explained(KernelSpec(head_dim=40), config=config)
    assert areas(e) == [
        ("Q [0]", 0, 16384),
        ("Q [1]", 16384, 16384),
        ("K [0]", 32768, 12288),
        ("V [0]", 45056, 12288),
        ("P", 57344, 32768),
        ("mbarriers", 90112, 96),
        ("tile numbers", 90208, 8),
    ]
    assert e.smem_bytes == 90216
    text = explanation_text(e)
    assert "tile numbers" in text
    # Names that are longer than most leave the columns straight.
    rows = [line for line in text.splitlines() if " to " in line and "KiB" in line]
    assert len({line.index(" to ") for line in rows}) == 1


def test_blocks_walk_over_tiles() -> None:
    # 4 * 16 heads * 32 tiles of 128 rows = 2,048 tiles on 132 SMs: 15 each, and 68 of the blocks have one more.
    e = explained()
    grid = e.grid
    assert (grid.blocks, grid.wave, grid.tiles, grid.full_waves, grid.tail) == (132, 132, 2048, 15, 68)
    assert grid.efficiency == pytest.approx(2048 / (16 * 132))
    text = " ".join(explanation_text(e).split())
    assert "tiles 2,048 = 4 x 16 heads x 32 query tiles of 128" in text
    assert "blocks 132, at most one for each SM; they walk over the tiles" in text
    assert "tiles of a block 15.52: 15 each, 68 blocks one more; 97.0% of the slots filled" in text
    assert "they go to the blocks in turn, longest first" in text
    form = explanation_json(e)["grid"]
    assert (form["persistent"], form["blocks"], form["tiles"], form["tiles_per_block"]) == (True, 132, 2048, [15, 16])
    drawn = explained(KernelSpec(), config=FwdSm90Config(scheduler="dynamic"))
    text = " ".join(explanation_text(drawn).split())
    assert "blocks take the next as they finish" in text
    assert "longest first" not in text


def test_fewer_tiles_than_sms() -> None:
    grid = explained(problem=Problem(1, 256, 256, 16, 16)).grid
    assert (grid.blocks, grid.tiles, grid.waves, grid.tail, grid.efficiency) == (32, 32, 1.0, 0, 1.0)


def test_grid_of_blocks_with_one_tile_each() -> None:
    grid = Grid(300, 132)
    assert (grid.persistent, grid.work, grid.full_waves, grid.tail) == (False, 300, 2, 36)
    assert Grid(132, 0, 2048).waves == Grid(132, 0, 2048).efficiency == 0.0


def test_registers_are_shared_out() -> None:
    # Accumulators of O and S: 64 + 64; P of the tile before: 32; 24 besides. 65,536 / 384 threads are 168 with the
    # granularity of 8.
    e = explained()
    assert (e.registers.least, e.registers.cap) == (184, 168)
    assert e.registers.split is not None
    text = " ".join(explanation_text(e).split())
    assert "leave 168, and setmaxnreg makes of them 24 for the producer, 240 for a consumer" in text
    form = explanation_json(e)["registers"]
    assert (form["producer"], form["consumer"]) == (24, 240)
    # With one consumer there is nothing to share out.
    one = explained(config=FwdSm90Config(block_m=64, ping_pong=False))
    assert one.registers.split is None
    assert "setmaxnreg" not in explanation_text(one)
    assert explanation_json(one)["registers"]["consumer"] is None


def test_roofline_is_that_of_wgmma() -> None:
    # 2 * 2,048 FLOPs a clock on 132 SMs at 1.98 GHz; mma.sync has two thirds of it.
    assert H200.wgmma_tflops == pytest.approx(2e-3 * 2048 * 132 * 1.98)
    assert H200.mma_tflops == pytest.approx(H200.wgmma_tflops * 2 / 3)
    assert Roofline.of(H200).instruction == "mma.sync"
    e = explained()
    assert (e.roofline.peak_tflops, e.roofline.instruction) == (H200.wgmma_tflops, "wgmma")
    assert "TFLOP/s of wgmma with float32 sums" in " ".join(explanation_text(e).split())
    assert explanation_json(e)["roofline"]["instruction"] == "wgmma"
    a100 = get_gpu("a100")
    assert Roofline.of(a100, "sm90") == Roofline.of(a100)


def test_work_is_counted_in_tiles() -> None:
    sm80 = FwdConfig(block_m=128, block_n=128, step_n=64, num_warps=8)
    for spec in (KernelSpec(), SPEC):
        assert tile_work(spec, CONFIG, PROBLEM) == tile_work(spec, sm80, PROBLEM)
        assert executed_flops(spec, CONFIG, PROBLEM) == executed_flops(spec, sm80, PROBLEM)
    # 40 columns are three steps of 16; the sm80 family multiplies the tile's 64.
    narrow = KernelSpec(head_dim=40)
    assert executed_flops(narrow, CONFIG, PROBLEM) * 64 == executed_flops(narrow, sm80, PROBLEM) * 48


def test_what_l2_holds() -> None:
    # K and V of 4,096 keys of 128 are 2 MiB; with a mask heads go in sections, of which half of 60 MB hold 13 or 14.
    causal = explained().memory
    assert (causal.reread_bytes, causal.tail_bytes) == (2 << 20, 0)
    assert causal.heads_per_section * 2 <= H200.l2_bytes >> 21
    # Without one the 132 tiles that are under way are those of five heads.
    full = explained(KernelSpec()).memory
    assert (full.heads_per_section, full.section_bytes, full.l2_serves) == (5, 10 << 20, True)
    grouped = explained(KernelSpec(gqa_ratio=4), Problem(4, 4096, 4096, 16, 4)).memory
    assert grouped.heads_per_section == 5


@pytest.mark.parametrize("head_dim", [40, 128, 256])
def test_text_and_json(head_dim: int) -> None:
    config = FwdSm90Config(block_n=64, scheduler="dynamic")
    e = explained(KernelSpec(head_dim=head_dim), Problem(1, 113, 203, 8, 8), config)
    assert max(map(len, explanation_text(e).splitlines())) <= WIDTH
    form = json.loads(json.dumps(explanation_json(e), allow_nan=False))
    assert config_from_slug("fwd", form["config"]["slug"]) == config
    assert form["config"]["family"] == "sm90"
    assert form["workspaces"] == {"tickets": 256}
    assert form["launches"] == [
        {"kernel": "fwd", "blocks": 8, "threads": 384, "smem_bytes": form["shared_memory"]["bytes"]}
    ]


def test_other_chips_have_no_wgmma() -> None:
    e = explain(SPEC, PROBLEM, get_gpu("a100"), config=CONFIG, compile=False)
    assert e.selection.illegal
    assert e.selection.excluded == "family sm90 needs compute capability 9.0, sm_80 has no wgmma"
    assert e.tflops == 0
    assert "  predicted             none: there is no such kernel\n" in explanation_text(e)
    assert explanation_json(e)["prediction"]["ms"] is None


@pytest.mark.parametrize("block_m", [32, 320])
def test_configs_with_impossible_warpgroups_are_refused(block_m: int) -> None:
    with pytest.raises(InfeasibleError, match=rf"block_m {block_m} is not 64 rows for each of 1 to 3 warpgroups"):
        explained(config=FwdSm90Config(block_m=block_m, ping_pong=False))


@pytest.mark.parametrize("block_m", [128, 640])
def test_measured_times_are_of_configs_that_exist(block_m: int) -> None:
    """A look-up passes over an entry that the family forbids, and the model knows no time of it."""
    mine = entry(KernelSpec(), PROBLEM, ms=1.0, sms=H200.num_sms, kind="measured", family="sm90", block_m=block_m)
    save_entries(H200, [mine])
    assert (mine in [each.entry for each in explained(KernelSpec()).measured]) == (block_m == 128)
