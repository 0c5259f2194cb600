"""The strict JSON form of a tuned table: written in one way, read whole or not at all.

Anything unexpected raises ``TableError`` naming the file and the place, so that a damaged table is noticed and never
half used. What can be saved of a damaged one is a question of its own (:func:`recover_entries`).
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from fa2gen.errors import ArgumentError, TableError
from fa2gen.problem import Bucket, Problem
from fa2gen.spec import FAMILIES, KINDS, KernelSpec, config_from_canonical

from .schema import Clocks, EntryKey, Incumbent, Measurement, Provenance, Regate, Table, TunedEntry

SCHEMA_VERSION = 3
_MAX_EXPONENT = 48  # of sizes: beyond every GPU's memory, within what a float takes when they are multiplied


class NewerSchemaError(TableError):
    """A table written by a newer fa2gen: whole, but not to be read or replaced by this one."""


def _to_2(document: dict[str, Any]) -> dict[str, Any]:
    """Version 2 adds clocks, incumbent and regate; an entry may lack them, as those of version 1 do."""
    return {**document, "schema": 2}


def _to_3(document: dict[str, Any]) -> dict[str, Any]:
    """Version 3 has an entry for each family of kernels where 2 has one, of the first family."""
    return {**document, "schema": 3}


# from-version -> function that turns a document of that version into one of the next.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _to_2, 2: _to_3}


def _version_for(table: Table) -> int:
    """The oldest version that can hold a table: one without newer families stays readable for older fa2gens."""
    first = next(iter(FAMILIES[table.kind]))
    return SCHEMA_VERSION if any(entry.config.family != first for entry in table.entries) else 2


def render_table(table: Table) -> str:
    """JSON text of a table; entries sorted, one to a line, so that a diff shows what changed."""
    rows = sorted(table.entries, key=_sort_key)
    lines = ",\n".join("  " + json.dumps(entry_form(entry), allow_nan=False) for entry in rows)
    head = json.dumps({"schema": _version_for(table), "gpu": table.gpu, "target": table.target, "kind": table.kind})
    return f'{head[:-1]}, "entries": [\n{lines}\n]}}\n' if rows else f'{head[:-1]}, "entries": []}}\n'


def parse_table(text: str, where: str, *, gpu: str | None = None, kind: str | None = None) -> Table:
    """A table from its JSON text.

    Args:
        text: The file's text.
        where: File name for messages.
        gpu, kind: What the file must be for; a table of another device is refused.

    Raises:
        NewerSchemaError: Written by a newer fa2gen.
        TableError: Not JSON, cut off, repeated or unknown keys, numbers that are not finite, repeated entries, another
            device or kind.
    """
    try:
        document = json.loads(text, object_pairs_hook=_no_repeated_keys, parse_constant=_no_constants)
    except (ValueError, RecursionError) as error:
        why = "empty file" if not text.strip() else error
        raise TableError(f"{where} is not a tuned table: {why}") from None
    if not isinstance(document, dict):
        raise TableError(f"{where} is not a tuned table: the top level must be an object")
    version = document.get("schema")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise TableError(f"{where} is not a tuned table: schema must be a version number, got {version!r}")
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{where} has table schema {version}, this fa2gen reads up to {SCHEMA_VERSION}; install a newer fa2gen"
        )
    for step in range(version, SCHEMA_VERSION):
        document = MIGRATIONS[step](document)
    document = _fields(document, {"schema", "gpu", "target", "kind", "entries"}, where)
    for name, wanted in (("gpu", gpu), ("kind", kind), ("target", None)):
        if not isinstance(document[name], str):
            raise TableError(f"{where}: {name} must be text, got {document[name]!r}")
        if wanted is not None and document[name] != wanted:
            raise TableError(f"{where} is for {name} {document[name]!r}, not {wanted!r}")
    if document["kind"] not in KINDS:
        raise TableError(f"{where} is for kind {document['kind']!r}; this fa2gen has {', '.join(KINDS)}")
    if not isinstance(document["entries"], list):
        raise TableError(f"{where}: entries must be a list, got {type(document['entries']).__name__}")
    entries: dict[EntryKey, TunedEntry] = {}
    for index, row in enumerate(document["entries"]):
        place = f"{where}, entry {index}"
        entry = _entry_from_json(row, place)
        if entry.spec.kind != document["kind"]:
            raise TableError(f"{place}: a {entry.spec.kind} kernel in a table of {document['kind']}")
        if entry.key in entries:
            raise TableError(f"{place} repeats {entry.spec.slug()} {entry.bucket.label()} {entry.config.family}")
        entries[entry.key] = entry
    return Table(document["gpu"], document["target"], document["kind"], tuple(entries.values()))


def recover_entries(text: str, where: str, *, gpu: str, kind: str) -> tuple[TunedEntry, ...]:
    """The entries that are whole in a damaged table: all before a cut, all but those that are wrong in themselves.

    Args:
        text: The file's text.
        where: File name for messages.
        gpu, kind: What the file must be for; nothing is taken from a table of another device.
    """
    head, marker, rest = text.partition('"entries": [')
    decoder = json.JSONDecoder(object_pairs_hook=_no_repeated_keys, parse_constant=_no_constants)
    entries: dict[EntryKey, TunedEntry] = {}
    try:
        parse_table(f"{head}{marker}]}}", where, gpu=gpu, kind=kind)
    except TableError:
        return ()
    # An entry is one line (see render_table), so that damage inside one leaves the next ones readable.
    for line in rest.splitlines():
        try:
            row, _ = decoder.raw_decode(line.strip())
            (entry,) = parse_table(f"{head}{marker}{json.dumps(row)}]}}", where, gpu=gpu, kind=kind).entries
        except (ValueError, TableError, RecursionError):
            continue
        entries.setdefault(entry.key, entry)
    return tuple(entries.values())


def entry_form(entry: TunedEntry) -> dict[str, Any]:
    """An entry as JSON takes it; fields that are None are left out."""
    measurement, provenance = _present(entry.measurement), _present(entry.provenance)
    if entry.provenance.incumbent is not None:
        incumbent = entry.provenance.incumbent
        provenance["incumbent"] = {"config": incumbent.config.canonical(), "ms": incumbent.ms}
    return {
        "spec": entry.spec.canonical(),
        "bucket": dataclasses.asdict(entry.bucket),
        "config": entry.config.canonical(),
        "measurement": measurement,
        "provenance": provenance,
    }


def _present(value: Any) -> dict[str, Any]:
    return {name: field for name, field in dataclasses.asdict(value).items() if field is not None}


def _entry_from_json(row: Any, place: str) -> TunedEntry:
    row = _fields(row, {"spec", "bucket", "config", "measurement", "provenance"}, place)
    bucket_form = _fields(row["bucket"], {"log2_seqlen_q", "log2_seqlen_k", "log2_waves"}, f"{place}, bucket")
    for name, value in bucket_form.items():
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MAX_EXPONENT:
            raise TableError(f"{place}, bucket: {name} must be an integer of at most ±{_MAX_EXPONENT}, got {value!r}")
    try:
        spec = KernelSpec.from_canonical(_object(row["spec"]))
        return TunedEntry(
            spec=spec,
            bucket=Bucket(**bucket_form),
            config=config_from_canonical(spec.kind, _object(row["config"])),
            measurement=_measurement(row["measurement"], place),
            provenance=_provenance(row["provenance"], place, spec.kind),
        )
    except (ArgumentError, TypeError) as error:
        raise TableError(f"{place}: {error}") from None


def _measurement(value: Any, place: str) -> Measurement:
    names = {"kind", "ms", "p20", "p80", "n", "method", "problem"}
    form = _fields(value, names, f"{place}, measurement", optional={"clocks"})
    problem = {"batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_k"}
    form["problem"] = Problem(**_fields(form["problem"], problem, f"{place}, problem"))
    if max(dataclasses.astuple(form["problem"])) >= 1 << _MAX_EXPONENT:
        raise TableError(f"{place}, problem: sizes must be below 2**{_MAX_EXPONENT}")
    if "clocks" in form:
        clocks = _fields(form["clocks"], {"sm_mhz", "sm_mhz_min", "sm_mhz_max", "throttle"}, f"{place}, clocks")
        if not isinstance(clocks["throttle"], list):
            raise TableError(f"{place}, clocks: throttle must be a list, got {clocks['throttle']!r}")
        form["clocks"] = Clocks(**{**clocks, "throttle": tuple(clocks["throttle"])})
    return Measurement(**form)


def _provenance(value: Any, place: str, kind: str) -> Provenance:
    names = {"template_hash", "nvcc", "driver", "versions", "trials", "feasible", "numerics", "utc"}
    form = _fields(value, names, f"{place}, provenance", optional={"model_version", "incumbent", "regate"})
    if "incumbent" in form:
        incumbent = _fields(form["incumbent"], {"config", "ms"}, f"{place}, incumbent")
        form["incumbent"] = Incumbent(config_from_canonical(kind, _object(incumbent["config"])), incumbent["ms"])
    if "regate" in form:
        form["regate"] = Regate(**_fields(form["regate"], {"template_hash", "numerics", "utc"}, f"{place}, regate"))
    return Provenance(**form)


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


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    form = dict(pairs)
    if len(form) != len(pairs):
        repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"repeated key {', '.join(repeated)}")
    return form


def _no_constants(name: str) -> Any:
    raise ValueError(f"number {name} is not finite")


def _sort_key(entry: TunedEntry) -> tuple[Any, ...]:
    spec, bucket = entry.spec, entry.bucket
    identity = (spec.head_dim, spec.dtype, spec.causal, spec.gqa_ratio, -spec.alignment, spec.deterministic, spec.key())
    return (*identity, bucket.log2_seqlen_q, bucket.log2_seqlen_k, bucket.log2_waves, entry.config.family)
