"""The driver room against a fake libcuda with two devices: contexts, threads, streams, errors.

PyCUDA is the real one; libcuda is ``fake_libcuda.c``, which refuses what the real one refuses. Everything runs in child
processes, since a process has one libcuda.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the fake libcuda.so.1."""
    if importlib.util.find_spec("pycuda") is None:
        pytest.skip("PyCUDA is not installed")
    if not shutil.which("gcc") or not shutil.which("nm"):
        pytest.skip("making a fake libcuda needs gcc and nm")
    folder = tmp_path_factory.mktemp("libcuda")
    spec = importlib.util.find_spec("pycuda._driver")
    assert spec is not None
    assert spec.origin is not None
    listing = subprocess.run(["nm", "-D", "--undefined-only", spec.origin], capture_output=True, text=True, check=True)
    symbols = {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()}
    bodies = (HERE / "fake_libcuda.c").read_text()
    missing = [
        name for name in sorted(symbols) if name.startswith("cu") and name[2].isupper() and f"int {name}(" not in bodies
    ]
    source = folder / "libcuda.c"
    source.write_text(bodies + "".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", str(source), "-o"]
    subprocess.run([*command, str(folder / "libcuda.so.1")], check=True, timeout=60)
    done = child(folder, "import pycuda.driver")
    if done.returncode != 0:
        pytest.skip(f"PyCUDA does not import: {done.stderr.strip().splitlines()[-1]}")
    return folder


PRELUDE = """
import ctypes, sys, threading
sys.path.insert(0, sys.argv[1])
import pycuda.driver
from fa2gen import driver
from fa2gen.codegen import KernelSource
from fa2gen.compile import CompiledKernel, ResourceUsage
from fa2gen.driver import libcuda
from fa2gen.errors import ArgumentError, LaunchError
from fa2gen.spec import FwdConfig, KernelSpec

fake = ctypes.CDLL("libcuda.so.1")
def number(name): return ctypes.c_int.in_dll(fake, name)
def pointer(name): return ctypes.c_void_p.in_dll(fake, name).value or 0
def triple(name): return tuple((ctypes.c_uint * 3).in_dll(fake, name))
def first_parameter(): return ctypes.c_uint64.in_dll(fake, "fake_first_parameter").value
def in_thread(call):
    result = []
    def run():
        try: result.append(call())
        except BaseException as error: result.append(error)
    thread = threading.Thread(target=run); thread.start(); thread.join()
    if isinstance(result[0], BaseException): raise result[0]
    return result[0]
def raised(kind, call):
    try: call()
    except kind as error: return str(error)
    raise AssertionError("did not raise")
source = KernelSource(KernelSpec(), FwdConfig(), "fwd", "cuda", "", "", "small", 128, 70000)
def compiled(target="sm_80", cubin=b"\\x7fELF" + bytes(60), source=source):
    return CompiledKernel(source, target, cubin, ResourceUsage(1, 0, 0, 0, 0, 0), "k", False, 0.0, "")
PARAMS = (0x1234567800).to_bytes(8, "little") + bytes(56)
assert driver.unavailable_reason() is None, driver.unavailable_reason()
assert fake.fake_depth() == 0
"""


def child(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(HERE.parents[1])],
        env={**os.environ, "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def check_child(folder: Path, code: str) -> None:
    done = child(folder, PRELUDE + code)
    # PyCUDA aborts at exit when a context was left on its stack, and warns when cleaning up fails.
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_device_info(fake_driver: Path) -> None:
    check_child(
        fake_driver,
        """
info = driver.device_info(1)
assert (info.index, info.name, info.compute_capability, info.cuda_version) == (1, "Fake 1", (8, 6), (13, 0))
assert (info.num_sms, info.l2_bytes, info.max_smem_per_block) == (16, 38, 97)  # the attributes' own numbers
assert fake.fake_depth() == 0, "asking makes no context"
assert "device_index must be 0 to 1, got 2" in raised(ArgumentError, lambda: driver.device_info(2))
""",
    )


@pytest.mark.parametrize("stream", [0, 1, 2, 0x7FFF12345678])
def test_launch_passes_everything_on(fake_driver: Path, stream: int) -> None:
    check_child(
        fake_driver,
        f"""
kernel = driver.load(compiled(), 0)
assert number("fake_attribute_value").value == 70000
assert fake.fake_depth() == 0, "loading leaves the thread as it was"
kernel.launch((5, 6, 7), (128, 1, 1), PARAMS, {stream})
assert number("fake_launches").value == 1
assert (triple("fake_grid"), triple("fake_block")) == ((5, 6, 7), (128, 1, 1))
assert ctypes.c_uint.in_dll(fake, "fake_smem").value == 70000
assert pointer("fake_stream") == ({stream} if {stream} > 1 else 0)
assert first_parameter() == 0x1234567800
assert kernel.blocks_per_sm() == 128 + 70000
""",
    )


def test_other_device_is_used_and_the_current_one_restored(fake_driver: Path) -> None:
    check_child(
        fake_driver,
        """
zero, one = (libcuda.primary_context(index) for index in (0, 1))
libcuda.libcuda().cuCtxSetCurrent(zero)
kernels = [driver.load(compiled(), index) for index in (0, 1)]
assert (libcuda.current_context(), fake.fake_depth()) == (zero, 1)
for current in (zero, one):
    libcuda.libcuda().cuCtxSetCurrent(current)  # as torch does
    for stream in (0, 0x5000):
        for kernel, context in zip(kernels, (zero, one)):
            kernel.launch((1, 1, 1), (128, 1, 1), PARAMS, stream)
            assert pointer("fake_context") == context
            assert kernel.blocks_per_sm() > 0
            assert (libcuda.current_context(), fake.fake_depth()) == (current, 1)
assert number("fake_launches").value == 8
""",
    )


def test_loading_keeps_torchs_device_although_pycuda_has_its_own_idea(fake_driver: Path) -> None:
    # A program of PyCUDA's own has device 0 on PyCUDA's stack; torch then made device 1 current.
    check_child(
        fake_driver,
        """
mine = pycuda.driver.Device(0).retain_primary_context()
mine.push()
one = libcuda.primary_context(1)
libcuda.libcuda().cuCtxSetCurrent(one)
kernel = driver.load(compiled(), 1)
assert (libcuda.current_context(), fake.fake_depth()) == (one, 1)
kernel.launch((1, 1, 1), (128, 1, 1), PARAMS)
assert pointer("fake_context") == one
mine.pop()
assert fake.fake_depth() == 0
""",
    )


def test_thread_without_a_context(fake_driver: Path) -> None:
    # A context that PyCUDA pushed in a thread would abort the process when the thread ends.
    check_child(
        fake_driver,
        """
kernel = driver.load(compiled(), 1)
for stream in (0, 0x5000):
    in_thread(lambda: kernel.launch((1, 1, 1), (128, 1, 1), PARAMS, stream))
    assert pointer("fake_context") == libcuda.primary_context(1)
loaded_elsewhere = in_thread(lambda: driver.load(compiled(), 0))
loaded_elsewhere.launch((1, 1, 1), (128, 1, 1), PARAMS)
in_thread(lambda: driver.load(compiled(), 0)).unload()
in_thread(driver.load(compiled(), 0).unload)
assert number("fake_unloads").value == 4
def ensured():
    driver.ensure_context(1); first = libcuda.current_context()
    driver.ensure_context(0); return first, libcuda.current_context(), fake.fake_depth()
assert in_thread(ensured) == (libcuda.primary_context(1), libcuda.primary_context(1), 1)
""",
    )


def test_one_device_needs_no_look_at_the_context(fake_driver: Path) -> None:
    check_child(
        fake_driver,
        """
from fa2gen.driver import kernel as kernel_module
kernel_module.device_count = lambda: 1
kernel = driver.load(compiled(), 0)
looks = []
real = kernel_module.current_context
kernel_module.current_context = lambda: looks.append(1) or real()
def twice():
    for stream in (0, 0x5000):
        kernel.launch((1, 1, 1), (128, 1, 1), PARAMS, stream)
    return real(), fake.fake_depth()
assert in_thread(twice) == (libcuda.primary_context(0), 1), "the thread keeps the context"
assert len(looks) == 1, "only the first launch of a thread without a context looks"
assert number("fake_launches").value == 2
# Another context is current: used for this launch only.
foreign = libcuda.primary_context(1)
libcuda.libcuda().cuCtxSetCurrent(foreign)
kernel.launch((1, 1, 1), (128, 1, 1), PARAMS)
assert pointer("fake_context") == libcuda.primary_context(0)
assert (real(), fake.fake_depth()) == (foreign, 1)
""",
    )


ROW = """
kernels = [driver.load(compiled(), 0) for _ in range(3)]
row = driver.row_launcher(*((kernel, (1 + i, 1, 1), (32 * (1 + i), 1, 1)) for i, kernel in enumerate(kernels)))
launch = lambda stream: row(tuple(bytes([i]) + PARAMS[1:] for i in range(3)), stream)
functions = (ctypes.c_void_p * 64).in_dll(fake, "fake_functions")
first_bytes = (ctypes.c_ubyte * 64).in_dll(fake, "fake_first_bytes")
def launched():
    n = number("fake_launches").value
    return [(functions[i], first_bytes[i]) for i in range(n)]
"""


@pytest.mark.parametrize("stream", [0, 1, 2, 0x7FFF12345678])
@pytest.mark.parametrize("devices", [1, 2])
def test_three_launches_in_a_row(fake_driver: Path, stream: int, devices: int) -> None:
    """In order, each once, in a thread with a context, in one without, and where another device is current."""
    check_child(
        fake_driver,
        f"""
from fa2gen.driver import kernel as kernel_module
kernel_module.device_count = lambda: {devices}
{ROW}
one = launch({stream}) or launched()
assert len({{function for function, _ in one}}) == 3 and [byte for _, byte in one] == [0, 1, 2], one
assert (triple("fake_grid"), triple("fake_block")) == ((3, 1, 1), (96, 1, 1))
assert pointer("fake_stream") == ({stream} if {stream} > 1 else 0)
in_thread(lambda: launch({stream}))
libcuda.libcuda().cuCtxSetCurrent(libcuda.primary_context(1))
launch({stream})
assert launched() == 3 * one
assert libcuda.current_context() == libcuda.primary_context(1)
""",
    )


@pytest.mark.parametrize("stream", [0, 0x5000])
def test_a_row_stops_where_a_launch_is_refused(fake_driver: Path, stream: int) -> None:
    check_child(
        fake_driver,
        f"""
from fa2gen.driver import kernel as kernel_module
kernel_module.device_count = lambda: 1
{ROW}
libcuda.libcuda().cuCtxSetCurrent(libcuda.primary_context(0))
number("fake_dead_after").value = 1
text = raised(LaunchError, lambda: launch({stream}))
assert "kernel small on device 0" in text and "start it again" in text, text
assert [byte for _, byte in launched()] == [0]
number("fake_dead").value = 0
kernels[1].unload()
assert "unloaded" in raised(LaunchError, lambda: launch({stream}))
assert [byte for _, byte in launched()] == [0, 0]
""",
    )


def test_errors_name_the_kernel(fake_driver: Path) -> None:
    check_child(
        fake_driver,
        """
kernel = driver.load(compiled(), 0)
for stream in (0, 0x5000):
    number("fake_fail_next").value = 1
    text = raised(LaunchError, lambda: kernel.launch((9, 1, 1), (128, 1, 1), PARAMS, stream))
    assert "kernel small on device 0 cannot be launched: " in text and "invalid argument" in text, text
    assert "grid (9, 1, 1)" in text and "70000 bytes" in text, text
    kernel.launch((9, 1, 1), (128, 1, 1), PARAMS, stream)
number("fake_dead").value = 1
for stream in (0, 0x5000):
    text = raised(LaunchError, lambda: kernel.launch((9, 1, 1), (128, 1, 1), PARAMS, stream))
    assert "an illegal memory access" in text and "start it again" in text and "small" in text, text
number("fake_dead").value = 0
text = raised(LaunchError, lambda: driver.load(compiled(cubin=b"nonsense"), 0))
assert "cannot load kernel small on device 0: device kernel image is invalid" in text, text
import dataclasses
text = raised(LaunchError, lambda: driver.load(compiled(source=dataclasses.replace(source, entry="large")), 0))
assert "cannot load kernel large on device 0: named symbol not found" in text, text
assert number("fake_unloads").value == 1, "a cubin that was loaded in vain is unloaded"
for target in ("sm_90", "sm_89", "sm_86a", "sm_100", "compute_80"):
    if target == "sm_86a":
        driver.load(compiled(target), 0)
        continue
    text = raised(LaunchError, lambda: driver.load(compiled(target), 0))
    assert f"compiled for {target}" in text and "capability 8.6" in text, text
assert fake.fake_depth() == 0
""",
    )


def test_unload(fake_driver: Path) -> None:
    check_child(
        fake_driver,
        """
import gc
driver.load(compiled(), 0)
gc.collect()
assert number("fake_unloads").value == 0, "losing the last reference does not unload"
kernel = driver.load(compiled(), 0)
kernel.unload()
kernel.unload()
assert number("fake_unloads").value == 2, "both copies"
for stream in (0, 0x5000):
    assert "unloaded" in raised(LaunchError, lambda: kernel.launch((1, 1, 1), (128, 1, 1), PARAMS, stream))
assert fake.fake_depth() == 0
""",
    )
