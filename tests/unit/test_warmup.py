"""Warming up where there is no GPU: what it does, and what it refuses by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from fa2gen.errors import ArgumentError, LaunchError
from fa2gen.runtime import warmup, warmup_specs

Q = torch.zeros(1, 5, 2, 64).half()


def test_warmup_of_cpu_tensors_is_a_call() -> None:
    assert warmup(Q, Q, Q, causal=True).backend == "reference"
    with pytest.raises(ArgumentError, match="q must be"):
        warmup(Q[0], Q, Q)


@pytest.mark.parametrize("device", ["cpu", "gpu", "cuda:x", 1.5, -1])
def test_what_is_no_cuda_device_is_named(device: Any) -> None:
    with pytest.raises(ArgumentError, match="device must be a CUDA device"):
        warmup_specs([], device=device)


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", 0])
def test_warmup_without_a_gpu_says_why(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fa2gen.runtime.warmup"], "unavailable_reason", lambda: "there is no driver")
    with pytest.raises(LaunchError, match="no GPU can be used: there is no driver"):
        warmup_specs([], device=device)
