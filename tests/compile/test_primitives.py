"""The primitives' PTX assembles for every target of the sm80 family, without a warning or a spill."""

from __future__ import annotations

import pytest

from fa2gen.compile import compile_kernel
from tests.primitive_kernels import PROBES, probe_source

pytestmark = pytest.mark.nvcc


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_primitives_compile(target: str) -> None:
    compiled = compile_kernel(probe_source({name: probe.text for name, probe in PROBES.items()}, "cuda"), target)
    assert compiled.resources.spill_store_bytes == compiled.resources.spill_load_bytes == 0
    assert "warning" not in compiled.log.lower()
