"""The runtime's CUDA path without a GPU: kernels that record their launches, a device that only has facts."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa2gen.codegen import param_struct
from fa2gen.constraints_sm90 import compile_target
from fa2gen.hardware import get_gpu
from fa2gen.runtime import plan, plan_backward, plan_forward, request
from fa2gen.spec import Config, KernelSpec
from fa2gen.tensor_map import BYTES, TensorMap


class FakeKernel:
    def __init__(self, spec: KernelSpec, config: Config, name: str, device: FakeDevice) -> None:
        self.spec, self.config, self.name, self.device = spec, config, name, device
        self.launches: list[tuple[Any, ...]] = []

    def launcher(self, grid: Any, block: Any) -> Callable[[bytes, int], None]:
        def launch(params: bytes, stream: int) -> None:
            self.device.at_launch()
            self.launches.append((grid, block, params, stream))
            self.device.order.append((self.name, params))

        return launch


def row_launcher(*steps: tuple[Any, Any, Any]) -> Callable[[tuple[bytes, ...], int], None]:
    """Of the driver, for kernels that have a launcher and no more."""
    launchers = [kernel.launcher(grid, block) for kernel, grid, block in steps]

    def launch(params: tuple[bytes, ...], stream: int) -> None:
        for launch_one, its_params in zip(launchers, params, strict=True):
            launch_one(its_params, stream)

    return launch


class FakeDevice:
    """Stands in for everything below the runtime: compiling, loading, the stream, what the device is.

    Attributes:
        kernels: What was loaded, in order.
        order: Name and parameters of every launch, in order.
        together: How many kernels were compiled at once, each time.
        at_launch: Called before a launch is recorded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: str = "a100") -> None:
        self.gpu = get_gpu(gpu)
        self.kernels: list[FakeKernel] = []
        self.order: list[tuple[str, bytes]] = []
        self.together: list[int] = []
        self.at_launch: Callable[[], None] = lambda: None
        self.capturing = False
        self.compiler_error: Exception | None = None
        monkeypatch.setattr(request, "_backend", lambda backend, device: "cuda")
        monkeypatch.setattr(plan, "device_gpu", lambda index: self.gpu)
        # By name: in the package, the function of the same name hides the module.
        monkeypatch.setattr(sys.modules["fa2gen.runtime.describe"], "device_gpu", lambda index: self.gpu)
        monkeypatch.setattr(plan_forward, "map_packer", lambda map, index: lambda address: fake_map(map, address))
        monkeypatch.setattr(plan, "compile_kernel", self._compile)
        monkeypatch.setattr(plan, "compile_many", self._compile_many)
        monkeypatch.setattr(plan, "load", self._load)
        monkeypatch.setattr(plan_backward, "row_launcher", row_launcher)
        monkeypatch.setattr(plan, "_raw_stream_function", lambda: lambda index: 1234)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def _compile(self, source: Any, target: str) -> Any:
        if self.compiler_error is not None:
            raise self.compiler_error
        assert target == compile_target(source.config, self.gpu.target)
        return source

    def _compile_many(self, jobs: list[tuple[Any, str]]) -> list[Any]:
        self.together.append(len(jobs))
        return [self._compile(source, target) for source, target in jobs]

    def _load(self, source: Any, index: int | None) -> FakeKernel:
        self.kernels.append(FakeKernel(source.spec, source.config, source.kernel, self))
        return self.kernels[-1]

    @property
    def launches(self) -> list[tuple[Any, ...]]:
        return [launch for kernel in self.kernels for launch in kernel.launches]


def call_inputs(
    seqlen_q: int = 113, seqlen_k: int = 203, heads_q: int = 8, heads_k: int = 2, d: int = 64
) -> list[Tensor]:
    return [
        torch.zeros(2, s, h, d).bfloat16() for s, h in ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    ]


def fake_map(map: TensorMap, address: int) -> bytes:
    """Stands for an encoded map: the address, and what the map is."""
    return (struct.pack("<Qq", address, hash(map))).ljust(BYTES, b"\0")


def unpacked(params: bytes, kernel: str = "fwd", family: str = "sm80") -> dict[str, Any]:
    fields = param_struct(kernel, family)
    names = [field.name for field in fields.fields]
    return dict(zip(names, struct.unpack(fields.format, params), strict=True))
