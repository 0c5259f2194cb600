"""Every diagnostic is shown to fire, by name, on a small kernel with one fault; the repaired twin runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fa2gen.emulator import Buffer, EmulatedKernel, build, run
from fa2gen.errors import EmulatorError
from tests.primitive_kernels import probe_launch, probe_source

# Global memory of every case: 64 rows of 16 words in `in`, of which the last 4 are padding, and 64 words in `out`.
ROW_WORDS, ROW_IN_VIEW, NUM_ROWS, OUT_WORDS = 16, 12, 64, 64
ROW = "p.in + 16 * tid"
STORE = "st_global(p.out + tid, u32(tid));"


@dataclass(frozen=True)
class Case:
    """A body, and the name that must be reported: alternatives where the schedule decides which side meets it first."""

    text: str
    name: str  # "a|b"; "" for a body that must run
    says: str = ""  # part of the message
    checks_needed: bool = True  # not found with checks=False


CASES: dict[str, Case] = {
    # Shared memory: order
    "no barrier before a read": Case(
        f"st_shared(smem + 4 * tid, tid); {STORE} ld_shared<int>(smem + 4 * (tid ^ 32));",
        "shared-race-read-after-write|shared-uninitialised-read|shared-race-write-after-read",
        "Area+0x",
    ),
    "barrier before a read": Case(
        f"st_shared(smem + 4 * tid, tid); sync_threads(); {STORE} ld_shared<int>(smem + 4 * (tid ^ 32));", ""
    ),
    "no sync_warp": Case(
        f"st_shared(smem + 4 * tid, tid); shfl_xor(1, 1); {STORE} ld_shared<int>(smem + 4 * (tid ^ 1));",
        "shared-race-read-after-write",
    ),
    "sync_warp": Case(
        f"st_shared(smem + 4 * tid, tid); sync_warp(); {STORE} ld_shared<int>(smem + 4 * (tid ^ 1));", ""
    ),
    "no barrier before reuse": Case(
        f"""st_shared(smem + 4 * tid, tid); sync_threads(); ld_shared<int>(smem + 4 * (tid ^ 32));
        st_shared(smem + 4 * tid, 0); {STORE}""",
        "shared-race-write-after-read|shared-race-read-after-write",
    ),
    "barrier before reuse": Case(
        f"""st_shared(smem + 4 * tid, tid); sync_threads(); ld_shared<int>(smem + 4 * (tid ^ 32)); sync_threads();
        st_shared(smem + 4 * tid, 0); {STORE}""",
        "",
    ),
    "two warps write one word": Case(f"{STORE} if (lane == 0) st_shared(smem, 1);", "shared-race-write-after-write"),
    "two lanes write one word": Case(f"{STORE} if (tid < 2) st_shared(smem, 1);", "shared-race-write-after-write"),
    "a store after an ldmatrix of the same warp": Case(
        f"""u32 r[4]; st_shared(smem + 16 * tid, u32x4{{}}); sync_warp(); ldmatrix_x4(r, smem + 16 * tid);
        st_shared(smem + 16 * (tid ^ 1), u32x4{{}}); {STORE}""",
        "",
    ),
    # Shared memory: contents and addresses
    "never written": Case(f"{STORE} ld_shared<int>(smem + 4 * tid);", "shared-uninitialised-read", "nobody wrote"),
    "half of a word written": Case(
        f"{STORE} st_shared(smem + 4 * tid, u16(1)); ld_shared<u16>(smem + 4 * tid); ld_shared<u32>(smem + 4 * tid);",
        "shared-uninitialised-read",
    ),
    "beyond the block's memory": Case(
        f"{STORE} st_shared(smem + 8192 - 4 + 4 * tid, 1);", "shared-out-of-range", "8192", False
    ),
    "address 0": Case(f"{STORE} st_shared(4 * tid, 1);", "shared-out-of-range", "", False),
    "misaligned vector": Case(f"{STORE} ld_shared<u32x4>(smem + 16 * tid + 4);", "shared-misaligned", "Area+0x", False),
    "misaligned copy": Case(
        f"{STORE} cp_async16(smem + 16 * tid + 8, {ROW});", "shared-misaligned", "cp_async16", False
    ),
    "misaligned ldmatrix row": Case(
        f"{STORE} u32 r[4]; st_shared(smem + 8 * lane, u32x2{{}}); ldmatrix_x4(r, smem + 8 * (lane % 2));",
        "shared-misaligned|shared-race-read-after-write|shared-race-write-after-write",
    ),
    # Asynchronous copies
    "copy not waited for": Case(
        f"{STORE} cp_async16(smem + 16 * tid, {ROW}); cp_async_commit(); ld_shared<int>(smem + 16 * tid);",
        "cp-async-not-waited",
    ),
    "copy never committed": Case(
        f"{STORE} cp_async16(smem + 16 * tid, {ROW}); cp_async_wait<0>(); ld_shared<int>(smem + 16 * tid);",
        "cp-async-not-waited",
    ),
    "waited for too few groups": Case(
        f"""{STORE} cp_async16(smem + 16 * tid, {ROW}); cp_async_commit(); cp_async_wait<1>();
        ld_shared<int>(smem + 16 * tid);""",
        "cp-async-not-waited",
    ),
    "copy waited for": Case(
        f"""{STORE} cp_async16(smem + 16 * tid, {ROW}); cp_async_commit(); cp_async_wait<0>();
        ld_shared<int>(smem + 16 * tid);""",
        "",
    ),
    "copy read by another thread without a barrier": Case(
        f"""{STORE} cp_async16(smem + 16 * tid, {ROW}); cp_async_commit(); cp_async_wait<0>();
        shfl_xor(1, 1); ld_shared<int>(smem + 16 * (tid ^ 1));""",
        "shared-race-read-after-write",
        "waited for by its own thread only",
    ),
    "copy over a copy": Case(
        f"""{STORE} cp_async16(smem + 16 * tid, {ROW}); cp_async16(smem + 16 * tid, {ROW});
        cp_async_commit(); cp_async_wait<0>();""",
        "cp-async-overwrite",
    ),
    "copy left at exit": Case(
        f"{STORE} cp_async16(smem + 16 * tid, {ROW}); cp_async_commit();", "cp-async-left-at-exit", "not waited for"
    ),
    "copy size": Case(f"{STORE} cp_async16(smem + 16 * tid, {ROW}, 17);", "cp-async-size", "17", False),
    # Barriers and warps
    "one warp skips the barrier": Case(
        f"{STORE} if (warp == 0) sync_threads();", "deadlock", "warp 1 lanes 0-31: ended", False
    ),
    "warps meet at different barriers": Case(
        f"{STORE}\n if (warp == 0) {{\n sync_threads();\n }} else {{\n sync_threads(); }}",
        "barrier-site",
        "skipped",
        False,
    ),
    "barrier counts differ": Case(f"{STORE} bar_sync(1, warp == 0 ? 64 : 32);", "barrier-count|deadlock", "", False),
    "barrier count of 33": Case(f"{STORE} bar_sync(1, 33);", "barrier-count", "multiple of 32", False),
    "barrier 16": Case(f"{STORE} bar_sync(16, 64);", "barrier-id", "0 to 15", False),
    "consumers without producers": Case(
        f'{STORE} trace("round", 7); if (warp == 0) bar_sync(1, 64);', "deadlock", "[round 7]", False
    ),
    "half a warp shuffles": Case(f"{STORE} if (lane < 16) shfl_xor(1, 1);", "deadlock", "shfl_xor", False),
    "halves of a warp at different places": Case(
        f"{STORE}\n if (lane < 16) shfl_xor(1, 1);\n else shfl_xor(2, 1);", "warp-divergence", "shfl_xor", False
    ),
    "halves of a warp in different collectives": Case(
        f"{STORE} if (lane < 16) any_lane(true); else all_lanes(true);", "warp-divergence", "_lane", False
    ),
    "a value that is not the same in all lanes": Case(
        f"{STORE} uniform(tid / 16);", "uniform-differs", "lane 16 has", False
    ),
    # Global memory
    "padding between rows": Case(f"{STORE} ld_global<u32>({ROW} + 12);", "global-out-of-view", "of in at byte", False),
    "copy that reaches into padding": Case(
        f"{STORE} cp_async16(smem + 16 * tid, {ROW} + 12);", "global-out-of-view", "", False
    ),
    "copy whose valid bytes end before padding": Case(
        f"{STORE} cp_async16(smem + 16 * tid, {ROW} + 12, 0); cp_async_commit(); cp_async_wait<0>();", ""
    ),
    "beyond the buffer": Case(
        f"{STORE} ld_global<u32>(p.in + (1024 + 1000 * tid));", "global-out-of-range", "after the end of in", False
    ),
    "before the buffer": Case(
        f"{STORE} ld_global<u32>(p.in + (-2 - tid));", "global-out-of-range", "before the start of in", False
    ),
    "null pointer": Case(f"{STORE} ld_global<u32>(gptr<u32>{{nullptr}});", "global-out-of-range", "", False),
    "misaligned global vector": Case(
        f"{STORE} ld_global<u32x4>({ROW} + 1);", "global-misaligned", "aligned to 16", False
    ),
    "misaligned copy source": Case(
        f"{STORE} cp_async16(smem + 16 * tid, {ROW} + 1);", "global-misaligned", "cp.async", False
    ),
    "output read before it is written": Case(
        "ld_global<u32>(p.out + tid);", "global-uninitialised-read", "of out", False
    ),
    "two threads write one element": Case(
        "st_global(p.out + tid % 32, 1);", "global-two-writers", "already wrote", False
    ),
    "a store and an atomic": Case(f"{STORE} atomic_add(p.out + tid, 1u);", "global-two-writers", "", False),
    "part of the output": Case(
        "if (tid != 5) st_global(p.out + tid, 1);", "global-not-written", "4 bytes of out", False
    ),
    "store to an input": Case(
        "st_global(gptr<u32>{const_cast<u32*>(p.in.address)} + 16 * tid, 1);", "global-read-only", "of in", False
    ),
    # The process
    "division by zero": Case(
        "volatile int zero = 0; st_global(p.out + tid, u32(tid / zero));", "crash", "SIGFPE", False
    ),
}


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return build(probe_source({name: f"  {case.text}" for name, case in CASES.items()}, "host"))


def _run(kernel: EmulatedKernel, name: str, **options: object) -> np.ndarray:
    data = np.zeros(4 * ROW_WORDS * NUM_ROWS, np.uint8)
    data.flags.writeable = False
    in_view = np.zeros((NUM_ROWS, 2 * ROW_WORDS), np.bool_)
    in_view[:, : 2 * ROW_IN_VIEW] = True
    out = np.full(OUT_WORDS, 0xFFFFFFFF, np.uint32)
    buffers = [Buffer("in", data, 0, readable=in_view.reshape(-1)), Buffer("out", out.view(np.uint8), 1, output=True)]
    run(kernel, probe_launch(list(CASES).index(name)), buffers, **options)
    return out


def _reported(kernel: EmulatedKernel, name: str, **options: object) -> EmulatorError:
    with pytest.raises(EmulatorError) as caught:
        _run(kernel, name, **options)
    return caught.value


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.name])
def test_fault_is_named(kernel: EmulatedKernel, name: str) -> None:
    case = CASES[name]
    for seed in range(4):
        for random_schedule in (True, False):
            error = _reported(kernel, name, seed=seed, random_schedule=random_schedule)
            assert error.name in case.name.split("|"), str(error)
            assert case.says in str(error)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.name])
def test_right_kernel_is_not_accused(kernel: EmulatedKernel, name: str) -> None:
    for seed in range(8):
        out = _run(kernel, name, seed=seed, random_schedule=seed % 2 == 0)
        np.testing.assert_array_equal(out, np.arange(OUT_WORDS))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.checks_needed])
def test_fault_is_named_without_the_shadow(kernel: EmulatedKernel, name: str) -> None:
    assert _reported(kernel, name, checks=False).name in CASES[name].name.split("|")


def test_report_says_where(kernel: EmulatedKernel) -> None:
    text = str(_reported(kernel, "never written"))
    assert "block (0,0,0) thread" in text
    assert "lane" in text
    quoted = text.splitlines()[-1]
    assert quoted.endswith(f"{CASES['never written'].text}")


def test_deadlock_says_who_waits_for_what(kernel: EmulatedKernel) -> None:
    text = str(_reported(kernel, "one warp skips the barrier"))
    assert "barrier 0: 32 of 64 threads arrived" in text
    assert "warp 0 lanes 0-31: in sync_threads at kernel.cpp:" in text


def test_stack_overflow_is_a_crash_that_says_so() -> None:
    text = f"{STORE} volatile float big[40000]; for (int i = 0; i < 40000; i += 8) big[i] = 0;"
    with pytest.raises(EmulatorError, match="stack overflowed") as caught:
        run(build(probe_source({"stack": text}, "host")), probe_launch(0), [])
    assert caught.value.name == "crash"


def test_endless_loop_is_a_timeout() -> None:
    text = f"volatile int forever = 1; while (forever) {{}} {STORE}"
    with pytest.raises(EmulatorError) as caught:
        run(build(probe_source({"loop": text}, "host")), probe_launch(0), [], timeout=0.5)
    assert caught.value.name == "timeout"


def test_buffers_keep_their_contents_after_a_fault(kernel: EmulatedKernel) -> None:
    out = np.full(OUT_WORDS, 7, np.uint32)
    buffer = Buffer("out", out.view(np.uint8), 1, output=True)
    with pytest.raises(EmulatorError, match="global-not-written"):
        run(kernel, probe_launch(list(CASES).index("part of the output")), [buffer])
    assert (out == 7).all()
