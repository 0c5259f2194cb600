"""``fa2gen bench`` on a GPU, its rows read back."""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner

from fa2gen.bench.rows import Benchmark, read
from fa2gen.cli import main


def bench(tmp_path: Path, *arguments: str) -> Benchmark:
    """The rows of a run that succeeds and leaves the GPU usable."""
    out = tmp_path / "rows.json"
    result = CliRunner().invoke(main, ["bench", "--rounds", "5", "--out", str(out), *arguments])
    assert result.exit_code == 0, result.output
    assert torch.ones(4, device="cuda").sum().item() == 4
    return read(out)
