"""The CUDA driver: devices, loading, launching (layer 3). The only room that touches a GPU."""

from .device import DeviceInfo, device_count, device_info, ensure_context, unavailable_reason
from .kernel import LoadedKernel, load, row_launcher
from .tensor_maps import map_packer

__all__ = [
    "DeviceInfo",
    "LoadedKernel",
    "device_count",
    "device_info",
    "ensure_context",
    "load",
    "map_packer",
    "row_launcher",
    "unavailable_reason",
]
