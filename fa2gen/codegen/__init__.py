"""Rendering: a spec and a config become one kernel source (layer 3)."""

from .head import grid_rule
from .manifest import kernels_of, manifest, renderer_hash, template_hash
from .params import Field, ParamStruct
from .render import KernelSource, entry_name, render_kernel, render_kernels
from .structs import (
    BWD_PARAMS,
    BWD_POSTPROCESS_PARAMS,
    BWD_PREPROCESS_PARAMS,
    FWD_PARAMS,
    FWD_SM90_PARAMS,
    PARAMS,
    param_struct,
)

__all__ = [
    "BWD_PARAMS",
    "BWD_POSTPROCESS_PARAMS",
    "BWD_PREPROCESS_PARAMS",
    "FWD_PARAMS",
    "FWD_SM90_PARAMS",
    "PARAMS",
    "Field",
    "KernelSource",
    "ParamStruct",
    "entry_name",
    "grid_rule",
    "kernels_of",
    "manifest",
    "param_struct",
    "render_kernel",
    "render_kernels",
    "renderer_hash",
    "template_hash",
]
