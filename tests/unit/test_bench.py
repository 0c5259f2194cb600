"""Benchmarks without a GPU: cells, statistics, agreement, sessions on a fake machine, rows and their file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fa2gen.bench import machine, session
from fa2gen.bench.agreement import PEER_ALLOWANCE, peer_error, reference_error, sample_strips
from fa2gen.bench.cells import Cell, make_cells, make_inputs
from fa2gen.bench.rows import Benchmark, Refusal, Timing, from_json, read, to_json, write
from fa2gen.bench.summary import summarise
from fa2gen.errors import ArgumentError, LaunchError
from fa2gen.problem import Problem
from fa2gen.reference import attention_forward
from fa2gen.runtime import attention
from fa2gen.spec import KernelSpec
from tests.bench_fakes import ODD, FakeMachine, benchmark, peer, right, row, run_session


def test_default_sizes_are_the_paper_s() -> None:
    cells = make_cells([KernelSpec(head_dim=64)], [(512, 512), (16384, 16384)], tokens=16384, hidden=2048)
    assert [cell.problem for cell in cells] == [Problem(32, 512, 512, 32, 32), Problem(1, 16384, 16384, 32, 32)]
    (decode,) = make_cells([KernelSpec(gqa_ratio=8)], [(1, 8192)], tokens=16384, hidden=2048, batch=5, heads=24)
    assert decode.problem == Problem(5, 1, 8192, 24, 3)
    assert decode.lengths == "1x8192"
    assert "fwd_d128_bf16_full_gqa8 at 1x8192" in decode.label()


def test_cells_are_every_combination_once() -> None:
    specs = [KernelSpec(head_dim=64), KernelSpec(head_dim=128)]
    cells = make_cells(specs, [(64, 64), (64, 64)], tokens=64, hidden=128, data=("normal", "repair-all"))
    assert [(cell.spec.head_dim, cell.data) for cell in cells] == [
        (64, "normal"),
        (64, "repair-all"),
        (128, "normal"),
        (128, "repair-all"),
    ]


def test_heads_must_hold_whole_groups() -> None:
    with pytest.raises(ArgumentError, match="--heads 8 is not a multiple of --gqa 3"):
        make_cells([KernelSpec(gqa_ratio=3)], [(64, 64)], tokens=64, hidden=128, heads=8)


def test_flops_count_visible_pairs() -> None:
    full, causal = (Cell(KernelSpec(head_dim=64, causal=c), Problem(2, 100, 100, 3, 3)) for c in (False, True))
    assert full.flops == 4 * 64 * 2 * 3 * 100 * 100
    assert causal.flops == 4 * 64 * 2 * 3 * (100 * 101 // 2)
    assert row(64, False, 512, fa2gen=2.0).tflops("fa2gen") == 4 * 64 * 32 * 4 * 512 * 512 / 2e-3 / 1e12


def _lead(q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """By how much (log2) the best of each 32 keys exceeds the best key to their right, in ``rows`` (b, h, s)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5 / math.log(2)
    steps = scores.unflatten(-1, (-1, 32)).amax(-1)
    right_of = steps.flip(-1).cummax(-1).values.flip(-1)
    return (steps[..., :-1] - right_of[..., 1:])[rows]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_data_that_a_guarded_softmax_must_repair(dtype: str) -> None:
    # Below 2^8 steps bf16's ramp is strict; exponents leave float32's range in every step to the left.
    problem, spec = Problem(3, 256, 640, 35, 35), KernelSpec(head_dim=32, dtype=dtype)
    q, k, _ = make_inputs(Cell(spec, problem, "repair-all"), "cpu", 0)
    assert torch.isfinite(k).all()
    everywhere = torch.ones(3, 35, 256, dtype=torch.bool)
    assert _lead(q, k, everywhere).min() > 127
    q, k, _ = make_inputs(Cell(spec, problem, "repair-1pct"), "cpu", 0)
    repaired = (q[..., 0] != 0).transpose(1, 2)
    assert repaired.sum() == 3 * 128  # tiles 0, 100 and 200 of 210
    assert _lead(q, k, repaired).min() > 127
    assert _lead(q, k, ~repaired).max() < 24
    normal, _, _ = make_inputs(Cell(spec, problem), "cpu", 0)
    assert (normal[..., 1:] == q[..., 1:]).all()
    assert (normal[..., 0].float().std() - 1).abs() < 0.1


def test_timings_are_quantiles() -> None:
    timing = Timing.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert timing == Timing(3.5, 2.0, 5.0, 6)


def test_replays_walk_over_all_sets_and_are_long_enough() -> None:
    assert machine.calls_per_replay(10**15, 10**6, 3) == 3
    # 0.1 ms at the least: some 20 calls, in whole rounds of three.
    assert machine.calls_per_replay(10**11, 10**6, 3) == 21
    assert machine.calls_per_replay(1, 1, 64) == 256
    assert machine.calls_per_replay(0, 0, 3) == 201


def test_input_sets_exceed_l2() -> None:
    large = Cell(KernelSpec(head_dim=64), Problem(32, 512, 512, 32, 32))
    assert session.num_sets(large, 60 << 20) == 3
    small = Cell(KernelSpec(head_dim=64), Problem(1, 512, 512, 32, 32))
    count = session.num_sets(small, 60 << 20)
    assert count * small.problem.min_bytes(small.spec) > 2 * (60 << 20)
    assert session.num_sets(Cell(KernelSpec(), Problem(1, 1, 1, 1, 1)), 60 << 20) == 64


def test_host_time_of_a_burst() -> None:
    clock: list[str] = []
    q = torch.zeros(1)
    us = machine.burst_us(lambda q, k, v: clock.append("call") or q, (q, q, q), lambda: clock.append("wait"), 3)
    assert clock == ["wait", "call", "call", "call"]
    assert 0 < us < 1e6


def test_sampled_strips_cover_both_ends_and_tile_edges() -> None:
    assert {row for strip in sample_strips(1) for row in strip} == {0}
    for seqlen in (7, 8, 9, 100, 1025):
        strips = sample_strips(seqlen)
        rows = {row for strip in strips for row in strip}
        assert {0, seqlen - 1} <= rows <= set(range(seqlen))
        assert all(0 < len(strip) <= 8 for strip in strips)
    assert {63, 64, 127, 128, 1025 - 129, 1025 - 128} <= rows


def _top_left(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.double()).to(q.dtype)


def _heads_interleaved(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query head h reads key/value head h % heads, as ``repeat`` would have it."""
    k, v = (x.repeat(1, 1, cell.spec.gqa_ratio, 1) for x in (k, v))
    out = attention(q, k, v, causal=cell.spec.causal)
    assert isinstance(out, Tensor)
    return out


def _one_key_short(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return right(cell, q, k[:, :-1], v[:, :-1])


def _nan_at_the_end(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = right(cell, q, k, v).clone()
    out[-1, -1, -1, -1] = math.nan
    return out


def _other_shape(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return right(cell, q, k, v).transpose(1, 2)


WRONG = [_top_left, _heads_interleaved, _one_key_short, _nan_at_the_end, _other_shape]


@pytest.mark.parametrize("compute", WRONG)
def test_wrong_outputs_are_told_apart(compute) -> None:
    q, k, v = make_inputs(ODD, "cpu", 0)
    own, out = right(ODD, q, k, v), compute(ODD, q, k, v)
    assert peer_error(out, own)
    assert reference_error(out, q, k, v, ODD, PEER_ALLOWANCE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 64), ("fp16", 8), ("bf16", 1)])
def test_right_outputs_agree(dtype: str, head_dim: int, causal: bool) -> None:
    spec = KernelSpec(head_dim=head_dim, dtype=dtype, causal=causal, alignment=16 if head_dim % 8 == 0 else 2)
    cell = Cell(spec, Problem(2, 203, 113, 3, 3))  # rows that see no key
    q, k, v = make_inputs(cell, "cpu", 0)
    own = right(cell, q, k, v)
    # Weights rounded to 16 bits before they are used: a coarser, right peer.
    coarse, _ = attention_forward(q, k, v, causal=causal, dtype=torch.float32)
    assert peer_error(coarse.to(q.dtype), own) == ""
    assert reference_error(own, q, k, v, cell) == ""


def test_a_session_times_compares_and_records() -> None:
    events: list[session.BenchEvent] = []
    found = run_session(
        {"fa2gen": 1.0, "a": 2.0, "b": 0.5},
        [
            peer("a", right),
            peer("b", lambda c, q, k, v: right(c, *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), True),
        ],
        progress=events.append,
    )
    (only,) = found.rows
    assert list(only.outcomes) == ["fa2gen", "a", "b"]
    assert only.outcomes["a"] == Timing.of([2.0 * (1 + i / 100) for i in range(7)])
    assert (only.ratio("a"), only.ratio("b")) == (pytest.approx(2.0), pytest.approx(0.5))
    assert only.clocks is not None
    assert only.source == "the definition, in float64"
    assert [(host.stream, host.ratio("a")) for host in found.host] == [("default", 2.0), ("side", 2.0)]
    assert found.host[0].cell.problem == Problem(1, 64, 64, 3, 1)
    assert found.versions == {"fa2gen": found.versions["fa2gen"], "a": "1.0", "b": "1.0"}
    assert [(e.done, e.total) for e in events] == [(0, 1), (1, 1)]
    assert found.wrong() == []


@pytest.mark.parametrize("compute", WRONG)
def test_a_wrong_peer_is_named_and_not_timed(compute) -> None:
    found = run_session({"fa2gen": 1.0, "a": 2.0}, [peer("bad", compute), peer("a", right)], host=False)
    outcome = found.rows[0].outcomes["bad"]
    assert isinstance(outcome, Refusal)
    assert outcome.wrong
    assert found.rows[0].ratio("a") == pytest.approx(2.0)
    (line,) = found.wrong()
    assert line.startswith("bad in fwd_d32_bf16_causal_gqa3 at 113x203: wrong output: ")


def test_a_refusal_keeps_its_reason_and_the_warnings() -> None:
    import warnings

    def refuse(*_: object) -> Tensor:
        warnings.warn("Flash attention kernel not used because: (Triggered internally at x.cpp:1)", stacklevel=1)
        warnings.warn("Flash attention has been runtime disabled. (Triggered internally)", stacklevel=1)
        warnings.warn("heads must be equal. (Triggered internally at y.cpp:2.)", stacklevel=1)
        raise RuntimeError("No available kernel.\nAborting execution.")

    outcome = run_session({"fa2gen": 1.0}, [peer("bad", refuse)], host=False).rows[0].outcomes["bad"]
    assert outcome == Refusal("RuntimeError: No available kernel. (heads must be equal.)")


def test_a_peer_that_breaks_the_device_ends_it() -> None:
    def crash(*_: object) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    class Broken(FakeMachine):
        done = 0

        def synchronize(self) -> None:
            self.done += 1
            if self.done > 1:  # fa2gen's own call came first
                raise RuntimeError("CUDA error")

    with pytest.raises(LaunchError, match="bad left the GPU unusable: RuntimeError: an illegal memory access"):
        session.run(Benchmark({}), [ODD], [peer("bad", crash)], Broken({}))


def test_rows_measured_before_an_interruption_stay() -> None:
    def interrupt(event: session.BenchEvent) -> None:
        if event.done == 1:
            raise KeyboardInterrupt

    found = Benchmark({})
    small = Cell(KernelSpec(head_dim=32), Problem(1, 16, 16, 1, 1))
    with pytest.raises(KeyboardInterrupt):
        session.run(found, [ODD, small], [], FakeMachine({"fa2gen": 1.0}), progress=interrupt)
    assert [one.cell for one in found.rows] == [ODD]


def test_few_rounds_are_refused() -> None:
    with pytest.raises(ArgumentError, match="rounds must be at least 5, got 4"):
        run_session({}, [], rounds=4)


def test_summary() -> None:
    fa2, cudnn = summarise(benchmark().rows, ["fa2", "cudnn"])
    assert fa2.geomean == pytest.approx((1.2 * 1.5 * 1.2 * 1.5) ** 0.25)
    assert (fa2.cells, fa2.of, fa2.worst) == (4, 4, pytest.approx(1.2))
    assert (cudnn.cells, cudnn.of, cudnn.worst) == (3, 4, pytest.approx(0.8))
    assert cudnn.worst_cell in ("fwd_d64_bf16_full_gqa1 at 512", "fwd_d64_bf16_causal_gqa1 at 1024")
    assert summarise([row(64, False, 512, fa2gen=1.0, fa2="no")], ["fa2"]) == []
    assert summarise([row(64, False, 512, fa2gen="no", fa2=1.0)], ["fa2"]) == []


def test_data_kinds_are_not_averaged() -> None:
    rows = [row(64, False, 512, fa2gen=1.0, online=1.2), row(64, False, 512, "repair-all", fa2gen=1.0, online=0.5)]
    assert [(s.data, s.geomean) for s in summarise(rows, ["online"])] == [
        ("normal", pytest.approx(1.2)),
        ("repair-all", pytest.approx(0.5)),
    ]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "rows.json"
    before = benchmark()
    before.rows += run_session({"fa2gen": 1.0}, [peer("bad", _top_left)], host=False).rows
    write(before, path)
    assert read(path) == before
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]
    form = json.loads(path.read_text())
    assert form["schema"] == 1
    first = form["rows"][0]
    assert first["flops"] == before.rows[0].cell.flops
    assert first["ms"]["fa2gen"]["tflops"] == pytest.approx(before.rows[0].tflops("fa2gen"))
    assert form["summary"][0]["peer"] == "fa2"
    assert form["missing"]["fa3"]["reason"] == before.missing["fa3"]


_SIZES = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_k")


def _damage(**changes: object) -> dict[str, object]:
    return {**to_json(benchmark()), **changes}


def _times(time: float) -> dict[str, object]:
    return {"fa2gen": {"median": time, "p20": time, "p80": time, "n": 5}}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ([], "no schema version"),
        ({}, "no schema version"),
        (_damage(schema=7), "schema 7; this version reads schema 1"),
        (_damage(rows=[{"spec": {}}]), "there is no 'clocks'"),
        (_damage(rows=3), "damaged rows"),
        (_damage(missing=[]), "damaged rows"),
        (_damage(rows=[{**to_json(benchmark())["rows"][0], "problem": {"batch": -1}}]), "damaged rows|batch"),
        (_damage(rows=[{**to_json(benchmark())["rows"][0], "spec": {"color": 1}}]), "no field color"),
        (
            _damage(rows=[{**to_json(benchmark())["rows"][0], "ms": {"a": {"median": 0, "p20": 1, "p80": 1, "n": 5}}}]),
            "not positive",
        ),
        (_damage(rows=[{**to_json(benchmark())["rows"][0], "repairs": "many"}]), "repairs are 'many'"),
        (_damage(rows=[{**to_json(benchmark())["rows"][0], "config": 3}]), "config is 3"),
        (_damage(rows=[{**to_json(benchmark())["rows"][0], "ms": _times(10**400)}]), "damaged rows"),
        (_damage(rows=[{**to_json(benchmark())["rows"][0], "ms": _times(5e-324)}]), "not positive"),
        (
            _damage(rows=[{**to_json(benchmark())["rows"][0], "problem": dict.fromkeys(_SIZES, 10**400)}]),
            "size is 1000",
        ),
    ],
)
def test_damaged_rows_are_refused(form: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        from_json(form)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(form))
    with pytest.raises(ArgumentError, match=str(path)):
        read(path)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_rows_hold_finite_numbers(number: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(_damage(provenance={"rounds": "X"})).replace('"X"', number))
    with pytest.raises(ArgumentError, match=f"{number} is not finite"):
        read(path)
