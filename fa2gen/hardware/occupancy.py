"""How many blocks of a kernel fit on an SM, and what stops the next one.

Allocation rules are those of the CUDA toolkit's occupancy calculator (``cuda_occupancy.h``): registers are granted per
warp in units of 256, warps are bound to one of four schedulers that own a quarter of the register file each, shared
memory is rounded up to 128 bytes plus 1 KB per block. Two limits of that calculator never bind here and are left out:
named barriers (an SM has at least one for each block it can hold; these kernels use one) and the register check of a
launch, which rounds a block up to whole groups of four warps (a block that passes the quarter rule passes it).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fa2gen.errors import ArgumentError

from .arch import ArchLimits

LIMITERS = ("registers", "shared memory", "warps", "blocks")
"""What can limit residency, in the order in which ties are named."""


@dataclass(frozen=True)
class Occupancy:
    """Residency of one kernel on one SM.

    Attributes:
        blocks_per_sm: Resident blocks; 0 if not even one fits.
        warps_per_sm: Resident warps.
        limiters: Every limit that binds, out of ``LIMITERS`` and in that order.
        blocks_by_limit: Blocks that each limit alone would allow.
    """

    blocks_per_sm: int
    warps_per_sm: int
    limiters: tuple[str, ...]
    blocks_by_limit: dict[str, int] = field(hash=False)

    @property
    def limiter(self) -> str:
        """The first of the limits that bind."""
        return self.limiters[0]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def occupancy(arch: ArchLimits, num_threads: int, registers_per_thread: int, smem_per_block: int) -> Occupancy:
    """Resident blocks of a kernel.

    Args:
        arch: The chip's limits.
        num_threads: Threads per block.
        registers_per_thread: As ptxas reports them.
        smem_per_block: Static and dynamic shared memory of a block, bytes.

    Raises:
        ArgumentError: A count is not positive (shared memory may be 0).
    """
    if num_threads < 1 or registers_per_thread < 1 or smem_per_block < 0:
        raise ArgumentError(
            "num_threads and registers_per_thread must be at least 1 and smem_per_block at least 0, got "
            f"{num_threads}, {registers_per_thread}, {smem_per_block}"
        )
    warps = -(-num_threads // 32)
    registers_per_warp = _round_up(registers_per_thread * 32, arch.register_allocation_unit)
    schedulers = arch.schedulers_per_sm
    warps_by_registers = arch.max_registers_per_sm // schedulers // registers_per_warp * schedulers
    smem = _round_up(smem_per_block, arch.smem_allocation_unit) + arch.reserved_smem_per_block

    by_limit = {
        "registers": 0 if registers_per_thread > arch.max_registers_per_thread else warps_by_registers // warps,
        "shared memory": 0 if smem_per_block > arch.max_smem_per_block else arch.max_smem_per_sm // smem,
        "warps": 0 if num_threads > arch.max_threads_per_block else arch.max_warps_per_sm // warps,
        "blocks": arch.max_blocks_per_sm,
    }
    blocks = min(by_limit.values())
    limiters = tuple(name for name in LIMITERS if by_limit[name] == blocks)
    return Occupancy(blocks, blocks * warps, limiters, by_limit)
