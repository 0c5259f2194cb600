"""Inputs that broke attention libraries in public reports, at the sizes at which they did, on a GPU.

``test_bl_<number>`` is the case of that number in the project's collection of such reports; small ones are in
``tests/emulator/test_field_cases.py``. All of it runs once with each kernel family of the GPU and its default configs;
only what TMA cannot read runs the ``sm80`` family's both times. A dozen kernels of each serve all tests, and are
compiled at the beginning, in parallel.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fa2gen.codegen import render_kernel
from fa2gen.compile import compile_many
from fa2gen.constraints import default_config_of, families_on
from fa2gen.constraints_sm90 import compile_target
from fa2gen.errors import ArgumentError, CompileError, UnsupportedError
from fa2gen.gate import check_forward
from fa2gen.runtime import attention, describe, plan
from fa2gen.runtime.families import tma_obstacle
from fa2gen.runtime.request import Request, read_request
from fa2gen.spec import FAMILIES, BwdConfig, ForwardConfig, FwdConfig, KernelSpec

BF16, FP16 = torch.bfloat16, torch.float16
SPECS = (
    KernelSpec(head_dim=16),
    *(KernelSpec(head_dim=d, causal=causal) for d in (64, 128, 192) for causal in (False, True)),
    KernelSpec(head_dim=64, dtype="fp16", causal=True),
    KernelSpec(head_dim=128, causal=True, gqa_ratio=4),
    KernelSpec(head_dim=128, gqa_ratio=8),
    KernelSpec(head_dim=128, causal=True, gqa_ratio=8),
    KernelSpec(head_dim=128, causal=True, alignment=2),
)


class _Run:
    """The family whose turn it is."""

    family = "sm80"


@pytest.fixture(scope="module", autouse=True, params=FAMILIES["fwd"])
def _family(request: pytest.FixtureRequest) -> Iterator[None]:
    index = torch.cuda.current_device()
    gpu = plan.device_gpu(index)
    if request.param not in families_on(SPECS[0], gpu.arch):
        pytest.skip(f"the {request.param} family does not run on {gpu.name}")
    jobs = [(spec, default_config_of(spec, family)) for spec in SPECS for family in _families_of(spec, request.param)]
    compiled = compile_many([(render_kernel(*job), compile_target(job[1], gpu.target)) for job in jobs])
    for (spec, config), kernel in zip(jobs, compiled, strict=True):
        assert not isinstance(kernel, CompileError), kernel
        plan.loaded_kernel(spec, config, index, kernel)
    _Run.family = request.param
    yield
    _Run.family = "sm80"


def _families_of(spec: KernelSpec, family: str) -> set[str]:
    """A decoding kernel's cache may be unaligned in its strides alone, and then sm80 serves an aligned spec too."""
    return {"sm80"} if spec.alignment != 16 else {"sm80", family}


def _default(spec: KernelSpec) -> ForwardConfig:
    config = default_config_of(spec, _Run.family)
    assert not isinstance(config, BwdConfig)
    return config


def _serving(request: Request) -> ForwardConfig:
    """The config of a call: of the family whose turn it is, if that can read the tensors."""
    config = default_config_of(request.spec, "sm80" if tma_obstacle(request) else _Run.family)
    assert not isinstance(config, BwdConfig)
    return config


def _randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def _qkv(batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, d: int) -> tuple[Tensor, ...]:
    shapes = ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    return tuple(_randn(batch, s, h, d) for s, h in shapes)


def _run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE, in memory that held NaN (the allocator hands the freed blocks out again)."""
    poison = (torch.full_like(q, math.nan), torch.full((q.shape[:3].numel(),), math.nan, device="cuda"))
    del poison
    causal, scale = options.get("causal", False), options.get("softmax_scale")
    request = read_request(q, k, v, causal=causal, softmax_scale=scale, backend="cuda")
    assert request.spec in SPECS, f"{request.spec.slug()} is not compiled ahead"
    out, lse = attention(q, k, v, return_lse=True, config=_serving(request), **options)
    return out, lse


def _check(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    out, lse = _run(q, k, v, causal=causal, softmax_scale=scale)
    report = check_forward(out, lse, q, k, v, causal=causal, softmax_scale=scale)
    assert report.passed, report.text
    return out


def _check_part(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: slice, batch: slice = slice(None)
) -> None:
    """Rows of a call without a mask, each of which depends on itself and all keys."""
    report = check_forward(out[batch, rows], lse[batch, :, rows], q[batch, rows], k[batch], v[batch], causal=False)
    assert report.passed, report.text


def _needs_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free / 2**30:.0f} are free")


def test_bl_002_one_key_with_gigantic_logits() -> None:
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=BF16, device="cuda")
    out, lse = _run(x, x, x, softmax_scale=0.125)
    assert torch.equal(out, x)
    assert lse.item() == pytest.approx(1.4177e11, rel=1e-4)


@pytest.mark.parametrize(("d", "dtype", "causal"), [(64, BF16, False), (64, FP16, True), (128, BF16, True)])
@pytest.mark.parametrize("seqlen", [704, 705])
def test_bl_004_very_negative_uniform_logits(seqlen: int, d: int, dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (_randn(1, seqlen, 1, d, dtype=dtype) for _ in range(3))
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -120.0 * math.sqrt(d)
    _check(q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.125, 1.0, 1e-30])
def test_bl_008_scales_of_any_sign(scale: float, causal: bool) -> None:
    _check(*_qkv(1, 77, 77, 2, 2, 64), causal=causal, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 192])
def test_bl_016_lengths_around_every_tile_border(d: int, causal: bool) -> None:
    lengths = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 193, 255, 257, 1025)
    for seqlen_q, seqlen_k in itertools.product(lengths, lengths):
        _check(*_qkv(1, seqlen_q, seqlen_k, 1, 1, d), causal=causal)


@pytest.mark.parametrize("compiled", [False, True])
def test_bl_017_066_070_zero_sizes(compiled: bool) -> None:
    def call(q: Tensor, k: Tensor) -> Any:
        return attention(q, k, k, causal=True, return_lse=True)

    run = torch.compile(call, backend="aot_eager", dynamic=True) if compiled else call
    for b, sq, sk, h in ((0, 16, 16, 4), (0, 1, 128, 4), (2, 0, 16, 4), (2, 16, 16, 0), (2, 128, 0, 4), (1, 1, 0, 4)):
        q, k = _randn(b, sq, h, 128), _randn(b, sk, h, 128)
        out, lse = run(q, k)
        assert (out.shape, lse.shape) == (q.shape, (b, h, sq))
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    q = _randn(2, 16, 4, 64)
    with pytest.raises(ArgumentError, match="head_dim 0"):
        attention(q[..., :0], q[..., :0], q[..., :0])
    with pytest.raises(ArgumentError, match="q has 4 heads and k and v have 0"):
        attention(q, q[:, :, :0], q[:, :, :0])


def test_bl_018a_a_batch_of_100000() -> None:
    _check(*_qkv(100_000, 10, 10, 1, 1, 16))


@pytest.mark.parametrize("heads", [65_536, 71_280])
def test_bl_018b_heads_beyond_65535(heads: int) -> None:
    _check(*_qkv(1, 3, 3, heads, heads, 128), causal=True)


@pytest.mark.parametrize("batch", [65_536, 65_537])
def test_bl_018d_decode_requests_beyond_65535(batch: int) -> None:
    _check(*_qkv(batch, 1, 4, 1, 1, 64))


def test_bl_019_a_few_queries_are_the_last_rows() -> None:
    """With the online softmax in equal bits: a guarded one's path depends on the first row of a warp."""
    q, k, v = _qkv(1, 9, 1000, 32, 8, 128)
    online = _default(KernelSpec(head_dim=128, causal=True, gqa_ratio=4))
    if isinstance(online, FwdConfig):
        online = dataclasses.replace(online, softmax="online")
    full = attention(q, k, v, causal=True, config=online)
    for rows in range(1, 10):
        _check(q[:, -rows:], k, v, causal=True)
        assert torch.equal(attention(q[:, -rows:], k, v, causal=True, config=online), full[:, -rows:])


def test_bl_024_keys_contiguous_values_transposed() -> None:
    q, k, v = _qkv(1, 62, 62, 16, 16, 128)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    expected = _check(q, k, v)
    for choice in itertools.product((False, True), repeat=3):
        mixed = [t if c else x for c, x, t in zip(choice, (q, k, v), transposed, strict=True)]
        assert torch.equal(_run(*mixed)[0], expected)


def test_bl_027_permuted_heads_where_shapes_cannot_tell() -> None:
    _check(*(_randn(84, 3, 3, 64).permute(0, 2, 1, 3) for _ in range(3)))


@pytest.mark.parametrize("seqlen_k", [33, 97, 257])
def test_bl_028_heads_that_repeat(seqlen_k: int) -> None:
    q = _randn(3, 65, 8, 128)
    k, v = (_randn(1, seqlen_k, 1, 128).expand(3, seqlen_k, 8, 128) for _ in range(2))
    assert torch.equal(_check(q, k, v), _run(q, k.contiguous(), v.contiguous())[0])
    wide = _randn(1, 65, 1, 512).expand(1, 65, 8, 512)
    with pytest.raises(UnsupportedError, match=r"head_dim 512 .* 1 to 256"):
        attention(wide, wide, wide)


def test_bl_011_030_cache_slices_between_nan() -> None:
    cache = torch.full((2, 4, 1024, 4, 64), math.nan, dtype=BF16, device="cuda")
    cache[:, :, 120:, :, ::2] = math.inf
    cache[:, :, :120] = _randn(2, 4, 120, 4, 64)
    big = torch.full((8, 65, 4, 64), math.nan, dtype=BF16, device="cuda")
    big[::2] = _randn(4, 65, 4, 64)
    _check(big[::2], cache[0, :, :120], cache[1, :, :120], causal=True)


@pytest.mark.parametrize(("seqlen_q", "alignment"), [(1, 2), (256, 2), (257, 16)])
def test_bl_034_unaligned_bases_and_pitches(seqlen_q: int, alignment: int) -> None:
    """In place while few query blocks read a key, else from aligned copies."""

    def view(seqlen: int) -> Tensor:
        storage = torch.full((2, seqlen + 1, 4, 131), math.nan, dtype=BF16, device="cuda")
        x = storage[:, 1:, :, 1:129]
        return x.copy_(_randn(2, seqlen, 4, 128))

    q, k, v = view(seqlen_q), view(203), view(203)
    assert describe(q, k, v, causal=True).spec.alignment == alignment
    _check(q, k, v, causal=True)
    _check(q.contiguous(), k.contiguous(), v, causal=True)
    _check(q, k.contiguous(), v.contiguous(), causal=True)


@pytest.mark.parametrize("seqlen_k", [1 << 22, (1 << 22) - 128])
@pytest.mark.parametrize("causal", [False, True])
def test_bl_038_very_long_keys(seqlen_k: int, causal: bool) -> None:
    """Every query's weight lies on one key (its logit is 45, the others' deviation 4), spread over the length.

    Not noise alone: a mean over 2^22 keys is 2^18 additions in the tensor core, which truncates, and that error reaches
    the tolerance by itself (see the README's limits). And not logits of 20 to 26, of which queries of other lengths
    have some: there float32 sums lose weights below 2^-24 of them, and the LSE breaks its limit of 1e-4 (H200: 8e-4
    with sm90, 2e-3 with sm80; also in the README's limits).
    """
    _needs_memory(24)
    k, v = (_randn(1, seqlen_k, 1, 128) for _ in range(2))
    keys = torch.linspace(0, seqlen_k - 2048, 2048 * 8, device="cuda").long()
    spikes = k[0, keys, 0].float()
    q = (45 * math.sqrt(128) * spikes / spikes.square().sum(-1, keepdim=True)).to(BF16).reshape(1, 2048, 8, 128)
    out, lse = _run(q, k, v, causal=causal)
    # The last rows of a causal call see what they would see alone; without a mask any rows do.
    last = slice(-24, None)
    report = check_forward(out[:, last], lse[..., last], q[:, last], k, v, causal=causal)
    assert report.passed, report.text
    if not causal:
        _check_part(out, lse, q, k, v, slice(0, 8))


def test_bl_040_rows_2_31_elements_apart() -> None:
    """Row stride 90,000 and 24,000 keys: the last row lies 2.16e9 elements from the first."""
    _needs_memory(8)
    storage = torch.full((24_000 * 90_000,), math.nan, dtype=BF16, device="cuda")
    view = torch.as_strided(storage, (1, 24_000, 1, 128), (storage.numel(), 90_000, 128, 1))
    view.copy_(_randn(1, 24_000, 1, 128))
    _check(_randn(1, 65, 1, 128), view, view, causal=True)


@pytest.mark.parametrize("shape", [(16_500, 1024, 1), (1, 1_050_000, 16)], ids=["batches", "rows"])
def test_tensors_of_more_than_2_31_elements(shape: tuple[int, int, int]) -> None:
    """q and the output, and with many batches k and v too; parts on both sides of element 2^31 are compared."""
    _needs_memory(48)
    q = _randn(*shape, 128)
    k, v = (_randn(shape[0], 1024 if shape[0] > 1 else 65, shape[2], 128) for _ in range(2))
    out, lse = _run(q, k, v)
    assert out.numel() > 2**31
    assert out.isfinite().all()
    if shape[0] > 1:
        for batch in (0, 2**31 // (1024 * 128) - 1, 2**31 // (1024 * 128), shape[0] - 1):
            _check_part(out, lse, q, k, v, slice(None), slice(batch, batch + 1))
    else:
        for row in (0, 2**31 // (16 * 128) - 64, shape[1] - 128):
            _check_part(out, lse, q, k, v, slice(row, row + 128))


def test_keys_of_more_than_2_31_elements() -> None:
    """129 heads in rows of 16,512 elements; only the last head's keys are not 0."""
    _needs_memory(12)
    heads, seqlen = 129, 1 << 17
    k = torch.zeros(1, seqlen, heads, 128, dtype=BF16, device="cuda")
    k[:, :, -1] = _randn(1, seqlen, 128)
    q = _randn(1, 3, heads, 128)
    out, lse = _run(q, k, k)
    last = slice(-1, None)
    report = check_forward(out[:, :, last], lse[:, last], q[:, :, last], k[:, :, last], k[:, :, last], causal=False)
    assert report.passed, report.text
    assert (out[:, :, :-1] == 0).all()


def test_the_grid_s_limit_is_named() -> None:
    q = torch.zeros(1, 1, 1, 64, device="cuda", dtype=BF16).expand(2**20, 1, 4096, 64)
    with pytest.raises(ArgumentError, match="grid's limit"):
        attention(q, q, q, config=_default(KernelSpec(head_dim=64)))


def test_bl_049_memory_is_linear_in_the_length() -> None:
    q, k, v = _qkv(1, 16_384, 16_384, 32, 8, 128)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(q, k, v, causal=True, config=_default(KernelSpec(head_dim=128, causal=True, gqa_ratio=4)))
    assert isinstance(out, Tensor)
    assert torch.cuda.max_memory_allocated() - before <= out.numel() * 2 + (1 << 21)
    report = check_forward(out[:, -64:], None, q[:, -64:], k, v, causal=True)
    assert report.passed, report.text


def test_bl_051_more_queries_than_keys() -> None:
    out = _check(*_qkv(1, 2048, 1024, 4, 4, 64), causal=True)
    assert (out[:, :1024] == 0).all()


def test_bl_106_bits_do_not_depend_on_the_batch() -> None:
    q, k, v = _qkv(64, 1, 19_802, 2, 2, 64)
    together, _ = _run(q, k, v)
    for batch in (1, 2, 63):
        assert torch.equal(_run(q[:batch], k[:batch], v[:batch])[0], together[:batch])
    _check(q[:1], k[:1], v[:1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 192])
def test_huge_and_tiny_numbers(d: int, causal: bool) -> None:
    q, k, v = _qkv(2, 300, 577, 1, 1, d)
    for factor in (60.0, 1e4, 1e-6):
        _check(factor * q, k, v, causal=causal)
    # The guarded softmax of bf16 wants |v| times the number of steps below 2e30.
    for tensors in ((1e30 * q, 1e-30 * k, v), (1e-30 * q, 1e30 * k, v), (q, k, 1e29 * v), (q, k, 1e-30 * v)):
        _check(*tensors, causal=causal)
    _check(1e15 * q, 1e15 * k, v, causal=causal, scale=1e-30)
