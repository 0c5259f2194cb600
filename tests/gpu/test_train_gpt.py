"""``benchmarks/train_gpt.py`` on a GPU, a layer deep: both shapes train, and fa2gen's losses are SDPA's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import train_gpt
from benchmarks.gpt.runs import read_csv


@pytest.mark.parametrize("shape", ["1.3b", "2.7b"])
def test_losses_agree(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--layers", "1", "--context", "512", "--batch", "4096", "--steps", "60"]
    attentions = ["--attention", "fa2gen", "--attention", "flash", "--attention", "math"]
    code = train_gpt.main(["run", "--shape", shape, *size, *attentions, "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "fa2gen agrees with flash" in captured.out
    document = json.loads((tmp_path / f"{shape}_512_1layers_4096tokens_60steps.json").read_text())
    assert document["provenance"]["gpu"] == torch.cuda.get_device_name()
    assert set(document["runs"][0]["kernels"]) == {"fwd", "bwd"}
    runs = read_csv(tmp_path.glob("*.csv"))
    assert [(run.attention, run.seed) for run in runs] == [
        ("fa2gen", 0),
        *[("flash", seed) for seed in range(5)],
        ("math", 0),
    ]
    for run in runs:
        # From ln 256 = 5.5 and the noise of fresh weights most of the way to what the frequencies of bytes give.
        assert run.losses[0] == pytest.approx(5.9, abs=0.8)
        assert run.losses[-1] < 4
        assert run.tokens_per_s > 10_000


@pytest.mark.parametrize("shape", ["1.3b", "2.7b"])
def test_gradients_agree(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--layers", "2", "--context", "1024", "--batch", "4096", "--steps", "40"]
    code = train_gpt.main(["gradients", "--shape", shape, *size, "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "the gradients of fa2gen agree with those of flash" in captured.out
    (path,) = tmp_path.iterdir()
    found = {one["attention"]: one for one in json.loads(path.read_text())["gradients"]}
    assert found.keys() == {"fa2gen", "flash", "cudnn"}
    # bf16 has 8 bits.
    assert all(0 < error < 0.1 for one in found.values() for layer in one["relative"] for error in layer.values())
