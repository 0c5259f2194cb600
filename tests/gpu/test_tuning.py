"""Tuning on the GPU: sabotaged kernels are contained and named, and never win."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fa2gen.codegen import KernelSource, render_kernel
from fa2gen.driver import device_info
from fa2gen.hardware import Gpu, match_device
from fa2gen.problem import Problem
from fa2gen.runtime import attention, describe, reset
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tuning import measured
from fa2gen.tuning.session import TuneRequest, tune
from fa2gen.tuning.tools import Tools

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


def sabotaged(spec: KernelSpec, config: FwdConfig) -> KernelSource:
    """Three stages: reads out of every allocation. Four warps: skips every other key block. Eight warps: never ends."""
    source = render_kernel(spec, config)
    if config.num_stages == 3:
        old, new = "      p.k + (work.batch", "      p.k + ((i64(1) << 44) + work.batch"
    elif config.num_warps == 4:
        old, new = "i < blocks.visible; i++)", "i < blocks.visible; i += 2)"
    elif config.num_warps == 8:
        old, new = (
            "  int stage = 0;\n",
            "  while (smem_base() + blockIdx.x != 0xffffffff) sync_threads();\n  int stage = 0;\n",
        )
    else:
        return source
    assert source.text.count(old) == 1
    return dataclasses.replace(source, text=source.text.replace(old, new))


def test_bad_kernels_are_contained_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_MEASURE_TIMEOUT", 6.0)
    gpu = gpu_here()
    request = TuneRequest(SPEC, PROBLEM)
    good = FwdConfig(block_m=64, block_n=64, num_warps=2, num_stages=2)
    configs = [good]
    configs += [dataclasses.replace(good, num_stages=3), dataclasses.replace(good, block_m=128, num_warps=4)]
    configs += [dataclasses.replace(good, block_m=128, num_warps=8), dataclasses.replace(good, num_stages=1)]
    monkeypatch.setattr(measured, "shortlist", lambda *_: configs)
    report = tune([request], gpu, out=tmp_path / "tables", trials=len(configs), tools=Tools(render=sabotaged))
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


def test_the_runtime_takes_what_was_tuned(tmp_path):
    report = tune([TuneRequest(SPEC, PROBLEM)], gpu_here(), trials=4)
    (entry,) = report.entries
    q, k, v = (torch.randn(2, 1024, 4, 64, device="cuda").bfloat16() for _ in range(3))
    chosen = describe(q, k, v, causal=True)
    assert (chosen.config, chosen.source, chosen.known) == (entry.config, "exact", "measured")
    out = attention(q, k, v, causal=True)
    reference = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    assert (out - reference).abs().max() < 0.02
