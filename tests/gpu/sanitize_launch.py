"""The process that compute-sanitizer watches: it only launches, and keeps what the kernels wrote.

    python -m tests.gpu.sanitize_launch JOBS RESULTS

It imports no torch, so that no other kernel is instrumented, and every array is an allocation of its own, of just its
size, so that memcheck knows where each one ends.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fa2gen import driver
from fa2gen.compile import CompiledKernel
from fa2gen.driver import tensor_maps
from fa2gen.tensor_map import BYTES, TensorMap


@dataclass(frozen=True)
class Array:
    """Contents of an allocation before the first launch; pointers to it lie ``start`` bytes behind its first byte."""

    data: bytes
    start: int = 0


def unwritten(size: int) -> Array:
    """Memory whose contents nobody may read: all bits set, NaN in every floating-point type."""
    return Array(b"\xff" * size)


@dataclass(frozen=True)
class Step:
    """One launch.

    Attributes:
        kernel: Compiled.
        grid, num_threads, params: The launch; the tensor maps at the head of ``params`` are empty, the pointers that
            follow them null.
        pointers: Names of those pointers. One that names no array stays null.
        maps: What belongs into those maps; None: nothing.
    """

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    num_threads: int
    params: bytes
    pointers: tuple[str, ...]
    maps: tuple[TensorMap | None, ...] = ()

    def bound(self, addresses: Mapping[str, int]) -> bytes:
        """The parameters with maps and pointers of these arrays."""
        maps = b"".join(
            bytes(BYTES) if each is None else tensor_maps.encode(each, addresses[each.tensor]) for each in self.maps
        )
        pointers = struct.pack(f"<{len(self.pointers)}Q", *(addresses.get(name, 0) for name in self.pointers))
        return maps + pointers + self.params[len(maps) + len(pointers) :]


@dataclass
class Job:
    """Launches in a row over the same memory, without anything that only torch can read.

    Attributes:
        steps: The launches.
        arrays: All the memory that they see, by the names of the pointers.
        outputs: Names of the arrays that are read back.
        results: What these held afterwards; None before.
    """

    steps: tuple[Step, ...]
    arrays: dict[str, Array]
    outputs: tuple[str, ...]
    results: dict[str, bytes] | None = field(default=None)


def launch_all(jobs: Sequence[Job]) -> None:
    """Run every job on device 0 and keep what it wrote."""
    driver.ensure_context(0)
    cuda = Memory()
    for job in jobs:
        kernels = [driver.load(step.kernel, 0) for step in job.steps]
        bases = {name: cuda.upload(b"\xff" * array.start + array.data) for name, array in job.arrays.items()}
        addresses = {name: bases[name] + array.start for name, array in job.arrays.items()}
        for step, kernel in zip(job.steps, kernels, strict=True):
            kernel.launch(step.grid, (step.num_threads, 1, 1), step.bound(addresses), 0)
        cuda.synchronize()
        job.results = {name: cuda.download(addresses[name], len(job.arrays[name].data)) for name in job.outputs}
        cuda.free_all()
        for kernel in kernels:
            kernel.unload()


class Memory:
    """Device memory through libcuda, an allocation for each array."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        address, size = ctypes.c_uint64, ctypes.c_size_t
        self._allocate, self._free = library.cuMemAlloc_v2, library.cuMemFree_v2
        self._to_device, self._to_host = library.cuMemcpyHtoD_v2, library.cuMemcpyDtoH_v2
        self._synchronize = library.cuCtxSynchronize
        self._allocate.argtypes = (ctypes.POINTER(address), size)
        self._free.argtypes = (address,)
        self._to_device.argtypes = (address, ctypes.c_char_p, size)
        self._to_host.argtypes = (ctypes.c_char_p, address, size)
        self._allocated: list[int] = []

    def upload(self, data: bytes) -> int:
        pointer = ctypes.c_uint64()
        self._check(self._allocate(ctypes.byref(pointer), len(data)), "allocate")
        self._allocated.append(pointer.value)
        self._check(self._to_device(pointer.value, data, len(data)), "copy to the device")
        return pointer.value

    def download(self, pointer: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self._check(self._to_host(data, pointer, size), "copy from the device")
        return data.raw

    def synchronize(self) -> None:
        self._check(self._synchronize(), "wait for the kernels")

    def free_all(self) -> None:
        while self._allocated:
            self._check(self._free(self._allocated.pop()), "free")

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"cannot {what}: CUDA error {status}")


def main(jobs_path: str, results_path: str) -> None:
    jobs = pickle.loads(Path(jobs_path).read_bytes())
    launch_all(jobs)
    Path(results_path).write_bytes(pickle.dumps([job.results for job in jobs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
