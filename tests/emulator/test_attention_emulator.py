"""The public function through the emulator: the generated kernel, run on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fa2gen.errors import InfeasibleError
from fa2gen.gate import check_forward
from fa2gen.runtime import attention, describe
from fa2gen.spec import FwdConfig, FwdSm90Config


def _inputs(seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q)
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    return [torch.randn(1, s, h, d, generator=generator).to(dtype) for s, h in shapes]


@pytest.mark.parametrize(
    ("d", "dtype", "causal", "heads"),
    [
        (64, torch.bfloat16, False, (2, 2)),
        (128, torch.float16, True, (4, 1)),
        (40, torch.bfloat16, True, (7, 1)),
        (59, torch.float16, False, (2, 1)),
        (1, torch.bfloat16, True, (2, 1)),
    ],
)
def test_values(d: int, dtype: torch.dtype, causal: bool, heads: tuple[int, int]) -> None:
    q, k, v = _inputs(33, 77, *heads, d, dtype)
    out, lse = attention(q, k, v, causal=causal, return_lse=True, backend="emulator")
    report = check_forward(out, lse, q, k, v, causal=causal)
    assert report.passed, report.text
    assert out.is_contiguous()


def test_copies_views_and_scales() -> None:
    q, k, v = _inputs(17, 33, 2, 2, 64, torch.bfloat16)
    transposed = k.transpose(2, 3).contiguous().transpose(2, 3)
    permuted = v.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = attention(q, transposed, permuted, softmax_scale=-0.2, return_lse=True, backend="emulator")
    assert check_forward(out, lse, q, k, v, causal=False, softmax_scale=-0.2).passed
    unaligned = torch.zeros(k.numel() + 1).bfloat16()[1:].view(k.shape).copy_(k)
    for rows, alignment in ((q, 2), (q.expand(-1, -1, 2, -1).repeat(1, 8, 2, 1), 16)):
        assert describe(rows, unaligned, v, backend="emulator").spec.alignment == alignment
        out, lse = attention(rows, unaligned, v, return_lse=True, backend="emulator")
        assert check_forward(out, lse, rows, k, v, causal=False).passed


def test_config_is_obeyed() -> None:
    q, k, v = _inputs(17, 33, 1, 1, 64, torch.bfloat16)
    config = FwdConfig(block_m=64, block_n=32, step_n=32, num_warps=4, softmax="guarded")
    assert describe(q, k, v, backend="emulator", config=config).softmax == "guarded"
    out = attention(q, k, v, backend="emulator", config=config)
    assert isinstance(out, Tensor)
    assert check_forward(out, None, q, k, v, causal=False).passed


def test_configs_of_the_sm90_family_are_obeyed() -> None:
    q, k, v = _inputs(70, 90, 4, 2, 59, torch.bfloat16)
    config = FwdSm90Config(block_n=48, scheduler="dynamic")
    assert describe(q, k, v, backend="emulator", config=config).config == config
    out, lse = attention(q, k, v, softmax_scale=-0.2, causal=True, return_lse=True, backend="emulator", config=config)
    assert check_forward(out, lse, q, k, v, causal=True, softmax_scale=-0.2).passed
    few, odd = q[:, :3], k.new_zeros(1, 90, 2, 61)[..., :56]
    with pytest.raises(InfeasibleError, match="TMA cannot read it: k has a row stride of 122 elements"):
        attention(few[..., :56].contiguous(), odd, odd, backend="emulator", config=config)
    with pytest.raises(InfeasibleError, match=r"block_m 32 .* warpgroups"):
        attention(q, k, v, backend="emulator", config=FwdSm90Config(block_m=32))


def test_a_default_device_is_for_other_tensors() -> None:
    q, k, v = _inputs(17, 33, 1, 1, 64, torch.bfloat16)
    with torch.device("meta"):
        out = attention(q, k, v, backend="emulator")
    assert isinstance(out, Tensor)
    assert check_forward(out, None, q, k, v, causal=False).passed
