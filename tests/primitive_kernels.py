"""Small kernels, one for each primitive, with what they must give: run by the emulator and, as the same text, by a GPU.

All probes of a table are functions of one kernel, chosen by a parameter, so that a table is compiled once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fa2gen.codegen import KernelSource
from fa2gen.codegen.render import HOST_INCLUDE, HOST_KEYWORDS
from fa2gen.data import data_dir
from fa2gen.launch import Launch
from fa2gen.spec import FwdConfig, KernelSpec

NUM_THREADS = 64
SMEM_BYTES = 8192
ENTRY = "primitive_probes"

_DECLARATIONS = """
struct ProbeParams {
  gptr<const u32> in;
  gptr<u32> out;
  int which, extra;
};
FUNC float as_float(u32 bits) { return bits_as<float>(bits); }
FUNC u32 as_bits(float f) { return bits_as<u32>(f); }
"""


def probe_source(bodies: Mapping[str, str], platform: str, num_threads: int = NUM_THREADS) -> KernelSource:
    """A kernel whose parameter ``which`` chooses one of the bodies, by its position.

    A body sees ``p`` (the parameters), ``tid``, ``warp``, ``lane`` and ``smem``.
    """
    functions, calls = [], []
    for i, text in enumerate(bodies.values()):
        functions.append(
            f"FUNC void probe_{i}(const ProbeParams& p, int tid, int warp, int lane, u32 smem) {{\n{text}\n}}"
        )
        calls.append(f"  if (p.which == {i}) probe_{i}(p, tid, warp, lane, smem);")
    kernel = [
        f'extern "C" __global__ void __launch_bounds__(kThreads) {ENTRY}(const __grid_constant__ ProbeParams p) {{',
        "  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;",
        "  const u32 smem = smem_base();",
        '  name_shared("Area", smem, 4096);',
        *calls,
        "}",
    ]
    body = "\n".join([_DECLARATIONS, f"constexpr int kThreads = {num_threads};", *functions, *kernel, ""])
    root, names = data_dir("templates"), ("primitives", "conversions", "reductions")
    types = (root / "common/types.cuh").read_text()
    if platform == "host":
        headers = (HOST_KEYWORDS, types, HOST_INCLUDE)
    else:
        headers = (types, *((root / f"sm80/{name}.cuh").read_text() for name in names))
    return KernelSource(
        spec=KernelSpec(),
        config=FwdConfig(),
        kernel="fwd",
        platform=platform,
        text="\n".join((*headers, body)),
        body=body,
        entry=ENTRY,
        num_threads=num_threads,
        smem_bytes=SMEM_BYTES,
    )


def probe_launch(which: int, grid: int = 1, num_threads: int = NUM_THREADS) -> Launch:
    """The launch of one probe, with null pointers."""
    return Launch("fwd", (grid, 1, 1), num_threads, SMEM_BYTES, struct.pack("<QQii", 0, 0, which, 0))


@dataclass(frozen=True)
class Probe:
    """One probe.

    Attributes:
        text: The body; writes every word of ``p.out``.
        inputs: 32-bit words at ``p.in``.
        expected: 32-bit words at ``p.out``: uint32 to be met exactly, float32 or float64 within the tolerance.
        rel, atol: Tolerance; the larger counts. NaN matches NaN only.
        atomic: ``p.out`` starts as zeros instead of uninitialised.
    """

    text: str
    inputs: np.ndarray
    expected: np.ndarray
    rel: float = 0.0
    atol: float = 0.0
    grid: int = 1
    atomic: bool = False

    def check(self, words: np.ndarray) -> None:
        """Raises AssertionError unless `words` (uint32) are right."""
        if self.expected.dtype == np.uint32:
            np.testing.assert_array_equal(words, self.expected)
        else:
            got = words.view(np.float32).astype(np.float64)
            np.testing.assert_allclose(got, self.expected, rtol=self.rel, atol=self.atol, equal_nan=True)


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)


# ---- ldmatrix: matrix m, row i, column j holds m * 64 + i * 8 + j; each lane gives the address of one row.

_HALVES = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)


def _ldmatrix_expected(trans: bool) -> np.ndarray:
    out = np.zeros((32, 4), np.uint32)
    for lane in range(32):
        for m in range(4):
            matrix = _HALVES[m].T if trans else _HALVES[m]
            lo, hi = matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1]
            out[lane, m] = int(lo) | int(hi) << 16
    return out.reshape(-1)


def _ldmatrix(trans: bool) -> Probe:
    text = f"""
  if (warp != 0) return;
  st_shared(smem + 16 * lane, ld_global<u32x4>(p.in + 4 * lane));
  sync_warp();
  u32 r[4];
  ldmatrix_x4{"_trans" if trans else ""}(r, smem + 16 * lane);
  for (int m = 0; m < 4; m++) st_global(p.out + (4 * lane + m), r[m]);"""
    return Probe(text, _HALVES.reshape(-1).view(np.uint32), _ldmatrix_expected(trans))


# ---- mma: every lane builds its fragments from A (16x16), B (16x8) and C (16x8), kept in float32.


def _mma(element: str, init: bool, *, exact: bool) -> Probe:
    rng = np.random.default_rng(3)
    dtype = torch.bfloat16 if element == "bf16" else torch.float16
    draw = (lambda *s: rng.integers(-8, 9, s) / 4.0) if exact else (lambda *s: rng.standard_normal(s))

    def rounded(*shape: int) -> np.ndarray:
        return torch.from_numpy(np.asarray(draw(*shape))).to(dtype).to(torch.float64).numpy()

    a, b, c = rounded(16, 16), rounded(16, 8), np.asarray(draw(16, 8), np.float32)
    text = f"""
  if (warp != 0) return;
  const int g = lane / 4, t = lane % 4 * 2;
  auto a = [&](int row, int k) {{ return as_float(ld_global<u32>(p.in + (16 * row + k))); }};
  auto b = [&](int k, int n) {{ return as_float(ld_global<u32>(p.in + (256 + 8 * k + n))); }};
  auto pair_a = [&](int row, int k) {{ return pack2<{element}>(a(row, k), a(row, k + 1)); }};
  auto pair_b = [&](int k) {{ return pack2<{element}>(b(k, g), b(k + 1, g)); }};
  const u32 frag_a[4] = {{pair_a(g, t), pair_a(g + 8, t), pair_a(g, t + 8), pair_a(g + 8, t + 8)}};
  const u32 b0 = pair_b(t), b1 = pair_b(t + 8);
  float d[4];
  for (int i = 0; i < 4; i++) d[i] = as_float(ld_global<u32>(p.in + (384 + 8 * (g + i / 2 * 8) + t + i % 2)));
  mma_m16n8k16{"_init" if init else ""}<{element}>(d, frag_a, b0, b1);
  for (int i = 0; i < 4; i++) st_global(p.out + (8 * (g + i / 2 * 8) + t + i % 2), as_bits(d[i]));"""
    product = a @ b + (0 if init else c)
    inputs = _bits(np.concatenate([a.reshape(-1), b.reshape(-1), c.reshape(-1)]))
    # Tensor cores truncate partial sums, so they are within a few units of the 24th bit of the largest term.
    return Probe(text, inputs, product.reshape(-1), atol=0.0 if exact else 1e-5)


# ---- conversions

_ODD_FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.5, 3.14159265, 65504.0, 65519.0, 65520.0, -1e30, 1e-3, 5.96e-8, 2.98e-8, 2.99e-8, 6.1e-5, 1e-40]
    + [math.inf, -math.inf, math.nan, 1.0 + 2**-8, 1.0 + 2**-7 + 2**-8, 1.0 + 2**-11, 1.0 + 2**-10 + 2**-11, 3.4e38],
    np.float32,
)


def _conversion_inputs() -> np.ndarray:
    rng = np.random.default_rng(5)
    values = np.concatenate(
        [_ODD_FLOATS, rng.standard_normal(233).astype(np.float32) * 10.0 ** rng.integers(-9, 9, 233)]
    )
    return values.astype(np.float32)[:256]


def _pack2(element: str) -> Probe:
    text = f"""
  for (int i = tid; i < 128; i += kThreads) {{
    const u32x2 pair = ld_global<u32x2>(p.in + 2 * i);
    st_global(p.out + i, pack2<{element}>(as_float(pair.x), as_float(pair.y)));
  }}"""
    values = _conversion_inputs()
    dtype = torch.bfloat16 if element == "bf16" else torch.float16
    halves = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16).copy()
    halves[np.isnan(values)] = 0x7FFF  # the NaN that the conversion instruction gives
    return Probe(text, _bits(values), halves.view(np.uint32))


# ---- functions of one float

_FUNCTION = """
  for (int i = tid; i < 256; i += kThreads) st_global(p.out + i, as_bits({call}));"""
_X = "as_float(ld_global<u32>(p.in + i))"


def _function(
    call: str, reference: Callable[[np.ndarray], np.ndarray], values: np.ndarray, **tolerance: float
) -> Probe:
    with np.errstate(all="ignore"):
        expected = reference(values.astype(np.float64))
    return Probe(_FUNCTION.format(call=call.format(x=_X)), _bits(values), expected, **tolerance)


def _ex2_reference(x: np.ndarray) -> np.ndarray:
    y = np.exp2(x)
    return np.where(y < 2.0**-126, 0.0, np.where(y >= 2.0**128, np.inf, y))


_EX2_VALUES = np.concatenate([np.linspace(-130, 127.5, 250), [-125.5, -126.5, 0.0, -math.inf, math.inf, 200.0]])
_POSITIVE = np.concatenate([2.0 ** np.linspace(-100, 100, 200), np.linspace(0.9, 1.1, 55), [math.inf]])

# Pairs (x, y) for max and min, triples for fma; x at 2 i, y at 2 i + 1.
_PAIRS = np.array(
    [(1, 2), (2, 1), (-0.0, 0.0), (0.0, -0.0), (math.nan, 3), (3, math.nan), (-math.inf, 5), (math.inf, 5)] * 32,
    np.float32,
)


def _pairwise(call: str, pick: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Probe:
    y = "as_float(ld_global<u32>(p.in + (2 * i + 1)))"
    x = "as_float(ld_global<u32>(p.in + 2 * i))"
    return Probe(_FUNCTION.format(call=f"{call}({x}, {y})"), _bits(_PAIRS), _bits(pick(_PAIRS[:, 0], _PAIRS[:, 1])))


def _max_exact(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where((x == 0) & (y == 0), np.float32(0.0), np.fmax(x, y))


def _min_exact(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where((x == 0) & (y == 0), np.float32(-0.0), np.fmin(x, y))


def _fma() -> Probe:
    # x * x - round(x * x) is exact with one rounding and zero with two.
    x = (1 + np.arange(256) * 2.0**-12 + 2.0**-23).astype(np.float32)
    square = (x * x).astype(np.float32)
    text = _FUNCTION.format(call=f"fma_f32({_X}, {_X}, -as_float(ld_global<u32>(p.in + (256 + i))))")
    exact = (x.astype(np.float64) ** 2 - square.astype(np.float64)).astype(np.float32)
    assert np.any(exact != 0)
    return Probe(text, _bits(np.concatenate([x, square])), _bits(exact))


# ---- collectives, copies, memory

_WORDS = (np.arange(512, dtype=np.uint64) * 2654435761 % 2**32).astype(np.uint32)


def _shfl() -> Probe:
    masks = (1, 2, 4, 8, 16, 31)
    text = "\n".join(
        f"  st_global(p.out + ({64 * i} + tid), shfl_xor(ld_global<u32>(p.in + tid), {mask}));"
        for i, mask in enumerate(masks)
    )
    expected = np.concatenate([_WORDS[(np.arange(64) & ~31) | (np.arange(64) % 32 ^ mask)] for mask in masks])
    return Probe(text, _WORDS[:64], expected)


def _votes() -> Probe:
    # Round r, warp w: which lanes say yes.
    patterns = np.array([[0, 0xFFFFFFFF], [1, 0x7FFFFFFF], [0x80000000, 0], [0xFFFFFFFF, 0xFFFF0000]], np.uint32)
    text = """
  for (int r = 0; r < 4; r++) {
    const bool yes = ld_global<u32>(p.in + (2 * r + warp)) >> lane & 1;
    const bool any = any_lane(yes), all = all_lanes(yes);
    st_global(p.out + (64 * r + tid), u32(any) | u32(all) << 1);
  }"""
    values = (patterns != 0).astype(np.uint32) | (patterns == 0xFFFFFFFF).astype(np.uint32) << 1
    return Probe(text, patterns.reshape(-1), np.repeat(values, 32, axis=1).reshape(-1))


def _cp_async_zero_fill() -> Probe:
    text = """
  st_shared(smem + 16 * tid, u32x4{~0u, ~0u, ~0u, ~0u});
  sync_threads();
  cp_async16(smem + 16 * tid, p.in + 4 * tid, tid % 9 * 2);
  cp_async_commit();
  cp_async_wait<0>();
  const u32x4 v = ld_shared<u32x4>(smem + 16 * tid);
  st_global(p.out + 4 * tid, v);"""
    halves = _WORDS[:256].view(np.uint16).reshape(64, 8).copy()
    for tid in range(64):
        halves[tid, tid % 9 :] = 0
    return Probe(text, _WORDS[:256], halves.reshape(-1).view(np.uint32))


def _cp_async_groups() -> Probe:
    text = """
  for (int group = 0; group < 2; group++) {
    cp_async16(smem + 1024 * group + 16 * tid, p.in + (256 * group + 4 * tid));
    cp_async_commit();
  }
  cp_async_wait<1>();
  sync_threads();
  st_global(p.out + 4 * tid, ld_shared<u32x4>(smem + 16 * (tid ^ 33)));
  cp_async_wait<0>();
  sync_threads();
  st_global(p.out + (256 + 4 * tid), ld_shared<u32x4>(smem + 1024 + 16 * (tid ^ 33)));"""
    order = (np.arange(128) & 64) | (np.arange(128) % 64 ^ 33)
    return Probe(text, _WORDS, _WORDS.reshape(128, 4)[order].reshape(-1))


def _access_sizes() -> Probe:
    text = """
  st_shared(smem + 4 * tid, ld_global<u16>(p.in.plus_bytes(2 * tid)));
  st_shared(smem + 256 + 4 * tid, ld_global<float>(p.in + (32 + tid)));
  st_shared(smem + 512 + 8 * tid, ld_global<u32x2>(p.in + (96 + 2 * tid)));
  st_shared(smem + 1024 + 16 * tid, ld_global<u32x4>(p.in + (224 + 4 * tid)));
  sync_threads();
  const int other = kThreads - 1 - tid;
  st_global(p.out.plus_bytes(2 * tid), ld_shared<u16>(smem + 4 * other));
  st_global(p.out + (32 + tid), ld_shared<float>(smem + 256 + 4 * other));
  st_global(p.out + (96 + 2 * tid), ld_shared<u32x2>(smem + 512 + 8 * other));
  st_global(p.out + (224 + 4 * tid), ld_shared<u32x4>(smem + 1024 + 16 * other));"""
    parts = (_WORDS[:32].view(np.uint16)[::-1], _WORDS[32:96][::-1])
    expected = [parts[0].copy().view(np.uint32), parts[1]]
    expected += [_WORDS[96:224].reshape(64, 2)[::-1].reshape(-1), _WORDS[224:480].reshape(64, 4)[::-1].reshape(-1)]
    return Probe(text, _WORDS[:480], np.concatenate(expected))


PROBES: dict[str, Probe] = {
    "ldmatrix": _ldmatrix(False),
    "ldmatrix trans": _ldmatrix(True),
    **{
        f"mma {element}{' init' if init else ''}{'' if exact else ' random'}": _mma(element, init, exact=exact)
        for element in ("bf16", "fp16")
        for init in (False, True)
        for exact in (True, False)
    },
    "pack2 bf16": _pack2("bf16"),
    "pack2 fp16": _pack2("fp16"),
    # The PTX manual's bounds: ex2 2^-22, lg2 2^-22 absolute or relative, rcp 1 ulp; float32 inputs on top.
    "ex2": _function("ex2({x})", _ex2_reference, _EX2_VALUES.astype(np.float32), rel=2.0**-21),
    "lg2": _function("lg2({x})", np.log2, _POSITIVE.astype(np.float32), rel=2.0**-21, atol=2.0**-21),
    "rcp": _function("rcp({x})", lambda x: 1 / x, _POSITIVE.astype(np.float32), rel=2.0**-22),
    "abs": _function("abs_f32({x})", np.abs, np.linspace(-2, 2, 256, dtype=np.float32)),
    "max": _pairwise("max_f32", _max_exact),
    "min": _pairwise("min_f32", _min_exact),
    "fma": _fma(),
    "integers and infinity": Probe(
        """
  st_global(p.out + (3 * tid), u32(max_i32(tid - 32, 3)));
  st_global(p.out + (3 * tid + 1), u32(min_i32(tid - 32, 3)));
  st_global(p.out + (3 * tid + 2), opaque(as_bits(neg_inf())) + (ld_global<u32>(p.in) - ld_global<u32>(p.in)));""",
        _WORDS[:1],
        np.array([[max(t - 32, 3), min(t - 32, 3) % 2**32, 0xFF800000] for t in range(64)], np.uint64)
        .astype(np.uint32)
        .reshape(-1),
    ),
    "shfl_xor": _shfl(),
    "votes": _votes(),
    "cp.async zero fill": _cp_async_zero_fill(),
    "cp.async groups": _cp_async_groups(),
    "access sizes": _access_sizes(),
    "named barriers": Probe(
        """
  if (warp == 0) {
    st_shared(smem + 4 * lane, ld_global<u32>(p.in + lane));
    bar_arrive(1, 64);
    bar_sync(2, 64);
    st_global(p.out + lane, ld_shared<u32>(smem + 128 + 4 * (31 - lane)));
  } else {
    bar_sync(1, 64);
    st_global(p.out + (32 + lane), ld_shared<u32>(smem + 4 * (31 - lane)));
    st_shared(smem + 128 + 4 * lane, ld_global<u32>(p.in + (32 + lane)));
    bar_sync(2, 64);
  }""",
        _WORDS[:64],
        np.concatenate([_WORDS[32:64][::-1], _WORDS[:32][::-1]]),
    ),
    "blocks": Probe(
        "  st_global(p.out + (blockIdx.x * kThreads + tid), blockIdx.x + 100 * gridDim.x + 1000 * blockIdx.y);",
        _WORDS[:1],
        np.repeat(np.arange(5, dtype=np.uint32) + 500, 64),
        grid=5,
    ),
    "atomic_add": Probe(
        """
  atomic_add(p.out + tid % 4, u32(tid));
  atomic_add(gptr<float>{reinterpret_cast<float*>(p.out.address)} + (4 + tid % 4), 0.5f);""",
        _WORDS[:1],
        np.concatenate(
            [3 * np.array([sum(range(r, 64, 4)) for r in range(4)], np.uint32), _bits(np.full(4, 3 * 16 * 0.5))]
        ),
        grid=3,
        atomic=True,
    ),
}
