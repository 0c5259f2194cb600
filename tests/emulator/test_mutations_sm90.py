"""Seeded bugs in the text of the sm90 forward: each must be caught, those of asynchronous work by name."""

from __future__ import annotations

import pytest

from fa2gen.spec import FwdSm90Config
from tests.sm90_bugs import (
    CONFIG,
    DIRECT,
    EARLY,
    FULL,
    IN_ORDER,
    LOAD_READ,
    NO_TURNS,
    NUMBERS,
    ONE_Q,
    SHARED_P,
    Bug,
    require_caught,
    require_right,
)

BUGS = {
    "a consumer does not wait for K": Bug(
        CONFIG,
        '  trace("key tile", j);\n  await_k(consumer);\n  wait_for_turn',
        '  trace("key tile", j);\n  wait_for_turn',
        EARLY,
    ),
    "a consumer does not wait for V": Bug(
        CONFIG,
        "  wgmma_commit();\n  await_v(consumer);\n",
        "  wgmma_commit();\n",
        EARLY,
    ),
    "a consumer does not wait for Q": Bug(CONFIG, "wait_full<kQueryTiles>(kBarriersQ, consumer.q);", "", EARLY),
    "the producer does not wait for a stage of K and V": Bug(
        CONFIG,
        "  wait_empty<kStages>(barriers, at);\n",
        "",
        {*LOAD_READ, "mbarrier-over-arrival", "mbarrier-tx-count", "tma-load-not-waited"},
    ),
    "the producer does not wait for a stage of Q": Bug(
        ONE_Q,
        "    wait_empty<kQueryTiles>(kBarriersQ, producer.q);\n",
        "",
        {*LOAD_READ, "mbarrier-over-arrival", "mbarrier-tx-count", "tma-load-not-waited"},
    ),
    "K is given back before its product is waited for": Bug(
        CONFIG,
        "  wgmma_wait<1>();\n  release_k(consumer);\n",
        "  release_k(consumer);\n  wgmma_wait<1>();\n",
        LOAD_READ,
    ),
    "V is given back before its product is waited for": Bug(
        CONFIG,
        "  wgmma_wait<0>();\n  release_v(consumer);\n  hand_over",
        "  release_v(consumer);\n  wgmma_wait<0>();\n  hand_over",
        LOAD_READ,
    ),
    "Q is given back before the store has read it": Bug(
        CONFIG,
        "    tma_store_wait_read<0>();\n    mbarrier_arrive",
        "    mbarrier_arrive",
        LOAD_READ,
    ),
    "the scores are read before they are waited for": Bug(
        CONFIG,
        "  wgmma_wait<1>();\n  release_k(consumer);\n",
        "  release_k(consumer);\n",
        {"wgmma-result-not-waited", *LOAD_READ},
    ),
    "O is read before it is waited for": Bug(
        CONFIG,
        "  pass_turn(consumer.group);\n  wgmma_wait<0>();\n  release_v(consumer);\n}\n\n// ---- Epilogue",
        "  pass_turn(consumer.group);\n  release_v(consumer);\n}\n\n// ---- Epilogue",
        {"wgmma-result-not-waited", *LOAD_READ},
    ),
    "P is packed while it is multiplied": Bug(
        CONFIG,
        "  wgmma_wait<0>();\n  release_v(consumer);\n  hand_over_probabilities(frag_p, acc_s);\n",
        "  hand_over_probabilities(frag_p, acc_s);\n  wgmma_wait<0>();\n  release_v(consumer);\n",
        {"wgmma-operand-changed"},
    ),
    "O is rescaled while it is added to": Bug(
        CONFIG,
        "  wgmma_wait<0>();\n  release_v(consumer);\n  hand_over_probabilities(frag_p, acc_s);\n"
        "  rescale_output(acc_o, alpha);\n",
        "  rescale_output(acc_o, alpha);\n  wgmma_wait<0>();\n  release_v(consumer);\n"
        "  hand_over_probabilities(frag_p, acc_s);\n",
        {"wgmma-accumulator-touched"},
    ),
    "a product is not committed": Bug(
        IN_ORDER,
        "accumulate);\n  wgmma_commit();\n  wgmma_wait<0>();\n  release_v(consumer);\n}\n\n// All key tiles",
        "accumulate);\n  wgmma_wait<0>();\n  release_v(consumer);\n}\n\n// All key tiles",
        {"wgmma-not-committed"},
    ),
    "no fence before a product": Bug(
        IN_ORDER,
        "  wgmma_fence();\n  issue_pv(acc_o, frag_p, value_tile(consumer.v), accumulate);\n"
        "  wgmma_commit();\n  wgmma_wait<0>();\n",
        "  issue_pv(acc_o, frag_p, value_tile(consumer.v), accumulate);\n  wgmma_commit();\n  wgmma_wait<0>();\n",
        {"wgmma-fence-missing"},
    ),
    "P in shared memory without a proxy fence": Bug(
        SHARED_P,
        "frag_p[step][3]);\n  fence_proxy_async();\n",
        "frag_p[step][3]);\n",
        {"proxy-fence-missing"},
    ),
    "P in shared memory without a barrier": Bug(
        NO_TURNS,
        "  bar_sync(kProbabilityBarrier + consumer.group, 128);\n",
        "",
        {"shared-race-read-after-write", "proxy-fence-missing", "wgmma-operand-overwritten"},
    ),
    "O without a proxy fence": Bug(
        CONFIG,
        "  fence_proxy_async();\n  bar_sync(kOutputBarrier",
        "  bar_sync(kOutputBarrier",
        {"proxy-fence-missing"},
    ),
    "O without a barrier before its store": Bug(
        CONFIG,
        "  bar_sync(kOutputBarrier + group, 128);\n",
        "",
        {"shared-race-read-after-write", "shared-uninitialised-read", "proxy-fence-missing"},
    ),
    "too few bytes are expected": Bug(
        CONFIG,
        "  mbarrier_arrive_expect_tx(full, kKeyTileBytes);\n",
        "  mbarrier_arrive_expect_tx(full, kKeyTileBytes - 64);\n",
        {"mbarrier-tx-count"},
    ),
    "too many bytes are expected": Bug(
        CONFIG,
        "  mbarrier_arrive_expect_tx(full, kQueryTileBytes);\n",
        "  mbarrier_arrive_expect_tx(full, kQueryTileBytes + 128);\n",
        {"mbarrier-tx-count"},
    ),
    "the wrong parity of a full stage": Bug(
        CONFIG,
        "stage_of(at)), phase_of(at));\n",
        "stage_of(at)), phase_of(at) ^ 1);\n",
        {*EARLY, "deadlock"},
    ),
    "the wrong parity of an empty stage": Bug(
        CONFIG,
        "stage_of(at)), phase_of(at) ^ 1);\n",
        "stage_of(at)), phase_of(at));\n",
        {"deadlock"},
    ),
    "the phase does not change": Bug(
        CONFIG,
        "at = (at - kStages) ^ 16;",
        "at -= kStages;",
        {*LOAD_READ, *EARLY, "mbarrier-over-arrival", "deadlock", "mbarrier-tx-count"},
    ),
    "a warpgroup does not give K back": Bug(
        CONFIG,
        "  release<kStagesK>(kBarriersK, consumer.k);\n",
        "  if (consumer.group > 0) release<kStagesK>(kBarriersK, consumer.k);\n",
        {"deadlock"},
    ),
    "a warpgroup does not pass its turn": Bug(
        CONFIG,
        "FUNC void pass_turn(int group) { bar_arrive(",
        "FUNC void pass_turn(int group) { if (group != 1) bar_arrive(",
        {"deadlock"},
    ),
    "the rows of groups of eight are too near": Bug(
        CONFIG,
        "return u64(1024 >> 4 | 1 << 30) << 32 | low;",
        "return u64(512 >> 4 | 1 << 30) << 32 | low;",
        {"wgmma-descriptor"},
    ),
    "the panels of V are too near": Bug(
        CONFIG,
        "return tile >> 4 | panel_bytes >> 4 << 16;",
        "return tile >> 4 | panel_bytes / 2 >> 4 << 16;",
        {"wgmma-descriptor"},
        spec=FULL,
    ),
    "steps along K are too long": Bug(
        CONFIG,
        "k / 4 * (panel_bytes >> 4) + k % 4 * 2;",
        "k / 4 * (panel_bytes >> 4) + k % 4 * 4;",
        {"wgmma-descriptor"},
    ),
    "the box of the second panel is the first": Bug(
        CONFIG,
        "map, full, panel * 64, j * kBlockN",
        "map, full, 0, j * kBlockN",
        {"wgmma-descriptor"},
    ),
    "a slot is read before it is full": Bug(
        CONFIG,
        "  wait_full<kTileSlots>(kBarriersTile, at);\n",
        "",
        {"shared-race-read-after-write", "shared-uninitialised-read"},
        # A tile whose rows see no key loads nothing after it has handed over the next tile's number.
        keys=100,
    ),
    "a slot is written before it is empty": Bug(
        CONFIG,
        "  wait_empty<kTileSlots>(kBarriersTile, at);\n",
        "",
        {"shared-race-write-after-read", "shared-race-write-after-write", "mbarrier-over-arrival"},
    ),
    "tickets are not opened": Bug(CONFIG, "  if (blockIdx.x == 0) open_tickets(p.tickets);\n", "", {"deadlock"}),
    "mbarriers are not fenced": Bug(CONFIG, "    fence_mbarrier_init();\n", "", {"mbarrier-init-not-fenced"}),
    "mbarriers are used before all know of them": Bug(
        CONFIG,
        "  }\n  sync_threads();\n}\n\n// The output of",
        "  }\n}\n\n// The output of",
        {"mbarrier-not-initialised", "mbarrier-init-not-visible"},
    ),
    "the mask is off by one": Bug(
        CONFIG,
        "if (n * 8 + e >= end) acc_s",
        "if (n * 8 + e > end) acc_s",
        {NUMBERS},
    ),
    "one key tile too few is masked": Bug(
        CONFIG, "  return (end) / kBlockN;\n", "  return end / kBlockN + 1;\n", {NUMBERS}
    ),
    "one key tile too few is visited": Bug(
        CONFIG,
        "  return (end + kBlockN - 1) / kBlockN;\n",
        "  return max_i32(end / kBlockN, 1);\n",
        {NUMBERS},
    ),
    "O is not rescaled": Bug(
        CONFIG,
        "  rescale_output(acc_o, alpha);\n}\n\n// Of all key tiles",
        "}\n\n// Of all key tiles",
        {NUMBERS},
    ),
    "the sum is not rescaled": Bug(
        CONFIG,
        "fma_f32(softmax.row_sum[r], alpha[r], tile_sum[r])",
        "softmax.row_sum[r] + tile_sum[r]",
        {NUMBERS},
    ),
    "the second product starts anew": Bug(CONFIG, "step > 0 || accumulate", "step > 0", {NUMBERS}),
    "the wrong warpgroup's rows": Bug(
        DIRECT,
        "row_0 + group * kGroupRows",
        "row_0 + (group ^ 1) * kGroupRows",
        {NUMBERS, "global-two-writers", "global-not-written"},
    ),
    "lanes exchange the wrong halves": Bug(
        DIRECT,
        "shfl_xor(place & 2 ? piece[i] : piece[i + 2], 2)",
        "shfl_xor(place & 2 ? piece[i + 2] : piece[i], 2)",
        {NUMBERS},
    ),
    "rows beyond the end are stored": Bug(
        DIRECT,
        "if (row + r * 8 < p.seqlen_q && column < kHeadDim)",
        "if (row + r * 8 <= p.seqlen_q && column < kHeadDim)",
        {"global-two-writers", "global-out-of-view", "global-out-of-range"},
    ),
    "registers are taken that nobody gave": Bug(
        CONFIG,
        "    setmaxnreg_dec<kProducerRegisters>();\n",
        "",
        {"setmaxnreg-budget", "deadlock"},
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(name, BUGS[name], monkeypatch)


@pytest.mark.parametrize("config", dict.fromkeys(bug.config for bug in BUGS.values()), ids=FwdSm90Config.slug)
def test_the_unchanged_kernel_is_right(config: FwdSm90Config) -> None:
    require_right(config, BUGS.values())
