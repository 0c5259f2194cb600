"""What fa2gen knows of chips: limits per compute capability, one row per product, occupancy."""

from .arch import ArchLimits, arch_limits, supported_compute_capabilities
from .gpus import Gpu, get_gpu, list_gpus, match_device
from .occupancy import LIMITERS, Occupancy, occupancy

__all__ = [
    "LIMITERS",
    "ArchLimits",
    "Gpu",
    "Occupancy",
    "arch_limits",
    "get_gpu",
    "list_gpus",
    "match_device",
    "occupancy",
    "supported_compute_capabilities",
]
