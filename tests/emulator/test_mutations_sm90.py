"""Seeded bugs in the text of the sm90 forward: each must be caught, those of asynchronous work by name.

Each is tried on one small problem with several tiles for every block, for several seeds, so that wgmma runs both when
it is issued and when it is waited for.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from fa2gen.emulator import run_forward
from fa2gen.errors import EmulatorError
from fa2gen.gate import check_forward
from fa2gen.spec import FwdSm90Config, KernelSpec
from tests.emulator.conftest import Mutate

NUMBERS = "wrong numbers"
CONFIG = FwdSm90Config(block_m=128, block_n=64, num_stages=2, q_stages=2, scheduler="dynamic")
ONE_Q = dataclasses.replace(CONFIG, q_stages=1)
SHARED_P = dataclasses.replace(CONFIG, p_in_smem=True)
# Turns order a warpgroup's warps too.
NO_TURNS = dataclasses.replace(SHARED_P, ping_pong=False)
IN_ORDER = dataclasses.replace(CONFIG, overlap=False)
DIRECT = dataclasses.replace(CONFIG, epilogue="direct")
CAUSAL = KernelSpec(head_dim=128, causal=True)
FULL = dataclasses.replace(CAUSAL, causal=False)

LOAD_READ = {"tma-load-over-read", "tma-load-over-write"}
# Who looks too early meets a copy in flight, or one that has landed by chance, which it has not waited for.
EARLY = {"tma-load-not-waited", "shared-race-read-after-write", "shared-uninitialised-read"}

# name: (config, text, replacement, what must be reported: any of these)
MUTATIONS = {
    "a consumer does not wait for K": (
        CONFIG,
        '  trace("key tile", j);\n  wait_full<kNumStages>(kBarriersK, consumer.k);\n  wait_for_turn',
        '  trace("key tile", j);\n  wait_for_turn',
        EARLY,
    ),
    "a consumer does not wait for V": (
        CONFIG,
        "  wgmma_commit();\n  wait_full<kNumStages>(kBarriersV, consumer.v);\n",
        "  wgmma_commit();\n",
        EARLY,
    ),
    "a consumer does not wait for Q": (CONFIG, "  wait_full<kQueryStages>(kBarriersQ, q);\n", "", EARLY),
    "the producer does not wait for a stage of K and V": (
        CONFIG,
        "  wait_empty<kNumStages>(barriers, at);\n",
        "",
        {*LOAD_READ, "mbarrier-over-arrival", "mbarrier-tx-count", "tma-load-not-waited"},
    ),
    "the producer does not wait for a stage of Q": (
        ONE_Q,
        "  wait_empty<kQueryStages>(kBarriersQ, producer.q);\n",
        "",
        {*LOAD_READ, "mbarrier-over-arrival", "mbarrier-tx-count", "tma-load-not-waited"},
    ),
    "K is given back before its product is waited for": (
        CONFIG,
        "  wgmma_wait<1>();\n  release_k(consumer);\n",
        "  release_k(consumer);\n  wgmma_wait<1>();\n",
        LOAD_READ,
    ),
    "V is given back before its product is waited for": (
        CONFIG,
        "  wgmma_wait<0>();\n  release_v(consumer);\n  hand_over",
        "  release_v(consumer);\n  wgmma_wait<0>();\n  hand_over",
        LOAD_READ,
    ),
    "Q is given back before the store has read it": (
        CONFIG,
        "  if (is_group_leader()) tma_store_wait_read<0>();\n",
        "",
        {*LOAD_READ, "tma-store-left-at-exit"},
    ),
    "the scores are read before they are waited for": (
        CONFIG,
        "  wgmma_wait<1>();\n  release_k(consumer);\n",
        "  release_k(consumer);\n",
        {"wgmma-result-not-waited", *LOAD_READ},
    ),
    "O is read before it is waited for": (
        CONFIG,
        "  pass_turn(consumer.group);\n  wgmma_wait<0>();\n  release_v(consumer);\n}\n\n// All key tiles",
        "  pass_turn(consumer.group);\n  release_v(consumer);\n}\n\n// All key tiles",
        {"wgmma-result-not-waited", *LOAD_READ},
    ),
    "P is packed while it is multiplied": (
        CONFIG,
        "  wgmma_wait<0>();\n  release_v(consumer);\n  hand_over_probabilities(frag_p, acc_s);\n",
        "  hand_over_probabilities(frag_p, acc_s);\n  wgmma_wait<0>();\n  release_v(consumer);\n",
        {"wgmma-operand-changed"},
    ),
    "O is rescaled while it is added to": (
        CONFIG,
        "  wgmma_wait<0>();\n  release_v(consumer);\n  hand_over_probabilities(frag_p, acc_s);\n"
        "  rescale_output(acc_o, alpha);\n",
        "  rescale_output(acc_o, alpha);\n  wgmma_wait<0>();\n  release_v(consumer);\n"
        "  hand_over_probabilities(frag_p, acc_s);\n",
        {"wgmma-accumulator-touched"},
    ),
    "a product is not committed": (
        IN_ORDER,
        "accumulate);\n  wgmma_commit();\n  wgmma_wait<0>();\n  release_v(consumer);\n}\n\n// All key tiles",
        "accumulate);\n  wgmma_wait<0>();\n  release_v(consumer);\n}\n\n// All key tiles",
        {"wgmma-not-committed"},
    ),
    "no fence before a product": (
        IN_ORDER,
        "  wgmma_fence();\n  issue_pv(acc_o, frag_p, value_tile(consumer.v), accumulate);\n"
        "  wgmma_commit();\n  wgmma_wait<0>();\n",
        "  issue_pv(acc_o, frag_p, value_tile(consumer.v), accumulate);\n  wgmma_commit();\n  wgmma_wait<0>();\n",
        {"wgmma-fence-missing"},
    ),
    "P in shared memory without a proxy fence": (
        SHARED_P,
        "frag_p[step][3]);\n  fence_proxy_async();\n",
        "frag_p[step][3]);\n",
        {"proxy-fence-missing"},
    ),
    "P in shared memory without a barrier": (
        NO_TURNS,
        "  bar_sync(kProbabilityBarrier + consumer.group, 128);\n",
        "",
        {"shared-race-read-after-write", "proxy-fence-missing", "wgmma-operand-overwritten"},
    ),
    "O without a proxy fence": (
        CONFIG,
        "  fence_proxy_async();\n  bar_sync(kOutputBarrier",
        "  bar_sync(kOutputBarrier",
        {"proxy-fence-missing"},
    ),
    "O without a barrier before its store": (
        CONFIG,
        "  bar_sync(kOutputBarrier + group, 128);\n",
        "",
        {"shared-race-read-after-write", "shared-uninitialised-read", "proxy-fence-missing"},
    ),
    "too few bytes are expected": (
        CONFIG,
        "  mbarrier_arrive_expect_tx(full, kKeyTileBytes);\n",
        "  mbarrier_arrive_expect_tx(full, kKeyTileBytes - 64);\n",
        {"mbarrier-tx-count"},
    ),
    "too many bytes are expected": (
        CONFIG,
        "  mbarrier_arrive_expect_tx(full, kQueryTileBytes);\n",
        "  mbarrier_arrive_expect_tx(full, kQueryTileBytes + 128);\n",
        {"mbarrier-tx-count"},
    ),
    "the wrong parity of a full stage": (
        CONFIG,
        "  mbarrier_try_wait(full_barrier<kStages>(barriers, at.stage), at.phase);\n",
        "  mbarrier_try_wait(full_barrier<kStages>(barriers, at.stage), at.phase ^ 1);\n",
        {*EARLY, "deadlock"},
    ),
    "the wrong parity of an empty stage": (
        CONFIG,
        "  mbarrier_try_wait(empty_barrier<kStages>(barriers, at.stage), at.phase ^ 1);\n",
        "  mbarrier_try_wait(empty_barrier<kStages>(barriers, at.stage), at.phase);\n",
        {"deadlock"},
    ),
    "the phase does not change": (
        CONFIG,
        "  at.phase ^= 1;\n",
        "",
        {*LOAD_READ, *EARLY, "mbarrier-over-arrival", "deadlock", "mbarrier-tx-count"},
    ),
    "a warpgroup does not give K back": (
        CONFIG,
        "  release<kNumStages>(kBarriersK, consumer.k);\n",
        "  if (consumer.group > 0) release<kNumStages>(kBarriersK, consumer.k);\n",
        {"deadlock"},
    ),
    "a warpgroup does not pass its turn": (
        CONFIG,
        "FUNC void pass_turn(int group) { bar_arrive(",
        "FUNC void pass_turn(int group) { if (group != 1) bar_arrive(",
        {"deadlock"},
    ),
    "the rows of groups of eight are too near": (
        CONFIG,
        "return u64(1024 >> 4 | 1 << 30) << 32 | low;",
        "return u64(512 >> 4 | 1 << 30) << 32 | low;",
        {"wgmma-descriptor"},
    ),
    "the panels of V are too near": (
        CONFIG,
        "return tile >> 4 | panel_bytes >> 4 << 16;",
        "return tile >> 4 | panel_bytes / 2 >> 4 << 16;",
        {"wgmma-descriptor"},
    ),
    "steps along K are too long": (
        CONFIG,
        "k / 4 * (panel_bytes >> 4) + k % 4 * 2;",
        "k / 4 * (panel_bytes >> 4) + k % 4 * 4;",
        {"wgmma-descriptor"},
    ),
    "the box of the second panel is the first": (
        CONFIG,
        "map, full, panel * 64, j * kBlockN",
        "map, full, 0, j * kBlockN",
        {"wgmma-descriptor"},
    ),
    "a slot is read before it is full": (
        CONFIG,
        "  wait_full<kTileSlots>(kBarriersTile, at);\n",
        "",
        {"shared-race-read-after-write", "shared-uninitialised-read"},
    ),
    "a slot is written before it is empty": (
        CONFIG,
        "  wait_empty<kTileSlots>(kBarriersTile, at);\n",
        "",
        {"shared-race-write-after-read", "shared-race-write-after-write", "mbarrier-over-arrival"},
    ),
    "tickets are not opened": (CONFIG, "  if (blockIdx.x == 0) open_tickets(p.tickets);\n", "", {"deadlock"}),
    "mbarriers are not fenced": (CONFIG, "    fence_mbarrier_init();\n", "", {"mbarrier-init-not-fenced"}),
    "mbarriers are used before all know of them": (
        CONFIG,
        "  }\n  sync_threads();\n}\n\n// One query tile",
        "  }\n}\n\n// One query tile",
        {"mbarrier-not-initialised", "mbarrier-init-not-visible"},
    ),
    "the mask is off by one": (
        CONFIG,
        "if (n * 8 + e >= end) acc_s",
        "if (n * 8 + e > end) acc_s",
        {NUMBERS},
    ),
    "one key tile too few is masked": (CONFIG, "  return end / kBlockN;\n", "  return end / kBlockN + 1;\n", {NUMBERS}),
    "one key tile too few is visited": (
        CONFIG,
        "  return (end + kBlockN - 1) / kBlockN;\n",
        "  return max_i32(end / kBlockN, 1);\n",
        {NUMBERS},
    ),
    "O is not rescaled": (
        CONFIG,
        "  rescale_output(acc_o, alpha);\n}\n\n// O += P V of",
        "}\n\n// O += P V of",
        {NUMBERS},
    ),
    "the sum is not rescaled": (
        CONFIG,
        "fma_f32(softmax.row_sum[r], alpha[r], tile_sum[r])",
        "softmax.row_sum[r] + tile_sum[r]",
        {NUMBERS},
    ),
    "the second product starts anew": (CONFIG, "step > 0 || accumulate", "step > 0", {NUMBERS}),
    "the wrong warpgroup's rows": (
        DIRECT,
        "row_0 + consumer.group * kGroupRows",
        "row_0 + (consumer.group ^ 1) * kGroupRows",
        {NUMBERS, "global-two-writers", "global-not-written"},
    ),
    "lanes exchange the wrong halves": (
        DIRECT,
        "shfl_xor(place & 2 ? piece[i] : piece[i + 2], 2)",
        "shfl_xor(place & 2 ? piece[i + 2] : piece[i], 2)",
        {NUMBERS},
    ),
    "rows beyond the end are stored": (
        DIRECT,
        "if (row + r * 8 < p.seqlen_q && column < kHeadDim)",
        "if (row + r * 8 <= p.seqlen_q && column < kHeadDim)",
        {"global-two-writers", "global-out-of-view", "global-out-of-range"},
    ),
    "registers are taken that nobody gave": (
        CONFIG,
        "    setmaxnreg_dec<kProducerRegisters>();\n",
        "",
        {"setmaxnreg-budget", "deadlock"},
    ),
}


# A tile whose rows see no key loads nothing after it has handed over the next tile's number.
KEYS = {"a slot is read before it is full": 100}


def _inputs(seqlen_k: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, seqlen, 3, 128, generator=generator).bfloat16() for seqlen in (300, seqlen_k, seqlen_k)]


@pytest.mark.parametrize("name", MUTATIONS)
def test_caught(name: str, mutate: Mutate) -> None:
    config, old, new, expected = MUTATIONS[name]
    spec = FULL if name == "the panels of V are too near" else CAUSAL
    mutate(old, new)
    q, k, v = _inputs(KEYS.get(name, 333))
    found = {}
    for seed in (1, 2):
        try:
            out, lse, _ = run_forward(spec, config, q, k, v, softmax_scale=0.09, seed=seed, num_sms=2, timeout=60)
        except EmulatorError as error:
            found[error.name] = str(error)
        else:
            passed = check_forward(out, lse, q, k, v, causal=spec.causal, softmax_scale=0.09).passed
            found["nothing" if passed else NUMBERS] = ""
    assert {*found} & expected, found
    assert {*found} <= expected | {"nothing"}, found
    if "deadlock" in found and name != "tickets are not opened":
        assert re.search(r"barrier .* at .*line|mbarrier .*: phase \d+ lacks", found["deadlock"]), found["deadlock"]


def test_the_unchanged_kernel_is_right() -> None:
    q, k, v = _inputs(333)
    for config in (CONFIG, ONE_Q, SHARED_P, NO_TURNS, IN_ORDER, DIRECT):
        for seed in (1, 2, 3, 4):
            out, lse, _ = run_forward(CAUSAL, config, q, k, v, softmax_scale=0.09, seed=seed, num_sms=2)
            assert check_forward(out, lse, q, k, v, causal=True, softmax_scale=0.09).passed
