"""Attention for PyTorch: the public function, what it would do, and how to prepare it.

``fa2gen.runtime.attention`` is a module to the import system and, as a name, the function in it.
"""

from __future__ import annotations

from .attention import attention
from .describe import Description, describe
from .plan import reset
from .warmup import warmup, warmup_specs

__all__ = ["Description", "attention", "describe", "reset", "warmup", "warmup_specs"]
