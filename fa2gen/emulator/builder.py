"""Builds a kernel rendered for the host into a program, with g++ or clang++, once for each content.

A program is two parts: the runtime (``host/*.cpp``: fibers, scheduler, shadow memory), built once for each compiler,
and the kernel's own text, which takes about half a second.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from ..compile.cache import cache_root
from ..errors import ArgumentError, CacheError, CompileError, ToolchainError

HOST_DIR = Path(__file__).parent / "host"
RUNTIME_SOURCES = ("primitives.cpp", "main.cpp")
# -ffp-contract=off: a * b + c is two roundings unless the kernel text says fma_f32, as on the device with PTX.
FLAGS = ("-std=c++17", "-fno-strict-aliasing", "-ffp-contract=off", "-pthread")
RUNTIME_FLAGS = (*FLAGS, "-O2")
# -O1 builds in 0.4 s and -O2 in 0.5 s (forward kernel, head dim 64); most of a run is spent in the runtime.
# -fstack-clash-protection: a large frame touches the guard page instead of the next thread's stack.
KERNEL_FLAGS = (*FLAGS, "-O1", "-fstack-clash-protection")
BUILD_TIMEOUT_S = 300.0


class HostSource(Protocol):
    """What a build needs of a ``codegen.KernelSource``."""

    @property
    def platform(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel built for the host.

    Attributes:
        source: The text it was built from.
        program: The executable; its folder also holds the text, ``kernel.cpp``.
        from_cache: It was there already.
    """

    source: HostSource
    program: Path
    from_cache: bool


@lru_cache(maxsize=1)
def _compilers_on_path(cxx: str | None, path: str | None) -> str | None:
    candidates = [cxx] if cxx else ["g++", "clang++", "c++"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def find_host_compiler() -> str:
    """Path of the C++17 compiler: ``$CXX`` if set, else g++, clang++ or c++ on the path.

    Raises:
        ToolchainError: There is none.
    """
    cxx = os.environ.get("CXX")
    found = _compilers_on_path(cxx, os.environ.get("PATH"))
    if found is None:
        what = f"the compiler that CXX names ({cxx}) was not found" if cxx else "no C++ compiler was found"
        raise ToolchainError(
            f"{what}; the emulator builds kernels with g++ or clang++ (C++17): install one, "
            "e.g. apt install g++, or set CXX"
        )
    return found


@lru_cache(maxsize=8)
def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"the C++ compiler {compiler} does not run: {error}") from error
    return done.stdout


def cache_dir() -> Path:
    """The emulator's folder in fa2gen's cache (:func:`fa2gen.compile.cache.cache_root`).

    Raises:
        CacheError: The folder cannot be made, belongs to somebody else, or others may write to it.
    """
    root = cache_root()
    if root is None:
        raise CacheError("the emulator needs a cache folder for its programs: set FA2GEN_CACHE_DIR to one of your own")
    folder = root.absolute() / "emulator"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise CacheError(f"the emulator's cache folder {folder} cannot be used: {error}") from error
    if hasattr(os, "getuid") and (state.st_uid != os.getuid() or state.st_mode & (stat.S_IWOTH | stat.S_IWGRP)):
        raise CacheError(f"the emulator's cache folder {folder} belongs to another user or is writable by others")
    return folder


def _digest(*parts: str | bytes) -> str:
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()[:32]


def _host_files(*suffixes: str) -> list[bytes]:
    return [
        path.name.encode() + b"\0" + path.read_bytes() for path in sorted(HOST_DIR.iterdir()) if path.suffix in suffixes
    ]


def _run_compiler(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except OSError as error:
        raise ToolchainError(f"the C++ compiler {command[0]} does not run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{what}: no result from {command[0]} in {BUILD_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        log = done.stderr or done.stdout
        first = next((line for line in log.splitlines() if "error" in line), log[:200])
        raise CompileError(f"{what}: {os.path.basename(command[0])} failed: {first}", log)


def _publish(final: Path, names: Sequence[str], make: Callable[[Path], None]) -> bool:
    """Makes the folder `final` by building a temporary one and renaming it. Returns whether it was there already.

    A folder that lacks one of the files that `names` lists (somebody cleaned up, a disk lost power) is built again.

    Raises:
        CacheError: The cache cannot be written.
    """
    if _holds(final, names):
        return True
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        try:
            make(temporary)
            _install(temporary, final, names)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CacheError(f"the emulator's cache folder {final.parent} cannot be written: {error}") from error
    return False


def _holds(folder: Path, names: Sequence[str]) -> bool:
    try:
        return all((folder / name).stat().st_size > 0 for name in names)
    except OSError:
        return False


def _install(temporary: Path, final: Path, names: Sequence[str]) -> None:
    try:
        temporary.rename(final)
    except OSError:
        if _holds(final, names):
            return  # another process built the same content first: its folder serves
        if not final.exists():
            raise
        # Incomplete: out of the way in one step, so that nobody sees it half deleted.
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        try:
            final.rename(aside / "incomplete")
            temporary.rename(final)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _runtime(compiler: str) -> tuple[list[str], str]:
    """The runtime's objects and their key."""
    key = _digest(_compiler_version(compiler), *RUNTIME_FLAGS, *_host_files(".h", ".cpp"))
    folder = cache_dir() / f"runtime-{key}"

    def make(into: Path) -> None:
        commands = [
            [compiler, *RUNTIME_FLAGS, "-c", str(HOST_DIR / name), "-o", str(into / f"{name}.o")]
            for name in RUNTIME_SOURCES
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(lambda command: _run_compiler(command, "the emulator's runtime"), commands))

    objects = [f"{name}.o" for name in RUNTIME_SOURCES]
    _publish(folder, objects, make)
    return [str(folder / name) for name in objects], key


def build(source: HostSource) -> EmulatedKernel:
    """Builds a kernel for the host, or finds it in the cache.

    Args:
        source: A rendered kernel with ``platform == "host"``.

    Raises:
        ArgumentError: The source was rendered for another platform.
        ToolchainError: No host compiler.
        CompileError: The compiler refused the text; ``log`` holds its messages.
        CacheError: The cache folder is not safe to use or cannot be written.
    """
    if source.platform != "host":
        raise ArgumentError(f'platform must be "host" to be emulated, got "{source.platform}"')
    compiler = find_host_compiler()
    objects, runtime_key = _runtime(compiler)
    text = f"{source.text}\nEMULATOR_ENTRY({source.entry})\n"
    folder = cache_dir() / f"kernel-{_digest(runtime_key, *KERNEL_FLAGS, text)}"

    def make(into: Path) -> None:
        (into / "kernel.cpp").write_text(text)
        command = [compiler, *KERNEL_FLAGS, "-I", str(HOST_DIR), str(into / "kernel.cpp"), *objects]
        _run_compiler([*command, "-o", str(into / "kernel")], f"kernel {source.entry}")

    from_cache = _publish(folder, ("kernel",), make)
    return EmulatedKernel(source, folder / "kernel", from_cache)
