"""The gate: whether a kernel is right, by one tolerance rule, on inputs that broken kernels fail.

Importing it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fa2gen.spec import FwdConfig, KernelSpec

from .cases import GateCase, forward_cases, make_inputs
from .rule import GateReport, check_forward, refused

__all__ = ["GateCase", "GateReport", "Runner", "check_forward", "forward_cases", "make_inputs", "run_gate"]

Runner = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def run_gate(
    spec: KernelSpec,
    config: FwdConfig,
    runner: Runner,
    cases: Iterable[GateCase],
    *,
    device: str | torch.device = "cpu",
) -> GateReport:
    """Run a kernel over cases; the first case that fails ends the gate.

    Args:
        spec, config: What is under test, for the inputs and the report.
        runner: ``(q, k, v, softmax_scale) -> (out, lse)`` on tensors of ``device``.
        cases: From :func:`forward_cases`.
        device: Where inputs are made and results compared.

    Returns:
        The failing case's report, or the largest ratios over all cases. Exceptions of the runner pass through.
    """
    worst, where, lse_worst, count = 0.0, "nowhere", 0.0, 0
    for case in cases:
        q, k, v = make_inputs(spec, case, device)
        originals = [x.clone() for x in (q, k, v)]
        out, lse = runner(q, k, v, case.softmax_scale)
        report = check_forward(out, lse, *originals, causal=spec.causal, softmax_scale=case.softmax_scale)
        if report.passed and not all(torch.equal(a, b) for a, b in zip((q, k, v), originals, strict=True)):
            report = refused("the kernel changed an input")
        if not report.passed:
            text = f"{spec.slug()} {config.slug()} case {case.label()}: {report.text}"
            return GateReport(False, report.worst, f"{case.label()}, {report.where}", report.lse_worst, text)
        if report.worst >= worst:
            worst, where = report.worst, f"{case.label()}, {report.where}"
        lse_worst = max(lse_worst, report.lse_worst)
        count += 1
    text = f"passed {count} cases: output {worst:.3g} of its limit at {where}, LSE {lse_worst:.3g}"
    return GateReport(count > 0, worst, where, lse_worst, text if count else "FAILED: no case was run")
