"""fa2gen: a code-generating FlashAttention kernel compiler.

Importing this package is cheap: neither torch nor PyCUDA, Optuna or matplotlib is imported until a name that needs it
is used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> module that holds it.
_LAZY = {
    "KernelSpec": "fa2gen.spec",
    "FwdConfig": "fa2gen.spec",
    "FwdSm90Config": "fa2gen.spec",
    "BwdConfig": "fa2gen.spec",
    "Problem": "fa2gen.problem",
    "Fa2genError": "fa2gen.errors",
}
_LAZY_MODULES = ("runtime",)

__all__ = ["BwdConfig", "Fa2genError", "FwdConfig", "FwdSm90Config", "KernelSpec", "Problem", "__version__", "runtime"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _LAZY_MODULES:
        return importlib.import_module(f"fa2gen.{name}")
    raise AttributeError(f"module 'fa2gen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
