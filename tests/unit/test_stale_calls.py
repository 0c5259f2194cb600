"""What a call says of tuned entries whose templates have changed."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fa2gen.constraints import default_config
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.runtime import describe, plan, request, reset
from fa2gen.spec import KernelSpec
from fa2gen.tables import Regate, TunedEntry, save_entries
from tests.tuning_fakes import PROBLEM, entry

# The package has a function of that name.
describe_module = importlib.import_module("fa2gen.runtime.describe")
GPU = get_gpu("a100")


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """CPU tensors pass for an A100's; the user's folder of tables."""
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path))
    monkeypatch.setattr(request, "_backend", lambda backend, device: "cuda")
    for module in (plan, describe_module):
        monkeypatch.setattr(module, "device_gpu", lambda index: GPU)
    monkeypatch.setattr(describe_module, "kernel_state", lambda spec, config, index: "not compiled")
    monkeypatch.setattr(plan, "template_hash", lambda kind, family: "new")
    reset()
    yield tmp_path
    reset()


def call(seqlen: int = 4096) -> str:
    """What is said of a call of 16 heads."""
    tensors = [torch.empty(4, seqlen, 16, 128, dtype=torch.bfloat16) for _ in range(3)]
    return str(describe(*tensors))


def stale(**options: str) -> TunedEntry:
    return entry(template="old", **options)


def test_entries_that_hold(tables: Path) -> None:
    save_entries(GPU, [entry(template="new")], root=tables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = call()
    assert "entry    a100 fwd_d128_bf16_full_gqa1 q12_k12_w4, predicted by the performance model, not measured" in text
    assert "stale" not in text
    save_entries(GPU, [entry(kind="measured", template="new")], root=tables)
    reset()
    assert "q12_k12_w4, measured\n" in call()


def test_a_stale_table_is_named_once(tables: Path) -> None:
    save_entries(GPU, [stale(kind="measured")], root=tables)
    with pytest.warns(RuntimeWarning, match=r"a100 are stale.*fa2gen table check --gpu a100 --regate") as caught:
        texts = [call(), call(512), call(4096)]
    assert len(caught) == 1
    for text in texts:
        assert f"config   {default_config(KernelSpec()).slug()} (default)" in text
        assert "nearer entries are stale: the templates have changed since (fa2gen table check)" in text


def test_a_gated_entry_says_so_and_warns_of_nothing(tables: Path) -> None:
    row = stale(kind="measured")
    mark = Regate("new", "GPU: passed", "2026-02-01T00:00:00Z")
    row = dataclasses.replace(row, provenance=dataclasses.replace(row.provenance, regate=mark))
    save_entries(GPU, [row], root=tables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = call()
    assert "(exact)" in text
    assert "stale, passed the gate again: its time is that of earlier templates" in text
    assert "nearer entries" not in text


def test_a_farther_entry_of_today_serves_without_a_warning(tables: Path) -> None:
    save_entries(GPU, [stale(), entry(problem=Problem(16, 1024, 1024, 16, 16), template="new")], root=tables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = call(PROBLEM.seqlen_q)
    assert "(nearest bucket)" in text
    assert "nearer entries are stale" in text


def test_a_faster_family_with_stale_entries_only_is_named(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = get_gpu("h200")
    for module in (plan, describe_module):
        monkeypatch.setattr(module, "device_gpu", lambda index: hopper)
    monkeypatch.setattr(plan, "template_hash", lambda kind, family: {"sm80": "new", "sm90": "newer"}[family])
    rows = [
        entry(kind="measured", ms=ms, template="new", sms=hopper.num_sms, family=family)
        for family, ms in (("sm80", 2.0), ("sm90", 1.0))
    ]
    save_entries(hopper, rows, root=tables)
    with pytest.warns(RuntimeWarning, match=r"sm90 family for h200 are stale .* runs a slower one of sm80") as caught:
        texts = [call(), call()]
    assert len(caught) == 1
    for text in texts:
        assert "sm80" in text
        assert "nearer entries are stale" in text
