"""Rows of backward passes, without a GPU: their file, summary, text and chart, and the command that measures them."""

from __future__ import annotations

import io
import json

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from fa2gen.bench import machine, own
from fa2gen.bench.peers import PEERS, Peer
from fa2gen.bench.report import show
from fa2gen.bench.rows import Refusal, from_json, read, to_json, write
from fa2gen.bench.summary import summarise
from fa2gen.cli import main
from fa2gen.commands import bench as command
from fa2gen.errors import ArgumentError
from fa2gen.spec import FwdConfig
from tests.bench_fakes import FakeMachine, backward_benchmark, backward_rows, benchmark, peer, right


def test_passes_are_not_averaged() -> None:
    found = summarise(backward_rows(), ["fa2", "deterministic"])
    assert [(s.direction, s.peer, s.cells, s.of) for s in found] == [
        ("fwd", "fa2", 1, 1),
        ("bwd", "fa2", 2, 2),
        ("bwd", "deterministic", 1, 2),
        ("fwd+bwd", "fa2", 1, 1),
    ]
    assert found[1].geomean == pytest.approx((1.2 * 0.8) ** 0.5)
    assert found[1].worst_cell == "bwd_d64_bf16_full_gqa1 at 1024"


def test_rows_come_back_with_their_pass() -> None:
    before = backward_benchmark()
    form = json.loads(json.dumps(to_json(before)))
    assert [one["pass"] for one in form["rows"]] == ["fwd", "bwd", "bwd", "fwd+bwd"]
    assert form["host"][-1]["pass"] == "fwd+bwd"
    assert form["summary"][1]["pass"] == "bwd"
    assert from_json(form) == before
    # Files of versions that had no backward.
    del form["rows"][0]["pass"]
    assert from_json(form) == before
    for name, words in [("bwd", "pass 'bwd' is none of a kernel of kind fwd"), ("both", "pass 'both'"), (7, "pass 7")]:
        form["rows"][0]["pass"] = name
        with pytest.raises(ArgumentError, match=words):
            from_json(form)
    form["rows"][0]["pass"] = "fwd"
    form["rows"][1]["pass"] = "fwd"
    with pytest.raises(ArgumentError, match="pass 'fwd' is none of a kernel of kind bwd"):
        from_json(form)


def test_the_text_says_which_pass() -> None:
    console = Console(width=150, highlight=False, record=True, file=io.StringIO())
    show(backward_benchmark(), console)
    text = console.export_text()
    for words in (
        "fwd_d64_bf16_full_gqa1; 4/4 heads",
        "\nbwd_d64_bf16_full_gqa1; 4/4 heads",
        "fwd+bwd_d64_bf16_full_gqa1; 4/4 heads",
        "Host time of an eager call in us",
        "Host time of an eager forward and backward in us (fwd+bwd_d64",
        "fa2gen / fa2: geomean 1.200",
        "fa2gen / fa2, bwd: geomean 0.980, worst 0.800 (bwd_d64_bf16_full_gqa1 at 1024), over 2 cells",
        "fa2gen / deterministic, bwd: geomean 1.120",
        "fa2gen / fa2, fwd+bwd: geomean 1.200",
    ):
        assert words in text


def test_passes_have_panels_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    module = pytest.importorskip("matplotlib.figure", reason="charts need matplotlib")
    from fa2gen.bench.plot import plot

    drawn = []
    monkeypatch.setattr(module.Figure, "savefig", lambda one, *_, **__: drawn.append(one))
    plot(backward_benchmark(), tmp_path / "x.png")
    (figure,) = drawn
    assert [axis.get_title() for axis in figure.axes] == [
        "head dim 64, bf16, full",
        "head dim 64, bf16, full, bwd",
        "head dim 64, bf16, full, fwd+bwd",
    ]
    assert "attention forward, attention backward, attention forward and backward" in figure._suptitle.get_text()
    lines = figure.axes[1].get_lines()
    assert list(lines[0].get_ydata()) == [backward_rows()[i].tflops("fa2gen") for i in (1, 2)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine({"fa2gen": 1.0, "fa2": 2.0, "deterministic": 1.1})
    monkeypatch.setattr(machine, "CudaMachine", lambda: fake)
    monkeypatch.setattr(own, "compile_ahead", lambda cells, choice, **_: None)
    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    monkeypatch.setitem(PEERS, "fa2", Peer("right", lambda: peer("fa2", right)))
    return fake


ARGUMENTS = ("--headdim", "32", "--seqlen", "16", "--tokens", "32", "--hidden", "64", "--rounds", "5", "--causal")


def test_a_run_of_all_passes(fake_gpu: FakeMachine, tmp_path) -> None:
    out = tmp_path / "rows.json"
    passes = ("--pass", "bwd", "--pass", "fwd+bwd", "--pass", "fwd")
    result = run(*ARGUMENTS, *passes, "--peer", "fa2", "--peer", "deterministic", "--out", str(out))
    assert result.exit_code == 0, result.output
    found = read(out)
    assert [one.cell.slug() for one in found.rows] == [
        "bwd_d32_bf16_causal_gqa1",
        "fwd+bwd_d32_bf16_causal_gqa1",
        "fwd_d32_bf16_causal_gqa1",
    ]
    assert [one.ratio("deterministic") for one in found.rows] == [pytest.approx(1.1), pytest.approx(1.1), None]
    assert found.rows[2].outcomes["deterministic"] == Refusal("UnsupportedError: the forward is deterministic as it is")
    assert [(host.cell.direction, host.stream) for host in found.host] == [
        ("fwd", "default"),
        ("fwd", "side"),
        ("fwd+bwd", "default"),
        ("fwd+bwd", "side"),
    ]
    assert "fa2gen / fa2, bwd: geomean 2.000" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--pass", "backward"), 2, "backward"),
        (("--pass", "bwd", "--headdim", "59"), 1, "--headdim 59 with --pass bwd"),
        (("--pass", "bwd", "--data", "repair-all"), 1, "--data repair-all"),
        (("--pass", "fwd+bwd", "--config", FwdConfig().slug()), 1, "tuned or default for --pass fwd+bwd"),
        (("--pass", "fwd", "--pass", "bwd", "--config", "{}"), 1, "tuned or default for --pass fwd and bwd"),
        (("--pass", "bwd", "--config", FwdConfig().slug()), 1, FwdConfig().slug()),
    ],
)
def test_bad_input(arguments: tuple[str, ...], code: int, words: str, fake_gpu: FakeMachine) -> None:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert fake_gpu.calls == []


def test_from_takes_no_pass(tmp_path) -> None:
    write(benchmark(), tmp_path / "rows.json")
    result = run("--from", str(tmp_path / "rows.json"), "--pass", "bwd")
    assert result.exit_code == 2
    assert "--from measures nothing, so it takes no --pass" in result.stderr
