"""How TMA sees a tensor, and the maps that a stand-in for cuda-bindings encodes."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fa2gen import driver
from fa2gen.commands import doctor
from fa2gen.driver import DeviceInfo, map_packer, tensor_maps
from fa2gen.driver.tensor_maps import MAX_ADDRESSES, MapCache, encode
from fa2gen.errors import ArgumentError, LaunchError, ToolchainError
from fa2gen.tensor_map import BYTES, PANEL_COLUMNS, TensorMap, tensor_map, tma_reason

# (batch, row, head, column) of a (batch, row, head, column) tensor, and of one whose heads come before its rows.
SIZES = (3, 100, 5, 40)
STRIDES = (100 * 5 * 40, 5 * 40, 40)
HEADS_FIRST = (5 * 100 * 40, 40, 100 * 40)
ADDRESS = 0x7F12_3456_7800
OTHER = 0x7F99_0000_0010
MAP = tensor_map("k", SIZES, STRIDES, 128)

# --- How TMA sees a tensor


def test_axes_are_turned_round() -> None:
    assert MAP.sizes == (40, 100, 5, 3)
    assert MAP.strides == (5 * 40 * 2, 40 * 2, 100 * 5 * 40 * 2)
    assert MAP.box == (PANEL_COLUMNS, 128, 1, 1)
    assert MAP.swizzle_bytes == 128
    assert tensor_map("k", SIZES, HEADS_FIRST, 64).strides == (40 * 2, 100 * 40 * 2, 5 * 100 * 40 * 2)


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("stride", [0, 1, 7, 2**45])
def test_axis_of_one_element_may_have_any_stride(axis: int, stride: int) -> None:
    sizes, strides = list(SIZES), list(STRIDES)
    sizes[axis], strides[axis] = 1, stride
    assert tma_reason("q", tuple(sizes), tuple(strides), 0) is None
    seen = tensor_map("q", tuple(sizes), tuple(strides), 64)  # type: ignore[arg-type]
    by_row, by_head, by_batch = seen.strides
    assert (by_batch, by_row, by_head)[axis] == 16
    assert sorted(seen.strides) == sorted([16, *(2 * STRIDES[other] for other in range(3) if other != axis)])


@pytest.mark.parametrize("strides", [(0, 200, 40), (20000, 0, 40), (20000, 200, 0), (0, 0, 0)])
def test_expanded_views(strides: tuple[int, int, int]) -> None:
    assert tma_reason("v", SIZES, strides, ADDRESS) is None
    by_batch, by_row, by_head = (2 * stride for stride in strides)
    assert tensor_map("v", SIZES, strides, 64).strides == (by_row, by_head, by_batch)


@pytest.mark.parametrize(
    ("sizes", "strides", "address", "words"),
    [
        (SIZES, STRIDES, ADDRESS + 2, ("address", "16 bytes")),
        (SIZES, STRIDES, ADDRESS + 8, ("address", "16 bytes")),
        (SIZES, (20004, 200, 40), 0, ("batch stride of 20004 elements", "16 bytes")),
        (SIZES, (20000, 201, 40), 0, ("row stride of 201 elements", "16 bytes")),
        (SIZES, (20000, 200, 44), 0, ("head stride of 44 elements", "16 bytes")),
        (SIZES, (2**39, 200, 40), 0, (f"batch stride of {2**40} bytes", "2^40")),
        ((3, 2**32, 5, 40), STRIDES, 0, (f"axis of {2**32} elements", "2^32")),
    ],
)
def test_what_tma_refuses(
    sizes: tuple[int, ...], strides: tuple[int, ...], address: int, words: tuple[str, ...]
) -> None:
    reason = tma_reason("dout", sizes, strides, address)
    assert reason is not None
    assert reason.startswith("dout ")
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [(SIZES, (2**39 - 8, 200, 40)), ((3, 2**32 - 1, 5, 40), STRIDES), ((1, 1, 1, 1), (1, 1, 1)), (SIZES, HEADS_FIRST)],
)
def test_what_tma_just_takes(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert tma_reason("q", sizes, strides, 16) is None
    # Columns have a stride too, where a caller gives all four.
    assert tma_reason("q", sizes, (*strides, 1), 16) is None


def test_the_emulator_s_layout() -> None:
    packed = MAP.emulated()
    assert len(packed) == BYTES == 128
    assert struct.unpack_from("<Q3Q", packed) == (0, 400, 80, 40000)
    assert struct.unpack_from("<4I4II", packed, 32) == (40, 100, 5, 3, 64, 128, 1, 1, 128)
    assert packed[68:] == bytes(60)
    narrow = TensorMap("k", (32, 100, 5, 3), MAP.strides, (16, 64, 1, 1))
    assert struct.unpack_from("<I", narrow.emulated(), 64) == (32,)


# --- A stand-in for cuda-bindings


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Encoded:
    """``CUtensorMap``: 128 bytes at ``getPtr()``."""

    def __init__(self) -> None:
        self.bytes = (ctypes.c_char * 128)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.bytes)


class Bindings(types.ModuleType):
    """``cuda.bindings.driver``: what is asked of it in ``calls``; refuses what ``refuse`` says.

    An encoded map is its address, then all other arguments as 32-bit numbers.
    """

    CUresult = Result
    CUtensorMap = Encoded
    # Values differ from the driver's, all of them: only names may be used.
    CUtensorMapDataType = enum.IntEnum("CUtensorMapDataType", {"CU_TENSOR_MAP_DATA_TYPE_BFLOAT16": 109})
    CUtensorMapInterleave = enum.IntEnum("CUtensorMapInterleave", {"CU_TENSOR_MAP_INTERLEAVE_NONE": 120})
    CUtensorMapSwizzle = enum.IntEnum(
        "CUtensorMapSwizzle", {f"CU_TENSOR_MAP_SWIZZLE_{width}B": 1000 + width for width in (32, 64, 128)}
    )
    CUtensorMapL2promotion = enum.IntEnum("CUtensorMapL2promotion", {"CU_TENSOR_MAP_L2_PROMOTION_L2_256B": 140})
    CUtensorMapFloatOOBfill = enum.IntEnum("CUtensorMapFloatOOBfill", {"CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": 150})

    class cuuint64_t(int):
        pass

    class cuuint32_t(int):
        pass

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[str] = []
        self.refuse: Callable[[int], bool] = lambda address: bool(address % 16)

    def cuTensorMapEncodeTiled(
        self,
        tensorDataType: Any,
        tensorRank: int,
        globalAddress: int,
        globalDim: list[Any],
        globalStrides: list[Any],
        boxDim: list[Any],
        elementStrides: list[Any],
        interleave: Any,
        swizzle: Any,
        l2Promotion: Any,
        oobFill: Any,
    ) -> tuple[Result, Encoded | None]:
        self.calls.append(f"encode {globalAddress:#x}")
        for values, kind in (
            (globalDim, self.cuuint64_t),
            (globalStrides, self.cuuint64_t),
            (boxDim, self.cuuint32_t),
            (elementStrides, self.cuuint32_t),
            ([tensorDataType], self.CUtensorMapDataType),
            ([interleave], self.CUtensorMapInterleave),
            ([swizzle], self.CUtensorMapSwizzle),
            ([l2Promotion], self.CUtensorMapL2promotion),
            ([oobFill], self.CUtensorMapFloatOOBfill),
        ):
            assert all(isinstance(value, kind) for value in values)  # the real ones raise TypeError
        assert (len(globalDim), len(globalStrides), len(boxDim), len(elementStrides)) == (4, 3, 4, 4)
        if self.refuse(globalAddress):
            return Result.CUDA_ERROR_INVALID_VALUE, None
        others = [*globalDim, *globalStrides, *boxDim, *elementStrides]
        others += [tensorDataType, tensorRank, interleave, swizzle, l2Promotion, oobFill]
        encoded = Encoded()
        encoded.bytes.raw = struct.pack(f"<Q{len(others)}I", globalAddress, *others).ljust(128, b"\0")
        return Result.CUDA_SUCCESS, encoded

    def cuTensorMapReplaceAddress(self, tensorMap: Encoded, globalAddress: int) -> tuple[Result]:
        self.calls.append(f"replace {globalAddress:#x}")
        if self.refuse(globalAddress):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        tensorMap.bytes.raw = struct.pack("<Q", globalAddress) + tensorMap.bytes.raw[8:]
        return (Result.CUDA_SUCCESS,)


def expected(map: TensorMap, address: int, swizzle: int = 1128) -> bytes:
    others = [*map.sizes, *map.strides, *map.box, 1, 1, 1, 1, 109, 4, 120, swizzle, 140, 150]
    return struct.pack(f"<Q{len(others)}I", address, *others).ljust(128, b"\0")


def install(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None) -> None:
    """Makes a module, or none, what ``from cuda.bindings import driver`` finds."""
    package, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    package.__path__ = bindings.__path__ = []
    package.bindings, bindings.__version__ = bindings, "1.2.3"  # type: ignore[attr-defined]
    if module is not None:
        bindings.driver = module  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    else:
        monkeypatch.delitem(sys.modules, "cuda.bindings.driver", raising=False)
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


class Contexts:
    """Contexts of libcuda, one a device: 0x100 and 0x101."""

    def __init__(self) -> None:
        self.current, self.switches = 0x100, 0

    @contextlib.contextmanager
    def active(self, context: int) -> Iterator[None]:
        before, self.current = self.current, context
        self.switches += 1
        yield
        self.current = before


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    for remembered in (tensor_maps._bindings, tensor_maps._packer):
        remembered.cache_clear()
    yield
    for remembered in (tensor_maps._bindings, tensor_maps._packer):
        remembered.cache_clear()


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Contexts:
    contexts = Contexts()
    monkeypatch.setattr(tensor_maps, "require_device", lambda index: None)
    monkeypatch.setattr(tensor_maps, "primary_context", lambda index: 0x100 + index)
    monkeypatch.setattr(tensor_maps, "current_context", lambda: contexts.current)
    monkeypatch.setattr(tensor_maps, "active_context", contexts.active)
    return contexts


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch, contexts: Contexts) -> Bindings:
    bindings = Bindings()
    install(monkeypatch, bindings)
    return bindings


def test_arguments_of_the_encoding(bindings: Bindings) -> None:
    assert encode(MAP, ADDRESS) == expected(MAP, ADDRESS)
    assert bindings.calls == [f"encode {ADDRESS:#x}"]


@pytest.mark.parametrize(("columns", "swizzle"), [(64, 1128), (32, 1064), (16, 1032)])
def test_swizzle_is_as_wide_as_the_box(bindings: Bindings, columns: int, swizzle: int) -> None:
    narrow = TensorMap("k", MAP.sizes, MAP.strides, (columns, 64, 1, 1))
    assert encode(narrow, ADDRESS) == expected(narrow, ADDRESS, swizzle)


def test_a_width_without_a_swizzle(bindings: Bindings) -> None:
    with pytest.raises(LaunchError, match=r"tensor map of k .* rows of 48 bytes; .* 32, 64, 128"):
        encode(TensorMap("k", MAP.sizes, MAP.strides, (24, 64, 1, 1)), ADDRESS)
    assert bindings.calls == []


def test_refusal_names_the_tensor_and_the_rule(bindings: Bindings) -> None:
    with pytest.raises(LaunchError) as caught:
        encode(MAP, ADDRESS + 2)
    for word in ("k at 0x7f1234567802", "INVALID_VALUE", "no multiple of 16", "(40, 100, 5, 3)", "(400, 80, 40000)"):
        assert word in str(caught.value)
    bindings.refuse = lambda address: True
    with pytest.raises(LaunchError, match=r"k has a row stride of 201 elements"):
        encode(tensor_map("k", SIZES, (20000, 201, 40), 64), ADDRESS)
    with pytest.raises(LaunchError, match=r"k at .* none of the rules that fa2gen knows"):
        encode(MAP, ADDRESS)


def test_packer_encodes_once_and_replaces_the_address(bindings: Bindings) -> None:
    pack = map_packer(MAP)
    assert bindings.calls == []
    for address in (ADDRESS, OTHER, ADDRESS, OTHER, ADDRESS):
        assert pack(address) == expected(MAP, address)
    assert bindings.calls == [f"encode {ADDRESS:#x}", f"replace {OTHER:#x}"]


def test_earlier_bytes_stay_as_they_were(bindings: Bindings) -> None:
    pack = map_packer(MAP)
    first = pack(ADDRESS)
    pack(OTHER)
    assert first == pack(ADDRESS) == expected(MAP, ADDRESS)


def test_equal_maps_share_a_packer(bindings: Bindings) -> None:
    assert map_packer(tensor_map("k", SIZES, STRIDES, 128)) is map_packer(MAP) is map_packer(MAP, 0)
    others = [tensor_map("v", SIZES, STRIDES, 128), tensor_map("k", SIZES, HEADS_FIRST, 128)]
    packers = [map_packer(MAP), map_packer(MAP, 1), *map(map_packer, others)]
    assert len(set(packers)) == 4
    for pack, seen in zip(packers[1:], [MAP, *others], strict=True):
        assert pack(ADDRESS) == expected(seen, ADDRESS)


def test_full_packers_start_again(bindings: Bindings) -> None:
    cache = MapCache(MAP, 0)
    addresses = range(ADDRESS, ADDRESS + 16 * (MAX_ADDRESSES + 1), 16)
    for count, address in enumerate(addresses, 1):
        assert cache[address] == expected(MAP, address)
        assert len(cache) == (count if count <= MAX_ADDRESSES else 1)
    assert list(cache) == [addresses[-1]]
    assert cache[ADDRESS] == expected(MAP, ADDRESS)
    assert len(bindings.calls) == MAX_ADDRESSES + 2
    assert [call for call in bindings.calls if call.startswith("encode")] == [f"encode {ADDRESS:#x}"]


def test_all_packers_together_start_again(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "MAX_IN_ALL", 8)
    monkeypatch.setattr(tensor_maps, "_made", itertools.count(1))
    caches = [tensor_maps.MapCache(tensor_map("k", (1, rows, 1, 64), (64, 64, 64), 16), 0) for rows in (1, 2, 3)]
    for turn in range(20):
        address = ADDRESS + 16 * turn
        assert caches[turn % 3][address] == encode(caches[turn % 3]._map, address)
        assert sum(map(len, caches)) <= 8


def test_packer_refuses_and_goes_on(bindings: Bindings) -> None:
    pack = map_packer(MAP)
    for first in (True, False):  # without a template, and with one
        # An address that the driver might not check when it replaces it.
        with pytest.raises(LaunchError, match="no multiple of 16"):
            pack(ADDRESS + 4)
        assert bindings.calls[-1].startswith("encode")
        assert pack(ADDRESS + 32 * first) == expected(MAP, ADDRESS + 32 * first)
    bindings.refuse = lambda address: address == OTHER
    with pytest.raises(LaunchError, match=f"{OTHER:#x}.*INVALID_VALUE"):
        pack(OTHER)
    # The map whose address could not be replaced serves no longer.
    assert pack(OTHER + 16) == expected(MAP, OTHER + 16)
    assert bindings.calls[-2:] == [f"replace {OTHER:#x}", f"encode {OTHER + 16:#x}"]
    assert pack(ADDRESS) == expected(MAP, ADDRESS)


def test_maps_are_made_in_the_context_of_their_device(bindings: Bindings, contexts: Contexts) -> None:
    contexts_at_work: list[int] = []
    bindings.refuse = lambda address: contexts_at_work.append(contexts.current) or False  # type: ignore[func-returns-value]
    pack, pack_there = map_packer(MAP), map_packer(MAP, 1)
    pack(ADDRESS)
    assert contexts.switches == 0
    for address in (ADDRESS, OTHER):
        pack_there(address)
    contexts.current = 0  # a thread that has none
    pack(OTHER)
    assert contexts_at_work == [0x100, 0x101, 0x101, 0x100]
    assert (contexts.current, contexts.switches) == (0, 3)
    pack(OTHER)
    assert contexts.switches == 3
    # A lone map is encoded in what is current.
    encode(MAP, ADDRESS)
    assert contexts_at_work[4:] == [0]


def test_threads_share_a_packer(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "MAX_ADDRESSES", 7)  # it is cleared while others read
    pack, errors = map_packer(MAP), []

    def work(seed: int) -> None:
        try:
            for step in range(3000):
                address = ADDRESS + 16 * ((seed + step) * 5 % 23)
                assert pack(address) == expected(MAP, address)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch, contexts: Contexts) -> None:
    install(monkeypatch, None)
    # Before a plan is built, and so before any launch.
    for ask in (lambda: map_packer(MAP), lambda: encode(MAP, ADDRESS), tensor_maps.bindings_version):
        with pytest.raises(ToolchainError, match=r'tensor maps.*pip install "cuda-bindings>=12.9,<14"'):
            ask()
    # Once it is installed, it is found.
    install(monkeypatch, Bindings())
    assert encode(MAP, ADDRESS) == expected(MAP, ADDRESS)


def test_without_a_gpu(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise ArgumentError(f"no device {index}")

    monkeypatch.setattr(tensor_maps, "require_device", refuse)
    with pytest.raises(ArgumentError, match="no device 3"):
        map_packer(MAP, 3)


# --- doctor


@pytest.mark.parametrize(("capability", "found"), [((9, 0), True), ((9, 0), False), ((8, 9), True)])
def test_doctor_looks_for_cuda_bindings_on_hopper(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], found: bool
) -> None:
    install(monkeypatch, Bindings() if found else None)
    info = DeviceInfo(0, "NVIDIA Test", capability, 132, 50 << 20, 80 << 30, 227 << 10, 1980.0, (13, 0), "580.1")
    monkeypatch.setattr(driver, "unavailable_reason", lambda: None)
    monkeypatch.setattr(driver, "device_info", lambda index: info)
    checks = {check.name: check for check in doctor._gpu()}
    assert checks["gpu"].status == "ok"
    assert ("cuda-bindings" in checks) == (capability == (9, 0))
    if capability != (9, 0):
        return
    check = checks["cuda-bindings"]
    assert check.status == ("ok" if found else "missing")
    if found:
        assert check.detail.startswith("1.2.3")
    else:
        assert tensor_maps.INSTALL in check.fix
