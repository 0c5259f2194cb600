"""``fa2gen bench --pass`` on a GPU: gradients of all that is installed, compared and timed; and what is timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fa2gen.bench.cells import PASSES, Cell, make_inputs
from fa2gen.bench.own import own_implementation
from fa2gen.bench.passes import make_ready
from fa2gen.bench.peers import PEERS
from fa2gen.bench.rows import OWN, Timing
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
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


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("name", ["fa2gen", "fa2"])
def test_a_cell_times_its_passes_alone(name: str, direction: str) -> None:
    spec = KernelSpec("fwd" if direction == "fwd" else "bwd", 128, causal=True, gqa_ratio=1, dtype="bf16")
    cell = Cell(spec, Problem(2, 256, 256, 4, 4), with_forward=direction == "fwd+bwd")
    one = own_implementation("tuned") if name == "fa2gen" else PEERS[name].find()
    tensors = tuple(map(one.arrange, make_inputs(cell, torch.device("cuda", torch.cuda.current_device()), 0)))
    with torch.set_grad_enabled(cell.is_backward), one.around():
        ready = make_ready(one, cell, one.prepare(cell, *tensors[:3]), [tensors])
        inputs = ready.begin(*tensors)
        ready.call(*inputs)
        launched = " ".join(_kernels_of(lambda: ready.call(*inputs)))
    assert ("fwd" in launched) == ("fwd" in direction), launched
    assert ("bwd" in launched) == ("bwd" in direction), launched


def _kernels_of(call: Callable[[], object]) -> list[str]:
    """Names of the kernels that a call launches."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or []]
    if not names:
        pytest.skip("the profiler sees no kernels on this machine")
    return names
