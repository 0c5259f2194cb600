"""The public function on CPU tensors: results, every argument it refuses, and its life as a torch operator."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fa2gen
import fa2gen.runtime.attention
from fa2gen.constraints import default_config
from fa2gen.errors import ArgumentError, InfeasibleError, UnsupportedError
from fa2gen.runtime import attention, describe
from fa2gen.spec import FwdConfig, KernelSpec


def _inputs(
    batch: int = 2, seqlen_q: int = 5, seqlen_k: int = 7, heads_q: int = 4, heads_k: int = 2, head_dim: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q)
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    q, k, v = (torch.randn(batch, s, h, head_dim, generator=generator).bfloat16() for s, h in shapes)
    return q, k, v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, scale: float | None = None) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def _assert_rounded(out: Tensor, ref: Tensor) -> None:
    """The reference backend is float64 rounded once (fp16 has subnormals from 2^-14 down)."""
    torch.testing.assert_close(
        out.double(), ref, rtol=2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11, atol=2.0**-25
    )


def test_module_and_function_share_a_name() -> None:
    q, k, v = _inputs()
    assert fa2gen.runtime.attention is attention
    _assert_rounded(fa2gen.runtime.attention(q, k, v), _sdpa(q, k, v))
    code = "import fa2gen.runtime.attention\nimport sys\nassert callable(fa2gen.runtime.attention)\n"
    code += "assert sys.modules['fa2gen.runtime.attention'].attention is fa2gen.runtime.attention"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads_q", "heads_k"), [(4, 4), (8, 2), (7, 1), (8, 1)])
@pytest.mark.parametrize("head_dim", [40, 59, 256])
def test_values(dtype: torch.dtype, heads_q: int, heads_k: int, head_dim: int) -> None:
    q, k, v = (x.to(dtype) for x in _inputs(2, 33, 65, heads_q, heads_k, head_dim))
    out = attention(q, k, v)
    assert isinstance(out, Tensor)
    assert out.dtype == dtype
    assert out.is_contiguous()
    _assert_rounded(out, _sdpa(q, k, v))
    causal, lse = attention(q, k, v, causal=True, return_lse=True)
    _assert_rounded(causal, _sdpa(q, k, v, torch.ones(33, 65, dtype=torch.bool).tril(32)))
    assert lse.shape == (2, heads_q, 33)
    assert lse.dtype == torch.float32


def test_more_queries_than_keys() -> None:
    zeros = torch.zeros(1, 5, 1, 8, dtype=torch.float16)
    v = torch.tensor([1.0, 2.0]).half().view(1, 2, 1, 1).expand(1, 2, 1, 8)
    out, lse = attention(zeros, zeros[:, :2], v, causal=True, return_lse=True)
    assert out[0, :, 0, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.5]
    assert lse[0, 0, :4].tolist() == [-math.inf, -math.inf, -math.inf, 0.0]
    assert lse[0, 0, 4].item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "expected"), [(1, 16, [7.5]), (2, 5, [1.5, 2.0])])
def test_causal_is_bottom_right(seqlen_q: int, seqlen_k: int, expected: list[float]) -> None:
    k = torch.zeros(1, seqlen_k, 1, 8).half()
    v = torch.arange(float(seqlen_k)).half().view(1, -1, 1, 1).expand(1, seqlen_k, 1, 8)
    out = attention(k[:, :seqlen_q], k, v, causal=True)
    assert isinstance(out, Tensor)
    assert out[0, :, 0, 0].tolist() == expected


def test_lse_is_the_natural_log() -> None:
    zeros = torch.zeros(1, 4, 1, 8).half()
    _, lse = attention(zeros, zeros, zeros, return_lse=True)
    assert lse[0, 0].tolist() == pytest.approx([math.log(4)] * 4, abs=1e-6)


def test_gigantic_logits() -> None:
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    out, lse = attention(x, x, x, softmax_scale=0.125, return_lse=True)
    assert torch.equal(out, x)
    assert lse.item() == pytest.approx(1.4177e11, rel=1e-4)


@pytest.mark.parametrize("scale", [-0.125, 0, 0.0, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_any_finite_scale(scale: float, causal: bool) -> None:
    q, k, v = _inputs(1, 77, 77, 2, 2)
    mask = torch.ones(77, 77, dtype=torch.bool).tril() if causal else None
    _assert_rounded(attention(q, k, v, causal=causal, softmax_scale=scale), _sdpa(q, k, v, mask, float(scale)))


def test_strides_of_every_kind() -> None:
    q, k, v = _inputs(3, 3, 3, 3, 3)
    expected = attention(q, k, v)
    permuted = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attention(*permuted), expected)
    assert torch.equal(attention(q, k, permuted[2]), expected)
    last = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    assert torch.equal(attention(*last), expected)
    one = k[:, :, :1].expand(3, 3, 3, 64)
    assert torch.equal(attention(q, one, one), attention(q, one.contiguous(), one.contiguous()))


@pytest.mark.parametrize("backend", ["auto", "reference", "emulator"])
def test_zero_sizes(backend: str) -> None:
    def empty(batch: int, seqlen: int, heads: int) -> Tensor:
        return torch.ones(batch, seqlen, heads, 64).half()

    for q, k in (
        (empty(0, 16, 4), empty(0, 16, 4)),
        (empty(2, 0, 4), empty(2, 16, 4)),
        (empty(2, 16, 0), empty(2, 16, 0)),
        (empty(2, 16, 0), empty(2, 16, 4)),
        (empty(2, 16, 4), empty(2, 0, 4)),
    ):
        for causal in (False, True):
            out, lse = attention(q, k, k, causal=causal, return_lse=True, backend=backend)
            assert out.shape == q.shape
            assert out.dtype == q.dtype
            assert (out == 0).all()
            assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
            assert (lse == -math.inf).all()


Q, K, V = _inputs()
BAD: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], type[Exception], str]] = {
    "3-D": ((Q[0], K, V), {}, ArgumentError, "q must be .*head_dim"),
    "2-D v": ((Q, K, V[0, 0]), {}, ArgumentError, "v must be"),
    "list": (([1.0], K, V), {}, ArgumentError, "q must be a torch.Tensor, got list"),
    "numpy": ((Q.float().numpy(), K, V), {}, ArgumentError, "q must be a torch.Tensor, got ndarray"),
    "None": ((Q, None, V), {}, ArgumentError, "k must be a torch.Tensor, got NoneType"),
    "mixed dtypes": ((Q, K.half(), V), {}, ArgumentError, "k has dtype torch.float16 and q torch.bfloat16"),
    "head_dim mismatch": ((Q, K[..., :32], V[..., :32]), {}, ArgumentError, "k has head_dim 32 and q 64"),
    "batch mismatch": ((Q, K[:1], V[:1]), {}, ArgumentError, "k has batch 1 and q 2"),
    "k and v differ": ((Q, K, V[:, :3]), {}, ArgumentError, "k has shape .* and v"),
    "k and v heads differ": ((Q, K, V[:, :, :1]), {}, ArgumentError, "k has shape .* and v"),
    "33 heads over 2": (_inputs(heads_q=33), {}, ArgumentError, "q has 33 heads and k and v have 2"),
    "2 heads over 4": (_inputs(heads_q=2, heads_k=4), {}, ArgumentError, "q has 2 heads and k and v have 4"),
    "no key heads": (_inputs(heads_k=0), {}, ArgumentError, "q has 4 heads and k and v have 0"),
    "head_dim 0": (_inputs(head_dim=0), {}, ArgumentError, "head_dim 0; 1 to 256"),
    "head_dim 257": (_inputs(head_dim=257), {}, UnsupportedError, "head_dim 257 .* 1 to 256"),
    "head_dim 264": (_inputs(head_dim=264), {"backend": "emulator"}, UnsupportedError, "head_dim 264 .* 1 to 256"),
    "NaN scale": ((Q, K, V), {"softmax_scale": math.nan}, ArgumentError, "softmax_scale must be finite"),
    "infinite scale": ((Q, K, V), {"softmax_scale": math.inf}, ArgumentError, "softmax_scale must be finite"),
    "scale text": ((Q, K, V), {"softmax_scale": "1"}, ArgumentError, "softmax_scale must be a number"),
    "scale list": ((Q, K, V), {"softmax_scale": [1]}, ArgumentError, "softmax_scale must be a number"),
    "a scale beyond any float": ((Q, K, V), {"softmax_scale": 10**400}, ArgumentError, "softmax_scale must be finite"),
    "a scale beyond float32": (
        (Q, K, V),
        {"softmax_scale": -1e39, "backend": "emulator"},
        UnsupportedError,
        "softmax_scale .* too large",
    ),
    "a causal array": ((Q, K, V), {"causal": np.array([True, False])}, ArgumentError, "causal must be"),
    "a causal tensor": ((Q, K, V), {"causal": torch.ones(2)}, ArgumentError, "causal must be"),
    "a return_lse array": ((Q, K, V), {"return_lse": np.ones(2)}, ArgumentError, "return_lse must be"),
    "a backend array": ((Q, K, V), {"backend": np.array(["auto", "cuda"])}, ArgumentError, "backend must be"),
    "nested": ((torch.nested.nested_tensor([Q[0], Q[1]]), K, V), {}, ArgumentError, "q must be a dense.*nested"),
    "causal text": ((Q, K, V), {"causal": "yes"}, ArgumentError, "causal must be"),
    "return_lse text": ((Q, K, V), {"return_lse": "yes"}, ArgumentError, "return_lse must be"),
    "backend": ((Q, K, V), {"backend": "triton"}, ArgumentError, "backend must be one of auto, cuda, emulator"),
    "cuda backend on CPU": ((Q, K, V), {"backend": "cuda"}, ArgumentError, "backend cuda needs CUDA tensors"),
    "meta": (tuple(x.to("meta") for x in (Q, K, V)), {}, ArgumentError, "on device meta"),
    "mixed devices": ((Q, K, V.to("meta")), {}, ArgumentError, "v is on device meta and q on cpu"),
    "sparse": ((Q.to_sparse(), K, V), {}, ArgumentError, "q must be a dense"),
    "config for the reference": ((Q, K, V), {"config": FwdConfig()}, ArgumentError, "config has no meaning"),
    "config of another type": (
        (Q, K, V),
        {"config": {"block_m": 64}, "backend": "emulator"},
        ArgumentError,
        "config must be",
    ),
    "config of another type, no keys": (
        (Q, K[:, :0], V[:, :0]),
        {"config": "fast", "backend": "emulator"},
        ArgumentError,
        "config must be",
    ),
    "config not legal": (
        (Q, K, V),
        {"config": FwdConfig(block_n=4096), "backend": "emulator"},
        InfeasibleError,
        "config sm80_128x4096",
    ),
}
for _dtype in (torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn):
    BAD[str(_dtype)] = (
        tuple(x.to(_dtype) for x in (Q, K, V)),
        {},
        ArgumentError,
        f"q has dtype {_dtype}; torch.float16 and torch.bfloat16",
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_and_are_named(name: str) -> None:
    args, kwargs, error, message = BAD[name]
    with pytest.raises(error, match=message):
        attention(*args, **kwargs)


def test_unknown_keywords_raise() -> None:
    with pytest.raises(TypeError, match="dropout_p"):
        attention(Q, K, V, dropout_p=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_forward_mode_derivatives_are_refused(backend: str) -> None:
    """A kernel would drop the tangent and nobody would notice."""
    with forward_ad.dual_level():
        with pytest.raises(UnsupportedError, match="q carries a forward-mode tangent"):
            attention(forward_ad.make_dual(Q, torch.ones_like(Q)), K, V, backend=backend)
        assert torch.equal(attention(Q, K, V), attention(Q, K, V, backend="reference"))

    def call(x: Tensor) -> Any:
        return attention(x, K, V, backend=backend)

    with pytest.raises(UnsupportedError, match="tangent"):
        torch.func.jvp(call, (Q,), (Q,))
    with pytest.raises(UnsupportedError, match="tangent"):
        torch.func.jacfwd(call)(Q)
    with pytest.raises(UnsupportedError, match="tangent"):
        torch.func.jvp(torch.vmap(call), (torch.stack([Q, Q]),), (torch.stack([Q, Q]),))
    with pytest.raises(UnsupportedError, match=r"transform of torch.func"):
        torch.func.grad(lambda x: call(x).sum())(Q)


@pytest.mark.parametrize(
    ("name", "value"), [("causal", 1), ("causal", np.True_), ("softmax_scale", np.float32(0.5)), ("softmax_scale", 2)]
)
def test_numbers_of_other_types(name: str, value: Any) -> None:
    plain: dict[str, Any] = {name: bool(value) if name == "causal" else float(value)}
    assert torch.equal(attention(Q, K, V, **{name: value}), attention(Q, K, V, **plain))


def test_parameters_and_inference_tensors() -> None:
    parameter = torch.nn.Parameter(Q, requires_grad=False)
    assert torch.equal(attention(parameter, K, V), attention(Q, K, V))
    with torch.inference_mode():
        assert torch.equal(attention(Q.clone(), K, V), attention(Q, K, V))


def test_describe() -> None:
    q, k, v = _inputs(2, 113, 203, 8, 2)
    reference = describe(q, k, v, causal=True)
    assert (reference.backend, reference.softmax, reference.config) == ("reference", "float64", None)
    assert reference.spec == KernelSpec(head_dim=64, causal=True, gqa_ratio=4)
    emulator = describe(q, k, v, backend="emulator")
    assert emulator.config == default_config(emulator.spec)
    assert emulator.config.slug() in str(emulator)
    assert "seqlen 113 x 203, heads 8 over 2" in str(emulator)
    assert describe(-q, k, v, backend="emulator", softmax_scale=-1.0).copies == (
        "q: negated, since softmax_scale is negative",
    )
    with pytest.raises(ArgumentError, match="q must be"):
        describe(q[0], k, v)
    with pytest.raises(ArgumentError, match="config has no meaning"):
        describe(q, k, v, config=FwdConfig())
    with pytest.raises(UnsupportedError, match=r"softmax_scale .* too large"):
        describe(q, k, v, softmax_scale=1e39, backend="emulator")
    many = q[:1, :1, :1].expand(2**20, 1, 4096, 64)
    with pytest.raises(UnsupportedError, match="grid's limit"):
        describe(many, many, many, backend="emulator")


def test_strides_of_single_elements_do_not_decide_the_kernel() -> None:
    q, k, v = _inputs(1, 1, 7, 4, 4)
    odd = torch.as_strided(q, q.shape, (3, 5, 64, 1))
    assert describe(odd, k, v, backend="emulator").spec.alignment == 16
