"""``fa2gen explain``, ``list`` and ``completion`` as a user or a program calls them, and how fast help comes."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fa2gen import driver
from fa2gen.cli import COMMANDS, main
from fa2gen.codegen import manifest, template_hash
from fa2gen.constraints import default_config
from fa2gen.hardware import get_gpu, list_gpus
from fa2gen.problem import MAX_SEQLEN, Problem
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import Measurement, Provenance, TunedEntry, save_entries, table_path, utc_now
from fa2gen.tuning.space import legal_space

ROOT = Path(__file__).resolve().parents[2]
EXPLAIN = ("explain", "--headdim", "128", "--gpu", "a10", "--no-compile")


@pytest.fixture(autouse=True)
def _no_gpu_and_own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "hidden by a test")
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "tables"))


def run(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(main, list(arguments), **options)  # type: ignore[arg-type]


def assert_one_line_error(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


def save(kind: str, ms: float, spec: KernelSpec | None = None, *, templates: str | None = None) -> None:
    spec, gpu = spec or KernelSpec(), get_gpu("a10")
    problem = Problem(8, 2048, 2048, 16, 16)
    provenance = Provenance(
        templates or template_hash("fwd", "sm80"), "13.0", "", 3, 2, "test", utc_now(),
        model_version=None if kind == "measured" else "1",
    )  # fmt: skip
    measurement = Measurement(kind, ms, ms, ms, 9 * (kind == "measured"), "test", problem)
    save_entries(gpu, [TunedEntry(spec, problem.bucket(gpu.num_sms), FwdConfig(), measurement, provenance)])


def test_explain_json_is_the_whole_answer() -> None:
    result = run(*EXPLAIN, "--causal", "--seqlen-q", "4096", "--batch", "1", "--heads", "16", "--json")
    assert result.exit_code == 0, result.output
    form = json.loads(result.stdout)
    # 4 * 128 * 16 heads * 4096 * 4097 / 2 pairs; 4 * 16 * 4096 * 128 * 2 bytes and 4 of LSE for each of 65,536 rows.
    assert form["work"]["flops"] == 68_736_253_952
    assert form["traffic"]["tiled"]["bytes"] == 67_371_008
    # 8 N^2 + 8 N d bytes a head.
    assert form["traffic"]["standard"]["bytes"] == 2_214_592_512
    assert form["spec"]["slug"] == "fwd_d128_bf16_causal_gqa1"
    assert form["config"]["slug"] == default_config(KernelSpec()).slug()
    assert (form["registers"]["source"], form["measured"]) == ("estimate", [])
    assert form["space"]["legal"] == len(legal_space(KernelSpec(causal=True), get_gpu("a10")).configs)
    assert set(form) == {
        "gpu", "spec", "problem", "work", "traffic", "roofline", "config", "shared_memory", "registers", "occupancy",
        "launches", "workspaces", "grid", "prediction", "measured", "space",
    }  # fmt: skip


def test_explain_takes_usual_sizes_where_none_are_given() -> None:
    form = json.loads(run(*EXPLAIN, "--json").stdout)
    sizes = {"batch": 8, "seqlen_q": 2048, "seqlen_k": 2048, "num_heads_q": 16, "num_heads_k": 16}
    assert sizes.items() <= form["problem"].items()
    form = json.loads(
        run(*EXPLAIN, "--gqa", "4", "--heads", "8", "--seqlen-q", "100", "--seqlen-k", "1", "--json").stdout
    )
    sizes = {"batch": 163, "seqlen_q": 100, "seqlen_k": 1, "num_heads_q": 8, "num_heads_k": 2}
    assert sizes.items() <= form["problem"].items()


def test_explain_text_lists_on_demand() -> None:
    short, long = run(*EXPLAIN).stdout, run(*EXPLAIN, "--all").stdout
    assert "excluded" in short
    assert len(long.splitlines()) > 1000 > len(short.splitlines())
    config = FwdConfig(block_m=256, block_n=128, step_n=128, num_warps=8, num_stages=3).slug()
    reason = "262144 bytes of shared memory, sm_86 grants a block 101376"
    assert f"          {config}: {reason}" in long.splitlines()
    one = run(*EXPLAIN, "--config", config).stdout
    assert f"  excluded, illegal     {reason}" in one.splitlines()


def test_explain_shows_a_measured_time() -> None:
    save("measured", 4.0)
    form = json.loads(run(*EXPLAIN, "--json").stdout)
    assert form["config"]["lookup"]["source"] == "exact"
    assert [time["ms"] for time in form["measured"]] == [4.0]


def test_explain_without_a_gpu_takes_a100() -> None:
    form = json.loads(run("explain", "--headdim", "59", "--no-compile", "--json").stdout)
    assert (form["gpu"]["name"], form["spec"]["alignment"]) == ("a100", 2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--headdim", "0"], 1, ("head_dim", "at least 1")),
        (["--headdim", "264"], 1, ("head_dim 264", "1 to 256")),
        (["--headdim", "x"], 2, ("--headdim", "'x'")),
        ([], 2, ("--headdim",)),
        (["--headdim", "64", "--dtype", "fp8"], 2, ("--dtype", "fp16", "bf16")),
        (["--headdim", "64", "--gqa", "0"], 1, ("gqa_ratio", "at least 1")),
        (["--headdim", "64", "--gpu", "a1000"], 1, ("a1000", "did you mean a100")),
        (["--headdim", "64", "--batch", "0"], 2, ("--batch", "0")),
        (["--headdim", "64", "--heads", "0"], 2, ("--heads", "0")),
        (["--headdim", "64", "--gqa", "8", "--heads", "12"], 1, ("--heads 12", "--gqa 8", "multiple")),
        (["--headdim", "64", "--seqlen-q", "0"], 2, ("--seqlen-q", "0")),
        (["--headdim", "64", "--seqlen-k", "-5"], 2, ("--seqlen-k", "-5")),
        (["--headdim", "64", "--seqlen-q", str(MAX_SEQLEN + 1)], 2, ("--seqlen-q", str(MAX_SEQLEN))),
        (["--headdim", "64", "--config", "best"], 1, ("config", "tuned", "default", FwdConfig().slug(), "'best'")),
        (["--headdim", "64", "--config", ""], 1, ("config", "''")),
        (["--headdim", "64", "--batch", str(2**30), "--heads", "8"], 1, ("blocks of fwd", "grid's limit")),
    ],
)
def test_explain_bad_values_name_the_option(arguments: list[str], code: int, words: tuple[str, ...]) -> None:
    assert_one_line_error(run("explain", "--no-compile", *arguments), code, *words)


def test_explain_passes_over_a_damaged_table(tmp_path: Path) -> None:
    path = table_path(tmp_path / "tables", "a10", "fwd")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    result = run(*EXPLAIN, "--json")
    assert result.exit_code == 0
    json.loads(result.stdout)
    assert all(line.startswith("warning: ") and str(path) in line for line in result.stderr.splitlines())


def test_list_gpus() -> None:
    save("predicted", 5.0)
    save("measured", 4.0)
    save("predicted", 5.0, KernelSpec(causal=True))
    rows = json.loads(run("list", "gpus", "--json").stdout)
    assert [row["name"] for row in rows] == [gpu.name for gpu in list_gpus()]
    (a10,) = (row for row in rows if row["name"] == "a10")
    assert (a10["compute_capability"], a10["num_sms"], a10["memory_gb"]) == ("8.6", 72, 24)
    assert a10["mma_tflops"] == pytest.approx(125, rel=1e-3)
    assert a10["tables"] == {"measured": 1, "predicted": 1, "stale": 0}
    assert all(row["source"] and row["device_names"] for row in rows)
    (h200,) = (row for row in rows if row["name"] == "h200")
    assert h200["tables"]["measured"] > 0
    text = run("list", "gpus").stdout.splitlines()
    assert len(text) == 1 + len(rows)
    assert max(map(len, text)) <= 120
    (line,) = (line for line in text if line.startswith("a10 "))
    assert line.split()[1:8] == ["A10", "8.6", "72", "1.695", "24", "600", "6"]
    assert line.endswith("1 measured, 1 predicted")
    (line,) = (line for line in text if line.startswith("a40 "))
    assert line.endswith("none")
    save("measured", 4.0, KernelSpec(dtype="fp16"), templates="0" * 16)
    (line,) = (line for line in run("list", "gpus").stdout.splitlines() if line.startswith("a10 "))
    assert line.endswith("2 measured, 1 predicted (1 stale)")
    assert all(row["source"] in run("list", "gpus", "--verbose").stdout for row in rows)


def test_list_kernels() -> None:
    row, hopper = json.loads(run("list", "kernels", "--kind", "fwd", "--json").stdout)
    assert (hopper["kind"], hopper["family"], hopper["targets"]) == ("fwd", "sm90", ["sm_90a"])
    assert (hopper["alignments"], hopper["head_dims"], hopper["softmaxes"]) == ([16], [8, 256], ["online", "guarded"])
    assert hopper["templates"] == list(manifest("fwd", "sm90"))
    assert (row["kind"], row["family"], row["template_hash"]) == ("fwd", "sm80", template_hash("fwd", "sm80"))
    assert row["templates"] == list(manifest("fwd", "sm80"))
    assert "legal_configs" not in row
    row, hopper = json.loads(run("list", "kernels", "--kind", "fwd", "--gpu", "rtx-3090", "--json").stdout)
    assert set(hopper["legal_configs"].values()) == {0}
    for head_dim, count in row["legal_configs"].items():
        assert count == len(legal_space(KernelSpec(head_dim=int(head_dim)), get_gpu("rtx-3090")).configs) > 0
    text = run("list", "kernels", "--gpu", "rtx-3090").stdout
    assert f"{row['legal_configs']['64']:,} for head dim 64" in text
    assert row["template_hash"] in text
    assert max(map(len, text.splitlines())) <= 100
    assert_one_line_error(run("list", "kernels", "--gpu", "none"), 1, "none", "known are a100")


def test_list_wants_to_know_what() -> None:
    assert_one_line_error(run("list"), 2, "Missing command", "fa2gen list --help")
    assert_one_line_error(run("list", "chips"), 2, "chips", "fa2gen list --help")


@pytest.mark.parametrize("command", [["explain"], ["list"], ["list", "gpus"], ["list", "kernels"], ["completion"]])
def test_help_has_an_example(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert f"  fa2gen {' '.join(command)}" in result.output.split("Example", 1)[1]


def test_completion_script_of_every_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("bash", "zsh", "fish"):
        script = run("completion", shell).stdout
        assert f"_FA2GEN_COMPLETE={shell}_complete" in script
        monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
        assert run("completion").stdout == script
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert_one_line_error(run("completion"), 2, "/bin/tcsh", "bash, zsh, fish")
    monkeypatch.delenv("SHELL")
    assert_one_line_error(run("completion"), 2, "not set", "bash, zsh, fish")
    assert_one_line_error(run("completion", "tcsh"), 2, "tcsh", "bash")


def _completions(*words: str) -> list[str]:
    """What click answers to bash: "type,value" lines."""
    line = ["fa2gen", *words]
    environment = {**os.environ, "_FA2GEN_COMPLETE": "bash_complete", "COMP_WORDS": shlex.join(line)}
    environment["COMP_CWORD"] = str(len(line) - 1)
    done = subprocess.run(
        [sys.executable, "cli.py"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return [answer.split(",", 1)[1] for answer in done.stdout.splitlines()]


def test_commands_options_and_values_complete() -> None:
    assert _completions("exp") == ["explain"]
    assert _completions("list", "g") == ["gpus"]
    assert "--headdim" in _completions("explain", "--he")
    assert _completions("explain", "--gpu", "rtx-") == ["rtx-a6000", "rtx-3090", "rtx-4090", "rtx-5090"]
    assert _completions("tune", "--gpu", "GH") == ["gh200"]
    assert _completions("explain", "--dtype", "b") == ["bf16"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes(tmp_path: Path) -> None:
    program = tmp_path / "fa2gen"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(ROOT / "cli.py"))} "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(fa2gen completion bash)"\n'
        "COMP_WORDS=(fa2gen list kernels --gpu h2); COMP_CWORD=4\n"
        '$(complete -p fa2gen | sed "s/.*-F \\([^ ]*\\) .*/\\1/") fa2gen h2 --gpu\n'
        'echo "${COMPREPLY[@]}"\n'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("h200\n", "")


def test_help_is_quick() -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "cli.py", "--help"], cwd=ROOT, capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Processor time, since other work may share the cores; the best of five.
    assert min(seconds() for _ in range(5)) <= 0.3


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_heavy(command: str) -> None:
    program = (
        "import sys\n"
        "from fa2gen.cli import main\n"
        "try:\n"
        f"    main({[command, '--help'] if command else ['--help']!r})\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print('HEAVY', *sorted({'torch', 'pycuda', 'optuna', 'rich', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["HEAVY"]
