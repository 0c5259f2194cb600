"""Small kernels of three warpgroups for sm_90a, with what they must give: like primitive_kernels.py.

Their parameters begin with tensor maps: of ``a`` and ``b``, which they read, and of ``o``, which they write.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import jinja2
import numpy as np
import torch

from fa2gen.codegen import KernelSource
from fa2gen.codegen.render import HOST_INCLUDE, HOST_KEYWORDS
from fa2gen.data import data_dir
from fa2gen.launch import Launch
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tensor_map import BYTES, TensorMap

NUM_THREADS = 384
SMEM_BYTES = 96 * 1024
ENTRY = "sm90_probes"
HOST_INCLUDE_SM90 = '#include "fa2gen_host_sm90.h"\n'
MAPS = ("a", "b", "o")
POINTERS = {"a": 0, "b": BYTES // 8, "o": 2 * BYTES // 8} | {
    name: 3 * BYTES // 8 + i for i, name in enumerate(("in", "out", "tickets"))
}
PARAM_BYTES = 448  # a multiple of 64, the maps' alignment

_DECLARATIONS = """
struct ProbeParams {
  TensorMap a, b, o;
  gptr<const u32> in;
  gptr<u32> out;
  gptr<u64> tickets;
  int which, extra;
};
FUNC float as_float(u32 bits) { return bits_as<float>(bits); }
FUNC u32 as_bits(float f) { return bits_as<u32>(f); }
// The descriptor of an operand whose rows have 128 bytes: mode 1; 64: 2; 32: 3.
FUNC u64 operand(u32 address, u32 leading_bytes = 16, u32 stride_bytes = 1024, u32 mode = 1) {
  return u64(address >> 4) | u64(leading_bytes >> 4) << 16 | u64(stride_bytes >> 4) << 32 | u64(mode) << 62;
}
FUNC void init_barriers(u32 first, int number, int count) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < number; i++) mbarrier_init(first + 8 * i, count);
    fence_mbarrier_init();
  }
  sync_threads();
}
// Where chunk `chunk` of a row of 128 bytes lies in a tile.
FUNC u32 swizzled(int row, int chunk) { return row * 128 + (chunk ^ (row & 7)) * 16; }
"""


def sm90_source(
    bodies: Mapping[str, str],
    platform: str,
    element: str = "bf16",
    shapes: tuple[tuple[str, int, bool], ...] = (),
    num_threads: int = NUM_THREADS,
) -> KernelSource:
    """A kernel whose parameter ``which`` chooses one of the bodies, by its position.

    A body sees ``p`` (the parameters), ``tid``, ``warp``, ``lane``, ``group`` (the warpgroup), ``smem`` (1 KiB for
    barriers and words), ``tile`` (the rest, at a multiple of 1024) and ``Element``.

    Args:
        bodies: Name -> text.
        platform: ``"cuda"`` or ``"host"``.
        element: ``"bf16"`` or ``"fp16"``.
        shapes: The wgmmas that bodies use: (``"ss"`` or ``"rs"``, columns, is b transposed).
        num_threads: Of a block.
    """
    functions, calls = [], []
    for i, text in enumerate(bodies.values()):
        signature = "const ProbeParams& p, int tid, int warp, int lane, int group, u32 smem, u32 tile"
        functions.append(f"FUNC void probe_{i}({signature}) {{\n{text}\n}}")
        calls.append(f"  if (p.which == {i}) probe_{i}(p, tid, warp, lane, group, smem, smem + 1024);")
    kernel = [
        f'extern "C" __global__ void __launch_bounds__(kThreads, 1) {ENTRY}(const __grid_constant__ ProbeParams p) {{',
        "  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, group = tid / 128;",
        "  const u32 smem = (smem_base() + 1023) / 1024 * 1024;",
        *calls,
        "}",
    ]
    constants = f"constexpr int kThreads = {num_threads};\nusing Element = {element};"
    body = "\n".join([constants, _DECLARATIONS, *functions, *kernel, ""])
    root = data_dir("templates")
    types = [(root / name).read_text() for name in ("common/types.cuh", "sm90/types.cuh")]
    if platform == "host":
        headers = (HOST_KEYWORDS, *types, HOST_INCLUDE, HOST_INCLUDE_SM90)
    else:
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(root), undefined=jinja2.StrictUndefined, trim_blocks=True
        )
        wgmma = environment.get_template("sm90/wgmma.cuh.j2").render(
            wgmma_shapes=[{"form": form, "n": n, "transposed_b": str(t).lower()} for form, n, t in shapes],
            element=element,
            ptx_element={"bf16": "bf16", "fp16": "f16"}[element],
        )
        texts = ("sm80/primitives.cuh", "sm80/conversions.cuh", "sm90/primitives.cuh")
        headers = (*types, *((root / name).read_text() for name in texts), wgmma)
    return KernelSource(
        spec=KernelSpec(dtype=element),
        config=FwdConfig(),
        kernel="fwd",
        platform=platform,
        text="\n".join((*headers, body)),
        body=body,
        entry=ENTRY,
        num_threads=num_threads,
        smem_bytes=SMEM_BYTES,
    )


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of 16-bit elements, (batch, row, head, column), and the box of its map.

    Attributes:
        values: Any 16-bit dtype, contiguous; of an output, what is there before.
        box: (columns, rows, heads, batches).
    """

    values: np.ndarray
    box: tuple[int, int, int, int]

    def map(self, name: str) -> TensorMap:
        """The map, for fa2gen's driver and emulator."""
        batch, rows, heads, columns = self.values.shape
        by_batch, by_row, by_head, _ = self.values.strides
        return TensorMap(name, (columns, rows, heads, batch), (by_row, by_head, by_batch), self.box)

    def boxed(self, at: tuple[int, int, int, int]) -> np.ndarray:
        """What a load of the box at (column, row, head, batch) brings: (batches, heads, rows, columns)."""
        out = np.zeros(self.box[::-1], self.values.dtype)
        batch, rows, heads, columns = self.values.shape
        for place in np.ndindex(*out.shape):
            b, h, r, c = (int(i) + at[3 - axis] for axis, i in enumerate(place))
            if 0 <= b < batch and 0 <= r < rows and 0 <= h < heads and 0 <= c < columns:
                out[place] = self.values[b, r, h, c]
        return out


NO_TENSOR = MappedTensor(np.zeros((1, 8, 1, 64), np.uint16), (64, 8, 1, 1))


@dataclass(frozen=True)
class Sm90Probe:
    """One probe.

    Attributes:
        text: The body.
        a, b, o: Tensors behind the maps.
        inputs: 32-bit words at ``p.in``.
        out: 32-bit words that ``p.out`` has in the end; all are written.
        o_after: Elements that ``o`` has in the end, as uint16; None: what it had.
        extra: ``p.extra``.
        grid: Blocks.
        shapes: The wgmmas that it uses, as for :func:`sm90_source`.
    """

    text: str
    out: np.ndarray
    a: MappedTensor = NO_TENSOR
    b: MappedTensor = NO_TENSOR
    o: MappedTensor = NO_TENSOR
    inputs: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint32))
    o_after: np.ndarray | None = None
    extra: int = 0
    grid: int = 1
    shapes: tuple[tuple[str, int, bool], ...] = ()

    def launch(self, which: int, num_threads: int = NUM_THREADS, maps: Mapping[str, bytes] | None = None) -> Launch:
        """The launch, with null pointers and with maps as the emulator reads them unless others are given."""
        encoded = maps or {name: getattr(self, name).map(name).emulated() for name in MAPS}
        params = b"".join(encoded[name] for name in MAPS) + struct.pack("<QQQii", 0, 0, 0, which, self.extra)
        return Launch("fwd", (self.grid, 1, 1), num_threads, SMEM_BYTES, params.ljust(PARAM_BYTES, b"\0"))

    def check(self, out: np.ndarray, o: np.ndarray) -> None:
        """Raises AssertionError unless the words (uint32) at ``p.out`` and the elements of ``o`` (uint16) are right."""
        np.testing.assert_array_equal(out, self.out)
        after = self.o.values.view(np.uint16) if self.o_after is None else self.o_after
        np.testing.assert_array_equal(o.reshape(after.shape), after)


def shapes_of(probes: Mapping[str, Sm90Probe]) -> tuple[tuple[str, int, bool], ...]:
    """All wgmmas of a table of probes."""
    return tuple(sorted({shape for probe in probes.values() for shape in probe.shapes}))


def counting(*shape: int) -> np.ndarray:
    """16-bit elements that differ, as far as there are as many."""
    return (np.arange(np.prod(shape), dtype=np.uint32) * 40503 % 65521).astype(np.uint16).reshape(shape)


def small_integers(seed: int, element: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers from -8 to 8, whose products and sums are exact: as 16-bit elements, and as float64."""
    values = np.random.default_rng(seed).integers(-8, 9, shape)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[element]
    bits = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
    return bits, values.astype(np.float64)


def as_words(values: np.ndarray) -> np.ndarray:
    """Float32 bits."""
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)


def swizzle(rows: np.ndarray) -> np.ndarray:
    """Rows of 16-bit elements as they lie in shared memory, from a multiple of 1024 bytes on; 128, 64 or 32 bytes each.

    Returns:
        32-bit words.
    """
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 16)
    chunk_bits = {128: 0x70, 64: 0x30, 32: 0x10}[rows.shape[-1] * 2]
    address = np.arange(len(data)) * 16
    out = np.empty_like(data)
    out[(address ^ (address >> 3 & chunk_bits)) // 16] = data
    return out.reshape(-1).view(np.uint32)
