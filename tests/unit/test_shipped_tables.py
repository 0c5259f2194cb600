"""The tables that ship: legal entries, of today's templates or gated with them, that calls of their sizes run."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fa2gen.codegen import KernelSource, template_hash
from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import Gpu, get_gpu
from fa2gen.problem import Bucket
from fa2gen.runtime import attention, describe, plan, plan_backward, plan_forward, request, reset
from fa2gen.runtime.backward import gradients
from fa2gen.spec import Config, KernelSpec
from fa2gen.tables import TunedEntry, load_table, lookup, package_dir
from tests.runtime_fakes import fake_map, row_launcher

# The package has a function of that name.
describe_module = importlib.import_module("fa2gen.runtime.describe")
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
        match = lookup(
            entry.spec,
            entry.bucket,
            gpu,
            template_hash=template_hash,
            roots=[package_dir()],
            strict=True,
            families=(entry.config.family,),
        )
        gated = entry.provenance.regate is not None
        assert (match.source, match.entry, match.stale, match.gated) == ("exact", entry, gated, gated), name
    # Without a word of families the fastest of each kernel and size.
    fastest = _fastest(table.entries)
    for (spec, bucket), entry in fastest.items():
        match = lookup(spec, bucket, gpu, template_hash=template_hash, roots=[package_dir()], strict=True)
        assert match.entry == entry, f"{spec.slug()} {bucket.label()}"


def _fastest(entries: Sequence[TunedEntry]) -> dict[tuple[KernelSpec, Bucket], TunedEntry]:
    """The entry of each kernel and size that a call takes: a measured one before any other, then by time."""
    ordered = sorted(entries, key=lambda entry: (entry.measurement.kind != "measured", entry.measurement.ms))
    fastest: dict[tuple[KernelSpec, Bucket], TunedEntry] = {}
    for entry in ordered:
        fastest.setdefault((entry.spec, entry.bucket), entry)
    return fastest


class FakeKernel:
    """What the runtime loads, without a GPU; remembers what was launched."""

    launched: ClassVar[list[tuple[KernelSpec, Config]]] = []

    def __init__(self, source: KernelSource) -> None:
        self.identity = source.spec, source.config

    def launcher(self, grid: Any, block: Any) -> Callable[[bytes, int], None]:
        return lambda params, stream: self.launched.append(self.identity)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Gpu], None]]:
    """A function that makes CPU tensors pass for the named GPU's, on a machine whose user has tuned nothing."""
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path))
    monkeypatch.setenv("FA2GEN_STRICT", "1")
    monkeypatch.setattr(request, "_backend", lambda backend, device: "cuda")
    monkeypatch.setattr(plan, "compile_kernel", lambda source, target: source)
    monkeypatch.setattr(plan, "compile_many", lambda jobs: [source for source, _ in jobs])
    monkeypatch.setattr(plan, "load", lambda source, index: FakeKernel(source))
    monkeypatch.setattr(plan_backward, "row_launcher", row_launcher)
    monkeypatch.setattr(plan_forward, "map_packer", lambda map, index: lambda address: fake_map(map, address))
    monkeypatch.setattr(plan, "_raw_stream_function", lambda: lambda index: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def become(gpu: Gpu) -> None:
        reset()
        for module in (plan, describe_module):
            monkeypatch.setattr(module, "device_gpu", lambda index: gpu)

    yield become
    reset()


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_public_call_runs_the_fastest_entries(path: Path, fake_gpu: Callable[[Gpu], None]) -> None:
    fake_gpu(_gpu(path))
    for entry in _fastest(_entries(path)).values():
        p, spec = entry.measurement.problem, entry.spec
        dtype = torch.float16 if spec.dtype == "fp16" else torch.bfloat16
        # Memory that is never touched is never there.
        q, k, v = (
            torch.empty(p.batch, rows, heads, spec.head_dim, dtype=dtype)
            for rows, heads in ((p.seqlen_q, p.num_heads_q), (p.seqlen_k, p.num_heads_k), (p.seqlen_k, p.num_heads_k))
        )
        if spec.kind == "bwd":
            _run_gradients(entry, q, k, v)
            continue
        described = describe(q, k, v, causal=spec.causal)
        assert (described.spec, described.config, described.source) == (spec, entry.config, "exact")
        gated = entry.provenance.regate is not None
        assert (described.known, described.stale, described.gated) == (entry.measurement.kind, gated, gated)
        assert ("predicted by the performance model" in str(described)) == (entry.measurement.kind == "predicted")
        attention(q, k, v, causal=spec.causal)
        assert FakeKernel.launched[-1] == (spec, entry.config)


def _run_gradients(entry: TunedEntry, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The gradients of such a call, by its three kernels; results of the forward are not looked at."""
    spec, p = entry.spec, entry.measurement.problem
    out, dout = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(p.batch, p.num_heads_q, p.seqlen_q, dtype=torch.float32)
    options = plan.gradient_options(spec.causal, None, spec.deterministic, "auto", None)
    gradients(options, dout, None, (q, k, v, out, lse))
    assert FakeKernel.launched[-3:] == 3 * [(spec, entry.config)]


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
    assert match.source == "other gpu"
    # Of the chips with this instruction set a measured one comes first: an H100's slice borrows from the H200.
    assert get_gpu(match.gpu).target == gpu.target
