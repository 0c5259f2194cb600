"""How tiles are laid out and copied, as kernels of both directions do it."""

from __future__ import annotations

from .spec import Config, KernelSpec


def panel_columns(spec: KernelSpec) -> int:
    """Columns of a panel, the unit of a tile's layout: 64 (rows of 128 bytes), or 32 where 64 do not divide the width.

    A tile of 96 columns would otherwise be padded to 128: a third more shared memory, and a third more arithmetic.
    """
    return 64 if spec.native_head_dim % 64 == 0 else 32


def rows_per_pass(spec: KernelSpec, config: Config) -> int:
    """Rows of a tile that a block copies at a time: a thread for each 16 bytes of a panel row."""
    return config.num_threads * 8 // panel_columns(spec)
