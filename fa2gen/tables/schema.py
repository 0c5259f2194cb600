"""What a tuned table holds, and its strict JSON form.

A file is read whole or not at all: anything unexpected raises ``TableError`` naming the file and the place, so that a
damaged table is noticed and never half used.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fa2gen.errors import ArgumentError, TableError
from fa2gen.problem import Bucket, Problem
from fa2gen.spec import FwdConfig, KernelSpec

SCHEMA_VERSION = 1
MEASUREMENT_KINDS = ("measured", "predicted")

# from-version -> function that turns a document of that version into one of the next. Version 1 is the first.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

_UTC = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")


def utc_now() -> str:
    """The time as tables write it, e.g. ``"2026-01-31T09:30:00Z"``; sorts as text."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Measurement:
    """How fast, and how that is known.

    Attributes:
        kind: ``"measured"`` on the GPU, or ``"predicted"`` by the performance model.
        ms: Kernel time, milliseconds: the median, or the model's figure.
        p20, p80: Quantiles, milliseconds; equal to ``ms`` for a prediction.
        n: Launches timed; 0 for a prediction.
        method: How it was timed or predicted, for people.
        problem: The sizes it holds for, one representative of the entry's bucket.
    """

    kind: str
    ms: float
    p20: float
    p80: float
    n: int
    method: str
    problem: Problem

    def __post_init__(self) -> None:
        if self.kind not in MEASUREMENT_KINDS:
            raise ArgumentError(f"kind must be one of {', '.join(MEASUREMENT_KINDS)}, got {self.kind!r}")
        for name in ("ms", "p20", "p80"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise ArgumentError(f"{name} must be a finite number above 0, got {value!r}")
        if not self.p20 <= self.ms <= self.p80:
            raise ArgumentError(f"p20 <= ms <= p80 must hold, got {self.p20}, {self.ms}, {self.p80}")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < (self.kind == "measured"):
            raise ArgumentError(f"n must be a count of launches (0 only for a prediction), got {self.n!r}")
        _require_text("method", self.method)


@dataclass(frozen=True)
class Provenance:
    """Where an entry comes from.

    Attributes:
        template_hash: ``codegen.template_hash`` of the kernel that was compiled; an entry of another hash is stale.
        nvcc: Version text of the compiler.
        driver: Driver version, ``""`` for a prediction.
        versions: Python packages that took part, name to version.
        trials: Configs compiled or tried for this entry.
        feasible: How many of them could have been chosen.
        numerics: What the gate said of this config.
        model_version: Version of the performance model, for a prediction; else None.
        utc: When, see :func:`utc_now`.
    """

    template_hash: str
    nvcc: str
    driver: str
    trials: int
    feasible: int
    numerics: str
    utc: str
    model_version: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("template_hash", "nvcc", "numerics"):
            _require_text(name, getattr(self, name))
        if not isinstance(self.driver, str):
            raise ArgumentError(f"driver must be text, got {self.driver!r}")
        if self.model_version is not None:
            _require_text("model_version", self.model_version)
        for name in ("trials", "feasible"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ArgumentError(f"{name} must be a count, got {value!r}")
        if not isinstance(self.utc, str) or not _UTC.fullmatch(self.utc):
            raise ArgumentError(f"utc must look like 2026-01-31T09:30:00Z, got {self.utc!r}")
        if not isinstance(self.versions, Mapping) or not all(
            isinstance(key, str) and isinstance(value, str) for key, value in self.versions.items()
        ):
            raise ArgumentError(f"versions must map names to version texts, got {self.versions!r}")


@dataclass(frozen=True)
class TunedEntry:
    """The config to use for a spec and a bucket of sizes, with the evidence."""

    spec: KernelSpec
    bucket: Bucket
    config: FwdConfig
    measurement: Measurement
    provenance: Provenance

    def __post_init__(self) -> None:
        if (self.measurement.kind == "predicted") != (self.provenance.model_version is not None):
            raise ArgumentError("a predicted entry carries the model's version, a measured one does not")

    @property
    def key(self) -> tuple[KernelSpec, Bucket]:
        """What is unique in a table."""
        return self.spec, self.bucket

    def rank(self) -> tuple[bool, str]:
        """Ordering of the merge rule, higher wins: measured over predicted, then newer over older."""
        return self.measurement.kind == "measured", self.provenance.utc


@dataclass(frozen=True)
class Table:
    """One file: every tuned entry of a GPU and a kernel kind."""

    gpu: str
    target: str
    kind: str
    entries: tuple[TunedEntry, ...] = ()


def render_table(table: Table) -> str:
    """JSON text of a table; entries sorted, one to a line, so that a diff shows what changed."""
    rows = sorted(table.entries, key=_sort_key)
    lines = ",\n".join("  " + json.dumps(_entry_to_json(entry), allow_nan=False) for entry in rows)
    head = json.dumps({"schema": SCHEMA_VERSION, "gpu": table.gpu, "target": table.target, "kind": table.kind})
    return f'{head[:-1]}, "entries": [\n{lines}\n]}}\n' if rows else f'{head[:-1]}, "entries": []}}\n'


def parse_table(text: str, where: str, *, gpu: str | None = None, kind: str | None = None) -> Table:
    """A table from its JSON text.

    Args:
        text: The file's text.
        where: File name for messages.
        gpu, kind: What the file must be for; a table of another device is refused.

    Raises:
        TableError: Not JSON, cut off, repeated or unknown keys, numbers that are not finite, repeated entries, another
            device or kind, or written by a newer fa2gen.
    """
    try:
        document = json.loads(text, object_pairs_hook=_no_repeated_keys, parse_constant=_no_constants)
    except ValueError as error:
        raise TableError(f"{where} is not a tuned table: {error or 'empty file'}") from None
    if not isinstance(document, dict):
        raise TableError(f"{where} is not a tuned table: the top level must be an object")
    version = document.get("schema")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise TableError(f"{where} is not a tuned table: schema must be a version number, got {version!r}")
    if version > SCHEMA_VERSION:
        raise TableError(
            f"{where} has table schema {version}, this fa2gen reads up to {SCHEMA_VERSION}; install a newer fa2gen"
        )
    for step in range(version, SCHEMA_VERSION):
        document = MIGRATIONS[step](document)
    document = _fields(document, {"schema", "gpu", "target", "kind", "entries"}, where)
    for name, wanted in (("gpu", gpu), ("kind", kind)):
        if wanted is not None and document[name] != wanted:
            raise TableError(f"{where} is for {name} {document[name]!r}, not {wanted!r}")
    if not isinstance(document["target"], str) or not isinstance(document["entries"], list):
        raise TableError(f"{where}: target must be text and entries a list")
    entries: dict[tuple[KernelSpec, Bucket], TunedEntry] = {}
    for index, row in enumerate(document["entries"]):
        place = f"{where}, entry {index}"
        entry = _entry_from_json(row, place)
        if entry.spec.kind != document["kind"]:
            raise TableError(f"{place}: a {entry.spec.kind} kernel in a table of {document['kind']}")
        if entry.key in entries:
            raise TableError(f"{place} repeats {entry.spec.slug()} {entry.bucket.label()}")
        entries[entry.key] = entry
    return Table(document["gpu"], document["target"], document["kind"], tuple(entries.values()))


def _entry_to_json(entry: TunedEntry) -> dict[str, Any]:
    provenance = dataclasses.asdict(entry.provenance)
    if provenance["model_version"] is None:
        del provenance["model_version"]
    return {
        "spec": entry.spec.canonical(),
        "bucket": dataclasses.asdict(entry.bucket),
        "config": entry.config.canonical(),
        "measurement": dataclasses.asdict(entry.measurement),
        "provenance": provenance,
    }


def _entry_from_json(row: Any, place: str) -> TunedEntry:
    row = _fields(row, {"spec", "bucket", "config", "measurement", "provenance"}, place)
    bucket_form = _fields(row["bucket"], {"log2_seqlen_q", "log2_seqlen_k", "log2_waves"}, f"{place}, bucket")
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in bucket_form.values()):
        raise TableError(f"{place}, bucket: exponents must be integers, got {bucket_form}")
    measurement_form = _fields(
        row["measurement"], {"kind", "ms", "p20", "p80", "n", "method", "problem"}, f"{place}, measurement"
    )
    problem_form = _fields(
        measurement_form.pop("problem"),
        {"batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_k"},
        f"{place}, problem",
    )
    provenance_form = _fields(
        row["provenance"],
        {"template_hash", "nvcc", "driver", "versions", "trials", "feasible", "numerics", "utc"},
        f"{place}, provenance",
        optional={"model_version"},
    )
    try:
        return TunedEntry(
            spec=KernelSpec.from_canonical(_object(row["spec"])),
            bucket=Bucket(**bucket_form),
            config=FwdConfig.from_canonical(_object(row["config"])),
            measurement=Measurement(problem=Problem(**problem_form), **measurement_form),
            provenance=Provenance(**provenance_form),
        )
    except (ArgumentError, TypeError) as error:
        raise TableError(f"{place}: {error}") from None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"an object is expected, got {value!r}")
    return value


def _fields(
    value: Any, names: set[str], place: str, optional: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{place}: an object is expected, got {type(value).__name__}")
    missing, unknown = names - set(value), set(value) - names - optional
    if missing or unknown:
        wrong = [f"misses {', '.join(sorted(missing))}"] if missing else []
        wrong += [f"has unknown {', '.join(sorted(unknown))}"] if unknown else []
        raise TableError(f"{place} {' and '.join(wrong)}")
    return dict(value)


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{name} must be text, got {value!r}")


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    form = dict(pairs)
    if len(form) != len(pairs):
        repeated = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"repeated key {', '.join(repeated)}")
    return form


def _no_constants(name: str) -> Any:
    raise ValueError(f"number {name} is not finite")


def _sort_key(entry: TunedEntry) -> tuple[Any, ...]:
    spec, bucket = entry.spec, entry.bucket
    identity = (spec.head_dim, spec.dtype, spec.causal, spec.gqa_ratio, -spec.alignment, spec.key())
    return (*identity, bucket.log2_seqlen_q, bucket.log2_seqlen_k, bucket.log2_waves)
