"""What attention must compute and move: FLOPs, HBM bytes, and where that lies under a chip's roofline.

The IO analysis of the FlashAttention papers, counted exactly for one forward call. Per head, with 2-byte elements, N
queries and keys and head dim d:

- Standard attention writes S and P to memory: read Q and K, write S (4Nd + 2N²); read S, write P (4N²); read P and V,
  write O (2N² + 4Nd). Together 8N² + 8Nd bytes for 4N²d FLOPs, about d/2 FLOPs a byte.
- The tiled kernel keeps S and P on the chip. Q, K, V, O and the float32 log-sum-exp must cross once: 8Nd + 4N bytes,
  about N/2 FLOPs a byte. Each of the N/B_r query tiles asks for all of K and V, 4Nd bytes: what of that L2 does not
  serve comes from memory again, up to 4N²d/B_r bytes. So it is the rows of a query tile, B_r, that bound the traffic
  without a cache, not the columns of a key tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .hardware import Gpu
from .problem import Problem
from .spec import FwdConfig, KernelSpec

BYTES_PER_ELEMENT = 2
_BYTES_PER_LSE = 4


@dataclass(frozen=True)
class Traffic:
    """One way to do the work: what it computes and what it moves between HBM and the chip.

    Attributes:
        flops: Floating-point operations, a multiply-add counted as two.
        passes: (What moves, bytes), in the order of the algorithm.
    """

    flops: int
    passes: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """All bytes."""
        return sum(size for _, size in self.passes)

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 where nothing moves."""
        return self.flops / self.bytes if self.bytes else 0.0


def standard_traffic(spec: KernelSpec, problem: Problem) -> Traffic:
    """Attention as three operations over matrices in memory; S and P are 16-bit.

    It computes and stores all of S, also what a causal mask hides.
    """
    q, kv = _operand_bytes(spec, problem)
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    s = scores * BYTES_PER_ELEMENT
    return Traffic(
        4 * spec.head_dim * scores,
        (("read Q, K; write S", q + kv + s), ("read S; write P", 2 * s), ("read P, V; write O", s + kv + q)),
    )


def compulsory_traffic(spec: KernelSpec, problem: Problem) -> Traffic:
    """The tiled kernel where L2 serves every re-read: each byte of its tensors crosses once."""
    q, kv = _operand_bytes(spec, problem)
    return Traffic(
        problem.flops(spec),
        (("read Q", q), ("read K, V once", 2 * kv), ("write O", q), ("write LSE", _lse_bytes(problem))),
    )


def uncached_traffic(spec: KernelSpec, config: FwdConfig, problem: Problem) -> Traffic:
    """The tiled kernel where L2 serves no re-read: each query tile reads its K and V from memory."""
    q, _ = _operand_bytes(spec, problem)
    work = tile_work(spec, config, problem)
    kv = 2 * BYTES_PER_ELEMENT * spec.head_dim * work.heads * work.keys
    return Traffic(
        problem.flops(spec),
        (("read Q", q), ("read K, V per query tile", kv), ("write O", q), ("write LSE", _lse_bytes(problem))),
    )


def _operand_bytes(spec: KernelSpec, problem: Problem) -> tuple[int, int]:
    """Bytes of Q (and of O), and of K (and of V)."""
    row = spec.head_dim * BYTES_PER_ELEMENT * problem.batch
    return row * problem.num_heads_q * problem.seqlen_q, row * problem.num_heads_k * problem.seqlen_k


def _lse_bytes(problem: Problem) -> int:
    return _BYTES_PER_LSE * problem.batch * problem.num_heads_q * problem.seqlen_q


@dataclass(frozen=True)
class TileWork:
    """Tiles that the kernel visits for one query head, or for the query heads of a group whose rows are packed.

    Attributes:
        heads: How many of those the problem has.
        blocks: Query tiles, one a thread block.
        tiles: Key tiles visited by all of them; key tiles wholly above the diagonal are not.
        keys: Keys loaded by all of them; the last tile may reach beyond the end of the sequence, what it loads may not.
    """

    heads: int
    blocks: int
    tiles: int
    keys: int


def packed_heads(spec: KernelSpec, config: FwdConfig) -> int:
    """Query heads whose rows share query tiles: row r of a head or group is query ``r // packed_heads``."""
    return spec.gqa_ratio if config.pack_gqa else 1


def tile_work(spec: KernelSpec, config: FwdConfig, problem: Problem) -> TileWork:
    """What the query tiles of one head or group visit, in closed form: a call may have millions of query tiles."""
    block_m, block_n, packed = config.block_m, config.block_n, packed_heads(spec, config)
    heads = problem.batch * problem.num_heads_q // packed
    blocks, key_tiles = math.ceil(problem.seqlen_q * packed / block_m), math.ceil(problem.seqlen_k / block_n)
    if not spec.causal or blocks == 0 or key_tiles == 0:
        return TileWork(heads, blocks, blocks * key_tiles, blocks * problem.seqlen_k)
    # Counted in rows, a key is as wide as the packed heads. Query tile t sees what its last row sees, the first
    # (t + 1) block_m + offset; the last tile sees all of the keys, those before `first` none.
    offset, last = (problem.seqlen_k - problem.seqlen_q) * packed, blocks - 1
    first = max(0, -offset) // block_m
    tiles = key_tiles + _sum_of_ceilings((first + 1) * block_m + offset, block_m, last - first, block_n * packed)
    # Those that reach the last key tile load only the keys that exist of it.
    reaching = blocks - min(last, max(0, (key_tiles - 1) * block_n * packed - offset) // block_m)
    keys = tiles * block_n - reaching * (key_tiles * block_n - problem.seqlen_k)
    return TileWork(heads, blocks, tiles, keys)


def _sum_of_ceilings(first: int, step: int, count: int, divisor: int) -> int:
    """Sum of ceil((first + i step) / divisor) for i below count, first at least 0.

    Every ``divisor / gcd(step, divisor)`` terms the ceiling grows by the same whole number: so many arithmetic series.
    """
    period = divisor // math.gcd(step, divisor)
    growth = step * period // divisor
    total = 0
    for start in range(min(period, count)):
        terms = -(-(count - start) // period)
        total += terms * -(-(first + start * step) // divisor) + growth * (terms * (terms - 1) // 2)
    return total


def executed_flops(spec: KernelSpec, config: FwdConfig, problem: Problem) -> int:
    """FLOPs of the tensor cores: whole tiles at the native head dim, masked and padded parts included."""
    work = tile_work(spec, config, problem)
    return 4 * spec.native_head_dim * work.heads * work.tiles * config.block_m * config.block_n


@dataclass(frozen=True)
class Roofline:
    """The two roofs of a chip for the sm80 kernel family.

    Attributes:
        peak_tflops: ``mma.sync`` with 16-bit inputs and float32 accumulation at the maximum clock, TFLOP/s.
        hbm_gbs: Memory bandwidth, GB/s.
    """

    peak_tflops: float
    hbm_gbs: float

    @classmethod
    def of(cls, gpu: Gpu) -> Roofline:
        """The roofline of a GPU."""
        return cls(gpu.mma_tflops, gpu.hbm_gbs)

    @property
    def ridge_point(self) -> float:
        """FLOPs per byte where the roofs meet."""
        return 1e3 * self.peak_tflops / self.hbm_gbs

    def bound(self, intensity: float) -> str:
        """``"memory"`` left of the ridge point, else ``"compute"``."""
        return "memory" if intensity < self.ridge_point else "compute"

    def attainable_tflops(self, intensity: float) -> float:
        """min(peak, bandwidth x intensity), TFLOP/s."""
        return min(self.peak_tflops, 1e-3 * self.hbm_gbs * intensity)

    def least_ms(self, traffic: Traffic) -> float:
        """Time that neither roof lets it go below, ms."""
        return max(traffic.flops / (1e9 * self.peak_tflops), traffic.bytes / (1e6 * self.hbm_gbs))
