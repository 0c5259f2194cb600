"""``fa2gen emit``: every file compiles alone, and the C++ example makes exactly the launch that fa2gen would."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa2gen.cli import main
from fa2gen.codegen import FWD_PARAMS, template_hash
from fa2gen.compile.nvcc import find_nvcc
from fa2gen.emit import EXTRA_FILES, emit
from fa2gen.hardware import get_gpu
from fa2gen.launch import fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec
from tests.emit_runs import BATCH, NUM_HEADS_K, SEQLEN_K, SEQLEN_Q, built, launched, require_formatted, run_example

POINTERS = FWD_PARAMS.pointers


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("emit") / "out"
    arguments = ["emit", "--headdim", "128", "--causal", "--gqa", "1", "--gqa", "7", "--gpu", "a100", "-o", str(out)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def manifest(emitted: Path) -> dict[str, Any]:
    form: dict[str, Any] = json.loads((emitted / "manifest.json").read_text())
    return form


@pytest.fixture(scope="module")
def example(emitted: Path, cuda_include: Path, tmp_path_factory: Any) -> Path:
    return built(emitted, cuda_include, tmp_path_factory.mktemp("example") / "out")


@pytest.fixture(scope="module")
def launches(example: Path, manifest: dict[str, Any]) -> list[list[str]]:
    return launched(example, manifest)


@pytest.mark.parametrize("sizes", [(33, 70, 2, 1), (70, 33, 1, 2)])
def test_example_tells_right_from_wrong(sizes: tuple[int, ...], example: Path, manifest: dict[str, Any]) -> None:
    kernels = len(manifest["kernels"])
    right = run_example(example, *sizes, stub="right")
    assert right.returncode == 0, right.stdout + right.stderr
    assert right.stdout.count("ok ") == kernels
    wrong = run_example(example, *sizes, stub="drops a key")
    assert wrong.returncode == 1
    assert wrong.stdout.count("WRONG ") == kernels


def test_example_says_what_is_wrong(example: Path) -> None:
    def error(*arguments: str, stub: str = "") -> tuple[int, str]:
        done = subprocess.run(
            ["./attention", *arguments], cwd=example, env=os.environ | {"STUB": stub}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.stderr.count("\n") == 1, done.stderr
        return done.returncode, done.stderr

    assert error(stub="no GPU") == (1, "error: no GPU was found\n")
    code, text = error("7", "7", stub="other chip")
    assert (code, "ARCH=sm_89" in text) == (1, True), text
    code, text = error("7", "7", stub="small chip")
    assert (code, "bytes of shared memory a block, Stub has 1024" in text) == (1, True), text
    for wrong in ("-1", "x", "1x", "", "1048577", "99999999999999999999"):
        code, text = error("5", wrong)
        assert (code, f"sizes are numbers from 0 to 1048576, got {wrong}; usage" in text) == (2, True), text
    assert error("1", "2", "3", "4", "5")[0] == 2
    assert error("1", "1048576", "1048576", "1048576") == (
        2,
        "error: these sizes need more memory than this program takes\n",
    )
    (example / "launches.txt").unlink(missing_ok=True)
    help_text = subprocess.run(["./attention", "--help"], cwd=example, capture_output=True, text=True, check=True)
    assert help_text.stdout.startswith("usage: attention")
    cubin = next(example.glob("*.cubin"))
    kept = cubin.read_bytes()
    cubin.unlink()
    try:
        code, text = error("7", "7", stub="right")
    finally:
        cubin.write_bytes(kept)
    assert (code, text) == (1, f"error: {cubin.name} is missing; run make\n")


def test_makefile_finds_nvcc(emitted: Path, tmp_path: Path) -> None:
    def commands(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(tmp_path), **variables}
        command = [str(shutil.which("make")), "-n", "fwd_d128_bf16_causal_gqa1.cubin"]
        return subprocess.run(command, cwd=emitted, env=environment, capture_output=True, text=True, check=False)

    none = commands()
    assert none.returncode != 0
    assert "nvcc was not found" in none.stderr
    assert commands(CUDA_HOME="/opt/cuda").stdout.startswith("/opt/cuda/bin/nvcc -std=c++17 -O3 -cubin -arch=sm_80 ")
    assert commands(NVCC="/x/nvcc", ARCH="sm_90").stdout.startswith("/x/nvcc -std=c++17 -O3 -cubin -arch=sm_90 ")
    (tmp_path / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "nvcc").chmod(0o755)
    (tmp_path / "sh").symlink_to(str(shutil.which("sh")))
    assert commands(CUDA_HOME="/opt/cuda").stdout.startswith(f"{tmp_path}/nvcc ")


def test_make_needs_no_driver(emitted: Path, tmp_path: Path) -> None:
    """Where there is no libcuda, make builds the kernels, and make run says what is missing."""
    out = tmp_path / "out"
    shutil.copytree(emitted, out)
    nvcc, cxx = tmp_path / "nvcc", tmp_path / "cxx"
    nvcc.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo cubin > "$2"\n')
    # A compiler that finds nothing but the library that is named.
    cxx.write_text('#!/bin/sh\ncase " $* " in *" $FOUND "*) ;; *) echo cannot find >&2; exit 1; esac\n')
    for program in (nvcc, cxx):
        program.chmod(0o755)

    def make(*arguments: str, found: str = "-lnothing") -> subprocess.CompletedProcess[str]:
        command = ["make", *arguments, f"NVCC={nvcc}", f"CXX={cxx}", "CUDA_HOME=/cuda"]
        # Not those of a make that runs the tests.
        environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        environment["FOUND"] = found
        return subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, check=False)

    done = make()
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.stem for path in out.glob("*.cubin")} == {path.stem for path in out.glob("*.cu")}
    lost = make("run")
    assert lost.returncode != 0
    assert "libcuda was not found, which comes with the NVIDIA driver" in lost.stderr
    assert make("attention", found="-lcuda").stdout.rstrip().endswith("-L/cuda/lib/stubs -lcuda")
    # All that some drivers install.
    assert make("attention", found="-l:libcuda.so.1").stdout.rstrip().endswith(" -l:libcuda.so.1")


def test_example_is_formatted(emitted: Path) -> None:
    require_formatted(emitted / "main.cpp")


def test_readme_names_every_kernel(emitted: Path, manifest: dict[str, Any]) -> None:
    text = (emitted / "README.md").read_text()
    for kernel in manifest["kernels"]:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{kernel['file']}`"))
        numbers = [kernel["spec"]["head_dim"], kernel["launch"]["block"][0], kernel["launch"]["dynamic_smem_bytes"]]
        assert all(f"| {number} |" in row for number in numbers), row


def test_one_file_per_kernel(emitted: Path, manifest: dict[str, Any]) -> None:
    names = {f"fwd_d128_{dtype}_causal_gqa{ratio}.cu" for dtype in ("fp16", "bf16") for ratio in (1, 7)}
    assert {kernel["file"] for kernel in manifest["kernels"]} == names
    assert {path.name for path in emitted.iterdir()} == names | set(EXTRA_FILES)


def test_kernels_include_nothing(emitted: Path) -> None:
    for path in emitted.glob("*.cu"):
        assert "#include" not in path.read_text()


def test_nvcc_compiles_a_file_alone(emitted: Path, cuda_include: Path, tmp_path: Path) -> None:
    name = "fwd_d128_bf16_causal_gqa7.cu"
    shutil.copy(emitted / name, tmp_path)
    done = subprocess.run(
        [find_nvcc().path, "-cubin", "-arch=sm_80", name], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), "a warning in somebody else's build"
    cubin = (tmp_path / name).with_suffix(".cubin").read_bytes()
    assert cubin.startswith(b"\x7fELF")


def test_manifest_describes_the_files(emitted: Path, manifest: dict[str, Any]) -> None:
    assert manifest["target"] == "sm_80"
    for kernel in manifest["kernels"]:
        text = (emitted / kernel["file"]).read_text()
        assert re.search(rf"__global__[^;{{]*\b{kernel['entry']}\(", text)
        assert kernel["template_hash"] == template_hash("fwd", kernel["config"]["family"])
        fields = kernel["parameters"]["fields"]
        assert [field["name"] for field in fields] == [field.name for field in FWD_PARAMS.fields]
        assert [field["name"] for field in fields[: len(POINTERS)]] == list(POINTERS)
        # The end is padded to a multiple of 8.
        assert -(-(fields[-1]["offset"] + 4) // 8) * 8 == kernel["parameters"]["bytes"] == FWD_PARAMS.size
        KernelSpec.from_canonical(kernel["spec"])
        FwdConfig.from_canonical(kernel["config"])


@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        (96, "sm80_32x32s32_w2_st2_qs_guarded_mb1_pb_ring_pack"),
        (128, "sm80_64x32s32_w4_st2_qs_guarded_mb1_wn2"),
    ],
)
def test_example_of_other_configs(head_dim: int, config: str, cuda_include: Path, tmp_path: Path) -> None:
    """Packed heads, panels of 32 columns, several query blocks to a head under a causal mask."""
    spec = KernelSpec(head_dim=head_dim, causal=True, gqa_ratio=7)
    emit([spec], get_gpu("h100"), tmp_path / "out", config=FwdConfig.from_slug(config))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    example = built(tmp_path / "out", cuda_include, tmp_path / "example")
    launches = launched(example, manifest)
    test_example_launches_what_fa2gen_would(manifest, launches)
    test_manifest_grid_rule(manifest, launches)
    assert run_example(example, 33, 70, 2, 1, stub="right").returncode == 0


def test_example_launches_what_fa2gen_would(manifest: dict[str, Any], launches: list[list[str]]) -> None:
    assert len(launches) == len(manifest["kernels"])
    for words, kernel in zip(launches, manifest["kernels"], strict=True):
        spec, config = KernelSpec.from_canonical(kernel["spec"]), FwdConfig.from_canonical(kernel["config"])
        heads_q = NUM_HEADS_K * spec.gqa_ratio
        d = spec.head_dim
        of_q = (SEQLEN_Q * heads_q * d, heads_q * d, d)
        of_k = (SEQLEN_K * NUM_HEADS_K * d, NUM_HEADS_K * d, d)
        plan = fwd_plan(
            spec,
            config,
            Problem(BATCH, SEQLEN_Q, SEQLEN_K, heads_q, NUM_HEADS_K),
            strides={"q": of_q, "k": of_k, "v": of_k, "o": of_q},
            softmax_scale=1 / math.sqrt(d),
            l2_bytes=2**40,  # the example keeps all heads in one section
            num_sms=132,
        )
        (launch,) = plan.launches
        entry, *numbers, params = words
        assert entry == kernel["entry"]
        assert [int(n) for n in numbers] == [
            *launch.grid, launch.num_threads, 1, 1, launch.smem_bytes, launch.smem_bytes,
        ]  # fmt: skip
        given = struct.unpack(FWD_PARAMS.format, bytes.fromhex(params))
        expected = struct.unpack(FWD_PARAMS.format, launch.params)
        pointers = dict(zip(POINTERS, given, strict=False))
        assert all(pointers[name] for name in ("q", "k", "v", "o", "softmax_lse"))
        assert pointers["repairs"] == 0
        assert given[len(POINTERS) :] == expected[len(POINTERS) :]


def test_manifest_grid_rule(manifest: dict[str, Any], launches: list[list[str]]) -> None:
    for words, kernel in zip(launches, manifest["kernels"], strict=True):
        sizes = {"seqlen_q": SEQLEN_Q, "batch": BATCH, "num_heads": NUM_HEADS_K * kernel["spec"]["gqa_ratio"]}
        grid = [eval(rule, {"ceil": math.ceil, **sizes}) for rule in kernel["launch"]["grid"]]
        assert grid == [int(n) for n in words[1:4]]
        assert kernel["launch"]["block"] == [int(n) for n in words[4:7]]
        assert kernel["launch"]["dynamic_smem_bytes"] == int(words[7])


def test_emit_again_replaces(emitted: Path) -> None:
    path = emitted / "fwd_d128_bf16_causal_gqa1.cu"
    text = path.read_text()
    path.write_text("old")
    arguments = ["emit", "--headdim", "128", "--causal", "--dtype", "bf16", "--gpu", "a100", "-o", str(emitted)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert path.read_text() == text
