"""What a benchmark found, and its file: versioned JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2gen.errors import ArgumentError
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tables import Clocks

from .cells import DATA, PASSES, Cell

if TYPE_CHECKING:
    from .summary import Summary

SCHEMA = 1
OWN = "fa2gen"
# Of what is read: any clock's time lies between them, and rates and ratios of such times and sizes are finite.
_LEAST_TIME, _MOST_TIME, _MOST = 1e-12, 1e12, 1 << 48


@dataclass(frozen=True)
class Timing:
    """Median, 20 % and 80 % quantiles of ``n`` rounds; milliseconds of kernel time, microseconds of host time."""

    median: float
    p20: float
    p80: float
    n: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """Of at least two rounds."""
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        return cls(deciles[4], deciles[1], deciles[7], len(times))


@dataclass(frozen=True)
class Refusal:
    """No time: ``wrong`` if the output was not what it must be, else the implementation did not take the cell."""

    reason: str
    wrong: bool = False


# What came of an implementation in a row.
Outcome = Timing | Refusal


@dataclass(frozen=True)
class Row:
    """Kernel times of one cell.

    Attributes:
        cell: What was measured.
        config: Slug of fa2gen's config; of the forward's and the backward's where both are measured.
        source: How the tables came to it; ``known``: ``"measured"`` or ``"predicted"``, where an entry says so.
        stale: The entry, or nearer ones, are older than the templates.
        repairs: Softmax steps that one call repaired; None where the config repairs none.
        clocks: The chip's clock meanwhile; None where NVML does not answer.
        outcomes: By implementation, fa2gen's first.
    """

    cell: Cell
    config: str | None
    source: str
    known: str | None
    stale: bool
    repairs: int | None
    clocks: Clocks | None
    outcomes: dict[str, Outcome]

    def tflops(self, name: str) -> float | None:
        """TFLOP/s of an implementation, over visible pairs."""
        outcome = self.outcomes.get(name)
        return self.cell.flops / outcome.median / 1e9 if isinstance(outcome, Timing) else None

    def ratio(self, peer: str) -> float | None:
        """How many times faster than a peer fa2gen is; below 1 it is slower."""
        return _ratio(self.outcomes, peer)


@dataclass(frozen=True)
class HostRow:
    """Host times of one call, or of one step with its backward, on one stream (``"default"`` or ``"side"``)."""

    cell: Cell
    stream: str
    outcomes: dict[str, Outcome]

    def ratio(self, peer: str) -> float | None:
        """How many times cheaper than a peer's call fa2gen's is."""
        return _ratio(self.outcomes, peer)


@dataclass
class Benchmark:
    """A whole run.

    Attributes:
        provenance: Machine, versions, time and methods, as text or numbers.
        titles: What each implementation is, by name; ``versions``: of those that were measured.
        missing: Peers that are not here, with the reason.
        complete: False where it was interrupted.
    """

    provenance: dict[str, Any]
    titles: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    host: list[HostRow] = field(default_factory=list)
    complete: bool = True

    @property
    def peers(self) -> list[str]:
        """Names of the implementations beside fa2gen, in order."""
        return [name for name in self.versions if name != OWN]

    def wrong(self) -> list[str]:
        """A line for every result that was not what it must be."""
        measured: list[tuple[Cell, dict[str, Outcome]]] = [(row.cell, row.outcomes) for row in self.rows]
        measured += [(row.cell, row.outcomes) for row in self.host]
        return [
            f"{name} in {cell.label()}: {outcome.reason}"
            for cell, outcomes in measured
            for name, outcome in outcomes.items()
            if isinstance(outcome, Refusal) and outcome.wrong
        ]


def _ratio(outcomes: dict[str, Outcome], peer: str) -> float | None:
    own, other = outcomes.get(OWN), outcomes.get(peer)
    return other.median / own.median if isinstance(own, Timing) and isinstance(other, Timing) else None


def to_json(benchmark: Benchmark) -> dict[str, Any]:
    """The document; :func:`from_json` reads it back."""
    from .summary import summarise

    return {
        "schema": SCHEMA,
        "provenance": benchmark.provenance,
        "complete": benchmark.complete,
        "implementations": {
            name: {"title": benchmark.titles.get(name, ""), "version": version}
            for name, version in benchmark.versions.items()
        },
        "missing": {
            name: {"title": benchmark.titles.get(name, ""), "reason": reason}
            for name, reason in benchmark.missing.items()
        },
        "rows": [_row_form(row) for row in benchmark.rows],
        "host": [
            {**_cell_form(row.cell), "stream": row.stream, "us": _outcome_forms(row.outcomes, row.cell, kernel=False)}
            for row in benchmark.host
        ],
        "summary": [_summary_form(summary) for summary in summarise(benchmark.rows, benchmark.peers)],
    }


def _summary_form(summary: Summary) -> dict[str, Any]:
    form = dataclasses.asdict(summary)
    return {"pass": form.pop("direction"), **form}


def _cell_form(cell: Cell) -> dict[str, Any]:
    return {
        "pass": cell.direction,
        "spec": cell.spec.canonical(),
        "problem": dataclasses.asdict(cell.problem),
        "data": cell.data,
    }


def _row_form(row: Row) -> dict[str, Any]:
    clocks = None if row.clocks is None else {**vars(row.clocks), "throttle": list(row.clocks.throttle)}
    return {
        **_cell_form(row.cell),
        "flops": row.cell.flops,
        "config": row.config,
        "source": row.source,
        "known": row.known,
        "stale": row.stale,
        "repairs": row.repairs,
        "clocks": clocks,
        "ms": _outcome_forms(row.outcomes, row.cell, kernel=True),
    }


def _outcome_forms(outcomes: dict[str, Outcome], cell: Cell, *, kernel: bool) -> dict[str, Any]:
    forms: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        forms[name] = dataclasses.asdict(outcome)
        if kernel and isinstance(outcome, Timing):
            forms[name]["tflops"] = cell.flops / outcome.median / 1e9
    return forms


def from_json(form: Any) -> Benchmark:
    """The benchmark of a document.

    Raises:
        ArgumentError: It is no such document, or one of another schema.
    """
    if not isinstance(form, dict) or not isinstance(form.get("schema"), int):
        raise ArgumentError("not the rows of a fa2gen bench: no schema version")
    if form["schema"] != SCHEMA:
        raise ArgumentError(f"rows of schema {form['schema']}; this version reads schema {SCHEMA}")
    try:
        implementations, missing = form["implementations"], form["missing"]
        return Benchmark(
            provenance=dict(form["provenance"]),
            titles={name: str(x["title"]) for name, x in [*implementations.items(), *missing.items()]},
            versions={name: str(x["version"]) for name, x in implementations.items()},
            missing={name: str(x["reason"]) for name, x in missing.items()},
            rows=[_read_row(row) for row in form["rows"]],
            host=[HostRow(_read_cell(row), str(row["stream"]), _read_outcomes(row["us"])) for row in form["host"]],
            complete=bool(form["complete"]),
        )
    except KeyError as error:
        raise ArgumentError(f"damaged rows: there is no {error.args[0]!r} where there must be one") from None
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"damaged rows: {error}") from None


def _read_cell(form: dict[str, Any]) -> Cell:
    if form["data"] not in DATA:
        raise ArgumentError(f"data {form['data']!r} is none of {', '.join(DATA)}")
    problem = Problem(**form["problem"])
    if max(dataclasses.astuple(problem)) >= _MOST:
        raise ArgumentError(f"a size is {max(dataclasses.astuple(problem))}")
    spec = KernelSpec.from_canonical(form["spec"])
    # Rows of the first version have forwards only, and do not say so.
    direction = form.get("pass", spec.kind)
    if direction not in PASSES or (direction == "fwd") != (spec.kind == "fwd"):
        raise ArgumentError(f"pass {direction!r} is none of a kernel of kind {spec.kind}")
    return Cell(spec, problem, form["data"], with_forward=direction == "fwd+bwd")


def _read_row(form: dict[str, Any]) -> Row:
    clocks, repairs = form["clocks"], form["repairs"]
    if repairs is not None and (not isinstance(repairs, int) or not 0 <= repairs < _MOST):
        raise ArgumentError(f"repairs are {repairs!r}, which is no count")
    return Row(
        _read_cell(form),
        _text(form, "config"),
        str(form["source"]),
        _text(form, "known"),
        bool(form["stale"]),
        repairs,
        None if clocks is None else Clocks(**{**clocks, "throttle": tuple(clocks["throttle"])}),
        _read_outcomes(form["ms"]),
    )


def _text(form: dict[str, Any], name: str) -> str | None:
    value = form[name]
    if value is not None and not isinstance(value, str):
        raise ArgumentError(f"{name} is {value!r}, which is no text")
    return value


def _read_outcomes(form: dict[str, Any]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for name, x in form.items():
        if "reason" in x:
            outcomes[name] = Refusal(str(x["reason"]), bool(x["wrong"]))
            continue
        times = [float(x[key]) for key in ("median", "p20", "p80")]
        if not all(_LEAST_TIME <= time <= _MOST_TIME for time in times):
            raise ArgumentError(f"a time of {name} is not positive and finite")
        outcomes[name] = Timing(times[0], times[1], times[2], int(x["n"]))
    return outcomes


def write(benchmark: Benchmark, path: Path) -> None:
    """Write the document, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(to_json(benchmark), file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _finite(text: str) -> float:
    """A number of the file; ``NaN``, ``Infinity`` and 1e999 are none, and would come out of ``--json`` as such."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text} is not finite")
    return number


def read(path: Path) -> Benchmark:
    """Read a document.

    Raises:
        ArgumentError: The file is no such document; the message names it.
        OSError: It cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return from_json(json.loads(text, parse_constant=_finite, parse_float=_finite))
    except (ValueError, RecursionError) as error:  # an ArgumentError is a ValueError too
        raise ArgumentError(f"{path}: {error if isinstance(error, ArgumentError) else f'not JSON: {error}'}") from None
