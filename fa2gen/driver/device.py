"""Which GPUs there are, and why there is none."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError, LaunchError
from .libcuda import current_context, libcuda, primary_context


@dataclass(frozen=True)
class DeviceInfo:
    """What the driver says about a GPU.

    Attributes:
        index: CUDA device index, as torch counts.
        name: E.g. ``"NVIDIA H200"``.
        compute_capability: E.g. (9, 0).
        num_sms: Streaming multiprocessors.
        l2_bytes: L2 cache.
        total_memory: Bytes of device memory.
        max_smem_per_block: Bytes of dynamic shared memory that a block may ask for.
        clock_mhz: Highest SM clock.
        cuda_version: Newest CUDA release that the driver knows, e.g. (13, 0).
        driver_version: The driver's release, e.g. ``"580.95.05"``; empty where the kernel module does not tell.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    l2_bytes: int
    total_memory: int
    max_smem_per_block: int
    clock_mhz: float
    cuda_version: tuple[int, int]
    driver_version: str


@functools.cache
def unavailable_reason() -> str | None:
    """Why no kernel can run in this process; None when PyCUDA imports and a device exists."""
    try:
        import pycuda.driver as cuda
    except Exception as error:  # ImportError, and what half-installed packages raise
        return f'PyCUDA cannot be imported ({error}); with a GPU and a CUDA toolkit: pip install "fa2gen[gpu]"'
    try:
        cuda.init()
        count = cuda.Device.count()
    except cuda.Error as error:
        return f"the CUDA driver does not start ({error})"
    return None if count else "there is no CUDA device"


def require_device(device_index: int) -> None:
    """Raises unless ``device_index`` is a usable device.

    Raises:
        LaunchError: No kernel can run here at all.
        ArgumentError: There is no device of that index.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise LaunchError(f"no GPU can be used: {reason}")
    count = device_count()
    if not 0 <= device_index < count:
        raise ArgumentError(f"device_index must be 0 to {count - 1}, got {device_index}")


@functools.cache
def device_count() -> int:
    """CUDA devices of this process; 0 where no kernel can run."""
    if unavailable_reason() is not None:
        return 0
    import pycuda.driver as cuda

    return int(cuda.Device.count())


@functools.cache
def device_info(index: int = 0) -> DeviceInfo:
    """Facts of a GPU; makes no context.

    Raises:
        LaunchError: No GPU can be used.
        ArgumentError: There is no device of that index.
    """
    require_device(index)
    import pycuda.driver as cuda

    device, attribute = cuda.Device(index), cuda.device_attribute
    major, minor = device.compute_capability()
    version = cuda.get_driver_version()
    return DeviceInfo(
        index=index,
        name=device.name(),
        compute_capability=(major, minor),
        num_sms=device.get_attribute(attribute.MULTIPROCESSOR_COUNT),
        l2_bytes=device.get_attribute(attribute.L2_CACHE_SIZE),
        total_memory=device.total_memory(),
        max_smem_per_block=device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        clock_mhz=device.get_attribute(attribute.CLOCK_RATE) / 1000,
        cuda_version=(version // 1000, version % 1000 // 10),
        driver_version=_driver_release(),
    )


def _driver_release() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else ""


def ensure_context(device_index: int) -> None:
    """Makes the device's primary context current in this thread if none is; leaves another device's alone.

    For threads that no CUDA library has touched yet, such as those that autograd starts. It stays current.

    Raises:
        LaunchError: No GPU can be used.
        ArgumentError: There is no device of that index.
    """
    require_device(device_index)
    if not current_context():
        libcuda().cuCtxSetCurrent(primary_context(device_index))
