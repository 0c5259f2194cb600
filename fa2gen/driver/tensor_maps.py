"""Tensor maps, encoded by the driver: what the copy engine of Hopper reads in a kernel's parameters.

An encoded map holds its tensor's address, which may be another one at every call, and encoding takes microseconds.
Packers therefore remember maps by address. PyCUDA does not offer these calls of the driver; cuda-bindings, which comes
with torch's CUDA builds from 2.11 on, does.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import LaunchError, ToolchainError
from ..tensor_map import BYTES, TensorMap, tma_reason
from .device import require_device
from .libcuda import active_context, current_context, primary_context

MAX_ADDRESSES = 1024
"""Addresses that a packer remembers: those of a hundred layers, each with ten sets of tensors of one shape. An entry
takes 0.3 KB."""

MAX_IN_ALL = 1 << 16
"""Addresses that all packers together remember, some 20 MB: each length that a server meets has packers of its own."""

_MAX_PACKERS = 4096

# The driver looks at no more of it than that it is not null and a multiple of 16.
_ANY_ADDRESS = 1 << 32

INSTALL = 'pip install "cuda-bindings>=12.9,<14"'
"""How to get what encodes maps."""


def bindings_version() -> str:
    """The version of cuda-bindings.

    Raises:
        ToolchainError: It is not installed, or does not import.
    """
    _bindings()
    import cuda.bindings

    return str(cuda.bindings.__version__)


def encode(map: TensorMap, address: int) -> bytes:
    """The map of a tensor at an address, as kernels take it. For launches that repeat, see :func:`map_packer`.

    A context must be current. The address of an empty tensor, of which kernels read nothing, may be null.

    Raises:
        LaunchError: The driver refuses the map; the message names the tensor and the rule that it breaks.
        ToolchainError: cuda-bindings is missing.
    """
    encoded = _encoded(map, address)
    packed: bytes = _view(encoded).raw
    return packed


def map_packer(map: TensorMap, device_index: int = 0) -> Callable[[int], bytes]:
    """A function from the tensor's address to the encoded map. Equal maps of a device share one; so may threads.

    For an address that it remembers, it takes 0.1 µs; for a new one, the time of two or three calls of the driver, in
    threads without a context too. It raises as :func:`encode` does.

    Args:
        map: Everything but the address.
        device_index: Where the tensor is.

    Raises:
        LaunchError: No GPU can be used.
        ArgumentError: There is no device of that index.
        ToolchainError: cuda-bindings is missing.
    """
    # By position: to lru_cache a call that leaves out the default is another one.
    return _packer(map, device_index)


@functools.lru_cache(_MAX_PACKERS)
def _packer(map: TensorMap, device_index: int) -> Callable[[int], bytes]:
    require_device(device_index)
    _bindings()
    # A method of dict: where the address is known, no Python code runs.
    return MapCache(map, device_index).__getitem__


class MapCache(dict[int, bytes]):
    """Encoded maps of one tensor map, by address: one that is missing is made.

    Threads may share it: look-ups are atomic, and what is made under the lock is right for whoever asked.
    """

    __slots__ = ("__weakref__", "_device_index", "_lock", "_map", "_template", "_template_view")

    def __init__(self, map: TensorMap, device_index: int) -> None:
        super().__init__()
        self._map, self._device_index = map, device_index
        self._template: Any = None
        self._template_view: Any = None
        self._lock = threading.Lock()
        _caches.append(weakref.ref(self))

    def __missing__(self, address: int) -> bytes:
        context = primary_context(self._device_index)
        if current_context() == context:
            encoded = self._make(address)
        else:
            # A thread that has none yet, such as autograd's, or another device's.
            with active_context(context):
                encoded = self._make(address)
        if len(self) >= MAX_ADDRESSES:
            self.clear()
        self[address] = encoded
        _forget_if_full()
        return encoded

    def _make(self, address: int) -> bytes:
        """To replace the address in a map takes 0.4 µs of Python, to encode one 3 µs (cuda-bindings 13.0)."""
        with self._lock:
            # Nothing says that replacing checks the address; encoding does.
            if self._template is None or address % 16:
                self._template = _encoded(self._map, address)
                self._template_view = _view(self._template)
            else:
                (status,) = _bindings().cuTensorMapReplaceAddress(self._template, address or _ANY_ADDRESS)
                # Whatever a refused call left behind is no template.
                if status:
                    self._template = self._template_view = None
                    raise _refused(self._map, address, status)
            encoded: bytes = self._template_view.raw
        return encoded


_caches: list[weakref.ref[MapCache]] = []
_made = itertools.count(1)


def _forget_if_full() -> None:
    """Empties all packers after ``MAX_IN_ALL`` new addresses; to count what they hold would cost each of these more."""
    if next(_made) % MAX_IN_ALL == 0:
        alive = [cache for each in _caches if (cache := each()) is not None]
        for cache in alive:
            cache.clear()
        _caches[:] = [weakref.ref(cache) for cache in alive]


@functools.cache
def _bindings() -> Any:
    """The module ``cuda.bindings.driver``."""
    try:
        from cuda.bindings import driver
    except Exception as error:  # ImportError, and what half-installed packages raise
        raise ToolchainError(
            "tensor maps, which kernels of the sm90 family need, are encoded by cuda-bindings, which cannot be "
            f"imported ({error}): {INSTALL}"
        ) from None
    return driver


def _view(encoded: Any) -> Any:
    """The bytes of a ``CUtensorMap``, which must be kept alive. ``ctypes.string_at`` takes five times as long."""
    return (ctypes.c_char * BYTES).from_address(encoded.getPtr())


def _encoded(map: TensorMap, address: int) -> Any:
    """A new ``CUtensorMap``.

    The driver's documentation wants it at a multiple of 64 bytes, and Python's allocator gives cuda-bindings multiples
    of 16: tests/gpu/test_tensor_maps.py holds these maps equal to some that are encoded into aligned memory.
    """
    cuda = _bindings()
    swizzle, kind = cuda.CUtensorMapSwizzle, cuda.CUtensorMapDataType
    swizzles = {
        32: swizzle.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    }
    if map.swizzle_bytes not in swizzles:
        raise LaunchError(
            f"the tensor map of {map.tensor} has boxes with rows of {map.swizzle_bytes} bytes; there are swizzles for "
            f"{', '.join(str(width) for width in swizzles)}"
        )
    status, encoded = cuda.cuTensorMapEncodeTiled(
        # For fp16 as well: copies move bits, and the fill that we ask for is zero in either type.
        kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(map.sizes),
        address or _ANY_ADDRESS,
        [cuda.cuuint64_t(size) for size in map.sizes],
        [cuda.cuuint64_t(stride) for stride in map.strides],
        [cuda.cuuint32_t(size) for size in map.box],
        [cuda.cuuint32_t(1)] * len(map.box),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles[map.swizzle_bytes],
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise _refused(map, address, status)
    return encoded


def _refused(map: TensorMap, address: int, status: Any) -> LaunchError:
    columns, rows, heads, batch = map.sizes
    by_row, by_head, by_batch = (stride // 2 for stride in map.strides)
    reason = tma_reason(map.tensor, (batch, rows, heads, columns), (by_batch, by_row, by_head), address)
    return LaunchError(
        f"the driver encodes no tensor map of {map.tensor} at {address:#x} ({status.name}): "
        f"{reason or 'it breaks none of the rules that fa2gen knows'}; (column, row, head, batch) sizes {map.sizes}, "
        f"byte strides of (row, head, batch) {map.strides}, box {map.box}"
    )
