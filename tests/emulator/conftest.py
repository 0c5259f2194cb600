"""How kernels are built for these tests, and what runs those with a seeded bug through the gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from fa2gen.codegen import KernelSource, render_kernel
from fa2gen.emulator import builder, launches, run_backward, run_forward
from fa2gen.errors import EmulatorError
from fa2gen.gate import GateCase, GateReport, backward_cases, forward_cases, run_backward_gate, run_gate
from fa2gen.spec import BwdConfig, Config, FwdConfig, KernelSpec

Mutate = Callable[..., None]

# Test modules whose kernels are built as a user's are.
USERS_BUILDS = {"test_build_and_run.py", "test_gate.py", "test_verify_backward.py"}


@pytest.fixture(autouse=True, scope="module")
def quick_builds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Builds kernels with -O0: most run once or twice, and a forward kernel takes 0.4 s of a core so, 1.4 s with -O1.

    Not those of ``USERS_BUILDS``, among them two dozen cases of each kernel of a covering set.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in USERS_BUILDS:
            patch.setattr(builder, "KERNEL_FLAGS", (*builder.KERNEL_FLAGS, "-O0"))
        yield


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Replaces a piece of a kernel's text, which must be there exactly once, in the emulator."""

    def replace(old: str, new: str, kernel: str | None = None) -> None:
        """``kernel``: which of a kind's kernels; default: the main one."""

        def render(spec: KernelSpec, config: Config, platform: str, name: str) -> KernelSource:
            source = render_kernel(spec, config, platform, name)
            if name != (kernel or spec.kind):
                return source
            assert source.text.count(old) == 1, f"{source.text.count(old)} places read {old!r}"
            return dataclasses.replace(source, text=source.text.replace(old, new))

        monkeypatch.setattr(launches, "render_kernel", render)

    return replace


def _caught(
    spec: KernelSpec, cases: Iterable[GateCase], gate: Callable[[list[GateCase]], GateReport]
) -> tuple[str, str]:
    # Small cases first: the gate ends with the first that fails.
    in_order = sorted(cases, key=lambda case: case.problem.flops(spec))
    try:
        report = gate(in_order)
    except EmulatorError as error:
        return error.name, str(error)
    return "nothing" if report.passed else "wrong numbers", report.text


@pytest.fixture
def caught_by_gate(mutate: Mutate) -> Callable[..., tuple[str, str]]:
    """What catches a bug: the emulator's name for it, ``wrong numbers`` or ``nothing``; and the report."""

    def caught(spec: KernelSpec, config: FwdConfig, old: str, new: str, timeout: float = 60.0) -> tuple[str, str]:
        def runner(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return run_forward(spec, config, q, k, v, softmax_scale=softmax_scale, timeout=timeout)[:2]

        mutate(old, new)
        cases = forward_cases(spec, config, budget="quick")
        return _caught(spec, cases, lambda in_order: run_gate(spec, config, runner, in_order))

    return caught


@pytest.fixture
def caught_by_backward_gate(mutate: Mutate) -> Callable[..., tuple[str, str]]:
    """Likewise for a bug in one of the backward's kernels."""

    def caught(spec: KernelSpec, config: BwdConfig, kernel: str, old: str, new: str) -> tuple[str, str]:
        def runner(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor,
            do: torch.Tensor,
            dlse: torch.Tensor | None,
            softmax_scale: float,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return run_backward(spec, config, q, k, v, out, lse, do, softmax_scale=softmax_scale, dlse=dlse)[:3]

        mutate(old, new, kernel)
        cases = backward_cases(spec, config, budget="quick")
        return _caught(spec, cases, lambda in_order: run_backward_gate(spec, config, runner, in_order))

    return caught
