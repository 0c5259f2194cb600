"""Runs kernels with a seeded bug through the gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from fa2gen.codegen import KernelSource, render_kernel
from fa2gen.emulator import launches, run_forward
from fa2gen.errors import EmulatorError
from fa2gen.gate import forward_cases, run_gate
from fa2gen.spec import Config, FwdConfig, KernelSpec

Mutate = Callable[[str, str], None]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Replaces a piece of every kernel's text, which must be there exactly once, in the emulator."""

    def replace(old: str, new: str) -> None:
        def render(spec: KernelSpec, config: Config, platform: str, kernel: str) -> KernelSource:
            source = render_kernel(spec, config, platform, kernel)
            assert source.text.count(old) == 1, f"{source.text.count(old)} places read {old!r}"
            return dataclasses.replace(source, text=source.text.replace(old, new))

        monkeypatch.setattr(launches, "render_kernel", render)

    return replace


@pytest.fixture
def caught_by_gate(mutate: Mutate) -> Callable[..., tuple[str, str]]:
    """What catches a bug: the emulator's name for it, ``wrong numbers`` or ``nothing``; and the report."""

    def caught(spec: KernelSpec, config: FwdConfig, old: str, new: str, timeout: float = 60.0) -> tuple[str, str]:
        def runner(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return run_forward(spec, config, q, k, v, softmax_scale=softmax_scale, timeout=timeout)[:2]

        mutate(old, new)
        try:
            # Small cases first: the gate ends with the first that fails.
            cases = sorted(forward_cases(spec, config, budget="quick"), key=lambda case: case.problem.flops(spec))
            report = run_gate(spec, config, runner, cases)
        except EmulatorError as error:
            return error.name, str(error)
        return "nothing" if report.passed else "wrong numbers", report.text

    return caught
