"""Builds a kernel rendered for the host into a program, with g++ or clang++, once for each content.

A program is two parts: the runtime (``host/*.cpp``: fibers, scheduler, shadow memory), built once for each compiler,
and the kernel's own text, which takes about half a second. Both are entries of fa2gen's cache (``compile.store``), with
all that it checks; what it cannot store lies in a temporary folder until the process ends.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from ..compile.children import Child
from ..compile.entry import FORMAT, Contents, Entry
from ..compile.location import cache_root, unsafe_reason
from ..compile.locks import Lease, new_folder, remove
from ..compile.store import SCRATCH_PREFIX, EntryStore, scratch_folder
from ..errors import ArgumentError, CacheError, CompileError, ToolchainError

HOST_DIR = Path(__file__).parent / "host"
RUNTIME_SOURCES = (
    "primitives.cpp",
    "block.cpp",
    "between_blocks.cpp",
    "semaphores.cpp",
    "shared_memory.cpp",
    "shared_async.cpp",
    "primitives_sm90.cpp",
    "tma.cpp",
    "warpgroups.cpp",
    "wgmma_operands.cpp",
    "wgmma_product.cpp",
    "registers.cpp",
    "main.cpp",
)
SECTION = "emulator"
TEXT, PROGRAM = "kernel.cpp", "kernel"
# -ffp-contract=off: a * b + c is two roundings unless the kernel text says fma_f32, as on the device with PTX.
FLAGS = ("-std=c++17", "-fno-strict-aliasing", "-ffp-contract=off", "-pthread")
# -O3: loops over clocks and operands become vector instructions with g++ 12.
RUNTIME_FLAGS = (*FLAGS, "-O3")
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
        lease: Keeps the folder from being cleaned up while this object lives.
    """

    source: HostSource
    program: Path
    from_cache: bool
    lease: Lease | None = field(default=None, repr=False, compare=False)


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


def cache_dir() -> Path | None:
    """The emulator's folder in fa2gen's cache (:func:`fa2gen.compile.location.cache_root`); None if there is none.

    Raises:
        CacheError: It belongs to somebody else, or others may write to it. Programs are run by their path, so this
            folder too must be safe, not its entries only.
    """
    root = cache_root()
    if root is None:
        return None
    folder = root / SECTION
    try:
        reason = unsafe_reason(folder.stat())
    except OSError:  # not there yet, or in the way of a folder: the store sees to it
        return folder
    if reason is not None:
        raise CacheError(f"the emulator's cache folder {folder} {reason}; delete it")
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


def _run_compiler(command: Sequence[str], folder: Path, what: str) -> None:
    try:
        status, log = Child(command, folder).finish(BUILD_TIMEOUT_S)
    except OSError as error:
        raise ToolchainError(f"the C++ compiler {command[0]} does not run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{what}: no result from {command[0]} in {BUILD_TIMEOUT_S:.0f} s") from error
    if status:
        first = next((line for line in log.splitlines() if "error" in line), log[:200])
        raise CompileError(f"{what}: {os.path.basename(command[0])} failed: {first}", log)


def _entry(name: str, wanted: Sequence[str], make: Callable[[], Contents]) -> tuple[Entry, bool]:
    """The entry of that name, from the cache, else made; and whether it was there."""
    folder = cache_dir()
    if folder is None:
        contents = make()
        return Entry(contents.files, contents.facts), False
    return EntryStore(folder.parent, folder.name).read_or_build(name, wanted, make)


def _in_scratch(make: Callable[[Path], Contents]) -> Contents:
    """Runs ``make`` with a temporary folder.

    Raises:
        ToolchainError: There is no room for one.
    """
    try:
        with scratch_folder() as folder:
            return make(folder)
    except OSError as error:
        raise ToolchainError(
            f"temporary files for the C++ compiler cannot be written ({error}); set TMPDIR to another folder"
        ) from error


def _runtime_key(compiler: str) -> str:
    return _digest(str(FORMAT), _compiler_version(compiler), *RUNTIME_FLAGS, *_host_files(".h", ".cpp"))


def _runtime(compiler: str, key: str) -> dict[str, bytes]:
    """The runtime's objects: file name -> bytes."""
    objects = [f"{name}.o" for name in RUNTIME_SOURCES]

    def make(folder: Path) -> Contents:
        commands = [
            [compiler, *RUNTIME_FLAGS, "-c", str(HOST_DIR / name), "-o", f"{name}.o"] for name in RUNTIME_SOURCES
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(lambda command: _run_compiler(command, folder, "the emulator's runtime"), commands))
        return Contents({name: (folder / name).read_bytes() for name in objects}, _facts("runtime", compiler))

    entry, _ = _entry(f"runtime-{key}", objects, lambda: _in_scratch(make))
    if entry.lease is not None:
        entry.lease.close()
    return {name: entry.files[name] for name in objects}


def _facts(kernel: str, compiler: str) -> dict[str, str]:
    """What ``fa2gen cache ls`` shows of an entry."""
    return {"kernel": kernel, "target": "host", "compiler": _compiler_version(compiler).partition("\n")[0]}


def build(source: HostSource) -> EmulatedKernel:
    """Builds a kernel for the host, or finds it in the cache.

    Args:
        source: A rendered kernel with ``platform == "host"``.

    Raises:
        ArgumentError: The source was rendered for another platform.
        ToolchainError: No host compiler, or no room for its temporary files.
        CompileError: The compiler refused the text; ``log`` holds its messages.
        CacheError: The cache folder is not safe to use.
    """
    if source.platform != "host":
        raise ArgumentError(f'platform must be "host" to be emulated, got "{source.platform}"')
    compiler = find_host_compiler()
    runtime_key = _runtime_key(compiler)
    text = f"{source.text}\nEMULATOR_ENTRY({source.entry})\n"
    name = f"kernel-{_digest(runtime_key, *KERNEL_FLAGS, text)}"

    def make(folder: Path) -> Contents:
        (folder / TEXT).write_bytes(text.encode())
        objects = _runtime(compiler, runtime_key)
        for file, data in objects.items():
            (folder / file).write_bytes(data)
        command = [compiler, *KERNEL_FLAGS, "-I", str(HOST_DIR), TEXT, *objects, "-o", PROGRAM]
        _run_compiler(command, folder, f"kernel {source.entry}")
        files = {TEXT: text.encode(), PROGRAM: (folder / PROGRAM).read_bytes()}
        return Contents(files, _facts(source.entry, compiler), executable=(PROGRAM,))

    kept = _kept_programs.get(name)
    if kept is not None:
        return EmulatedKernel(source, kept, True)
    entry, from_cache = _entry(name, (PROGRAM,), lambda: _in_scratch(make))
    if entry.folder is None:
        return EmulatedKernel(source, _keep(name, entry.files[PROGRAM]), False)
    return EmulatedKernel(source, entry.folder / PROGRAM, from_cache, entry.lease)


# Programs that the cache could not store, for the life of this process: name -> path.
_kept_programs: dict[str, Path] = {}
_kept_lock = threading.Lock()


def _keep(name: str, program: bytes) -> Path:
    try:
        with _kept_lock:
            path = _kept_folder(os.getpid()) / name
            if name not in _kept_programs:
                path.write_bytes(program)
                path.chmod(0o700)
                _kept_programs[name] = path
            return path
    except OSError as error:
        raise CacheError(
            f"the emulator's program can be stored nowhere ({error}); set TMPDIR or FA2GEN_CACHE_DIR"
        ) from error


@lru_cache(maxsize=1)
def _kept_folder(process: int) -> Path:
    """A temporary folder of this process, removed when it ends; by the next one if it is killed."""
    folder, lease = new_folder(Path(tempfile.gettempdir()), SCRATCH_PREFIX)

    def end() -> None:
        if os.getpid() == process:  # not in a child that was forked
            lease.close()
            remove(folder)

    atexit.register(end)
    return folder
