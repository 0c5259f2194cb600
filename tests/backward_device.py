"""A GPU whose backward kernels only record their launches, and calls for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fa2gen.hardware import get_gpu
from fa2gen.runtime import reset
from fa2gen.tables import store
from tests.runtime_fakes import FakeDevice, call_inputs, unpacked

KERNELS = ("bwd_preprocess", "bwd", "bwd_postprocess")


def backward_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDevice]:
    """The body of a fixture: a GPU for which no table says anything."""
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "tables"))
    monkeypatch.setattr(store, "package_dir", lambda: tmp_path / "package")
    for name in ("describe", "warmup"):
        monkeypatch.setattr(sys.modules[f"fa2gen.runtime.{name}"], "device_gpu", lambda index: get_gpu("a100"))
    reset()
    yield FakeDevice(monkeypatch)
    reset()


def leaves(*args: Any, **kwargs: Any) -> list[Tensor]:
    return [x.requires_grad_() for x in call_inputs(*args, **kwargs)]


def last_backward(device: FakeDevice) -> dict[str, Any]:
    """Parameters of the last backward's launches; those of a name in several structs are checked to be equal."""
    names = [name for name, _ in device.order[-3:]]
    assert names == list(KERNELS)
    merged: dict[str, Any] = {}
    for name, params in device.order[-3:]:
        for field, value in unpacked(params, name).items():
            assert merged.setdefault(field, value) == value, field
    return merged


def grads(out: Tensor, tensors: list[Tensor], dout: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, tensors, torch.ones_like(out) if dout is None else dout, **kwargs)
