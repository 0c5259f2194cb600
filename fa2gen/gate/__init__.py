"""The gate: whether a kernel is right, by one tolerance rule, on inputs that broken kernels fail.

Importing it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fa2gen.reference import attention_forward
from fa2gen.spec import BwdConfig, ForwardConfig, KernelSpec

from .backward_cases import backward_cases, make_gradients
from .backward_rule import check_backward
from .cases import GateCase, forward_cases, laid_out, make_inputs
from .rule import GateReport, check_forward, refused

__all__ = [
    "BackwardRunner",
    "GateCase",
    "GateReport",
    "Runner",
    "backward_cases",
    "check_backward",
    "check_forward",
    "forward_cases",
    "make_gradients",
    "make_inputs",
    "run_backward_gate",
    "run_gate",
]

Runner = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
BackwardRunner = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor, Tensor]
]


def run_gate(
    spec: KernelSpec,
    config: ForwardConfig,
    runner: Runner,
    cases: Iterable[GateCase],
    *,
    device: str | torch.device = "cpu",
) -> GateReport:
    """Run a forward kernel over cases; the first case that fails ends the gate.

    Args:
        spec, config: What is under test, for the inputs and the report.
        runner: ``(q, k, v, softmax_scale) -> (out, lse)`` on tensors of ``device``.
        cases: From :func:`forward_cases`.
        device: Where inputs are made and results compared.

    Returns:
        The failing case's report, or the largest ratios over all cases. Exceptions of the runner pass through.
    """

    def judge(case: GateCase) -> GateReport:
        q, k, v = make_inputs(spec, case, device)
        originals = [x.clone() for x in (q, k, v)]
        out, lse = runner(q, k, v, case.softmax_scale)
        report = check_forward(out, lse, *originals, causal=spec.causal, softmax_scale=case.softmax_scale)
        return _unless_changed(report, (q, k, v), originals)

    return _worst(spec, config, cases, judge, "output")


def run_backward_gate(
    spec: KernelSpec,
    config: BwdConfig,
    runner: BackwardRunner,
    cases: Iterable[GateCase],
    *,
    device: str | torch.device = "cpu",
) -> GateReport:
    """Run a backward kernel over cases; the first case that fails ends the gate.

    The output and the LSE that the kernel is given are the float64 reference's, rounded to the spec's dtype and to
    float32, so that the backward is judged alone.

    Args:
        spec, config: What is under test, for the inputs and the report.
        runner: ``(q, k, v, out, lse, do, dlse, softmax_scale) -> (dq, dk, dv)`` on tensors of ``device``; dlse is None
            where the LSE has no gradient. It fills the gradients and its workspaces with NaN before the kernel runs.
        cases: From :func:`backward_cases`.
        device: Where inputs are made and results compared.

    Returns:
        The failing case's report, or the largest ratio over all cases. Exceptions of the runner pass through.
    """

    def judge(case: GateCase) -> GateReport:
        q, k, v = make_inputs(spec, case, device)
        do, dlse = make_gradients(spec, case, device)
        ref, ref_lse = attention_forward(q, k, v, causal=spec.causal, softmax_scale=case.softmax_scale)
        out, lse = laid_out(ref.to(q.dtype), case.layout, spec.alignment), ref_lse.float()
        given = [x for x in (q, k, v, out, lse, do, dlse) if x is not None]
        originals = [x.clone() for x in given]
        grads = runner(q, k, v, out, lse, do, dlse, case.softmax_scale)
        report = _unless_changed(GateReport(True, 0.0, "nowhere", 0.0, ""), given, originals)
        if not report.passed:
            return report
        return check_backward(grads, q, k, v, do, causal=spec.causal, softmax_scale=case.softmax_scale, dlse=dlse)

    return _worst(spec, config, cases, judge, "gradient")


def _unless_changed(report: GateReport, inputs: Iterable[Tensor], originals: Iterable[Tensor]) -> GateReport:
    """The report, or a refusal of a kernel that passes but wrote to its inputs."""
    if report.passed and not all(torch.equal(a, b) for a, b in zip(inputs, originals, strict=True)):
        return refused("the kernel changed an input")
    return report


def _worst(
    spec: KernelSpec,
    config: ForwardConfig | BwdConfig,
    cases: Iterable[GateCase],
    judge: Callable[[GateCase], GateReport],
    judged: str,
) -> GateReport:
    worst, where, lse_worst, count = 0.0, "nowhere", 0.0, 0
    for case in cases:
        report = judge(case)
        if not report.passed:
            text = f"{spec.slug()} {config.slug()} case {case.label()}: {report.text}"
            return GateReport(False, report.worst, f"{case.label()}, {report.where}", report.lse_worst, text)
        if report.worst >= worst:
            worst, where = report.worst, f"{case.label()}, {report.where}"
        lse_worst = max(lse_worst, report.lse_worst)
        count += 1
    text = f"passed {count} cases: {judged} {worst:.3g} of its limit at {where}"
    text += f", LSE {lse_worst:.3g}" if judged == "output" else ""
    return GateReport(count > 0, worst, where, lse_worst, text if count else "FAILED: no case was run")
