"""What ``tests/gpu/sanitize.py`` makes of the tools' output, and that it hands the kernels the right bytes."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import time

import pytest
import torch

from fa2gen.codegen import kernels_of, render_kernel
from fa2gen.compile import CompiledKernel, ResourceUsage
from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import Gpu, get_gpu
from fa2gen.launch import bwd_plan
from fa2gen.problem import Problem
from fa2gen.reference import attention_backward, attention_forward
from fa2gen.spec import BwdConfig
from tests.gpu import sanitize, sanitize_jobs
from tests.gpu.sanitize_jobs import Prepared

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
BACKWARD = OTHER.replace("fwd_d64_bf16_causal_gqa1_sm80_mb1_pb", "bwd_d64_bf16_causal_gqa1_sm80_mb1_wd2")
BOTH = BACKWARD.replace("wd2+0x10", "ring+0x10")


@pytest.mark.parametrize(
    ("tool", "version", "output", "expected"),
    [
        ("memcheck", (2025, 3), CLEAN, (0, 0)),
        ("synccheck", (2025, 3), CLEAN.replace("0 errors", "3 errors"), (3, 0)),
        ("racecheck", (2025, 3), RACE.format(count=1, more=""), (0, 1)),
        ("racecheck", (2025, 4), RACE.format(count=1, more=""), (1, 0)),
        ("racecheck", (2025, 3), RACE.format(count=2, more=OTHER), (1, 1)),
        ("racecheck", (2025, 3), RACE.format(count=2, more=BACKWARD), (1, 1)),
        ("racecheck", (2025, 3), RACE.format(count=2, more=BOTH), (1, 1)),
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


def _prepared(gpu: Gpu) -> list[Prepared]:
    """All cases' jobs; kernels without cubins."""
    made = []
    for number, case in enumerate(sanitize_jobs.CASES):
        sources = {name: render_kernel(case.spec, case.config, kernel=name) for name in kernels_of(case.spec.kind)}
        kernels = {
            name: CompiledKernel(source, gpu.target, b"", ResourceUsage(1, 0, 0, 0, 0, 0), name, False, 0.0, "")
            for name, source in sources.items()
        }
        made += sanitize_jobs.prepared_jobs(case, number, kernels, gpu.l2_bytes)
    return made


@pytest.fixture(scope="module")
def prepared() -> list[Prepared]:
    return _prepared(get_gpu("h200"))


def _held(item: Prepared, name: str) -> torch.Tensor:
    x = item.tensors[name]
    return torch.frombuffer(bytearray(item.job.arrays[name].data), dtype=x.dtype)


def test_jobs_hold_their_tensors(prepared: list[Prepared]) -> None:
    for item in prepared:
        job = pickle.loads(pickle.dumps(item.job))
        assert job == item.job
        for name, x in item.tensors.items():
            held = _held(item, name)
            assert torch.equal(held.as_strided(x.shape, x.stride()), x)
            # Just its size: from the first element to the last.
            assert len(held) == 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        for step in job.steps:
            spec = step.kernel.source.spec
            assert step.params[: 8 * len(step.pointers)] == bytes(8 * len(step.pointers))
            for name in {"q", "k", "v", "o", "dout"} & item.tensors.keys() & set(step.pointers):
                x = item.tensors[name]
                aligned = job.arrays[name].start % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:3])
                assert aligned == (spec.alignment == 16)
        # Every pointer has memory, but for what the kernel has no use for.
        unnamed = {name for step in job.steps for name in step.pointers} - job.arrays.keys()
        assert unnamed <= {"dlse", "dk_accum", "dv_accum", "semaphores", "tickets"}
        assert all(array.data for array in job.arrays.values())
        assert all(set(job.arrays[name].data) == {255} for name in job.outputs if name != "repairs")


def test_backward_jobs_have_workspaces_of_their_own_size(prepared: list[Prepared]) -> None:
    """What a plan rounds up to 256 bytes is as long as the kernels take it to be."""
    gpu, checked = get_gpu("h200"), set()
    for item in prepared:
        source = item.job.steps[0].kernel.source
        if source.spec.kind == "fwd":
            continue
        q, k = item.tensors["q"], item.tensors["k"]
        p = Problem(1, q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        strides = dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), (0, 0, 0))
        assert isinstance(source.config, BwdConfig)
        plan = bwd_plan(source.spec, source.config, p, strides=strides, softmax_scale=1.0, l2_bytes=gpu.l2_bytes)
        for workspace in plan.workspaces:
            array = item.job.arrays[workspace.pointer]
            assert 0 <= workspace.num_bytes - len(array.data) < 256
            assert set(array.data) == {255}
            checked.add(workspace.pointer)
        padded = -(-p.seqlen_q // source.config.block_m) * source.config.block_m
        assert len(item.job.arrays["delta"].data) == 4 * p.num_heads_q * padded
        assert p.seqlen_k > source.config.block_n
    assert checked == {"lse_log2", "delta", "dq_accum", "dk_accum", "dv_accum", "semaphores"}


def test_the_backward_s_cases_cover_its_tunables() -> None:
    gpu = get_gpu("h200")
    for case in sanitize_jobs.CASES:
        assert infeasible_reason(case.spec, case.config, gpu.arch) is None
    cases = [(case.spec, case.config) for case in sanitize_jobs.BACKWARD]
    configs = [config for _, config in cases if isinstance(config, BwdConfig)]
    seen: dict[str, set[object]] = {}
    for config in configs:
        for name, value in vars(config).items():
            seen.setdefault(name, set()).add(value)
    assert seen["roles"] == seen["warps_d"] == seen["num_stages"] == seen["ds_stages"] == {1, 2}
    assert seen["kv_in_regs"] == seen["split_heads"] == {False, True}
    assert seen["reduction"] == {"scalar", "vector"}
    assert {spec.head_dim for spec, _ in cases} == {32, 40, 64, 96, 128, 192, 256}
    assert {spec.dtype for spec, _ in cases} == {"bf16", "fp16"}
    assert {(spec.causal, spec.deterministic) for spec, _ in cases} == set(itertools.product((False, True), repeat=2))
    # The order of additions is kept in another way by one role than by two.
    assert {config.roles for config, (spec, _) in zip(configs, cases, strict=True) if spec.deterministic} == {1, 2}


def _bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def test_forward_results_are_judged(prepared: list[Prepared]) -> None:
    item = prepared[1]
    q, k, v = (item.tensors[name] for name in "qkv")
    out, lse = attention_forward(q, k, v, causal=True)
    right = {"o": _bytes(out.to(q.dtype)), "softmax_lse": _bytes(lse.float()), "repairs": bytes([3, 0, 0, 0])}
    assert sanitize_jobs.wrong_results([item], [right]) == []
    assert "nothing was repaired" in sanitize_jobs.wrong_results([item], [right | {"repairs": bytes(4)}])[0]
    assert "FAILED" in sanitize_jobs.wrong_results([item], [right | {"o": b"\xff" * len(right["o"])}])[0]
    assert "no result" in sanitize_jobs.wrong_results([item], [None])[0]


@pytest.mark.parametrize("with_dlse", [False, True])
def test_backward_results_are_judged(prepared: list[Prepared], with_dlse: bool) -> None:
    item = next(item for item in prepared if "dout" in item.tensors and ("dlse" in item.tensors) == with_dlse)
    q, k, v, dout = (item.tensors[name] for name in ("q", "k", "v", "dout"))
    spec, dlse = item.job.steps[0].kernel.source.spec, item.tensors.get("dlse")
    grads = attention_backward(q, k, v, dout, causal=spec.causal, softmax_scale=spec.head_dim**-0.5, dlse=dlse)
    right = {name: _bytes(grad.to(q.dtype)) for name, grad in zip(("dq", "dk", "dv"), grads, strict=True)}
    assert sanitize_jobs.wrong_results([item], [right]) == []
    for name, data in right.items():
        assert name in sanitize_jobs.wrong_results([item], [right | {name: b"\xff" * len(data)}])[0]


def test_the_watched_process_imports_no_torch() -> None:
    code = "import sys; import tests.gpu.sanitize_launch; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=sanitize.REPOSITORY
    )
    assert done.stdout == "False\n", done.stderr


def test_a_tool_that_does_not_end_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "TIMEOUT", 2.0)
    start = time.monotonic()
    # The shell's child holds the pipe too: that it could be read to its end shows that both are gone.
    assert sanitize._run_in_time(["sh", "-c", "echo begun; sleep 60 & wait"]) == ("begun\n", None)
    assert time.monotonic() - start < 30
