"""What the tests that compile have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa2gen.compile.nvcc import find_nvcc
from fa2gen.errors import ToolchainError


@pytest.fixture(scope="module")
def cuda_include() -> Path:
    """The folder that holds cuda.h."""
    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    roots = [root for root in (nvcc.root, nvcc.path.resolve().parents[1]) if root]
    for folder in (root / "include" for root in roots):
        if (folder / "cuda.h").is_file():
            return folder
    pytest.skip("no cuda.h beside nvcc")
