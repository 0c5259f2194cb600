"""``fa2gen bench``: options, errors, what is printed and drawn; the measuring on a fake machine."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from fa2gen import driver
from fa2gen.bench import machine, own, peers, session
from fa2gen.bench.cells import DATA, PASSES
from fa2gen.bench.peers import PEERS, Peer
from fa2gen.bench.plot import _STYLES
from fa2gen.bench.report import show
from fa2gen.bench.rows import OWN, Refusal, read, write
from fa2gen.cli import main
from fa2gen.commands import bench as command
from tests.bench_fakes import FakeMachine, benchmark, peer, right, row


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def assert_one_line_error(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line, f"{word!r} not in {line!r}"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "hidden by a test")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.json"
    write(benchmark(), path)
    return path


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """A machine on which fa2gen takes 1 ms and every peer 2; the registry holds a right peer and an absent one."""
    fake = FakeMachine({"fa2gen": 1.0, "fa2": 2.0, "cudnn": 2.0})

    def absent() -> peers.Implementation:
        raise ModuleNotFoundError("No module named 'flash_attn_interface'", name="flash_attn_interface")

    monkeypatch.setattr(machine, "CudaMachine", lambda: fake)
    monkeypatch.setattr(own, "compile_ahead", lambda cells, choice, **_: None)
    monkeypatch.setattr(command, "_require_gpu", lambda: None)
    monkeypatch.setitem(PEERS, "fa2", Peer("right", lambda: print("hello from fa2") or peer("fa2", right)))
    monkeypatch.setitem(PEERS, "fa3", Peer("absent", absent))
    return fake


def test_names_in_the_help_are_the_registries() -> None:
    assert tuple(PEERS) == command.PEER_NAMES
    assert command.DATA_NAMES == DATA
    assert command.PASS_NAMES == PASSES
    assert set(_STYLES) == {OWN, *PEERS, command.ONLINE, command.DETERMINISTIC}


def test_help_is_cheap_and_has_examples() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "  fa2gen bench --from rows.json" in result.output


def test_needs_a_gpu(no_gpu: None, tmp_path: Path) -> None:
    out = tmp_path / "new" / "rows.json"
    assert_one_line_error(
        run("--headdim", "64", "--out", str(out)), 1, "bench needs a CUDA GPU: hidden by a test", "--from"
    )
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--tokens", "5", "--batch", "2"), 2, ("--tokens and --batch exclude each other",)),
        (("--hidden", "64", "--heads", "2"), 2, ("--hidden and --heads exclude each other",)),
        (("--rounds", "4"), 2, ("--rounds", "4")),
        (("--seqlen", "3z"), 2, ("--seqlen", "3z")),
        (("--seqlen", "0"), 2, ("--seqlen", "1 to")),
        (("--peer", "fa9"), 2, ("fa9", "cudnn")),
        (("--headdim", "0"), 1, ("head_dim", "at least 1")),
        (("--gqa", "3", "--heads", "8"), 1, ("--heads 8", "--gqa 3")),
        (("--config", "fast"), 1, ("--config", "fast")),
        (("--out", ""), 2, ("--out", "empty")),
        (("--plot", "chart.gif"), 1, ("chart.gif", ".png")),
        (("--from", "nothing.json"), 2, ("nothing.json", "does not exist")),
    ],
)
def test_bad_input(arguments: tuple[str, ...], code: int, words: tuple[str, ...], no_gpu: None) -> None:
    assert_one_line_error(run(*arguments), code, *words)


def test_from_takes_no_measuring_option(rows: Path) -> None:
    for arguments in (
        ("--rounds", "7"),
        ("--headdim", "64"),
        ("--no-host",),
        ("--out", "x.json"),
        ("--config", "default"),
    ):
        assert_one_line_error(run("--from", str(rows), *arguments), 2, "--from measures nothing")


def test_from_names_the_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for text in ("", "{", "[]", '{"schema": 99}', "\0"):
        path.write_text(text)
        assert_one_line_error(run("--from", str(path)), 1, str(path))


def test_without_matplotlib_it_says_what_to_install(
    rows: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--from", str(rows), "--plot", str(tmp_path / "x.png"))
    assert_one_line_error(result, 1, "--plot needs matplotlib", "pip install 'fa2gen[report]'")
    assert result.stdout == ""


def test_from_shows_tables_without_a_gpu(rows: Path, no_gpu: None) -> None:
    lines = run("--from", str(rows)).stdout.splitlines()
    squeezed = [" ".join(line.split()) for line in lines]
    tflops = [benchmark().rows[i].tflops("fa2gen") for i in range(2)]
    assert f"fa2gen {tflops[0]:.0f} {tflops[1]:.0f}" in squeezed
    assert f"fa2 {tflops[0] / 1.2:.0f} (1.20) {tflops[1] / 1.5:.0f} (1.50)" in squeezed
    assert f"cudnn {tflops[0] / 0.8:.0f} (0.80) {tflops[1] / 1.25:.0f} (1.25)" in squeezed
    # Refused at 512 of the causal kernel: the cell is empty, the reason below it.
    assert any(line.startswith("cudnn - ") for line in squeezed)
    assert "512: cudnn: RuntimeError: no such kernel" in squeezed
    assert "512, 1024: config sm80_64x64s64_w2_st1_qs_guarded_mb2 (exact, measured)" in squeezed
    assert any("fa3" in line and "no module flash_attn_interface" in line for line in squeezed)
    assert "fa2 27.2 (27.0 - 28.0) 2.00 27.2 (27.0 - 28.0) 2.00" in squeezed
    assert any(
        line.startswith("fa2gen / fa2: geomean 1.342, worst 1.200 (fwd_d64_bf16_full_gqa1 at 512)") for line in squeezed
    )
    assert any(
        line.startswith("fa2gen / cudnn: geomean 0.928, worst 0.800") and line.endswith("3 cells of 4")
        for line in squeezed
    )


def _text(width: int, **changes: object) -> str:
    console = Console(width=width, highlight=False, record=True, file=io.StringIO())
    one = benchmark()
    for name, value in changes.items():
        setattr(one, name, value)
    show(one, console)
    return console.export_text()


def test_what_is_doubtful_stands_in_the_text() -> None:
    wrong = row(64, False, 512, fa2gen=1.0)
    wrong.outcomes["fa2"] = Refusal("wrong output: it is not fa2gen's", wrong=True)
    wide = row(64, True, 512, "repair-all", fa2gen=1.0, fa2=0.9)
    object.__setattr__(wide, "repairs", 12345)
    object.__setattr__(wide.outcomes["fa2"], "p80", 1.2)
    text = _text(120, rows=[wrong, wide], host=[], complete=False)
    assert "WRONG" in text
    assert "512: fa2: wrong output: it is not fa2gen's" in text
    assert "repair-all data" in text
    assert "512: 12,345 softmax steps repaired in a call" in text
    assert "512: fa2's times are spread widely" in text
    assert "fa2gen / fa2 on repair-all data: geomean 0.900" in text
    assert "fa2gen / cudnn: nothing to compare, it took no cell" in text
    assert "INCOMPLETE" in text
    assert "INCOMPLETE" not in _text(120)


def test_from_prints_the_document_again(rows: Path) -> None:
    assert json.loads(run("--from", str(rows), "--json").stdout) == json.loads(rows.read_text())


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_plot_from_rows(rows: Path, ending: str, tmp_path: Path, no_gpu: None) -> None:
    pytest.importorskip("matplotlib", reason="charts need matplotlib")
    path = tmp_path / "new" / f"chart.{ending}"
    result = run("--from", str(rows), "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])


def test_the_chart_s_lines_are_the_rows(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_module = pytest.importorskip("matplotlib.figure", reason="charts need matplotlib")
    drawn = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    assert run("--from", str(rows), "--plot", str(tmp_path / "x.png")).exit_code == 0
    (figure,) = drawn
    assert "NVIDIA H200, 2030-01-02" in figure._suptitle.get_text()
    full, causal = figure.axes
    assert (full.get_title(), causal.get_title()) == ("head dim 64, bf16, full", "head dim 64, bf16, causal")
    assert [tick.get_text() for tick in full.get_xticklabels()] == ["512", "1024"]
    own, fa2, cudnn = causal.get_lines()
    assert list(own.get_ydata()) == [benchmark().rows[i].tflops("fa2gen") for i in (2, 3)]
    assert list(fa2.get_ydata()) == [benchmark().rows[i].tflops("fa2") for i in (2, 3)]
    # A gap where the peer refused.
    assert cudnn.get_ydata()[0] != cudnn.get_ydata()[0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fa2gen", "fa2", "cudnn"]
    assert len({line.get_color() for line in causal.get_lines()}) == 3


ARGUMENTS = ("--headdim", "32", "--seqlen", "16,8x24", "--tokens", "32", "--hidden", "64", "--rounds", "5")


def test_a_run_measures_writes_and_shows(fake_gpu: FakeMachine, tmp_path: Path) -> None:
    out = tmp_path / "new" / "rows.json"
    result = run(*ARGUMENTS, "--peer", "fa2", "--peer", "fa3", "--out", str(out))
    assert result.exit_code == 0, result.output
    found = read(out)
    assert [one.cell.label() for one in found.rows] == [
        f"fwd_d32_bf16_{mask}_gqa1 at {lengths}" for mask in ("full", "causal") for lengths in ("16", "8x24")
    ]
    assert found.peers == ["fa2"]
    assert found.missing == {"fa3": "not installed: there is no module flash_attn_interface"}
    assert found.rows[0].ratio("fa2") == pytest.approx(2.0)
    assert found.rows[0].outcomes["fa2"].n == 5
    assert found.provenance["rounds"] == 5
    assert len(found.host) == 2
    assert "fa2gen / fa2: geomean 2.000" in result.stdout
    assert f"rows written to {out}" in result.stderr
    assert "hello from fa2" in result.stderr
    assert "hello from fa2" not in result.stdout


def test_json_is_one_document(fake_gpu: FakeMachine) -> None:
    result = run(*ARGUMENTS, "--causal", "--peer", "fa2", "--no-host", "--json")
    form = json.loads(result.stdout)
    assert len(form["rows"]) == 2
    assert form["host"] == []
    assert form["summary"][0]["geomean"] == pytest.approx(2.0)
    both = json.loads(
        run(
            *ARGUMENTS, "--full", "--peer", "fa2", "--no-host", "--data", "normal", "--data", "repair-all", "--json"
        ).stdout
    )
    assert [one["data"] for one in both["rows"]] == ["normal", "normal", "repair-all", "repair-all"]


def test_a_wrong_peer_is_an_error_after_all_is_saved(
    fake_gpu: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = Peer("zeros", lambda: peer("cudnn", lambda cell, q, k, v: q * 0))
    monkeypatch.setitem(PEERS, "cudnn", zeros)
    out = tmp_path / "rows.json"
    result = run(*ARGUMENTS, "--full", "--peer", "cudnn", "--peer", "fa2", "--no-host", "--out", str(out))
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "cudnn in fwd_d32_bf16_full_gqa1 at 16: wrong output" in errors[0]
    assert "(and 1 more)" in errors[0]
    assert read(out).rows[1].ratio("fa2") == pytest.approx(2.0)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("CUDA error: x\ny"), 1)])
def test_an_interruption_saves_what_is_measured(
    error: BaseException, code: int, fake_gpu: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = session._kernel_row

    def second_fails(cell, *rest):
        if cell.lengths == "8x24":
            raise error
        return real(cell, *rest)

    monkeypatch.setattr(session, "_kernel_row", second_fails)
    out = tmp_path / "rows.json"
    result = run(*ARGUMENTS, "--peer", "fa2", "--out", str(out))
    assert result.exit_code == code
    found = read(out)
    assert (len(found.rows), found.complete) == (1, False)
    assert "INCOMPLETE" in result.stdout
    if code == 1:
        assert "error: the GPU failed: CUDA error: x y" in result.stderr


def test_a_folder_that_cannot_be_written_ends_it_before_it_measures(fake_gpu: FakeMachine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(*ARGUMENTS, "--out", str(tmp_path / "file" / "rows.json"))
    assert_one_line_error(result, 1, str(tmp_path / "file"))
    assert fake_gpu.calls == []
