"""``benchmarks/train_gpt.py`` without a GPU: the text, the optimizer, FLOPs, verdicts, files, and a run on the CPU."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import train_gpt
from benchmarks.gpt import figure, report
from benchmarks.gpt.model import GPT, SHAPES, step_flops
from benchmarks.gpt.runs import Run, Setting, ordered, peak_tflops, read_csv, write_csv
from benchmarks.gpt.text import Batches, Text, read_text
from benchmarks.gpt.training import MasterAdamW, learning_rate
from benchmarks.gpt.verdict import SMOOTHING, judge, smooth, spread
from fa2gen.errors import ArgumentError

STEPS = 80
SETTING = Setting("NVIDIA H200", "1.3b", layers=4, context=2048, tokens=16384, steps=STEPS, text="0123456789ab")


def curve(attention: str, seed: int, change: object = 0.0, gpu: str = SETTING.gpu) -> Run:
    """A falling loss with the noise of the batches, which is every run's, a seed's own offset, and a change."""
    steps = np.arange(STEPS)
    batches = np.random.default_rng(7).normal(0, 0.2, STEPS)
    losses = 5.5 - steps / STEPS + batches + 0.01 * seed * np.sin(steps / 7) + change
    ms = [500.0] * 10 + [50.0 + step % 3 for step in range(STEPS - 10)]
    return Run(dataclasses.replace(SETTING, gpu=gpu), attention, seed, losses.tolist(), ms)


SEEDS = [curve("flash", seed) for seed in range(3)]


def test_the_text_is_real_and_its_windows_are_every_run_s() -> None:
    text = read_text(100_000)
    assert len(text.tokens) >= 100_000
    assert text.tokens.dtype == torch.uint8
    # A zero byte ends each file and is nowhere else.
    assert int((text.tokens == 0).sum()) == text.files
    assert text.tokens[-1] == 0
    assert b"def " in bytes(text.tokens.tolist())
    assert hashlib.sha256(bytes(text.tokens.tolist())).hexdigest() == text.sha256
    one, other = (Batches(text, 3, 5, 16, torch.device("cpu")) for _ in range(2))
    assert len(one) == 3
    for step in range(3):
        inputs, targets = one[step]
        assert inputs.shape == targets.shape == (5, 16)
        assert (inputs[:, 1:] == targets[:, :-1]).all()
        assert (other[step][0] == inputs).all()
    assert not torch.equal(one[0][0], one[1][0])


def test_windows_reach_both_ends_of_the_text() -> None:
    text = Text(torch.arange(10, dtype=torch.uint8), 1, "")
    inputs, targets = zip(*(Batches(text, 20, 10, 4, torch.device("cpu"))[step] for step in range(20)), strict=True)
    assert int(torch.stack(inputs).min()) == 0
    assert int(torch.stack(targets).max()) == 9
    with pytest.raises(ArgumentError, match="--context 10 is longer than the text"):
        Batches(text, 1, 1, 10, torch.device("cpu"))


def test_flops_are_those_of_the_products() -> None:
    """Counted by hand for a token: 24 h^2 for the matrices of a layer, 4 S h for attention, 2 h V for the output."""
    assert 16384 * 3 * (4 * (100663296 + 16777216) + 1048576) == 23141283790848
    assert step_flops(SHAPES["1.3b"], 4, 2048, 16384) == pytest.approx(23141283790848, rel=1e-12)
    assert step_flops(SHAPES["1.3b"], 4, 2048, 16384, causal=True) == pytest.approx(21492016349184, rel=1e-12)
    h = 2560
    assert step_flops(SHAPES["2.7b"], 3, 8192, 8192) == pytest.approx(
        8192 * 3 * (3 * (24 * h * h + 4 * 8192 * h) + 2 * h * 256), rel=1e-12
    )


def test_shapes_are_gpt_3_s_and_the_layers_have_12_h_squared_weights() -> None:
    assert (SHAPES["1.3b"].head_dim, SHAPES["2.7b"].head_dim) == (128, 80)
    model = GPT(SHAPES["tiny"], 2, 64, lambda q, k, v: q)
    assert sum(x.numel() for x in model.blocks.parameters() if x.dim() == 2) == 2 * 12 * 32**2


def test_throughput_and_utilisation() -> None:
    run = curve("fa2gen", 0)
    assert (run.step_ms.median, run.step_ms.n) == (51.0, STEPS - 10)
    assert run.tokens_per_s == pytest.approx(16384 / 0.051)
    assert run.tflops() == pytest.approx(23.141283790848 / 0.051)
    assert run.mfu() == pytest.approx(23.141283790848 / 0.051 / 989.4)
    assert run.mfu(causal=True) == pytest.approx(21.492016349184 / 0.051 / 989.4)
    assert curve("fa2gen", 0, gpu="CPU").mfu() is None
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("NVIDIA H200 NVL") == 835.5


def test_a_master_weight_keeps_what_bf16_would_lose() -> None:
    layer = torch.nn.Linear(4, 4).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimizer = MasterAdamW(layer)
    for step in range(40):
        for weight in layer.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step(1e-3)
        # A step moves 0.001, a bf16 below 1 is 0.0039 from the next.
        assert layer.weight.dtype == torch.bfloat16
        assert layer.weight.grad is None
        if step == 0:
            assert (layer.weight == 1.0).all()
    assert (layer.weight - 0.96).abs().max() < 0.006


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 200, 3e-4) for step in range(200)]
    assert rates[0] == pytest.approx(3e-4 / 20)
    assert max(rates) == rates[20] == pytest.approx(3e-4)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert 3e-5 < rates[-1] < 3.1e-5


def test_smoothing_and_spread() -> None:
    assert smooth([float(i) for i in range(30)])[0] == pytest.approx((SMOOTHING - 1) / 2)
    assert len(smooth([1.0] * 30)) == 30 - SMOOTHING + 1
    width = spread(SEEDS)
    low, high = (np.stack([smooth(run.losses) for run in SEEDS]) for _ in range(2))
    now = high.max(0) - low.min(0)
    assert (width >= now).all()
    assert width[30] == pytest.approx(now[30 - SMOOTHING : 30 + SMOOTHING + 1].max())


def test_curves_that_differ_less_than_seeds_agree() -> None:
    rounding = 1e-3 * np.random.default_rng(3).normal(size=STEPS)
    verdict = judge(curve("fa2gen", 0, rounding), SEEDS)
    assert verdict.agrees
    assert 0 < verdict.ratio < 0.5
    assert (verdict.attention, verdict.reference, verdict.seeds) == ("fa2gen", "flash", 3)
    assert "fa2gen agrees with flash" in str(verdict)
    # The reference is the run of the same seed, not any.
    assert judge(curve("fa2gen", 2), SEEDS).ratio == 0


@pytest.mark.parametrize(
    "change",
    [
        0.1,
        # Only the last steps, and only some in the middle.
        np.where(np.arange(STEPS) > STEPS - 8, 0.3, 0.0),
        np.where(abs(np.arange(STEPS) - 40) < 5, -0.4, 0.0),
        np.where(np.arange(STEPS) == 60, math.nan, 0.0),
        np.where(np.arange(STEPS) == 79, math.inf, 0.0),
    ],
    ids=["offset", "late", "between", "nan", "inf"],
)
def test_curves_that_leave_the_band_do_not_agree(change: object) -> None:
    verdict = judge(curve("fa2gen", 0, change), SEEDS)
    assert not verdict.agrees
    assert verdict.ratio > 1
    assert "fa2gen DOES NOT AGREE with flash" in str(verdict)


def test_a_band_of_no_width_or_of_no_number() -> None:
    flat = [dataclasses.replace(SEEDS[0], seed=seed) for seed in range(3)]
    assert judge(curve("fa2gen", 0), flat).agrees
    assert judge(curve("fa2gen", 0, 1e-6), flat).ratio == math.inf
    broken = [*SEEDS[:2], curve("flash", 2, math.nan)]
    assert not judge(curve("fa2gen", 0), broken).agrees


def test_what_cannot_be_judged() -> None:
    own = curve("fa2gen", 0)
    with pytest.raises(ArgumentError, match="needs 3 seeds of flash, there are 2"):
        judge(own, SEEDS[:2])
    with pytest.raises(ArgumentError, match="no run of seed 5"):
        judge(curve("fa2gen", 5), SEEDS)
    with pytest.raises(ArgumentError, match="different numbers of steps"):
        judge(dataclasses.replace(own, losses=own.losses[:-1]), SEEDS)
    assert report.judge_all([own, *SEEDS[:2]]) == []
    assert [verdict.attention for verdict in report.judge_all([own, *SEEDS, curve("cudnn", 0)])] == ["fa2gen", "cudnn"]


def test_runs_take_turns() -> None:
    assert train_gpt.schedule(("fa2gen", "flash", "cudnn"), 3) == [
        ("flash", 0),
        ("fa2gen", 0),
        ("flash", 1),
        ("cudnn", 0),
        ("flash", 2),
    ]
    assert train_gpt.schedule(("fa2gen",), 3) == [("fa2gen", 0)]


def test_csvs_come_back_as_they_were(tmp_path: Path) -> None:
    runs = [*SEEDS, curve("fa2gen", 0)]
    paths = [write_csv(run, tmp_path / "new") for run in runs]
    assert paths[0].name == "1.3b_2k_80steps_flash_seed0.csv"
    found = read_csv(paths)
    assert [(run.attention, run.seed) for run in found] == [("fa2gen", 0), ("flash", 0), ("flash", 1), ("flash", 2)]
    for run, wanted in zip(found, ordered(runs), strict=True):
        assert run.setting == wanted.setting
        assert run.losses == pytest.approx(wanted.losses, abs=1e-6)
        assert run.ms == pytest.approx(wanted.ms, abs=1e-4)


def test_damaged_csvs_are_named(tmp_path: Path) -> None:
    path = write_csv(SEEDS[0], tmp_path)
    good = path.read_text()
    lines = good.splitlines(keepends=True)
    for text, words in [
        ("", "its columns must be"),
        (good.replace("loss", "cost", 1), "its columns must be"),
        ("".join(lines[:30]), "29 steps are too few"),
        ("".join(lines[:60]), "it holds 59 of 80 steps"),
        (good[:-3], "its last line is not whole"),
        (good.replace(",80,0,", ",80,no,"), "compiled is 'no'"),
        ("".join([lines[0], *lines[2:]]), "its steps are not 0, 1, 2"),
        (good.replace("flash,0,5,", "flash,1,5,"), "it holds several runs"),
        (good.replace(",flash,", ",fa9,"), "attention 'fa9' is none of fa2gen, flash"),
        (good.replace(",1.3b,", ",9b,"), "shape '9b' is none of 1.3b"),
        (good.replace(",51.0000", ",-1"), "not positive and finite"),
        (good.replace(",51.0000", ",x"), "x"),
        (good.replace(",2048,", ",0,"), "context is 0"),
    ]:
        path.write_text(text)
        with pytest.raises(ArgumentError, match=words) as caught:
            read_csv([path])
        assert str(path) in str(caught.value)
    path.write_text(good)
    with pytest.raises(ArgumentError, match="another file holds seed 0 of flash too"):
        read_csv([path, path])
    path.write_text("\ufeff" + good)
    assert read_csv([path])[0].losses == pytest.approx(SEEDS[0].losses, abs=1e-6)


def test_runs_of_different_settings_are_not_mixed(tmp_path: Path) -> None:
    path = write_csv(SEEDS[0], tmp_path)
    for index, (change, words) in enumerate(
        [
            ({"gpu": "NVIDIA A100"}, "gpu NVIDIA A100 and NVIDIA H200"),
            ({"layers": 24}, "layers 24 and 4"),
            ({"tokens": 32768}, "tokens 32768 and 16384"),
            ({"compiled": True}, "compiled True and False"),
            ({"text": "ba9876543210"}, "text ba9876543210 and 0123456789ab"),
        ]
    ):
        changed = dataclasses.replace(SETTING, **change)
        other = write_csv(dataclasses.replace(SEEDS[1], setting=changed), tmp_path / str(index))
        with pytest.raises(ArgumentError, match=re.escape(f"{other} cannot be compared with {path}: {words}")):
            read_csv([path, other])


def test_what_is_not_usual_is_in_the_names_of_files() -> None:
    usual = Setting("NVIDIA H200", "2.7b", layers=4, context=8192, tokens=16384)
    assert usual.slug() == "2.7b_8k"
    for change, slug in [
        ({"layers": 32, "context": 1000}, "2.7b_1000_32layers"),
        ({"tokens": 32768, "steps": 1000}, "2.7b_8k_32768tokens_1000steps"),
        ({"compiled": True}, "2.7b_8k_compiled"),
    ]:
        assert dataclasses.replace(usual, **change).slug() == slug


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = train_gpt.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_error(stderr: str) -> str:
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line


def test_plot_draws_the_csvs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    paths = [write_csv(run, tmp_path) for run in [*SEEDS, curve("fa2gen", 0, 1e-3), curve("cudnn", 0, 2e-3)]]
    code, out, err = run_command(capsys, "plot", *paths, "--out", tmp_path / "new")
    assert code == 0, err
    assert (tmp_path / "new" / "1.3b_2k_80steps.png").read_bytes().startswith(b"\x89PNG")
    assert "fa2gen agrees with flash" in out
    assert "cudnn agrees with flash" in out
    assert "45.9 %" in out  # 23.14 TFLOP in 51 ms, of 989.4


def test_the_figure_shows_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("matplotlib.figure", reason="figures need matplotlib")
    drawn = []
    monkeypatch.setattr(module.Figure, "savefig", lambda one, *_, **__: drawn.append(one))
    own = curve("fa2gen", 0, 1e-3)
    figure.draw([own, *SEEDS], "flash", tmp_path / "x.png")
    losses, differences, bars = drawn[0].axes
    assert [text.get_text() for text in losses.get_legend().get_texts()] == [
        "fa2gen, seed 0",
        "flash, seed 0",
        "flash, other seeds",
    ]
    assert any(np.array_equal(line.get_ydata(), smooth(own.losses)) for line in losses.get_lines())
    assert differences.get_lines()[0].get_ydata() == pytest.approx(1e-3)
    assert [bar.get_height() for bar in bars.patches] == [pytest.approx(16384 / 51)] * 2
    assert "hidden 2048, 16 heads of 128" in drawn[0]._suptitle.get_text()


def test_a_curve_that_does_not_agree_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plot draws first")
    paths = [write_csv(run, tmp_path) for run in [*SEEDS, curve("fa2gen", 0, 0.2)]]
    code, _, err = run_command(capsys, "plot", *paths)
    assert code == 1
    assert "fa2gen DOES NOT AGREE with flash" in one_error(err)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run", "--steps", "39"), 2, "39"),
        (("run", "--attention", "fa9"), 2, "fa9"),
        (("run", "--batch", "1000"), 1, "--batch 1000 is not a multiple of --context 2048"),
        (("run", "--context", "8192", "--attention", "math"), 1, "--context must be 2048 or less"),
        (("run", "--dry-run", "--layers", "2"), 2, "so it takes no --layers"),
        (
            ("run", "--dry-run", "--attention", "math", "--attention", "cudnn"),
            1,
            "--attention cudnn does not run on cpu",
        ),
        (("gradients", "--dry-run", "--attention", "fa2gen"), 1, "--attention must name one of torch's attentions too"),
        (("gradients", "--context", "8192", "--attention", "math"), 1, "--context must be 2048 or less"),
        (("plot", "nothing.csv"), 2, "nothing.csv"),
        (("plot",), 2, "FILES"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    found, _, err = run_command(capsys, *arguments, *(() if arguments[0] == "plot" else ("--out", str(out))))
    assert found == code
    assert words in one_error(err)
    assert not out.exists()


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run_command(capsys, "run", "--out", tmp_path / "out")
    assert code == 1
    assert "needs a CUDA GPU" in one_error(err)


def test_a_dry_run_trains_compares_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fa2gen's definition in float64 beside torch's formula: other roundings, one curve."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    threads = torch.get_num_threads()
    code, out, err = run_command(capsys, "run", "--dry-run", "--steps", "40", "--no-compile", "--out", tmp_path)
    assert code == 0, err
    assert torch.get_num_threads() == threads
    assert "fa2gen agrees with math" in out
    assert "no figure: it needs matplotlib" in err
    runs = read_csv(sorted(tmp_path.glob("*.csv")))
    assert [(run.attention, run.seed) for run in runs] == [("fa2gen", 0), *[("math", seed) for seed in range(5)]]
    own, twin, other = runs[:3]
    # It learns, and from the same weights over the same batches to the same losses.
    assert np.mean(own.losses[-5:]) < np.mean(own.losses[:5]) - 0.1
    assert np.abs(np.subtract(own.losses, twin.losses)).max() < 0.01
    assert np.abs(np.subtract(own.losses, other.losses)).max() > 0.01
    document = json.loads((tmp_path / "tiny_32_1layers_64tokens_40steps.json").read_text())
    assert [one["csv"] for one in document["runs"]] == [run.file_name() for run in runs]
    assert document["verdicts"][0]["agrees"] is True
    assert document["setting"]["vocabulary"] == 256
    assert set(document["runs"][0]["kernels"]) == {"fwd", "bwd"}
    assert {"gpu", "torch", "cudnn", "fa2gen", "templates", "utc", "command", "text", "precision"} <= set(
        document["provenance"]
    )
    assert document["provenance"]["command"] == ("python benchmarks/train_gpt.py run --steps 40 --dry-run --no-compile")


def test_a_dry_run_leaves_committed_results_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(train_gpt, "RESULTS", tmp_path / "results")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    code, _, err = run_command(capsys, "run", "--dry-run", "--attention", "fa2gen", "--steps", "40")
    assert code == 0, err
    (folder,) = (tmp_path / "temporary").iterdir()
    assert f"results go to {folder}\n" in err
    slug = "tiny_32_1layers_64tokens_40steps"
    assert {path.name for path in folder.iterdir()} == {f"{slug}_fa2gen_seed0.csv", f"{slug}.json"}
    assert not (tmp_path / "results").exists()


def test_numbers_that_json_lacks_are_null() -> None:
    runs = [*SEEDS, curve("fa2gen", 0, math.nan)]
    document = report.summary(runs, report.judge_all(runs), {}, {})
    assert document["verdicts"][0]["ratio"] is None
    assert document["runs"][3]["last_loss"] is None
    json.dumps(document, allow_nan=False)
