"""The C++ program of an emitted folder, built and run against a driver that is not there (``stub_driver.c``)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fa2gen.compile.nvcc import find_nvcc
from fa2gen.emulator import find_host_compiler

# Odd on purpose; 3 batches of 2 key/value heads.
SEQLEN_Q, SEQLEN_K, BATCH, NUM_HEADS_K = 67, 35, 3, 2
SIZES = (SEQLEN_Q, SEQLEN_K, BATCH, NUM_HEADS_K)


def built(emitted: Path, cuda_include: Path, build: Path) -> Path:
    """A copy of the folder in which main.cpp is built against the stub driver."""
    shutil.copytree(emitted, build)
    structs = re.findall(r"struct \w+Params \{.*?\};", (build / "main.cpp").read_text(), re.S)
    names = (("FORWARD", "FwdParams"), ("FORWARD_SM90", "FwdSm90Params"), ("BACKWARD", "BwdParams"))
    kinds = [f"-D{kind}" for kind, name in names if f"struct {name} " in str(structs)]
    stub = (Path(__file__).parent / "stub_driver.c").read_text()
    (build / "stub.c").write_text(stub.replace("static float load", "\n".join((*structs, "static float load")), 1))
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", "-O1", *kinds, f"-I{cuda_include}", "stub.c", "-o", "libcuda.so", "-lm"],
        cwd=build, check=True, timeout=120,
    )  # fmt: skip
    # The folder's own Makefile finds cuda.h by itself.
    made = subprocess.run(
        ["make", "attention", f"NVCC={find_nvcc().path}", f"CXX={find_host_compiler()}"]
        + ["CXXFLAGS=-O0 -Wall -Wextra -Werror", "LDFLAGS=-L. -Wl,-rpath,'$$ORIGIN'"],
        cwd=build, check=True, timeout=240, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert not made.stderr  # notes, such as gcc's of how large structs are passed, are no errors
    for kernel in build.glob("*.cu"):
        kernel.with_suffix(".cubin").write_bytes(b"stub")
    return build


def run_example(folder: Path, *sizes: int, stub: str | None = None) -> subprocess.CompletedProcess[str]:
    """./attention with the stub driver in one of its ways."""
    environment = os.environ | ({"STUB": stub} if stub else {})
    return subprocess.run(
        ["./attention", *map(str, sizes)], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def calls(manifest: dict[str, Any]) -> int:
    """How many results main.cpp checks: one for each spec."""
    return sum(kernel["kernel"] == kernel["spec"]["kind"] for kernel in manifest["kernels"])


def launched(example: Path, manifest: dict[str, Any]) -> list[list[str]]:
    """What main.cpp launched: one list of words per kernel."""
    (example / "launches.txt").unlink(missing_ok=True)
    done = run_example(example, *SIZES)
    # A launch that does nothing must not pass: the output keeps its NaN.
    assert done.returncode == 1
    assert done.stdout.count("WRONG") == calls(manifest)
    return [line.split() for line in (example / "launches.txt").read_text().splitlines()]


def require_formatted(path: Path) -> None:
    """Fails where clang-format would change a file; skips where there is none."""
    # Beside this interpreter, whose environment need not be the shell's.
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = shutil.which("clang-format", path=folders)
    if program is None:
        pytest.skip("clang-format is not installed; the extra [test] brings it")
    style = Path(__file__).parents[1] / ".clang-format"
    done = subprocess.run(
        [program, f"--style=file:{style}", "--dry-run", "--Werror", str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
