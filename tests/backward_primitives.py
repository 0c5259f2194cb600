"""Small kernels for the primitives that the backward adds, with what they must give: like primitive_kernels.py.

Where blocks add to the same elements, the first words of ``p.out`` are semaphores.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.primitive_kernels import NUM_THREADS, Probe

GRID = 6

# Magnitudes from 2^-12 to 2^12 in another order for each thread: each order of the additions rounds otherwise.
_rng = np.random.default_rng(11)
VALUES = (_rng.standard_normal((GRID, NUM_THREADS)) * 2.0 ** _rng.integers(-12, 13, (GRID, NUM_THREADS))).astype(
    np.float32
)

SUMS = "gptr<float>{reinterpret_cast<float*>(p.out.address)}"
OWN_VALUE = "as_float(ld_global<u32>(p.in + (kThreads * blockIdx.x + tid)))"

# Each warp has a semaphore and the sums of its threads; the blocks add in ascending order.
BY_WARP = {
    "wait": "if (lane == 0) wait_until_equal(p.out + warp, blockIdx.x);",
    "after_wait": "sync_warp();",
    "add": f"atomic_add({SUMS} + (4 + tid), {OWN_VALUE});",
    "before_release": "sync_warp();",
    "release": "if (lane == 0) release_add(p.out + warp, 1);",
}
# One semaphore for the block; a thread adds to the sum of one of another warp than in the block before.
BY_BLOCK = {
    "wait": "if (tid == 33) wait_until_equal(p.out, blockIdx.x);",
    "after_wait": "sync_threads();",
    "add": f"atomic_add({SUMS} + (4 + (tid + 32 * blockIdx.x) % 64), {OWN_VALUE});",
    "before_release": "sync_threads();",
    "release": "if (tid == 5) release_add(p.out, 1);",
}

# The same twice: who passes on the first turn looks how far the second is.
LOOK_AHEAD = {
    "first": "u32 seen = 0; if (tid == 33) seen = look_and_release_add(p.out, gptr<u32>{nullptr}, 7); sync_warp();",
    "wait": "if (tid == 33 && seen != blockIdx.x) wait_until_equal(p.out, blockIdx.x);",
    "after_wait": "sync_threads();",
    "add": f"atomic_add({SUMS} + (4 + (tid + 32 * blockIdx.x) % 64), {OWN_VALUE});",
    "before_release": "sync_threads();",
    "release": "if (tid == 33) seen = look_and_release_add(p.out + 1, p.out, 1); sync_warp();",
    "second": "if (tid == 33 && seen != blockIdx.x) wait_until_equal(p.out + 1, blockIdx.x);",
    "after_second": "sync_threads();",
    "add_again": f"atomic_add({SUMS} + (68 + (tid + 32 * blockIdx.x) % 64), {OWN_VALUE});",
    "before_last": "sync_threads();",
    "last": "if (tid == 33) release_add(p.out + 1, 1);",
}


def ordered_sums(parts: dict[str, str], **changes: str) -> str:
    """A body that adds in order, with some of its parts changed."""
    return "\n".join(["", *(f"  {text}" for text in {**parts, **changes}.values())])


def sums_in_order(values: np.ndarray) -> np.ndarray:
    """Sums of the rows, added in float32 from the first to the last."""
    total = np.zeros(values.shape[1:], np.float32)
    for row in values:
        total = total + row
    return total


def _ordered(parts: dict[str, str], semaphores: list[int], values: np.ndarray, times: int = 1) -> Probe:
    sums = sums_in_order(values).view(np.uint32)
    words = np.concatenate([np.array(semaphores, np.uint32), *[sums] * times])
    return Probe(ordered_sums(parts), VALUES.reshape(-1).view(np.uint32), words, grid=GRID, atomic=True)


def _passed_on() -> Probe:
    """Other elements than the semaphores: a block reads what the one before has written."""
    text = """
  if (tid == 0 && blockIdx.x > 0) wait_until_equal(p.out + (blockIdx.x - 1), 1);
  sync_threads();
  u32 value = ld_global<u32>(p.in + tid);
  if (blockIdx.x > 0) value += 3 * ld_global<u32>(p.out + (8 + 64 * (blockIdx.x - 1) + (tid ^ 33)));
  st_global(p.out + (8 + 64 * blockIdx.x + tid), value);
  sync_threads();
  if (tid == 63) release_add(p.out + blockIdx.x, 1);"""
    rows = [VALUES[0].view(np.uint32)]
    for _ in range(GRID - 1):
        rows.append(rows[0] + 3 * rows[-1][np.arange(64) ^ 33])
    words = [np.array([1] * GRID + [0, 0], np.uint32), *rows]
    return Probe(text, rows[0], np.concatenate(words), grid=GRID, atomic=True)


ROLLED = np.stack([np.roll(row, 32 * n) for n, row in enumerate(VALUES)])
REDUCTION_PROBES: dict[str, Probe] = {
    "a semaphore of each warp": _ordered(BY_WARP, [GRID, GRID, 0, 0], VALUES),
    "a semaphore of the block": _ordered(BY_BLOCK, [GRID, 0, 0, 0], ROLLED),
    "a look ahead": _ordered(LOOK_AHEAD, [GRID, GRID, 0, 0], ROLLED, times=2),
    "values passed on by semaphores": _passed_on(),
}

# Eight sums of four floats; exact in any order. sm_90 and up.
VECTOR_PROBES: dict[str, Probe] = {
    "atomic_add4": Probe(
        f"  atomic_add4({SUMS} + 4 * (tid % 8), 0.5f, 1.f * tid, -2.f * blockIdx.x, as_float(ld_global<u32>(p.in)));",
        np.array([1.25], np.float32).view(np.uint32),
        np.array([[24 * 0.5, 3 * sum(range(r, 64, 8)), -2 * 8 * 3, 24 * 1.25] for r in range(8)], np.float32)
        .reshape(-1)
        .view(np.uint32),
        grid=3,
        atomic=True,
    ),
}


def _unpack(element: str) -> Probe:
    """Every 16-bit pattern that is a number, in the low half and in the high one."""
    dtype = torch.bfloat16 if element == "bf16" else torch.float16
    floats = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    floats = floats[~floats.isnan()]
    halves = floats.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    text = f"""
  for (int i = blockIdx.x * kThreads + tid; i < {len(halves)}; i += gridDim.x * kThreads) {{
    const u32 pair = ld_global<u32>(p.in + i);
    const float low = unpack_low<{element}>(pair), high = unpack_high<{element}>(pair);
    st_global(p.out + 2 * i, u32x2{{as_bits(low), as_bits(high)}});
  }}"""
    bits = floats.numpy().view(np.uint32)
    return Probe(text, halves | np.roll(halves, 1) << 16, np.stack([bits, np.roll(bits, 1)], 1).reshape(-1), grid=4)


CONVERSION_PROBES: dict[str, Probe] = {
    "unpack bf16": _unpack("bf16"),
    "unpack fp16": _unpack("fp16"),
    "uniform": Probe(
        "  st_global(p.out + tid, u32(uniform(tid / 32 + 7)));",
        np.zeros(1, np.uint32),
        np.repeat(np.array([7, 8], np.uint32), 32),
    ),
}
