"""Tuning on the GPU: sabotaged kernels are contained and named, and never win."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa2gen.codegen import KernelSource, render_kernel, render_kernels
from fa2gen.compile import compile_kernel
from fa2gen.constraints import families_on
from fa2gen.driver import device_count, device_info
from fa2gen.driver.clocks import open_clock_reader
from fa2gen.hardware import Gpu, match_device
from fa2gen.problem import Problem
from fa2gen.runtime import attention, describe, reset
from fa2gen.spec import BwdConfig, FwdConfig, KernelSpec
from fa2gen.tables import load_table, table_path
from fa2gen.tuning import device, measured
from fa2gen.tuning.measure import MeasureRequest
from fa2gen.tuning.session import TuneRequest, tune
from fa2gen.tuning.tools import Tools
from fa2gen.tuning.worker import TrialFailure

SPEC = KernelSpec(head_dim=64, causal=True)
PROBLEM = Problem(2, 1024, 1024, 4, 4)


def gpu_here() -> Gpu:
    info = device_info(0)
    return match_device(info.name, info.compute_capability, info.num_sms, info.l2_bytes)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "tables"))
    reset()
    yield
    reset()


def sabotaged(spec: KernelSpec, config: FwdConfig) -> tuple[KernelSource, ...]:
    """Three stages: reads out of every allocation. Four warps: skips every other key block. Eight warps: never ends."""
    source = render_kernel(spec, config)
    if config.num_stages == 3:
        old, new = "      p.k + (work.batch", "      p.k + ((i64(1) << 44) + work.batch"
    elif config.num_warps == 4:
        old, new = "i < blocks.visible; i++)", "i < blocks.visible; i += 2)"
    elif config.num_warps == 8:
        old, new = (
            "  const WorkTile work = work_tile(p);\n",
            "  while (smem_base() + blockIdx.x != 0xffffffff) sync_threads();\n  const WorkTile work = work_tile(p);\n",
        )
    else:
        return (source,)
    return (_edited(source, old, new),)


def test_bad_kernels_are_contained_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "MEASURE_TIMEOUT", 6.0)
    gpu = gpu_here()
    request = TuneRequest(SPEC, PROBLEM)
    good = FwdConfig(block_m=64, block_n=64, num_warps=2, num_stages=2)
    configs = [good]
    configs += [dataclasses.replace(good, num_stages=3), dataclasses.replace(good, block_m=128, num_warps=4)]
    configs += [dataclasses.replace(good, block_m=128, num_warps=8), dataclasses.replace(good, num_stages=1)]
    monkeypatch.setattr(measured, "shortlist", lambda *_: configs)
    monkeypatch.setattr(measured, "find_relatives", lambda *_: ())
    options = {"trials": len(configs), "tools": Tools(render=sabotaged), "families": ["sm80"]}
    report = tune([request], gpu, out=tmp_path / "tables", **options)
    outcomes = {failure.config: failure.outcome for failure in report.failures}
    assert outcomes[configs[1]] == "launch_failed", report.failures
    assert outcomes[configs[3]] == "timeout", report.failures
    # Skipping half of the keys is fast: it must have been timed, found wrong, and passed over.
    assert outcomes[configs[2]] == "wrong", report.failures
    (entry,) = report.entries
    assert entry.config.num_warps == 2
    assert entry.config.num_stages != 3
    assert entry.measurement.kind == "measured"
    assert entry.provenance.numerics.startswith("GPU: passed")
    # This process's own context never saw any of it.
    assert torch.ones(4, device="cuda").sum().item() == 4


def sabotaged_backward(spec: KernelSpec, config: BwdConfig) -> tuple[KernelSource, ...]:
    """One stage: the main kernel skips every other tile. Eight warps: what is added to is not cleared."""
    first, main, last = render_kernels(spec, config)
    if config.num_stages == 1:
        main = _edited(main, "i < num_tiles; i++)", "i < num_tiles; i += 2)")
    elif config.num_warps == 8:
        first = _edited(first, "  clear(p.dq_accum, p.dq_accum_bytes);\n", "")
    return first, main, last


def _edited(source: KernelSource, old: str, new: str) -> KernelSource:
    assert source.text.count(old) == 1
    return dataclasses.replace(source, text=source.text.replace(old, new))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_is_timed_and_proved_as_a_whole(deterministic, tmp_path, monkeypatch):
    spec = KernelSpec("bwd", head_dim=64, causal=True, gqa_ratio=2, deterministic=deterministic)
    request = TuneRequest(spec, Problem(2, 1000, 1100, 4, 2))
    good = BwdConfig(block_m=64, block_n=64, step_m=32, num_warps=4, num_stages=2)
    skips = dataclasses.replace(good, num_stages=1)
    uncleared = dataclasses.replace(good, block_n=128, num_warps=8)
    # In a fixed order the blocks after one that skips a tile would wait for it for ever.
    bad = [uncleared] if deterministic else [skips, uncleared]
    configs = [good, *bad]
    monkeypatch.setattr(measured, "shortlist", lambda *_: configs)
    monkeypatch.setattr(measured, "find_relatives", lambda *_: ())
    # So that it is the sabotaged ones that would win, and are put to the proof.
    monkeypatch.setattr(measured, "ranking", lambda times, *_: sorted(times, key=[skips, uncleared, good].index))
    monkeypatch.setattr(measured, "default_config_of", lambda spec, family: good)
    # The default is timed besides the trials: with as many as there are others nothing else is tried.
    report = tune([request], gpu_here(), out=tmp_path, trials=len(bad), tools=Tools(render=sabotaged_backward))
    assert {(f.config, f.outcome) for f in report.failures} == {(config, "wrong") for config in bad}, report.failures
    (entry,) = report.entries
    assert (entry.config, entry.measurement.kind) == (good, "measured")
    assert entry.provenance.numerics.startswith("GPU: passed")
    assert load_table(table_path(tmp_path, gpu_here().name, "bwd")).entries == report.entries


def test_the_runtime_takes_what_was_tuned(tmp_path):
    report = tune([TuneRequest(SPEC, PROBLEM)], gpu_here(), trials=4)
    assert {entry.config.family for entry in report.entries} == set(families_on(SPEC, gpu_here().arch))
    entry = min(report.entries, key=lambda entry: entry.measurement.ms)
    q, k, v = (torch.randn(2, 1024, 4, 64, device="cuda").bfloat16() for _ in range(3))
    chosen = describe(q, k, v, causal=True)
    assert (chosen.config, chosen.source, chosen.known) == (entry.config, "exact", "measured")
    out = attention(q, k, v, causal=True)
    reference = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    assert (out - reference).abs().max() < 0.02


def test_a_refused_launch_costs_neither_context_nor_process():
    """A kernel bound to 64 threads, launched with 256: too many for it, as too many registers are."""
    small, wide = FwdConfig(block_m=64, block_n=64, num_warps=2), FwdConfig(block_m=128, block_n=64, num_warps=8)
    compiled = compile_kernel(render_kernel(SPEC, small), gpu_here().target)
    worker = Tools().worker(0)
    try:
        with pytest.raises(TrialFailure, match="cannot be launched") as caught:
            worker.call("measure", MeasureRequest((compiled,), SPEC, wide, PROBLEM, math.inf), timeout=180)
        assert (caught.value.outcome, caught.value.fatal) == ("launch_failed", False)
        timing = worker.call("measure", MeasureRequest((compiled,), SPEC, small, PROBLEM, math.inf), timeout=60)
        assert timing.ms > 0
        assert worker.starts == 1
    finally:
        worker.stop()


def test_clocks_are_those_of_this_device(tmp_path):
    pynvml = pytest.importorskip("pynvml", reason="clocks need the package nvidia-ml-py")
    index = device_count() - 1
    reader = open_clock_reader(index)
    if reader is None:
        pytest.skip("NVML does not know this device")
    uuid = pynvml.nvmlDeviceGetUUID(reader._handle)
    assert str(torch.cuda.get_device_properties(index).uuid) in (uuid if isinstance(uuid, str) else uuid.decode())
    report = tune([TuneRequest(SPEC, PROBLEM)], gpu_here(), out=tmp_path / "tables", trials=0, families=["sm80"])
    clocks = report.entries[0].measurement.clocks
    assert 100 <= clocks.sm_mhz_min <= clocks.sm_mhz <= clocks.sm_mhz_max <= 1.05 * device_info(0).clock_mhz
    (saved,) = load_table(table_path(tmp_path / "tables", gpu_here().name, "fwd")).entries
    assert saved.measurement.clocks == clocks


def test_the_incumbent_is_timed_again_and_stays_within_the_noise(tmp_path):
    request, steps = TuneRequest(SPEC, PROBLEM), []
    first = tune([request], gpu_here(), out=tmp_path / "tables", trials=6, families=["sm80"]).entries[0]
    report = tune(
        [request],
        gpu_here(),
        out=tmp_path / "tables",
        trials=0,
        families=["sm80"],
        progress=lambda event: steps.append(event.text) if event.stage == "measure" else None,
    )
    (second,) = report.entries
    assert second.provenance.incumbent.config == first.config
    assert any(first.config.slug() in text for text in steps[:2])
    # Only the default was timed besides; a clear loss to it within seconds would be a broken measurement.
    assert second.config == first.config
    assert second.provenance.incumbent.ms == second.measurement.ms
    assert abs(second.measurement.ms / first.measurement.ms - 1) < 0.2


@pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
def test_two_devices_share_the_requests(tmp_path):
    if device_info(0).name != device_info(1).name:
        pytest.skip("the first two GPUs are different products")
    requests = [TuneRequest(SPEC, PROBLEM), TuneRequest(dataclasses.replace(SPEC, causal=False), PROBLEM)]
    report = tune(requests, gpu_here(), out=tmp_path / "tables", trials=3, devices=[0, 1])
    assert report.devices == (0, 1)
    assert {entry.spec for entry in report.entries} == {request.spec for request in requests}
