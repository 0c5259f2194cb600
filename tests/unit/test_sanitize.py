"""What ``tests/gpu/sanitize.py`` makes of the tools' output, and that it hands the kernels the right bytes."""

from __future__ import annotations

import pickle

import pytest
import torch

from fa2gen.codegen import render_kernel
from fa2gen.compile import CompiledKernel, ResourceUsage
from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import get_gpu
from fa2gen.launch import POINTERS
from fa2gen.reference import attention_forward
from tests.gpu import sanitize

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at fa2gen_fwd_d128_bf16_full_gqa1_sm80_mb1_ring+0x430
=========     and Read access at fa2gen_fwd_d128_bf16_full_gqa1_sm80_mb1_ring+0x770 [248 hazards]
=========
{more}========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)
"""
OTHER = """========= Warning: Race reported between Write access at fa2gen_fwd_d64_bf16_causal_gqa1_sm80_mb1_pb+0x10
=========     and Write access at fa2gen_fwd_d64_bf16_causal_gqa1_sm80_mb1_pb+0x20 [4 hazards]
=========
"""


@pytest.mark.parametrize(
    ("tool", "version", "output", "expected"),
    [
        ("memcheck", (2025, 3), CLEAN, (0, 0)),
        ("synccheck", (2025, 3), CLEAN.replace("0 errors", "3 errors"), (3, 0)),
        ("racecheck", (2025, 3), RACE.format(count=1, more=""), (0, 1)),
        ("racecheck", (2025, 4), RACE.format(count=1, more=""), (1, 0)),
        ("racecheck", (2025, 3), RACE.format(count=2, more=OTHER), (1, 1)),
        # 40 more that were not printed.
        ("racecheck", (2025, 3), RACE.format(count=41, more=""), (40, 1)),
    ],
)
def test_findings(tool: str, version: tuple[int, ...], output: str, expected: tuple[int, int]) -> None:
    verdict = sanitize.read_report(tool, version, output)
    assert (verdict.found, verdict.excluded, verdict.refused) == (*expected, None)


@pytest.mark.parametrize("output", ["", "========= Error: Device not supported\n" + CLEAN])
def test_a_tool_that_did_not_run_is_not_clean(output: str) -> None:
    assert sanitize.read_report("memcheck", (2025, 3), output).refused is not None


def test_jobs_hold_their_tensors() -> None:
    gpu = get_gpu("h200")
    for case in sanitize.CASES:
        assert infeasible_reason(case.spec, case.config, gpu.arch) is None
        source = render_kernel(case.spec, case.config)
        kernel = CompiledKernel(source, gpu.target, b"", ResourceUsage(1, 0, 0, 0, 0, 0), "key", False, 0.0, "")
        for number in range(len(case.inputs)):
            item = sanitize._prepared(case, number, kernel, gpu.l2_bytes)
            job = pickle.loads(pickle.dumps(item.job))
            assert job.params[: 8 * len(POINTERS)] == bytes(48)
            for x, (data, start) in zip(item.tensors, job.inputs, strict=True):
                held = torch.frombuffer(bytearray(data), dtype=x.dtype)
                assert torch.equal(held.as_strided(x.shape, x.stride()), x)
                assert len(data) == 2 * len(held)
                aligned = start % 16 == 0 and all(2 * stride % 16 == 0 for stride in x.stride()[:3])
                assert aligned == (case.spec.alignment == 16)
            assert job.outputs[0] == 2 * item.tensors[0].numel()


def test_results_are_judged() -> None:
    case = sanitize.CASES[0]
    kernel = CompiledKernel(
        render_kernel(case.spec, case.config), "sm_90", b"", ResourceUsage(1, 0, 0, 0, 0, 0), "key", False, 0.0, ""
    )
    item = sanitize._prepared(case, 1, kernel, 1 << 20)
    out, lse = attention_forward(*item.tensors, causal=True)
    right = (
        out.to(torch.bfloat16).view(torch.int16).numpy().tobytes(),
        lse.float().numpy().tobytes(),
    )
    item.job.results = (*right, 3)
    assert sanitize.wrong_results([item], [item.job]) == []
    item.job.results = (*right, 0)
    assert "nothing was repaired" in sanitize.wrong_results([item], [item.job])[0]
    item.job.results = (b"\xff" * len(right[0]), right[1], 3)
    assert "FAILED" in sanitize.wrong_results([item], [item.job])[0]
    item.job.results = None
    assert "no result" in sanitize.wrong_results([item], [item.job])[0]
