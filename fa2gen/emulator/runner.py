"""Runs a built kernel in a child process, which a time limit ends and whose crash does no harm here."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from ..errors import ArgumentError, EmulatorError
from .builder import EmulatedKernel

_MAGIC = 0x32414632


class LaunchLike(Protocol):
    """What a run needs of a ``launch.Launch``."""

    @property
    def grid(self) -> tuple[int, int, int]: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...
    @property
    def params(self) -> bytes: ...


@dataclass
class Buffer:
    """A piece of global memory.

    Attributes:
        name: In reports.
        data: 1-D uint8 of even length. Written in place after the run, where in view, if it is writeable; a store
            to one that is not is reported (``global-read-only``).
        pointer_index: The field of the parameter struct that points here (see ``ParamStruct.pointers``); -1 for none.
        map_index: The 8-byte word of the struct where a tensor map that shows this buffer begins; -1 for none.
        start: Byte offset of that pointer in ``data``. ``data[0]`` is aligned to 256 bytes in the emulated memory.
        readable: One bool for every 2 bytes: in view. Others may not be touched. None: all are.
        output: Written once: elements never written, written twice or read before are reported.
        initialised: One bool for every 2 bytes: holds a value. Reading or adding to others is reported. A run updates
            it, so that memory which several launches share, such as a workspace, may start uninitialised; whether an
            output is complete is then for :func:`require_written` to say, after the last. None: an output starts
            without values, all other memory with them.
    """

    name: str
    data: np.ndarray
    pointer_index: int = -1
    map_index: int = -1
    start: int = 0
    readable: np.ndarray | None = None
    output: bool = False
    initialised: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or self.data.size % 2 or not self.data.flags.c_contiguous:
            raise ArgumentError(f"data of buffer {self.name} must be contiguous, 1-D, uint8 and of even length")
        for name in ("readable", "initialised"):
            mask = getattr(self, name)
            if mask is not None and (mask.dtype != np.bool_ or mask.size != self.data.size // 2):
                raise ArgumentError(f"{name} of buffer {self.name} must hold {self.data.size // 2} bools")
        if not 0 <= self.start <= self.data.size:
            raise ArgumentError(f"start of buffer {self.name} must be 0 to {self.data.size}, got {self.start}")


@dataclass(frozen=True)
class Counters:
    """What a launch did, summed over its blocks. Conflicts are cycles beyond the first of a shared-memory access.

    ``mma``, ``ldmatrix``, ``shfl``, ``votes`` and ``barriers`` count warps; ``cp_async`` and ``ex2`` count threads;
    ``wgmma`` counts warpgroups, ``tma_load`` and ``tma_store`` boxes, ``stmatrix`` warps; ``switches`` are the
    emulator's own. ``repairs`` is the kernel's counter of repaired softmax steps.
    """

    mma: int = 0
    ldmatrix: int = 0
    ldmatrix_conflicts: int = 0
    ld_shared_conflicts: int = 0
    st_shared_conflicts: int = 0
    cp_async_conflicts: int = 0
    shfl: int = 0
    votes: int = 0
    barriers: int = 0
    cp_async: int = 0
    ex2: int = 0
    switches: int = 0
    wgmma: int = 0
    tma_load: int = 0
    tma_store: int = 0
    stmatrix: int = 0
    stmatrix_conflicts: int = 0
    repairs: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


_NUM_COUNTERS = len(fields(Counters)) - 1  # repairs is read from memory, by run_forward


def _job(
    launch: LaunchLike,
    buffers: Sequence[Buffer],
    seed: int,
    random_schedule: bool,
    lazy_wgmma: bool,
    checks: bool,
    threads: int,
) -> bytes:
    params = launch.params
    head = struct.pack("<IQIIII", _MAGIC, seed % 2**64, random_schedule, lazy_wgmma, checks, threads)
    head += struct.pack("<3I", *launch.grid)
    head += struct.pack("<4I", launch.num_threads, launch.smem_bytes, len(params), len(buffers))
    parts = [head, params]
    for b in buffers:
        name = b.name.encode()
        parts.append(struct.pack("<I", len(name)) + name)
        masks = (b.readable, b.initialised)
        flags = (b.data.flags.writeable, b.output, *(mask is not None for mask in masks))
        parts.append(struct.pack("<iiIIIIQQ", b.pointer_index, b.map_index, *flags, b.start, b.data.size))
        parts += [mask.tobytes() for mask in masks if mask is not None]
        parts.append(b.data.tobytes())
    return b"".join(parts)


def _with_lines(text: str, kernel: EmulatedKernel) -> str:
    """Adds the text of the line that a report is about."""
    found = re.search(r"kernel\.cpp:(\d+)", text)
    lines = kernel.source.text.splitlines()
    if found and 0 < int(found[1]) <= len(lines):
        text += f"\n  {found[0]}: {lines[int(found[1]) - 1].strip()}"
    return text


def run(
    kernel: EmulatedKernel,
    launch: LaunchLike,
    buffers: Sequence[Buffer],
    *,
    seed: int = 1,
    random_schedule: bool = True,
    lazy_wgmma: bool | None = None,
    checks: bool = True,
    timeout: float = 120.0,
    threads: int | None = None,
) -> Counters:
    """Runs one launch and writes the results into the buffers.

    Args:
        kernel: What :func:`~fa2gen.emulator.build` returned.
        launch: Grid, threads, shared memory and parameters; pointers are filled in from the buffers.
        buffers: All the global memory there is.
        seed: Of the schedule.
        random_schedule: Run any ready thread next; otherwise mostly the one made ready last, which is faster.
        lazy_wgmma: wgmma reads its operands when it is waited for, otherwise as it is issued; a GPU does so at any
            moment between. Default: for odd seeds.
        checks: Track races, initialisation and copies in flight in shared memory (about 20 % of the time).
        timeout: Seconds.
        threads: OS threads that share the blocks; default: one for each core.

    Raises:
        EmulatorError: ``name`` is the diagnostic, e.g. ``"shared-race-read-after-write"``, ``"deadlock"``, ``"crash"``
            or ``"timeout"``. Buffers are as they were.
        ArgumentError: An empty grid or an impossible number of threads.
    """
    if min(launch.grid) < 1:
        raise ArgumentError(f"grid must have at least one block, got {launch.grid}")
    if not 32 <= launch.num_threads <= 1024 or launch.num_threads % 32:
        raise ArgumentError(f"num_threads must be a multiple of 32 from 32 to 1024, got {launch.num_threads}")
    if threads is not None and threads < 0:
        raise ArgumentError(f"threads must be at least 1, or 0 or None for one of each core, got {threads}")
    for b in buffers:
        for name in ("pointer_index", "map_index"):
            if getattr(b, name) >= len(launch.params) // 8:
                raise ArgumentError(f"{name} of buffer {b.name} is beyond the parameters: {getattr(b, name)}")
    lazy = seed % 2 == 1 if lazy_wgmma is None else lazy_wgmma
    job = _job(launch, buffers, seed, random_schedule, lazy, checks, threads or os.cpu_count() or 1)
    try:
        done = _run_program(str(kernel.program), job, timeout)
    except subprocess.TimeoutExpired:
        raise EmulatorError("timeout", f"{kernel.source.entry} has not ended after {timeout:g} s") from None
    except OSError as error:
        raise EmulatorError("crash", f"{kernel.program} cannot be run: {error}") from error
    if done.returncode:
        code = -done.returncode
        how = signal.Signals(code).name if code in set(signal.Signals) else f"exit status {done.returncode}"
        text = f"{kernel.source.entry} ended with {how}; {done.stderr.decode(errors='replace').strip()}"
        raise EmulatorError("crash", _with_lines(text, kernel))
    return _read_outcome(memoryview(done.stdout), kernel, buffers)


def _run_program(program: str, job: bytes, timeout: float) -> subprocess.CompletedProcess[bytes]:
    for pause in (0.01, 0.1, 1.0):
        try:
            return subprocess.run([program], input=job, capture_output=True, timeout=timeout)
        except OSError as error:
            # Another thread starts a process just while this one writes the program: the child holds the open file
            # until it has become its own program, and Linux runs no file that is open for writing.
            if error.errno != errno.ETXTBSY:
                raise
            time.sleep(pause)
    return subprocess.run([program], input=job, capture_output=True, timeout=timeout)


def _read_outcome(out: memoryview, kernel: EmulatedKernel, buffers: Sequence[Buffer]) -> Counters:
    def text(at: int) -> tuple[str, int]:
        (size,) = struct.unpack_from("<I", out, at)
        return bytes(out[at + 4 : at + 4 + size]).decode(errors="replace"), at + 4 + size

    if len(out) < 4 or struct.unpack_from("<I", out)[0] != _MAGIC:
        raise EmulatorError("crash", f"{kernel.program} wrote no outcome")
    name, at = text(4)
    message, at = text(at)
    if name:
        raise EmulatorError(name, _with_lines(message, kernel))
    counters = Counters(*struct.unpack_from(f"<{_NUM_COUNTERS}Q", out, at))
    at += 8 * _NUM_COUNTERS
    results = []
    for b in buffers:
        elements = b.data.size // 2
        values = initialised = None
        if b.data.flags.writeable:
            values = np.frombuffer(out, np.uint16, elements, at)
            at += b.data.size
        if b.output or b.initialised is not None:
            initialised = np.frombuffer(out, np.bool_, elements, at)
            at += elements
        results.append((values, initialised))
    for b, (_, initialised) in zip(buffers, results, strict=True):
        if b.output and b.initialised is None:
            require_written(dataclasses.replace(b, initialised=initialised))
    for b, (values, initialised) in zip(buffers, results, strict=True):
        if initialised is not None and b.initialised is not None:
            b.initialised.reshape(-1)[:] = initialised
        if values is not None:
            in_view = slice(None) if b.readable is None else b.readable.reshape(-1)
            b.data.view(np.uint16)[in_view] = values[in_view]
    return counters


def require_written(buffer: Buffer) -> None:
    """Raises unless every element of an output that is in view holds a value.

    Raises:
        EmulatorError: ``"global-not-written"``.
    """
    assert buffer.initialised is not None
    missing = ~buffer.initialised.reshape(-1)
    if buffer.readable is not None:
        missing &= buffer.readable.reshape(-1)
    places = np.flatnonzero(missing)
    if places.size:
        raise EmulatorError(
            "global-not-written",
            f"{2 * places.size} bytes of {buffer.name} were never written, the first at byte {2 * places[0]}",
        )
