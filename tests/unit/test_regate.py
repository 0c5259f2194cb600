"""Stale entries: which they are, and the gate that makes them usable again."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fa2gen.data import data_dir
from fa2gen.driver import DeviceInfo
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec
from fa2gen.tables import Regate, TunedEntry, load_table, lookup, save_entries, scan_tables, table_path
from fa2gen.tuning.regate import STATES, EntryStatus, check, regate
from tests.tuning_fakes import PROBLEM, FakeRooms, entry

# The package has a function of that name.
manifest = importlib.import_module("fa2gen.codegen.manifest")
GPU = get_gpu("a100")
SPEC = KernelSpec()
BUCKET = PROBLEM.bucket(GPU.num_sms)
FAR = Problem(16, 512, 512, 16, 16)
UTC = "2026-02-01T00:00:00Z"


def today(kind: str, family: str) -> str:
    return "new"


def gated(row: TunedEntry, template: str = "new") -> TunedEntry:
    mark = Regate(template, "GPU: passed 22 cases", UTC)
    return dataclasses.replace(row, provenance=dataclasses.replace(row.provenance, regate=mark))


def states(roots: list[Path]) -> list[tuple[str, str]]:
    return [(status.file.root.name, status.state) for status in check(GPU, roots=roots, template_hash=today)]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "user", tmp_path / "package"


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the templates with a second family beside sm80."""
    copy = tmp_path / "templates"
    shutil.copytree(data_dir("templates"), copy)
    (copy / "sm99").mkdir()
    (copy / "sm99" / "tile.cuh").write_text("// tiles of sm99\n")
    (copy / "kernels" / "flash_fwd_sm99.cu.j2").write_text("// body of sm99\n")
    monkeypatch.setattr(manifest, "data_dir", lambda name: copy)
    monkeypatch.setitem(manifest._BODIES, ("fwd", "sm99"), ("kernels/flash_fwd_sm99.cu.j2", ("sm99/tile.cuh",)))
    monkeypatch.setitem(manifest._PLATFORM_HEADERS, ("fwd", "sm99"), ("common/types.cuh",))
    yield copy
    manifest.template_hash.cache_clear()


MADE = (("fwd", "sm80"), ("fwd", "sm99"), ("bwd", "sm80"))


def _hashes() -> dict[tuple[str, str], str]:
    manifest.template_hash.cache_clear()
    return {made: manifest.template_hash(*made) for made in MADE}


def test_an_edit_stales_the_kernels_made_from_that_file_only(templates: Path) -> None:
    before = _hashes()
    assert len({*before.values()}) == 3
    for name in {name for made in MADE for name in manifest.manifest(*made)}:
        text = (templates / name).read_text()
        (templates / name).write_text(text + "int edited;\n")
        after = _hashes()
        edited = {made for made in MADE if name in manifest.manifest(*made)}
        assert {made for made in MADE if after[made] != before[made]} == edited
        (templates / name).write_text(text)
    (templates / "README.md").write_text("nothing that is compiled")
    (templates / "sm80" / "unused.cuh").write_text("// in no kernel")
    assert _hashes() == before


def test_an_edit_to_another_family_leaves_entries_current(templates: Path, tmp_path: Path) -> None:
    _hashes()
    save_entries(GPU, [entry(template=manifest.template_hash("fwd", "sm80"))], root=tmp_path)
    for name, state in (("sm99/tile.cuh", "current"), ("sm80/tile.cuh", "stale")):
        (templates / name).write_text((templates / name).read_text() + "int edited;\n")
        _hashes()
        (status,) = check(GPU, roots=[tmp_path], template_hash=manifest.template_hash)
        assert status.state == state
        match = lookup(SPEC, BUCKET, GPU, roots=[tmp_path], template_hash=manifest.template_hash)
        assert (match.source, match.stale) == (("exact", False) if state == "current" else ("default", True))


def test_the_states(folders: tuple[Path, Path]) -> None:
    user, package = folders
    rows = [
        entry(template="new"),
        entry(KernelSpec(dtype="fp16"), template="old"),
        gated(entry(KernelSpec(gqa_ratio=2), template="old")),
        gated(entry(KernelSpec(gqa_ratio=4), template="old"), "older"),
        # 512 x 128 keys need more shared memory than an A100 has.
        entry(KernelSpec(gqa_ratio=8), template="new", block_m=512, block_n=256, num_stages=3, num_warps=16),
    ]
    save_entries(GPU, rows, root=user)
    found = {status.entry.key: status for status in check(GPU, roots=[user, package], template_hash=today)}
    assert [found[row.key].state for row in rows] == ["current", "stale", "gated", "stale", "illegal"]
    assert [found[row.key].fails for row in rows] == [False, True, False, True, True]
    assert {status.state for status in found.values()} <= set(STATES)
    assert "made with templates old, today's are new" in found[rows[1].key].reason
    assert "GPU: passed 22 cases" in found[rows[2].key].reason
    assert check(get_gpu("h200"), roots=[user], template_hash=today) == []


@pytest.mark.parametrize(
    ("mine", "package_state"),
    [
        ({"template": "new", "kind": "measured"}, "replaced"),
        ({"template": "old", "kind": "measured"}, "stale"),
        # A prediction does not make up for a measured entry.
        ({"template": "new", "kind": "predicted"}, "stale"),
    ],
)
def test_a_stale_entry_of_the_package_that_is_not_used_is_no_failure(
    folders: tuple[Path, Path], mine: dict[str, str], package_state: str
) -> None:
    user, package = folders
    save_entries(GPU, [entry(**mine)], root=user)
    save_entries(GPU, [entry(kind="measured", template="old")], root=package)
    assert states([user, package])[1] == ("package", package_state)


def test_gated_entries_are_used_and_say_so(folders: tuple[Path, Path]) -> None:
    user, package = folders
    stale = entry(kind="measured", template="old", block_n=128)
    save_entries(GPU, [stale], root=user)
    options = {"roots": [user, package], "template_hash": today}
    assert lookup(SPEC, BUCKET, GPU, **options).source == "default"
    save_entries(GPU, [gated(stale)], root=user)
    match = lookup(SPEC, BUCKET, GPU, strict=True, **options)
    assert (match.source, match.config, match.stale, match.gated) == ("exact", stale.config, True, True)
    assert match.describe().endswith("(stale, passed the gate again)")
    # Newer templates again: it is stale as before.
    match = lookup(SPEC, BUCKET, GPU, roots=[user], template_hash=lambda kind, family: "newest")
    assert (match.source, match.stale, match.gated) == ("default", True, False)
    # A current prediction does not come before it, a current measured entry does, also the package's.
    save_entries(GPU, [entry(template="new", utc=UTC, block_n=32, step_n=32)], root=package)
    assert lookup(SPEC, BUCKET, GPU, **options).gated
    save_entries(GPU, [entry(kind="measured", template="new", block_m=64)], root=package)
    match = lookup(SPEC, BUCKET, GPU, **options)
    assert (match.config.block_m, match.stale, match.gated) == (64, False, False)
    # Only at equal distance.
    save_entries(GPU, [entry(problem=FAR, kind="measured", template="new", block_n=96, step_n=96)], root=user)
    save_entries(get_gpu("a30"), [gated(stale)], root=user)
    match = lookup(SPEC, BUCKET, get_gpu("a30"), **options)
    assert (match.source, match.gated) == ("exact", True)


def device() -> DeviceInfo:
    return DeviceInfo(
        index=0,
        name=GPU.device_names[0],
        compute_capability=GPU.compute_capability,
        num_sms=GPU.num_sms,
        l2_bytes=GPU.l2_bytes,
        total_memory=80 << 30,
        max_smem_per_block=163 << 10,
        clock_mhz=1410.0,
        cuda_version=(13, 0),
        driver_version="580",
    )


@pytest.fixture
def package_table(folders: tuple[Path, Path]) -> list[TunedEntry]:
    """Three stale entries of two kernels, one current."""
    rows = [
        entry(kind="measured", template="old", block_n=128),
        entry(problem=FAR, kind="measured", template="old", block_n=128),
        entry(KernelSpec(causal=True), kind="measured", template="old", block_m=64),
        entry(KernelSpec(dtype="fp16"), template="new"),
    ]
    save_entries(GPU, rows, root=folders[1])
    return rows


def _check(folders: tuple[Path, Path]) -> list[EntryStatus]:
    return check(GPU, roots=list(folders), template_hash=today)


@pytest.mark.parametrize("here", [True, False])
def test_what_passes_is_marked_in_the_user_s_table(
    folders: tuple[Path, Path], package_table: list[TunedEntry], here: bool
) -> None:
    user, package = folders
    before = table_path(package, "a100", "fwd").read_bytes()
    rooms = FakeRooms(device=device() if here else None, template="new")
    events = []
    results = regate(_check(folders), rooms.tools(), out=user, progress=events.append)
    assert {(result.status.entry.key, result.passed) for result in results} == {
        (row.key, True) for row in package_table[:3]
    }
    # Each kernel is compiled and proved once, on the GPU or in the emulator.
    assert len(rooms.compiled) == 2
    assert len(rooms.worker.gated if here else rooms.proved) == 2
    assert not (rooms.proved if here else rooms.worker.gated)
    assert not rooms.worker.running
    assert [(event.stage, event.done, event.total) for event in events] == [
        ("compile", 1, 2), ("compile", 2, 2), ("prove", 1, 2), ("prove", 2, 2)
    ]  # fmt: skip
    saved = load_rows(user)
    assert len(saved) == 3
    for row in saved:
        (original,) = (other for other in package_table if other.key == row.key)
        mark = row.provenance.regate
        assert mark is not None
        assert mark.template_hash == "new"
        assert mark.numerics == ("GPU: passed 20 cases" if here else "emulator: passed 20 cases")
        # Time, templates and date stay what they were.
        assert dataclasses.replace(row, provenance=dataclasses.replace(row.provenance, regate=None)) == original
    assert table_path(package, "a100", "fwd").read_bytes() == before
    assert sorted(states(list(folders))) == [
        ("package", "current"), *[("package", "replaced")] * 3, *[("user", "gated")] * 3
    ]  # fmt: skip
    assert regate(_check(folders), rooms.tools(), out=user) == []


def load_rows(root: Path) -> tuple[TunedEntry, ...]:
    read = load_table(table_path(root, "a100", "fwd"))
    assert read is not None
    return read.entries


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("how", ["wrong", "refused"])
def test_what_fails_stays_stale(
    folders: tuple[Path, Path], package_table: list[TunedEntry], here: bool, how: str
) -> None:
    user, _ = folders
    rooms = FakeRooms(device=device() if here else None, template="new", **{how: lambda config: config.block_m == 64})
    results = regate(_check(folders), rooms.tools(), out=user)
    failed = [result for result in results if not result.passed]
    assert [result.status.entry.key for result in failed] == [package_table[2].key]
    assert ("row 3" if how == "wrong" else "nvcc failed") in failed[0].text
    assert [state for _, state in states(list(folders))].count("stale") == 1
    assert len(load_rows(user)) == 2


def test_a_damaged_table_is_listed_and_not_in_the_way(folders: tuple[Path, Path]) -> None:
    user, package = folders
    save_entries(GPU, [entry(template="new")], root=package)
    (user / "a100").mkdir(parents=True)
    (user / "a100" / "fwd.json").write_text("{")
    (user / "h200").mkdir()
    (user / "h200" / "fwd.json").write_text('{"schema": 77}')
    files = scan_tables(roots=[user, package])
    assert [(file.root.name, file.gpu, file.table is None, file.newer) for file in files] == [
        ("user", "a100", True, False),
        ("user", "h200", True, True),
        ("package", "a100", False, False),
    ]
    assert [status.state for status in check(files=files, template_hash=today)] == ["current"]
