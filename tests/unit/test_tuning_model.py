"""The space and the performance model: reasons, monotone facts, and the order that an H200 measured."""

from __future__ import annotations

import math
from random import Random

import pytest

from fa2gen.constraints import default_config, infeasible_reason, smem_plan
from fa2gen.hardware import get_gpu, list_gpus
from fa2gen.problem import Problem
from fa2gen.spec import NATIVE_HEAD_DIMS, FwdConfig, KernelSpec
from fa2gen.tuning.model import Facts, estimate_facts, predict
from fa2gen.tuning.shortlist import shortlist
from fa2gen.tuning.space import config_of, grid, legal_space, params_of, register_cap
from fa2gen.tuning.tiles import masked_steps, tile_counts

A100, H200 = get_gpu("a100"), get_gpu("h200")
GOOD = FwdConfig(softmax="guarded")
SPEC = KernelSpec()


def problem(spec, seqlen, tokens=16384):
    heads = 2048 // spec.head_dim
    return Problem(tokens // seqlen, seqlen, seqlen, heads, heads // spec.gqa_ratio)


def test_the_space_is_the_legal_part_of_the_grid():
    for gpu in (A100, H200, get_gpu("rtx-4090")):
        for head_dim in (64, 128):
            spec = KernelSpec(head_dim=head_dim)
            space = legal_space(spec, gpu)
            assert len(space.configs) >= 24
            assert all(infeasible_reason(spec, config, gpu.arch) is None for config in space.configs)
            assert {*space.configs, *(config for config, _ in space.excluded)} == set(grid())
            assert all(reason for _, reason in space.excluded)


@pytest.mark.parametrize("head_dim", [*NATIVE_HEAD_DIMS, 8, 72, 200])
def test_every_head_dim_can_be_tuned_everywhere(head_dim):
    """Enough legal configs, with finite times, the default's among them; few where 256 columns meet 99 KB."""
    for gpu in list_gpus():
        spec = KernelSpec(head_dim=head_dim)
        configs = {*legal_space(spec, gpu).configs}
        assert len(configs) >= 16
        size = problem(spec, 2048)
        for config in (default_config(spec), *shortlist(spec, [size], gpu, 3)):
            prediction = predict(spec, config, size, gpu)
            assert 0 < size.flops(spec) / prediction.ms / 1e9 < gpu.mma_tflops
            assert prediction.blocks_per_sm >= config.min_blocks


def test_exclusions_name_their_limit():
    reasons = dict(legal_space(SPEC, get_gpu("rtx-3090")).excluded)
    assert "shared memory" in reasons[FwdConfig(block_n=128, step_n=128, q_in_regs=False)]
    assert "same code" in reasons[FwdConfig(block_n=32, step_n=32, num_stages=1, min_blocks=2)]


def test_params_and_configs_correspond():
    for config in grid():
        assert config_of(params_of(config)) == config
    assert config_of({**params_of(GOOD), "block_n": 64, "step_divisor": 3}) is None


def test_space_keys_tell_spaces_apart():
    assert legal_space(SPEC, A100).key() == legal_space(SPEC, A100).key()
    assert legal_space(SPEC, A100).key() != legal_space(SPEC, get_gpu("a40")).key()


@pytest.mark.parametrize(
    ("warps", "blocks", "cap"), [(4, 1, 255), (4, 2, 255), (4, 3, 168), (8, 1, 255), (8, 2, 128), (8, 3, 80)]
)
def test_register_cap_of_launch_bounds(warps, blocks, cap):
    assert register_cap(FwdConfig(num_warps=warps, min_blocks=blocks), A100.arch) == cap


def test_more_spills_registers_or_shared_memory_never_help():
    facts = estimate_facts(SPEC, GOOD, H200)
    for change in (
        lambda x: Facts(facts.registers, 64 * x, facts.smem_bytes),
        lambda x: Facts(min(255, 100 + 16 * x), 0, 32768),
        lambda x: Facts(facts.registers, 0, 16384 * (x + 1)),
    ):
        times = [predict(SPEC, GOOD, problem(SPEC, 4096), H200, change(x)).ms for x in range(12)]
        assert times == sorted(times)
        assert times[-1] > times[0]


def test_a_kernel_that_does_not_fit_has_no_time():
    prediction = predict(SPEC, GOOD, problem(SPEC, 4096), H200, Facts(255, 0, 300_000))
    assert (prediction.ms, prediction.blocks_per_sm) == (math.inf, 0)


def test_time_follows_the_work():
    for causal in (False, True):
        spec = KernelSpec(causal=causal)
        times = [predict(spec, GOOD, problem(spec, seqlen), A100).ms for seqlen in (512, 1024, 2048, 4096, 8192)]
        assert times == sorted(times)
        # At a fixed number of tokens work grows with the length; short problems waste more of it.
        assert 1.5 < times[-1] / times[-2] < 2.05
    full, causal_spec = KernelSpec(), KernelSpec(causal=True)
    ratio = predict(causal_spec, GOOD, problem(SPEC, 8192), A100).ms / predict(full, GOOD, problem(SPEC, 8192), A100).ms
    assert 0.5 < ratio < 0.65


def test_nothing_beats_the_chip():
    for gpu in list_gpus():
        for head_dim in (64, 128):
            spec = KernelSpec(head_dim=head_dim)
            size = problem(spec, 8192)
            for config in shortlist(spec, [size], gpu, 3):
                prediction = predict(spec, config, size, gpu)
                tflops = size.flops(spec) / prediction.ms / 1e9
                assert 0.35 * gpu.mma_tflops < tflops < 0.95 * gpu.mma_tflops
                assert prediction.limit in prediction.shares


def test_a_bandwidth_bound_problem_is_bound_by_hbm():
    decode = Problem(256, 1, 8192, 16, 16)
    prediction = predict(SPEC, GOOD, decode, A100)
    assert prediction.ms >= decode.min_bytes(SPEC) / (A100.hbm_gbs * 1e6)


def test_a_slower_chip_is_slower():
    times = [predict(SPEC, GOOD, problem(SPEC, 4096), get_gpu(name)).ms for name in ("h200", "a100", "a30")]
    assert times == sorted(times)


def test_shortlist_is_legal_and_ranked():
    problems = [problem(SPEC, 512), problem(SPEC, 8192)]
    best = shortlist(SPEC, problems, A100, 24)
    assert len(set(best)) == 24
    assert set(best) <= set(legal_space(SPEC, A100).configs)
    assert predict(SPEC, best[0], problems[1], A100).ms <= predict(SPEC, best[-1], problems[1], A100).ms
    assert predict(SPEC, best[0], problems[1], A100).ms < predict(SPEC, default_config(SPEC), problems[1], A100).ms
    assert shortlist(SPEC, problems, A100, 0) == []


# (head_dim, causal, seqlen) -> (block_m, block_n, step_n, num_warps, num_stages, q_in_regs, softmax, min_blocks,
# registers, spilled bytes, measured ms): bf16, 16k tokens, hidden 2048, on an H200; the fastest three and a sample.
MEASURED = {
    (128, False, 512): [
        (128, 64, 64, 4, 2, False, "guarded", 1, 254, 16, 0.2005),
        (64, 64, 64, 2, 1, False, "guarded", 1, 255, 0, 0.2104),
        (64, 64, 64, 2, 1, False, "guarded", 2, 255, 0, 0.2108),
        (128, 32, 32, 4, 3, False, "guarded", 1, 234, 0, 0.2119),
        (128, 32, 32, 4, 3, True, "guarded", 1, 255, 156, 0.2199),
        (256, 64, 64, 8, 1, False, "guarded", 1, 255, 0, 0.2287),
        (128, 32, 32, 4, 1, False, "guarded", 1, 238, 0, 0.2343),
        (64, 32, 32, 2, 2, False, "online", 1, 240, 0, 0.2433),
        (64, 32, 32, 2, 2, True, "online", 1, 255, 76, 0.2700),
        (128, 64, 64, 4, 3, False, "online", 1, 255, 8, 0.2915),
        (64, 96, 48, 2, 2, False, "online", 1, 249, 0, 0.3220),
    ],
    (128, False, 4096): [
        (128, 64, 64, 4, 2, False, "guarded", 1, 254, 16, 1.3099),
        (64, 64, 64, 2, 1, False, "guarded", 1, 255, 0, 1.3527),
        (64, 64, 64, 2, 1, False, "guarded", 2, 255, 0, 1.3607),
        (128, 96, 96, 4, 1, False, "guarded", 1, 255, 244, 1.4034),
        (256, 64, 64, 8, 3, False, "guarded", 1, 254, 16, 1.4495),
        (64, 32, 32, 2, 2, False, "guarded", 1, 234, 0, 1.4723),
        (256, 64, 64, 8, 1, False, "guarded", 1, 255, 0, 1.5296),
        (256, 64, 32, 8, 3, True, "guarded", 1, 255, 296, 1.5732),
        (64, 96, 96, 2, 1, False, "guarded", 1, 255, 244, 1.7527),
        (64, 64, 32, 2, 3, False, "guarded", 1, 234, 0, 1.8543),
        (64, 96, 96, 2, 2, False, "guarded", 1, 255, 316, 2.0368),
    ],
    (128, True, 512): [
        (64, 64, 64, 2, 1, False, "guarded", 2, 255, 0, 0.1413),
        (64, 64, 64, 2, 1, False, "guarded", 1, 255, 0, 0.1417),
        (64, 32, 32, 2, 2, False, "guarded", 1, 240, 0, 0.1484),
        (128, 64, 64, 4, 1, False, "guarded", 1, 254, 0, 0.1494),
        (128, 64, 32, 4, 2, False, "guarded", 1, 239, 0, 0.1548),
        (64, 32, 32, 2, 2, True, "guarded", 1, 255, 252, 0.1643),
        (128, 32, 32, 4, 2, False, "online", 1, 245, 0, 0.1668),
        (128, 64, 32, 4, 2, True, "guarded", 1, 255, 324, 0.1732),
        (64, 64, 64, 2, 3, False, "guarded", 1, 255, 0, 0.1811),
        (64, 64, 32, 2, 2, False, "guarded", 1, 239, 0, 0.1942),
        (64, 96, 48, 2, 2, False, "online", 1, 255, 40, 0.2097),
    ],
    (128, True, 4096): [
        (64, 64, 64, 2, 1, False, "guarded", 2, 255, 0, 0.7837),
        (128, 64, 64, 4, 2, False, "guarded", 1, 255, 16, 0.7852),
        (64, 64, 64, 2, 1, False, "guarded", 1, 255, 0, 0.7857),
        (128, 32, 32, 4, 2, False, "guarded", 1, 240, 0, 0.8323),
        (128, 96, 96, 4, 1, False, "guarded", 1, 255, 316, 0.8556),
        (128, 32, 32, 4, 2, True, "guarded", 1, 255, 252, 0.8882),
        (64, 96, 96, 2, 1, False, "guarded", 1, 255, 320, 0.9412),
        (64, 32, 32, 2, 2, False, "online", 1, 245, 0, 0.9602),
        (128, 64, 64, 8, 1, False, "guarded", 2, 128, 12, 0.9957),
        (64, 64, 64, 2, 2, False, "online", 1, 255, 0, 1.0450),
        (128, 96, 48, 8, 2, False, "online", 1, 178, 0, 1.1183),
    ],
    (64, False, 512): [
        (128, 32, 32, 4, 3, True, "guarded", 3, 168, 16, 0.2163),
        (128, 32, 32, 4, 2, True, "guarded", 3, 168, 16, 0.2184),
        (128, 32, 32, 4, 3, False, "guarded", 1, 168, 0, 0.2207),
        (128, 96, 48, 4, 2, False, "guarded", 3, 168, 0, 0.2218),
        (128, 64, 32, 4, 2, False, "guarded", 1, 168, 0, 0.2248),
        (128, 32, 32, 2, 3, False, "guarded", 1, 254, 0, 0.2330),
        (128, 64, 64, 4, 2, True, "guarded", 1, 228, 0, 0.2364),
        (64, 96, 48, 2, 2, True, "guarded", 1, 205, 0, 0.2475),
        (64, 96, 96, 2, 2, True, "guarded", 1, 255, 0, 0.2537),
        (64, 32, 32, 2, 2, True, "guarded", 1, 186, 0, 0.2643),
        (64, 128, 64, 2, 2, False, "guarded", 1, 220, 0, 0.2879),
    ],
    (64, False, 4096): [
        (64, 64, 64, 2, 2, True, "guarded", 2, 228, 0, 1.4665),
        (64, 64, 64, 2, 2, True, "guarded", 1, 230, 0, 1.4730),
        (128, 96, 48, 4, 2, False, "guarded", 3, 168, 0, 1.4791),
        (128, 128, 64, 4, 2, True, "guarded", 1, 228, 0, 1.4923),
        (128, 32, 32, 2, 3, False, "guarded", 1, 254, 0, 1.5134),
        (128, 32, 32, 4, 3, True, "guarded", 3, 168, 16, 1.5475),
        (64, 96, 96, 2, 2, False, "guarded", 1, 255, 0, 1.5797),
        (64, 32, 32, 2, 3, False, "guarded", 1, 168, 0, 1.6081),
        (128, 64, 32, 4, 2, False, "guarded", 3, 163, 0, 1.6422),
        (64, 128, 128, 2, 1, False, "online", 1, 255, 0, 1.7340),
        (64, 128, 32, 2, 2, True, "guarded", 1, 187, 0, 1.9157),
    ],
    (64, True, 512): [
        (128, 64, 32, 4, 3, False, "guarded", 3, 164, 0, 0.1638),
        (128, 32, 32, 4, 3, False, "guarded", 3, 164, 0, 0.1640),
        (128, 64, 64, 4, 2, False, "guarded", 3, 168, 16, 0.1640),
        (128, 64, 32, 4, 2, False, "guarded", 3, 163, 0, 0.1641),
        (128, 64, 32, 4, 2, True, "guarded", 3, 168, 0, 0.1673),
        (64, 64, 32, 2, 2, True, "guarded", 1, 193, 0, 0.1762),
        (128, 128, 64, 4, 2, True, "guarded", 1, 233, 0, 0.1777),
        (64, 64, 64, 2, 3, True, "online", 1, 244, 0, 0.1795),
        (64, 96, 96, 2, 1, False, "guarded", 1, 255, 0, 0.1851),
        (128, 32, 32, 2, 2, False, "guarded", 1, 255, 0, 0.1914),
        (128, 32, 32, 4, 2, False, "guarded", 1, 173, 0, 0.1982),
    ],
    (64, True, 4096): [
        (128, 128, 64, 4, 2, True, "guarded", 1, 233, 0, 0.8092),
        (64, 96, 96, 2, 2, True, "guarded", 1, 255, 0, 0.8111),
        (128, 128, 64, 4, 3, True, "guarded", 1, 232, 0, 0.8140),
        (128, 128, 128, 4, 2, False, "guarded", 1, 255, 8, 0.8177),
        (64, 96, 96, 2, 1, False, "guarded", 1, 255, 0, 0.8254),
        (128, 64, 32, 4, 3, True, "guarded", 3, 168, 0, 0.8441),
        (64, 96, 48, 2, 2, True, "guarded", 1, 210, 0, 0.8660),
        (64, 32, 32, 2, 2, True, "guarded", 1, 191, 0, 0.8786),
        (64, 64, 32, 2, 2, False, "guarded", 1, 175, 0, 0.9363),
        (128, 128, 32, 8, 3, False, "guarded", 2, 116, 0, 0.9597),
        (64, 32, 32, 2, 1, False, "guarded", 1, 173, 0, 1.0290),
    ],
}


def _case(key):
    head_dim, causal, seqlen = key
    spec = KernelSpec(head_dim=head_dim, causal=causal)
    rows = []
    for *values, registers, spilled, ms in MEASURED[key]:
        names = ("block_m", "block_n", "step_n", "num_warps", "num_stages", "q_in_regs", "softmax", "min_blocks")
        config = FwdConfig(**dict(zip(names, values, strict=True)))
        facts = Facts(registers, spilled, smem_plan(spec, config).total)
        rows.append((predict(spec, config, problem(spec, seqlen), H200, facts).ms, ms))
    return rows


@pytest.mark.parametrize("key", MEASURED)
def test_the_model_ranks_as_the_h200_measured(key):
    rows = _case(key)
    best = min(ms for _, ms in rows)
    first_three = [ms for _, ms in sorted(rows)[:3]]
    assert first_three[0] <= 1.08 * best
    assert min(first_three) <= 1.02 * best
    # Kendall's tau of times that differ by more than the measurement's noise.
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i] if abs(math.log(a[1] / b[1])) > 0.02]
    agree = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    assert 2 * agree / len(pairs) - 1 > 0.5


@pytest.mark.parametrize("key", MEASURED)
def test_the_model_predicts_what_the_h200_measured(key):
    errors = [math.log(predicted / ms) for predicted, ms in _case(key)]
    assert max(map(abs, errors)) < 0.25


def test_masked_tiles_are_those_that_the_kernel_masks() -> None:
    random = Random(7)
    for _ in range(1000):
        block_m, block_n = random.choice((16, 64, 96, 192)), random.choice((16, 32, 48, 96, 128))
        config = FwdConfig(block_m=block_m, block_n=block_n, step_n=16, softmax=random.choice(("online", "guarded")))
        seqlen_q, seqlen_k = random.randrange(1000), random.randrange(1000)
        always = config.softmax == "guarded" or seqlen_k % block_n > 0
        visited = masked = longest = 0
        for row in range(0, seqlen_q, block_m):
            seen = [max(0, end + seqlen_k - seqlen_q) for end in (row + 1, min(seqlen_q, row + block_m))]
            # From the tile that the block's first row does not see wholly to the last that its last row sees.
            count, whole = math.ceil(seen[1] / block_n), max(0, seen[0] - 1) // block_n
            visited, longest = visited + count, max(longest, count)
            masked += min(count, max(always, count - whole))
        counts = tile_counts(KernelSpec(causal=True), config, Problem(1, seqlen_q, seqlen_k, 1, 1))
        assert counts == (visited, masked, longest), (config, seqlen_q, seqlen_k)


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        # One step a tile, 32 rows a warp: of two warps on the diagonal tile neither sees it whole.
        (FwdConfig(block_m=64, num_warps=2, softmax="guarded"), (0, 1)),
        # Two tiles for four warps; the upper two see nothing of the second, the lower two all of the first.
        (FwdConfig(block_m=128, num_warps=4, softmax="guarded"), (0.25, 0.5)),
        # The online softmax has no plain step in a masked tile.
        (FwdConfig(block_m=128, num_warps=4), (0, 0.75)),
        # Two steps a tile: rows 0-31 see one of the tile's steps in part, rows 32-63 one whole and one in part.
        (FwdConfig(block_m=64, num_warps=2, step_n=32, softmax="guarded"), (0.25, 0.5)),
    ],
)
def test_paths_of_masked_tiles(config, shares):
    assert masked_steps(KernelSpec(causal=True), config) == shares


def test_without_a_causal_mask_only_the_last_step_is_masked():
    assert masked_steps(KernelSpec(), FwdConfig(block_n=128, step_n=64, softmax="guarded")) == (0.75, 0.25)
    assert masked_steps(KernelSpec(), FwdConfig(block_n=128, step_n=64)) == (0, 1)


def test_packing_pays_where_many_sequences_are_decoded():
    spec = KernelSpec(gqa_ratio=8)
    single = FwdConfig(block_m=64, softmax="guarded")
    packed = FwdConfig(block_m=64, softmax="guarded", pack_gqa=True)
    many, few = Problem(64, 1, 4096, 16, 2), Problem(4, 1, 4096, 16, 2)
    assert predict(spec, packed, many, H200).ms < 0.5 * predict(spec, single, many, H200).ms
    # 64 blocks or 8 leave most of 132 SMs idle either way, as measured: 0.0754 and 0.0756 ms.
    assert predict(spec, packed, few, H200).ms == pytest.approx(predict(spec, single, few, H200).ms, rel=0.05)
