"""Occupancy against cases worked by hand, for every limit on several compute capabilities."""

from __future__ import annotations

import pytest

from fa2gen.errors import ArgumentError
from fa2gen.hardware import LIMITERS, arch_limits, occupancy

REGISTERS, SMEM, WARPS, BLOCKS = LIMITERS
KB = 1024

# capability, threads, registers a thread, shared memory, blocks, limits that bind.
CASES = [
    # --- registers: 65,536 an SM, 16,384 for each of four schedulers, granted to a warp in units of 256.
    # 255 * 32 = 8,160, granted 8,192: a scheduler holds 2 warps, the SM 8: two blocks of 4.
    ((8, 0), 128, 255, 0, 2, (REGISTERS,)),
    # ... one block of 8, and none of 16.
    ((8, 0), 256, 255, 0, 1, (REGISTERS,)),
    ((9, 0), 512, 255, 0, 0, (REGISTERS,)),
    # 168 * 32 = 5,376 = 21 * 256 exactly: 16,384 / 5,376 = 3 warps a scheduler, 12 in all, three blocks of 4.
    ((8, 0), 128, 168, 0, 3, (REGISTERS,)),
    # One register more is granted as 176 (5,632 a warp): 16,384 / 5,632 = 2 a scheduler, 8 in all.
    ((8, 0), 128, 169, 0, 2, (REGISTERS,)),
    # 128 * 32 = 4,096: 4 warps a scheduler, 16 in all: two blocks of 8.
    ((8, 9), 256, 128, 0, 2, (REGISTERS,)),
    # 129 is granted as 136 (4,352 a warp): 3 a scheduler, 12 in all: one block of 8.
    ((8, 9), 256, 129, 0, 1, (REGISTERS,)),
    # 96 * 32 = 3,072: 5.33, so 5 warps a scheduler, 20 in all: five blocks of 4 ...
    ((12, 0), 128, 96, 0, 5, (REGISTERS,)),
    # ... although the register file as a whole holds 65,536 / 3,072 = 21.3 warps: seven blocks of 3 if it were one
    # pool, six of the four schedulers' 20.
    ((12, 0), 96, 96, 0, 6, (REGISTERS,)),
    # Odd warp counts share schedulers: 168 registers give 12 warps, so two blocks of 5, four of 3.
    ((9, 0), 160, 168, 0, 2, (REGISTERS,)),
    ((9, 0), 96, 168, 0, 4, (REGISTERS,)),
    # 100 threads are 4 warps.
    ((8, 0), 100, 168, 0, 3, (REGISTERS,)),
    # A thread cannot name a 256th register.
    ((10, 0), 32, 256, 0, 0, (REGISTERS,)),
    # --- shared memory: rounded up to 128 bytes, plus 1 KB a block.
    # A100, 164 KB: 164 / (64 + 1) = 2.52; registers alone would allow four.
    ((8, 0), 128, 128, 64 * KB, 2, (SMEM,)),
    # 81 + 1 = 82 KB fills half exactly; one byte more is rounded up to 128 and no longer fits twice.
    ((8, 0), 128, 32, 81 * KB, 2, (SMEM,)),
    ((8, 0), 128, 32, 81 * KB + 1, 1, (SMEM,)),
    # 81 KB - 127 rounds up to the same 82 KB.
    ((8, 7), 128, 32, 81 * KB - 127, 2, (SMEM,)),
    # The most a block may have, and a byte more.
    ((8, 0), 128, 32, 163 * KB, 1, (SMEM,)),
    ((8, 0), 128, 32, 163 * KB + 1, 0, (SMEM,)),
    # RTX 30 and 40, 100 KB: 64 KB once, 49 + 1 = 50 KB twice, 99 KB at most.
    ((8, 6), 128, 128, 64 * KB, 1, (SMEM,)),
    ((8, 9), 128, 128, 49 * KB, 2, (SMEM,)),
    ((8, 9), 128, 128, 49 * KB + 1, 1, (SMEM,)),
    ((12, 0), 128, 128, 99 * KB + 1, 0, (SMEM,)),
    # H100, 228 KB: 113 + 1 twice, 75 + 1 three times.
    ((9, 0), 128, 128, 113 * KB, 2, (SMEM,)),
    ((9, 0), 128, 128, 75 * KB, 3, (SMEM,)),
    ((10, 0), 128, 128, 227 * KB + 1, 0, (SMEM,)),
    # --- warps: 64 on 8.0, 9.0 and 10.0; 48 on 8.6, 8.7, 8.9 and 12.0.
    # 48 / 8 = 6; 32 registers would allow 64 / 8 = 8.
    ((8, 6), 256, 32, 0, 6, (WARPS,)),
    ((8, 7), 256, 32, 0, 6, (WARPS,)),
    # 64 / 8 = 8 with 16 registers (which allow 128 warps).
    ((9, 0), 256, 16, 0, 8, (WARPS,)),
    # 1,024 threads are 32 warps: one block of 48 warps, two of 64.
    ((8, 9), 1024, 32, 0, 1, (WARPS,)),
    ((10, 0), 1024, 16, 0, 2, (WARPS,)),
    # 1,025 threads are no block.
    ((9, 0), 1025, 32, 0, 0, (WARPS,)),
    # --- blocks: 32 on 8.0, 9.0 and 10.0; 16 on 8.6 and 8.7; 24 on 8.9 and 12.0.
    ((8, 0), 32, 32, 0, 32, (BLOCKS,)),
    ((8, 6), 32, 32, 0, 16, (BLOCKS,)),
    ((8, 7), 32, 32, 0, 16, (BLOCKS,)),
    ((8, 9), 32, 32, 0, 24, (BLOCKS,)),
    ((10, 0), 32, 32, 0, 32, (BLOCKS,)),
    # --- ties: every limit that binds is named, in the order of LIMITERS.
    # 32 registers: 65,536 / 1,024 = 64 warps, as many as the SM may hold: eight blocks of 8.
    ((8, 0), 256, 32, 0, 8, (REGISTERS, WARPS)),
    # 24 blocks of 2 warps are 48 warps.
    ((12, 0), 64, 32, 0, 24, (WARPS, BLOCKS)),
    # 128 registers: 16 warps, two blocks of 8; 228 / (112 + 1) = 2.02.
    ((9, 0), 256, 128, 112 * KB, 2, (REGISTERS, SMEM)),
    # 3 + 1 KB 25 times in 100 KB: 24 blocks; 40 registers granted (1,280 a warp): 12 a scheduler, 48 warps, 24 of 2.
    ((8, 9), 64, 40, 3 * KB + 128, 24, (REGISTERS, SMEM, WARPS, BLOCKS)),
]


@pytest.mark.parametrize(("capability", "threads", "registers", "smem", "blocks", "limiters"), CASES)
def test_worked_by_hand(
    capability: tuple[int, int], threads: int, registers: int, smem: int, blocks: int, limiters: tuple[str, ...]
) -> None:
    result = occupancy(arch_limits(capability), threads, registers, smem)
    assert (result.blocks_per_sm, result.limiters) == (blocks, limiters)
    assert result.limiter == limiters[0]
    assert result.warps_per_sm == blocks * -(-threads // 32)
    assert set(result.blocks_by_limit) == set(LIMITERS)
    assert min(result.blocks_by_limit.values()) == blocks


def test_what_each_limit_alone_allows() -> None:
    # Registers: 12 warps, 3 blocks of 4. Shared memory: 164 / 33 = 4. Warps: 64 / 4 = 16.
    result = occupancy(arch_limits((8, 0)), 128, 168, 32 * KB)
    assert result.blocks_by_limit == {REGISTERS: 3, SMEM: 4, WARPS: 16, BLOCKS: 32}


@pytest.mark.parametrize("bad", [(0, 32, 0), (128, 0, 0), (128, 32, -1)])
def test_nonsense_is_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ArgumentError, match="at least"):
        occupancy(arch_limits((8, 0)), *bad)
