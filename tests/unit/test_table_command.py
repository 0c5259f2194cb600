"""``fa2gen table``: what people and programs read, exit codes, and damage in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fa2gen.cli import main
from fa2gen.codegen import template_hash
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import FwdSm90Config, KernelSpec
from fa2gen.tables import Clocks, Regate, load_table, render_table, save_entries, store, table_path
from fa2gen.tuning import regate as regate_module
from tests.tuning_fakes import FakeRooms, entry, table

GPU = get_gpu("a100")
TODAY = template_hash("fwd", "sm80")
TEXT = render_table(table(entry()))


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's folder and the package's."""
    user, package = tmp_path / "user", tmp_path / "package"
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(user))
    monkeypatch.setattr(store, "package_dir", lambda: package)
    return user, package


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["table", *arguments])


def document(*arguments: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return read


def throttled() -> Any:
    row = entry(KernelSpec(causal=True, gqa_ratio=8), kind="measured", template=TODAY, block_n=128)
    clocks = Clocks(1755, 1500, 1980, ("sw_power_cap",))
    return dataclasses.replace(row, measurement=dataclasses.replace(row.measurement, p20=1.47, clocks=clocks))


def gated(row: Any) -> Any:
    mark = Regate(TODAY, "GPU: passed", "2026-02-03T00:00:00Z")
    return dataclasses.replace(row, provenance=dataclasses.replace(row.provenance, regate=mark))


def save_some(folders: tuple[Path, Path]) -> None:
    user, package = folders
    save_entries(GPU, [throttled(), entry(template=TODAY)], root=package)
    wide = KernelSpec(head_dim=64, dtype="fp16", causal=True, gqa_ratio=16, alignment=2)
    rows = [
        gated(entry(wide, Problem(1, 17, 100, 16, 1), template="old")),
        entry(KernelSpec(head_dim=64), template="old"),
    ]
    save_entries(GPU, rows, root=user)


def test_show(folders: tuple[Path, Path]) -> None:
    save_some(folders)
    result = run("show")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("a100 fwd, the user table ")
    assert all(len(line) <= 80 for line in lines if "table /" not in line), max(lines, key=len)
    text = result.stdout
    assert "    stale: the templates have changed since\n" in text
    assert "    gated: the templates have changed, passed the gate again 2026-02-03\n" in text
    assert "    throttled: sw_power_cap\n" in text
    assert "    sm80_128x128s64_w4_st2_qs_online_mb1, spread 2.0 %, 1755 MHz, 2026-01-01\n" in text
    (line,) = (line for line in lines if line.startswith("fwd_d128_bf16_causal_gqa8 "))
    tflops = throttled().measurement.problem.flops(KernelSpec(causal=True)) / 1.5e9
    assert line.split() == ["fwd_d128_bf16_causal_gqa8", "q12_k12_w4", "1.5000", f"{tflops:.1f}", "measured"]
    assert text.count("predicted") == 3


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ((), 4),
        (("--headdim", "64"), 2),
        (("--headdim", "64", "--headdim", "128"), 4),
        (("--dtype", "fp16"), 1),
        (("--causal",), 2),
        (("--no-causal", "--headdim", "128"), 1),
        (("--gpu", "A100"), 4),
        (("--gpu", "h200"), 0),
        (("--family", "sm80"), 4),
    ],
)
def test_show_takes_filters(folders: tuple[Path, Path], options: tuple[str, ...], count: int) -> None:
    save_some(folders)
    tables = document("show", *options)["tables"]
    assert sum(len(read["entries"]) for read in tables) == count
    text = run("show", *options).stdout
    assert text.count("\nfwd_d") == count
    assert count or text == "no tuned entries: fa2gen tune makes them\n"


def test_families_of_a_kernel_are_entries_of_their_own(folders: tuple[Path, Path]) -> None:
    gpu = get_gpu("h200")
    save_entries(gpu, [entry(sms=132, ms=2.0), entry(sms=132, family="sm90")], root=folders[0])
    (read,) = document("show")["tables"]
    assert [row["family"] for row in read["entries"]] == ["sm80", "sm90"]
    assert {row["state"] for row in read["entries"]} == {"stale"}
    slugs = [line.split()[0] for line in run("show", "--family", "sm90").stdout.splitlines() if "    sm" in line]
    assert slugs == [f"{FwdSm90Config().slug()},"]
    counts = run("check").stdout
    assert "2 predicted, 2 stale" in counts


def test_show_as_json(folders: tuple[Path, Path]) -> None:
    save_some(folders)
    read = document("show", "--headdim", "128")
    assert [(t["gpu"], t["kind"], t["target"], t["source"]) for t in read["tables"]] == [
        ("a100", "fwd", "sm_80", "user"),
        ("a100", "fwd", "sm_80", "package"),
    ]
    (row,) = (row for row in read["tables"][1]["entries"] if row["kernel"] == "fwd_d128_bf16_causal_gqa8")
    assert row["state"] == "current"
    assert row["spread"] == pytest.approx(0.02)
    assert row["entry"]["measurement"]["clocks"]["throttle"] == ["sw_power_cap"]
    assert read["unreadable"] == []


def test_check_of_good_tables(folders: tuple[Path, Path]) -> None:
    result = run("check")
    assert (result.exit_code, result.stdout) == (0, "no tuned tables: fa2gen tune makes them\n")
    save_entries(GPU, [throttled(), entry(template=TODAY)], root=folders[1])
    result = run("check")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == ["    1 measured, 1 predicted, 2 current"]
    assert document("check")["ok"] is True


def test_check_lists_what_is_stale_and_fails(folders: tuple[Path, Path]) -> None:
    save_some(folders)
    result = run("check")
    assert result.exit_code == 1
    assert "  stale: fwd_d64_bf16_full_gqa1 q12_k12_w4, predicted\n" in result.stdout
    assert "  gated: fwd_d64_fp16_causal_gqa16_align2 q5_k7_w-3, predicted\n" in result.stdout
    assert result.stdout.endswith("use them again:\n  fa2gen table check --regate\n")
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if "table /" not in line)
    read = document("check")
    assert (read["ok"], read["regated"]) == (False, [])
    assert run("check", "--gpu", "h200").exit_code == 0


def test_check_names_illegal_entries(folders: tuple[Path, Path]) -> None:
    row = entry(template=TODAY, block_m=512, block_n=256, num_stages=3, num_warps=16)
    save_entries(GPU, [row], root=folders[0])
    result = run("check")
    assert result.exit_code == 1
    assert "illegal: fwd_d128_bf16_full_gqa1" in result.stdout
    assert "shared memory" in result.stdout


@pytest.mark.parametrize(
    ("text", "word", "why"),
    [
        ("", "damaged", " is not a tuned table: empty file"),
        ("{", "damaged", " is not a tuned table: Expecting property name"),
        ("\x00", "damaged", " is not a tuned table: Expecting value"),
        (TEXT, "newer", " has table schema 99, this fa2gen reads up to 3"),
        (TEXT.replace('"config": {', '"config": 3, "more": {'), "damaged", ", entry 0 has unknown more"),
        (TEXT.replace('"dtype": "bf16"', '"dtype": "fp8"'), "damaged", ", entry 0: dtype must be "),
        (TEXT.replace('"a100"', '"a10"'), "damaged", " is for gpu 'a10', not 'a100'"),
        (TEXT.replace('"sm_80"', "80"), "damaged", ": target must be text, got 80"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(folders: tuple[Path, Path], text: str, word: str, why: str) -> None:
    save_entries(GPU, [entry(template=TODAY)], root=folders[1])
    path = table_path(folders[0], "a100", "fwd")
    path.parent.mkdir(parents=True)
    path.write_text(text.replace('"schema": 2', '"schema": 99') if word == "newer" else text)
    for command, code in (("check", 1), ("show", 0)):
        result = run(command)
        assert (result.exit_code, result.stderr) == (code, "")
        (line,) = (line for line in result.stdout.splitlines() if str(path) in line)
        assert line.startswith(f"{word}: the user table {path}{why}")
        assert "fwd_d128_bf16_full_gqa1" in result.stdout or "1 current" in result.stdout
        (unreadable,) = document(command)["unreadable"]
        assert (unreadable["path"], unreadable["newer"]) == (str(path), word == "newer")
        assert unreadable["problem"].startswith(f"{path}{why}")


def test_a_link_to_no_table_is_named(folders: tuple[Path, Path]) -> None:
    path = table_path(folders[0], "a100", "fwd")
    path.parent.mkdir(parents=True)
    path.symlink_to("gone.json")
    result = run("check")
    assert (result.exit_code, result.stdout) == (1, f"damaged: the user table {path} is a link that leads nowhere\n")


def test_regate(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    user, package = folders
    good, bad = entry(kind="measured", template="old"), entry(KernelSpec(dtype="fp16"), template="old", block_m=64)
    save_entries(GPU, [good, bad], root=package)
    rooms = FakeRooms(template=TODAY, wrong=lambda config: config.block_m == 64)
    monkeypatch.setattr(regate_module, "Tools", rooms.tools)
    result = run("check", "--regate")
    assert result.exit_code == 1
    assert "passed: a100 fwd_d128_bf16_full_gqa1 q12_k12_w4 sm80\n" in result.stdout
    assert (
        "FAILED: a100 fwd_d128_fp16_full_gqa1 q12_k12_w4 sm80\n    sm80_64x64s64_w4_st2_qs_online_mb1: row"
        in result.stdout
    )
    assert "  gated: fwd_d128_bf16_full_gqa1" in result.stdout
    assert "  replaced: fwd_d128_bf16_full_gqa1" in result.stdout
    assert "  stale: fwd_d128_fp16_full_gqa1" in result.stdout
    rooms.wrong = lambda config: False
    read = document("check", "--regate", "--gpu", "a100")
    assert read["ok"] is True
    assert [(row["kernel"], row["passed"], row["text"]) for row in read["regated"]] == [
        ("fwd_d128_fp16_full_gqa1", True, "emulator: passed 20 cases")
    ]
    saved = load_table(table_path(user, "a100", "fwd"))
    assert saved is not None
    assert len(saved.entries) == 2


def test_import(folders: tuple[Path, Path], tmp_path: Path) -> None:
    user, _ = folders
    save_entries(GPU, [entry(kind="measured", template=TODAY)], root=user)
    for node in ("one", "two"):
        save_entries(
            GPU, [entry(template=TODAY), entry(KernelSpec(dtype="fp16"), template=TODAY)], root=tmp_path / node
        )
    paths = [str(table_path(tmp_path / node, "a100", "fwd")) for node in ("one", "two")]
    result = run("import", *paths)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{path}: 1 of 2 entries taken into {table_path(user, 'a100', 'fwd')}, 1 gave way to those there"
        for path in paths
    ]
    read = load_table(table_path(user, "a100", "fwd"))
    assert read is not None
    assert {(row.spec.dtype, row.measurement.kind) for row in read.entries} == {
        ("bf16", "measured"),
        ("fp16", "predicted"),
    }
    out = tmp_path / "out"
    result = run("import", paths[0], "-o", str(out), "--json")
    assert json.loads(result.stdout) == [
        {"file": paths[0], "path": str(table_path(out, "a100", "fwd")), "entries": 2, "kept": 2}
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-9], "is not a tuned table"),
        (lambda text: text.replace('"schema": 2', '"schema": 99'), "install a newer fa2gen"),
        (lambda text: text.replace('"gpu": "a100"', '"gpu": "../../etc"'), "no name of a GPU"),
        (lambda text: text.replace('"target": "sm_80"', '"target": "sm_42"'), "known are sm_80"),
        (lambda text: text.replace('"target": "sm_80"', '"target": "sm_90"'), "a100 is sm_80"),
        (lambda _: '{"schema": 2, "gpu": "a100", "target": "sm_80", "kind": "../../x", "entries": []}', "for kind"),
        (lambda text: text.replace('"gpu": "a100"', '"gpu": ["a100"]'), "gpu must be text"),
        (lambda text: text.replace('"block_m": 128', '"block_m": 4096'), "cannot run fwd_d128_bf16_full_gqa1 on a100"),
    ],
)
def test_nothing_is_imported_of_a_bad_file(folders: tuple[Path, Path], tmp_path: Path, change: Any, words: str) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(render_table(table(entry())))
    bad.write_text(change(good.read_text()))
    result = run("import", str(good), str(bad))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not folders[0].exists()


@pytest.mark.parametrize("name", ["show", "check", "import"])
def test_help_has_an_example(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"  fa2gen table {name}" in result.stdout.split("Example", 1)[1]


def test_wrong_usage_is_one_line() -> None:
    for arguments, code in (
        (["import"], 2),
        (["import", "/no/file"], 2),
        (["show", "--gpu", "nosuch"], 1),
        (["cut"], 2),
    ):
        result = run(*arguments)
        assert result.exit_code == code
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: ")


def test_doctors_advice_for_stale_entries_can_be_run(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks() -> list[tuple[str, str]]:
        report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
        return [(check["detail"].partition(" in ")[2], check["fix"]) for check in report if check["name"] == "table"]

    user, package = folders
    save_entries(GPU, [entry(template="old"), entry(KernelSpec(causal=True), template=TODAY)], root=package)
    ((detail, fix),) = checks()
    assert detail == f"{package}: 0 measured, 2 predicted, 1 stale"
    monkeypatch.setattr(regate_module, "Tools", lambda: FakeRooms(template=TODAY).tools())
    _, _, advice = fix.partition(": fa2gen ")
    assert CliRunner().invoke(main, advice.split()).exit_code == 0
    # What was to be done is done.
    assert checks() == [(f"{user}: 0 measured, 1 predicted", ""), (f"{package}: 0 measured, 2 predicted", "")]
