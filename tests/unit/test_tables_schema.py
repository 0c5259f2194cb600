"""The tables' JSON form: round trip, and every kind of damage is refused with a clear error."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from fa2gen.errors import ArgumentError, TableError
from fa2gen.spec import KernelSpec
from fa2gen.tables import parse_table, render_table
from tests.tuning_fakes import entry, table


def text():
    return render_table(table(entry(), entry(KernelSpec(causal=True), kind="measured", block_n=128)))


def test_round_trip():
    original = table(entry(), entry(KernelSpec(causal=True), kind="measured", block_n=128))
    parsed = parse_table(render_table(original), "x", gpu="a100", kind="fwd")
    assert sorted(parsed.entries, key=repr) == sorted(original.entries, key=repr)
    assert render_table(parsed) == render_table(original)
    assert parse_table(render_table(table()), "x").entries == ()


def test_text_does_not_depend_on_the_order():
    one, two = entry(), entry(KernelSpec(dtype="fp16"))
    assert render_table(table(one, two)) == render_table(table(two, one))


@pytest.mark.parametrize("end", [0, 1, 40, "comma", "half", -2])
def test_a_cut_file_is_refused(end):
    whole = text()
    cut = {"comma": whole.index("},\n") + 2, "half": len(whole) // 2}.get(end, end)
    with pytest.raises(TableError, match="some/file is not a tuned table"):
        parse_table(whole[:cut], "some/file")


@pytest.mark.parametrize(
    "junk", ["[]", "3", '"text"', "null", "{}", '{"schema": "1"}', '{"schema": true}', '{"schema": 0}']
)
def test_other_json_is_refused(junk):
    with pytest.raises(TableError, match="is not a tuned table"):
        parse_table(junk, "f")


def test_a_newer_schema_says_so():
    with pytest.raises(TableError, match="install a newer fa2gen"):
        parse_table(text().replace('"schema": 1', '"schema": 2'), "f")


def test_another_device_or_kind_is_refused():
    with pytest.raises(TableError, match="for gpu 'a100', not 'h100'"):
        parse_table(text(), "f", gpu="h100")
    with pytest.raises(TableError, match="not 'bwd'"):
        parse_table(text(), "f", kind="bwd")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "0", "-1.5", "true", '"1.5"', "null"])
def test_times_are_finite_and_positive(number):
    with pytest.raises(TableError, match=r"not finite|finite number above 0"):
        parse_table(text().replace('"ms": 1.5', f'"ms": {number}', 1), "f")


def test_repeated_keys_are_refused():
    with pytest.raises(TableError, match="repeated key ms"):
        parse_table(text().replace('"ms": 1.5', '"ms": 1.5, "ms": 1.0', 1), "f")


def test_repeated_entries_are_refused():
    document = json.loads(text())
    document["entries"].append(document["entries"][0])
    with pytest.raises(TableError, match="entry 2 repeats fwd_d128_bf16_full_gqa1"):
        parse_table(json.dumps(document), "f")


def _damaged(path, value):
    document = json.loads(text())
    place = document["entries"][0]
    for name in path[:-1]:
        place = place[name]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec",), None),
        (("spec",), []),
        (("spec", "head_dim"), 0),
        (("spec", "head_dim"), "128"),
        (("spec", "colour"), "red"),
        (("config", "block_m"), -1),
        (("config", "warp"), 4),
        (("bucket", "log2_waves"), 1.5),
        (("bucket", "log2_waves"), None),
        (("measurement", "kind"), "guessed"),
        (("measurement", "n"), -1),
        (("measurement", "p20"), 2.5),
        (("measurement", "problem", "batch"), -1),
        (("measurement", "problem"), "big"),
        (("provenance", "utc"), "yesterday"),
        (("provenance", "template_hash"), ""),
        (("provenance", "trials"), 1.5),
        (("provenance", "versions"), {"python": 3}),
        (("provenance", "model_version"), None),
        (("provenance", "mood"), "good"),
    ],
)
def test_a_wrong_field_names_file_and_entry(path, value):
    with pytest.raises(TableError, match="the/file, entry 0"):
        parse_table(_damaged(path, value), "the/file")


def test_a_kernel_of_another_kind_is_refused():
    with pytest.raises(TableError, match="a fwd kernel in a table of bwd"):
        parse_table(text().replace('"kind": "fwd", "entries"', '"kind": "bwd", "entries"'), "f")


def test_entries_cannot_hold_nonsense():
    good = entry().measurement
    with pytest.raises(ArgumentError):
        dataclasses.replace(good, ms=math.nan)
    with pytest.raises(ArgumentError):
        dataclasses.replace(good, kind="measured", n=0)
    with pytest.raises(ArgumentError, match="model's version"):
        dataclasses.replace(entry(), provenance=entry(kind="measured").provenance)
