"""The tables that ship: every entry is legal, current, and what a public look-up of its own sizes finds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fa2gen.codegen import template_hash
from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import Gpu, get_gpu
from fa2gen.tables import TunedEntry, load_table, lookup, package_dir

TABLES = sorted(package_dir().glob("*/*.json"))


def _gpu(path: Path) -> Gpu:
    return get_gpu(path.parent.name)


def _entries(path: Path) -> tuple[TunedEntry, ...]:
    table = load_table(path)
    assert table is not None
    return table.entries


def test_there_are_tables() -> None:
    assert TABLES


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_entry_is_reachable_and_legal(path: Path) -> None:
    gpu, table = _gpu(path), load_table(path)
    assert table is not None
    assert (table.gpu, table.target) == (gpu.name, gpu.target)
    assert table.entries
    for entry in table.entries:
        name = f"{entry.spec.slug()} {entry.bucket.label()}"
        assert infeasible_reason(entry.spec, entry.config, gpu.arch) is None, name
        # The sizes that were measured lie in the entry's bucket, and asking for them finds the entry.
        assert entry.measurement.problem.gqa_ratio == entry.spec.gqa_ratio, name
        assert entry.measurement.problem.bucket(gpu.num_sms) == entry.bucket, name
        match = lookup(entry.spec, entry.bucket, gpu, template_hash=template_hash, roots=[package_dir()], strict=True)
        assert (match.source, match.entry, match.stale) == ("exact", entry, False), name


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_edited_template_makes_every_entry_stale(path: Path) -> None:
    gpu = _gpu(path)
    for entry in _entries(path):
        edited = lookup(entry.spec, entry.bucket, gpu, template_hash=lambda *_: "edited", roots=[package_dir()])
        assert (edited.source, edited.stale, edited.entry) == ("default", True, None)
        assert infeasible_reason(entry.spec, edited.config, gpu.arch) is None


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_another_chip_of_that_name_is_no_exact_hit(path: Path) -> None:
    gpu, entry = _gpu(path), _entries(path)[0]
    slice_of_it = dataclasses.replace(gpu, name=f"dev-{gpu.name}-7sm", num_sms=7)
    match = lookup(entry.spec, entry.bucket, slice_of_it, template_hash=template_hash, roots=[package_dir()])
    assert (match.source, match.gpu) == ("other gpu", gpu.name)
