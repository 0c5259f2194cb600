"""The command line: one vocabulary, one-line errors, exit codes, nothing lost on bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fa2gen import driver
from fa2gen.cli import main
from fa2gen.commands.options import make_specs
from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.gate import GateReport
from fa2gen.hardware import list_gpus
from fa2gen.spec import KernelSpec
from fa2gen.tables import table_path, user_dir

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about a machine without a GPU, wherever they run."""
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "hidden by a test")


@pytest.fixture
def user_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "tables"))
    return user_dir()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def assert_one_line_error(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0], f"{word!r} not in {lines[0]!r}"


def test_help_of_every_command_has_an_example() -> None:
    for command in ("tune", "emit", "verify", "doctor"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert f"  fa2gen {command}" in result.output.split("Example", 1)[1]


def test_version_and_missing_command() -> None:
    assert re.fullmatch(r"fa2gen, version \d+\.\d+\.\d+\S*\n", run("--version").output)
    assert_one_line_error(run("tuen"), 2, "tuen", "fa2gen --help")
    assert run().exit_code == 2


def test_shim_runs_from_a_checkout() -> None:
    done = subprocess.run([sys.executable, "cli.py", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == run("--version").output


def test_specs_of_the_options() -> None:
    specs = make_specs([128], [], None, [1, 8])
    assert len(specs) == 8
    assert {(s.dtype, s.causal, s.gqa_ratio) for s in specs} == {
        (dtype, causal, ratio) for dtype in ("fp16", "bf16") for causal in (False, True) for ratio in (1, 8)
    }
    assert [s.alignment for s in make_specs([59, 64, 64], ["bf16"], True, [1])] == [2, 16]
    (only,) = make_specs([64], ["bf16", "bf16"], False, [1, 1])
    assert not only.causal


@pytest.mark.parametrize("kind", ["fwd", "bwd", "both"])
@pytest.mark.parametrize("command", ["tune", "emit", "verify"])
@pytest.mark.parametrize(
    ("head_dim", "words"),
    [
        ("0", ("head_dim", "at least 1")),
        ("-1", ("head_dim", "at least 1")),
        ("257", ("head_dim 257", "1 to 256")),
        ("264", ("head_dim 264", "1 to 256")),
    ],
)
def test_bad_head_dim(command: str, head_dim: str, words: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    extra = ["-o", str(out)] if command != "verify" else []
    result = run(command, "--kind", kind, "--headdim", head_dim, "--gpu", "a100", *extra)
    assert_one_line_error(result, 1, *words)
    assert not out.exists()


def test_advice_on_a_backwards_head_dim_can_be_followed() -> None:
    for head_dim in range(1, 256):
        if head_dim % 8:
            with pytest.raises(ArgumentError, match="so give --headdim ") as refusal:
                make_specs([head_dim], ["bf16"], False, [1], ["bwd"])
            (advised,) = make_specs([int(str(refusal.value).split()[-1])], ["bf16"], False, [1], ["bwd"])
            assert 0 < advised.head_dim - head_dim < 8
    for head_dim in range(257, 300):
        with pytest.raises(UnsupportedError, match=f"head_dim {head_dim} is not supported: .* 1 to 256$"):
            make_specs([head_dim], ["bf16"], False, [1], ["bwd"])


@pytest.mark.parametrize("command", ["tune", "emit", "verify"])
def test_bad_gqa_and_dtype(command: str, tmp_path: Path) -> None:
    extra = ["-o", str(tmp_path / "out")] if command != "verify" else []
    arguments = [command, "--headdim", "64", "--gpu", "a100", *extra]
    assert_one_line_error(run(*arguments, "--gqa", "0"), 1, "gqa_ratio", "at least 1", "0")
    assert_one_line_error(run(*arguments, "--gqa", "-3"), 1, "gqa_ratio", "-3")
    assert_one_line_error(run(*arguments, "--gqa", "x"), 2, "--gqa", "'x'", f"fa2gen {command} --help")
    assert_one_line_error(run(*arguments, "--dtype", "fp32"), 2, "fp32", "fp16", "bf16")


@pytest.mark.parametrize("command", ["tune", "emit", "verify"])
def test_unknown_gpu_offers_near_names(command: str, tmp_path: Path) -> None:
    extra = ["-o", str(tmp_path / "out")] if command != "verify" else []
    result = run(command, "--headdim", "64", "--gpu", "a1000", *extra)
    assert_one_line_error(result, 1, "a1000", "did you mean", "a100")


def test_tune_without_a_gpu_lists_the_names() -> None:
    result = run("tune", "--headdim", "64")
    assert_one_line_error(result, 2, "--gpu", *(gpu.name for gpu in list_gpus()))


@pytest.mark.parametrize("command", ["tune", "verify"])
def test_lone_seqlen_k(command: str) -> None:
    assert_one_line_error(run(command, "--headdim", "64", "--gpu", "a100", "--seqlen-k", "8"), 2, "--seqlen-q")
    negative = run(command, "--headdim", "64", "--gpu", "a100", "--seqlen-q", "-1")
    assert_one_line_error(negative, 2, "--seqlen-q", "-1")


def test_headdim_is_required() -> None:
    assert_one_line_error(run("emit", "-o", "x"), 2, "--headdim")


def test_dry_run_counts_configs() -> None:
    result = run("tune", "--headdim", "64", "--gpu", "a100", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["gpu"] == "a100"
    kernels = {row["kernel"] for row in plan["requests"]}
    assert kernels == {spec.slug() for spec in make_specs([64], [], None, [1, 8])}
    assert len({row["seqlen_q"] for row in plan["requests"]}) == 3
    assert all(row["legal_configs"] > 0 for row in plan["requests"])
    one = run("tune", "--headdim", "64", "--dtype", "bf16", "--causal", "--gqa", "4", "--gpu", "a100", "--dry-run",
              "--json", "--seqlen-q", "33", "--seqlen-k", "77")  # fmt: skip
    (row,) = json.loads(one.stdout)["requests"]
    assert (row["kernel"], row["seqlen_q"], row["seqlen_k"]) == ("fwd_d64_bf16_causal_gqa4", 33, 77)
    assert row["num_heads_q"] == 4 * row["num_heads_k"]
    assert "legal configs" in run("tune", "--headdim", "64", "--gpu", "a100", "--dry-run").stdout


def test_emit_takes_a100_without_a_gpu(tmp_path: Path) -> None:
    result = run("emit", "--headdim", "59", "--no-causal", "--dtype", "fp16", "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    form = json.loads((tmp_path / "manifest.json").read_text())
    assert form["gpu"] == "a100"
    (kernel,) = form["kernels"]
    assert kernel["spec"]["head_dim"] == 59
    assert kernel["file"] in result.stdout


def test_emit_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("mine")
    assert_one_line_error(run("emit", "--headdim", "64", "-o", str(path)), 1, "out", str(path))
    assert path.read_text() == "mine"
    assert_one_line_error(run("emit", "--headdim", "64", "-o", str(path / "deeper")), 1, str(path))


def test_verify_cuda_without_a_gpu() -> None:
    result = run("verify", "--headdim", "64", "--backend", "cuda")
    assert_one_line_error(result, 1, "cuda", "hidden by a test", "--backend emulator")


def test_verify_bad_config() -> None:
    arguments = ["verify", "--headdim", "64", "--dtype", "bf16", "--causal", "--backend", "emulator"]
    assert_one_line_error(run(*arguments, "--config", "{"), 1, "--config", "JSON")
    assert_one_line_error(run(*arguments, "--config", "[1]"), 1, "--config", "object")
    assert_one_line_error(run(*arguments, "--config", '{"block_x": 1}'), 1, "block_x", "block_m")
    big = run(*arguments, "--gpu", "rtx-4090", "--config", '{"block_m": 128, "block_n": 256, "num_stages": 3}')
    assert_one_line_error(big, 1, "sm80_128x256", "shared memory")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("not a tuned table",)),
        ("", ("not a tuned table",)),
        ('{"schema": 99, "gpu": "a100", "target": "sm_80", "kind": "fwd", "entries": []}', ("schema 99", "newer")),
    ],
)
def test_corrupt_table(text: str, words: tuple[str, ...], user_tables: Path, tmp_path: Path) -> None:
    path = table_path(user_tables, "a100", "fwd")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    # It is passed over with a warning: a damaged table must not stop anybody's work ...
    result = run("emit", "--headdim", "64", "--dtype", "bf16", "--gpu", "a100", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    (warning,) = result.stderr.strip().splitlines()
    assert warning.startswith("warning: ")
    assert all(word in warning for word in (str(path), *words))
    # ... and doctor names it, and exits with 1.
    report = run("doctor", "--json")
    assert report.exit_code == 1
    (check,) = [check for check in json.loads(report.stdout) if check["status"] == "error"]
    assert check["name"] == "table"
    assert check["detail"].startswith(f"{path} ")
    assert all(word in check["detail"] for word in words)
    assert path.read_text() == text


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch, user_tables: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("FA2GEN_NVCC", str(tmp_path / "nvcc"))
    arguments = ["tune", "--headdim", "64", "--dtype", "bf16", "--causal", "--gqa", "1", "--gpu", "a100"]
    result = run(*arguments, "--seqlen-q", "128")
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "fa2gen[nvcc]" in errors[0]
    assert "Traceback" not in result.output
    assert not user_tables.exists()
    report = json.loads(run("doctor", "--json").stdout)
    (check,) = [check for check in report if check["name"] == "nvcc"]
    assert check["status"] == "missing"
    assert "fa2gen[nvcc]" in check["fix"]
    # Emitting needs none.
    assert run("emit", "--headdim", "64", "--gpu", "a100", "-o", str(tmp_path / "out")).exit_code == 0


def test_no_writable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    # A folder inside a file can be made by nobody, root included.
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(blocked / "cache"))
    report = run("doctor", "--json")
    (check,) = [check for check in json.loads(report.stdout) if check["name"] == "cache"]
    assert check["status"] == "missing"
    assert "FA2GEN_CACHE_DIR" in check["fix"]
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(open_to_all))
    report = run("doctor", "--json")
    (check,) = [check for check in json.loads(report.stdout) if check["name"] == "cache"]
    assert "others may write" in check["detail"]
    assert list(open_to_all.iterdir()) == []


def test_tables_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    result = run("tune", "--headdim", "64", "--gpu", "a100", "-o", str(path))
    assert_one_line_error(result, 2, "--out", str(path))


def test_doctor_reports_every_part() -> None:
    result = run("doctor")
    report = json.loads(run("doctor", "--json").stdout)
    names = [check["name"] for check in report]
    assert names[:4] == ["python", "torch", "nvcc", "g++"]
    assert {"pycuda", "driver", "gpu", "cache", "templates", "table"} <= set(names)
    assert all(check["status"] in ("ok", "missing", "error") for check in report)
    assert all(check["fix"] for check in report if check["status"] == "missing" and check["name"] != "driver")
    for check in report:
        assert check["detail"] in result.stdout
    assert result.exit_code == (1 if any(check["status"] == "error" for check in report) else 0)
    (cache,) = [check for check in report if check["name"] == "cache"]
    assert cache["detail"].startswith(os.environ["FA2GEN_CACHE_DIR"])


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fa2gen.commands.options.get_gpu", interrupted)
    assert_one_line_error(run("emit", "--headdim", "64", "--gpu", "a100", "-o", "x"), 130, "interrupted")


def test_no_command_is_one_line() -> None:
    assert_one_line_error(run(), 2, "command", "fa2gen --help")


@pytest.mark.parametrize("command", ["tune", "emit", "verify"])
def test_sizes_that_no_kernel_takes(command: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    extra = ["-o", str(out)] if command != "verify" else []
    arguments = [command, "--headdim", "64", "--gpu", "a100", *extra]
    for ratio in ("1025", "1000000000", "100000000000000000000"):
        assert_one_line_error(run(*arguments, "--gqa", ratio), 1, f"gqa_ratio {ratio}", "1 to 1024")
    for length in ("2147483648", "3000000000000000000000"):
        assert_one_line_error(run(*arguments, "--seqlen-q", length), 2, "--seqlen-q", length)
        assert_one_line_error(run(*arguments, "--seqlen-q", "8", "--seqlen-k", length), 2, "--seqlen-k", length)
    assert not out.exists()


def test_tune_needs_work_to_do() -> None:
    tune = ("tune", "--headdim", "64", "--gpu", "a100", "--dtype", "bf16")
    assert_one_line_error(run(*tune, "--seqlen-q", "0"), 2, "--seqlen-q", "0")
    assert_one_line_error(run(*tune, "--seqlen-q", "8", "--seqlen-k", "0"), 2, "--seqlen-k", "0")


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Kernels that ``verify`` runs in the emulator; each passes."""
    specs: list[KernelSpec] = []

    def passing(spec: KernelSpec, _config: object, cases: Iterable[object]) -> GateReport:
        specs.append(spec)
        return GateReport(True, 0.0, "nowhere", 0.0, f"passed {len(list(cases))} cases")

    monkeypatch.setattr("fa2gen.tuning.tools.emulated_gate", passing)
    return specs


VERIFY = ("verify", "--headdim", "64", "--causal", "--dtype", "fp16", "--backend", "emulator")


@pytest.mark.parametrize("kind", ["fwd", "bwd", "both"])
def test_verify_needs_a_kernel_to_run(kind: str, gated: list[KernelSpec]) -> None:
    for lengths in (("0", "31"), ("0", "0")):
        result = run(*VERIFY, "--kind", kind, "--seqlen-q", lengths[0], "--seqlen-k", lengths[1])
        assert_one_line_error(result, 2, "--seqlen-q 0", "no kernel runs; give at least 1")
    assert_one_line_error(run(*VERIFY, "--kind", kind, "--seqlen-q", "0"), 2, "--seqlen-q 0")
    result = run(*VERIFY, "--kind", kind, "--seqlen-q", "31", "--seqlen-k", "0")
    if kind == "fwd":  # it writes zeros and an LSE of -inf
        assert (result.exit_code, [spec.kind for spec in gated]) == (0, ["fwd"])
    else:
        assert_one_line_error(result, 2, "--seqlen-k 0", "no backward kernel runs", "--kind fwd")
        assert gated == []
    assert run(*VERIFY, "--kind", kind, "--seqlen-q", "1", "--seqlen-k", "1").exit_code == 0


def test_verify_refuses_before_the_first_kernel_runs(gated: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    config = '{"block_m": 128, "block_n": 128, "step_n": 64, "num_warps": 4, "num_stages": 2}'
    result = run(*VERIFY, "--headdim", "256", "--config", config)
    assert_one_line_error(result, 1, "cannot run fwd_d256", "shared memory")
    # 10^6 bytes of memory: 2 heads of 64 queries and keys by 64 need 0.5 MB, those of a backward 1.3 MB.
    monkeypatch.setattr(os, "sysconf", lambda _: 1000)
    assert_one_line_error(run(*VERIFY, "--kind", "both", "--seqlen-q", "64"), 1, "seqlen_q 64", "GiB")
    assert gated == []
    assert run(*VERIFY, "--kind", "fwd", "--seqlen-q", "64").exit_code == 0


def test_verify_that_cannot_fit_in_memory() -> None:
    result = run("verify", "--headdim", "128", "--causal", "--dtype", "bf16", "--seqlen-q", "2000000000",
                 "--backend", "emulator")  # fmt: skip
    assert_one_line_error(result, 1, "seqlen_q 2000000000", "GiB")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"block_m": 100}', ("block_m 100", "16-row tiles")),
        ('{"block_m": 1048576}', ("262144 query rows",)),
        ('{"block_n": 512, "step_n": 512}', ("block_n 512",)),
        ('{"block_m": 512, "block_n": 256, "num_stages": 3, "num_warps": 8}', ("shared memory",)),
    ],
)
def test_verify_without_a_gpu_refuses_configs_that_none_can_run(config: str, words: tuple[str, ...]) -> None:
    result = run(
        "verify", "--headdim", "64", "--dtype", "bf16", "--causal", "--backend", "emulator", "--config", config
    )
    assert_one_line_error(result, 1, "any GPU", *words)


def test_emit_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    arguments = ("emit", "--headdim", "64", "--dtype", "bf16", "--causal", "-o", str(out))
    assert run(*arguments).exit_code == 0
    before = {path.name: path.read_text() for path in out.iterdir()}
    (out / "mine.txt").write_text("mine")

    real = Path.write_text
    written: list[Path] = []

    def full_disk(self: Path, *args: Any, **options: Any) -> int:
        written.append(self)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", full_disk)
    assert_one_line_error(run(*arguments, "--seqlen-q", "64", "--headdim", "128"), 1, "No space left")
    monkeypatch.undo()
    assert {path.name: path.read_text() for path in out.iterdir()} == {**before, "mine.txt": "mine"}
    (out / "main.cpp").unlink()
    (out / "main.cpp").mkdir()
    assert_one_line_error(run(*arguments, "--headdim", "128"), 1, "out", "main.cpp")
    assert {path.name for path in out.iterdir()} == {*before, "mine.txt"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_command_in_order(number: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time, fa2gen.commands.options as options\n"
        f"options.get_gpu = lambda name: (os.kill(os.getpid(), {int(number)}), time.sleep(30))\n"
        "from fa2gen.cli import main\n"
        f"main(['emit', '--headdim', '64', '--gpu', 'a100', '-o', {str(tmp_path / 'out')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    # An empty line first: a terminal shows ^C where the cursor was.
    assert (done.returncode, done.stderr) == (128 + number, "\nerror: interrupted\n")
