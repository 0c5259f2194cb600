"""The primitives' PTX assembles for every target of the sm80 family, without a warning or a spill."""

from __future__ import annotations

import pytest

from fa2gen.compile import compile_kernel
from tests import mbarrier_kernels
from tests.backward_primitives import CONVERSION_PROBES, REDUCTION_PROBES, VECTOR_PROBES
from tests.mbarrier_kernels import MBARRIER_PROBES
from tests.primitive_kernels import NUM_THREADS, PROBES, Probe, probe_source

pytestmark = pytest.mark.nvcc


def _assert_compiles(table: dict[str, Probe], num_threads: int, target: str) -> None:
    source = probe_source({name: probe.text for name, probe in table.items()}, "cuda", num_threads)
    compiled = compile_kernel(source, target)
    assert compiled.resources.spill_store_bytes == compiled.resources.spill_load_bytes == 0
    assert "warning" not in compiled.log.lower()


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_primitives_compile(target: str) -> None:
    _assert_compiles(PROBES, NUM_THREADS, target)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_mbarriers_compile(target: str) -> None:
    _assert_compiles(MBARRIER_PROBES, mbarrier_kernels.NUM_THREADS, target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_primitives_of_the_backward_compile(target: str) -> None:
    _assert_compiles({**REDUCTION_PROBES, **CONVERSION_PROBES}, NUM_THREADS, target)


def test_vector_additions_compile() -> None:
    _assert_compiles(VECTOR_PROBES, NUM_THREADS, "sm_90")
