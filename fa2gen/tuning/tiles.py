"""How many key tiles a kernel visits, and how much of the masked ones takes which path."""

from __future__ import annotations

import functools
import math

from fa2gen.problem import Problem
from fa2gen.roofline import packed_heads, tile_work
from fa2gen.spec import FwdConfig, KernelSpec


def masked_steps(spec: KernelSpec, config: FwdConfig) -> tuple[float, float]:
    """Of a warp's steps in masked tiles, the shares that are plain and masked; the rest its rows do not see."""
    shape = config.block_m, config.block_n, config.step_n, config.warp_rows
    if spec.causal:
        return _causal_steps(*shape, packed_heads(spec, config), config.softmax == "guarded")
    # Without a causal mask the last step of the keys is masked, or gives the guarded softmax its reference; the others
    # of its tile are plain in a guarded kernel.
    online = config.step_n / config.block_n if config.softmax == "guarded" else 1.0
    # A first reference needs the maxima of one step, and rescales nothing.
    sampled = 0.5 if config.softmax == "guarded" else 1.0
    return 1 - online * sampled, online * sampled


@functools.cache
def _causal_steps(
    block_m: int, block_n: int, step_n: int, warp_rows: int, packed: int, guarded: bool
) -> tuple[float, float]:
    """:func:`masked_steps` over a period of query blocks far from both ends of the sequence."""
    plain = online = hidden = 0
    width = block_n * packed  # of a tile of keys, in rows
    for block in range(width // math.gcd(block_m, width)):
        start = width * packed * 16 + block * block_m
        first, last = start // width * block_n, -(-(start + block_m) // width) * block_n
        for row in range(start, start + block_m, warp_rows):
            first_end, last_end = row // packed + 1, (row + warp_rows - 1) // packed + 1
            for column in range(first, last, step_n):
                if guarded and column + step_n < first_end:
                    plain += 1
                elif column < last_end:
                    online += 1
                else:
                    hidden += 1
    total = max(1, plain + online + hidden)
    return plain / total, online / total


def tile_counts(spec: KernelSpec, config: FwdConfig, problem: Problem) -> tuple[int, int, int]:
    """Key tiles visited for one head (or packed group): all, those on the masked path, and those of the longest block.

    As in ``roofline.tile_work``, lengths are counted in rows: a key is as wide as the packed heads.
    """
    packed = packed_heads(spec, config)
    block_m, block_n = config.block_m, config.block_n * packed
    seqlen_q, seqlen_k = problem.seqlen_q * packed, problem.seqlen_k * packed
    work, key_tiles = tile_work(spec, config, problem), math.ceil(seqlen_k / block_n)
    always_masked = 1 if config.softmax == "guarded" or seqlen_k % block_n else 0
    if not spec.causal:
        return work.tiles, work.blocks * min(always_masked, key_tiles), key_tiles
    if work.tiles == 0:
        return 0, 0, 0
    offset = seqlen_k - seqlen_q

    def masked_tiles(block: int) -> int:
        first_row, rows = block * block_m, min(seqlen_q, (block + 1) * block_m)
        count = math.ceil((rows + offset) / block_n)
        # A tile is whole for the first row if it also sees a key to the right of it.
        return min(count, max(always_masked, count - max(0, (first_row + offset) // block_n)))

    # Blocks before `first` see nothing. Between it and the last one the count repeats: there are as many different ones
    # as blocks in a period, and a call may have millions of blocks.
    first, last = max(0, -offset) // block_m, work.blocks - 1
    masked = sum(masked_tiles(block) for block in {first, last})
    period = block_n // math.gcd(block_m, block_n)
    for start in range(first + 1, min(last, first + 1 + period)):
        masked += masked_tiles(start) * math.ceil((last - start) / period)
    return work.tiles, masked, key_tiles
