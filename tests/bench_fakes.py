"""A machine without a GPU that a benchmark can run on, and rows made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa2gen.bench import session
from fa2gen.bench.cells import Cell
from fa2gen.bench.machine import Ready
from fa2gen.bench.peers import Call, Implementation
from fa2gen.bench.rows import Benchmark, HostRow, Outcome, Refusal, Row, Timing
from fa2gen.problem import Problem
from fa2gen.runtime import attention
from fa2gen.spec import KernelSpec
from fa2gen.tables import Clocks

ODD = Cell(KernelSpec(head_dim=32, causal=True, gqa_ratio=3), Problem(2, 113, 203, 6, 2))


class FakeMachine:
    """Runs on the CPU; the times are those it was given, by implementation."""

    device = "cpu"
    l2_bytes = 1 << 16

    def __init__(self, ms: dict[str, float]) -> None:
        self._ms = ms
        self.calls: list[int] = []

    def synchronize(self) -> None:
        pass

    def provenance(self) -> dict[str, Any]:
        return {"gpu": "FakeGPU", "utc": "2030-01-02T03:04:05+00:00"}

    def kernel_times(
        self, ready: dict[str, Ready], calls: int, rounds: int
    ) -> tuple[dict[str, list[float] | Refusal], Clocks | None]:
        self.calls.append(calls)
        return {name: [self._ms[name] * (1 + i / 100) for i in range(rounds)] for name in ready}, Clocks(
            1500, 1400, 1600
        )

    def host_times(self, ready: dict[str, Ready], stream: str, bursts: int) -> dict[str, list[float]]:
        return {name: [10 * self._ms[name]] * bursts for name in ready}


def peer(
    name: str, compute: Callable[[Cell, Tensor, Tensor, Tensor], Tensor], heads_first: bool = False
) -> Implementation:
    """An implementation that computes each call with ``compute``, on tensors of its own layout."""

    def prepare(cell: Cell, *_: Tensor) -> Call:
        return lambda q, k, v: compute(cell, q, k, v)

    return Implementation(name, "1.0", prepare, heads_first)


def right(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a right peer computes."""
    out = attention(q, k, v, causal=cell.spec.causal)
    assert isinstance(out, Tensor)
    return out


def row(head_dim: int, causal: bool, seqlen: int, data: str = "normal", **ms: float | str) -> Row:
    """A row with these times; text is the reason of a refusal."""
    cell = Cell(KernelSpec(head_dim=head_dim, causal=causal), Problem(16384 // seqlen, seqlen, seqlen, 4, 4), data)
    outcomes: dict[str, Outcome] = {
        name: Refusal(time) if isinstance(time, str) else Timing(time, 0.99 * time, 1.02 * time, 7)
        for name, time in ms.items()
    }
    return Row(cell, "sm80_64x64s64_w2_st1_qs_guarded_mb2", "exact", "measured", False, 0, None, outcomes)


def benchmark() -> Benchmark:
    """Two kernels at two lengths, a peer that is slower, one that is faster once and refuses once, one not here."""
    rows = [
        row(64, False, 512, fa2gen=0.1, fa2=0.12, cudnn=0.08),
        row(64, False, 1024, fa2gen=0.1, fa2=0.15, cudnn=0.125),
        row(64, True, 512, fa2gen=0.05, fa2=0.06, cudnn="RuntimeError: no such kernel"),
        row(64, True, 1024, fa2gen=0.05, fa2=0.075, cudnn=0.04),
    ]
    host_cell = Cell(KernelSpec(head_dim=64), Problem(1, 64, 64, 1, 1))
    host = [
        HostRow(host_cell, stream, {"fa2gen": Timing(13.6, 13.5, 13.9, 50), "fa2": Timing(27.2, 27.0, 28.0, 50)})
        for stream in ("default", "side")
    ]
    return Benchmark(
        provenance={"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "utc": "2030-01-02T03:04:05+00:00"},
        titles={"fa2gen": "this version", "fa2": "SDPA", "cudnn": "cuDNN (SDPA)", "fa3": "FlashAttention-3"},
        versions={"fa2gen": "0.1.0", "fa2": "2.11", "cudnn": "9.19"},
        missing={"fa3": "not installed: there is no module flash_attn_interface"},
        rows=rows,
        host=host,
    )


def backward_rows() -> list[Row]:
    """Two lengths of a backward, one of a step, and a forward."""

    def of(direction: str, one: Row) -> Row:
        spec = dataclasses.replace(one.cell.spec, kind="bwd")
        return dataclasses.replace(one, cell=Cell(spec, one.cell.problem, with_forward=direction == "fwd+bwd"))

    times = {"fa2gen": 0.25, "fa2": 0.3}
    return [
        row(64, False, 512, fa2gen=0.1, fa2=0.12),
        of("bwd", row(64, False, 512, **times, deterministic=0.28)),
        of("bwd", row(64, False, 1024, fa2gen=0.25, fa2=0.2)),
        of("fwd+bwd", row(64, False, 512, fa2gen=0.35, fa2=0.42)),
    ]


def backward_benchmark() -> Benchmark:
    one = benchmark()
    one.rows = backward_rows()
    one.versions["deterministic"], one.titles["deterministic"] = "0.1.0", "its own"
    host = one.host[0]
    step = Cell(dataclasses.replace(host.cell.spec, kind="bwd"), host.cell.problem, with_forward=True)
    one.host += [dataclasses.replace(host, cell=step)]
    return one


def run_session(
    ms: dict[str, float], others: list[Implementation], cells: list[Cell] | None = None, **options
) -> Benchmark:
    """A whole session on a fake machine."""
    result = Benchmark({"gpu": "FakeGPU"})
    session.run(result, cells or [ODD], others, FakeMachine(ms), **options)
    return result
