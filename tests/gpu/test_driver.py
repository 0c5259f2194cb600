"""Loading and launching on a real GPU: streams, threads, graphs, errors, exit."""

from __future__ import annotations

import dataclasses
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fa2gen import driver  # noqa: E402
from fa2gen.codegen import KernelSource  # noqa: E402
from fa2gen.compile import CompiledKernel, compile_kernel  # noqa: E402
from fa2gen.driver import LoadedKernel  # noqa: E402
from fa2gen.errors import ArgumentError, LaunchError  # noqa: E402
from fa2gen.spec import FwdConfig, KernelSpec  # noqa: E402

THREADS = 128
SMEM = 60_000  # above 48 KB: refused unless the limit was raised

# out[i] = out[i] * scale + i for i < n, through shared memory's far end; `spins` makes it slow.
TEXT = """
struct Params { float* out; int n; float scale; long long spins; };
extern "C" __global__ void __launch_bounds__(128) affine(const __grid_constant__ Params p) {
  extern __shared__ float staged[];
  long long start = clock64();
  while (clock64() - start < p.spins) {}
  int i = blockIdx.x * 128 + threadIdx.x;
  float* mine = staged + 14800 + threadIdx.x;
  if (i < p.n) *mine = p.out[i] * p.scale + i;
  asm volatile("bar.sync 0;" ::: "memory");
  if (i < p.n) p.out[i] = *mine;
}
"""
SOURCE = KernelSource(KernelSpec(), FwdConfig(), "fwd", "cuda", TEXT, TEXT, "affine", THREADS, SMEM)


def compiled_here(index: int = 0) -> CompiledKernel:
    major, minor = driver.device_info(index).compute_capability
    return compile_kernel(SOURCE, f"sm_{major}{minor}")


@pytest.fixture(scope="module")
def kernel() -> LoadedKernel:
    return driver.load(compiled_here(), 0)


def launch(kernel: LoadedKernel, out: torch.Tensor, scale: float, *, stream: int | None = None, spins: int = 0) -> None:
    """On torch's current stream unless one is given."""
    if stream is None:
        stream = torch.cuda.current_stream().cuda_stream
    params = struct.pack("Pifq", out.data_ptr(), out.numel(), scale, spins)
    kernel.launch(((out.numel() + THREADS - 1) // THREADS, 1, 1), (THREADS, 1, 1), params, stream)


def ramp(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32, device="cuda")


@pytest.mark.parametrize("n", [1, 127, 128, 1025, 100_003])
def test_launch_on_the_default_stream(kernel: LoadedKernel, n: int) -> None:
    guarded = torch.full((n + 64,), float("nan"), device="cuda")
    out = guarded[32 : 32 + n]
    out.fill_(2.0)
    launch(kernel, out, 3.0)
    assert torch.equal(out, ramp(n) + 6)
    assert guarded[:32].isnan().all()
    assert guarded[32 + n :].isnan().all()


def test_default_stream_keeps_torchs_order(kernel: LoadedKernel) -> None:
    out = torch.zeros(1025, device="cuda")
    expected = torch.zeros(1025, device="cuda", dtype=torch.float64)
    for _ in range(5):
        out += 1
        launch(kernel, out, 0.5, spins=2_000_000)
        expected = (expected + 1) * 0.5 + ramp(1025)
    assert torch.allclose(out.double(), expected, rtol=1e-6)


def test_side_stream_waits_for_nothing_but_its_own(kernel: LoadedKernel) -> None:
    side, out = torch.cuda.Stream(), torch.full((1025,), float("nan"), device="cuda")
    slow = torch.zeros(128, device="cuda")
    torch.cuda.synchronize()
    launch(kernel, slow, 1.0, stream=0, spins=4_000_000_000)  # 2 s on the default stream
    with torch.cuda.stream(side):
        out.fill_(1.0)
        launch(kernel, out, 2.0)
        done = torch.cuda.Event()
        done.record()
    deadline = time.monotonic() + 1
    while not done.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    finished_first = done.query() and not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    assert finished_first, "the launch went to the default stream"
    assert torch.equal(out, ramp(1025) + 2)


def test_side_stream_keeps_its_order(kernel: LoadedKernel) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = torch.zeros(1025, device="cuda")
        for step in range(1, 4):
            launch(kernel, out, 0.0, spins=20_000_000)
            out *= step
    side.synchronize()
    assert torch.equal(out, ramp(1025) * 3)


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_special_stream_handles(kernel: LoadedKernel, handle: int) -> None:
    out = torch.ones(1025, device="cuda")
    torch.cuda.synchronize()
    launch(kernel, out, 5.0, stream=handle)
    torch.cuda.synchronize()
    assert torch.equal(out, ramp(1025) + 5)


@pytest.mark.parametrize("side", [False, True])
def test_threads_without_a_context(kernel: LoadedKernel, side: bool) -> None:
    outs = [torch.ones(1025, device="cuda") for _ in range(8)]
    streams = [torch.cuda.Stream().cuda_stream if side else 0 for _ in outs]
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(out: torch.Tensor, stream: int) -> None:
        try:
            for _ in range(50):
                launch(kernel, out, 1.0, stream=stream)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(outs, streams, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    for out in outs:
        assert torch.equal(out, ramp(1025) * 50 + 1)


def test_autograds_thread(kernel: LoadedKernel) -> None:
    class Affine(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: object, grad: torch.Tensor) -> torch.Tensor:
            grad = grad.contiguous().clone()
            launch(kernel, grad, 2.0)
            return grad

    x = torch.zeros(1025, device="cuda", requires_grad=True)
    Affine.apply(x).backward(torch.ones(1025, device="cuda"))
    assert torch.equal(x.grad, ramp(1025) + 2)


def test_graph_capture_and_replay(kernel: LoadedKernel) -> None:
    out = torch.ones(1025, device="cuda")
    fresh = driver.load(compiled_here(), 0)  # never launched before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out += 1
        launch(kernel, out, 2.0)
        launch(fresh, out, 1.0)
    assert torch.equal(out, torch.ones(1025, device="cuda")), "capturing runs nothing"
    expected = torch.ones(1025, device="cuda")
    for _ in range(3):
        graph.replay()
        expected = (expected + 1) * 2 + ramp(1025) * 2
    assert torch.equal(out, expected)
    del graph
    torch.cuda.synchronize()
    fresh.unload()


def test_occupancy_by_the_driver(kernel: LoadedKernel) -> None:
    properties = torch.cuda.get_device_properties(0)
    by_smem = properties.shared_memory_per_multiprocessor // (SMEM + 1024)
    assert kernel.blocks_per_sm() == by_smem


def test_device_info_agrees_with_torch() -> None:
    info, properties = driver.device_info(0), torch.cuda.get_device_properties(0)
    assert info.name == properties.name
    assert info.compute_capability == (properties.major, properties.minor)
    assert info.num_sms == properties.multi_processor_count
    assert info.l2_bytes == properties.L2_cache_size
    assert info.max_smem_per_block == properties.shared_memory_per_block_optin
    assert info.cuda_version >= (11, 8)
    with pytest.raises(ArgumentError, match="device_index must be 0 to"):
        driver.device_info(driver.device_count())


def test_refused_launches_name_the_kernel_and_do_no_harm(kernel: LoadedKernel) -> None:
    params = struct.pack("Pifq", 0, 0, 0.0, 0)
    for stream in (0, torch.cuda.Stream().cuda_stream):
        with pytest.raises(LaunchError, match=r"kernel affine on device 0 cannot be launched: .*invalid"):
            kernel.launch((1, 1, 1), (2048, 1, 1), params, stream)
        with pytest.raises(LaunchError, match=r"affine"):
            kernel.launch((1, 70_000, 1), (THREADS, 1, 1), params, stream)
    out = torch.ones(1025, device="cuda")
    launch(kernel, out, 1.0)
    assert torch.equal(out, ramp(1025) + 1)


def test_cubin_of_another_architecture_or_damaged(kernel: LoadedKernel) -> None:
    compiled = kernel.compiled
    with pytest.raises(LaunchError, match="compiled for sm_999"):
        driver.load(dataclasses.replace(compiled, target="sm_999"), 0)
    with pytest.raises(LaunchError, match="cannot load kernel affine on device 0"):
        driver.load(dataclasses.replace(compiled, cubin=b"damaged" + bytes(1000)), 0)
    renamed = dataclasses.replace(compiled.source, entry="other")
    with pytest.raises(LaunchError, match="cannot load kernel other"):
        driver.load(dataclasses.replace(compiled, source=renamed), 0)
    greedy = dataclasses.replace(compiled.source, smem_bytes=10**6)
    with pytest.raises(LaunchError, match="1000000 bytes of shared memory"):
        driver.load(dataclasses.replace(compiled, source=greedy), 0)


def test_unloaded_kernel_refuses() -> None:
    loaded = driver.load(compiled_here(), 0)
    loaded.unload()
    for stream in (0, torch.cuda.Stream().cuda_stream):
        with pytest.raises(LaunchError, match="unloaded"):
            launch(loaded, torch.ones(1, device="cuda"), 1.0, stream=stream)


def test_second_device(kernel: LoadedKernel) -> None:
    if driver.device_count() < 2:
        pytest.skip("one device only")
    second = driver.load(compiled_here(1), 1)
    assert torch.cuda.current_device() == 0
    out = torch.ones(1025, device="cuda:1")
    torch.cuda.synchronize(1)
    for stream in (0, torch.cuda.Stream(device=1).cuda_stream):
        launch(second, out, 1.0, stream=stream)
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), torch.arange(1025) * 2 + 1)


def run_child(code: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).resolve()
    prelude = f"import sys; sys.path[:0] = [{str(here.parents[2])!r}, {str(here.parent)!r}]\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=300, check=False
    )


def test_failed_kernel_is_reported_as_fatal() -> None:
    done = run_child(
        """
import struct, torch, test_driver
from fa2gen import driver
from fa2gen.errors import LaunchError
kernel = driver.load(test_driver.compiled_here(), 0)
out = torch.ones(128, device="cuda")
bad = struct.pack("Pifq", 8, 128, 1.0, 0)
kernel.launch((1, 1, 1), (128, 1, 1), bad, 0)
try: torch.cuda.synchronize()
except RuntimeError: pass
for stream in (0, 2):
    try: test_driver.launch(kernel, out, 1.0, stream=stream)
    except LaunchError as error: print(error)
import os; sys.stdout.flush(); os._exit(0)
"""
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "affine" in line
        assert "illegal memory access" in line
        assert "start it again" in line


def test_process_without_torch_and_clean_exit() -> None:
    done = run_child(
        """
import struct, threading
from fa2gen import driver
assert driver.unavailable_reason() is None
assert "torch" not in sys.modules
import test_driver  # imports torch, which is not yet initialised
compiled = test_driver.compiled_here()
loaded = []
thread = threading.Thread(target=lambda: loaded.append(driver.load(compiled, 0)))
thread.start(); thread.join()
loaded.append(driver.load(compiled, 0))
empty = struct.pack("Pifq", 0, 0, 0.0, 0)
for kernel in loaded:
    kernel.launch((1, 1, 1), (128, 1, 1), empty, 0)
import torch
assert not torch.cuda.is_initialized()
out = torch.ones(1025, device="cuda")
for kernel in loaded:
    test_driver.launch(kernel, out, 1.0)
assert torch.equal(out, torch.arange(1025, device="cuda") * 2.0 + 1)
print("done")
"""
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    # PyCUDA speaks up about a context left on its stack, and about modules that it cannot unload.
    assert "PyCUDA" not in done.stderr
    assert "cleaned up" not in done.stderr
