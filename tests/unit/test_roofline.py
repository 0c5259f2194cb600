"""FLOPs, bytes and the roofline, against numbers worked by hand."""

from __future__ import annotations

import math
import time
from random import Random

import pytest

from fa2gen.hardware import get_gpu
from fa2gen.problem import MAX_SEQLEN, Problem
from fa2gen.roofline import (
    Roofline,
    TileWork,
    compulsory_traffic,
    executed_flops,
    standard_traffic,
    tile_work,
    uncached_traffic,
)
from fa2gen.spec import BwdConfig, FwdConfig, KernelSpec

FULL, CAUSAL = KernelSpec(), KernelSpec(causal=True)
# One sequence, 16 heads of 4,096 queries and keys, head dim 128.
MODEL = Problem(1, 4096, 4096, 16, 16)
CONFIG = FwdConfig(block_m=128, block_n=64)


def test_sixteen_heads_of_4096_by_128() -> None:
    # 4 * 4096^2 * 128 * 16 = 137,438,953,472 FLOPs.
    # One of Q, K, V, O: 16 * 4096 * 128 * 2 = 16,777,216 bytes; S: 16 * 4096^2 * 2 = 536,870,912 bytes.
    standard = standard_traffic(FULL, MODEL)
    assert standard.flops == 137_438_953_472
    assert standard.passes == (
        ("read Q, K; write S", 570_425_344),
        ("read S; write P", 1_073_741_824),
        ("read P, V; write O", 570_425_344),
    )
    # 8 N^2 + 8 N d for each of 16 heads.
    assert standard.bytes == 16 * (8 * 4096**2 + 8 * 4096 * 128) == 2_214_592_512
    # d / 2 = 64 but for Q, K, V and O.
    assert standard.intensity == pytest.approx(62.06, abs=0.01)

    # LSE: 16 * 4096 * 4 = 262,144 bytes.
    once = compulsory_traffic(FULL, CONFIG, MODEL)
    assert once.bytes == 4 * 16_777_216 + 262_144 == 67_371_008
    assert once.bytes == MODEL.min_bytes(FULL)
    assert once.flops == standard.flops
    # N / 2 = 2048 but for the LSE.
    assert once.intensity == pytest.approx(2040.03, abs=0.01)

    # 32 query tiles of 128 rows each read K and V of their head: 32 * 2 * 16,777,216.
    never = uncached_traffic(FULL, CONFIG, MODEL)
    assert dict(never.passes)["read K, V per query tile"] == 1_073_741_824
    assert never.bytes == 1_073_741_824 + 2 * 16_777_216 + 262_144
    # Twice the rows, half the reads; wider key tiles change nothing.
    taller = uncached_traffic(FULL, FwdConfig(block_m=256, block_n=64, num_warps=8), MODEL)
    assert dict(taller.passes)["read K, V per query tile"] == 536_870_912
    assert uncached_traffic(FULL, FwdConfig(block_m=128, block_n=128), MODEL) == never


def test_causal_counts_what_is_visible() -> None:
    # Row i sees i + 1 keys: 4096 * 4097 / 2 = 8,390,656 pairs a head.
    assert compulsory_traffic(CAUSAL, CONFIG, MODEL).flops == 4 * 128 * 16 * 8_390_656 == 68_736_253_952
    # Standard attention computes and stores the hidden half too.
    assert standard_traffic(CAUSAL, MODEL) == standard_traffic(FULL, MODEL)
    # Query tile t of 32 ends at row 128 (t + 1): 2 (t + 1) key tiles of 64; their sum is 2 * 32 * 33 / 2 = 1,056.
    work = tile_work(CAUSAL, CONFIG, MODEL)
    assert (work.blocks, work.tiles, work.rows) == (32, 1_056, 67_584)
    assert executed_flops(CAUSAL, CONFIG, MODEL) == 4 * 128 * 16 * 1_056 * 128 * 64
    # K and V: 16 heads * 67,584 keys * 128 * 2 bytes * 2.
    assert dict(uncached_traffic(CAUSAL, CONFIG, MODEL).passes)["read K, V per query tile"] == 553_648_128


def test_grouped_query_heads_share_keys() -> None:
    # 32 query heads over 4: Q and O 2 * 32 * 1024 * 64 * 2 = 8,388,608 each, K and V 1,048,576 each.
    spec, problem = KernelSpec(head_dim=64, gqa_ratio=8), Problem(2, 1024, 1024, 32, 4)
    once = dict(compulsory_traffic(spec, CONFIG, problem).passes)
    assert once == {"read Q": 8_388_608, "read K, V once": 2_097_152, "write O": 8_388_608, "write LSE": 262_144}
    # Each query head's 8 tiles read K and V for themselves: 64 heads * 8 * 1024 * 64 * 2 * 2.
    never = dict(uncached_traffic(spec, CONFIG, problem).passes)
    assert never["read K, V per query tile"] == 134_217_728


def test_odd_sizes() -> None:
    # 113 queries, 203 keys, head dim 59, causal. Tiles of 64 x 32; the last row of query tile 0 sees
    # 64 + 203 - 113 = 154 keys: 5 tiles (160 keys); tile 1 sees 203: 7 tiles, of which 203 keys exist.
    spec, problem = KernelSpec(head_dim=59, causal=True, alignment=2), Problem(1, 113, 203, 1, 1)
    config = FwdConfig(block_m=64, block_n=32, step_n=32)
    work = tile_work(spec, config, problem)
    assert (work.blocks, work.tiles, work.rows) == (2, 12, 363)
    assert uncached_traffic(spec, config, problem).bytes == 2 * 59 * (2 * 113 + 2 * 363) + 4 * 113
    assert executed_flops(spec, config, problem) == 4 * 64 * 12 * 64 * 32
    # More queries than keys: rows 0 to 89 see nothing.
    short = Problem(1, 113, 23, 1, 1)
    assert tile_work(spec, config, short).tiles == 1
    assert tile_work(spec, config, Problem(1, 113, 0, 1, 1)).tiles == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (113, 203), (203, 113), (256, 256), (1, 192), (525, 31)])
def test_tiles_are_those_with_a_visible_pair(causal: bool, sizes: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = sizes
    spec = KernelSpec(causal=causal)
    pairs = [
        (row, key)
        for row in range(seqlen_q)
        for key in range(seqlen_k)
        if not causal or key <= row + seqlen_k - seqlen_q
    ]
    for config in (CONFIG, FwdConfig(block_m=64, block_n=32, step_n=32), FwdConfig(block_m=192, block_n=96, step_n=48)):
        tiles = {(row // config.block_m, key // config.block_n) for row, key in pairs}
        work = tile_work(spec, config, Problem(1, *sizes, 1, 1))
        assert work.tiles == len(tiles)
        assert work.rows == sum(min(config.block_n, seqlen_k - tile * config.block_n) for _, tile in tiles)


def test_closed_form_is_the_sum_over_query_tiles() -> None:
    random = Random(7)
    for _ in range(2000):
        block_n = random.choice((16, 32, 48, 96, 128, 256))
        config = FwdConfig(block_m=random.choice((16, 64, 96, 192, 256)), block_n=block_n, step_n=16)
        longest = random.choice((3, 300, 3000))
        problem = Problem(1, random.randrange(longest), random.randrange(longest), 1, 1)
        ends = [min(problem.seqlen_q, row + config.block_m) for row in range(0, problem.seqlen_q, config.block_m)]
        visible = [max(0, end + problem.seqlen_k - problem.seqlen_q) for end in ends]
        tiles = [math.ceil(keys / block_n) for keys in visible]
        keys = sum(min(problem.seqlen_k, count * block_n) for count in tiles)
        assert tile_work(CAUSAL, config, problem) == TileWork(1, len(ends), sum(tiles), keys), (config, problem)


def test_packed_heads_share_query_tiles() -> None:
    """Row r of a group is query r // ratio: every (row tile, key tile) with a visible pair counts once."""
    random = Random(11)
    for _ in range(400):
        ratio, block_n = random.choice((2, 3, 7, 8)), random.choice((16, 32, 48, 96))
        spec = KernelSpec(causal=random.random() < 0.8, gqa_ratio=ratio)
        config = FwdConfig(block_m=random.choice((16, 64, 96)), block_n=block_n, step_n=16, pack_gqa=True)
        seqlen_q, seqlen_k = random.randrange(1, 90), random.randrange(1, 300)
        tiles = keys = 0
        for row in range(0, seqlen_q * ratio, config.block_m):
            last = min(seqlen_q, -(-(row + config.block_m) // ratio)) if spec.causal else seqlen_q
            count = math.ceil(max(0, last + seqlen_k - seqlen_q) / block_n)
            tiles, keys = tiles + count, keys + min(seqlen_k, count * block_n)
        blocks = math.ceil(seqlen_q * ratio / config.block_m)
        problem = Problem(3, seqlen_q, seqlen_k, 2 * ratio, 2)
        assert tile_work(spec, config, problem) == TileWork(6, blocks, tiles, keys), (spec, config, problem)
    # One query of 8 heads fills 8 of 64 rows instead of 1 of 64 in 8 tiles.
    spec, decode = KernelSpec(gqa_ratio=8), Problem(4, 1, 4096, 64, 8)
    packed, single = FwdConfig(block_m=64, pack_gqa=True), FwdConfig(block_m=64)
    assert 8 * executed_flops(spec, packed, decode) == executed_flops(spec, single, decode)


def test_the_longest_sequence_is_counted_at_once() -> None:
    # 16,777,200 query tiles of 128 rows; tile t visits 2 (t + 1) key tiles: one by one they take half a minute.
    n = MAX_SEQLEN // 128
    started = time.process_time()
    assert tile_work(CAUSAL, CONFIG, Problem(1, MAX_SEQLEN, MAX_SEQLEN, 1, 1)).tiles == n * (n + 1)
    assert time.process_time() - started < 1


def test_roofline() -> None:
    # A100: 108 SMs * 1,024 multiply-adds * 2 * 1.41 GHz = 311.9 TFLOP/s over 2,039 GB/s.
    roof = Roofline.of(get_gpu("a100"))
    assert roof.peak_tflops == pytest.approx(311.87, abs=0.01)
    assert roof.ridge_point == pytest.approx(152.95, abs=0.01)
    standard, once = standard_traffic(FULL, MODEL), compulsory_traffic(FULL, CONFIG, MODEL)
    assert roof.bound(standard.intensity) == "memory"
    assert roof.attainable_tflops(standard.intensity) == pytest.approx(2.039 * 62.06, rel=1e-3)
    # 2.2146 GB over 2,039 GB/s.
    assert roof.least_ms(standard) == pytest.approx(1.0861, abs=1e-4)
    assert roof.bound(once.intensity) == "compute"
    assert roof.attainable_tflops(once.intensity) == roof.peak_tflops
    # 137.4 GFLOP over 311.9 TFLOP/s.
    assert roof.least_ms(once) == pytest.approx(0.4407, abs=1e-4)


def test_nothing_to_do_has_no_intensity() -> None:
    assert standard_traffic(FULL, Problem(0, 0, 0, 0, 0)).intensity == 0.0


BACKWARD, CAUSAL_BACKWARD = KernelSpec("bwd"), KernelSpec("bwd", causal=True)


def test_a_backward_of_sixteen_heads_of_4096_by_128() -> None:
    # One of Q, K, V, O and their gradients 16,777,216 bytes; a matrix of scores 536,870,912; sums of dQ 33,554,432.
    standard = standard_traffic(BACKWARD, MODEL)
    assert standard.flops == 2 * 137_438_953_472
    assert standard.bytes == 7 * 536_870_912 + 8 * 16_777_216
    once = compulsory_traffic(BACKWARD, BwdConfig(), MODEL)
    assert once.flops == 2.5 * 137_438_953_472
    # Tensors once, dO twice; the sums cleared, added to, and read; L and D, 4 bytes a query each, written and read.
    assert once.bytes == MODEL.min_bytes(BACKWARD) + 16_777_216 + 3 * 33_554_432 + 2 * 8 * 65_536
    # 32 key tiles of 128 keys each read Q and dO of their head, and read and write its sums.
    never = dict(uncached_traffic(BACKWARD, BwdConfig(block_n=128), MODEL).passes)
    assert never["read K, V once; Q, dO, L, D per key tile"] == 2 * 16_777_216 + 32 * (2 * 16_777_216 + 8 * 65_536)
    assert never["add to sums of dQ per tile"] == 32 * 2 * 33_554_432
    # Wider key tiles halve the reads, taller query tiles change nothing.
    wider = uncached_traffic(BACKWARD, BwdConfig(block_n=256), MODEL)
    assert dict(wider.passes)["add to sums of dQ per tile"] == 16 * 2 * 33_554_432
    assert uncached_traffic(BACKWARD, BwdConfig(block_m=128, block_n=256), MODEL) == wider


@pytest.mark.parametrize("split_heads", [False, True])
def test_a_backward_visits_the_query_tiles_that_see_its_keys(split_heads: bool) -> None:
    random = Random(5)
    for _ in range(300):
        ratio = random.choice((1, 2, 3)) if split_heads else random.choice((1, 3))
        spec = KernelSpec("bwd", causal=random.random() < 0.8, gqa_ratio=ratio)
        config = BwdConfig(
            block_m=random.choice((32, 64, 128)), block_n=random.choice((32, 64, 128)), split_heads=split_heads
        )
        seqlen_q, seqlen_k = random.randrange(1, 400), random.randrange(1, 400)
        tiles = rows = 0
        for key in range(0, seqlen_k, config.block_n):
            first = max(0, key - seqlen_k + seqlen_q) // config.block_m if spec.causal else 0
            for query in range(first * config.block_m, seqlen_q, config.block_m):
                tiles, rows = tiles + 1, rows + min(config.block_m, seqlen_q - query)
        blocks, problem = math.ceil(seqlen_k / config.block_n), Problem(3, seqlen_q, seqlen_k, 2 * ratio, 2)
        heads, walked = (6 * ratio, 1) if split_heads else (6, ratio)
        work = tile_work(spec, config, problem)
        assert work == TileWork(heads, blocks, walked * tiles, walked * rows), (spec, config, problem)
        assert executed_flops(spec, config, problem) >= problem.flops(spec)
    assert tile_work(BACKWARD, BwdConfig(), Problem(1, 0, 5, 1, 1)).tiles == 0


def test_a_backward_of_more_queries_than_keys() -> None:
    # Queries 3,584 on see a key. Of 4,096 queries in tiles of 64, by 128 keys, 4 key tiles visit 512, 384, 256 and 128.
    # The kernels before and after go over all 4,096: O and dO are 2,097,152 bytes together, LSE 16,384, L and D 32,768,
    # sums 2,097,152.
    problem, config = Problem(1, 4096, 512, 1, 1), BwdConfig(block_m=64, block_n=128)
    once = compulsory_traffic(CAUSAL_BACKWARD, config, problem)
    assert once.passes == (
        ("read O, dO, LSE; write L, D; clear sums of dQ", 2_097_152 + 16_384 + 32_768 + 2_097_152),
        ("read Q, K, V, dO, L, D once", 4 * 131_072 + 512 * 8),
        ("add to sums of dQ", 262_144),
        ("write dK, dV", 262_144),
        ("read sums; write dQ", 2_097_152 + 1_048_576),
    )
    never = uncached_traffic(CAUSAL_BACKWARD, config, problem)
    assert never.passes[1:3] == (
        ("read K, V once; Q, dO, L, D per key tile", 2 * 131_072 + 1_280 * (2 * 256 + 8)),
        ("add to sums of dQ per tile", 2 * 1_280 * 512),
    )
    assert (never.passes[0], never.passes[3:]) == (once.passes[0], once.passes[3:])


def test_a_backward_whose_query_heads_have_blocks_of_their_own() -> None:
    # 64 queries, 100 keys, head dim 40, 2 sequences of 6 query heads over 2: each of K and V 32,000 bytes, Q, O and dO
    # 61,440; sums of dQ 122,880, of dK and dV 64,000 each; L and D 6,144 together.
    spec, problem = KernelSpec("bwd", head_dim=40, gqa_ratio=3), Problem(2, 64, 100, 6, 2)
    config = BwdConfig(block_m=64, block_n=64, split_heads=True)
    assert compulsory_traffic(spec, config, problem).passes == (
        ("read O, dO, LSE; write L, D; clear sums of dQ, dK, dV", 2 * 61_440 + 3_072 + 6_144 + 122_880 + 128_000),
        ("read Q, K, V, dO, L, D once", 2 * 61_440 + 2 * 32_000 + 6_144),
        ("add to sums of dQ, dK, dV", 122_880 + 128_000),
        ("read sums; write dQ, dK, dV", 122_880 + 128_000 + 61_440 + 2 * 32_000),
    )
    # Each of 3 heads reads K and V and adds to dK and dV; each of 2 key tiles reads Q and dO, and adds to dQ.
    assert uncached_traffic(spec, config, problem).passes[1:3] == (
        ("read K, V per query head; Q, dO, L, D per key tile", 3 * 2 * 32_000 + 2 * (2 * 61_440 + 6_144)),
        ("add to sums of dQ, dK, dV per tile", 2 * 2 * 122_880 + 2 * 3 * 128_000),
    )


def test_without_rereads_served_there_is_never_less_traffic() -> None:
    """Pass by pass, and Q once is what some tile of it with a visible key holds."""
    random = Random(3)
    lengths = (1, 2, 7, 31, 64, 100, 113, 128, 200, 513, 1000, 4096)
    for number in range(3000):
        kind, ratio = ("fwd", "bwd")[number % 2], random.choice((1, 1, 2, 3, 8))
        spec = KernelSpec(
            kind,
            random.choice((40, 64, 128)),
            causal=random.random() < 0.7,
            gqa_ratio=ratio,
            deterministic=kind == "bwd" and random.random() < 0.5,
        )
        tiles = {"block_m": random.choice((32, 64, 128)), "block_n": random.choice((32, 64, 128))}
        apart = ratio > 1 and random.random() < 0.5
        config = (
            FwdConfig(**tiles, step_n=32, pack_gqa=apart) if kind == "fwd" else BwdConfig(**tiles, split_heads=apart)
        )
        seqlen_q, seqlen_k = random.choice(lengths), random.choice(lengths)
        batch, heads_k = random.randrange(1, 4), random.randrange(1, 4)
        problem = Problem(batch, seqlen_q, seqlen_k, heads_k * ratio, heads_k)
        once, never = compulsory_traffic(spec, config, problem), uncached_traffic(spec, config, problem)
        case = (spec, config, problem)
        assert len(once.passes) == len(never.passes), case
        for (_, least), (_, most) in zip(once.passes, never.passes, strict=True):
            assert 0 < least <= most, case
        packed = ratio if kind == "fwd" and apart else 1
        rows = 0
        for row in range(0, seqlen_q * packed, config.block_m):
            end = min(seqlen_q * packed, row + config.block_m)
            if not spec.causal or (end - 1) // packed + seqlen_k - seqlen_q >= 0:
                rows += end - row
        read = batch * heads_k * ratio // packed * rows
        if kind == "fwd":
            assert dict(once.passes)["read Q"] == 2 * spec.head_dim * read == dict(never.passes)["read Q"], case
        else:
            keys = 2 * 2 * spec.head_dim * batch * heads_k * seqlen_k
            assert once.passes[1][1] == (2 * 2 * spec.head_dim + 8) * read + keys, case


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_traffic_of_empty_lengths(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    """Nothing is read where nothing is seen; a forward without keys writes its output."""
    problem = Problem(2, seqlen_q, seqlen_k, 3, 3)
    for config in (FwdConfig(block_m=64, block_n=64), BwdConfig(split_heads=True), BwdConfig()):
        spec = KernelSpec("fwd" if isinstance(config, FwdConfig) else "bwd", causal=causal)
        once, never = compulsory_traffic(spec, config, problem), uncached_traffic(spec, config, problem)
        assert once.bytes <= never.bytes
    spec = KernelSpec(causal=causal)
    assert compulsory_traffic(spec, CONFIG, problem).bytes == 2 * 3 * seqlen_q * (2 * 128 + 4)


def test_the_longest_backward_is_counted_at_once() -> None:
    # Of n tiles of 64 by 64 a causal call visits n (n + 1) / 2.
    n = MAX_SEQLEN // 64
    started = time.process_time()
    assert tile_work(CAUSAL_BACKWARD, BwdConfig(), Problem(1, MAX_SEQLEN, MAX_SEQLEN, 1, 1)).tiles == n * (n + 1) // 2
    assert time.process_time() - started < 1
