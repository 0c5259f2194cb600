"""The emulator's build cache, its protocol and its counters."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fa2gen.compile import admin, entry, location
from fa2gen.emulator import Buffer, Counters, EmulatedKernel, build, builder, cache_dir, find_host_compiler, run
from fa2gen.errors import ArgumentError, CacheError, CompileError, EmulatorError, ToolchainError
from fa2gen.launch import Launch
from tests.primitive_kernels import NUM_THREADS, probe_launch, probe_source

ROOT = Path(__file__).parents[2]

BODIES = {
    "write": "  st_global(p.out + (blockIdx.x * kThreads + tid), u32(tid));",
    "32 rows in one bank": """
  st_shared(smem + 128 * lane + 4 * warp, tid);
  sync_warp();
  st_global(p.out + tid, ld_shared<u32>(smem + 128 * lane + 4 * warp));""",
    "one word for all": """
  if (tid == 0) st_shared(smem, 7);
  sync_threads();
  st_global(p.out + tid, ld_shared<u32>(smem));""",
    "vectors side by side": """
  st_shared(smem + 16 * tid, u32x4{1, 2, 3, 4});
  st_global(p.out + tid, ld_shared<u32x4>(smem + 16 * tid).x);""",
    "vectors 128 bytes apart": """
  st_shared(smem + 128 * tid, u32x4{1, 2, 3, 4});
  st_global(p.out + tid, ld_shared<u32x4>(smem + 128 * tid).x);""",
    "ldmatrix rows 128 bytes apart": """
  st_shared(smem + 128 * tid, u32x4{1, 2, 3, 4});
  sync_warp();
  u32 r[4];
  ldmatrix_x4(r, smem + 128 * tid);
  st_global(p.out + tid, r[0]);""",
    "copies 128 bytes apart": """
  cp_async16(smem + 128 * tid, p.in + 4 * tid);
  cp_async_commit();
  cp_async_wait<0>();
  st_global(p.out + tid, ld_shared<u32>(smem + 128 * tid));""",
    "all write one word": "  st_global(p.out, u32(tid));",
}


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return build(probe_source(BODIES, "host"))


def _run(kernel: EmulatedKernel, name: str, grid: int = 1, **options: object) -> tuple[np.ndarray, Counters]:
    data = np.arange(1024, dtype=np.uint8)
    data.flags.writeable = False
    out = np.full(NUM_THREADS * grid, 0xFFFFFFFF, np.uint32)
    buffers = [Buffer("in", data, 0), Buffer("out", out.view(np.uint8), 1, output=True)]
    return out, run(kernel, probe_launch(list(BODIES).index(name), grid), buffers, **options)


def _copy_entry(kernel: EmulatedKernel, root: Path, name: str | None = None) -> Path:
    """Copies an entry of the cache that holds ``kernel``, by default the runtime: to build it takes 20 s of a core."""
    name = name or f"runtime-{builder._runtime_key(find_host_compiler())}"
    (root / "emulator").mkdir(0o700, parents=True)
    root.chmod(0o700)
    return shutil.copytree(kernel.program.parents[1] / name, root / "emulator" / name)


def test_second_build_comes_from_the_cache(kernel: EmulatedKernel) -> None:
    again = build(probe_source(BODIES, "host"))
    assert again.from_cache
    assert again.program == kernel.program
    other = build(probe_source({"other": BODIES["write"]}, "host"))
    assert other.program != kernel.program


def test_cache_folder_is_private_and_holds_whole_entries_only(kernel: EmulatedKernel) -> None:
    folder = cache_dir()
    assert folder is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.parent == Path(os.environ["FA2GEN_CACHE_DIR"])
    assert kernel.program.parent.parent == folder
    names = {path.name for path in kernel.program.parent.iterdir()}
    assert names == {"build.json", "kernel", "kernel.cpp"}


def test_world_writable_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "emulator").mkdir()
    for mode in (0o777, 0o770):
        (tmp_path / "emulator").chmod(mode)
        with pytest.raises(CacheError, match="others may write to"):
            build(probe_source(BODIES, "host"))
    (tmp_path / "emulator").chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(CacheError, match="others may write"):
        build(probe_source(BODIES, "host"))


def test_folder_of_any_name_and_relative(
    tmp_path: Path, kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _copy_entry(kernel, tmp_path / "kernels of Müller's [1]")
    monkeypatch.setenv("FA2GEN_CACHE_DIR", "kernels of Müller's [1]")
    built = build(probe_source(BODIES, "host"))
    assert not built.from_cache
    assert built.program.is_absolute()
    assert built.program.is_relative_to(tmp_path / "kernels of Müller's [1]" / "emulator")
    _run(built, "write")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FA2GEN_CACHE_DIR", "~/home cache")
    assert cache_dir() == tmp_path / "home cache" / "emulator"


def test_incomplete_entries_are_built_again(
    tmp_path: Path, kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = _copy_entry(kernel, tmp_path)
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path))
    built = build(probe_source(BODIES, "host"))
    program = bytearray(built.program.read_bytes())
    program[len(program) // 2] ^= 1
    built.program.write_bytes(bytes(program))
    (runtime / "main.cpp.o").unlink()
    compiled, run_compiler = [], builder._run_compiler

    def compiler(command: list[str], folder: Path, what: str) -> None:
        compiled.append(command[-1])
        if "-c" in command:  # the runtime: the objects that g++ made of it before
            shutil.copy(kernel.program.parents[1] / runtime.name / command[-1], folder)
        else:
            run_compiler(command, folder, what)

    monkeypatch.setattr(builder, "_run_compiler", compiler)
    with pytest.warns(RuntimeWarning, match="damaged") as caught:
        again = build(probe_source(BODIES, "host"))
    assert len(caught) == 2
    assert sorted(compiled) == sorted([*(f"{name}.o" for name in builder.RUNTIME_SOURCES), builder.PROGRAM])
    assert not again.from_cache
    _run(again, "write")
    assert build(probe_source(BODIES, "host")).from_cache
    assert not list((tmp_path / "tmp").iterdir())


def test_program_in_use_is_not_cleaned_up(
    tmp_path: Path, kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copy_entry(kernel, tmp_path, kernel.program.parent.name)
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path))
    built = build(probe_source(BODIES, "host"))
    result = admin.collect(tmp_path, max_bytes=0)
    assert [entry.path for entry in result.busy] == [built.program.parent]
    assert not result.removed
    _run(built, "write")
    del built
    assert len(admin.collect(tmp_path, max_bytes=0).removed) == 1


def test_processes_build_one_kernel_at_once(tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    code = """
import sys, time
from tests.primitive_kernels import probe_source
from fa2gen.emulator import build, builder
def compiler(command, folder, what):  # one that is slow, but needs no core
    with open(sys.argv[1], "a") as log:
        log.write(command[-1] + "\\n")
    time.sleep(1)
    (folder / command[-1]).write_text("program")
builder._run_compiler = compiler
print(build(probe_source({'write': '  st_global(p.out + tid, u32(tid));'}, 'host')).program)
"""
    environment = {**os.environ, "FA2GEN_CACHE_DIR": str(cache)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(log)], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    programs = {process.communicate(timeout=120)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(programs) == 1
    assert os.access(programs.pop(), os.X_OK)
    # Each file once, by whoever came first.
    assert sorted(log.read_text().split()) == sorted([*(f"{x}.o" for x in builder.RUNTIME_SOURCES), builder.PROGRAM])
    assert sorted(path.name.split("-")[0] for path in (cache / "emulator").iterdir()) == ["kernel", "runtime"]
    assert not list((cache / "tmp").iterdir())
    assert not list((cache / "locks").iterdir())


def test_program_that_is_open_for_writing_for_a_moment(kernel: EmulatedKernel, tmp_path: Path) -> None:
    # As when another thread starts a process while this one writes the program: Linux then says "Text file busy".
    program = tmp_path / "kernel"
    shutil.copy(kernel.program, program)
    writer = open(program, "r+b")  # noqa: SIM115
    timer = threading.Timer(0.05, writer.close)
    timer.start()
    _run(dataclasses.replace(kernel, program=program), "write")
    timer.join()


def test_what_cannot_be_stored_runs_from_a_temporary_folder(
    tmp_path: Path, kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copy_entry(kernel, tmp_path)
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(location, "_warned", set())
    monkeypatch.setattr(builder, "_kept_programs", {})

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(entry, "write_file", refuse)
    with pytest.warns(RuntimeWarning, match=r"cannot be written .No space left") as caught:
        built = build(probe_source(BODIES, "host"))
    assert len(caught) == 1
    assert not built.program.is_relative_to(tmp_path)
    assert stat.S_IMODE(built.program.stat().st_mode) == 0o700
    assert stat.S_IMODE(built.program.parent.stat().st_mode) == 0o700
    _run(built, "write")
    again = build(probe_source(BODIES, "host"))
    assert again.from_cache
    assert again.program == built.program
    assert not list((tmp_path / "emulator").glob("kernel-*"))


def test_a_program_ends_with_its_caller() -> None:
    """A kernel that never ends must not outlive a caller that is killed; here the program waits for its job."""
    program = build(probe_source(BODIES, "host")).program
    read, write = os.pipe()
    code = f"import subprocess, sys; print(subprocess.Popen([{str(program)!r}], stdin=0).pid, flush=True)"
    code += "; import time; time.sleep(600)"
    caller = subprocess.Popen([sys.executable, "-c", code], stdin=read, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    state = Path("/proc", caller.stdout.readline().strip(), "stat")
    os.close(read)
    time.sleep(0.2)
    assert state.read_text().rpartition(")")[2].split()[0] == "S"
    caller.kill()
    caller.communicate()
    deadline = time.monotonic() + 30
    with contextlib.suppress(FileNotFoundError):
        while state.read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < deadline
            time.sleep(0.02)
    os.close(write)


def test_without_a_cache_folder_programs_run_until_the_process_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "system").mkdir()
    code = """
from tests.primitive_kernels import probe_source
from fa2gen.emulator import build, builder
def compiler(command, folder, what):  # one that is quick
    (folder / command[command.index("-o") + 1]).write_text("program")
builder._run_compiler = compiler
program = build(probe_source({"write": "  st_global(p.out + tid, u32(tid));"}, "host")).program
assert program.read_text() == "program"
print(program)
"""
    environment = {**os.environ, "FA2GEN_CACHE_DIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "system")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot be made" in done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "system")
    assert not list((tmp_path / "system").iterdir())


def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no-such-compiler"):
        find_host_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainError, match=r"install one.*CXX"):
        find_host_compiler()


def test_compile_error_carries_the_log_and_leaves_nothing_behind() -> None:
    folder = cache_dir()
    assert folder is not None
    before = set(folder.glob("kernel-*"))
    with pytest.raises(CompileError, match="no_such_primitive") as caught:
        build(probe_source({"wrong": "  no_such_primitive();"}, "host"))
    assert "no_such_primitive" in caught.value.log
    assert set(folder.glob("kernel-*")) == before
    assert not list((folder.parent / "locks").iterdir())


def test_global_memory_cannot_be_dereferenced() -> None:
    with pytest.raises(CompileError):
        build(probe_source({"deref": "  u32 x = *p.in; st_global(p.out + tid, x);"}, "host"))


def test_cuda_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match="platform"):
        build(probe_source(BODIES, "cuda"))


def test_parameters_of_the_wrong_size_are_refused(kernel: EmulatedKernel) -> None:
    launch = probe_launch(0)
    with pytest.raises(EmulatorError, match="the kernel's struct has 24") as caught:
        run(kernel, dataclasses.replace(launch, params=launch.params + bytes(8)), [])
    assert caught.value.name == "params-size"


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch("fwd", (0, 1, 1), 64, 0, bytes(24)), "grid"),
        (Launch("fwd", (1, 1, 1), 33, 0, bytes(24)), "num_threads"),
        (Launch("fwd", (1, 1, 1), 2048, 0, bytes(24)), "num_threads"),
    ],
)
def test_impossible_launches_are_refused(kernel: EmulatedKernel, launch: Launch, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(kernel, launch, [])


def test_an_impossible_number_of_threads_is_refused(kernel: EmulatedKernel) -> None:
    with pytest.raises(ArgumentError, match="threads must be at least 1"):
        run(kernel, probe_launch(0), [], threads=-1)


def test_buffers_are_checked() -> None:
    data = np.zeros(8, np.uint8)
    for change in (
        {"data": np.zeros(7, np.uint8)},
        {"data": np.zeros(8, np.float32)},
        {"start": 9},
        {"readable": np.ones(8, np.bool_)},
    ):
        with pytest.raises(ArgumentError, match="buffer x"):
            Buffer(**{"name": "x", "data": data, "pointer_index": 0, **change})


def test_blocks_are_spread_over_threads_with_the_same_result(kernel: EmulatedKernel) -> None:
    one, counters_one = _run(kernel, "write", grid=37, threads=1)
    three, counters_three = _run(kernel, "write", grid=37, threads=3)
    np.testing.assert_array_equal(one, np.tile(np.arange(64), 37))
    np.testing.assert_array_equal(one, three)
    assert counters_one == counters_three


def test_schedule_follows_from_the_seed(kernel: EmulatedKernel) -> None:
    # The thread that is second to write depends on the schedule alone.
    texts = []
    for seed in (1, 1, 2, 3, 4, 5):
        with pytest.raises(EmulatorError, match="global-two-writers") as caught:
            _run(kernel, "all write one word", seed=seed)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert len(set(texts)) > 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("32 rows in one bank", {"st_shared_conflicts": 2 * 31, "ld_shared_conflicts": 2 * 31}),
        ("one word for all", {"ld_shared_conflicts": 0}),
        ("vectors side by side", {"st_shared_conflicts": 0, "ld_shared_conflicts": 0}),
        ("vectors 128 bytes apart", {"st_shared_conflicts": 8 * 7, "ld_shared_conflicts": 8 * 7}),
        ("ldmatrix rows 128 bytes apart", {"ldmatrix": 2, "ldmatrix_conflicts": 2 * 4 * 7}),
        ("copies 128 bytes apart", {"cp_async": 64, "cp_async_conflicts": 8 * 7}),
    ],
)
def test_bank_conflicts(kernel: EmulatedKernel, name: str, expected: dict[str, int]) -> None:
    _, counters = _run(kernel, name)
    assert {key: getattr(counters, key) for key in expected} == expected
