"""The committed results can be read, and README's figures are theirs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fa2gen.bench.rows import OWN, Benchmark, Row, Timing, read
from fa2gen.bench.summary import summarise
from fa2gen.problem import Bucket
from fa2gen.spec import KernelSpec
from fa2gen.tables.store import load_table, package_dir, table_path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PEERS = ("fa2", "cudnn", "fa3", "fa4")
README = " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_whole(path: Path) -> None:
    found = read(path)
    assert found.complete
    assert found.wrong() == []
    assert {"gpu", "driver", "torch", "utc"} <= set(found.provenance)
    for row in found.rows:
        own = row.outcomes[OWN]
        assert isinstance(own, Timing)
        assert own.n >= 5
        assert row.config is not None


def _table(found: Benchmark, peers: Sequence[str]) -> Iterator[str]:
    """README's lines: TFLOP/s, and in brackets the ratio to the fastest of these peers, by length."""
    for spec in dict.fromkeys(row.cell.spec for row in found.rows):
        rows = [row for row in found.rows if row.cell.spec == spec]
        cells = [f"{row.tflops(OWN):.0f} ({_ratio(row, peers):.2f})" for row in rows]
        yield f"| {spec.head_dim}, {'causal' if spec.causal else 'full'} | {' | '.join(cells)} |"


def _ratio(row: Row, peers: Sequence[str] = PEERS) -> float:
    """To the fastest peer that takes the cell."""
    ratios = [row.ratio(peer) for peer in peers if peer in row.outcomes]
    return min(ratio for ratio in ratios if ratio is not None)


def _mean_and_worst(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f} × and {min(ratios):.2f} ×"


def test_readme_s_figures() -> None:
    found = read(ROOT / "benchmarks" / "results" / "h200_forward_bf16.json")
    for line in _table(found, PEERS):
        assert line in README, f"README lacks {line}"
    assert len(found.rows) == 36
    text = f"{_mean_and_worst([_ratio(row) for row in found.rows])} the fastest of the four"
    for peer, name in zip(PEERS, ("FlashAttention-2", "cuDNN", "FlashAttention-3", "FlashAttention-4"), strict=True):
        assert text in README, f"README lacks: {text}"
        text = f"{_mean_and_worst([_ratio(row, [peer]) for row in found.rows])} {name}"
    assert text in README, f"README lacks: {text}"


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("h200_forward_host_bf16", "the ratio to the fastest is "),
        ("h200_forward_gqa8_bf16", "with 8 query heads to a key/value head, 12 cells, "),
        ("h200_forward_odd_bf16", "lengths of 777, 4096 and 3000 x 5000, 18 cells, "),
        ("h200_forward_sm90_fp16", "in fp16 with the configs of bf16, 12 cells, "),
    ],
)
def test_readme_s_figures_of_other_cells(name: str, before: str) -> None:
    rows = read(ROOT / "benchmarks" / "results" / f"{name}.json").rows
    assert f"{len(rows)} cells" in before or len(rows) == 36
    text = f"{before}{_mean_and_worst([_ratio(row) for row in rows])} ([rows](benchmarks/results/{name}.json))"
    assert text in README, f"README lacks: {text}"


def test_readme_s_figures_of_the_sm80_family() -> None:
    bf16, _ = summarise(read(ROOT / "benchmarks" / "results" / "h200_forward_sm80_bf16.json").rows, ["fa2", "cudnn"])
    fp16, _ = summarise(read(ROOT / "benchmarks" / "results" / "h200_forward_fp16.json").rows, ["fa2", "cudnn"])
    for text in (
        f"{bf16.geomean:.2f} × FlashAttention-2 over the same cells, {bf16.worst:.2f} in the worst",
        f"fp16, with tables of its own: {fp16.geomean:.2f} ×, {fp16.worst:.2f} in the worst cell",
    ):
        assert text in README, f"README lacks: {text}"


def test_readme_s_figures_of_both_families() -> None:
    times: dict[tuple[KernelSpec, Bucket], dict[str, float]] = {}
    table = load_table(table_path(package_dir(), "h200", "fwd"))
    assert table is not None
    for entry in table.entries:
        times.setdefault((entry.spec, entry.bucket), {})[entry.config.family] = entry.measurement.ms
    ratios = [of["sm80"] / of["sm90"] for of in times.values() if len(of) == 2]
    text = (
        f"{len(ratios)} kernels and sizes, by the entries' times the `sm90` one is "
        f"{min(ratios):.2f} to {max(ratios):.2f} times as fast, "
        f"{statistics.geometric_mean(ratios):.2f} in the geometric mean"
    )
    assert text in README, f"README lacks: {text}"


def test_readme_s_figures_of_the_host() -> None:
    found = read(ROOT / "benchmarks" / "results" / "h200_forward_host_bf16.json")
    assert [row.stream for row in found.host] == ["default", "side"]
    (own, own_side), (other, other_side) = _us(found, OWN), _us(found, "fa2")
    text = f"{own:.1f} µs on the default stream and {own_side:.1f} µs on another, where SDPA takes {other:.1f} and"
    assert f"{text} {other_side:.1f} µs" in README


def test_readme_s_figures_of_repairs() -> None:
    rows = read(ROOT / "benchmarks" / "results" / "h200_repairs_bf16.json").rows
    every, some, none = (
        " and ".join(f"{row.ratio('online'):.2f}" for row in rows if row.cell.data == data)
        for data in ("repair-all", "repair-1pct", "normal")
    )
    assert f"is computed again runs at {every} × the same config" in README
    assert f"one in a hundred is at {some} ×" in README
    assert f"nothing is repeated, and it is {none} ×" in README


def test_readme_s_figures_of_repairs_of_the_sm90_family() -> None:
    rows = read(ROOT / "benchmarks" / "results" / "h200_repairs_sm90_bf16.json").rows
    full = [row for row in rows if not row.cell.spec.causal]
    every, some, none = (
        _listed([f"{row.ratio('online'):.2f}" for row in full if row.cell.data == data])
        for data in ("repair-all", "repair-1pct", "normal")
    )
    text = (
        f"runs at {every} × on data on which every query tile needs a repair, at {some} × where one in a hundred does"
    )
    assert f"{text}, and at {none} × on normal data" in README
    # What is said to be repaired is: figures of data that a config repairs nothing of are not among them.
    assert all(bool(row.repairs) == (row.cell.data != "normal") for row in full)
    by_data = {row.cell.data: row for row in rows if row.cell.spec.causal and row.cell.spec.head_dim == 64}
    assert all(by_data[data].repairs for data in ("repair-all", "repair-1pct"))
    ratios = [by_data[data].ratio("online") for data in ("repair-all", "repair-1pct")]
    assert f"at head dim 64 only, {ratios[0]:.2f} and {ratios[1]:.2f} ×" in README


def test_readme_s_figures_of_a_gpt_s_repairs() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "repair_rate" / "1.3b_2k.json").read_text())
    shares = {(one["step"], one["layer"]): one["repaired"] / one["visited"] for one in document["counts"]}
    assert (
        f"at most {100 * max(shares.values()):.2f} % of a layer's (warp, key tile) pairs are repaired in the five"
        in README
    )
    assert not any(share for (step, _), share in shares.items() if step <= 10)
    assert document["setting"]["steps"] == 200


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def test_readme_s_figures_of_the_backward() -> None:
    found = read(ROOT / "benchmarks" / "results" / "h200_backward_bf16.json")
    for line in _table(found, ["fa2"]):
        assert line in README, f"README lacks {line}"
    fa2, cudnn, ordered = summarise(found.rows, ["fa2", "cudnn", "deterministic"])
    assert [row.stream for row in found.host] == ["default", "side"]
    (own, own_side), (other, other_side) = _us(found, OWN), _us(found, "fa2")
    for text in (
        f"{fa2.geomean:.2f} × FlashAttention-2's backward over these {fa2.cells} cells, {fa2.worst:.2f} in the worst, "
        f"and {cudnn.geomean:.2f} × cuDNN's",
        f"variant runs at {1 / ordered.geomean:.2f} × the speed, "
        f"{min(1 / row.ratio('deterministic') for row in found.rows):.2f} in its worst cell",
        f"costs the CPU {own:.0f} µs on the default stream and {own_side:.0f} µs on another, where SDPA's takes "
        f"{other:.0f} and {other_side:.0f} µs",
    ):
        assert text in README, f"README lacks: {text}"


def test_readme_s_figures_of_both_passes() -> None:
    fa2, _ = summarise(read(ROOT / "benchmarks" / "results" / "h200_step_bf16.json").rows, ["fa2", "cudnn"])
    assert f"together: {fa2.geomean:.2f} × over {fa2.cells} cells" in README


def _us(found: Benchmark, name: str) -> list[float]:
    """Host time by stream."""
    outcomes = [row.outcomes[name] for row in found.host]
    return [outcome.median for outcome in outcomes if isinstance(outcome, Timing)]
