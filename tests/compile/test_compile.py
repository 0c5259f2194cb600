"""Real compilations of a small kernel that includes nothing."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fa2gen.codegen import KernelSource, render_kernel
from fa2gen.compile import (
    CompiledKernel,
    CubinCache,
    Nvcc,
    compile_kernel,
    compile_many,
    find_nvcc,
    invoke,
)
from fa2gen.constraints_sm90 import compile_target
from fa2gen.errors import ArgumentError, CompileError, ToolchainError
from fa2gen.spec import FwdConfig, FwdSm90Config, KernelSpec

pytestmark = pytest.mark.nvcc

# 3 is a number that the text can be varied with.
BODY = """
struct Params { float* out; int n; };
extern "C" __global__ void __launch_bounds__(128) small(const __grid_constant__ Params p) {
  extern __shared__ float staged[];
  int i = blockIdx.x * 128 + threadIdx.x;
  staged[threadIdx.x] = 3.0f * i;
  asm volatile("bar.sync 0;" ::: "memory");
  if (i < p.n) p.out[i] = staged[127 - threadIdx.x];
}
"""


def source_of(text: str = BODY, entry: str = "small") -> KernelSource:
    return KernelSource(KernelSpec(), FwdConfig(), "fwd", "cuda", text, text, entry, 128, 512)


def variants(count: int) -> list[KernelSource]:
    return [source_of(BODY.replace("3.0f", f"{number}.5f")) for number in range(count)]


@pytest.fixture(scope="module")
def nvcc() -> Nvcc:
    try:
        return find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path)


@pytest.fixture
def unusable_nvcc(tmp_path: Path, nvcc: Nvcc) -> Nvcc:
    """Says that it is the real one, and fails when run: a compilation shows."""
    return dataclasses.replace(nvcc, path=tmp_path / "must-not-run")


def test_compiles_and_reports_resources(nvcc: Nvcc, cache: CubinCache) -> None:
    compiled = compile_kernel(source_of(), "sm_80", cache=cache)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert b"small" in compiled.cubin
    assert not compiled.from_cache
    assert 0 < compiled.build_seconds < 60
    assert compiled.nvcc_build_id == nvcc.build_id
    assert 4 <= compiled.resources.registers <= 32
    assert not compiled.resources.spills
    assert compiled.resources.barriers == 1
    assert "Compiling entry function 'small' for 'sm_80'" in compiled.log


def test_cached_kernel_needs_no_nvcc_and_little_time(nvcc: Nvcc, cache: CubinCache, unusable_nvcc: Nvcc) -> None:
    first = compile_kernel(source_of(), "sm_80", cache=cache)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        again = compile_kernel(source_of(), "sm_80", cache=CubinCache(cache.root), nvcc=unusable_nvcc)
        seconds.append(time.perf_counter() - start)
        assert again == dataclasses.replace(first, from_cache=True, build_seconds=again.build_seconds)
    assert min(seconds) < 0.03
    assert compile_kernel(source_of(), "sm_90", cache=cache).key != first.key


def test_warm_process_starts_no_program(nvcc: Nvcc, tmp_path: Path) -> None:
    # In a process of its own, with a PATH on which only nvcc itself is found: a started program would fail.
    code = (
        "import sys, subprocess; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "import test_compile; from fa2gen.compile import compile_kernel\n"
        "if sys.argv[3] == 'warm': subprocess.Popen = None\n"
        "print(compile_kernel(test_compile.source_of(), 'sm_80').from_cache)\n"
    )
    here = Path(__file__).resolve()
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code, str(here.parents[2]), str(here.parent), temperature],
            env={**os.environ, "FA2GEN_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for temperature in ("cold", "warm")
    ]
    assert outputs == ["False\n", "True\n"]


def test_without_nvcc_any_build_of_the_source_is_served(
    nvcc: Nvcc, cache: CubinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_kernel(source_of(), "sm_80", cache=cache)
    monkeypatch.setenv("FA2GEN_NVCC", "/nowhere/nvcc")
    served = compile_kernel(source_of(), "sm_80", cache=cache)
    assert served == dataclasses.replace(first, from_cache=True, build_seconds=served.build_seconds)
    with pytest.raises(ToolchainError, match="FA2GEN_NVCC"):
        compile_kernel(source_of(), "sm_90", cache=cache)


def test_too_old_nvcc_is_as_good_as_none(nvcc: Nvcc, cache: CubinCache) -> None:
    old = dataclasses.replace(nvcc, version=(11, 4, 0), build_id="old")
    with pytest.raises(ToolchainError, match=r"needs CUDA 11\.8"):
        compile_kernel(source_of(), "sm_80", nvcc=old, cache=cache)
    compile_kernel(source_of(), "sm_80", cache=cache)
    assert compile_kernel(source_of(), "sm_80", nvcc=old, cache=cache).from_cache


def test_refused_source_shows_the_complaint_and_the_log(nvcc: Nvcc, cache: CubinCache) -> None:
    with pytest.raises(CompileError, match=r'failed for sm_80.*identifier "undefined_name" is undefined') as raised:
        compile_kernel(source_of(BODY.replace("3.0f", "undefined_name")), "sm_80", cache=cache)
    assert "1 error detected" in raised.value.log
    assert cache.root is not None
    assert not list(cache.root.glob("kernels/*/*"))


def test_wrong_entry_name_and_platform(nvcc: Nvcc, cache: CubinCache) -> None:
    with pytest.raises(CompileError, match=r"kernel large .kernels in its output: small"):
        compile_kernel(source_of(entry="large"), "sm_80", cache=cache)
    with pytest.raises(ArgumentError, match="platform 'cuda', got 'host'"):
        compile_kernel(dataclasses.replace(source_of(), platform="host"), "sm_80", cache=cache)


def test_no_host_compiler_is_a_toolchain_error(nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    if shutil.which("gcc", path=f"{nvcc.root}/bin"):
        pytest.skip("gcc lies beside nvcc")
    real = dataclasses.replace(nvcc, path=(nvcc.root or nvcc.path.parents[1]) / "bin" / "nvcc")
    with pytest.raises(ToolchainError, match="no host compiler"):
        invoke.run_nvcc(BODY, "sm_80", real)


def test_many_kernels_some_bad(nvcc: Nvcc, cache: CubinCache) -> None:
    good = variants(2)
    jobs = [(good[0], "sm_80"), (source_of("nonsense"), "sm_80"), (good[1], "sm_80"), (good[0], "sm_80")]
    done: dict[int, object] = {}
    results = compile_many(jobs, cache=cache, on_done=lambda index, result: done.update({index: result}))
    assert [done[index] for index in range(4)] == results
    first, bad, second, same = results
    assert isinstance(bad, CompileError)
    assert "nonsense" in bad.log
    assert isinstance(first, CompiledKernel)
    assert isinstance(second, CompiledKernel)
    assert first.cubin != second.cubin
    assert same == first, "compiled once"
    assert compile_many([], cache=cache) == []
    with pytest.raises(ArgumentError, match="workers"):
        compile_many(jobs, workers=0)


@pytest.fixture
def sleeping_nvcc(tmp_path: Path, nvcc: Nvcc) -> Nvcc:
    """Starts a program of its own, as nvcc does, and waits for it for a minute."""
    script = tmp_path / "nvcc"
    script.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nsleep 60 &\necho $! >> {tmp_path}/pids\nwait\n")
    script.chmod(0o755)
    return dataclasses.replace(nvcc, path=script)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_interrupt_ends_every_process(tmp_path: Path, cache: CubinCache, sleeping_nvcc: Nvcc) -> None:
    def interrupt(pids: Path) -> None:
        while not pids.exists() or len(pids.read_text().split()) < 4:
            time.sleep(0.02)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt, args=(tmp_path / "pids",))
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_many([(source, "sm_80") for source in variants(5)], workers=2, nvcc=sleeping_nvcc, cache=cache)
    thread.join()
    assert time.monotonic() - start < 20
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4, "the three jobs that waited never started"
    deadline = time.monotonic() + 5
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_alive, pids))


def test_hanging_compiler_is_stopped(
    tmp_path: Path, cache: CubinCache, sleeping_nvcc: Nvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invoke, "TIMEOUT_SECONDS", 0.5)
    (result,) = compile_many([(source_of(), "sm_80")], nvcc=sleeping_nvcc, cache=cache)
    assert isinstance(result, CompileError)
    assert "took longer than" in str(result)


# ---- PyCUDA

_BOTH_WAYS = """
import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]
import test_compile
from fa2gen.compile import find_nvcc, invoke, parse_ptxas
from fa2gen.errors import CompileError
nvcc = find_nvcc()
by_pycuda = invoke.run_pycuda(test_compile.BODY, "sm_80", nvcc)
assert by_pycuda is not None, "PyCUDA did not serve"
by_nvcc = invoke.run_nvcc(test_compile.BODY, "sm_80", nvcc)
assert by_pycuda[0] == by_nvcc[0], "the cubins differ"
assert parse_ptxas(by_pycuda[1], "small") == parse_ptxas(by_nvcc[1], "small")
try:
    invoke.run_pycuda("nonsense", "sm_80", nvcc)
except CompileError as error:
    assert "nonsense" in error.log, error.log
else:
    raise AssertionError("compiled nonsense")
print("equal")
"""


def _fake_libcuda(folder: Path) -> None:
    """A libcuda.so.1 whose functions do nothing, so that PyCUDA imports on a machine without a driver."""
    import importlib.util

    spec = importlib.util.find_spec("pycuda._driver")
    assert spec is not None
    assert spec.origin is not None
    listing = subprocess.run(["nm", "-D", "--undefined-only", spec.origin], capture_output=True, text=True, check=True)
    symbols = {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()}
    names = sorted(name for name in symbols if name.startswith("cu") and not name.startswith("curand"))
    stub = folder / "libcuda.c"
    stub.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(stub), "-o", str(library)], check=True, timeout=60
    )


def test_pycuda_makes_the_same_bytes(nvcc: Nvcc, tmp_path: Path) -> None:
    import importlib.util

    if importlib.util.find_spec("pycuda") is None:
        pytest.skip("PyCUDA is not installed")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    probe = [sys.executable, "-c", "import pycuda.driver"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        if not shutil.which("gcc") or not shutil.which("nm"):
            pytest.skip("PyCUDA finds no libcuda, and making a stand-in needs gcc and nm")
        (tmp_path / "stub").mkdir()
        _fake_libcuda(tmp_path / "stub")
        environment["LD_LIBRARY_PATH"] = f"{tmp_path}/stub:{os.environ.get('LD_LIBRARY_PATH', '')}"
        imported = subprocess.run(probe, capture_output=True, text=True, env=environment, check=False)
        if imported.returncode != 0:
            pytest.skip(f"PyCUDA does not import: {imported.stderr.strip().splitlines()[-1]}")
    here = Path(__file__).resolve()
    done = subprocess.run(
        [sys.executable, "-c", _BOTH_WAYS, str(here.parents[2]), str(here.parent)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
    left = [path.name for path in tmp_path.iterdir() if path.name != "stub"]
    assert left == [], "temporary folders of PyCUDA, which leaves those of failed compilations"


def test_a_kernel_whose_products_ptxas_serialized_is_refused(tmp_path: Path) -> None:
    """192 rows of 96 keys at head dim 128 leave a consumer no register; 80 keys leave it twelve."""
    spec, cache = KernelSpec(), CubinCache(tmp_path)
    good, bad = (FwdSm90Config(block_m=192, block_n=block_n) for block_n in (80, 96))
    compiled = compile_kernel(render_kernel(spec, good), compile_target(good, "sm_90"), cache=cache)
    assert (compiled.target, compiled.resources.registers, compiled.resources.spills) == ("sm_90a", 128, False)
    with pytest.raises(CompileError, match=r"gave up on .*192x96.* serialized due to"):
        compile_kernel(render_kernel(spec, bad), compile_target(bad, "sm_90"), cache=cache)
