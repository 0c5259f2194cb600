"""The C++ program that ``fa2gen emit`` writes, built and run on the GPU, where it checks the kernels by itself."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa2gen.cli import main
from fa2gen.commands.options import gpu_at_hand
from fa2gen.compile.nvcc import find_nvcc


def _libcuda_folder(tmp_path: Path) -> Path:
    """A folder with the name that ``-lcuda`` looks for; a driver installs ``libcuda.so.1`` only."""
    name = ctypes.util.find_library("cuda") or "libcuda.so.1"
    with open("/proc/self/maps") as maps:
        loaded = [line.split()[-1] for line in maps if "/libcuda.so" in line]
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
    for path in [*loaded, *(os.path.join(folder, name) for folder in folders if folder)]:
        if os.path.exists(path):
            (tmp_path / "libcuda.so").symlink_to(path)
            return tmp_path
    pytest.skip("libcuda.so.1 was not found on disk")


@pytest.mark.parametrize("sizes", [(), (113, 203, 3, 2), (1, 65, 1, 1), (70, 3, 2, 1)])
def test_example_is_right(sizes: tuple[int, ...], tmp_path: Path) -> None:
    gpu = gpu_at_hand()
    assert gpu is not None
    out = tmp_path / "out"
    arguments = ["emit", "--headdim", "64", "--headdim", "128", "--gqa", "1", "--gqa", "7", "-o", str(out)]
    if sizes:
        arguments += ["--dtype", "bf16"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    build = ["make", "-j4", "-C", str(out), f"NVCC={find_nvcc().path}", f"ARCH={gpu.target}"]
    subprocess.run([*build, f"LDFLAGS=-L{_libcuda_folder(tmp_path)}"], check=True, timeout=300)
    done = subprocess.run(
        ["./attention", *map(str, sizes)], cwd=out, capture_output=True, text=True, timeout=300, check=False
    )
    kernels = len(list(out.glob("*.cu")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == kernels
