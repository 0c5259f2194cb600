"""Every command and example of README.md runs, and shows what README.md says it shows.

A ``console`` block holds prompts (``$ command``) with their output, where ``...`` stands for anything; a plain block
holds commands, one to a line. A command that a machine without a GPU cannot run stands in ``ELSEWHERE``, with the
reason.
"""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fa2gen.compile import find_nvcc

pytestmark = pytest.mark.nvcc

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SHOWN_WITH_NVCC = (13, 0)
ELSEWHERE = {
    "make test": "is what runs this test",
    "make tune": "is `fa2gen tune --headdim 128 --gpu a100` in an environment of its own, and that runs here",
    "pip install '.[gpu]'": "builds PyCUDA, which needs an installed CUDA toolkit",
    "fa2gen tune --headdim 128": "measures, which needs a GPU",
    "fa2gen bench --headdim 128 --out rows.json --plot chart.png": "measures, which needs a GPU",
    "fa2gen bench --pass bwd --peer fa2 --peer deterministic": "measures, which needs a GPU",
}

TUNE = "fa2gen tune --headdim 128 --gpu a100"
# What takes minutes runs in part: README's text -> what stands in its place. FA2GEN_TEST_FULL=1 runs it as it is, 104
# kernels for nvcc and 15 proofs in the emulator, which are 460 s of a core.
IN_PART = {TUNE: (f"{TUNE} --dtype bf16 --trials 1", {"saved 24 entries": "saved 12 entries"})}


BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)


def _commands() -> dict[str, str | None]:
    """Command to the output that README shows, or None where it shows none; in README's order."""
    found: dict[str, str | None] = {}
    for kind, text in BLOCKS:
        if kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
                command, _, output = part.partition("\n")
                found[command.strip()] = output
        elif kind == "":
            for line in text.splitlines():
                command = re.sub(r"\s+#.*", "", line).strip()
                if re.match(r"(fa2gen|make|pip|python3?|eval) ", command):
                    found.setdefault(command, None)
    return found


COMMANDS = _commands()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An empty working folder, and an environment whose ``fa2gen`` and ``python`` are these and stay inside."""
    folder = tmp_path_factory.mktemp("readme")
    binaries = folder / "bin"
    binaries.mkdir()
    for name, arguments in {"fa2gen": f"{ROOT / 'cli.py'}", "python": ""}.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (binaries / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FA2GEN_CACHE_DIR": str(folder / "cache"),
        "FA2GEN_TABLES_DIR": str(folder / "tables"),
        "FA2GEN_STATE_DIR": str(folder / "state"),
        "SHELL": "/bin/bash",
    }
    work = folder / "work"
    work.mkdir()
    for name in ("benchmarks", "pyproject.toml"):
        (work / name).symlink_to(ROOT / name)
    return work, env


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 10
    assert set(ELSEWHERE) <= set(COMMANDS), "a command that README no longer has"


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ELSEWHERE])
def test_command_runs_and_shows_what_is_written(command: str, place: tuple[Path, dict[str, str]]) -> None:
    folder, env = place
    want = COMMANDS[command]
    if command in IN_PART and not os.environ.get("FA2GEN_TEST_FULL"):
        command, changes = IN_PART[command]
        for old, new in changes.items():
            assert want is not None
            assert want.count(old) == 1
            want = want.replace(old, new)
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    # Another release allots other registers, and with them come other occupancies and predictions.
    if want is not None and find_nvcc().version[:2] == SHOWN_WITH_NVCC:
        same = doctest.OutputChecker().check_output(want, done.stdout, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert same, f"README shows\n{want}\nbut it prints\n{done.stdout}"


def test_tune_saves_as_many_entries_as_it_says(place: tuple[Path, dict[str, str]]) -> None:
    folder, env = place
    command = [*shlex.split(TUNE), "--trials", "0", "--dry-run", "--json"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"saved {len(json.loads(done.stdout)['requests'])} entries" in (COMMANDS[TUNE] or "")


@pytest.mark.parametrize("code", [code for kind, code in BLOCKS if kind == "python"])
def test_python_example_runs(code: str, place: tuple[Path, dict[str, str]]) -> None:
    # The same code on CPU tensors, which take the reference; sizes cut so that float64 needs no minutes.
    code = code.replace('device="cuda"', 'device="cpu"').replace("4096", "128")
    done = subprocess.run([sys.executable, "-c", code], cwd=place[0], env=place[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
