"""The command line as somebody new meets it: help, slips of the pen, odd terminals, options that exclude each other."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from fa2gen.cli import main
from fa2gen.commands import tune_output
from fa2gen.constraints import default_config
from fa2gen.emulator import builder
from fa2gen.spec import FwdConfig, KernelSpec

ROOT = Path(__file__).resolve().parents[2]
EXPLAIN = ("explain", "--headdim", "64", "--gpu", "a100", "--no-compile", "--json")
EMIT = ("emit", "--headdim", "64", "--dtype", "bf16", "--causal", "--gpu", "a100")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def assert_error(result: Result, code: int, *words: str) -> None:
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (code, "")
    assert line.startswith("error: ")
    assert not [word for word in words if word not in line], line


def _commands(command: click.Command, name: str = "fa2gen") -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for sub_name in command.list_commands(context):
            found = command.get_command(context, sub_name)
            assert found is not None
            yield from _commands(found, f"{name} {sub_name}")


COMMANDS = dict(_commands(main))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_reads_well(name: str) -> None:
    text = CliRunner().invoke(main, [*name.split()[1:], "--help"], terminal_width=80).output
    assert not re.search(r"[a-z]\.\.\.$", text, re.M), "a line of the help is cut short"
    assert "default: (" not in text
    assert "INTEGER" not in text
    if name == "fa2gen":
        return
    examples = re.findall(r"^ {4}(?:eval \"\$\()?(fa2gen [^>\n)]*)", text, re.M)
    assert examples
    for example in examples:
        words = shlex.split(example)
        # The longest command name that the example begins with.
        used = max((known for known in COMMANDS if words[: len(known.split())] == known.split()), key=len)
        options = {
            option for parameter in COMMANDS[used].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("-")} <= options, example


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tuen"], ("'tuen'", "did you mean tune?", "fa2gen --help")),
        (["explian", "--headdim", "64"], ("'explian'", "did you mean explain?")),
        (["xyz"], ("no command 'xyz' (see",)),
        (["emit", "--headdim", "64", "-o", ""], ("--out", "empty")),
        (["tune", "--headdim", "64", "--gpu", "a100", "--dry-run", "-o", ""], ("--out", "empty")),
        (["table", "import", __file__, "-o", ""], ("--out", "empty")),
        (["tune", "--headdim", "64", "--gpu", "a100", "--dry-run", "--timeout", "nan"], ("--timeout", "nan")),
        (["tune", "--headdim", "64", "--gpu", "a100", "--dry-run", "--timeout", "inf"], ("--timeout", "inf")),
        (["explain", "--headdim", "64", "--headdim", "128"], ("--headdim", "takes one", "64, 128")),
        (["explain", "--headdim", "64", "--dtype", "bf16", "--dtype", "fp16"], ("--dtype", "bf16, fp16")),
        (["explain", "--headdim", "64", "--gqa", "1", "--gqa", "8"], ("--gqa", "1, 8")),
        (["verify", "--headdim", "64", "--seqlen-q", "8", "--budget", "quick"], ("--budget", "--seqlen-q")),
        ([*EMIT, "--stdout", "--config", "default", "--seqlen-q", "2048"], ("--seqlen-q", "--config")),
        ([*EMIT, "--stdout", "--config", FwdConfig().slug(), "--seqlen-k", "8"], ("--seqlen-k", "--config")),
    ],
)
def test_wrong_usage(arguments: list[str], words: tuple[str, ...], tmp_path: Path) -> None:
    assert_error(run(*arguments), 2, *words)


@pytest.mark.parametrize("command", [EXPLAIN, (*EMIT, "--stdout"), ("verify", "--headdim", "64")])
def test_config_is_said_in_one_way(command: tuple[str, ...]) -> None:
    for text in ("fastest", "", "[1]"):
        assert_error(run(*command, "--config", text), 1, "--config must be tuned, default, a name such as", repr(text))
    for text in ("{", '{"a":' * 100_000):
        assert_error(run(*command, "--config", text), 1, "--config is not JSON")
    assert_error(run(*command, "--config", '{"block_x": 1}'), 1, "block_x", "block_m")


def test_config_forms_of_explain_and_emit() -> None:
    config = FwdConfig(block_m=64)
    for text in (config.slug(), '{"block_m": 64}'):
        assert json.loads(run(*EXPLAIN, "--config", text).stdout)["config"]["slug"] == config.slug()
        assert config.slug() in run(*EMIT, "--stdout", "--config", text).stdout.splitlines()[0]
    assert run(*EMIT, "--stdout", "--config", "tuned").stdout == run(*EMIT, "--stdout").stdout
    default = default_config(KernelSpec(head_dim=64)).slug()
    assert json.loads(run(*EXPLAIN, "--config", "default").stdout)["config"]["slug"] == default


def test_sizes_of_every_magnitude_read_well() -> None:
    def explain(length: int, *options: str) -> str:
        sizes = ("--seqlen-q", str(length), "--batch", "1", "--heads", "1", "--config", "default")
        return run(*EXPLAIN[:-1], "--causal", *sizes, *options).stdout

    tiny, huge = explain(1), explain(2_147_481_600)
    # K and V: 2 * 64 * 2 bytes. 516 bytes in all, 0.25 ns of 2,039 GB/s; 256 / 516 FLOP/byte under a ridge of 153.
    for text in (
        "1 query head over 1,",
        "256 FLOP:",
        "K and V of a head are 256 B;",
        "516 B",
        "0.25 ns",
        "0.0032 of the",
    ):
        assert text in tiny, text
    assert "0.00 us   " not in tiny
    # 4 * 64 * 2147481600 * 2147481601 / 2 FLOPs. K and V: 512 GiB. 16,777,200 tiles of 128 rows.
    for text in ("590 EFLOP:", "K and V of a head are 512 GiB;", "16,777,200 = 1 x 1 head x 16,777,200 query tiles"):
        assert text in huge, text
    assert "ZFLOP" in explain(2_147_481_600, "--heads", "2")


def test_a_dry_run_without_trials_tells_of_none() -> None:
    arguments = ("tune", "--headdim", "64", "--gpu", "a100", "--seqlen-q", "512", "--dry-run", "--json", "--trials")
    assert all(not row["model_favourites"] for row in json.loads(run(*arguments, "0").stdout)["requests"])
    assert all(len(row["model_favourites"]) == 1 for row in json.loads(run(*arguments, "1").stdout)["requests"])


def _process(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fa2gen", *arguments], capture_output=True, text=True, timeout=120, cwd=cwd, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, encoding="utf-8",
    )  # fmt: skip


def test_runs_as_a_module_from_anywhere(tmp_path: Path) -> None:
    assert _process("--version", cwd=tmp_path).stdout == run("--version").output
    assert "(see fa2gen emit --help)" in _process("emit", cwd=tmp_path).stderr


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_names_that_the_terminal_cannot_show(encoding: str, tmp_path: Path) -> None:
    out = tmp_path / "\N{GREEK SMALL LETTER OMEGA}"
    done = _process(*EMIT, "-o", str(out), PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("\N{GREEK SMALL LETTER OMEGA}" if encoding == "utf-8" else "\\u03c9") in done.stdout
    assert (out / "manifest.json").is_file()


def test_doctor_says_that_an_nvcc_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 10.2, V10.2.89'\n")
    program.chmod(0o755)
    monkeypatch.setenv("FA2GEN_NVCC", str(program))
    (check,) = [check for check in json.loads(run("doctor", "--json").stdout) if check["name"] == "nvcc"]
    assert check["status"] == "missing"
    assert "10.2.89, and sm_80 needs CUDA 11.8" in check["detail"]


def test_streams_that_the_caller_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    rows = str(ROOT / "benchmarks" / "results" / "h200_repairs_bf16.json")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--from", rows], prog_name="fa2gen")
    for stream in (sys.stdout, sys.stderr):
        stream.close()
    assert ended.value.code == 0


def test_the_make_command_is_for_a_shell(tmp_path: Path) -> None:
    out = str(tmp_path / "my kernels")
    assert f"make -C '{out}', for sm_80" in run(*EMIT, "-o", out).stdout


@pytest.mark.parametrize("group", ["", "list", "table", "cache"])
def test_a_group_by_itself(group: str) -> None:
    assert_error(run(*group.split()), 2, f"Missing command (see {f'fa2gen {group}'.rstrip()} --help)")


def test_a_warning_is_said_once(tmp_path: Path) -> None:
    # The emulator's runtime takes g++ 20 s of a core: its objects come from the tests' cache, where there is one.
    gxx = builder.find_host_compiler()
    for name, data in builder._runtime(gxx, builder._runtime_key(gxx)).items():
        (tmp_path / name).write_bytes(data)
    compiler = tmp_path / "c++"
    compiler.write_text(
        f"""#!/bin/sh
for last; do :; done
case " $* " in *" -c "*) exec cp {shlex.quote(str(tmp_path))}/"$last" .;; esac
exec {shlex.quote(gxx)} "$@"
"""
    )
    compiler.chmod(0o755)
    done = _process("verify", "--headdim", "64", "--dtype", "bf16", "--seqlen-q", "3", "--seqlen-k", "0",
                    "--backend", "emulator", FA2GEN_CACHE_DIR="/proc/none", CXX=str(compiler))  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.count("warning: the cache folder /proc/none cannot be made") == 1


@pytest.mark.parametrize(("columns", "width"), [("40", 72), ("72", 72), ("100", 100)])
def test_results_are_never_folded_beyond_reading(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert tune_output._console().width == width


def test_system_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_error(run(*EMIT, "-o", str(tmp_path / "file" / "out")), 1, f"{tmp_path}/file/out: Not a directory")


def test_a_full_disk_and_a_lost_link_name_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert_error(run(*EMIT, "-o", str(tmp_path / "link")), 1, f"out must be a folder, {tmp_path}/link is a link")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert_error(run(*EMIT, "-o", str(tmp_path / "out")), 1, f"{tmp_path}/out: No space left on device")
    assert list((tmp_path / "out").iterdir()) == []
