"""What a call copies before its kernel runs, seen in the launches of a GPU that is not there."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fa2gen.errors import ArgumentError
from fa2gen.runtime import attention, describe, plan, reset
from fa2gen.runtime.copies import copied
from fa2gen.spec import FwdConfig, KernelSpec
from tests.runtime_fakes import FakeDevice
from tests.runtime_fakes import call_inputs as _inputs
from tests.runtime_fakes import unpacked as _unpacked


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    reset()
    yield FakeDevice(monkeypatch)
    reset()


def _unaligned(x: Tensor) -> Tensor:
    """The same values, two bytes beyond a multiple of 16."""
    return torch.zeros(x.numel() + 1).to(x.dtype)[1:].view(x.shape).copy_(x)


def _odd_rows(x: Tensor) -> Tensor:
    """The same values, every row three elements longer than its head dim."""
    return torch.nn.functional.pad(x, (0, 3))[..., : x.shape[3]]


@pytest.mark.parametrize("move", [_unaligned, _odd_rows])
@pytest.mark.parametrize("seqlen_q", [64, 65])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_unaligned_views(device: FakeDevice, move: Any, seqlen_q: int, which: str) -> None:
    """Four heads share a key: with 65 queries 260 do, and what is unaligned is copied; with 64 only q is."""
    tensors = dict(zip("qkv", _inputs(seqlen_q=seqlen_q), strict=True))
    tensors[which] = move(tensors[which])
    copies = which == "q" or seqlen_q == 65
    for _ in range(2):
        attention(**tensors)
        values = _unpacked(device.launches[-1][2])
        assert [name for name in "qkv" if values[name] != tensors[name].data_ptr()] == ([which] if copies else [])
    (kernel,) = device.kernels
    assert kernel.spec.alignment == (16 if copies else 2)
    assert len(plan.PLANS) == 1


def test_a_decode_that_cannot_stay_aligned_copies_nothing(device: FakeDevice) -> None:
    q, k, v = _inputs(seqlen_q=1)
    attention(_unaligned(q), _unaligned(k), v)
    values = _unpacked(device.launches[0][2])
    assert device.kernels[0].spec.alignment == 2
    assert values["q"] % 16 == values["k"] % 16 == 2


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("d", "width"), [(1, 8), (59, 64), (111, 112), (250, 256)])
def test_odd_head_dims_are_padded(device: FakeDevice, d: int, width: int, return_lse: bool) -> None:
    q, k, v = _inputs(d=d)
    for _ in range(2):
        result = attention(q, k, v, return_lse=return_lse)
        out = result[0] if return_lse else result
        assert (out.shape, out.is_contiguous()) == (q.shape, True)
        # Memory of its own: not that of the kernel's wider output.
        assert out.untyped_storage().nbytes() == 2 * q.numel()
    (kernel,) = device.kernels
    assert (kernel.spec.head_dim, kernel.spec.alignment) == (width, 16)
    assert len(plan.PLANS) == 1
    values = _unpacked(device.launches[1][2])
    assert values["softmax_scale"] == struct.unpack("f", struct.pack("f", d**-0.5))[0]
    assert [values[f"{name}_head_stride"] for name in "qkvo"] == [width] * 4
    assert values["q"] != q.data_ptr()


def test_copies(device: FakeDevice) -> None:
    q, k, v = _inputs()
    k.fill_(1.0)
    transposed = k.transpose(2, 3).contiguous().transpose(2, 3)
    attention(q, transposed, v)
    assert _unpacked(device.launches[0][2])["k"] != transposed.data_ptr()
    assert _unpacked(device.launches[0][2])["k_row_stride"] == 2 * 64
    attention(q, k, v, softmax_scale=-0.5)
    values = _unpacked(device.launches[1][2])
    assert values["softmax_scale"] == 0.5
    assert values["q"] != q.data_ptr()
    assert values["k"] == k.data_ptr()


def test_a_copying_call_refuses_what_others_refuse(device: FakeDevice) -> None:
    """Warm or not: its plan is that of its copies, which know nothing of a config's type."""
    tensors = _inputs(d=59)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="backward_config must be"):
            attention(*tensors, backward_config=FwdConfig())  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="config must be"):
            attention(*tensors, config={"block_m": 64})  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="return_lse must be"):
            attention(*tensors, return_lse=2)  # type: ignore[arg-type]
        attention(*tensors)
    assert len(device.launches) == 2


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("d", [59, 64])
def test_a_copy_repeats_what_was_repeated(d: int, negated: bool) -> None:
    """A head expanded to 4096 is copied once, not 4096 times, and padded with zeros."""
    one = torch.randn(2, 7, 1, d).bfloat16()
    copy = copied(one.expand(2, 7, 4096, d), negated=negated)
    assert copy.shape == (2, 7, 4096, 64)
    assert copy.untyped_storage().nbytes() == 2 * 7 * 64 * 2
    assert torch.equal(copy[..., :d], (-one if negated else one).expand(2, 7, 4096, d))
    assert (copy[..., d:] == 0).all()
    assert copied(one[:, :, :, :1].expand(2, 7, 1, d), negated=negated).stride(3) == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_negated_views_are_copied(device: FakeDevice) -> None:
    """The imaginary part of a conjugate: memory holds the values before the negation."""
    z = torch.complex(torch.zeros(2, 113, 8, 64).half(), torch.randn(2, 113, 8, 64).half())
    negated = z.conj().imag
    assert negated.is_neg()
    for sign in (False, True):
        copy = copied(negated, negated=sign)
        assert not copy.is_neg()
        assert torch.equal(copy, z.imag if sign else -z.imag)
    attention(negated, *(torch.zeros(2, 203, 2, 64).half() for _ in range(2)))
    assert _unpacked(device.launches[-1][2])["q"] != negated.data_ptr()


def test_describe_names_every_copy() -> None:
    q, k, v = _inputs()
    unaligned = _unaligned(q)
    aligned = describe(unaligned, k, v, backend="emulator")
    assert aligned.spec.alignment == 16
    assert aligned.copies == ("q: its base or a stride is not a multiple of 16 bytes",)
    # Nobody reads the keys twice: they are not copied for a kernel that could move them faster, nor is q.
    decode = describe(unaligned[:, :1], _unaligned(k), v, backend="emulator")
    assert (decode.spec.alignment, decode.copies) == (2, ())
    # A copy is aligned whatever the original was.
    transposed = describe(unaligned.transpose(2, 3).contiguous().transpose(2, 3), k, v, backend="emulator")
    assert transposed.copies == ("q: its last dimension is not contiguous",)
    assert transposed.spec.alignment == 16
    odd = describe(*_inputs(d=59), backend="emulator")
    assert odd.spec == KernelSpec(head_dim=64, gqa_ratio=4)
    padded = [f"{name}: head_dim 59 is padded to 64" for name in "qkv"]
    assert odd.copies == (*padded, "output: cut back to head_dim 59")
    # The reference reads anything where it lies.
    assert describe(*_inputs(d=59)).copies == ()


def test_zeros_without_memory(device: FakeDevice) -> None:
    """Address 0 would be the end of the process's CUDA context."""
    q, k, _ = _inputs()
    zeros = torch._efficientzerotensor(k.shape, dtype=k.dtype)
    assert zeros.data_ptr() == 0
    for _ in range(2):
        attention(q, zeros, zeros)
        assert all(_unpacked(device.launches[-1][2])[name] for name in "qkv")
