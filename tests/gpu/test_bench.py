"""``fa2gen bench`` on a GPU: small cells, all that is installed, every row read back."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fa2gen.bench.cells import Cell, make_inputs
from fa2gen.bench.machine import CudaMachine, Ready
from fa2gen.bench.own import own_implementation
from fa2gen.bench.peers import PEERS
from fa2gen.bench.rows import OWN, Refusal, Timing
from fa2gen.cli import main
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec
from tests.bench_runs import bench

GUARDED = FwdConfig(block_m=64, block_n=64, num_warps=2, num_stages=2, softmax="guarded")


def test_all_peers_and_masks(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "--headdim", "64", "--gqa", "1", "--gqa", "4", "--seqlen", "256,1x512,113x203", "--heads", "8"
    )
    assert set(found.versions) | set(found.missing) == {OWN, *PEERS}
    assert len(found.rows) == 2 * 2 * 3
    assert found.wrong() == []
    for row in found.rows:
        assert isinstance(row.outcomes[OWN], Timing), row
        assert row.config is not None
        assert set(row.outcomes) == set(found.versions)
        for outcome in row.outcomes.values():
            if isinstance(outcome, Timing):
                assert 0 < outcome.p20 <= outcome.median <= outcome.p80
                assert outcome.n == 5
            else:
                assert outcome.reason
        # What torch ships takes squares of either mask.
        if row.cell.lengths == "256" and row.cell.spec.gqa_ratio == 1:
            assert isinstance(row.outcomes["fa2"], Timing), row.outcomes["fa2"]
    assert [host.stream for host in found.host] == ["default", "side"]
    for host in found.host:
        assert 1 < host.outcomes[OWN].median < 1000
    assert found.provenance["gpu"] == torch.cuda.get_device_name()
    assert found.provenance["torch"] == torch.__version__


def test_kernel_time_follows_the_work(tmp_path: Path) -> None:
    size = "--headdim 64 --full --seqlen 1024,4096 --batch 2 --heads 16"
    found = bench(tmp_path, *f"{size} --peer fa2 --no-host".split())
    short, long = found.rows
    for name in (OWN, "fa2"):
        # 16 times the pairs; a short call may fill the GPU worse.
        assert 6 < long.outcomes[name].median / short.outcomes[name].median < 24
    # The same call, timed by itself from the host, with the launch and the wait.
    q, k, v = make_inputs(long.cell, "cuda", 0)
    call = own_implementation("tuned").prepare(long.cell, q, k, v)
    best = math.inf
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(q, k, v)
        torch.cuda.synchronize()
        best = min(best, 1e3 * (time.perf_counter() - start))
    assert 0.5 * best < long.outcomes[OWN].median < 1.3 * best


def test_repairs_are_counted_and_the_online_softmax_is_timed_beside(tmp_path: Path) -> None:
    size = "--headdim 64 --full --seqlen 1024 --batch 1 --heads 16 --peer online --no-host"
    data = "--data normal --data repair-1pct --data repair-all"
    found = bench(tmp_path, *f"{size} {data} --config {GUARDED.slug()}".split())
    normal, some, every = found.rows
    assert normal.repairs == 0
    assert 0 < some.repairs < every.repairs
    # Two of 128 query tiles.
    assert some.repairs == pytest.approx(every.repairs / 64, rel=0.01)
    assert all(isinstance(row.outcomes["online"], Timing) for row in found.rows)
    assert normal.source == "forced by the caller"


def test_an_implementation_that_cannot_be_captured_is_refused_and_the_rest_timed() -> None:
    machine, cell = CudaMachine(), Cell(KernelSpec(head_dim=64), Problem(1, 256, 256, 2, 2))
    own = own_implementation(GUARDED)
    tensors = [make_inputs(cell, machine.device, seed) for seed in range(3)]

    def eager_only(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not in a graph")
        return q

    ready = {
        "bad": Ready(dataclasses.replace(own, name="bad"), eager_only, tensors),
        OWN: Ready(own, own.prepare(cell, *tensors[0]), tensors),
    }
    times, _ = machine.kernel_times(ready, 6, 5)
    assert times["bad"] == Refusal("cannot be captured into a CUDA graph: ValueError: not in a graph")
    assert len(times[OWN]) == 5
    assert all(ms > 0 for ms in times[OWN])


def test_json_document(tmp_path: Path) -> None:
    arguments = ["bench", "--headdim", "64", "--causal", "--seqlen", "128", "--batch", "1", "--heads", "1", "--json"]
    form = json.loads(CliRunner().invoke(main, [*arguments, "--peer", "fa2"]).stdout)
    assert form["schema"] == 1
    assert form["rows"][0]["ms"][OWN]["tflops"] > 0
    assert form["host"][0]["us"]["fa2"]["n"] >= 5
