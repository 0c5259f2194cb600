"""Every primitive of the emulator against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from fa2gen.emulator import Buffer, EmulatedKernel, build, run
from tests.primitive_kernels import PROBES, Probe, probe_launch, probe_source


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return build(probe_source({name: probe.text for name, probe in PROBES.items()}, "host"))


def _run(kernel: EmulatedKernel, name: str, probe: Probe, **options: object) -> np.ndarray:
    inputs = probe.inputs.view(np.uint8).copy()
    inputs.flags.writeable = False
    out = np.full(probe.expected.size, 0 if probe.atomic else 0xFFFFFFFF, np.uint32)
    buffers = [Buffer("in", inputs, 0), Buffer("out", out.view(np.uint8), 1, output=not probe.atomic)]
    run(kernel, probe_launch(list(PROBES).index(name), probe.grid), buffers, **options)
    return out


@pytest.mark.parametrize("name", PROBES)
def test_primitive_matches_a_plain_loop(kernel: EmulatedKernel, name: str) -> None:
    for seed in range(3):
        for random_schedule in (True, False):
            PROBES[name].check(_run(kernel, name, PROBES[name], seed=seed, random_schedule=random_schedule))


def test_results_without_checks_are_the_same(kernel: EmulatedKernel) -> None:
    for name, probe in PROBES.items():
        probe.check(_run(kernel, name, probe, checks=False))


def test_a_wrong_result_fails_the_check() -> None:
    for probe in PROBES.values():
        words = np.zeros_like(probe.expected, np.uint32)
        with pytest.raises(AssertionError):
            probe.check(words)
