"""What a backward needs before it can be launched: kernels loaded, compiled and proved, and a config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fa2gen.constraints import default_config
from fa2gen.errors import ArgumentError, CompileError, GateError, InfeasibleError, LaunchError, ToolchainError
from fa2gen.runtime import attention, describe, plan, warmup
from fa2gen.runtime.warmup import gate_kernel
from fa2gen.spec import BwdConfig, FwdConfig, KernelSpec
from tests.backward_device import KERNELS, backward_device
from tests.backward_device import grads as _grads
from tests.backward_device import last_backward as _last_backward
from tests.backward_device import leaves as _leaves
from tests.runtime_fakes import FakeDevice
from tests.runtime_fakes import call_inputs as _inputs


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDevice]:
    yield from backward_device(monkeypatch, tmp_path)


def test_a_cold_backward_in_a_capture_names_the_warmup(device: FakeDevice) -> None:
    tensors = _leaves()
    attention(*tensors, causal=True)
    device.capturing = True
    out = attention(*tensors, causal=True)
    message = r"fa2gen.runtime.warmup\(q, k, v, causal=True, backward=True, deterministic=False\)"
    with pytest.raises(LaunchError, match=message):
        _grads(out, tensors)
    device.capturing = False
    warmup(*tensors, causal=True, gate=False)
    assert all(x.grad is None for x in tensors)
    device.capturing = True
    for seqlen, dout in ((113, None), (100, None), (100, "expanded")):
        q = tensors[0].detach()[:, :seqlen].requires_grad_()
        out = attention(q, *tensors[1:], causal=True)
        _grads(out if dout is None else out.sum(), [q, *tensors[1:]])
        _last_backward(device)


def test_warmup_prepares_what_will_be_needed(device: FakeDevice) -> None:
    q, k, v = _inputs()
    assert warmup(q, k, v, gate=False).state == "loaded"
    assert [kernel.name for kernel in device.kernels] == ["fwd"]
    assert describe(q, k, v, backward=True).state == "not compiled"
    warmup(q, k, v, gate=False, backward=True, deterministic=True)
    assert [kernel.name for kernel in device.kernels[1:]] == list(KERNELS)
    described = describe(q, k, v, backward=True, deterministic=True)
    assert (described.state, described.spec.deterministic) == ("loaded", True)
    warmup(q.requires_grad_(), k, v, gate=False)
    assert len(device.kernels) == 7
    assert q.grad is None
    # Named by its origin where no table has an entry.
    assert describe(q, k, v, backward=True).source == "default"


def test_a_kernel_that_writes_nothing_does_not_pass_the_gate(device: FakeDevice) -> None:
    """Its gradients and workspaces hold NaN to begin with."""
    spec = KernelSpec(kind="bwd", head_dim=64)
    with pytest.raises(GateError, match=r"dq .*Do not use this kernel"):
        gate_kernel(spec, default_config(spec), torch.device("cpu"))
    assert [name for name, _ in device.order] == list(KERNELS)


def test_a_compiler_s_refusal_is_told(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _leaves()
    out = attention(*tensors)
    monkeypatch.setattr(plan, "compile_many", lambda jobs: [CompileError("nvcc refused it", "log")] * len(jobs))
    with pytest.raises(CompileError, match="nvcc refused it"):
        _grads(out, tensors)


def test_configs(device: FakeDevice) -> None:
    tensors = _leaves()
    spec = KernelSpec(kind="bwd", head_dim=64, gqa_ratio=4)
    _grads(attention(*tensors), tensors)
    assert device.kernels[-1].config == default_config(spec)
    forced = BwdConfig(block_n=128, split_heads=True)
    _grads(attention(*tensors, backward_config=forced), tensors)
    assert device.kernels[-1].config == forced
    values = _last_backward(device)
    assert values["dk_accum"] != 0
    assert values["dv_accum"] - values["dk_accum"] >= 2 * 2 * 203 * 64 * 4
    launches = len(device.order)
    with pytest.raises(InfeasibleError, match="cannot run bwd_d64_bf16_full_gqa4 on a100"):
        attention(*tensors, backward_config=BwdConfig(block_n=4096))
    assert len(device.order) == launches
    # Also where there is nothing to differentiate yet.
    with pytest.raises(InfeasibleError, match="cannot run bwd_d64_bf16_full_gqa4 on a100"):
        attention(*(x.detach() for x in tensors), backward_config=BwdConfig(block_n=4096))
    # A fixed order that torch's switch asks for, too.
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(InfeasibleError, match="split_heads"):
            attention(*_leaves(), causal=True, backward_config=forced)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(device.order) == launches
    for call in (describe, warmup):
        with pytest.raises(ArgumentError, match="backward must be True or False, got 'no'"):
            call(*tensors, backward="no")  # type: ignore[operator]
    for bad in ("fast", FwdConfig()):
        with pytest.raises(ArgumentError, match=r"backward_config must be a fa2gen.BwdConfig"):
            attention(*tensors, backward_config=bad)  # type: ignore[arg-type]


def test_no_nvcc_is_a_toolchain_error(device: FakeDevice) -> None:
    tensors = _leaves()
    out = attention(*tensors)
    device.compiler_error = ToolchainError("nvcc was not found")
    with pytest.raises(ToolchainError, match="nvcc was not found"):
        _grads(out, tensors, retain_graph=True)
    device.compiler_error = None
    _grads(out, tensors)
    _last_backward(device)
