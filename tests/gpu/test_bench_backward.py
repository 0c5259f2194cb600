"""``fa2gen bench --pass`` on a GPU: gradients of all that is installed, compared and timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa2gen.bench.rows import OWN, Timing
from tests.bench_runs import bench


def test_gradients_of_all_peers(tmp_path: Path) -> None:
    size = "--headdim 64 --gqa 1 --gqa 4 --seqlen 256,113x203 --heads 8"
    names = ("fa2", "cudnn", "efficient", "flash_attn", "fa3", "fa4", "xformers", "deterministic")
    peers = [word for name in names for word in ("--peer", name)]
    found = bench(tmp_path, *size.split(), *peers, "--pass", "bwd", "--pass", "fwd+bwd")
    assert len(found.rows) == 2 * 2 * 2 * 2
    assert found.wrong() == []
    for row in found.rows:
        assert isinstance(row.outcomes[OWN], Timing), row
        assert isinstance(row.outcomes["deterministic"], Timing), row
        assert row.config is not None
        assert (" + " in row.config) == (row.cell.direction == "fwd+bwd")
        if row.cell.lengths == "256" and row.cell.spec.gqa_ratio == 1:
            assert isinstance(row.outcomes["fa2"], Timing), row.outcomes["fa2"]
    assert [(host.cell.direction, host.stream) for host in found.host] == [("fwd+bwd", "default"), ("fwd+bwd", "side")]
    for host in found.host:
        assert 5 < host.outcomes[OWN].median < 1000


def test_a_backward_is_timed_alone(tmp_path: Path) -> None:
    size = "--headdim 128 --causal --seqlen 4096 --batch 2 --heads 16 --peer fa2 --no-host"
    found = bench(tmp_path, *size.split(), "--pass", "fwd", "--pass", "bwd", "--pass", "fwd+bwd")
    for name in (OWN, "fa2"):
        forward, backward, step = (row.outcomes[name].median for row in found.rows)
        assert backward > forward
        assert step == pytest.approx(forward + backward, rel=0.15)
