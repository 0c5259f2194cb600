"""The backward kernels in the emulator, on tensors of every layout; what they may not touch is NaN and forbidden."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fa2gen.constraints import default_config
from fa2gen.emulator import Counters, run_backward
from fa2gen.errors import ArgumentError, EmulatorError, InfeasibleError
from fa2gen.gate import backward_cases, check_backward, run_backward_gate
from fa2gen.reference import attention_forward
from fa2gen.spec import BwdConfig, KernelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Head dim, dtype, mask, query heads per key/value head, deterministic; config, or none for the default one.
KERNELS = [
    pytest.param((64, "bf16", "full", 1, False, "sm80_64x64s64_w4_st2_r1_mb1"), marks=pytest.mark.slow),
    (64, "bf16", "causal", 3, False, "sm80_64x64s32_w4_st1_r1_mb1_wd2"),
    (64, "fp16", "causal", 2, True, "sm80_32x64s32_w4_st2_r1_mb1_kvr_v4_ds2"),
    (64, "bf16", "causal", 1, False, None),
    (32, "fp16", "full", 1, False, "sm80_64x64s16_w2_st2_r1_mb1_v4"),
    (96, "bf16", "causal", 2, False, "sm80_32x32s32_w4_st2_r2_mb1_ds2_sh"),
    (128, "bf16", "causal", 1, True, None),
    (128, "bf16", "full", 4, False, "sm80_32x64s32_w8_st1_r2_mb1_wd2_v4_sh"),
    pytest.param((128, "bf16", "full", 1, False, "sm80_64x64s64_w8_st2_r2_mb1_v4_ds2"), marks=pytest.mark.slow),
    (192, "fp16", "causal", 1, False, None),
    (256, "bf16", "causal", 2, True, None),
    (256, "bf16", "full", 1, False, "sm80_32x32s32_w4_st2_r1_mb1_wd2"),
    # Predicated: one 16-byte chunk, five of four, nine of sixteen.
    (8, "bf16", "causal", 1, False, None),
    (40, "bf16", "causal", 5, True, None),
    (72, "fp16", "full", 1, False, None),
    pytest.param((224, "bf16", "full", 1, False, None), marks=pytest.mark.slow),
]


def _spec_and_config(kernel: tuple[int, str, str, int, bool, str | None]) -> tuple[KernelSpec, BwdConfig]:
    head_dim, dtype, mask, gqa_ratio, deterministic, slug = kernel
    spec = KernelSpec("bwd", head_dim, dtype, mask == "causal", gqa_ratio, deterministic=deterministic)
    config = default_config(spec) if slug is None else BwdConfig.from_slug(slug)
    assert isinstance(config, BwdConfig)
    return spec, config


class Call:
    """A call's tensors: drawn, with output and LSE of the float64 reference."""

    def __init__(self, spec: KernelSpec, seqlen_q: int, seqlen_k: int, batch: int = 1, heads_k: int = 1) -> None:
        self.spec, self.scale = spec, spec.head_dim**-0.5
        generator = torch.Generator().manual_seed(seqlen_q + 1000 * seqlen_k)

        def draw(seqlen: int, heads: int) -> Tensor:
            x = torch.randn(batch, seqlen, heads, spec.head_dim, generator=generator)
            return x.to(DTYPES[spec.dtype])

        heads_q = heads_k * spec.gqa_ratio
        self.q, self.do = draw(seqlen_q, heads_q), draw(seqlen_q, heads_q)
        self.k, self.v = draw(seqlen_k, heads_k), draw(seqlen_k, heads_k)
        self.dlse: Tensor | None = torch.randn(batch, heads_q, seqlen_q, generator=generator)
        out, lse = attention_forward(self.q, self.k, self.v, causal=spec.causal, softmax_scale=self.scale)
        self.out, self.lse = out.to(self.q.dtype), lse.float()

    def run(self, config: BwdConfig, **options: object) -> tuple[tuple[Tensor, Tensor, Tensor], Counters]:
        *grads, counters = run_backward(
            self.spec,
            config,
            self.q,
            self.k,
            self.v,
            self.out,
            self.lse,
            self.do,
            softmax_scale=self.scale,
            dlse=self.dlse,
            **options,  # type: ignore[arg-type]
        )
        return tuple(grads), counters

    def check(self, config: BwdConfig, **options: object) -> Counters:
        grads, counters = self.run(config, **options)
        report = check_backward(
            grads,
            *(self.q, self.k, self.v, self.do),
            causal=self.spec.causal,
            softmax_scale=self.scale,
            dlse=self.dlse,
        )
        assert report.passed, report.text
        return counters


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: "-".join(map(str, kernel)))
def test_kernels(kernel: tuple[int, str, str, int, bool, str | None]) -> None:
    spec, config = _spec_and_config(kernel)
    # Three tiles of queries and two of keys, and the other way round; in one, causal rows see no key.
    Call(spec, 2 * config.block_m + 17, config.block_n + 19, heads_k=2).check(config)
    call = Call(spec, config.block_m - 3, 2 * config.block_n + 5)
    call.dlse = None
    counters = call.check(config, seed=2, random_schedule=False)
    assert counters.mma > 0
    # Free of bank conflicts. Where some lanes copy nothing, the emulator takes accesses of two instructions for one.
    if spec.head_dim == spec.native_head_dim:
        assert counters.ldmatrix_conflicts == 0


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: "-".join(map(str, kernel)))
def test_kernels_pass_the_gate(kernel: tuple[int, str, str, int, bool, str | None]) -> None:
    spec, config = _spec_and_config(kernel)

    def runner(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, softmax_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return run_backward(spec, config, q, k, v, out, lse, do, softmax_scale=softmax_scale, dlse=dlse)[:3]

    report = run_backward_gate(spec, config, runner, backward_cases(spec, config, budget="quick"))
    assert report.passed, report.text


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 64), (64, 1), (64, 64), (113, 203), (200, 61), (2, 257), (129, 65)]
)
def test_odd_lengths(seqlen_q: int, seqlen_k: int) -> None:
    config = BwdConfig.from_slug("sm80_64x64s64_w4_st2_r1_mb1")
    for causal in (False, True):
        Call(KernelSpec("bwd", 64, causal=causal), seqlen_q, seqlen_k, batch=2).check(config)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradient_of_an_lse_of_no_keys(value: float) -> None:
    """A loss that drops LSEs of -inf by a factor of 0 hands their gradient down as NaN."""
    call = Call(KernelSpec("bwd", 64, causal=True, gqa_ratio=2), 70, 41)
    assert call.dlse is not None
    blind = call.lse == -math.inf
    assert blind.sum() == 29 * 2
    call.dlse[blind] = value
    grads, _ = call.run(BwdConfig.from_slug("sm80_32x32s32_w2_st2_r1_mb1"))
    assert (grads[0][:, :29] == 0).all()
    call.dlse[blind] = 0
    report = check_backward(
        grads, call.q, call.k, call.v, call.do, causal=True, softmax_scale=call.scale, dlse=call.dlse
    )
    assert report.passed, report.text


def _in_nan(x: Tensor) -> Tensor:
    """The same values in a view with NaN between its rows and a row of NaN after each sequence."""
    batch, seqlen, heads, head_dim = x.shape
    room = torch.full((batch, seqlen + 1, heads, head_dim + 16), math.nan).to(x.dtype)
    return room[:, :seqlen, :, 8 : 8 + head_dim].copy_(x)


@pytest.mark.parametrize("head_dim", [64, 40])
def test_strided_rows_between_nan(head_dim: int) -> None:
    spec = KernelSpec("bwd", head_dim, causal=True, gqa_ratio=2)
    call = Call(spec, 70, 83, batch=2)
    for name in ("q", "k", "v", "out", "do"):
        setattr(call, name, _in_nan(getattr(call, name)))
    call.check(default_config(spec))


def test_packed_and_transposed_and_expanded_views() -> None:
    spec = KernelSpec("bwd", 64)
    config = BwdConfig.from_slug("sm80_64x64s64_w4_st2_r1_mb1")
    call = Call(spec, 70, 70, batch=2, heads_k=2)
    packed = torch.stack([call.q, call.k, call.v], 2)
    call.q, call.k, call.v = packed.unbind(2)
    call.out, call.do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (call.out, call.do))
    call.check(config)
    # The gradient of a sum over rows: every stride but the last is 0.
    call.do = torch.randn(64, generator=torch.Generator().manual_seed(5)).bfloat16().expand(2, 70, 2, 64)
    call.check(config)


def test_a_deterministic_backward_gives_the_same_bits() -> None:
    spec = KernelSpec("bwd", 64, causal=True, gqa_ratio=2, deterministic=True)
    config = BwdConfig.from_slug("sm80_32x32s32_w2_st2_r1_mb1")
    call = Call(spec, 70, 131)
    results = {
        b"".join(x.view(torch.int16).numpy().tobytes() for x in call.run(config, seed=seed, threads=threads)[0])
        for seed, threads in ((1, 1), (2, 1), (3, 2), (4, 5))
    }
    assert len(results) == 1


def test_otherwise_the_order_of_sums_is_free() -> None:
    spec = KernelSpec("bwd", 64, "fp16")  # 13 bits fewer than the sums: a last bit of those shows now and then
    config = BwdConfig.from_slug("sm80_32x32s32_w2_st2_r1_mb1")
    call = Call(spec, 70, 131, heads_k=4)
    dqs = {call.run(config, seed=seed)[0][0].view(torch.int16).numpy().tobytes() for seed in range(3)}
    assert len(dqs) > 1


def test_no_keys_and_no_queries() -> None:
    spec = KernelSpec("bwd", 64)
    for seqlen_q, seqlen_k in ((5, 0), (0, 5)):
        grads, counters = Call(spec, seqlen_q, seqlen_k).run(default_config(spec))
        assert [x.shape[1] for x in grads] == [seqlen_q, seqlen_k, seqlen_k]
        assert all((x == 0).all() for x in grads)
        assert counters == Counters()


def test_a_misaligned_view_is_reported() -> None:
    spec = KernelSpec("bwd", 64)
    call = Call(spec, 33, 33)
    call.do = torch.zeros(1, 33, 1, 72, dtype=torch.bfloat16)[..., 1:65]
    with pytest.raises(EmulatorError, match="global-misaligned"):
        call.run(default_config(spec))


def test_wrong_tensors_are_refused() -> None:
    spec = KernelSpec("bwd", 64)
    config = default_config(spec)
    for name, value, message in (
        ("q", torch.zeros(1, 8, 1, 64), "q must be a CPU tensor of bf16"),
        ("do", torch.zeros(1, 8, 1, 64).half(), "do must be a CPU tensor of bf16"),
        ("do", torch.zeros(1, 7, 1, 64).bfloat16(), r"do must have q's shape \(1, 8, 1, 64\)"),
        ("out", torch.zeros(1, 8, 2, 64).bfloat16(), "o must have q's shape"),
        ("lse", torch.zeros(1, 8, 1), "lse must be float32, contiguous and of shape"),
        ("dlse", torch.zeros(1, 1, 8).double(), "dlse must be float32"),
        ("k", torch.zeros(1, 9, 1, 64).bfloat16(), "k and v must have one shape"),
    ):
        call = Call(spec, 8, 8)
        setattr(call, name, value)
        with pytest.raises(ArgumentError, match=message):
            call.run(config)
    with pytest.raises(InfeasibleError, match="cannot run bwd_d64"):
        Call(spec, 8, 8).run(BwdConfig(num_warps=3))
