"""Every primitive of sm_90a in the emulator against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from fa2gen.emulator import Buffer, Counters, EmulatedKernel, build, run
from tests.sm90_kernels import MAPS, POINTERS, Sm90Probe, shapes_of, sm90_source
from tests.sm90_probes import SM90_PROBES
from tests.sm90_small_attention import ROUNDS, small_attention
from tests.sm90_wgmma_kernels import wgmma_probes


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return build(sm90_source({name: probe.text for name, probe in SM90_PROBES.items()}, "host"))


def run_probe(kernel: EmulatedKernel, probe: Sm90Probe, which: int, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """What a probe leaves at ``p.out`` and in ``o``."""
    return _run_probe(kernel, probe, which, **options)[:2]


def _run_probe(
    kernel: EmulatedKernel, probe: Sm90Probe, which: int, **options: object
) -> tuple[np.ndarray, np.ndarray, Counters]:
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
    counters = run(kernel, probe.launch(which, kernel.source.num_threads), buffers, **options)
    if probe.grid > 1:  # every block has drawn, and the last number closes
        assert tickets[0] == 0
        assert unset.all()
    return out, memory["o"].view(np.uint16), counters


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


def test_several_os_threads_share_the_tickets(kernel: EmulatedKernel) -> None:
    probe, which = SM90_PROBES["tickets"], list(SM90_PROBES).index("tickets")
    for seed in range(4):
        for threads in (1, 2, 4):
            probe.check(*run_probe(kernel, probe, which, seed=seed, threads=threads))


def test_results_without_checks_are_the_same(kernel: EmulatedKernel, wgmma_kernel: EmulatedKernel) -> None:
    for program, table in ((kernel, SM90_PROBES), (wgmma_kernel, WGMMA_PROBES[wgmma_kernel.source.spec.dtype])):
        for which, (name, probe) in enumerate(table.items()):
            if program is kernel or name in ("accumulate", "two in flight", "stmatrix", "small attention"):
                for lazy in (True, False):
                    probe.check(*run_probe(program, probe, which, checks=False, lazy_wgmma=lazy))


def test_counters(kernel: EmulatedKernel, wgmma_kernel: EmulatedKernel) -> None:
    probes = WGMMA_PROBES[wgmma_kernel.source.spec.dtype]
    counters = _run_probe(wgmma_kernel, probes["small attention"], list(probes).index("small attention"))[2]
    assert (counters.wgmma, counters.tma_load, counters.tma_store) == (2 * ROUNDS * 8, 2 + ROUNDS, 2)
    assert (counters.stmatrix, counters.stmatrix_conflicts) == (8 * 4, 0)
    # Rows of four matrices follow each other, 16 bytes each: eight of them lie in different banks.
    counters = _run_probe(kernel, SM90_PROBES["stmatrix"], list(SM90_PROBES).index("stmatrix"))[2]
    assert (counters.stmatrix, counters.stmatrix_conflicts) == (12, 0)


def test_when_a_product_reads_follows_the_seed(wgmma_kernel: EmulatedKernel) -> None:
    """An operand that is overwritten in flight: without checks one mode reads the old one, the other the new one."""
    probe = WGMMA_PROBES[wgmma_kernel.source.spec.dtype]["small attention"]
    meet, store = "bar_sync(1 + group, 128);", "if (round == 0) st_shared(q + 16 * (tid % 128), 0u);"
    text = small_attention(commit_s=f"wgmma_commit(); {meet} {store} {meet}")
    element = wgmma_kernel.source.spec.dtype
    late = build(sm90_source({"late": text}, "host", element, probe.shapes))
    even, odd = (run_probe(late, probe, 0, checks=False, seed=seed)[1] for seed in (2, 3))
    assert np.any(even != odd)
    for lazy in (True, False):
        forced = run_probe(late, probe, 0, checks=False, seed=2, lazy_wgmma=lazy)[1]
        assert np.array_equal(forced, odd if lazy else even)


def test_a_wrong_result_fails_the_check() -> None:
    for probe in [*SM90_PROBES.values(), *WGMMA_PROBES["bf16"].values()]:
        o = probe.o.values.view(np.uint16) if probe.o_after is None else probe.o_after
        with pytest.raises(AssertionError):
            probe.check(probe.out + np.uint32(1), o)
        with pytest.raises(AssertionError):
            probe.check(probe.out, o + np.uint16(1))
