"""Loading a cubin on a device and launching it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..compile import CompiledKernel
from ..errors import LaunchError
from ..hardware import supported_compute_capabilities
from .device import device_count, device_info, require_device
from .libcuda import (
    MAX_DYNAMIC_SHARED_SIZE_BYTES,
    REFUSED_IMAGE,
    active_context,
    check,
    current_context,
    error_text,
    is_sticky,
    launch_function,
    libcuda,
    parameter_offset,
    primary_context,
)

_Bytes, _Handle, _byref = ctypes.c_char_p, ctypes.c_void_p, ctypes.byref

#: Raw handles below it are the legacy default stream's: the null stream's 0, and cudaStreamLegacy.
_FIRST_OTHER_STREAM = 2

_Dim3 = tuple[int, int, int]


def load(compiled: CompiledKernel, device_index: int = 0) -> LoadedKernel:
    """Loads a kernel on a device, ready to launch on any stream, also during CUDA-graph capture.

    Call it outside capture: loading may synchronise. Kernels stay loaded until :meth:`LoadedKernel.unload`, or until
    the process ends; losing the last reference does not unload: that too may synchronise, at a moment nobody chose.

    Raises:
        LaunchError: No GPU can be used, the cubin is for another architecture, or the driver refuses it.
        ArgumentError: There is no device of that index.
    """
    require_device(device_index)
    capability = device_info(device_index).compute_capability
    if not _runs_on(compiled.target, capability):
        known = ", ".join(f"{major}.{minor}" for major, minor in supported_compute_capabilities())
        raise LaunchError(
            f"kernel {compiled.source.entry} is compiled for {compiled.target}, which device {device_index} "
            f"(compute capability {capability[0]}.{capability[1]}) does not run; fa2gen compiles for compute "
            f"capability {known}, each of which runs on later ones of the same major version too"
        )
    return LoadedKernel(compiled, device_index)


def _runs_on(target: str, capability: tuple[int, int]) -> bool:
    """A cubin runs on its own compute capability and on later minor ones; with a suffix (sm_90a) on its own only."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", target)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3] == "a":
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def _old_driver_hint(compiled: CompiledKernel, device_index: int, status: int) -> str:
    """What to do if the driver refused a cubin of a newer CUDA release than it knows; empty if that is not why."""
    made_by = re.match(r"(\d+)\.(\d+)\.", compiled.nvcc_build_id)
    if status not in REFUSED_IMAGE or made_by is None:
        return ""
    nvcc, driver = (int(made_by[1]), int(made_by[2])), device_info(device_index).cuda_version
    if nvcc <= driver:
        return ""
    made, known = (".".join(map(str, version)) for version in (nvcc, driver))
    return (
        f"; it was compiled by the nvcc of CUDA {made}, and this driver knows CUDA {known} only: install a driver for "
        f"CUDA {made}, or an nvcc of CUDA {known} or older, and name it in FA2GEN_NVCC"
    )


class LoadedKernel:
    """A kernel on one device; made by :func:`load`. Threads may share it.

    The cubin is loaded twice. PyCUDA's copy serves the default stream, at 0.4 µs of Python a launch. PyCUDA launches on
    no stream of another library and tells no handle of its functions, so a second copy, loaded through libcuda itself,
    serves torch's other streams. Forking to a stream of PyCUDA's own and joining it instead costs 18 µs a launch.

    Attributes:
        compiled: What was loaded.
        device_index: Where.
    """

    def __init__(self, compiled: CompiledKernel, device_index: int) -> None:
        source = compiled.source
        self.compiled = compiled
        self.device_index = device_index
        self._smem = source.smem_bytes
        self._context = primary_context(device_index)
        self._check_context = device_count() > 1
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        what = f"load kernel {source.entry} on device {device_index}"
        with active_context(self._context):
            cuda = libcuda()
            status = cuda.cuModuleLoadData(ctypes.byref(self._module), compiled.cubin)
            check(status, what, _old_driver_hint(compiled, device_index, status))
            try:
                name = source.entry.encode()
                check(cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, name), what)
                status = cuda.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_SIZE_BYTES, self._smem)
                check(status, f"{what} with {self._smem} bytes of shared memory a block")
                # What PyCUDA, which hands over all parameters in one buffer, must put before the struct.
                self._lead = bytes(parameter_offset(self._function))
                self._pycuda_module, self._pycuda_launch = _load_pycuda(compiled, device_index, what)
            except BaseException:
                cuda.cuModuleUnload(self._module)
                raise
        self._cu_launch = launch_function()
        self._pycuda_error = _pycuda_error()
        _loaded.add(self)

    def launch(self, grid: _Dim3, block: _Dim3, params: bytes, stream: int = 0) -> None:
        """Launches; returns without waiting for the kernel.

        Args:
            grid: Blocks in x, y, z.
            block: Threads in x, y, z.
            params: The parameter struct, packed as the kernel declares it, with all its padding.
            stream: Raw CUDA stream handle (``torch.cuda.current_stream().cuda_stream``). 0 and 1 are the legacy default
                stream, 2 is the per-thread default stream.

        Raises:
            LaunchError: The driver refused. Errors of a kernel that runs show at a later call; the message then says
                that the process cannot go on.
        """
        self.launcher(grid, block)(params, stream)

    def launcher(self, grid: _Dim3, block: _Dim3) -> Callable[[bytes, int], None]:
        """:meth:`launch` with this grid and block, for calls that repeat: a function of ``params`` and ``stream``.

        On the default stream a call of it takes 0.44 µs. PyCUDA itself takes 0.36 of these, and 0.53 where it is given
        the sizes of 1 too.
        """
        short_grid, short_block = _without_ones(grid), _without_ones(block)
        function, smem, lead, pycuda_error = self._function, self._smem, self._lead, self._pycuda_error

        # What unload() replaces is looked up at every call.
        def launch(params: bytes, stream: int) -> None:
            if stream < _FIRST_OTHER_STREAM:
                try:
                    self._pycuda_launch(short_grid, short_block, lead + params, smem, None)
                    return
                except pycuda_error as refused:
                    error = str(refused)
            else:
                # kernelParams is an array of one pointer, to the bytes of the one parameter struct.
                pointers = _byref(_Bytes(params))
                status = self._cu_launch(function, *grid, *block, smem, _Handle(stream), pointers, None)
                if not status:
                    return
                error = error_text(status)
            self._launch_again(error, grid, block, params, stream)

        def launch_there(params: bytes, stream: int) -> None:
            if current_context() == self._context:
                launch(params, stream)
            else:
                with active_context(self._context):
                    launch(params, stream)

        return launch_there if self._check_context else launch

    def _launch_again(self, error: str, grid: _Dim3, block: _Dim3, params: bytes, stream: int) -> None:
        """Second attempt, in case another context is to blame. Looking first would cost every launch 0.5 µs."""
        current = current_context()
        if current and current != self._context:
            with active_context(self._context):
                self.launch(grid, block, params, stream)
            return
        # A new thread. It keeps the context, as after any call of torch or of the CUDA runtime on the only device.
        if current or libcuda().cuCtxSetCurrent(self._context):
            raise LaunchError(self._failure(error, grid, block, stream))
        self.launch(grid, block, params, stream)

    def _failure(self, error: str, grid: _Dim3, block: _Dim3, stream: int) -> str:
        launched = f"kernel {self.compiled.source.entry} on device {self.device_index}"
        if is_sticky(error):
            return (
                f"{launched} cannot be launched, because this kernel or one before it failed while it ran: {error}. "
                "CUDA is lost to this process: start it again"
            )
        return (
            f"{launched} cannot be launched: {error} (grid {grid}, block {block}, {self._smem} bytes of shared memory, "
            f"stream {stream:#x})"
        )

    def blocks_per_sm(self) -> int:
        """Blocks of this kernel that an SM holds at a time, by the driver's account."""
        blocks = ctypes.c_int()
        with active_context(self._context):
            status = libcuda().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(blocks), self._function, self.compiled.source.num_threads, self._smem
            )
        check(status, f"compute the occupancy of kernel {self.compiled.source.entry}")
        return blocks.value

    def unload(self) -> None:
        """Frees the kernel's device memory. It must not be running or part of a graph, and cannot be launched again."""
        if self not in _loaded:
            return
        _loaded.discard(self)
        self._cu_launch = _refuse_launch
        with active_context(self._context):
            self._drop_pycuda()
            check(libcuda().cuModuleUnload(self._module), f"unload kernel {self.compiled.source.entry}")

    def _drop_pycuda(self) -> None:
        """Lets PyCUDA unload its copy. It does so only in the thread that made its context, or with that pushed."""
        self._pycuda_launch = _refuse_launch
        with _pushed(self.device_index):
            self._pycuda_module = None


def row_launcher(*steps: tuple[LoadedKernel, _Dim3, _Dim3]) -> Callable[[tuple[bytes, ...], int], None]:
    """Three launches in a row: :meth:`LoadedKernel.launcher` for a tuple of their ``params``.

    In one function they take 2 µs less where the caches hold other code, as in a backward.

    Args:
        steps: Kernel, grid and block of each.
    """
    launch_a, launch_b, launch_c = (kernel.launcher(grid, block) for kernel, grid, block in steps)
    (kernel_a, grid_a, block_a), (kernel_b, grid_b, block_b), (kernel_c, grid_c, block_c) = (
        (kernel, _without_ones(grid), _without_ones(block)) for kernel, grid, block in steps
    )
    smem_a, smem_b, smem_c = (kernel._smem for kernel, _, _ in steps)
    lead_a, lead_b, lead_c = (kernel._lead for kernel, _, _ in steps)
    pycuda_error, check_context = _pycuda_error(), any(kernel._check_context for kernel, _, _ in steps)

    def launch(params: tuple[bytes, ...], stream: int) -> None:
        params_a, params_b, params_c = params
        launched = 0
        if stream < _FIRST_OTHER_STREAM and not check_context:
            # What is refused is tried again alone, which sees to the context, or tells what is wrong.
            try:
                kernel_a._pycuda_launch(grid_a, block_a, lead_a + params_a, smem_a, None)
                launched = 1
                kernel_b._pycuda_launch(grid_b, block_b, lead_b + params_b, smem_b, None)
                launched = 2
                kernel_c._pycuda_launch(grid_c, block_c, lead_c + params_c, smem_c, None)
                return
            except pycuda_error:
                pass
        if launched < 1:
            launch_a(params_a, stream)
        if launched < 2:
            launch_b(params_b, stream)
        launch_c(params_c, stream)

    return launch


_loaded: set[LoadedKernel] = set()


@atexit.register
def _drop_all_of_pycuda() -> None:
    """PyCUDA complains on stderr about modules that it meets only when the interpreter is taken apart."""
    for kernel in _loaded:
        # A context that a failed kernel has ruined refuses this too; the end of the process frees everything anyway.
        with contextlib.suppress(Exception):
            kernel._drop_pycuda()


def _without_ones(sizes: _Dim3) -> tuple[int, ...]:
    """What PyCUDA takes for these: it reads each number given to it and completes them with ones."""
    return sizes[:1] if sizes[1:] == (1, 1) else sizes


def _refuse_launch(*_: object) -> None:
    raise LaunchError("a kernel that was unloaded cannot be launched")


@functools.cache
def _pycuda_error() -> type[Exception]:
    import pycuda.driver as cuda

    error: type[Exception] = cuda.Error
    return error


@functools.cache
def _pycuda_context(device_index: int) -> Any:
    import pycuda.driver as cuda

    return cuda.Device(device_index).retain_primary_context()


@contextlib.contextmanager
def _pushed(device_index: int) -> Iterator[None]:
    """Holds the device's context on PyCUDA's own stack, which it wants for loading and unloading, and only then.

    A context left on that stack aborts the process when its thread ends, so it is popped at once. Whatever pushing and
    popping leave current (PyCUDA restores its own idea of it, not torch's) the caller puts right.
    """
    import pycuda.driver as cuda

    _pycuda_context(device_index).push()
    try:
        yield
    finally:
        cuda.Context.pop()


def _load_pycuda(compiled: CompiledKernel, device_index: int, what: str) -> tuple[Any, Any]:
    """(module, launch function)"""
    import pycuda.driver as cuda

    try:
        with _pushed(device_index):
            module = cuda.module_from_buffer(compiled.cubin)
            function = module.get_function(compiled.source.entry)
            function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, compiled.source.smem_bytes)
    except cuda.Error as error:
        raise LaunchError(f"cannot {what}: {error}") from None
    return module, function._launch_kernel
