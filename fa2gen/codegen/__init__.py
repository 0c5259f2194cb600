"""Rendering: a spec and a config become one kernel source (layer 3)."""

from .manifest import manifest, renderer_hash, template_hash
from .params import FWD_PARAMS, PARAMS, Field, ParamStruct
from .render import KernelSource, entry_name, grid_rule, render_kernel

__all__ = [
    "FWD_PARAMS",
    "PARAMS",
    "Field",
    "KernelSource",
    "ParamStruct",
    "entry_name",
    "grid_rule",
    "manifest",
    "render_kernel",
    "renderer_hash",
    "template_hash",
]
