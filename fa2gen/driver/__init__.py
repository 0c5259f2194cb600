"""The CUDA driver: devices, loading, launching (layer 3). The only room that touches a GPU."""

from .device import DeviceInfo, device_count, device_info, ensure_context, unavailable_reason
from .kernel import LoadedKernel, load

__all__ = [
    "DeviceInfo",
    "LoadedKernel",
    "device_count",
    "device_info",
    "ensure_context",
    "load",
    "unavailable_reason",
]
