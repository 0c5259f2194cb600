"""The jobs that ``tests/gpu/sanitize.py`` hands to a GPU, here: no access leaves an allocation, results are right.

The emulator sees only the parameters and the arrays that a GPU would get.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fa2gen import driver
from fa2gen.codegen import kernels_of, param_struct, render_kernel
from fa2gen.compile import CompiledKernel, ResourceUsage
from fa2gen.driver import tensor_maps
from fa2gen.emulator import Buffer, build, run
from fa2gen.errors import EmulatorError
from fa2gen.hardware import get_gpu
from fa2gen.launch import Launch
from fa2gen.tensor_map import BYTES
from tests.gpu import sanitize_jobs, sanitize_launch
from tests.gpu.sanitize_jobs import Case, Prepared


class HostMemory:
    """Stands in for the GPU's memory: an address is a name of an array."""

    def __init__(self) -> None:
        self.arrays: dict[int, np.ndarray] = {}

    def upload(self, data: bytes) -> int:
        address = (len(self.arrays) + 1) << 32
        self.arrays[address] = np.frombuffer(bytearray(data), np.uint8)
        return address

    def download(self, pointer: int, size: int) -> bytes:
        base, start = pointer >> 32 << 32, pointer % (1 << 32)
        return self.arrays[base][start : start + size].tobytes()

    def synchronize(self) -> None:
        pass

    def free_all(self) -> None:
        self.arrays.clear()


@dataclass
class EmulatedOnGpu:
    """Stands in for a loaded kernel."""

    compiled: CompiledKernel
    memory: HostMemory

    def launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], params: bytes, stream: int) -> None:
        source = self.compiled.source
        struct_of = param_struct(source.kernel, source.config.family)
        words = np.frombuffer(params, np.uint64).copy()
        pointers = {name: struct_of.pointers_at // 8 + i for i, name in enumerate(struct_of.pointers)}
        maps = {name.removesuffix("_map"): i * BYTES // 8 for i, name in enumerate(struct_of.tensor_maps)}
        pointers, maps = ({name: word for name, word in at.items() if words[word]} for at in (pointers, maps))
        buffers = []
        for name in {**maps, **pointers}:
            at = [places.get(name, -1) for places in (pointers, maps)]
            # Where both lead to an array they lead to the same place.
            (address,) = {int(words[word]) for word in at if word >= 0}
            data = self.memory.arrays[address >> 32 << 32]
            buffers.append(Buffer(name, data, *at, start=address % (1 << 32)))
        words[[*pointers.values(), *maps.values()]] = 0
        launch = Launch(source.kernel, grid, block[0], source.smem_bytes, words.tobytes())
        run(build(render_kernel(source.spec, source.config, "host", source.kernel)), launch, buffers)

    def unload(self) -> None:
        pass


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    memory = HostMemory()
    monkeypatch.setattr(sanitize_launch, "Memory", lambda: memory)
    monkeypatch.setattr(driver, "ensure_context", lambda index: None)
    monkeypatch.setattr(driver, "load", lambda kernel, index: EmulatedOnGpu(kernel, memory))
    monkeypatch.setattr(tensor_maps, "encode", lambda map, address: struct.pack("<Q", address) + map.emulated()[8:])
    return memory


def _jobs(case: Case) -> list[Prepared]:
    gpu, kernels = get_gpu("h200"), {}
    for name in kernels_of(case.spec.kind):
        source = render_kernel(case.spec, case.config, kernel=name)
        usage = ResourceUsage(1, 0, 0, 0, 0, 0)
        kernels[name] = CompiledKernel(source, gpu.target, b"", usage, name, False, 0.0, "")
    return sanitize_jobs.prepared_jobs(case, sanitize_jobs.CASES.index(case), kernels, gpu.l2_bytes)


# One of each kind runs by default: the smallest with a pointer that is not aligned, with repairs by TMA's kernels, and
# with all workspaces.
_FEW = {*(sanitize_jobs.FORWARD[i] for i in (8, 11, 17)), *(sanitize_jobs.BACKWARD[i] for i in (1, 5))}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in _FEW else [pytest.mark.slow]) for case in sanitize_jobs.CASES],
    ids=lambda case: f"{case.spec.slug()}-{case.config.slug()}",
)
def test_jobs_run(case: Case, memory: HostMemory) -> None:
    prepared = _jobs(case)
    sanitize_launch.launch_all([item.job for item in prepared])
    assert sanitize_jobs.wrong_results(prepared, [item.job.results for item in prepared]) == []
    assert not memory.arrays


@pytest.mark.parametrize("name", ["q", "dout", "lse", "dq", "dk", "dq_accum", "delta", "semaphores"])
def test_arrays_have_no_room_to_spare(name: str, memory: HostMemory) -> None:
    """Two bytes, or a float, less, and an access leaves the array."""
    (item,) = _jobs(sanitize_jobs.BACKWARD[1])
    array = item.job.arrays[name]
    unit = 2 if item.tensors.get(name, torch.empty(0)).dtype == torch.bfloat16 else 4
    item.job.arrays[name] = sanitize_launch.Array(array.data[:-unit])
    with pytest.raises(EmulatorError, match=name):
        sanitize_launch.launch_all([item.job])
