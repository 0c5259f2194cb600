"""How TMA, Hopper's copy engine, sees a tensor, and which tensors it cannot see.

A map is made for the driver, which encodes it (``driver.tensor_maps``), and for the emulator, which reads the layout of
:meth:`TensorMap.emulated`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

BYTES = 128
"""Size of an encoded map in a kernel's parameters, where it lies at a multiple of 64 bytes."""

PANEL_COLUMNS = 64
"""Columns of a box: 128 bytes, the width of the swizzle."""

MAX_BOX = 256
"""Rows of a box, at most."""

_ELEMENT_BYTES = 2
_RANK = 4
_MAX_SIZE = 2**32
_MAX_STRIDE_BYTES = 2**40


@dataclass(frozen=True)
class TensorMap:
    """A tensor of 16-bit elements with axes (column, row, head, batch), the fastest first, and the box that is copied.

    Attributes:
        tensor: Name of the tensor whose address the map holds.
        sizes: Elements along the axes. What lies beyond is zero to loads and dropped by stores.
        strides: Bytes from one row, head and batch to the next; multiples of 16.
        box: Elements that one copy moves, along the axes; its rows have ``PANEL_COLUMNS`` columns or fewer.
    """

    tensor: str
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]

    @property
    def swizzle_bytes(self) -> int:
        """Width of the swizzle: that of a box's row."""
        return self.box[0] * _ELEMENT_BYTES

    def emulated(self) -> bytes:
        """The map as the emulator's copies read it, without the address, which is its first 8 bytes."""
        packed = struct.pack(f"<4Q{2 * _RANK + 1}I", 0, *self.strides, *self.sizes, *self.box, self.swizzle_bytes)
        return packed.ljust(BYTES, b"\0")


def tma_reason(name: str, sizes: tuple[int, ...], strides: tuple[int, ...], address: int) -> str | None:
    """Why TMA cannot read or write a tensor, or None if it can.

    Args:
        name: Of the tensor, for the reason.
        sizes: (batch, row, head, column), as the tensor has them.
        strides: In elements, likewise.
        address: Of its first element, or any number with the same remainder by 16.

    Returns:
        One clause that names the tensor and the rule of ``cuTensorMapEncodeTiled`` (CUDA driver API, tensor map object
        management).
    """
    if address % 16:
        return f"{name} begins at an address that is no multiple of 16 bytes"
    if any(size >= _MAX_SIZE for size in sizes):
        return f"{name} has an axis of {max(sizes)} elements, TMA takes fewer than 2^32"
    for axis, size, stride in zip(("batch", "row", "head"), sizes, strides, strict=False):
        if size > 1 and stride * _ELEMENT_BYTES % 16:
            return f"{name} has a {axis} stride of {stride} elements, which is no multiple of 16 bytes"
        if size > 1 and stride * _ELEMENT_BYTES >= _MAX_STRIDE_BYTES:
            return f"{name} has a {axis} stride of {stride * _ELEMENT_BYTES} bytes, TMA takes less than 2^40"
    return None


def tensor_map(
    tensor: str, sizes: tuple[int, int, int, int], strides: tuple[int, int, int], box_rows: int
) -> TensorMap:
    """The map of a tensor whose boxes are panels of ``box_rows`` rows of one head.

    Args:
        tensor: Its name.
        sizes: (batch, row, head, column). For an axis without elements the map has one: kernels copy nothing of an
            empty tensor, but TMA has no map of one.
        strides: Elements from one batch, row and head to the next; any number where that axis has one element.
        box_rows: Rows of a box, at most ``MAX_BOX``.
    """
    batch, rows, heads, columns = (max(1, size) for size in sizes)
    # An axis of one element may have any stride, also one that TMA refuses.
    by_batch, by_row, by_head = (
        stride * _ELEMENT_BYTES if size > 1 else 16 for stride, size in zip(strides, sizes[:3], strict=True)
    )
    box = (PANEL_COLUMNS, box_rows, 1, 1)
    return TensorMap(tensor, (columns, rows, heads, batch), (by_row, by_head, by_batch), box)
