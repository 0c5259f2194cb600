"""Every primitive of sm_90a in the emulator against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from fa2gen.emulator import Buffer, EmulatedKernel, build, run
from tests.sm90_kernels import MAPS, POINTERS, Sm90Probe, shapes_of, sm90_source
from tests.sm90_probes import SM90_PROBES
from tests.sm90_wgmma_kernels import wgmma_probes


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return build(sm90_source({name: probe.text for name, probe in SM90_PROBES.items()}, "host"))


def run_probe(kernel: EmulatedKernel, probe: Sm90Probe, which: int, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """What a probe leaves at ``p.out`` and in ``o``."""
    out = np.zeros(probe.out.size, np.uint32)
    memory = {name: getattr(probe, name).values.copy() for name in MAPS} | {"in": probe.inputs.copy()}
    for name in ("a", "b", "in"):
        memory[name].flags.writeable = False
    buffers = [Buffer(name, data.reshape(-1).view(np.uint8), POINTERS[name]) for name, data in memory.items()]
    buffers.append(Buffer("out", out.view(np.uint8), POINTERS["out"], output=True))
    # A word of any value, even none.
    tickets = np.array([0x7B1D2F5300000005], np.uint64)
    unset = np.zeros(4, np.bool_)
    buffers.append(Buffer("tickets", tickets.view(np.uint8), POINTERS["tickets"], initialised=unset))
    run(kernel, probe.launch(which, kernel.source.num_threads), buffers, **options)
    return out, memory["o"].view(np.uint16)


@pytest.mark.parametrize("name", SM90_PROBES)
def test_primitive_matches_a_plain_loop(kernel: EmulatedKernel, name: str) -> None:
    for seed in range(3):
        for random_schedule in (True, False):
            probe, which = SM90_PROBES[name], list(SM90_PROBES).index(name)
            probe.check(*run_probe(kernel, probe, which, seed=seed, random_schedule=random_schedule))


ELEMENTS = ("bf16", "fp16")
WGMMA_PROBES = {element: wgmma_probes(element) for element in ELEMENTS}


@pytest.fixture(scope="module", params=ELEMENTS)
def wgmma_kernel(request: pytest.FixtureRequest) -> EmulatedKernel:
    probes = WGMMA_PROBES[request.param]
    bodies = {name: probe.text for name, probe in probes.items()}
    return build(sm90_source(bodies, "host", request.param, shapes_of(probes)))


@pytest.mark.parametrize("name", WGMMA_PROBES["bf16"])
def test_products_are_right(wgmma_kernel: EmulatedKernel, name: str) -> None:
    probes = WGMMA_PROBES[wgmma_kernel.source.spec.dtype]
    probe, which = probes[name], list(probes).index(name)
    for seed in range(2):
        for lazy in (True, False):
            probe.check(*run_probe(wgmma_kernel, probe, which, seed=seed, lazy_wgmma=lazy))
