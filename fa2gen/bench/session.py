"""A benchmark: for every cell each implementation is prepared, compared, timed."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fa2gen.errors import ArgumentError
from fa2gen.problem import Problem

from .agreement import PEER_ALLOWANCE, peer_error, reference_error
from .cells import Cell, make_inputs
from .machine import Machine, Ready, Tensors, calls_per_replay, require_working
from .own import Choice, chosen, count_repairs, own_implementation
from .peers import Implementation, first_line
from .rows import OWN, Benchmark, HostRow, Outcome, Refusal, Row, Timing

FEWEST_ROUNDS = 5
# Input sets of a cell: together twice the L2, but not fewer than three; a cell of a few kilobytes gets these many.
_FEWEST_SETS, _MOST_SETS = 3, 64
_HOST_BURSTS = 50
_HOST_SEQLEN = 64


@dataclass(frozen=True)
class BenchEvent:
    """Progress: ``done`` of ``total`` cells, and what was just done."""

    stage: str
    done: int
    total: int
    text: str


def run(
    benchmark: Benchmark,
    cells: Sequence[Cell],
    peers: Sequence[Implementation],
    machine: Machine,
    *,
    config: Choice = "tuned",
    rounds: int = 7,
    host: bool = True,
    progress: Callable[[BenchEvent], None] = lambda _: None,
) -> None:
    """Measure every cell and add its row to ``benchmark``, so that an interruption loses only the cell under way.

    Args:
        benchmark: Gets versions, rows and host rows.
        cells: What to measure.
        peers: Against whom.
        machine: Where.
        config: fa2gen's config (see :func:`fa2gen.bench.own.forced_config`).
        rounds: How often each implementation is timed in each cell, at least five.
        host: Also measure host time, on the first cell's kernel.
        progress: Called after each cell.

    Raises:
        ArgumentError: A cell does not fit the device's memory, or too few rounds.
        LaunchError: An implementation left the device unusable.
        Fa2genError: fa2gen cannot run a cell.
    """
    if rounds < FEWEST_ROUNDS:
        raise ArgumentError(f"rounds must be at least {FEWEST_ROUNDS}, got {rounds}")
    implementations = [own_implementation(config), *peers]
    benchmark.versions |= {one.name: one.version for one in implementations}
    with torch.no_grad():
        for done, cell in enumerate(cells):
            progress(BenchEvent("bench", done, len(cells), cell.label()))
            benchmark.rows.append(_kernel_row(cell, implementations, machine, config, rounds))
        progress(BenchEvent("bench", len(cells), len(cells), ""))
        if host and cells:
            benchmark.host += _host_rows(host_cell(cells[0]), implementations, machine)


def host_cell(cell: Cell) -> Cell:
    """A problem of a cell's kernel so small that the GPU keeps up with the calls."""
    return Cell(cell.spec, Problem(1, _HOST_SEQLEN, _HOST_SEQLEN, cell.spec.gqa_ratio, 1))


def num_sets(cell: Cell, l2_bytes: int) -> int:
    """Input sets that together exceed L2 twice, so that no call finds its own inputs there."""
    return min(_MOST_SETS, max(_FEWEST_SETS, math.ceil(2 * l2_bytes / max(1, cell.problem.min_bytes(cell.spec)))))


def _kernel_row(
    cell: Cell, implementations: Sequence[Implementation], machine: Machine, config: Choice, rounds: int
) -> Row:
    sets = _input_sets(cell, machine, num_sets(cell, machine.l2_bytes))
    description = chosen(cell, *sets[0], config)
    ready, outcomes = _prepare(cell, implementations, sets, machine)
    # After the first call, which compiles and loads.
    repairs = count_repairs(cell, *sets[0], description) if OWN in ready else None
    clocks = None
    if ready:
        calls = calls_per_replay(cell.flops, cell.problem.min_bytes(cell.spec), len(sets))
        times, clocks = machine.kernel_times(ready, calls, rounds)
        outcomes |= {name: _outcome(one) for name, one in times.items()}
    return Row(
        cell=cell,
        config=description.config.slug() if description.config else None,
        source=description.source,
        known=description.known,
        stale=description.stale,
        repairs=repairs,
        clocks=clocks,
        outcomes={one.name: outcomes[one.name] for one in implementations},
    )


def _outcome(times: list[float] | Refusal) -> Outcome:
    return times if isinstance(times, Refusal) else Timing.of(times)


def _host_rows(cell: Cell, implementations: Sequence[Implementation], machine: Machine) -> list[HostRow]:
    ready, outcomes = _prepare(cell, implementations, _input_sets(cell, machine, 1), machine)
    rows = []
    for stream in ("default", "side"):
        timed: dict[str, Outcome] = {
            name: Timing.of(times) for name, times in machine.host_times(ready, stream, _HOST_BURSTS).items()
        }
        rows.append(HostRow(cell, stream, {one.name: (outcomes | timed)[one.name] for one in implementations}))
    return rows


def _input_sets(cell: Cell, machine: Machine, count: int) -> list[Tensors]:
    try:
        return [make_inputs(cell, machine.device, seed) for seed in range(count)]
    except torch.cuda.OutOfMemoryError:
        size = count * cell.problem.min_bytes(cell.spec)
        raise ArgumentError(
            f"{cell.label()}: its {count} sets of inputs, {size / 2**30:.1f} GiB, do not fit the free memory of "
            f"{machine.device}; take fewer --tokens or heads"
        ) from None


def _prepare(
    cell: Cell, implementations: Sequence[Implementation], sets: Sequence[Tensors], machine: Machine
) -> tuple[dict[str, Ready], dict[str, Outcome]]:
    """The implementations that take the cell and compute what they must, ready to be timed; why the others do not."""
    ready: dict[str, Ready] = {}
    outcomes: dict[str, Outcome] = {}
    own: Tensor | None = None
    for one in implementations:
        tensors = [(one.arrange(q), one.arrange(k), one.arrange(v)) for q, k, v in sets]
        if one.name == OWN:
            call = one.prepare(cell, *tensors[0])
            out = call(*tensors[0])
            machine.synchronize()
        else:
            with _recorded() as said:
                try:
                    with one.around():
                        call = one.prepare(cell, *tensors[0])
                        out = one.arrange(call(*tensors[0]))
                    machine.synchronize()
                except Exception as error:
                    require_working(machine, one.name, error)
                    outcomes[one.name] = Refusal(_reason(error, said))
                    continue
        wrong = reference_error(out, *sets[0], cell, 1.0 if one.name == OWN else PEER_ALLOWANCE)
        if not wrong and own is not None:
            wrong = peer_error(out, own)
        if wrong:
            outcomes[one.name] = Refusal(f"wrong output: {wrong}", wrong=True)
            continue
        if one.name == OWN:
            own = out
        ready[one.name] = Ready(one, call, tensors)
    return ready, outcomes


@contextlib.contextmanager
def _recorded() -> Iterator[list[str]]:
    """Warnings as text: SDPA says in them why it has no kernel for a call, and in its error only that it has none."""
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: said.append(" ".join(str(message).split()))
        yield said


def _reason(error: Exception, said: Sequence[str]) -> str:
    why = [text.partition(" (Triggered")[0] for text in said]
    # Of the kernels that were not asked for, SDPA says that they are disabled.
    why = [text for text in why if "not used because" not in text and "disabled" not in text]
    return f"{first_line(error)} ({'; '.join(dict.fromkeys(why))})"[:500] if why else first_line(error)
