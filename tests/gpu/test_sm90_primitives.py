"""sm_90a's instructions on a GPU give what the emulator is held to: the same tables of kernels, the same text."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest
import torch

from fa2gen import compile as compiler
from fa2gen import driver
from fa2gen.driver.tensor_maps import encode
from tests.sm90_kernels import MAPS, NUM_THREADS, PARAM_BYTES, POINTERS, Sm90Probe, shapes_of, sm90_source
from tests.sm90_probes import SM90_PROBES
from tests.sm90_wgmma_kernels import wgmma_probes

TARGET = "sm_90a"  # wgmma and setmaxnreg exist for this target only
ELEMENTS = ("bf16", "fp16")
WGMMA_PROBES = {element: wgmma_probes(element) for element in ELEMENTS}


def _require_hopper() -> None:
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}")


def _loaded(table: dict[str, Sm90Probe], element: str) -> driver.LoadedKernel:
    _require_hopper()
    bodies = {name: probe.text for name, probe in table.items()}
    source = sm90_source(bodies, "cuda", element, shapes_of(table))
    # All products in one function are more than ptxas runs asynchronously, a matter of their speed only.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["fa2gen.compile.compiler"], "require_asynchronous", lambda log, entry: None)
        return driver.load(compiler.compile_kernel(source, TARGET), torch.cuda.current_device())


@pytest.fixture(scope="module")
def loaded() -> driver.LoadedKernel:
    return _loaded(SM90_PROBES, "bf16")


@pytest.fixture(scope="module", params=ELEMENTS)
def products(request: pytest.FixtureRequest) -> tuple[driver.LoadedKernel, str]:
    return _loaded(WGMMA_PROBES[request.param], request.param), request.param


def _on_gpu(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.reshape(-1).view(np.int16).copy()).cuda()


def _run(kernel: driver.LoadedKernel, table: dict[str, Sm90Probe], name: str) -> tuple[np.ndarray, np.ndarray]:
    probe = table[name]
    memory = {each: _on_gpu(getattr(probe, each).values) for each in MAPS} | {"in": _on_gpu(probe.inputs)}
    memory["out"] = torch.full((2 * probe.out.size,), -1, dtype=torch.int16, device="cuda")
    memory["tickets"] = torch.full((4,), 0x55, dtype=torch.int16, device="cuda")
    maps = {each: encode(getattr(probe, each).map(each), memory[each].data_ptr()) for each in MAPS}
    params = bytearray(probe.launch(list(table).index(name), maps=maps).params)
    for each in ("in", "out", "tickets"):
        struct.pack_into("<Q", params, 8 * POINTERS[each], memory[each].data_ptr())
    assert len(params) == PARAM_BYTES
    torch.cuda.synchronize()
    kernel.launch((probe.grid, 1, 1), (NUM_THREADS, 1, 1), bytes(params))
    torch.cuda.synchronize()
    if probe.grid > 1:  # every block has drawn, and the last number closes
        assert not memory["tickets"].any()
    return memory["out"].cpu().numpy().view(np.uint32), memory["o"].cpu().numpy().view(np.uint16)


@pytest.mark.parametrize("name", SM90_PROBES)
def test_primitive_on_the_gpu(loaded: driver.LoadedKernel, name: str) -> None:
    for _ in range(20):
        SM90_PROBES[name].check(*_run(loaded, SM90_PROBES, name))


@pytest.mark.parametrize("name", WGMMA_PROBES["bf16"])
def test_products_on_the_gpu(products: tuple[driver.LoadedKernel, str], name: str) -> None:
    kernel, element = products
    table = WGMMA_PROBES[element]
    for _ in range(3):
        table[name].check(*_run(kernel, table, name))
