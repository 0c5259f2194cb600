"""The benchmark's data do to the guarded softmax what their names say."""

from __future__ import annotations

import pytest

from fa2gen.bench.cells import Cell, make_inputs
from fa2gen.emulator.forward import run_forward
from fa2gen.gate import check_forward
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec

CONFIG = FwdConfig(block_m=128, block_n=64, step_n=32, num_warps=4, num_stages=2, softmax="guarded")
# Four query tiles of 128 rows, of which "repair-1pct" has the first repaired.
PROBLEM = Problem(1, 256, 256, 2, 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_repairs(dtype: str) -> None:
    spec, repairs = KernelSpec(head_dim=64, dtype=dtype), {}
    for data in ("normal", "repair-1pct", "repair-all"):
        q, k, v = make_inputs(Cell(spec, PROBLEM, data), "cpu", 0)
        out, lse, counters = run_forward(spec, CONFIG, q, k, v, softmax_scale=spec.head_dim**-0.5)
        report = check_forward(out, lse, q, k, v, causal=False)
        assert report.passed, f"{data}: {report.text}"
        repairs[data] = counters.repairs
    assert repairs["normal"] == 0
    assert repairs["repair-1pct"] > 0
    assert repairs["repair-all"] == 4 * repairs["repair-1pct"]
