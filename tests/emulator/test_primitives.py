"""Every primitive of the emulator against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from fa2gen.emulator import Buffer, EmulatedKernel, build, run
from tests import mbarrier_kernels
from tests.backward_primitives import CONVERSION_PROBES, REDUCTION_PROBES, VECTOR_PROBES
from tests.mbarrier_kernels import MBARRIER_PROBES
from tests.primitive_kernels import PROBES, Probe, probe_launch, probe_source

BACKWARD_PROBES = {**REDUCTION_PROBES, **VECTOR_PROBES, **CONVERSION_PROBES}


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return build(probe_source({name: probe.text for name, probe in PROBES.items()}, "host"))


@pytest.fixture(scope="module")
def mbarrier_kernel() -> EmulatedKernel:
    bodies = {name: probe.text for name, probe in MBARRIER_PROBES.items()}
    return build(probe_source(bodies, "host", mbarrier_kernels.NUM_THREADS))


@pytest.fixture(scope="module")
def backward_kernel() -> EmulatedKernel:
    return build(probe_source({name: probe.text for name, probe in BACKWARD_PROBES.items()}, "host"))


def _run(kernel: EmulatedKernel, table: dict[str, Probe], name: str, **options: object) -> np.ndarray:
    probe = table[name]
    inputs = probe.inputs.view(np.uint8).copy()
    inputs.flags.writeable = False
    out = np.full(probe.expected.size, 0 if probe.atomic else 0xFFFFFFFF, np.uint32)
    buffers = [Buffer("in", inputs, 0), Buffer("out", out.view(np.uint8), 1, output=not probe.atomic)]
    launch = probe_launch(list(table).index(name), probe.grid, kernel.source.num_threads)
    run(kernel, launch, buffers, **options)
    return out


@pytest.mark.parametrize("name", PROBES)
def test_primitive_matches_a_plain_loop(kernel: EmulatedKernel, name: str) -> None:
    for seed in range(3):
        for random_schedule in (True, False):
            PROBES[name].check(_run(kernel, PROBES, name, seed=seed, random_schedule=random_schedule))


@pytest.mark.parametrize("name", MBARRIER_PROBES)
def test_mbarriers_order_what_they_should(mbarrier_kernel: EmulatedKernel, name: str) -> None:
    for seed in range(8):
        for random_schedule in (True, False):
            out = _run(mbarrier_kernel, MBARRIER_PROBES, name, seed=seed, random_schedule=random_schedule)
            MBARRIER_PROBES[name].check(out)


@pytest.mark.parametrize("name", BACKWARD_PROBES)
def test_primitives_of_the_backward(backward_kernel: EmulatedKernel, name: str) -> None:
    for seed in range(4):
        for threads in (1, 2, 4):
            out = _run(backward_kernel, BACKWARD_PROBES, name, seed=seed, random_schedule=seed < 2, threads=threads)
            BACKWARD_PROBES[name].check(out)


def test_results_without_checks_are_the_same(
    kernel: EmulatedKernel, mbarrier_kernel: EmulatedKernel, backward_kernel: EmulatedKernel
) -> None:
    tables = ((kernel, PROBES), (mbarrier_kernel, MBARRIER_PROBES), (backward_kernel, BACKWARD_PROBES))
    for program, table in tables:
        for name, probe in table.items():
            probe.check(_run(program, table, name, checks=False))


def test_a_wrong_result_fails_the_check() -> None:
    for probe in [*PROBES.values(), *MBARRIER_PROBES.values(), *BACKWARD_PROBES.values()]:
        words = np.zeros_like(probe.expected, np.uint32)
        with pytest.raises(AssertionError):
            probe.check(words)
