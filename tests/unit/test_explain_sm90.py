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
    # Rows of 128 elements are 256 bytes: tiles of 64 rows are 16 KiB, of 128 keys 32. Six tiles with two mbarriers of 8
    # bytes each.
    assert areas(explained()) == [
        ("Q [0], then O", 0, 16384),
        ("Q [1], then O", 16384, 16384),
        ("K [0]", 32768, 32768),
        ("K [1]", 65536, 32768),
        ("V [0]", 98304, 32768),
        ("V [1]", 131072, 32768),
        ("mbarriers", 163840, 96),
    ]


def test_shared_memory_of_extra_tiles_by_hand() -> None:
    # Two consumers with three tiles of Q between them, three of K and two of V; 64 rows or keys of 256 bytes.
    config = FwdSm90Config(block_n=64, k_extra=1, q_extra=1, softmax="guarded", epilogue="direct")
    e = explained(config=config)
    names = ["Q [0]", "Q [1]", "Q [2]", "K [0]", "K [1]", "K [2]", "V [0]", "V [1]"]
    tiles = [(name, 16384 * number, 16384) for number, name in enumerate(names)]
    assert areas(e) == [*tiles, ("mbarriers", 131072, 128)]
    assert "full and empty: 3 of Q, 3 of K, 2 of V" in explanation_text(e)


def test_shared_memory_of_drawn_tiles_and_p_by_hand() -> None:
    # 40 columns fill a panel of 64: 128 bytes a row. P: two panels of 64 rows for each of two consumers. Two tile
    # numbers have mbarriers as well.
    config = FwdSm90Config(
        block_n=96, num_stages=1, q_stages=2, p_in_smem=True, scheduler="dynamic", epilogue="direct"
    )  # fmt: skip
    e = explained(KernelSpec(head_dim=40), config=config)
    assert areas(e) == [
        ("Q [0]", 0, 8192),
        ("Q [1]", 8192, 8192),
        ("Q [2]", 16384, 8192),
        ("Q [3]", 24576, 8192),
        ("K [0]", 32768, 12288),
        ("V [0]", 45056, 12288),
        ("P", 57344, 32768),
        ("mbarriers", 90112, 128),
        ("tile numbers", 90240, 8),
    ]
    assert e.smem_bytes == 90248
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
    # K and V of 4,096 keys of 128 are 2 MiB; with a mask heads go in sections, of which a quarter of 60 MiB holds
    # 7. The first 12 of 32 query tiles, which come last, see 1,536 keys: 48 MiB of 64 heads.
    e = explained()
    causal = e.memory
    assert (causal.reread_bytes, causal.heads_per_section, causal.section_bytes) == (2 << 20, 7, 14 << 20)
    assert (causal.tail_blocks, causal.tail_bytes, causal.l2_serves) == (12, 48 << 20, True)
    text = " ".join(explanation_text(e).split())
    assert "blocks go through the query heads 7 at a time: 14 MiB" in text
    assert "12 query tiles of each head, the shortest, come last, of all heads together: up to 48 MiB" in text
    # Without one the 132 tiles that are under way are those of five heads.
    full = explained(KernelSpec()).memory
    assert (full.heads_per_section, full.section_bytes, full.l2_serves) == (5, 10 << 20, True)
    assert full.tail_bytes == 0
    grouped = explained(KernelSpec(gqa_ratio=4), Problem(4, 4096, 4096, 16, 4)).memory
    assert grouped.heads_per_section == 5


def test_sections_of_the_configs_size() -> None:
    # 9 MiB hold four heads of 2 MiB.
    config = FwdSm90Config(section_mib=9)
    e = explained(config=config)
    assert (e.memory.heads_per_section, e.memory.section_bytes) == (4, 8 << 20)
    asked = "4 at a time, for the config has sections of 9 MiB: 8 MiB"
    assert asked in " ".join(explanation_text(e).split())
    # Without a mask no tiles go in sections.
    full = explained(KernelSpec(), config=config)
    assert full.memory.heads_per_section == 5
    assert "sections of" not in " ".join(explanation_text(full).split())


@pytest.mark.parametrize(
    ("config", "softmax", "meanwhile"),
    [
        (
            FwdSm90Config(),
            "online: a running maximum, taken of every key tile",
            "a key tile's softmax with P V of the tile before; consumers issue products in turns: one's softmax with "
            "the others' products",
        ),
        (
            FwdSm90Config(q_stages=2, ping_pong=False, softmax="guarded", overlap_tiles=True),
            "guarded: a maximum is taken of the first key tile and of those with a mask only; a key tile that leaves "
            "the range of its numbers is computed again",
            "a key tile's softmax with P V of the tile before; the end of a query tile with Q K of the next one's "
            "first key tile",
        ),
        (
            FwdSm90Config(overlap=False, ping_pong=False),
            "online: a running maximum, taken of every key tile",
            "nothing: a consumer's products and softmax follow each other",
        ),
    ],
)
def test_how_a_key_tile_is_computed(config: FwdSm90Config, softmax: str, meanwhile: str) -> None:
    text = " ".join(explanation_text(explained(config=config)).split())
    assert f" softmax {softmax} at the same time {meanwhile}" in text
    assert ("consumers issue products in turns" in text) == config.ping_pong
    assert ("the end of a query tile" in text) == config.overlap_tiles


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
    with pytest.raises(InfeasibleError, match=rf"block_m {block_m} is not 64 rows for each of 1 to 4 warpgroups"):
        explained(config=FwdSm90Config(block_m=block_m, ping_pong=False))


@pytest.mark.parametrize("block_m", [128, 640])
def test_measured_times_are_of_configs_that_exist(block_m: int) -> None:
    """A look-up passes over an entry that the family forbids, and the model knows no time of it."""
    mine = entry(KernelSpec(), PROBLEM, ms=1.0, sms=H200.num_sms, kind="measured", family="sm90", block_m=block_m)
    save_entries(H200, [mine])
    assert (mine in [each.entry for each in explained(KernelSpec()).measured]) == (block_m == 128)
