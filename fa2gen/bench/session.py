"""A benchmark: for every cell each implementation is prepared, compared, timed."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fa2gen.errors import ArgumentError
from fa2gen.problem import Problem

from .agreement import PEER_ALLOWANCE, gradient_error, peer_error, peer_gradient_error, reference_error
from .cells import Cell, make_inputs
from .machine import Machine, Ready, Tensors, calls_per_replay, require_working
from .own import Choice, chosen, count_repairs, own_implementation
from .passes import make_ready, results
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
        host: Also measure host time, on the first forward cell's kernel, and of a whole step on that of the first cell
            with a backward.
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
    for done, cell in enumerate(cells):
        progress(BenchEvent("bench", done, len(cells), cell.label()))
        with torch.set_grad_enabled(cell.is_backward):
            benchmark.rows.append(_kernel_row(cell, implementations, machine, config, rounds))
    progress(BenchEvent("bench", len(cells), len(cells), ""))
    for cell in host_cells(cells) if host else []:
        with torch.set_grad_enabled(cell.is_backward):
            benchmark.host += _host_rows(cell, implementations, machine)


def host_cells(cells: Sequence[Cell]) -> list[Cell]:
    """A call and a step, as far as cells measure them, of a problem so small that the GPU keeps up."""
    firsts = {cell.is_backward: cell for cell in reversed(cells)}
    problems = {kind: Problem(1, _HOST_SEQLEN, _HOST_SEQLEN, cell.spec.gqa_ratio, 1) for kind, cell in firsts.items()}
    return [Cell(firsts[kind].spec, problems[kind], with_forward=kind) for kind in sorted(firsts)]


def num_sets(cell: Cell, l2_bytes: int) -> int:
    """Input sets that together exceed L2 twice, so that no call finds its own inputs there."""
    return min(_MOST_SETS, max(_FEWEST_SETS, math.ceil(2 * l2_bytes / max(1, cell.min_bytes))))


def _kernel_row(
    cell: Cell, implementations: Sequence[Implementation], machine: Machine, config: Choice, rounds: int
) -> Row:
    sets = _input_sets(cell, machine, num_sets(cell, machine.l2_bytes))
    q, k, v = sets[0][:3]
    descriptions = [chosen(spec, q, k, v, config) for spec in cell.specs]
    ready, outcomes = _prepare(cell, implementations, sets, machine)
    # After the first call, which compiles and loads.
    repairs = None
    if OWN in ready and not cell.is_backward:
        repairs = count_repairs(cell, q, k, v, descriptions[0])
    clocks = None
    if ready:
        calls = calls_per_replay(cell.flops, cell.min_bytes, len(sets))
        times, clocks = machine.kernel_times(ready, calls, rounds)
        outcomes |= {name: _outcome(one) for name, one in times.items()}
    return Row(
        cell=cell,
        config=_joined(one.config.slug() if one.config else None for one in descriptions),
        source=str(_joined(one.source for one in descriptions)),
        known=_joined(one.known for one in descriptions),
        stale=any(one.stale for one in descriptions),
        repairs=repairs,
        clocks=clocks,
        outcomes={one.name: outcomes[one.name] for one in implementations},
    )


def _joined(words: Iterable[str | None]) -> str | None:
    """What is said of a cell's kernels, in the order in which they run; said once where it is the same of all."""
    return " + ".join(dict.fromkeys(word for word in words if word is not None)) or None


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
        size = count * cell.min_bytes
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
    own: Tensors | None = None
    for one in implementations:
        tensors = [tuple(map(one.arrange, inputs)) for inputs in sets]
        with _recorded(one.name != OWN) as said:
            try:
                with one.around():
                    candidate = make_ready(one, cell, one.prepare(cell, *tensors[0][:3]), tensors)
                    found = results(candidate, tensors[0])
                machine.synchronize()
            except Exception as error:
                if one.name == OWN:
                    raise
                require_working(machine, one.name, error)
                outcomes[one.name] = Refusal(_reason(error, said))
                continue
        wrong = _wrong(found, own, sets[0], cell, 1.0 if one.name == OWN else PEER_ALLOWANCE)
        if wrong:
            outcomes[one.name] = Refusal(wrong, wrong=True)
            continue
        if one.name == OWN:
            own = found
        ready[one.name] = candidate
    return ready, outcomes


def _wrong(found: Tensors, own: Tensors | None, inputs: Tensors, cell: Cell, allowance: float) -> str:
    """What is wrong with results, by the float64 reference and beside fa2gen's where these are right, or ``""``."""
    if cell.is_backward:
        wrong = gradient_error(found, inputs, cell, allowance)
        if not wrong and own is not None:
            wrong = peer_gradient_error(found, own)
        return f"wrong gradients: {wrong}" if wrong else ""
    (out,), (q, k, v) = found, inputs
    wrong = reference_error(out, q, k, v, cell, allowance)
    if not wrong and own is not None:
        wrong = peer_error(out, own[0])
    return f"wrong output: {wrong}" if wrong else ""


@contextlib.contextmanager
def _recorded(recorded: bool) -> Iterator[list[str]]:
    """Warnings as text: SDPA says in them why it has no kernel for a call, and in its error only that it has none.

    fa2gen's own are for the user: they are not ``recorded``.
    """
    said: list[str] = []
    if not recorded:
        yield said
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: said.append(" ".join(str(message).split()))
        yield said


def _reason(error: Exception, said: Sequence[str]) -> str:
    why = [text.partition(" (Triggered")[0] for text in said]
    # Of the kernels that were not asked for, SDPA says that they are disabled.
    why = [text for text in why if "not used because" not in text and "disabled" not in text]
    return f"{first_line(error)} ({'; '.join(dict.fromkeys(why))})"[:500] if why else first_line(error)
