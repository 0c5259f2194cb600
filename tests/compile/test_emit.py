"""``fa2gen emit``: every file compiles alone, and the C++ example makes exactly the launch that fa2gen would."""

from __future__ import annotations

import json
import math
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
from fa2gen.emulator import find_host_compiler
from fa2gen.errors import ToolchainError
from fa2gen.launch import POINTERS, fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec

# Odd on purpose; 3 batches of 2 key/value heads.
SEQLEN_Q, SEQLEN_K, BATCH, NUM_HEADS_K = 113, 203, 3, 2

# Enough of the driver for main.cpp to run without a GPU: memory is malloc's, a launch writes down what it was given.
STUB_DRIVER = r"""
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
CUresult cuInit(unsigned f) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice d) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult r, const char** s) { *s = "stub"; return CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* p, size_t n) { *p = (CUdeviceptr)malloc(n); return CUDA_SUCCESS; }
CUresult cuMemFree(CUdeviceptr p) { free((void*)p); return CUDA_SUCCESS; }
CUresult cuMemcpyHtoD(CUdeviceptr d, const void* s, size_t n) { memcpy((void*)d, s, n); return CUDA_SUCCESS; }
CUresult cuMemcpyDtoH(void* d, CUdeviceptr s, size_t n) { memcpy(d, (void*)s, n); return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule* m, const void* image) { *m = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  *f = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}
static int max_smem;
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { max_smem = v; return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned smem, CUstream s, void** arguments, void** extra) {
  FILE* file = fopen("launches.txt", "a");
  fprintf(file, "%s %u %u %u %u %u %u %u %d ", (char*)f, gx, gy, gz, bx, by, bz, smem, max_smem);
  for (int i = 0; i < PARAMS_BYTES; i++) fprintf(file, "%02x", ((unsigned char*)arguments[0])[i]);
  fprintf(file, "\n");
  fclose(file);
  return CUDA_SUCCESS;
}
"""


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
def cuda_include() -> Path:
    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    roots = [root for root in (nvcc.root, nvcc.path.resolve().parents[1]) if root]
    for folder in (root / "include" for root in roots):
        if (folder / "cuda.h").is_file():
            return folder
    pytest.skip("no cuda.h beside nvcc")


@pytest.fixture(scope="module")
def launches(emitted: Path, manifest: dict[str, Any], cuda_include: Path, tmp_path_factory: Any) -> list[list[str]]:
    """What main.cpp launched against the stub driver: one list of words per kernel."""
    build = shutil.copytree(emitted, tmp_path_factory.mktemp("example") / "out")
    (build / "stub.c").write_text(STUB_DRIVER)
    subprocess.run(
        [shutil.which("gcc") or "cc", "-shared", "-fPIC", "-w", f"-I{cuda_include}"]
        + [f"-DPARAMS_BYTES={FWD_PARAMS.size}", "stub.c", "-o", "libcuda.so"],
        cwd=build, check=True, timeout=120,
    )  # fmt: skip
    # The folder's own Makefile finds cuda.h by itself.
    subprocess.run(
        ["make", "attention", f"NVCC={find_nvcc().path}", f"CXX={find_host_compiler()}"]
        + ["CXXFLAGS=-O1 -Wall -Wextra -Werror", "LDFLAGS=-L. -Wl,-rpath,'$$ORIGIN'"],
        cwd=build, check=True, timeout=240,
    )  # fmt: skip
    for kernel in manifest["kernels"]:
        (build / Path(kernel["file"]).with_suffix(".cubin").name).write_bytes(b"stub")
    done = subprocess.run(
        ["./attention", *map(str, (SEQLEN_Q, SEQLEN_K, BATCH, NUM_HEADS_K))],
        cwd=build, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    # The stub computes nothing, and the program must see that: the output keeps its NaN.
    assert done.returncode == 1
    assert done.stdout.count("WRONG") == len(manifest["kernels"])
    return [line.split() for line in (build / "launches.txt").read_text().splitlines()]


def test_one_file_per_kernel(emitted: Path, manifest: dict[str, Any]) -> None:
    names = {f"fwd_d128_{dtype}_causal_gqa{ratio}.cu" for dtype in ("fp16", "bf16") for ratio in (1, 7)}
    assert {kernel["file"] for kernel in manifest["kernels"]} == names
    assert {path.name for path in emitted.iterdir()} == names | {"manifest.json", "main.cpp", "Makefile"}


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
        assert re.search(rf"__global__ void .*\b{kernel['entry']}\(", text)
        assert kernel["template_hash"] == template_hash("fwd", kernel["config"]["family"])
        fields = kernel["parameters"]["fields"]
        assert [field["name"] for field in fields] == [field.name for field in FWD_PARAMS.fields]
        assert [field["name"] for field in fields[: len(POINTERS)]] == list(POINTERS)
        assert fields[-1]["offset"] + 4 == kernel["parameters"]["bytes"] == FWD_PARAMS.size
        KernelSpec.from_canonical(kernel["spec"])
        FwdConfig.from_canonical(kernel["config"])


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
        assert all(pointers[name] for name in ("q", "k", "v", "o", "lse"))
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
