"""The model of the sm90 family's forward, against times of an H200; and beside the sm80 family's."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from fa2gen.constraints import default_config_of
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import FwdSm90Config, KernelSpec
from fa2gen.tuning.model import estimate_facts, model_version, predict, validity
from fa2gen.tuning.prediction import Facts
from fa2gen.tuning.report import usual_problem
from fa2gen.tuning.shortlist import shortlist
from fa2gen.tuning.space import legal_space
from tests.model_ranks import kendall_tau, regret

H200, H100 = get_gpu("h200"), get_gpu("h100")


def _measured():
    """(spec, problem) -> {config: TFLOP/s}: bf16, 16k tokens, hidden 2048, on an H200."""
    cases = {}
    with (Path(__file__).parents[1] / "fixtures/h200_sm90_forward_rates.csv").open() as file:
        for row in csv.DictReader(file):
            spec = KernelSpec(head_dim=int(row["head_dim"]), causal=row["mask"] == "causal")
            size = usual_problem(spec, int(row["seqlen"]), int(row["seqlen"]))
            cases.setdefault((spec, size), {})[FwdSm90Config.from_slug(row["config"])] = float(row["tflops"])
    return cases


MEASURED = _measured()


def rate(spec, config, size, gpu=H200):
    return size.flops(spec) / predict(spec, config, size, gpu).ms / 1e9


def best(spec, size, gpu, family):
    return rate(spec, shortlist(spec, [size], gpu, 1, family)[0], size, gpu)


def _times(case):
    spec, size = case
    return [
        (predict(spec, config, size, H200).ms, size.flops(spec) / rate / 1e9) for config, rate in MEASURED[case].items()
    ]


def test_what_was_fastest_is_among_the_model_s_first():
    """Of the configs that a session timed for one kernel and size."""
    assert len(MEASURED) == 48
    assert sum(map(len, MEASURED.values())) == 768
    for case in MEASURED:
        assert regret(_times(case), 8) < 0.015, case
        assert regret(_times(case), 4) < 0.05, case
    taus = [kendall_tau(_times(case)) for case in MEASURED]
    assert sum(taus) / len(taus) > 0.6


def test_predicted_rates_are_near_those_measured():
    errors = [
        math.log(rate(spec, config, size) / tflops)
        for (spec, size), row in MEASURED.items()
        for config, tflops in row.items()
    ]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.06
    assert max(map(abs, errors)) < 0.24


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: f"{case[0].slug()}_{case[1].seqlen_k}")
def test_what_was_fastest_is_near_the_model_s_best(case):
    """Of the whole space, most of which is not timed: the model takes nothing for much faster than what was."""
    spec, size = case
    fastest = max(MEASURED[case], key=MEASURED[case].__getitem__)
    assert best(spec, size, H200, "sm90") < 1.2 * rate(spec, fastest, size)


@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("head_dim", "low", "high"), [(64, 1.2, 1.6), (128, 1.4, 1.9), (256, 1.7, 2.2)])
def test_hopper_s_own_family_wins_where_sequences_are_long(gpu, head_dim, low, high):
    """Measured on an H200, 8k keys, full: 1.57, 1.74 and 1.90 times the sm80 family."""
    spec = KernelSpec(head_dim=head_dim)
    size = usual_problem(spec, 8192, 8192)
    assert low < best(spec, size, gpu, "sm90") / best(spec, size, gpu, "sm80") < high


@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_the_default_is_near_the_model_s_best(head_dim, causal):
    spec = KernelSpec(head_dim=head_dim, causal=causal)
    for seqlen in (1024, 8192):
        size = usual_problem(spec, seqlen, seqlen)
        assert rate(spec, default_config_of(spec, "sm90"), size) > 0.8 * best(spec, size, H200, "sm90")


def test_nothing_beats_the_chip():
    peak = 4096 * H200.num_sms * H200.boost_ghz / 1e3
    for head_dim in (64, 128, 192, 256):
        spec = KernelSpec(head_dim=head_dim)
        size = usual_problem(spec, 8192, 8192)
        for config in legal_space(spec, H200, "sm90").configs:
            prediction = predict(spec, config, size, H200)
            assert 0.1 * peak < size.flops(spec) / prediction.ms / 1e9 < 0.9 * peak
            assert (prediction.blocks_per_sm, prediction.limit in prediction.shares) == (1, True)


def test_time_follows_the_work():
    for causal in (False, True):
        spec = KernelSpec(causal=causal)
        config = default_config_of(spec, "sm90")
        times = [predict(spec, config, usual_problem(spec, n, n), H200).ms for n in (512, 1024, 2048, 4096, 8192)]
        assert times == sorted(times)
        assert 1.6 < times[-1] / times[-2] < 2.05
    decode = Problem(256, 1, 8192, 16, 16)
    assert predict(KernelSpec(), FwdSm90Config(), decode, H200).ms >= decode.min_bytes(KernelSpec()) / (
        H200.hbm_gbs * 1e6
    )
    assert predict(KernelSpec(), FwdSm90Config(), Problem(1, 1, 0, 1, 1), H200).ms > 0


def test_spills_cost_and_too_much_shared_memory_has_no_time():
    spec, config = KernelSpec(), FwdSm90Config()
    size, facts = usual_problem(spec, 4096, 4096), estimate_facts(spec, config, H200)
    assert (facts.registers, facts.spill_bytes) == (168, 0)
    times = [predict(spec, config, size, H200, Facts(168, 8 * n, facts.smem_bytes)).ms for n in range(4)]
    assert times == sorted(set(times))
    assert predict(spec, config, size, H200, Facts(168, 0, 300_000)).ms == math.inf


def test_models_have_versions_and_chips_of_their_own():
    assert len({model_version(*model) for model in (("fwd", "sm80"), ("fwd", "sm90"), ("bwd", "sm80"))}) == 3
    assert validity(H200, "fwd", "sm90") == "calibrated on this chip"
    assert "H100" in validity(H100, "fwd", "sm90")
