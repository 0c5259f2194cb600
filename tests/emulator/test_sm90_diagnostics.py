"""Faults of kernels for sm_90a, each named; the right kernels are in test_sm90_primitives.py."""

from __future__ import annotations

import pytest

from fa2gen.emulator import EmulatedKernel, build
from fa2gen.errors import EmulatorError
from tests.emulator.test_sm90_primitives import run_probe
from tests.sm90_kernels import sm90_source
from tests.sm90_small_attention import PARTS, SHAPES, small_attention, small_attention_probe

# Where several orders stay open, which consequence shows first depends on the schedule.
TOO_EARLY = "tma-load-not-waited|shared-uninitialised-read"
OVERWRITTEN = "tma-load-over-read|tma-load-over-write|mbarrier-over-arrival"
RELEASE = PARTS["release"]
LATE_PACK = PARTS["fence_o"] + PARTS["pack"]

# Changes of the small attention: parts, name, part of the message.
CASES: dict[str, tuple[dict[str, str], str, str]] = {
    # mbarriers and TMA
    "no wait for K": ({"wait_full": ""}, TOO_EARLY, "wgmma_ss reads"),
    "no wait for Q": ({"wait_q": ""}, TOO_EARLY, "wgmma_ss reads"),
    "one warp does not wait for K": ({"wait_full": f"if (warp % 4 != 2) {PARTS['wait_full']}"}, TOO_EARLY, ""),
    "the parity of K never changes": (
        {"wait_full": "mbarrier_try_wait(full + 8 * stage, 0);"},
        "tma-load-not-waited|tma-load-over-read|mbarrier-over-arrival|deadlock",
        "",
    ),
    "no wait for an empty stage": ({"wait_empty": ""}, OVERWRITTEN, ""),
    "the wrong parity of empty stages": (
        {"wait_empty": "mbarrier_try_wait(empty + 8 * stage, round / kStages & 1);"},
        "deadlock",
        "empty+0x0",
    ),
    "nobody frees": (
        {"release": ""},
        "deadlock",
        "empty+0x0 (shared address base+0x20): phase 0 lacks 2 of 2 arrivals",
    ),
    "every thread frees": (
        {"release": "mbarrier_arrive(empty + 8 * stage);"},
        "mbarrier-over-arrival|tma-load-over-read",
        "",
    ),
    "freed before P V is complete": (
        {"wait_o": "", "release": RELEASE + PARTS["wait_o"]},
        "tma-load-over-read",
        "K+0x",
    ),
    "freed before Q K is complete": (
        {"commit_s": PARTS["commit_s"] + RELEASE, "release": ""},
        "tma-load-over-read|wgmma-descriptor|tma-load-not-waited",
        "",
    ),
    "freed by a thread that has not waited": (
        {"release": "if (tid % 128 == 0) mbarrier_arrive(empty + 8 * stage);", "wait_o": "wgmma_wait<1>();"},
        "tma-load-over-read",
        "wgmma of warpgroup",
    ),
    "fewer bytes expected": (
        {"load": PARTS["load"].replace("8192", "8176")},
        "mbarrier-tx-count",
        "tma_load brings 8192 bytes, but phase 0 of full+0x0 expects 8176 more",
    ),
    "more bytes expected": (
        {"load": PARTS["load"].replace("8192", "8208")},
        "mbarrier-tx-count",
        "full+0x0 (shared address base+0x0): phase 0 lacks 0 of 1 arrivals and 16 bytes",
    ),
    "no bytes expected": (
        {"load": PARTS["load"].replace("_expect_tx(full + 8 * stage, 8192)", "(full + 8 * stage)")},
        "mbarrier-tx-count",
        "expects 0 more",
    ),
    "expected after the copy": (
        {"load": "\n".join(reversed(PARTS["load"].split("\n")))},
        "mbarrier-tx-count",
        "comes before the copies",
    ),
    "initialisation not fenced": ({"fence_init": ""}, "mbarrier-init-not-fenced", "full_q+0x0"),
    "initialisation fenced after the barrier": (
        {"fence_init": "", "after_init": "sync_threads(); if (tid == 0) fence_mbarrier_init();"},
        "mbarrier-init-not-fenced",
        "initialised by thread 0",
    ),
    "initialisation fenced by another thread": (
        {"fence_init": "", "after_init": "if (tid == 1) fence_mbarrier_init(); sync_threads();"},
        "mbarrier-init-not-fenced",
        "",
    ),
    "no barrier after the initialisation": (
        {"after_init": ""},
        "mbarrier-init-not-visible|mbarrier-not-initialised|mbarrier-init-not-fenced",
        "",
    ),
    "a thread reads Q before it is there": ({"wait_q": "ld_shared<u32>(q + 4 * lane);"}, TOO_EARLY, "ld_shared"),
    # Registers of wgmma
    "no fence before Q K": ({"fence_s": ""}, "wgmma-fence-missing", "wgmma_ss uses registers as its accumulators"),
    "no fence before P V": ({"fence_o": ""}, "wgmma-fence-missing", ""),
    "P packed after the fence": ({"pack": "", "fence_o": LATE_PACK}, "wgmma-fence-missing", "its left operand"),
    "O scaled after the fence": (
        {"fence_o": "wgmma_fence(); if (round > 0) o[5] *= 0.5f;"},
        "wgmma-fence-missing",
        "its accumulators, but they have changed",
    ),
    "S not waited for": ({"wait_s": ""}, "wgmma-result-not-waited", ""),
    "S in a group that the wait leaves out": ({"wait_s": "wgmma_wait<1>();"}, "wgmma-result-not-waited", ""),
    "S not committed": ({"commit_s": ""}, "wgmma-not-committed", "4 wgmmas of this thread"),
    "O not waited for": ({"wait_o": ""}, "tma-load-over-read|wgmma-result-not-waited", ""),
    "O written while it is in flight": (
        {"commit_o": "wgmma_commit(); o[7] = 1.f;"},
        "wgmma-accumulator-touched",
        "d[7] of the wgmma",
    ),
    "O scaled while it is in flight": (
        {"commit_o": "wgmma_commit(); o[7] *= 2.f;"},
        "wgmma-accumulator-touched",
        "d[7]",
    ),
    "P changed while it is read": (
        {"commit_o": "wgmma_commit(); frag[2][1] ^= 1;"},
        "wgmma-operand-changed",
        "the wgmma_rs at",
    ),
    "a value of O stored while it is in flight": (
        {"commit_o": "wgmma_commit(); if (round == 2) st_global(p.out + tid, as_bits(o[3]));"},
        "wgmma-result-not-waited",
        "",
    ),
    # Divergence
    "a warp without a fence": (
        {"fence_s": "if (warp % 4 != 3) wgmma_fence();"},
        "warpgroup-divergence|wgmma-fence-missing",
        "wgmma",
    ),
    "a warp in another place": (
        {"commit_s": "if (warp % 4 == 1)\n wgmma_commit();\n else\n wgmma_commit();"},
        "warpgroup-divergence",
        "wgmma_commit at kernel.cpp",
    ),
    "half a warp without a commit": (
        {"commit_s": "if (lane < 16) wgmma_commit();"},
        "warpgroup-divergence|wgmma-not-committed",
        "",
    ),
    "a warp that waits for fewer groups": (
        {"wait_o": "if (warp % 4 == 0)\n wgmma_wait<0>();\n else\n wgmma_wait<1>();"},
        "warpgroup-divergence",
        "wgmma_wait",
    ),
    "warps that disagree on accumulate": (
        {"issue_o": PARTS["issue_o"].replace("round > 0 ||", "warp == 1 ||")},
        "wgmma-descriptor",
        "accumulate is",
    ),
    "a warp with a descriptor of its own": (
        {"issue_s": PARTS["issue_s"].replace("operand(q +", "operand(q + warp % 4 / 3 * 1024 +")},
        "wgmma-descriptor",
        "descriptor",
    ),
    # Descriptors
    "a stride that is too small": (
        {"issue_s": PARTS["issue_s"].replace("operand(k + 32 * step)", "operand(k + 32 * step, 16, 512)")},
        "wgmma-descriptor",
        "row 8, columns 0 to 7 of operand b, at K+0x",
    ),
    "a stride that is too large": (
        {"issue_o": PARTS["issue_o"].replace("2048 * step, 8192", "2048 * step, 8192, 2048")},
        "wgmma-descriptor|shared-uninitialised-read|tma-load-not-waited",
        "",
    ),
    "rows of 64 bytes where there are 128": (
        {"issue_s": PARTS["issue_s"].replace("operand(q + 32 * step)", "operand(q + 32 * step, 16, 1024, 2)")},
        "wgmma-descriptor",
        "of operand a",
    ),
    "no swizzle": (
        {"issue_s": PARTS["issue_s"].replace("operand(q + 32 * step)", "operand(q + 32 * step, 16, 1024, 0)")},
        "wgmma-descriptor",
        "its layout is 0",
    ),
    "a base offset": (
        {"issue_s": PARTS["issue_s"].replace("operand(q + 32 * step)", "(operand(q + 32 * step) | 1ull << 49)")},
        "wgmma-descriptor",
        "its base offset is 1",
    ),
    # The way out: generic stores, the proxy fence, TMA
    "O staged without a proxy fence": ({"fence_proxy": ""}, "proxy-fence-missing", "tma_store reads Q+0x"),
    "the proxy fence comes first": (
        {"fence_proxy": "", "stage": PARTS["fence_proxy"] + PARTS["stage"]},
        "proxy-fence-missing",
        "executed no fence_proxy_async since",
    ),
    "the proxy fence comes after the barrier": (
        {"fence_proxy": "", "meet": PARTS["meet"] + PARTS["fence_proxy"]},
        "proxy-fence-missing",
        "",
    ),
    "one warp does not fence": ({"fence_proxy": "if (warp % 4 != 2) fence_proxy_async();"}, "proxy-fence-missing", ""),
    "no barrier before the store": (
        {"meet": ""},
        "shared-race-read-after-write|wgmma-|shared-uninitialised-read|proxy-fence-missing",
        "tma_store reads",
    ),
    "O staged over the other warpgroup's Q": (
        {"stage": PARTS["stage"].replace("q + swizzled", "tile + 8192 * (1 - group) + swizzled")},
        "wgmma-operand-overwritten|shared-race-write-after-write|tma-load-not-waited",
        "",
    ),
    "the store is not waited for": (
        {"store": PARTS["store"].replace("tma_store_wait_read<0>();", "")},
        "tma-store-left-at-exit",
        "no tma_store_wait_read covers",
    ),
    "the store is not committed": (
        {"store": PARTS["store"].replace("tma_store_commit();", "")},
        "tma-store-left-at-exit",
        "never committed",
    ),
    "overwritten while the store reads": (
        {"store": PARTS["store"].replace("tma_store_commit();", "tma_store_commit(); st_shared(q + 64, 0u);")},
        "tma-store-overwrite",
        "st_shared to Q+0x",
    ),
    "overwritten by another thread while the store may read": (
        {"store": PARTS["store"] + " if (tid % 128 == 100) st_shared(q + 64, 0u);"},
        "tma-store-overwrite|shared-race-",
        "",
    ),
    "a copy over what the store reads": (
        {
            "store": PARTS["store"].replace(
                "tma_store_commit();",
                """tma_store_commit();
    const u32 next = smem + 128 + 8 * group;
    mbarrier_init(next, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(next, 8192);
    tma_load(q, p.a, next, 0, 0, 0, 0);""",
            )
        },
        "tma-load-over-read",
        "which the tma_store at",
    ),
    "two warpgroups store to one place": (
        {"store": PARTS["store"].replace("64 * group, 0, 0", "32 * group, 0, 0")},
        "global-two-writers",
        "tma_store writes o",
    ),
    "a store to an input": ({"store": PARTS["store"].replace("p.o", "p.a")}, "global-read-only", "of a at byte"),
    "a store over what a product reads": (
        {"commit_s": "wgmma_commit(); if (round == 1 && tid % 128 == 64) st_shared(q + 16, 0u);"},
        "wgmma-operand-overwritten",
        "st_shared to Q+0x",
    ),
    "ends with products in flight": (
        {"wait_o": "if (round == kRounds - 1) return; wgmma_wait<0>();"},
        "wgmma-left-at-exit",
        "the first issued at",
    ),
    "ends with products that nobody committed": (
        {"commit_o": "if (round == kRounds - 1) return; wgmma_commit();"},
        "wgmma-not-committed",
        "the thread ends",
    ),
}


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    bodies = {name: small_attention(**changes) for name, (changes, _, _) in CASES.items()}
    return build(sm90_source(bodies, "host", "bf16", SHAPES))


PROBE = small_attention_probe("bf16")


@pytest.mark.parametrize("name", CASES)
def test_fault_is_named(kernel: EmulatedKernel, name: str) -> None:
    changes, expected, says = CASES[name]
    assert small_attention(**changes) != PROBE.text
    which = list(CASES).index(name)
    for seed in range(2):
        for lazy in (True, False):
            for random_schedule in (True, False):
                with pytest.raises(EmulatorError) as caught:
                    run_probe(
                        kernel, PROBE, which, seed=seed, lazy_wgmma=lazy, random_schedule=random_schedule, timeout=30
                    )
                error = caught.value
                assert any(error.name.startswith(each) for each in expected.split("|")), str(error)
                assert says in str(error), str(error)


def test_deadlock_names_what_is_waited_for(kernel: EmulatedKernel) -> None:
    with pytest.raises(EmulatorError) as caught:
        run_probe(kernel, PROBE, list(CASES).index("more bytes expected"))
    text = str(caught.value)
    assert "warp 0 lanes 0-31: in mbarrier_wait at kernel.cpp:" in text
    assert "for parity 0 of full+0x0" in text
