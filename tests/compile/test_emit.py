"""``fa2gen emit``: every file compiles alone, and the C++ example makes exactly the launch that fa2gen would."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa2gen.cli import main
from fa2gen.codegen import FWD_PARAMS, template_hash
from fa2gen.compile.nvcc import find_nvcc
from fa2gen.emit import EXTRA_FILES, emit
from fa2gen.emulator import find_host_compiler
from fa2gen.errors import ToolchainError
from fa2gen.hardware import get_gpu
from fa2gen.launch import POINTERS, fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec

# Odd on purpose; 3 batches of 2 key/value heads.
SEQLEN_Q, SEQLEN_K, BATCH, NUM_HEADS_K = 67, 35, 3, 2

# Enough of the driver for main.cpp to run without a GPU: memory is malloc's. A launch writes down what it was given,
# and by the variable STUB does nothing, computes attention ("right") or leaves out every last key ("drops a key"). With
# "no GPU", "other chip" and "small chip" it never comes to a launch.
STUB_DRIVER = r"""
#include <cuda.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int stub_is(const char* name) { return getenv("STUB") && !strcmp(getenv("STUB"), name); }
CUresult cuInit(unsigned f) { return stub_is("no GPU") ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* n) { *n = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int n, CUdevice d) { snprintf(name, n, "Stub"); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute a, CUdevice d) {
  *value = a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 8
           : a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 9
           : stub_is("small chip")                             ? 1024
                                                               : 101376;
  return CUDA_SUCCESS;
}
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
CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  *m = (CUmodule)1;
  return stub_is("other chip") ? CUDA_ERROR_NO_BINARY_FOR_GPU : CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  *f = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}
static float load(CUdeviceptr p, int64_t i, int bf16) {
  if (!bf16) return (float)((_Float16*)p)[i];
  uint32_t u = (uint32_t)((uint16_t*)p)[i] << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}
static void store(CUdeviceptr p, int64_t i, int bf16, float x) {
  if (!bf16) { ((_Float16*)p)[i] = (_Float16)x; return; }
  uint32_t u;
  memcpy(&u, &x, 4);
  ((uint16_t*)p)[i] = (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static void attend(struct FwdParams p, int bf16, int gqa, int dropped) {
  const int d = p.q_head_stride;
  double *w = malloc(8 * p.seqlen_k), *o = malloc(8 * d);
  for (int b = 0; b < p.batch; b++) for (int h = 0; h < p.num_heads; h++) for (int i = 0; i < p.seqlen_q; i++) {
    int visible = i + 1 + p.seqlen_k - p.seqlen_q;
    visible = (visible < 0 ? 0 : visible) - (visible > dropped ? dropped : 0);
    double sum = 0;
    memset(o, 0, 8 * d);
    for (int j = 0; j < visible; j++) {
      double s = 0;
      for (int c = 0; c < d; c++)
        s += (double)load(p.q, b * p.q_batch_stride + i * p.q_row_stride + h * p.q_head_stride + c, bf16) *
             load(p.k, b * p.k_batch_stride + j * p.k_row_stride + h / gqa * p.k_head_stride + c, bf16);
      sum += w[j] = exp(s * p.softmax_scale);
      for (int c = 0; c < d; c++)
        o[c] += w[j] * load(p.v, b * p.v_batch_stride + j * p.v_row_stride + h / gqa * p.v_head_stride + c, bf16);
    }
    for (int c = 0; c < d; c++)
      store(p.o, b * p.o_batch_stride + i * p.o_row_stride + h * p.o_head_stride + c, bf16, visible ? o[c] / sum : 0);
    ((float*)p.softmax_lse)[(b * p.num_heads + h) * (int64_t)p.seqlen_q + i] = log(sum);
  }
  free(w), free(o);
}
static int max_smem;
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { max_smem = v; return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned smem, CUstream s, void** arguments, void** extra) {
  const char *stub = getenv("STUB"), *name = (char*)f;
  const int gqa = atoi(strstr(name, "gqa") + 3);
  if (stub) attend(*(struct FwdParams*)arguments[0], !!strstr(name, "bf16"), gqa, *stub == 'd');
  FILE* file = fopen("launches.txt", "a");
  fprintf(file, "%s %u %u %u %u %u %u %u %d ", (char*)f, gx, gy, gz, bx, by, bz, smem, max_smem);
  for (int i = 0; i < (int)sizeof(struct FwdParams); i++) fprintf(file, "%02x", ((unsigned char*)arguments[0])[i]);
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
def example(emitted: Path, cuda_include: Path, tmp_path_factory: Any) -> Path:
    return built(emitted, cuda_include, tmp_path_factory.mktemp("example") / "out")


def built(emitted: Path, cuda_include: Path, build: Path) -> Path:
    """A copy of the folder in which main.cpp is built against the stub driver."""
    shutil.copytree(emitted, build)
    (struct_text,) = re.findall(r"struct FwdParams \{.*?\};", (build / "main.cpp").read_text(), re.S)
    (build / "stub.c").write_text(STUB_DRIVER.replace("static float load", f"{struct_text}\nstatic float load", 1))
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", "-O1", f"-I{cuda_include}", "stub.c", "-o", "libcuda.so", "-lm"],
        cwd=build, check=True, timeout=120,
    )  # fmt: skip
    # The folder's own Makefile finds cuda.h by itself.
    subprocess.run(
        ["make", "attention", f"NVCC={find_nvcc().path}", f"CXX={find_host_compiler()}"]
        + ["CXXFLAGS=-O0 -Wall -Wextra -Werror", "LDFLAGS=-L. -Wl,-rpath,'$$ORIGIN'"],
        cwd=build, check=True, timeout=240,
    )  # fmt: skip
    for kernel in build.glob("*.cu"):
        kernel.with_suffix(".cubin").write_bytes(b"stub")
    return build


def run_example(folder: Path, *sizes: int, stub: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"STUB": stub} if stub else {})
    return subprocess.run(
        ["./attention", *map(str, sizes)], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def launches(example: Path, manifest: dict[str, Any]) -> list[list[str]]:
    return launched(example, manifest)


def launched(example: Path, manifest: dict[str, Any]) -> list[list[str]]:
    """What main.cpp launched: one list of words per kernel."""
    (example / "launches.txt").unlink(missing_ok=True)
    done = run_example(example, SEQLEN_Q, SEQLEN_K, BATCH, NUM_HEADS_K)
    # A launch that does nothing must not pass: the output keeps its NaN.
    assert done.returncode == 1
    assert done.stdout.count("WRONG") == len(manifest["kernels"])
    return [line.split() for line in (example / "launches.txt").read_text().splitlines()]


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
    # Beside this interpreter, whose environment need not be the shell's.
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = shutil.which("clang-format", path=folders)
    if program is None:
        pytest.skip("clang-format is not installed; the extra [test] brings it")
    style = Path(__file__).parents[2] / ".clang-format"
    done = subprocess.run(
        [program, f"--style=file:{style}", "--dry-run", "--Werror", str(emitted / "main.cpp")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


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
