"""Tensor maps on a Hopper GPU: what the driver encodes and refuses, what TMA copies by it, what a call pays."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from fa2gen import driver  # noqa: E402
from fa2gen.codegen import KernelSource  # noqa: E402
from fa2gen.compile import compile_kernel  # noqa: E402
from fa2gen.driver import LoadedKernel, map_packer, tensor_maps  # noqa: E402
from fa2gen.driver.tensor_maps import MapCache, encode  # noqa: E402
from fa2gen.errors import LaunchError  # noqa: E402
from fa2gen.spec import FwdConfig, KernelSpec  # noqa: E402
from fa2gen.tensor_map import BYTES, PANEL_COLUMNS, TensorMap, tensor_map, tma_reason  # noqa: E402

BOX_ROWS = 64
TILE = BOX_ROWS * PANEL_COLUMNS * 2
THREADS = 128
SMEM = 1024 + TILE + 8  # the tile at a multiple of 1024 bytes, then an mbarrier

# Where nothing is allocated: maps are encoded, not followed.
ADDRESS = 0x7000_0000_0000

# Copies one box to shared memory by TMA, and from there, the swizzle undone, to `out`.
TEXT = """
struct alignas(64) Map { unsigned long long opaque[16]; };
struct Params { Map map; unsigned short* out; int column, row, head, batch; };
extern "C" __global__ void __launch_bounds__(128) copy_box(const __grid_constant__ Params p) {
  extern __shared__ unsigned char staged[];
  unsigned start;
  asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(start) : "l"(staged));
  unsigned tile = (start + 1023) & ~1023u, barrier = tile + 8192;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8192;" ::"r"(barrier) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}],"
        " [%2];" ::"r"(tile), "l"(&p.map), "r"(barrier), "r"(p.column), "r"(p.row), "r"(p.head), "r"(p.batch)
        : "memory");
  }
  asm volatile("bar.sync 0;" ::: "memory");
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], 0; selp.u32 %0, 1, 0, q; }"
                 : "=r"(done) : "r"(barrier) : "memory");
  for (int i = threadIdx.x; i < 64 * 64; i += 128) {
    int row = i / 64, column = i % 64;
    unsigned at = tile + row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
    unsigned short element;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(element) : "r"(at) : "memory");
    p.out[i] = element;
  }
}
"""
SOURCE = KernelSource(KernelSpec(), FwdConfig(), "fwd", "cuda", TEXT, TEXT, "copy_box", THREADS, SMEM)

# Writes to the address that it finds at the beginning of its parameters.
MARK_TEXT = """
struct alignas(64) Params { unsigned long long addresses[24]; };
extern "C" __global__ void mark(const __grid_constant__ Params p) { *(unsigned long long*)p.addresses[0] = 1; }
"""
MARK = KernelSource(KernelSpec(), FwdConfig(), "fwd", "cuda", MARK_TEXT, MARK_TEXT, "mark", 1, 0)


@pytest.fixture(autouse=True, scope="module")
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tensor maps of this family need compute capability 9.0")
    torch.zeros(1, device="cuda")


@pytest.fixture(scope="module")
def kernel() -> LoadedKernel:
    return driver.load(compile_kernel(SOURCE, "sm_90a"), torch.cuda.current_device())


@pytest.fixture(scope="module")
def beginnings() -> dict[str, object]:
    """How launches give parameters -> which of their 8-byte words is the struct's first to a kernel: 0, if all is well.

    The constant bank's parameters begin at 0x210 for sm_90, so that the compiler puts a struct that is aligned to 64
    bytes 48 bytes further (``cuobjdump -elf``, EIATTR_KPARAM_INFO). ``kernelParams`` are put there by the driver; what
    it does with a buffer, which is how PyCUDA launches, the documentation does not say. Whatever a kernel takes for its
    first word is an address here, of memory that is there for it.
    """
    kernel, found = driver.load(compile_kernel(MARK, "sm_90a"), torch.cuda.current_device()), {}
    marks = torch.zeros(64, dtype=torch.int64, device="cuda")
    words = [struct.pack("<Q", marks.data_ptr() + 8 * i) for i in range(64)]
    params, in_front = b"".join(words[:24]), b"".join(words[24:30])

    def buffer_with_more_in_front() -> None:
        kernel._pycuda_launch((1,), (1,), in_front + params, 0, None)

    for name, launch in (
        ("default stream", lambda: kernel.launch((1, 1, 1), (1, 1, 1), params, 0)),
        ("other stream", lambda: kernel.launch((1, 1, 1), (1, 1, 1), params, torch.cuda.Stream().cuda_stream)),
        ("buffer with 48 bytes in front", buffer_with_more_in_front),
    ):
        marks.zero_()
        torch.cuda.synchronize()
        try:
            launch()
            torch.cuda.synchronize()
            found[name] = marks.nonzero().flatten().tolist()
        except Exception as error:
            found[name] = error
    return found


def encode_aligned(map: TensorMap, address: int) -> bytes:
    """What the driver itself encodes, into memory aligned as its documentation wants it, by the values of cuda.h."""
    memory = (ctypes.c_char * (2 * BYTES))()
    start = (ctypes.addressof(memory) + BYTES - 1) & -BYTES
    sizes, strides = (ctypes.c_uint64 * 4)(*map.sizes), (ctypes.c_uint64 * 3)(*map.strides)
    box, ones = (ctypes.c_uint32 * 4)(*map.box), (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    bfloat16, no_interleave, swizzle, promotion_256, fill_zero = 9, 0, {32: 1, 64: 2, 128: 3}[map.swizzle_bytes], 3, 0
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), bfloat16, 4, ctypes.c_void_p(address), sizes, strides, box, ones, no_interleave,
        swizzle, promotion_256, fill_zero,
    )  # fmt: skip
    assert status == 0
    return ctypes.string_at(start, BYTES)


# (batch, row, head, column) sizes, and strides in elements of (batch, row, head).
Shape = tuple[tuple[int, int, int, int], tuple[int, int, int]]


def contiguous(batch: int, rows: int, heads: int, columns: int) -> Shape:
    return (batch, rows, heads, columns), (rows * heads * columns, heads * columns, columns)


ACCEPTED: dict[str, Shape] = {
    **{f"head dim {columns}": contiguous(2, 100, 3, columns) for columns in (8, 40, 64, 96, 128, 192, 256)},
    "heads before rows": ((2, 100, 3, 64), (100 * 3 * 64, 64, 100 * 64)),
    "rows of a fused qkv": ((2, 100, 3, 64), (100 * 3 * 3 * 64, 3 * 3 * 64, 64)),
    "rows that overlap": ((2, 100, 3, 64), (4096, 8, 1024)),
    "one element": ((1, 1, 1, 1), (1, 1, 1)),
    "odd strides of axes of one": ((1, 1, 1, 64), (3, 5, 7)),
    "vast strides of axes of one": ((1, 1, 1, 64), (2**50, 2**50, 2**50)),
    "no strides of axes of one": ((1, 1, 1, 64), (0, 0, 0)),
    "few columns": ((2, 100, 3, 4), (1024, 8, 800)),
    "rows expanded": ((2, 100, 3, 64), (192, 0, 64)),
    "heads expanded": ((2, 100, 3, 64), (6400, 64, 0)),
    "batch expanded": ((2, 100, 3, 64), (0, 192, 64)),
    "all expanded": ((2, 100, 3, 64), (0, 0, 0)),
    "many rows": ((1, 2**31 - 1, 1, 64), (64, 64, 64)),
    "most rows": ((1, 2**32 - 1, 1, 64), (64, 64, 64)),
    "most rows, expanded": ((1, 2**32 - 1, 1, 64), (64, 0, 64)),
    # Maps of something else: nothing is read of these.
    "no rows": ((2, 0, 3, 64), (0, 192, 64)),
    "no heads": ((2, 100, 0, 64), (192, 192, 64)),
    "longest strides": ((2, 2, 2, 64), (2**39 - 8, 2**39 - 8, 2**39 - 8)),
}
REFUSED: dict[str, Shape] = {
    "row stride of 4 more": ((2, 100, 3, 64), (100 * 196, 196, 64)),
    "odd row stride": ((2, 100, 3, 64), (20000, 193, 64)),
    "head stride of 4 more": ((2, 100, 3, 64), (20400, 204, 68)),
    "batch stride of 4 more": ((2, 100, 3, 64), (19204, 192, 64)),
    "batch stride too long": ((2, 100, 3, 64), (2**39, 192, 64)),
    "row stride too long": ((2, 100, 3, 64), (192, 2**39, 64)),
    "too many rows": ((1, 2**32 + 16, 1, 64), (64, 64, 64)),
}


def driver_encodes(shape: Shape, address: int) -> bool:
    try:
        encode(tensor_map("k", *shape, BOX_ROWS), address)
    except LaunchError:
        return False
    return True


@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_reasons_and_the_driver_agree(name: str) -> None:
    shape = (ACCEPTED | REFUSED)[name]
    assert (tma_reason("k", *shape, ADDRESS) is None) == (name in ACCEPTED)
    assert driver_encodes(shape, ADDRESS) == (name in ACCEPTED)


@pytest.mark.parametrize("offset", range(0, 34, 2))
def test_alignment_of_the_address(offset: int) -> None:
    shape = contiguous(2, 100, 3, 64)
    aligned = offset % 16 == 0
    assert (tma_reason("k", *shape, ADDRESS + offset) is None) == aligned
    assert driver_encodes(shape, ADDRESS + offset) == aligned
    pack = MapCache(tensor_map("k", *shape, BOX_ROWS), 0).__getitem__
    pack(ADDRESS)
    if not aligned:
        with pytest.raises(LaunchError, match="no multiple of 16"):
            pack(ADDRESS + offset)


@pytest.mark.parametrize("name", ACCEPTED)
def test_maps_in_unaligned_memory_and_replaced_addresses(name: str) -> None:
    """Bytes are those that the driver encodes into aligned memory, whichever way they come, allocated or not."""
    seen = tensor_map("k", *ACCEPTED[name], BOX_ROWS)
    cache = MapCache(seen, 0)
    there = torch.zeros(1 << 20, device="cuda").data_ptr()
    for address in (ADDRESS, there, there + 16, ADDRESS + (1 << 44), there):
        expected = encode_aligned(seen, address)
        assert encode(seen, address) == expected
        assert cache[address] == expected


@pytest.mark.parametrize("columns", [64, 32, 16])
@pytest.mark.parametrize("rows", [1, 176, 256])
def test_boxes(columns: int, rows: int) -> None:
    wide = tensor_map("k", *contiguous(2, 300, 3, 64), rows)
    seen = TensorMap("k", wide.sizes, wide.strides, (columns, rows, 1, 1))
    assert encode(seen, ADDRESS) == encode_aligned(seen, ADDRESS)


def test_thread_without_a_context(capsys: pytest.CaptureFixture[str]) -> None:
    seen = tensor_map("q", *contiguous(2, 100, 3, 64), BOX_ROWS)
    cache, found = MapCache(seen, 0), {}

    def work() -> None:
        try:
            found["alone"] = encode(seen, ADDRESS)
        except LaunchError as error:
            found["alone"] = error
        found["context"] = tensor_maps.current_context()
        found["packed"] = cache[ADDRESS]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found["packed"] == encode_aligned(seen, ADDRESS)
    assert found["context"] == 0
    with capsys.disabled():
        print(f"\nencode without a context: {'works' if found['alone'] == found['packed'] else found['alone']}")


def test_parameters_begin_where_the_struct_does(
    beginnings: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\nfirst word of a struct aligned to 64 bytes: {beginnings}")
    assert beginnings["default stream"] == [0]
    assert beginnings["other stream"] == [0]


def require_beginning(beginnings: dict[str, object], name: str) -> None:
    """A map that is not one might end this process's use of the GPU."""
    if beginnings[name] != [0]:
        pytest.fail(f"not launched: parameters do not arrive on the {name}: {beginnings}")


STREAMS = {"default stream": lambda: 0, "other stream": lambda: torch.cuda.Stream().cuda_stream}


def copy_box(kernel: LoadedKernel, x: torch.Tensor, pack: Callable[[int], bytes], box: tuple[int, ...], stream: int):
    """The box of ``x`` that begins at (column, row, head, batch)."""
    out = torch.full((BOX_ROWS, PANEL_COLUMNS), 7, dtype=torch.int16, device="cuda")
    torch.cuda.synchronize()
    params = pack(x.data_ptr()) + struct.pack("<Q4i", out.data_ptr(), *box)
    # C++ rounds the struct up to the map's alignment, and the driver reads all of it.
    params = params.ljust(-(-len(params) // 64) * 64, b"\0")
    kernel.launch((1, 1, 1), (THREADS, 1, 1), params, stream)
    torch.cuda.synchronize()
    return out.view(x.dtype)


def expected_box(x: torch.Tensor, box: tuple[int, ...]) -> torch.Tensor:
    column, row, head, batch = box
    there = x[batch, row : row + BOX_ROWS, head, column : column + PANEL_COLUMNS]
    out = torch.zeros(BOX_ROWS, PANEL_COLUMNS, dtype=x.dtype, device="cuda")
    out[: there.shape[0], : there.shape[1]] = there
    return out


def bits(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random bit patterns: NaN, infinities and subnormal numbers included, all of which are to stay as they are."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    x = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda", generator=generator)
    return x.view(dtype)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "bf16": lambda: bits(2, 100, 3, 128),
    "fp16": lambda: bits(2, 100, 3, 128, dtype=torch.float16),
    "head dim 40": lambda: bits(2, 100, 3, 40),
    "head dim 96": lambda: bits(2, 100, 3, 96),
    "head dim 256": lambda: bits(2, 100, 3, 256),
    "heads before rows": lambda: bits(2, 3, 100, 128).transpose(1, 2),
    "fused qkv": lambda: bits(2, 100, 3, 3, 128)[:, :, 1],
    "every other row": lambda: bits(2, 200, 3, 128)[:, ::2],
    "16 bytes further": lambda: bits(2, 100, 3, 136)[..., 8:],
    "one of each": lambda: bits(1, 1, 1, 128),
    "rows expanded": lambda: bits(2, 1, 3, 128).expand(2, 100, 3, 128),
    "heads expanded": lambda: bits(2, 100, 1, 128).expand(2, 100, 3, 128),
    "batch expanded": lambda: bits(1, 100, 3, 128).expand(2, 100, 3, 128),
    "all expanded": lambda: bits(1, 1, 1, 128).expand(2, 100, 3, 128),
}


@pytest.mark.parametrize("where", STREAMS)
@pytest.mark.parametrize("name", VIEWS)
def test_boxes_that_tma_copies(kernel: LoadedKernel, beginnings: dict[str, object], name: str, where: str) -> None:
    require_beginning(beginnings, where)
    stream, x = STREAMS[where](), VIEWS[name]()
    batch, rows, heads, columns = x.shape
    assert tma_reason("x", tuple(x.shape), x.stride(), x.data_ptr()) is None
    pack = map_packer(tensor_map("x", tuple(x.shape), x.stride()[:3], BOX_ROWS))
    for at in (0, 64):
        box = (min(at, (columns - 1) // 64 * 64), min(at, rows - 1), heads - 1, batch - 1)
        got = copy_box(kernel, x, pack, box, stream)
        assert torch.equal(got.view(torch.int16), expected_box(x, box).view(torch.int16)), box


@pytest.mark.parametrize("where", STREAMS)
def test_parameter_bytes_may_lie_anywhere(kernel: LoadedKernel, beginnings: dict[str, object], where: str) -> None:
    """The driver copies them: the alignment of the map counts inside the struct, not in Python's memory."""
    require_beginning(beginnings, where)
    stream = STREAMS[where]()
    x = bits(2, 100, 3, 128)
    pack = map_packer(tensor_map("x", tuple(x.shape), x.stride()[:3], BOX_ROWS))
    out = torch.empty(BOX_ROWS, PANEL_COLUMNS, dtype=torch.int16, device="cuda")
    expected = expected_box(x, (64, 32, 2, 1)).view(torch.int16)
    struct_bytes = (pack(x.data_ptr()) + struct.pack("<Q4i", out.data_ptr(), 64, 32, 2, 1)).ljust(192, b"\0")
    kept, seen = [], set()
    header = bytes.__basicsize__ - 1
    for _ in range(32):
        params = bytes(bytearray(struct_bytes))
        kept.append(params)
        seen.add((id(params) + header) % 64)
        out.fill_(7)
        torch.cuda.synchronize()
        kernel.launch((1, 1, 1), (THREADS, 1, 1), params, stream)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    assert len(seen) > 1


def test_what_a_call_pays(capsys: pytest.CaptureFixture[str]) -> None:
    seen = tensor_map("k", *contiguous(4, 4096, 16, 128), 128)
    addresses = [ADDRESS + (i << 21) for i in range(500)]

    def microseconds(work: Callable[[int], object]) -> float:
        begin = time.perf_counter_ns()
        for address in addresses:
            work(address)
        return (time.perf_counter_ns() - begin) / len(addresses) / 1000

    hits, misses, encodings = [], [], []
    for _ in range(20):
        pack = MapCache(seen, 0).__getitem__
        pack(0)
        misses.append(microseconds(pack))
        hits.append(microseconds(pack))
        encodings.append(microseconds(lambda address: encode(seen, address)))
    with capsys.disabled():
        print(
            f"\nus a map: hit {min(hits):.3f}, miss with the address replaced {min(misses):.2f}, "
            f"encoded {min(encodings):.2f} (cuda-bindings {tensor_maps.bindings_version()})"
        )
    assert min(hits) < 1
