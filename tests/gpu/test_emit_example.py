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
from fa2gen.constraints_sm90 import COMPUTE_CAPABILITY
from fa2gen.emit import emit
from fa2gen.spec import KernelSpec, config_from_slug


def _libcuda_folder(tmp_path: Path) -> Path:
    """A folder with the name that ``-lcuda`` looks for; a driver installs ``libcuda.so.1`` only."""
    if (tmp_path / "libcuda.so").exists():
        return tmp_path
    name = ctypes.util.find_library("cuda") or "libcuda.so.1"
    with open("/proc/self/maps") as maps:
        loaded = [line.split()[-1] for line in maps if "/libcuda.so" in line]
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
    for path in [*loaded, *(os.path.join(folder, name) for folder in folders if folder)]:
        if os.path.exists(path):
            (tmp_path / "libcuda.so").symlink_to(path)
            return tmp_path
    pytest.skip("libcuda.so.1 was not found on disk")


SIZES = [(), (113, 203, 3, 2), (1, 65, 1, 1), (70, 3, 2, 1)]


BACKWARD = [((113, 203, 3, 2), ("bwd",)), ((70, 3, 2, 1), ("bwd", "--deterministic"))]


@pytest.mark.parametrize(("sizes", "kind"), [*((sizes, ("fwd",)) for sizes in SIZES), *BACKWARD])
def test_example_is_right(sizes: tuple[int, ...], kind: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["emit", "--headdim", "64", "--headdim", "128", "--gqa", "1", "--gqa", "7", "-o", str(out)]
    arguments += ["--kind", *kind]
    if sizes:
        arguments += ["--dtype", "bf16"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    _assert_right(out, sizes, tmp_path)


# Packed heads and panels of 32 columns; shared rows; a ring and the proof at the end.
FORWARD_CONFIGS = [
    (96, 7, "sm80_64x64s32_w4_st2_qs_guarded_mb1_pb_ring_pack"),
    (256, 1, "sm80_64x32s32_w4_st2_qs_guarded_mb1_wn2"),
    (128, 4, "sm80_64x64s64_w4_st2_qs_guarded_mb1_pb_ring"),
]
# Split heads and panels of 32 columns; two roles; warps that share keys.
BACKWARD_CONFIGS = [
    (96, 7, "sm80_64x64s32_w4_st2_r1_mb1_sh"),
    (128, 4, "sm80_64x64s64_w4_st1_r2_mb1"),
    (256, 1, "sm80_64x64s64_w8_st1_r2_mb1_wd2"),
]
# Of Hopper: the output by TMA and from registers, tiles in turn and drawn, P in shared memory, one to three consumers.
SM90_CONFIGS = [
    (128, 1, "sm90_128x128_st2_q1_ov_pp_static_tma"),
    (40, 7, "sm90_64x80_st1_q2_ps_dynamic_direct"),
    (64, 4, "sm90_192x96_st3_q1_ov_pp_dynamic_tma"),
    (256, 1, "sm90_128x80_st2_q1_ov_pp_static_direct"),
    (128, 2, "sm90_128x128_st2_q2r8_ov_xt_pp_guarded_dynamic_tma_l2s8"),
]
CONFIGS = [("fwd", *row) for row in (*FORWARD_CONFIGS, *SM90_CONFIGS)] + [("bwd", *row) for row in BACKWARD_CONFIGS]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kind", "head_dim", "gqa_ratio", "config"), CONFIGS)
def test_example_of_other_configs_is_right(
    kind: str, head_dim: int, gqa_ratio: int, config: str, causal: bool, tmp_path: Path
) -> None:
    gpu = gpu_at_hand()
    assert gpu is not None
    spec, parsed = (
        KernelSpec(kind, head_dim=head_dim, causal=causal, gqa_ratio=gqa_ratio),
        config_from_slug(kind, config),
    )
    if parsed.family == "sm90" and gpu.compute_capability != COMPUTE_CAPABILITY:
        pytest.skip(f"{gpu.name} has no wgmma")
    emit([spec], gpu, tmp_path / "out", config=parsed)
    for sizes in SIZES:
        _assert_right(tmp_path / "out", sizes, tmp_path)


def _assert_right(out: Path, sizes: tuple[int, ...], tmp_path: Path) -> None:
    gpu = gpu_at_hand()
    assert gpu is not None
    build = ["make", "-j4", "-C", str(out), "all", "attention", f"NVCC={find_nvcc().path}", f"ARCH={gpu.target}"]
    subprocess.run([*build, f"LDFLAGS=-L{_libcuda_folder(tmp_path)}"], check=True, timeout=300)
    done = subprocess.run(
        ["./attention", *map(str, sizes)], cwd=out, capture_output=True, text=True, timeout=300, check=False
    )
    # One result a spec, whether of one kernel or of three.
    results = [path for path in out.glob("*.cu") if "process" not in path.name]
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == len(results)
