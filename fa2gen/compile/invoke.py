"""Runs nvcc on one source, by PyCUDA or as a process of our own. Both run the same command: the bytes are equal.

PyCUDA is used where it imports and where one kernel is wanted. A pool of compilations runs nvcc itself: PyCUDA hands
over ptxas's report as a Python warning, which cannot be told apart between threads, and its nvcc cannot be stopped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

from ..errors import CompileError, ToolchainError
from .children import Child
from .nvcc import CUBIN_NAME, HOW_TO_GET, SOURCE_NAME, Nvcc, nvcc_command, nvcc_options
from .store import scratch_folder

#: A kernel takes 1 to 3 s; a compiler that needs longer than this hangs.
TIMEOUT_SECONDS = 600.0

# See the file. Put beside the source, it is found before the toolkit's own.
_RUNTIME_HEADER = Path(__file__).with_name("cuda_runtime.h")

_NO_HOST_COMPILER = re.compile(
    r"Failed to preprocess host compiler|(?:gcc|g\+\+|cc1plus): (?:command )?not found"
    r"|No such file or directory.*\bgcc\b",
    re.I,
)


# "nvcc fatal   : Unsupported gpu architecture 'sm_110'", "Value 'sm_110' is not defined for option 'gpu-architecture'".
_UNKNOWN_TARGET = re.compile(
    r"Unsupported gpu architecture|is not defined for option '(?:gpu-architecture|arch)'", re.I
)


class Processes:
    """The nvcc processes of one pool, so that all can be stopped at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self.stopped = False

    def start(self, command: list[str], folder: Path) -> Child:
        with self._lock:
            if self.stopped:
                raise CompileError("the compilation was cancelled")
            process = Child(command, folder)
            self._running.add(process)
            return process

    def forget(self, process: Child) -> None:
        with self._lock:
            self._running.discard(process)

    def stop(self) -> None:
        """Ends every process and lets none start."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.end()


def run_nvcc(text: str, target: str, nvcc: Nvcc, processes: Processes | None = None) -> tuple[bytes, str]:
    """Compiles ``text`` for ``target`` with nvcc as a process.

    Returns:
        The cubin, and everything that nvcc and ptxas wrote.

    Raises:
        CompileError: nvcc refused the source, was killed, or took longer than ``TIMEOUT_SECONDS``.
        ToolchainError: nvcc cannot work (no host compiler, no room for temporary files).
    """
    try:
        return _run_in_temporary_folder(text, target, nvcc, processes or Processes())
    except OSError as error:
        raise ToolchainError(
            f"temporary files for nvcc cannot be written ({error}); set TMPDIR to another folder"
        ) from error


def _run_in_temporary_folder(text: str, target: str, nvcc: Nvcc, processes: Processes) -> tuple[bytes, str]:
    with scratch_folder() as folder:
        (folder / SOURCE_NAME).write_bytes(text.encode())
        shutil.copy(_RUNTIME_HEADER, folder)
        command = nvcc_command(nvcc, target)
        status, log = _run([*command, "-I."], folder, target, nvcc, processes)
        if status != 0 and not processes.stopped:
            # The source is wrong, or this nvcc wants more of the header: its own words, either way.
            status, log = _run(command, folder, target, nvcc, processes)
        if processes.stopped:
            raise CompileError("the compilation was cancelled", log)
        cubin = folder / CUBIN_NAME
        if status != 0 or not cubin.is_file():
            raise compile_failure(nvcc, target, status, log)
        return cubin.read_bytes(), log


def _run(command: list[str], folder: Path, target: str, nvcc: Nvcc, processes: Processes) -> tuple[int, str]:
    """Exit status and output of one run of nvcc."""
    try:
        process = processes.start(command, folder)
    except OSError as error:
        raise ToolchainError(f"{nvcc.path} does not run: {error}") from error
    try:
        return process.finish(TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise CompileError(f"nvcc took longer than {TIMEOUT_SECONDS:.0f} s for {target} and was stopped") from None
    finally:
        processes.forget(process)


def compile_failure(nvcc: Nvcc, target: str, status: int, log: str) -> CompileError | ToolchainError:
    """The error for a failed run of nvcc, with the compiler's first complaint in its message."""
    if _NO_HOST_COMPILER.search(log):
        return ToolchainError(f"{nvcc.path} finds no host compiler, which it needs to preprocess: install g++")
    version = ".".join(map(str, nvcc.version))
    if _UNKNOWN_TARGET.search(log):
        return ToolchainError(
            f"{nvcc.path} is nvcc {version}, which does not know {target}, and a newer CUDA is needed; {HOW_TO_GET}"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    complaint = next(
        (line for line in lines if re.search(r"\b(?:error|fatal)\b", line)), lines[-1] if lines else "no output"
    )
    return CompileError(f"nvcc {version} failed for {target} (exit status {status}): {complaint}", log)


# One at a time: the report is caught by replacing a hook of the warnings module, which all threads share.
_pycuda_lock = threading.Lock()


def run_pycuda(text: str, target: str, nvcc: Nvcc) -> tuple[bytes, str] | None:
    """Compiles ``text`` for ``target`` through ``pycuda.compiler``.

    Returns:
        The cubin and the log, or None where PyCUDA cannot serve: it does not import, another thread is using it, its
        debugging flags are on (they change the code), or the compiler's report got lost.

    Raises:
        CompileError: nvcc refused the source.
        ToolchainError: nvcc cannot work.
    """
    try:
        import pycuda.compiler
        import pycuda.driver
    except Exception:  # ImportError without libcuda; RuntimeError and others from broken installations
        return None
    if pycuda.driver.CUDA_DEBUGGING or not _pycuda_lock.acquire(blocking=False):
        return None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cubin = pycuda.compiler.compile(
                text,
                nvcc=str(nvcc.path),
                options=nvcc_options(target)[:-2],
                arch=target,
                no_extern_c=True,
                cache_dir=False,
            )
    except pycuda.driver.CompileError as error:
        _remove_leftovers(str(error.msg))
        raise compile_failure(nvcc, target, 1, f"{error.stdout or ''}{error.stderr or ''}") from None
    except OSError as error:
        raise ToolchainError(f"{nvcc.path} does not run: {error}") from error
    finally:
        _pycuda_lock.release()
    log = "".join(str(warning.message) for warning in caught if "The CUDA compiler succeeded" in str(warning.message))
    return (cubin, log) if log else None


def _remove_leftovers(message: str) -> None:
    """PyCUDA leaves the temporary folder of a failed compilation; its message names it."""
    match = re.search(r"compilation of (\S+) failed", message)
    if match is None:
        return
    folder = Path(match[1]).parent
    if folder.parent == Path(tempfile.gettempdir()) and {path.name for path in folder.iterdir()} <= {
        SOURCE_NAME,
        CUBIN_NAME,
    }:
        shutil.rmtree(folder, ignore_errors=True)
