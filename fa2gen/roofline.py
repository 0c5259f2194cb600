"""What attention must compute and move: FLOPs, HBM bytes, and where that lies under a chip's roofline.

The IO analysis of the FlashAttention papers, counted exactly for one forward call. Per head, with 2-byte elements, N
queries and keys and head dim d:

- Standard attention writes S and P to memory: read Q and K, write S (4Nd + 2N²); read S, write P (4N²); read P and V,
  write O (2N² + 4Nd). Together 8N² + 8Nd bytes for 4N²d FLOPs, about d/2 FLOPs a byte.
- The tiled kernel keeps S and P on the chip. Q, K, V, O and the float32 log-sum-exp must cross once: 8Nd + 4N bytes,
  about N/2 FLOPs a byte. Each of the N/B_r query tiles asks for all of K and V, 4Nd bytes: what of that L2 does not
  serve comes from memory again, up to 4N²d/B_r bytes. So it is the rows of a query tile, B_r, that bound the traffic
  without a cache, not the columns of a key tile.

A backward call, likewise:

- Standard attention keeps P from the forward: dV = P^T dO, dP = dO V^T, dS from P and dP, dQ = dS K, dK = dS^T Q. It
  moves matrices of N² eight times: 16N² bytes for 8N²d FLOPs.
- The tiled kernels compute P again (10N²d FLOPs). Sums of dQ in float32 are cleared, added to by every key tile in L2,
  and read once more, 12Nd bytes besides the tensors, and L and D of each query are written and read, 16N. Each of the
  N/B_c key tiles asks for all of Q and dO and adds to all of the sums, 12Nd bytes: so here it is the columns of a key
  tile, B_c, that bound the traffic without a cache. Where the query heads of a group have blocks of their own, dK and
  dV are such sums too.

Query tiles that a causal mask leaves no key (more queries than keys) are not read, nor added to; what a call returns is
written for them like for others. What only pads sums to whole tiles, and the semaphores of a deterministic backward, 4
bytes a tile, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .hardware import Gpu
from .problem import Problem
from .spec import BwdConfig, Config, ForwardConfig, KernelSpec

BYTES_PER_ELEMENT = 2
_BYTES_PER_LSE = 4
_BYTES_PER_SUM = 4
_BYTES_PER_LSE_AND_D = 8


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
    """Attention as one operation after the other over matrices in memory; S, P, dP and dS are 16-bit.

    It computes and stores all of them, also what a causal mask hides. The backward finds P where the forward left it.
    """
    q, kv = _operand_bytes(spec, problem)
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
    s = scores * BYTES_PER_ELEMENT
    if spec.kind == "bwd":
        return Traffic(
            8 * spec.head_dim * scores,
            (
                ("read P, dO; write dV", s + q + kv),
                ("read dO, V; write dP", q + kv + s),
                ("read P, dP; write dS", 3 * s),
                ("read dS, K; write dQ", s + kv + q),
                ("read dS, Q; write dK", s + q + kv),
            ),
        )
    return Traffic(
        4 * spec.head_dim * scores,
        (("read Q, K; write S", q + kv + s), ("read S; write P", 2 * s), ("read P, V; write O", s + kv + q)),
    )


def compulsory_traffic(spec: KernelSpec, config: Config, problem: Problem) -> Traffic:
    """The tiled kernel where L2 serves every re-read: each byte that it needs crosses once.

    Of a backward, the three kernels together: the sums of dQ cross between them.
    """
    q, kv = _read_bytes(spec, config, problem)
    if isinstance(config, BwdConfig):
        rows = _rows_read(spec, config, problem)
        sums = _BYTES_PER_SUM * spec.head_dim * rows
        if config.split_heads:
            sums += _dkv_sum_bytes(spec, problem)
        reads = ("read Q, K, V, dO, L, D once", 2 * q + 2 * kv + _BYTES_PER_LSE_AND_D * rows)
        return _backward_traffic(spec, config, problem, reads, (f"add to sums of {_summed(config)}", sums))
    return _forward_traffic(spec, config, problem, ("read K, V once", 2 * kv))


def uncached_traffic(spec: KernelSpec, config: Config, problem: Problem) -> Traffic:
    """The tiled kernel where L2 serves no re-read.

    Each query tile reads its K and V from memory; each key tile of a backward reads its Q and dO, and adds there to the
    sums of dQ (a read and a write). Where query heads have blocks of their own, each reads K and V, and adds to the
    sums of dK and dV.
    """
    work = tile_work(spec, config, problem)
    visited = work.heads * work.rows
    reads = 2 * BYTES_PER_ELEMENT * spec.head_dim * visited
    if isinstance(config, BwdConfig):
        _, kv = _read_bytes(spec, config, problem)
        sums = 2 * _BYTES_PER_SUM * spec.head_dim * visited
        reads += 2 * kv + _BYTES_PER_LSE_AND_D * visited
        often = "once"
        if config.split_heads:
            often = "per query head"
            reads += 2 * (problem.gqa_ratio - 1) * kv
            sums += 2 * problem.gqa_ratio * _dkv_sum_bytes(spec, problem)
        named_reads = (f"read K, V {often}; Q, dO, L, D per key tile", reads)
        return _backward_traffic(
            spec, config, problem, named_reads, (f"add to sums of {_summed(config)} per tile", sums)
        )
    return _forward_traffic(spec, config, problem, ("read K, V per query tile", reads))


def _forward_traffic(spec: KernelSpec, config: Config, problem: Problem, reads: tuple[str, int]) -> Traffic:
    q, _ = _read_bytes(spec, config, problem)
    o, _ = _operand_bytes(spec, problem)
    return Traffic(problem.flops(spec), (("read Q", q), reads, ("write O", o), ("write LSE", _lse_bytes(problem))))


def _backward_traffic(
    spec: KernelSpec, config: BwdConfig, problem: Problem, reads: tuple[str, int], additions: tuple[str, int]
) -> Traffic:
    """The passes of the three kernels. Those before and after the main one go over all rows, also without keys."""
    q, kv = _operand_bytes(spec, problem)
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    sums = _BYTES_PER_SUM * spec.head_dim * rows
    dkv_sums = _dkv_sum_bytes(spec, problem) if config.split_heads else 0
    first = 2 * q + _lse_bytes(problem) + _BYTES_PER_LSE_AND_D * rows + sums + dkv_sums
    before = (f"read O, dO, LSE; write L, D; clear sums of {_summed(config)}", first)
    if config.split_heads:
        after: tuple[tuple[str, int], ...] = (("read sums; write dQ, dK, dV", sums + dkv_sums + q + 2 * kv),)
    else:
        after = (("write dK, dV", 2 * kv), ("read sums; write dQ", sums + q))
    return Traffic(problem.flops(spec), (before, reads, additions, *after))


def _summed(config: BwdConfig) -> str:
    """What several blocks add to in float32."""
    return "dQ, dK, dV" if config.split_heads else "dQ"


def _dkv_sum_bytes(spec: KernelSpec, problem: Problem) -> int:
    """Bytes of the sums of dK and dV together."""
    return 2 * _BYTES_PER_SUM * spec.head_dim * problem.batch * problem.num_heads_k * problem.seqlen_k


def _rows_read(spec: KernelSpec, config: Config, problem: Problem) -> int:
    """Rows of Q, of all heads, in tiles that see a key: the others are never loaded."""
    packed = 1 if isinstance(config, BwdConfig) else packed_heads(spec, config)
    rows, first = problem.seqlen_q * packed, 0  # the first row that sees a key
    if spec.causal or problem.seqlen_k == 0:
        first = max(0, (problem.seqlen_q - problem.seqlen_k) * packed)
    loaded = rows - first // config.block_m * config.block_m if first < rows else 0
    return problem.batch * problem.num_heads_q // packed * loaded


def _read_bytes(spec: KernelSpec, config: Config, problem: Problem) -> tuple[int, int]:
    """Bytes of Q (and of a backward's dO), and of K (and of V), that are read at least once.

    The last query sees all keys, so they are read wherever there is one.
    """
    _, kv = _operand_bytes(spec, problem)
    return BYTES_PER_ELEMENT * spec.head_dim * _rows_read(spec, config, problem), kv if problem.seqlen_q else 0


def _operand_bytes(spec: KernelSpec, problem: Problem) -> tuple[int, int]:
    """Bytes of Q (and of O), and of K (and of V)."""
    row = spec.head_dim * BYTES_PER_ELEMENT * problem.batch
    return row * problem.num_heads_q * problem.seqlen_q, row * problem.num_heads_k * problem.seqlen_k


def _lse_bytes(problem: Problem) -> int:
    return _BYTES_PER_LSE * problem.batch * problem.num_heads_q * problem.seqlen_q


@dataclass(frozen=True)
class TileWork:
    """Tiles that the kernel visits for one query head, or for the query heads of a group that share thread blocks.

    A thread block of a forward stays at a tile of queries and visits tiles of keys, one of a backward stays at a tile
    of keys and visits tiles of queries.

    Attributes:
        heads: How many heads or groups the problem has.
        blocks: Thread blocks of each.
        tiles: Tiles visited by all of them; those wholly above the diagonal are not.
        rows: Keys, or queries, loaded by all of them; the last tile may reach beyond the end of the sequence, what it
            loads may not.
    """

    heads: int
    blocks: int
    tiles: int
    rows: int


def packed_heads(spec: KernelSpec, config: ForwardConfig) -> int:
    """Query heads whose rows share query tiles: row r of a head or group is query ``r // packed_heads``."""
    return spec.gqa_ratio if config.pack_gqa else 1


def tile_work(spec: KernelSpec, config: Config, problem: Problem) -> TileWork:
    """What the thread blocks of one head or group visit, in closed form: a call may have millions of them."""
    if isinstance(config, BwdConfig):
        return _backward_work(spec, config, problem)
    block_m, block_n, packed = config.block_m, config.block_n, packed_heads(spec, config)
    heads = problem.batch * problem.num_heads_q // packed
    blocks, key_tiles = math.ceil(problem.seqlen_q * packed / block_m), math.ceil(problem.seqlen_k / block_n)
    if not spec.causal or blocks == 0 or key_tiles == 0:
        return TileWork(heads, blocks, blocks * key_tiles, blocks * problem.seqlen_k)
    # Counted in rows, a key is as wide as the packed heads. Query tile t sees what its last row sees, the first
    # (t + 1) block_m + offset; the last tile sees all of the keys, those before `first` none.
    offset, last = (problem.seqlen_k - problem.seqlen_q) * packed, blocks - 1
    first = max(0, -offset) // block_m
    width = block_n * packed
    tiles = key_tiles + _sum_of_floors((first + 1) * block_m + offset + width - 1, block_m, last - first, width)
    # Those that reach the last key tile load only the keys that exist of it.
    reaching = blocks - min(last, max(0, (key_tiles - 1) * block_n * packed - offset) // block_m)
    rows = tiles * block_n - reaching * (key_tiles * block_n - problem.seqlen_k)
    return TileWork(heads, blocks, tiles, rows)


def _backward_work(spec: KernelSpec, config: BwdConfig, problem: Problem) -> TileWork:
    """Key tile t is seen from query ``t block_n - offset`` on: its block skips the query tiles before."""
    heads = problem.batch * (problem.num_heads_q if config.split_heads else problem.num_heads_k)
    walked = 1 if config.split_heads else spec.gqa_ratio  # query heads of a block
    blocks, query_tiles = math.ceil(problem.seqlen_k / config.block_n), math.ceil(problem.seqlen_q / config.block_m)
    if blocks == 0 or query_tiles == 0:
        return TileWork(heads, blocks, 0, 0)
    tiles = blocks * query_tiles
    if spec.causal:
        offset = problem.seqlen_k - problem.seqlen_q
        first = min(blocks, max(0, -(-offset // config.block_n)))
        tiles -= _sum_of_floors(first * config.block_n - offset, config.block_n, blocks - first, config.block_m)
    # Every block visits the last query tile, which may reach beyond the end.
    rows = tiles * config.block_m - blocks * (query_tiles * config.block_m - problem.seqlen_q)
    return TileWork(heads, blocks, walked * tiles, walked * rows)


def _sum_of_floors(first: int, step: int, count: int, divisor: int) -> int:
    """Sum of floor((first + i step) / divisor) for i below count, first at least 0.

    Every ``divisor / gcd(step, divisor)`` terms the floor grows by the same whole number: so many arithmetic series.
    """
    period = divisor // math.gcd(step, divisor)
    growth = step * period // divisor
    total = 0
    for start in range(min(period, count)):
        terms = -(-(count - start) // period)
        total += terms * ((first + start * step) // divisor) + growth * (terms * (terms - 1) // 2)
    return total


def executed_flops(spec: KernelSpec, config: Config, problem: Problem) -> int:
    """FLOPs of the tensor cores: whole tiles, masked and padded parts included.

    Tiles of the sm80 family are multiplied at the native head dim, those of the sm90 family in steps of 16 columns.
    """
    work = tile_work(spec, config, problem)
    products = 2 if spec.kind == "fwd" else 5
    width = -(-spec.head_dim // 16) * 16 if config.family == "sm90" else spec.native_head_dim
    return 2 * products * width * work.heads * work.tiles * config.block_m * config.block_n


@dataclass(frozen=True)
class Roofline:
    """The two roofs of a chip for a kernel family.

    Attributes:
        peak_tflops: The family's tensor instruction with 16-bit inputs and float32 accumulation at the maximum clock,
            TFLOP/s.
        hbm_gbs: Memory bandwidth, GB/s.
        instruction: ``"mma.sync"``, or ``"wgmma"`` of the sm90 family.
    """

    peak_tflops: float
    hbm_gbs: float
    instruction: str = "mma.sync"

    @classmethod
    def of(cls, gpu: Gpu, family: str = "sm80") -> Roofline:
        """The roofline of a GPU; of one without the family's instruction, that of ``mma.sync``."""
        if family == "sm90" and gpu.wgmma_tflops:
            return cls(gpu.wgmma_tflops, gpu.hbm_gbs, "wgmma")
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
