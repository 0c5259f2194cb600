"""The primitives' PTX on a GPU gives what the emulator is held to: the same table of kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa2gen import compile as compiler
from fa2gen import driver
from tests import mbarrier_kernels
from tests.backward_primitives import CONVERSION_PROBES, REDUCTION_PROBES, VECTOR_PROBES
from tests.mbarrier_kernels import MBARRIER_PROBES
from tests.primitive_kernels import NUM_THREADS, PROBES, Probe, probe_launch, probe_source


def _loaded(table: dict[str, Probe], num_threads: int) -> driver.LoadedKernel:
    major, minor = torch.cuda.get_device_capability()
    source = probe_source({name: probe.text for name, probe in table.items()}, "cuda", num_threads)
    return driver.load(compiler.compile_kernel(source, f"sm_{major}{minor}"), torch.cuda.current_device())


@pytest.fixture(scope="module")
def loaded() -> driver.LoadedKernel:
    return _loaded(PROBES, NUM_THREADS)


@pytest.fixture(scope="module")
def mbarriers() -> driver.LoadedKernel:
    return _loaded(MBARRIER_PROBES, mbarrier_kernels.NUM_THREADS)


BACKWARD_PROBES = {**REDUCTION_PROBES, **CONVERSION_PROBES}


@pytest.fixture(scope="module")
def backward() -> driver.LoadedKernel:
    return _loaded(BACKWARD_PROBES, NUM_THREADS)


def _run(kernel: driver.LoadedKernel, table: dict[str, Probe], name: str, num_threads: int) -> np.ndarray:
    probe = table[name]
    inputs = torch.from_numpy(probe.inputs.view(np.int32).copy()).cuda()
    out = torch.full((probe.expected.size,), 0 if probe.atomic else -1, dtype=torch.int32, device="cuda")
    launch = probe_launch(list(table).index(name), probe.grid, num_threads)
    pointers = np.array([inputs.data_ptr(), out.data_ptr()], np.uint64).tobytes()
    torch.cuda.synchronize()
    kernel.launch(launch.grid, (num_threads, 1, 1), pointers + launch.params[len(pointers) :], 0)
    torch.cuda.synchronize()
    return out.cpu().numpy().view(np.uint32)


@pytest.mark.parametrize("name", PROBES)
def test_primitive_on_the_gpu(loaded: driver.LoadedKernel, name: str) -> None:
    PROBES[name].check(_run(loaded, PROBES, name, NUM_THREADS))


@pytest.mark.parametrize("name", MBARRIER_PROBES)
def test_mbarriers_on_the_gpu(mbarriers: driver.LoadedKernel, name: str) -> None:
    for _ in range(20):
        MBARRIER_PROBES[name].check(_run(mbarriers, MBARRIER_PROBES, name, mbarrier_kernels.NUM_THREADS))


@pytest.mark.parametrize("name", BACKWARD_PROBES)
def test_primitive_of_the_backward_on_the_gpu(backward: driver.LoadedKernel, name: str) -> None:
    for _ in range(20):
        BACKWARD_PROBES[name].check(_run(backward, BACKWARD_PROBES, name, NUM_THREADS))


@pytest.mark.parametrize("name", VECTOR_PROBES)
def test_vector_additions_on_the_gpu(name: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("vector additions need compute capability 9.0")
    VECTOR_PROBES[name].check(_run(_loaded(VECTOR_PROBES, NUM_THREADS), VECTOR_PROBES, name, NUM_THREADS))
