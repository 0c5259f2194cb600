"""The CUDA path without a GPU: CPU tensors, a kernel that records its launches, a device that only has facts."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from fa2gen.constraints import default_config
from fa2gen.errors import ArgumentError, InfeasibleError, LaunchError, TableError, ToolchainError
from fa2gen.hardware import get_gpu
from fa2gen.runtime import attention, plan, request, reset
from fa2gen.spec import FwdConfig, KernelSpec
from tests.runtime_fakes import FakeDevice
from tests.runtime_fakes import call_inputs as _inputs
from tests.runtime_fakes import unpacked as _unpacked


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    reset()
    yield FakeDevice(monkeypatch)
    reset()


def test_a_launch_carries_the_call(device: FakeDevice) -> None:
    q, k, v = _inputs()
    out, lse = attention(q, k, v, causal=True, softmax_scale=0.25, return_lse=True)
    ((grid, block, params, stream),) = device.launches
    config = device.kernels[0].config
    assert device.kernels[0].spec == KernelSpec(head_dim=64, causal=True, gqa_ratio=4)
    assert grid == (2 * 8 * math.ceil(113 / config.block_m), 1, 1)
    assert block == (config.num_threads, 1, 1)
    assert stream == 1234
    values = _unpacked(params)
    pointers = [values[name] for name in ("q", "k", "v", "o", "softmax_lse", "repairs")]
    assert pointers == [x.data_ptr() for x in (q, k, v, out, lse)] + [0]
    assert (values["q_batch_stride"], values["q_row_stride"], values["q_head_stride"]) == q.stride()[:3]
    assert (values["o_batch_stride"], values["o_row_stride"], values["o_head_stride"]) == out.stride()[:3]
    assert values["softmax_scale"] == 0.25
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    assert (lse.shape, lse.dtype) == ((2, 8, 113), torch.float32)


def test_no_lse_is_allocated_that_nobody_asked_for(device: FakeDevice) -> None:
    out = attention(*_inputs())
    assert isinstance(out, Tensor)
    assert _unpacked(device.launches[0][2])["softmax_lse"] == 0


def test_a_warm_call_only_launches(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _inputs()
    attention(q, k, v)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a warm call made a plan")

    monkeypatch.setattr("fa2gen.runtime.dispatch.read_request", forbidden)
    first = attention(q, k, v)
    other = [x.clone() for x in (q, k, v)]
    second = attention(*other)
    assert len(device.launches) == 3
    values = [_unpacked(launch[2]) for launch in device.launches]
    assert values[1]["o"] == first.data_ptr() != second.data_ptr() == values[2]["o"]
    assert [values[2][name] for name in "qkv"] == [x.data_ptr() for x in other]


def test_every_part_of_a_call_is_in_its_key(device: FakeDevice) -> None:
    q, k, v = _inputs(203, 203, 4, 4)
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k, v], {}),
        ([q, k, v], {"causal": True}),
        ([q, k, v], {"softmax_scale": 0.5}),
        ([q, k, v], {"return_lse": True}),
        ([q, k, v], {"config": FwdConfig(block_m=64)}),
        ([q.half(), k.half(), v.half()], {}),
        ([q[:1], k[:1], v[:1]], {}),
        ([q[:, :200], k, v], {}),
        ([q, k[:, :200], v[:, :200]], {}),
        ([q, k.transpose(1, 2).contiguous().transpose(1, 2), v], {}),
        ([q, k, v.transpose(1, 2).contiguous().transpose(1, 2)], {}),
        ([q, k[:, :, :2], v[:, :, :2]], {}),
        ([torch.zeros(q.numel() + 1).bfloat16()[1:].view(q.shape), k, v], {}),
    ]
    for tensors, kwargs in calls:
        attention(*tensors, **kwargs)
    assert len(plan.PLANS) == len(calls)
    for tensors, kwargs in calls:
        attention(*tensors, **kwargs)
    assert len(plan.PLANS) == len(calls)
    launches = [launch[2][48:] for kernel in device.kernels for launch in kernel.launches]
    # The second round repeats the first, whatever the first warmed in between.
    assert len(launches) == 2 * len(calls)
    for kernel in device.kernels:
        half = len(kernel.launches) // 2
        assert [x[2][48:] for x in kernel.launches[:half]] == [x[2][48:] for x in kernel.launches[half:]]


def test_bad_calls_raise_warm_and_cold(device: FakeDevice) -> None:
    q, k, v = _inputs()
    for _ in range(2):
        with pytest.raises(ArgumentError, match="k has dtype"):
            attention(q, k.half(), v)
        with pytest.raises(ArgumentError, match="q must be a"):
            attention(None, k, v)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="softmax_scale must be finite"):
            attention(q, k, v, softmax_scale=math.nan)
        attention(q, k, v)
        with pytest.raises(ArgumentError, match="deterministic must be"):
            attention(q, k, v, deterministic="yes")  # type: ignore[arg-type]


def test_bl_117_cards_of_two_architectures(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target and config are those of the tensors' device, not of device 0, whichever was used first."""
    names = ("rtx-3090", "h200")
    targets: list[str] = []
    monkeypatch.setattr(plan, "device_gpu", lambda index: get_gpu(names[index]))
    monkeypatch.setattr(plan, "compile_kernel", lambda source, target: targets.append(target) or source)
    spec, config = KernelSpec(), default_config(KernelSpec())
    for index in (1, 0, 1, 0):
        plan.loaded_kernel(spec, config, index)
    assert targets == ["sm_90", "sm_86"]
    # 128 KiB of shared memory: one of the two has that much.
    wide = FwdConfig(block_n=96, step_n=48)
    call = request.read_request(
        *(torch.zeros(1, 64, 1, 128).half() for _ in range(3)), causal=False, softmax_scale=None, backend="auto"
    )
    assert plan.match_config(call, 1, wide).config == wide
    with pytest.raises(InfeasibleError, match=r"rtx-3090: .* shared memory"):
        plan.match_config(call, 0, wide)


def test_what_may_change_is_no_key(device: FakeDevice) -> None:
    q, k, v = _inputs()
    causal = torch.tensor(True)
    attention(q, k, v, causal=causal)  # type: ignore[arg-type]
    causal.fill_(False)
    attention(q, k, v, causal=causal, return_lse=np.array(False))  # type: ignore[arg-type]
    assert [kernel.spec.causal for kernel in device.kernels] == [True, False]
    assert not any(isinstance(part, (Tensor, np.ndarray)) for key in plan.PLANS for part in key)
    # What was read is found again under the plain value.
    attention(q, k, v, causal=True)
    assert len(plan.PLANS) == 2


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_launches_hide_from_no_observer(device: FakeDevice, warm: bool) -> None:
    q, k, v = _inputs()
    if warm:
        attention(q, k, v)
    graph = make_fx(lambda *x: attention(*x), tracing_mode="real")(q, k, v)
    assert "fa2gen.attention_fwd" in graph.code
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match="v carries a forward-mode tangent"):
        attention(q, k, forward_ad.make_dual(v, v))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_view_that_negates_is_copied_though_a_plan_fits(device: FakeDevice, name: str) -> None:
    tensors = dict(zip("qkv", _inputs(), strict=True))
    attention(*tensors.values())
    negated = {**tensors, name: torch._neg_view(tensors[name])}
    attention(*negated.values())
    plain, again = (_unpacked(launch[2]) for launch in device.launches)
    assert {key for key in "qkv" if plain[key] != again[key]} == {name}


def test_empty_problems_launch_nothing(device: FakeDevice) -> None:
    q, k, v = _inputs(seqlen_k=0)
    out, lse = attention(q, k, v, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert not device.kernels


def test_a_cold_kernel_in_a_capture_names_the_warmup(device: FakeDevice) -> None:
    q, k, v = _inputs()
    device.capturing = True
    with pytest.raises(LaunchError, match=r"fa2gen.runtime.warmup\(q, k, v, causal=True\)"):
        attention(q, k, v, causal=True)
    assert not device.kernels
    device.capturing = False
    attention(q, k, v, causal=True)
    device.capturing = True
    attention(q, k, v, causal=True)
    # Another size of a loaded kernel needs a plan only.
    attention(q[:, :100], k, v, causal=True)
    assert len(device.launches) == 3


def test_configs(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _inputs(d=128)
    with pytest.raises(InfeasibleError, match="on a100"):
        attention(q, k, v, config=FwdConfig(block_n=4096))
    with pytest.raises(ArgumentError, match="config must be"):
        attention(q, k, v, config="fast")  # type: ignore[arg-type]
    forced = FwdConfig(block_m=64, num_warps=4)
    attention(q, k, v, config=forced)
    assert device.kernels[0].config == forced
    default = plan.Match(default_config(device.kernels[0].spec), "default", 0, False, None)
    monkeypatch.setattr(plan, "lookup", lambda *_, **__: default)
    attention(q, k, v)
    assert device.kernels[1].config == default_config(device.kernels[1].spec)


def test_strict_look_up_raises(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FA2GEN_STRICT", "1")
    with pytest.raises(TableError, match="FA2GEN_STRICT"):
        attention(*_inputs(heads_q=14, d=8))


def test_no_nvcc_is_a_toolchain_error(device: FakeDevice) -> None:
    device.compiler_error = ToolchainError("nvcc was not found")
    with pytest.raises(ToolchainError, match="nvcc was not found"):
        attention(*_inputs())
    device.compiler_error = None
    attention(*_inputs())


def test_plans_are_bounded(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_PLANS", 5)
    q, k, v = _inputs()
    for seqlen in range(1, 20):
        attention(q[:, :seqlen], k, v)
        assert len(plan.PLANS) <= 5
    assert len(device.launches) == 19


def test_grid_limit(device: FakeDevice) -> None:
    q = torch.zeros(1, 1, 1, 8).half().expand(2**20, 1, 4096, 8)
    with pytest.raises(ArgumentError, match="grid's limit"):
        attention(q, q, q)
    assert not device.launches


def test_threads_build_one_kernel(device: FakeDevice) -> None:
    q, k, v = _inputs(5, 7)
    start, errors = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        try:
            attention(q, k, v)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(device.kernels) == 1
    assert len(device.launches) == 8


def test_threads_share_a_plan(device: FakeDevice) -> None:
    """Each launch's pointers belong to one call, however calls interleave."""
    q, k, v = _inputs(5, 7)
    attention(q, k, v)
    inputs = [[x.clone() for x in (q, k, v)] for _ in range(8)]

    def work(tensors: list[Tensor]) -> None:
        for _ in range(200):
            attention(*tensors)

    threads = [threading.Thread(target=work, args=(tensors,)) for tensors in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    triples = {tuple(x.data_ptr() for x in tensors) for tensors in [*inputs, [q, k, v]]}
    seen = [tuple(_unpacked(launch[2])[name] for name in "qkv") for launch in device.launches]
    assert len(seen) == 1 + 8 * 200
    assert set(seen) == triples
