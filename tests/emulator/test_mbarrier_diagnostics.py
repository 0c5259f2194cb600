"""Faults of kernels that synchronise through mbarriers, each named; the right kernels are in test_primitives.py."""

from __future__ import annotations

import numpy as np
import pytest

from fa2gen.emulator import Buffer, EmulatedKernel, build, run
from fa2gen.errors import EmulatorError
from tests.mbarrier_kernels import EVERY_THREAD_FREES, INPUT, NUM_THREADS, PARTS, PLAIN_COPY, PLAIN_READ, ring
from tests.primitive_kernels import probe_launch, probe_source

# Fewer waits leave several orders open; which of their consequences shows first depends on the schedule.
READ_TOO_EARLY = "cp-async-not-waited|shared-race-read-after-write|shared-uninitialised-read"
OVERWRITTEN = "shared-race-write-after-read|cp-async-not-waited"  # the reader, or the writer, comes first
FULL = "mbarrier_wait(full + 8 * stage, {parity});"
EMPTY = "mbarrier_wait(empty + 8 * stage, {parity});"

# Changes of the ring, each tried with 2 and 3 stages.
RING_CASES: dict[str, tuple[dict[str, str], str, str]] = {
    "no wait for full": ({"wait_full": ""}, READ_TOO_EARLY, "Area+0x"),
    "no wait for full, plain stores": (
        {"wait_full": "", "copy": PLAIN_COPY},
        "mbarrier-over-arrival|shared-race-read-after-write",
        "",
    ),
    "wrong parity for full": ({"wait_full": FULL.format(parity="(round / kStages + 1) & 1")}, READ_TOO_EARLY, ""),
    "the parity of full never changes": (
        {"wait_full": FULL.format(parity="0")},
        "cp-async-not-waited|deadlock",
        "",
    ),
    "wrong parity for empty": ({"wait_empty": EMPTY.format(parity="round / kStages & 1")}, "deadlock", "empty+0x0"),
    "no wait for empty": (
        {"wait_empty": ""},
        OVERWRITTEN,
        "",
    ),
    "no wait for empty, every thread frees, plain reads": (
        {"wait_empty": "", "read": PLAIN_READ, **EVERY_THREAD_FREES},
        OVERWRITTEN,
        "",
    ),
    "no wait for empty, plain stores": (
        {"wait_empty": "", "copy": PLAIN_COPY},
        "shared-race-write-after-read|shared-race-read-after-write",
        "",
    ),
    "a wait for the wrong stage": (
        {"wait_empty": "mbarrier_wait(empty + 8 * ((stage + 1) % kStages), (round / kStages + 1) & 1);"},
        "deadlock",
        "empty+0x",
    ),
    "a lane frees for its warp without sync_warp": (
        {"arrive_empty": "if (lane == 0) mbarrier_arrive(empty + 8 * stage);"},
        "shared-race-write-after-read",
        ", which warp ",
    ),
    "a lane waits for its warp without sync_warp": (
        {"wait_full": f"if (lane == 0) {PARTS['wait_full']}"},
        READ_TOO_EARLY,
        "",
    ),
    "freed before it is read": (
        {"read": "", "arrive_empty": f"{PARTS['arrive_empty']} {PARTS['read']}"},
        OVERWRITTEN,
        "",
    ),
    "no barrier after the initialisation": (
        {"after_init": ""},
        "mbarrier-not-initialised|mbarrier-init-not-visible",
        "",
    ),
    "nobody frees": ({"arrive_empty": ""}, "deadlock", "empty+0x0 (shared address base+0x18"),
    "one warp does not free": (
        {"arrive_empty": f"if (warp != 2) {{ {PARTS['arrive_empty']} }}"},
        "deadlock",
        "phase 0 lacks 1 of 4 arrivals",
    ),
    "one thread does not say that it copies": (
        {
            "copy": """cp_async16(smem + 2048 * stage + 16 * tid, p.in + (512 * round + 4 * tid));
            if (tid != 77) cp_async_mbarrier_arrive(full + 8 * stage);"""
        },
        "deadlock",
        "full+0x0",
    ),
    "full counts too few": (
        {"full_count": "kThreads / 2"},
        "mbarrier-over-arrival|" + READ_TOO_EARLY,
        "",
    ),
    "full counts too many": ({"full_count": "kThreads + 1"}, "deadlock", "full+0x0"),
    "empty counts too few": (
        {"empty_count": "kThreads / 32 - 1"},
        "mbarrier-over-arrival",
        "had its 3 arrivals",
    ),
    "empty counts warps where every thread arrives": (
        {"arrive_empty": EVERY_THREAD_FREES["arrive_empty"]},
        "mbarrier-over-arrival",
        "",
    ),
    "empty counts threads where a lane arrives": ({"empty_count": "kThreads"}, "deadlock", "lacks 124 of 128 arrivals"),
    "an arrival too many": (
        {"arrive_empty": PARTS["arrive_empty"] + " if (tid == 64) mbarrier_arrive(empty + 8 * stage);"},
        "mbarrier-over-arrival",
        "",
    ),
    "the arrival comes before its copy": (
        {
            "copy": """cp_async_mbarrier_arrive(full + 8 * stage);
            cp_async16(smem + 2048 * stage + 16 * tid, p.in + (512 * round + 4 * tid));"""
        },
        "shared-race-read-after-write|cp-async-not-waited",
        "",
    ),
    "a plain arrival for a copy": (
        {"copy": PARTS["copy"].replace("cp_async_mbarrier_arrive", "mbarrier_arrive")},
        "cp-async-not-waited",
        "in flight",
    ),
    "a copy's arrival for plain stores": (
        {"copy": PLAIN_COPY.replace("mbarrier_arrive", "cp_async_mbarrier_arrive")},
        "shared-race-read-after-write",
        "",
    ),
}

INIT = "if (tid == 0) mbarrier_init(smem, kThreads); sync_threads();"
STORE = "st_global(p.out + tid, u32(tid));"
COPY = "cp_async16(smem + 1024 + 16 * tid, p.in + 4 * tid);"

# Whole bodies: text, name, part of the message.
CASES: dict[str, tuple[str, str, str]] = {
    "a count of 0": ("mbarrier_init(smem, 0);", "mbarrier-count", "Area+0x0 with a count of 0"),
    "a count of 2^20": ("mbarrier_init(smem, 1 << 20);", "mbarrier-count", "1 to 1048575"),
    "misaligned": ("mbarrier_init(smem + 4, 1);", "shared-misaligned", "mbarrier_init of 8 bytes at Area+0x4"),
    "beyond the block's memory": ("mbarrier_init(smem + 8192, 1);", "shared-out-of-range", "8192 bytes"),
    "two threads initialise": ("mbarrier_init(smem, 1);", "mbarrier-initialised-twice", "Area+0x0"),
    "an arrival where there is none": (f"{INIT} mbarrier_arrive(smem + 8);", "mbarrier-not-initialised", "Area+0x8"),
    "a wait where there is none": ("mbarrier_wait(smem, 0);", "mbarrier-not-initialised", "mbarrier_wait"),
    "a copy's arrival where there is none": (
        f"{COPY} cp_async_mbarrier_arrive(smem);",
        "mbarrier-not-initialised",
        "cp_async_mbarrier_arrive",
    ),
    "a parity of 2": (f"{INIT} mbarrier_arrive(smem); mbarrier_wait(smem, 2);", "mbarrier-parity", "is 2"),
    "a load from it": (f"{INIT} ld_shared<u32>(smem + 4);", "mbarrier-plain-access", "ld_shared at Area+0x4"),
    "a store to it": (f"{INIT} st_shared(smem, 1);", "mbarrier-plain-access", "st_shared"),
    "a copy over it": (f"{INIT} cp_async16(smem, p.in);", "mbarrier-plain-access", "cp_async16"),
    "an ldmatrix of it": (f"{INIT} u32 r[4]; ldmatrix_x4(r, smem);", "mbarrier-plain-access", "ldmatrix_x4"),
    "made where others still read": (
        """st_shared(smem + 4 * tid, tid); sync_threads(); ld_shared<int>(smem + 4 * (tid ^ 32));
        if (tid == 0) mbarrier_init(smem, 1);""",
        "shared-race-write-after-read|mbarrier-plain-access",
        "",
    ),
    "used by its maker's warp without sync_warp": (
        "if (tid == 0) mbarrier_init(smem, 1); shfl_xor(1, 1); if (tid == 1) mbarrier_arrive(smem);",
        "mbarrier-init-not-visible",
        "initialised by thread 0",
    ),
    "a copy left at exit": (f"{INIT} {COPY}", "cp-async-left-at-exit", "never committed"),
    "copies that nobody waits for": (
        f"{INIT} {COPY} cp_async_mbarrier_arrive(smem);",
        "cp-async-left-at-exit",
        "arrive on Area+0x0",
    ),
    "a store after the arrival": (
        f"""{INIT} mbarrier_arrive(smem); st_shared(smem + 1024 + 4 * tid, tid); mbarrier_wait(smem, 0);
        ld_shared<int>(smem + 1024 + 4 * (tid ^ 1));""",
        "shared-race-read-after-write|shared-uninitialised-read",
        "",
    ),
    "a thread overwrites what another read after its arrival": (
        f"""st_shared(smem + 1024 + 4 * tid, tid); {INIT}
        mbarrier_arrive(smem); ld_shared<int>(smem + 1024 + 4 * (tid ^ 64)); mbarrier_wait(smem, 0);
        st_shared(smem + 1024 + 4 * tid, 0);""",
        "shared-race-write-after-read|shared-race-read-after-write",
        "",
    ),
    "lanes wait for different barriers": (
        f"""{INIT} if (tid == 0) mbarrier_init(smem + 8, 1); sync_threads();
        mbarrier_wait(smem + 8 * (lane >= 8), 0);""",
        "deadlock",
        "lanes 8-31: in mbarrier_wait at",
    ),
    "some warps in the barrier, others at an mbarrier": (
        f"{INIT} if (warp < 2) mbarrier_wait(smem, 0); sync_threads();",
        "deadlock",
        "barrier 0: 64 of 128 threads arrived",
    ),
    "sync_threads_or meets another barrier": (
        "if (warp == 0) {\n sync_threads_or(true);\n } else {\n sync_threads(); }",
        "barrier-site",
        "skipped",
    ),
}


@pytest.fixture(scope="module")
def rings() -> EmulatedKernel:
    bodies = {f"{name} {n}": ring(n, **changes) for name, (changes, _, _) in RING_CASES.items() for n in (2, 3)}
    return build(probe_source(bodies, "host", NUM_THREADS))


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return build(probe_source({name: f"  {STORE} {text}" for name, (text, _, _) in CASES.items()}, "host", NUM_THREADS))


def _fault(kernel: EmulatedKernel, which: int, **options: object) -> EmulatorError:
    inputs = INPUT.view(np.uint8).copy()
    inputs.flags.writeable = False
    out = np.zeros(NUM_THREADS, np.uint32)
    buffers = [Buffer("in", inputs, 0), Buffer("out", out.view(np.uint8), 1, output=True)]
    with pytest.raises(EmulatorError) as caught:
        run(kernel, probe_launch(which, num_threads=NUM_THREADS), buffers, **options)
    return caught.value


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", RING_CASES)
def test_fault_of_a_ring_is_named(rings: EmulatedKernel, name: str, stages: int) -> None:
    _, expected, says = RING_CASES[name]
    for seed in range(2):
        for random_schedule in (True, False):
            which = 2 * list(RING_CASES).index(name) + stages - 2
            error = _fault(rings, which, seed=seed, random_schedule=random_schedule)
            assert error.name in expected.split("|"), str(error)
            assert says in str(error)


@pytest.mark.parametrize("name", CASES)
def test_fault_is_named(kernel: EmulatedKernel, name: str) -> None:
    _, expected, says = CASES[name]
    for seed in range(2):
        for random_schedule in (True, False):
            error = _fault(kernel, list(CASES).index(name), seed=seed, random_schedule=random_schedule)
            assert error.name in expected.split("|"), str(error)
            assert says in str(error)


def test_deadlock_names_the_mbarriers_and_who_waits(rings: EmulatedKernel) -> None:
    text = str(_fault(rings, 2 * list(RING_CASES).index("one warp does not free")))
    assert "mbarrier empty+0x0 (shared address base+0x1810): phase 0 lacks 1 of 4 arrivals" in text
    assert "warp 2 lanes 0-31: in mbarrier_wait at kernel.cpp:" in text
    assert "[round 1] for parity 0 of empty+0x0" in text


def test_deadlock_is_named_without_the_shadow(rings: EmulatedKernel) -> None:
    for name in ("full counts too many", "nobody frees"):
        assert _fault(rings, 2 * list(RING_CASES).index(name), checks=False).name == "deadlock"
