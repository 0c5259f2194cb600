"""The few calls of libcuda that PyCUDA does not offer, through ctypes.

PyCUDA cannot launch on a stream that it did not create, name a function's handle, ask for occupancy, or say which
context is current; and a context that it pushed must be popped before its thread ends, or the process aborts. libcuda's
own calls have a stable ABI and no such rule.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import LaunchError

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...

# Errors that a kernel left behind and that every later call in the process returns (cuda.h: "the process must be
# terminated and relaunched"): uncorrectable ECC, NVLink, illegal address, timeout, assert, hardware stack, illegal
# instruction, misaligned address, invalid address space, invalid pc, launch failure.
_STICKY = (214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719)

# What a driver older than the compiler says of a module (cuda.h): invalid image, no binary for this GPU, invalid PTX,
# unsupported PTX version.
REFUSED_IMAGE = (200, 209, 218, 222)

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_out = ctypes.POINTER(ctypes.c_void_p)
_out_int = ctypes.POINTER(ctypes.c_int)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (_out,),
    "cuCtxSetCurrent": (_pointer,),
    "cuDevicePrimaryCtxRetain": (_out, _int),
    "cuDeviceGet": (_out_int, _int),
    "cuModuleLoadData": (_out, ctypes.c_char_p),
    "cuModuleUnload": (_pointer,),
    "cuModuleGetFunction": (_out, _pointer, ctypes.c_char_p),
    "cuFuncSetAttribute": (_pointer, _int, _int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (_out_int, _pointer, _int, ctypes.c_size_t),
    "cuGetErrorString": (_int, ctypes.POINTER(ctypes.c_char_p)),
}


@functools.cache
def libcuda() -> Any:
    """The driver's library with argument types set; PyCUDA, which links to it, must have been initialised."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


@functools.cache
def launch_function() -> Any:
    """cuLaunchKernel without declared argument types: pass ``c_void_p`` for handles, an array or None for pointers.

    Declared types cost 0.3 µs for each of its eleven arguments. Plain integers go as C ints, which is what it takes.
    """
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernel


def parameter_offset(function: ctypes.c_void_p) -> int:
    """Bytes before a kernel's parameter struct in a buffer that holds all parameters.

    A struct that is aligned to 64 bytes does not begin at 0: the driver counts from a place in constant memory that is
    none of their multiples (48 bytes on sm_90, measured). Drivers from before CUDA 12.4 do not tell; for structs of the
    usual alignment it is 0.
    """
    ask = getattr(ctypes.CDLL("libcuda.so.1"), "cuFuncGetParamInfo", None)
    if ask is None:
        return 0
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    ask.argtypes = (_pointer, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
    return 0 if ask(function, 0, ctypes.byref(offset), ctypes.byref(size)) else offset.value


def error_text(status: int) -> str:
    """The driver's words for a status."""
    text = ctypes.c_char_p()
    if libcuda().cuGetErrorString(status, ctypes.byref(text)) or text.value is None:
        return f"CUDA error {status}"
    return text.value.decode(errors="replace")


def is_sticky(message: str) -> bool:
    """Whether a driver's message is about an error that no later call in this process survives."""
    return any(text in message for text in _sticky_texts())


@functools.cache
def _sticky_texts() -> tuple[str, ...]:
    return tuple(error_text(status) for status in _STICKY)


def check(status: int, what: str, hint: str = "") -> None:
    """Raises LaunchError "cannot <what>: <the driver's words><hint>" unless the status is success."""
    if status:
        raise LaunchError(f"cannot {what}: {error_text(status)}{hint}")


def current_context() -> int:
    """Handle of the context that is current in this thread, 0 if none is."""
    context = ctypes.c_void_p()
    libcuda().cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0


@functools.cache
def primary_context(device_index: int) -> int:
    """Handle of a device's primary context, the one that torch uses; kept alive until the process ends."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(libcuda().cuDeviceGet(ctypes.byref(device), device_index), f"use CUDA device {device_index}")
    status = libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    check(status, f"use the primary context of CUDA device {device_index}")
    return context.value or 0


@contextmanager
def active_context(context: int) -> Iterator[None]:
    """Makes a context current for the block, and afterwards again the one that was, or none."""
    before = current_context()
    check(libcuda().cuCtxSetCurrent(context), "make the device's context current")
    try:
        yield
    finally:
        libcuda().cuCtxSetCurrent(before)
