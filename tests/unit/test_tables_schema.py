"""The tables' JSON form: round trip, and every kind of damage is refused with a clear error."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fa2gen.errors import ArgumentError, TableError
from fa2gen.spec import BwdConfig, FwdConfig, KernelSpec
from fa2gen.tables import SCHEMA_VERSION, Clocks, Incumbent, Regate, Table, package_dir, parse_table, render_table
from fa2gen.tables.document import MIGRATIONS
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
        parse_table(text().replace('"schema": 2', '"schema": 4'), "f")


def test_another_device_or_kind_is_refused():
    with pytest.raises(TableError, match="for gpu 'a100', not 'h100'"):
        parse_table(text(), "f", gpu="h100")
    with pytest.raises(TableError, match="not 'bwd'"):
        parse_table(text(), "f", kind="bwd")


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + 400 * "0", "0", "-1.5", "true", '"1.5"', "null"]
)
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
        (("bucket", "log2_seqlen_q"), 10**400),
        (("bucket", "log2_waves"), -49),
        (("measurement", "kind"), "guessed"),
        (("measurement", "n"), -1),
        (("measurement", "p20"), 2.5),
        (("measurement", "problem", "batch"), -1),
        (("measurement", "problem", "seqlen_k"), 10**400),
        (("measurement", "problem"), "big"),
        (("provenance", "utc"), "yesterday"),
        (("provenance", "utc"), "٢٠٢٦-01-01T00:00:00Z"),
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


def test_an_unknown_kind_is_refused():
    with pytest.raises(TableError, match="for kind 'decode'; this fa2gen has fwd, bwd"):
        parse_table(text().replace('"kind": "fwd", "entries"', '"kind": "decode", "entries"'), "f")


BACKWARD = (
    KernelSpec("bwd"),
    KernelSpec("bwd", deterministic=True),
    KernelSpec("bwd", head_dim=64, dtype="fp16", causal=True, gqa_ratio=8),
)


def test_a_backward_table_round_trips():
    rows = [
        entry(spec, kind="measured", roles=2, warps_d=2, kv_in_regs=True, reduction="vector", split_heads=i == 2)
        for i, spec in enumerate(BACKWARD)
    ]
    incumbent = Incumbent(BwdConfig(block_m=128), 1.5)
    rows[0] = dataclasses.replace(rows[0], provenance=dataclasses.replace(rows[0].provenance, incumbent=incumbent))
    text = render_table(table(*rows, kind="bwd"))
    parsed = parse_table(text, "x", gpu="a100", kind="bwd")
    assert set(map(repr, parsed.entries)) == set(map(repr, rows))
    assert render_table(parsed) == text
    # The two of head dim 128 stand together, the deterministic one after the other.
    assert [row.spec for row in parsed.entries] == [BACKWARD[2], *BACKWARD[:2]]


def test_a_table_holds_one_kind():
    with pytest.raises(TableError, match="a bwd kernel in a table of fwd"):
        parse_table(render_table(table(entry(KernelSpec("bwd")))), "f")


def test_a_config_is_of_its_kernels_kind():
    forward, backward = entry(), entry(KernelSpec("bwd"))
    with pytest.raises(ArgumentError, match="config of a fwd kernel must be a FwdConfig or a FwdSm90Config"):
        dataclasses.replace(forward, config=backward.config)
    with pytest.raises(ArgumentError, match="config of a bwd kernel must be a BwdConfig"):
        dataclasses.replace(
            backward, provenance=dataclasses.replace(backward.provenance, incumbent=Incumbent(forward.config, 1.0))
        )
    with pytest.raises(ArgumentError, match="must be a FwdConfig or a FwdSm90Config or a BwdConfig"):
        Incumbent("sm80", 1.0)
    document = json.loads(render_table(table(backward, kind="bwd")))
    document["entries"][0]["config"]["block_n"] = 64
    del document["entries"][0]["config"]["roles"]
    document["entries"][0]["config"]["q_in_regs"] = True
    with pytest.raises(TableError, match="BwdConfig has no field q_in_regs"):
        parse_table(json.dumps(document), "f")


@pytest.mark.parametrize("name", ["gpu", "target", "kind"])
@pytest.mark.parametrize("value", [None, 5, [], {}])
def test_the_head_is_text(name, value):
    with pytest.raises(TableError, match=f"{name} must be text"):
        parse_table(json.dumps({**json.loads(text()), name: value}), "f")


def test_entries_cannot_hold_nonsense():
    good = entry().measurement
    with pytest.raises(ArgumentError):
        dataclasses.replace(good, ms=math.nan)
    with pytest.raises(ArgumentError):
        dataclasses.replace(good, kind="measured", n=0)
    with pytest.raises(ArgumentError, match="model's version"):
        dataclasses.replace(entry(), provenance=entry(kind="measured").provenance)


def full_entry():
    """An entry with every field that may be left out."""
    row = entry(kind="measured", block_n=128)
    clocks = Clocks(1755, 1500, 1980, ("hw_thermal", "sw_power_cap"))
    provenance = dataclasses.replace(
        row.provenance,
        incumbent=Incumbent(FwdConfig(block_n=32, step_n=32), 1.625),
        regate=Regate("new", "GPU: passed 22 cases", "2026-02-01T00:00:00Z"),
    )
    return dataclasses.replace(
        row, measurement=dataclasses.replace(row.measurement, clocks=clocks), provenance=provenance
    )


def test_optional_fields_round_trip_and_are_left_out_where_there_are_none():
    original = full_entry()
    document = json.loads(render_table(table(original)))
    (row,) = document["entries"]
    assert row["measurement"]["clocks"] == {
        "sm_mhz": 1755,
        "sm_mhz_min": 1500,
        "sm_mhz_max": 1980,
        "throttle": ["hw_thermal", "sw_power_cap"],
    }
    assert row["provenance"]["incumbent"]["ms"] == 1.625
    assert parse_table(json.dumps(document), "f").entries == (original,)
    (bare,) = json.loads(render_table(table(entry(kind="measured"))))["entries"]
    assert "clocks" not in bare["measurement"]
    assert not {"incumbent", "regate", "model_version"} & set(bare["provenance"])


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("measurement", "clocks", None),
        ("measurement", "clocks", {"sm_mhz": 1}),
        ("measurement", "clocks", {"sm_mhz": 1, "sm_mhz_min": 2, "sm_mhz_max": 3, "throttle": []}),
        ("measurement", "clocks", {"sm_mhz": 1.5, "sm_mhz_min": 1, "sm_mhz_max": 3, "throttle": []}),
        ("measurement", "clocks", {"sm_mhz": 2, "sm_mhz_min": 1, "sm_mhz_max": 3, "throttle": "hot"}),
        ("measurement", "clocks", {"sm_mhz": 2, "sm_mhz_min": 1, "sm_mhz_max": 3, "throttle": ["b", "a"]}),
        ("measurement", "clocks", {"sm_mhz": 2, "sm_mhz_min": 1, "sm_mhz_max": 3, "throttle": [1]}),
        ("provenance", "incumbent", []),
        ("provenance", "incumbent", {"config": {"block_m": 0}, "ms": 1.0}),
        ("provenance", "incumbent", {"config": {}, "ms": 0}),
        ("provenance", "regate", {"template_hash": "t", "numerics": "", "utc": "2026-02-01T00:00:00Z"}),
        ("provenance", "regate", {"template_hash": "t", "numerics": "passed", "utc": "today"}),
        ("provenance", "regate", "yes"),
    ],
)
def test_a_wrong_optional_field_is_refused(place, name, value):
    document = json.loads(render_table(table(full_entry())))
    document["entries"][0][place][name] = value
    with pytest.raises(TableError, match="f, entry 0"):
        parse_table(json.dumps(document), "f")


def test_a_prediction_has_no_clocks():
    with pytest.raises(ArgumentError, match="clocks"):
        dataclasses.replace(entry().measurement, clocks=Clocks(1, 1, 1))


def test_spread_and_noise():
    row = dataclasses.replace(entry(kind="measured").measurement, ms=1.0, p20=0.99, p80=1.02)
    assert row.spread == pytest.approx(0.03)

    def other(ms, p20=None, p80=None):
        return dataclasses.replace(row, ms=ms, p20=p20 or ms, p80=p80 or ms)

    # Within NOISE_BAND, or with ranges that touch.
    assert row.within_noise(other(1.02))
    assert other(0.985).within_noise(row)
    assert not row.within_noise(other(1.03))
    assert row.within_noise(other(1.03, 1.02, 1.04))
    assert other(0.9, 0.9, 0.99).within_noise(row)
    assert not other(0.9, 0.9, 0.98).within_noise(row)


FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def test_a_table_of_version_1_is_migrated():
    text = (FIXTURES / "table_v1.json").read_text()
    old = json.loads(text)
    assert old["schema"] == 1
    migrated = parse_table(text, "f", gpu="h200", kind="fwd")
    assert len(migrated.entries) == 3
    assert all(row.measurement.clocks is None for row in migrated.entries)
    assert all(row.provenance.incumbent is None and row.provenance.regate is None for row in migrated.entries)
    # Written again, it differs by the version alone: the oldest that has all of it.
    new = json.loads(render_table(migrated))
    assert new == {**old, "schema": 2}
    assert parse_table(render_table(migrated), "f") == migrated


def test_every_older_version_has_a_migration():
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_a_table_of_two_families():
    """Version 3 where it needs to be; each family has an entry of its own, and an incumbent is of the same one."""
    old, new = entry(sms=132, ms=2.0), entry(sms=132, family="sm90")
    written = render_table(Table("h200", "sm_90", "fwd", (new, old)))
    assert json.loads(written)["schema"] == 3
    assert parse_table(written, "f").entries == (old, new)
    assert json.loads(render_table(Table("h200", "sm_90", "fwd", (old,))))["schema"] == 2
    with pytest.raises(TableError, match=r"entry 1 repeats .* sm90"):
        parse_table(render_table(Table("h200", "sm_90", "fwd", (new, new))), "f")
    with pytest.raises(ArgumentError, match="incumbent of a config of family sm90"):
        replace(new, provenance=replace(new.provenance, incumbent=Incumbent(old.config, 1.0)))


def test_shipped_tables_are_written_as_they_are():
    """Those of the first families stay of version 2, which older fa2gens read."""
    for path in package_dir().glob("*/*.json"):
        text = path.read_text()
        assert render_table(parse_table(text, str(path))) == text
