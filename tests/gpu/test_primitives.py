"""The primitives' PTX on a GPU gives what the emulator is held to: the same table of kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa2gen import compile as compiler
from fa2gen import driver
from tests.primitive_kernels import NUM_THREADS, PROBES, probe_launch, probe_source


@pytest.fixture(scope="module")
def loaded() -> driver.LoadedKernel:
    major, minor = torch.cuda.get_device_capability()
    source = probe_source({name: probe.text for name, probe in PROBES.items()}, "cuda")
    return driver.load(compiler.compile_kernel(source, f"sm_{major}{minor}"), torch.cuda.current_device())


@pytest.mark.parametrize("name", PROBES)
def test_primitive_on_the_gpu(loaded: driver.LoadedKernel, name: str) -> None:
    probe = PROBES[name]
    inputs = torch.from_numpy(probe.inputs.view(np.int32).copy()).cuda()
    out = torch.full((probe.expected.size,), 0 if probe.atomic else -1, dtype=torch.int32, device="cuda")
    launch = probe_launch(list(PROBES).index(name), probe.grid)
    pointers = np.array([inputs.data_ptr(), out.data_ptr()], np.uint64).tobytes()
    torch.cuda.synchronize()
    loaded.launch(launch.grid, (NUM_THREADS, 1, 1), pointers + launch.params[len(pointers) :], 0)
    torch.cuda.synchronize()
    probe.check(out.cpu().numpy().view(np.uint32))
