"""Every GPU test begins with the same random numbers: torch seeds a GPU's generator anew in each process."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
