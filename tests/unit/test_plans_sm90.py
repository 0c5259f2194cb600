"""Calls that kernels of the sm90 family serve, without a GPU: parameters, tickets, and where TMA cannot read."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fa2gen
from fa2gen.errors import ArgumentError, InfeasibleError
from fa2gen.launch import fwd_plan
from fa2gen.problem import Problem
from fa2gen.runtime import attention, describe, plan, plan_forward, request, reset
from fa2gen.spec import FwdConfig, FwdSm90Config, KernelSpec
from tests.runtime_fakes import FakeDevice, call_inputs, fake_map, unpacked

CONFIG = FwdSm90Config()
DYNAMIC = FwdSm90Config(scheduler="dynamic", epilogue="direct")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    reset()
    yield FakeDevice(monkeypatch, "h200")
    reset()


def test_parameters_begin_with_maps_of_the_tensors(device: FakeDevice) -> None:
    q, k, v = call_inputs()
    out, lse = attention(q, k, v, causal=True, softmax_scale=0.25, return_lse=True, config=CONFIG)
    ((grid, block, params, _),) = device.launches
    values = unpacked(params, family="sm90")
    spec, problem = KernelSpec(head_dim=64, causal=True, gqa_ratio=4), Problem(2, 113, 203, 8, 2)
    strides = {name: x.stride()[:3] for name, x in (("q", q), ("k", k), ("v", v), ("o", out))}
    (launch,) = fwd_plan(
        spec, CONFIG, problem, strides=strides, softmax_scale=0.25, l2_bytes=device.gpu.l2_bytes, num_sms=132
    ).launches
    assert (grid, block) == ((16, 1, 1), (384, 1, 1)) == (launch.grid, (launch.num_threads, 1, 1))
    for map, x, name in zip(launch.tensor_maps, (q, k, v, out), ("q_map", "k_map", "v_map", "o_map"), strict=True):
        assert map is not None
        assert values[name] == fake_map(map, x.data_ptr())
    assert (values["o"], values["softmax_lse"], values["tickets"]) == (out.data_ptr(), lse.data_ptr(), 0)
    assert (values["num_tiles"], values["num_m_blocks"], values["softmax_scale"]) == (16, 1, 0.25)
    assert len(params) % 64 == 0


def test_no_map_of_an_output_that_leaves_from_registers(device: FakeDevice) -> None:
    out = attention(*call_inputs(), config=DYNAMIC)
    assert isinstance(out, Tensor)
    values = unpacked(device.launches[0][2], family="sm90")
    assert values["o_map"] == bytes(128)
    assert values["o"] == out.data_ptr()
    assert values["softmax_lse"] == 0


def test_every_call_has_a_ticket_word_of_its_own(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    empty = plan._empty_function(torch.device("cpu"))

    def keeping(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        kept.append(empty(shape, strides, dtype))
        return kept[-1]

    monkeypatch.setattr(plan, "_empty_function", lambda device: keeping)
    inputs = call_inputs()
    for _ in range(3):
        attention(*inputs, config=DYNAMIC)
    words = [unpacked(params, family="sm90")["tickets"] for _, _, params, _ in device.launches]
    assert len({*words}) == 3
    assert words == [x.data_ptr() for x in kept if x.dtype == torch.int64]


def test_the_ticket_word_is_held_until_the_launch(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up before, another thread may take its memory for an output, and launch first."""
    words: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    empty = plan._empty_function(torch.device("cpu"))

    def watched(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        new = empty(shape, strides, dtype)
        if dtype == torch.int64:
            words.append(weakref.ref(new))
        return new

    monkeypatch.setattr(plan, "_empty_function", lambda device: watched)
    device.at_launch = lambda: alive.append(words[-1]() is not None)
    for return_lse in (False, True):
        attention(*call_inputs(), return_lse=return_lse, config=DYNAMIC)
    assert alive == [True, True]
    assert all(word() is None for word in words)


def test_addresses_are_the_calls_own(device: FakeDevice) -> None:
    """A plan serves tensors of equal shapes and strides, wherever they lie."""
    for _ in range(2):
        q, k, v = call_inputs()
        attention(q, k, v, config=CONFIG)
        values = unpacked(device.launches[-1][2], family="sm90")
        for name, x in (("q_map", q), ("k_map", k), ("v_map", v)):
            assert values[name][:8] == x.data_ptr().to_bytes(8, "little")
    assert len(plan.PLANS) == 1


def test_a_forced_config_needs_tensors_that_tma_reads(device: FakeDevice) -> None:
    q, _, _ = call_inputs(seqlen_q=4)
    odd = torch.zeros(2, 203, 2, 67).bfloat16()[..., :64]
    with pytest.raises(InfeasibleError, match="TMA cannot read it: k has a batch stride of 27202 elements"):
        attention(q, odd, odd, config=CONFIG)
    tail = torch.zeros(2 * 203 * 2 * 64 + 1).bfloat16()[1:].view(2, 203, 2, 64)
    with pytest.raises(InfeasibleError, match="v begins at an address that is no multiple of 16 bytes"):
        attention(q, tail.clone(), tail, config=CONFIG)
    assert not device.launches
    # Many queries: the unaligned tensors are copied, and the copies can be read.
    attention(call_inputs(seqlen_q=600)[0], odd, odd, config=CONFIG)
    assert device.kernels[0].config == CONFIG


def test_the_other_family_serves_what_tma_cannot_read(device: FakeDevice) -> None:
    q, k, v = call_inputs(seqlen_q=4)
    odd = torch.zeros(2, 203, 2, 67).bfloat16()[..., :64]
    attention(q, odd, odd)
    assert isinstance(device.kernels[0].config, FwdConfig)
    said = describe(q, odd, odd)
    assert said.config == device.kernels[0].config
    assert said.obstacle is not None
    assert "k has a batch stride of 27202 elements, which is no multiple of 16 bytes" in said.obstacle
    assert "family   sm80, since TMA cannot read the tensors: k has" in str(said)
    assert describe(q, k, v).obstacle is None


def test_other_chips_have_no_such_family(monkeypatch: pytest.MonkeyPatch) -> None:
    reset()
    FakeDevice(monkeypatch)
    q, _, _ = call_inputs(seqlen_q=4)
    odd = torch.zeros(2, 203, 2, 67).bfloat16()[..., :64]
    assert describe(q, odd, odd).obstacle is None
    with pytest.raises(InfeasibleError, match=r"needs compute capability 9\.0, sm_80 has no wgmma"):
        attention(*call_inputs(), config=CONFIG)
    reset()


def test_no_repairs_to_count(device: FakeDevice) -> None:
    q, k, v = call_inputs()
    wanted = request.read_request(q, k, v, causal=False, softmax_scale=None, backend="auto")
    with pytest.raises(ArgumentError, match="repairs nothing"):
        plan_forward.build_plan(wanted, CONFIG, return_lse=False, repairs=torch.zeros(1))


def test_configs_that_an_error_names_exist(device: FakeDevice) -> None:
    with pytest.raises(ArgumentError, match="config must be a") as caught:
        attention(*call_inputs(), config="sm90")  # type: ignore[arg-type]
    names = re.findall(r"fa2gen\.(\w+)", str(caught.value))
    assert [getattr(fa2gen, name) for name in names] == [FwdConfig, FwdSm90Config]
