"""Probes of wgmma: every number of columns that attention uses, both places of a, both orders of b, and chains."""

from __future__ import annotations

import numpy as np

from tests.sm90_kernels import MappedTensor, Sm90Probe, as_words, small_integers
from tests.sm90_small_attention import small_attention_probe

# Tiles of keys and columns of the output are multiples of 16; 40 is one of 8.
COLUMNS = (*range(16, 257, 16), 40)
DEPTH = 64  # columns of a: four steps

# Each warpgroup has 64 rows of a, of 128 bytes; b lies at 24 KiB, K-major or in panels of 64 columns.
_LOAD_OPERANDS = """
  constexpr int kN = {n}, kPanels = (kN + 63) / 64;
  constexpr bool kTransposed = {transposed};
  const u32 b = tile + 24576;
  init_barriers(smem, 1, 1);
  if (tid == 0) {{
    mbarrier_arrive_expect_tx(smem, 3 * 8192 + (kTransposed ? kPanels * 8192 : kN * 128));
    for (int i = 0; i < 3; i++) tma_load(tile + 8192 * i, p.a, smem, 0, 64 * i, 0, 0);
    if constexpr (kTransposed) {{
      for (int i = 0; i < kPanels; i++) tma_load(b + 8192 * i, p.b, smem, 64 * i, 0, 0, 0);
    }} else {{
      tma_load(b, p.b, smem, 0, 0, 0, 0);
    }}
  }}
  mbarrier_try_wait(smem, 0);
  float d[kN / 2];
"""
_STORE_RESULT = """
  for (int i = 0; i < kN / 8; i++)
    for (int r = 0; r < 2; r++)
      for (int e = 0; e < 2; e++)
        st_global(p.out + ((warp * 16 + r * 8 + lane / 4) * kN + i * 8 + lane % 4 * 2 + e),
                  as_bits(d[4 * i + 2 * r + e]));"""
# b of step k.
_B = "kTransposed ? operand(b + 2048 * step, 8192) : operand(b + 32 * step)"
_SS = f"""
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; step++)
    wgmma_ss<Element, kN, kTransposed>(d, operand(tile + 8192 * group + 32 * step), {_B}, step > 0);
  wgmma_commit();
  wgmma_wait<0>();"""
# a as mma_m16n8k16 has it, from shared memory.
_FRAGMENTS = """
  u32 a[4][4];
  for (int step = 0; step < 4; step++)
    for (int i = 0; i < 4; i++) {
      const int row = warp % 4 * 16 + i % 2 * 8 + lane / 4;
      a[step][i] = ld_shared<u32>(tile + 8192 * group + swizzled(row, step * 2 + i / 2) + 4 * (lane % 4));
    }"""
_RS = f"""{_FRAGMENTS}
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; step++)
    wgmma_rs<Element, kN, kTransposed>(d, a[step], {_B}, step > 0);
  wgmma_commit();
  wgmma_wait<0>();"""


def _operands(element: str, n: int, transposed: bool) -> tuple[MappedTensor, MappedTensor, np.ndarray]:
    """a and b, and their product: (192, n)."""
    a_bits, a = small_integers(1, element, 1, 192, 1, DEPTH)
    shape = (1, DEPTH, 1, n) if transposed else (1, n, 1, DEPTH)
    b_bits, b = small_integers(2, element, *shape)
    b_matrix = b[0, :, 0] if transposed else b[0, :, 0].T
    box = (64, DEPTH if transposed else n, 1, 1)
    return MappedTensor(a_bits, (64, 64, 1, 1)), MappedTensor(b_bits, box), a[0, :, 0] @ b_matrix


def _probe(element: str, form: str, n: int, transposed: bool, text: str, times: float = 1.0) -> Sm90Probe:
    a, b, product = _operands(element, n, transposed)
    load = _LOAD_OPERANDS.format(n=n, transposed=str(transposed).lower())
    return Sm90Probe(load + text + _STORE_RESULT, as_words(times * product), a=a, b=b, shapes=((form, n, transposed),))


# d starts with numbers of its own, which the product is added to; then the rest of it, from what ordinary code has
# doubled; a second product in the same order of text, waited for with one group in flight.
_ACCUMULATE = f"""
  for (int i = 0; i < kN / 2; i++) d[i] = float(i % 5);
  wgmma_fence();
  for (int step = 0; step < 2; step++)
    wgmma_ss<Element, kN, kTransposed>(d, operand(tile + 8192 * group + 32 * step), {_B}, true);
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < kN / 2; i++) d[i] = 2.f * d[i] - 2.f * float(i % 5);
  wgmma_fence();
  for (int step = 0; step < 2; step++)
    wgmma_ss<Element, kN, kTransposed>(d, operand(tile + 8192 * group + 32 * step), {_B}, true);
  wgmma_commit();
  for (int step = 2; step < 4; step++)
    wgmma_ss<Element, kN, kTransposed>(d, operand(tile + 8192 * group + 32 * step), {_B}, true);
  wgmma_commit();
  wgmma_wait<1>();
  wgmma_fence();
  for (int step = 2; step < 4; step++)
    wgmma_ss<Element, kN, kTransposed>(d, operand(tile + 8192 * group + 32 * step), {_B}, true);
  for (int step = 2; step < 4; step++)
    wgmma_ss<Element, kN, kTransposed>(d, operand(tile + 8192 * group + 32 * step), {_B}, true);
  wgmma_commit();
  wgmma_wait<0>();"""

# Two accumulators in flight; the first is ready, and used, while the second is not.
_TWO_IN_FLIGHT = f"""
  float other[kN / 2];
  wgmma_fence();
  for (int step = 0; step < 4; step++)
    wgmma_ss<Element, kN, kTransposed>(d, operand(tile + 8192 * group + 32 * step), {_B}, step > 0);
  wgmma_commit();
  for (int step = 0; step < 4; step++)
    wgmma_ss<Element, kN, kTransposed>(other, operand(tile + 8192 * group + 32 * step), {_B}, step > 0);
  wgmma_commit();
  wgmma_wait<1>();
  for (int i = 0; i < kN / 2; i++) d[i] = fma_f32(d[i], 2.f, 1.f);
  wgmma_wait<0>();
  for (int i = 0; i < kN / 2; i++) d[i] = fma_f32(other[i], 2.f, d[i]) - 1.f;"""

# a leaves through registers and comes back by stmatrix, into a tile of the same form.
_STMATRIX = f"""{_FRAGMENTS}
  bar_sync(1 + group, 128);
#pragma unroll
  for (int step = 0; step < 4; step++)
    stmatrix_x4(tile + 8192 * group + swizzled(warp % 4 * 16 + lane % 16, step * 2 + lane / 16), a[step][0], a[step][1],
                a[step][2], a[step][3]);
  fence_proxy_async();
  bar_sync(1 + group, 128);{_SS}"""

# Narrow panels: rows of 64 and of 32 bytes, whose descriptors say so.
_NARROW = """
  constexpr int kN = 64, kRowBytes = {row_bytes}, kColumns = kRowBytes / 2;
  const u32 b = tile + 24576;
  init_barriers(smem, 1, 1);
  if (tid == 0) {{
    mbarrier_arrive_expect_tx(smem, 24576 + 8192);
    for (int i = 0; i < 3; i++)
      for (int panel = 0; panel < 64 / kColumns; panel++)
        tma_load(tile + 8192 * i + 64 * kRowBytes * panel, p.a, smem, kColumns * panel, 64 * i, 0, 0);
    for (int panel = 0; panel < 64 / kColumns; panel++)
      tma_load(b + 64 * kRowBytes * panel, p.b, smem, kColumns * panel, 0, 0, 0);
  }}
  mbarrier_try_wait(smem, 0);
  float d[kN / 2];
  wgmma_fence();
  for (int step = 0; step < 4; step++) {{
    const u32 a = tile + 8192 * group + step * 16 / kColumns * 64 * kRowBytes + step * 16 % kColumns * 2;
    const u64 rows = operand(b + 16 * kRowBytes * step, 64 * kRowBytes, 8 * kRowBytes, kMode);
    wgmma_ss<Element, kN, true>(d, operand(a, 16, 8 * kRowBytes, kMode), rows, step > 0);
  }}
  wgmma_commit();
  wgmma_wait<0>();"""


def _narrow(element: str, row_bytes: int) -> Sm90Probe:
    a, b, product = _operands(element, 64, True)
    box = (row_bytes // 2, 64, 1, 1)
    text = _NARROW.replace("kMode", str({64: 2, 32: 3}[row_bytes])).format(row_bytes=row_bytes)
    return Sm90Probe(
        text + _STORE_RESULT,
        as_words(product),
        a=MappedTensor(a.values, box),
        b=MappedTensor(b.values, box),
        shapes=(("ss", 64, True),),
    )


def wgmma_probes(element: str) -> dict[str, Sm90Probe]:
    """The probes with operands of that type."""
    probes = {
        f"{form} {n} {'MN-major' if transposed else 'K-major'}": _probe(
            element, form, n, transposed, _SS if form == "ss" else _RS
        )
        for form in ("ss", "rs")
        for n in COLUMNS
        for transposed in (False, True)
    }
    probes["accumulate"] = _probe(element, "ss", 96, True, _ACCUMULATE, times=3)
    probes["two in flight"] = _probe(element, "ss", 64, False, _TWO_IN_FLIGHT, times=4)
    probes["stmatrix"] = _probe(element, "ss", 80, True, _STMATRIX)
    probes["small attention"] = small_attention_probe(element)
    probes["small attention, three stages"] = small_attention_probe(element, stages="3")
    probes["rows of 64 bytes"] = _narrow(element, 64)
    probes["rows of 32 bytes"] = _narrow(element, 32)
    return probes
