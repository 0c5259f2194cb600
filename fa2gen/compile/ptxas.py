"""What ``ptxas -v`` says about a kernel: registers, spills, stack, and warnings that cost speed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import CompileError


@dataclass(frozen=True)
class ResourceUsage:
    """Resources of one compiled kernel, as ptxas reports them.

    Attributes:
        registers: Registers per thread.
        spill_store_bytes, spill_load_bytes: Bytes per thread that the kernel's code stores to and loads from local
            memory because it ran out of registers (counted once per instruction, not per execution).
        stack_bytes: Stack frame per thread.
        static_smem_bytes: Static shared memory per block; dynamic shared memory is unknown to ptxas.
        barriers: Named barriers used, barrier 0 included.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    barriers: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_STATIC_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
# Texts, whose numbers differ between toolkits, that mean another kernel than was written: every wgmma waits for the one
# before, or warps keep the registers of the launch. Either costs a large factor.
_REFUSAL = re.compile(r"serialized due to|'?setmaxnreg'? ignored", re.I)
# Texts that mean lost speed although the code is right.
_REMARK = re.compile(rf"{_REFUSAL.pattern}|Potential Performance Loss|spill(?:ed|ing)? .*to local memory", re.I)


def parse_ptxas(log: str, entry: str) -> ResourceUsage:
    """Resources of kernel ``entry`` from the output of ``nvcc -Xptxas -v``.

    Raises:
        CompileError: The log does not describe that kernel completely (``-v`` missing, output cut off, other format).
    """
    section = _section(log, entry)
    if section is None:
        found = ", ".join(name for name, _ in _ENTRY.findall(log)) or "none"
        raise CompileError(f"ptxas reported no resource usage for kernel {entry} (kernels in its output: {found})", log)
    frame, registers = _FRAME.search(section), _REGISTERS.search(section)
    if frame is None or registers is None:
        missing = "stack frame" if frame is None else "register"
        raise CompileError(f"the {missing} line for kernel {entry} is missing from ptxas's output", log)
    barriers, static_smem = _BARRIERS.search(section), _STATIC_SMEM.search(section)
    return ResourceUsage(
        registers=int(registers[1]),
        spill_store_bytes=int(frame[2]),
        spill_load_bytes=int(frame[3]),
        stack_bytes=int(frame[1]),
        # Both are left out of the line when they are zero (barriers: by toolkits before 12.x).
        static_smem_bytes=int(static_smem[1]) if static_smem else 0,
        barriers=int(barriers[1]) if barriers else 0,
    )


def performance_remarks(log: str) -> tuple[str, ...]:
    """Lines in which the compiler says that it gave up speed, e.g. wgmma "serialized due to ...", in order."""
    return tuple(dict.fromkeys(line.strip() for line in log.splitlines() if _REMARK.search(line)))


def require_asynchronous(log: str, entry: str) -> None:
    """Raises where ptxas made something else of a kernel of wgmma and setmaxnreg than was written.

    That it put in a ``warpgroup.arrive`` ("is injected") is no such case: the code is as fast without a complaint.

    Raises:
        CompileError: Its products are serialized, or its registers were not moved between warpgroups.
    """
    refusal = next((line.strip() for line in log.splitlines() if _REFUSAL.search(line)), None)
    if refusal is not None:
        raise CompileError(f"ptxas gave up on {entry} as it is written: {refusal}", log)


def _section(log: str, entry: str) -> str | None:
    """Text from the line that announces ``entry`` to the next announcement."""
    marks = list(_ENTRY.finditer(log))
    ends = [mark.start() for mark in marks[1:]] + [len(log)]
    for mark, end in zip(marks, ends, strict=False):
        if mark[1] == entry:
            return log[mark.end() : end]
    return None
