"""Several processes, and processes that are killed, with real compilers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fa2gen.compile import admin, find_nvcc
from fa2gen.compile.children import Child
from fa2gen.compile.store import leftovers, scratch_folder
from fa2gen.errors import ToolchainError

ROOT = Path(__file__).resolve().parents[2]

# Every process compiles every kernel, each beginning with another one.
_COMPILE = """
import sys, warnings
warnings.simplefilter("error")
from fa2gen.codegen import render_kernel
from fa2gen.compile import compile_kernel
from fa2gen.constraints import default_config
from fa2gen.spec import KernelSpec
specs = [KernelSpec(head_dim=d, causal=causal) for d in (32, 64) for causal in (False, True)]
start = int(sys.argv[1]) % len(specs)
for spec in specs[start:] + specs[:start]:
    compiled = compile_kernel(render_kernel(spec, default_config(spec)), "sm_80")
    assert compiled.cubin[:4] == b"\\x7fELF"
    print(spec.slug(), compiled.key)
"""


@pytest.fixture
def counting_nvcc(tmp_path: Path) -> Path:
    """The real nvcc behind a script that notes each compilation."""
    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    script = tmp_path / "nvcc"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in --cubin) echo $$ >> {tmp_path}/compilations;; esac\nexec {nvcc.path} "$@"\n'
    )
    script.chmod(0o755)
    return script


def start(code: str, *arguments: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "FA2GEN_CACHE_DIR": str(cache), **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.nvcc
def test_eight_processes_compile_each_kernel_once(tmp_path: Path, counting_nvcc: Path) -> None:
    cache = tmp_path / "cache"
    started = [start(_COMPILE, str(number), cache=cache, FA2GEN_NVCC=str(counting_nvcc)) for number in range(8)]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * 8, outputs
    assert len({"\n".join(sorted(out.splitlines())) for out, _ in outputs}) == 1
    assert len((tmp_path / "compilations").read_text().splitlines()) == 4
    verdict = admin.verify(cache)
    assert (verdict.checked, verdict.bad) == (4, ())
    assert leftovers(cache) == []


_HANG = {
    "nvcc": """
from pathlib import Path
from fa2gen.compile import Nvcc
from fa2gen.compile.invoke import run_nvcc
run_nvcc("text", "sm_80", Nvcc(Path({compiler!r}), (13, 0, 88), "b"))
""",
    "g++": """
from fa2gen.codegen import render_kernel
from fa2gen.constraints import default_config
from fa2gen.emulator import build
from fa2gen.spec import KernelSpec
build(render_kernel(KernelSpec(), default_config(KernelSpec()), "host"))
""",
}


@pytest.mark.parametrize("compiler", sorted(_HANG))
def test_a_killed_process_takes_the_compiler_along_and_its_files_go_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    system = tmp_path / "system"
    system.mkdir()
    script = tmp_path / "compiler"
    # Leaves a temporary file where TMPDIR says, as nvcc and g++ do, and never ends.
    script.write_text(
        f"""#!/bin/sh
if [ "$1" = --version ]; then echo g++ 12; exit; fi
echo x > "$TMPDIR/ccX.s"
echo $$ > {tmp_path}/$$
mv {tmp_path}/$$ {tmp_path}/ready
sleep 600
"""
    )
    script.chmod(0o755)
    code = _HANG[compiler].format(compiler=str(script))
    process = start(code, cache=tmp_path / "cache", TMPDIR=str(system), CXX=str(script))
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    try:
        assert list(system.rglob("ccX.s"))
        monkeypatch.setattr("tempfile.tempdir", str(system))
        while True:
            with scratch_folder() as folder:
                left = list(system.iterdir())
            if left == [folder]:
                break
            # What the dead process started ends a moment after it, and holds its folder until then.
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        assert list(system.iterdir()) == []
        # The compiler has a process group of its own, the script and its `sleep`: both end without being waited for.
        group = int((tmp_path / "ready").read_text())
        while members(group):
            assert time.monotonic() < deadline, members(group)
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int((tmp_path / "ready").read_text()), signal.SIGKILL)


def members(group: int) -> list[str]:
    """Programs of a process group that run; a zombie does not."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, number, *_ = rest.split()
            if int(number) == group and state not in "ZX":
                found.append(name)
    return found


_KILLED_BETWEEN = """
import os, signal, subprocess, sys
from pathlib import Path
from fa2gen.compile.children import Child
start, started = subprocess.Popen, []
def popen(*args, **options):
    if started:
        os.kill(os.getpid(), signal.SIGKILL)
    started.append(start(*args, **options))
    return started[0]
subprocess.Popen = popen
Child([sys.argv[1]], Path.cwd())
"""


def test_no_compiler_runs_without_its_watcher(tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\necho > {tmp_path}/ran\n")
    script.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", _KILLED_BETWEEN, str(script)], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    time.sleep(0.3)
    assert not (tmp_path / "ran").exists()


def test_a_compiler_that_starts_others_ends_with_them(tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\necho started\nsleep 600 &\nwait\n")
    script.chmod(0o755)
    child = Child([str(script)], tmp_path)
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        child.finish(0.3)
    assert time.monotonic() - start < 30
    assert members(child.group) == []
    script.write_text("#!/bin/sh\necho out; echo err >&2; exit 3\n")
    assert Child([str(script)], tmp_path).finish(60) == (3, "out\nerr\n")
