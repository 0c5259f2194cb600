"""Compiling: nvcc, what ptxas reports, and the cache of binaries (layer 3)."""

from .cache import CubinCache, default_cache
from .compiler import CompiledKernel, compile_kernel, compile_many, usable_cores
from .location import cache_root
from .nvcc import Nvcc, find_nvcc, nvcc_command
from .ptxas import ResourceUsage, parse_ptxas, performance_remarks
from .sources import kernel_source

__all__ = [
    "CompiledKernel",
    "CubinCache",
    "Nvcc",
    "ResourceUsage",
    "cache_root",
    "compile_kernel",
    "compile_many",
    "default_cache",
    "find_nvcc",
    "kernel_source",
    "nvcc_command",
    "parse_ptxas",
    "performance_remarks",
    "usable_cores",
]
