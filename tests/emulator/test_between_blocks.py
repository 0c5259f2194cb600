"""What blocks of a launch do to each other: sums in any order, semaphores, and what launches hand on in memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fa2gen.emulator import Buffer, EmulatedKernel, build, run
from fa2gen.emulator.runner import require_written
from fa2gen.errors import EmulatorError
from tests.backward_primitives import (
    BY_BLOCK,
    BY_WARP,
    GRID,
    LOOK_AHEAD,
    OWN_VALUE,
    SUMS,
    VALUES,
    ordered_sums,
    sums_in_order,
)
from tests.primitive_kernels import NUM_THREADS, probe_launch, probe_source

SUMMED, UNORDERED = "global-sum-read", "semaphore-unordered-sum"
NOT_SYNCED = "semaphore-release-without-sync"
FREE_SUM = f"atomic_add({SUMS} + (4 + tid), {OWN_VALUE});"

BODIES = {
    "free": f"  {FREE_SUM}",
    "by warp": ordered_sums(BY_WARP),
    "by block": ordered_sums(BY_BLOCK),
    "look ahead": ordered_sums(LOOK_AHEAD),
    # A thread of block 2 learns of block 0 through block 1 alone.
    "handed on": f"""
  if (tid == 0 && blockIdx.x > 0) wait_until_equal(p.out + (blockIdx.x - 1) % 4, (blockIdx.x + 3) / 4);
  sync_threads();
  if (blockIdx.x % 2 == 0) {FREE_SUM}
  sync_threads();
  if (tid == 32) release_add(p.out + blockIdx.x % 4, 1);""",
    "a semaphore of one block": """
  if (tid == 40) wait_until_equal(p.out + blockIdx.x % 4, blockIdx.x / 4 * 2 + 2);
  if (tid == 3) { release_add(p.out + blockIdx.x % 4, 1); release_add(p.out + blockIdx.x % 4, 1); }""",
    # More than are held back until the launch ends.
    "many": f"  for (int i = 0; i < 1 << 16; i++) atomic_add({SUMS} + (4 + (tid + i) % 64), 1.f);",
    "write": "  st_global(p.out + (64 * blockIdx.x + tid), 1u);",
    "write the even words": "  if (tid % 2 == 0) st_global(p.out + (64 * blockIdx.x + tid), 1u);",
    "add to all words": f"  atomic_add({SUMS} + (64 * blockIdx.x + tid), 2.f);",
    "add to the even words": f"  if (tid % 2 == 0) atomic_add({SUMS} + (64 * blockIdx.x + tid), 2.f);",
    "read all words": "  ld_global<u32>(p.out + (64 * blockIdx.x + tid));",
}

# name: (body, diagnostics, part of the message); run with one OS thread and with three
FAULTS: dict[str, tuple[str, str, str]] = {
    "no wait": (ordered_sums(BY_WARP, wait=""), UNORDERED, "nothing orders the two"),
    "no sync_warp after the wait": (ordered_sums(BY_WARP, after_wait=""), UNORDERED, "atomic_add on out["),
    "no sync_warp before the release": (ordered_sums(BY_WARP, before_release=""), NOT_SYNCED, "does not cover it"),
    "released before it is added": (
        ordered_sums(BY_WARP, add="", release=f"{BY_WARP['release']} {BY_WARP['add']}"),
        f"{UNORDERED}|{NOT_SYNCED}",
        "to which block number",
    ),
    "an atomic that releases nothing": (
        ordered_sums(BY_WARP, release="if (lane == 0) atomic_add(p.out + warp, 1u);"),
        UNORDERED,
        "",
    ),
    "another warp's semaphore": (
        ordered_sums(BY_WARP, add=f"atomic_add({SUMS} + (4 + (tid + 32 * blockIdx.x) % 64), {OWN_VALUE});"),
        UNORDERED,
        "",
    ),
    "no barrier after the wait": (ordered_sums(BY_BLOCK, after_wait="sync_warp();"), UNORDERED, ""),
    "no barrier before the release": (
        ordered_sums(BY_BLOCK, before_release="sync_warp();"),
        UNORDERED,
        "",
    ),
    "nobody waits for what the look did not see": (ordered_sums(LOOK_AHEAD, second=""), UNORDERED, ""),
    "no barrier between a look and the additions": (
        ordered_sums(LOOK_AHEAD, after_second="sync_warp();"),
        UNORDERED,
        "",
    ),
    "a look at another semaphore": (
        ordered_sums(LOOK_AHEAD, release=LOOK_AHEAD["release"].replace("(p.out + 1,", "(p.out,")),
        f"{UNORDERED}|deadlock",
        "",
    ),
    "two lanes add to one element": (
        ordered_sums(BY_WARP, add=f"atomic_add({SUMS} + (4 + tid / 2), {OWN_VALUE});"),
        UNORDERED,
        "to which block number 0",
    ),
    # Blocks that add before any of them uses a semaphore.
    "semaphores come too late": (
        f"{FREE_SUM} if (blockIdx.x == gridDim.x - 1 && tid == 0) release_add(p.out, 1);",
        UNORDERED,
        "",
    ),
    "a value that nobody gives": (
        ordered_sums(BY_WARP, wait="if (lane == 0) wait_until_equal(p.out + warp, 2 * blockIdx.x);"),
        "deadlock",
        "to be 2; it is 1",
    ),
    "a value that is passed": (
        ordered_sums(BY_WARP, release="if (lane == 0) release_add(p.out + warp, 2);"),
        "deadlock",
        "to be 1; it is ",
    ),
    "every block waits for the next": (
        """if (tid == 0) release_add(p.out + blockIdx.x, 1);
        if (tid == 0) wait_until_equal(p.out + (blockIdx.x + 1), 1);""",
        "deadlock",
        "out[",
    ),
    "a sum is read": (f"{FREE_SUM} ld_global<u32>(p.out + (4 + tid));", SUMMED, "out at byte"),
    "a sum was read": (f"ld_global<u32>(p.out + (4 + tid)); {FREE_SUM}", SUMMED, ""),
    "a sum is copied": (
        f"""{FREE_SUM} cp_async16(smem + 16 * tid, p.out + (4 + 4 * (tid % 8)));
        cp_async_commit(); cp_async_wait<0>();""",
        SUMMED,
        "out at byte",
    ),
    "a sum is cleared": (f"st_global(p.out + (4 + tid), 0u); {FREE_SUM}", "global-two-writers", ""),
    "a vector that is not aligned": (
        f"atomic_add4({SUMS} + (4 + tid / 2), 1.f, 1.f, 1.f, 1.f);",
        "global-misaligned",
        "aligned to 16",
    ),
    "a wait for an address in no buffer": ("wait_until_equal(p.out + 999, 0);", "global-out-of-range", ""),
}
OUT_WORDS = 4 + 2 * NUM_THREADS


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    faults = {name: f"  {text}" for name, (text, _, _) in FAULTS.items()}
    return build(probe_source({**BODIES, **faults}, "host"))


def _which(name: str) -> int:
    return [*BODIES, *FAULTS].index(name)


def _run(kernel: EmulatedKernel, name: str, grid: int = GRID, **options: object) -> np.ndarray:
    inputs = VALUES.view(np.uint8).reshape(-1).copy()
    inputs.flags.writeable = False
    out = np.zeros(OUT_WORDS, np.uint32)
    run(
        kernel,
        probe_launch(_which(name), grid),
        [Buffer("in", inputs, 0), Buffer("out", out.view(np.uint8), 1)],
        **options,
    )
    return out


def _sums(words: np.ndarray) -> np.ndarray:
    return words[4 : 4 + NUM_THREADS].view(np.float32)


def test_free_sums_differ_from_seed_to_seed(kernel: EmulatedKernel) -> None:
    exact = VALUES.astype(np.float64).sum(0)
    sums = [_sums(_run(kernel, "free", seed=seed)) for seed in range(6)]
    for one in sums:
        np.testing.assert_allclose(one, exact, atol=1e-6 * np.abs(VALUES).sum(0).max())
    assert len({one.tobytes() for one in sums}) == len(sums)
    # The order is not that of the program even where one thread runs all blocks in turn.
    in_order = sums_in_order(VALUES)
    assert all((one != in_order).any() for one in sums)


def test_free_sums_follow_from_the_seed(kernel: EmulatedKernel) -> None:
    for seed in (1, 2):
        bits = {_run(kernel, "free", seed=seed, threads=threads).tobytes() for threads in (1, 1, 2, 5)}
        assert len(bits) == 1


@pytest.mark.parametrize("name", ["by warp", "by block", "look ahead", "handed on"])
def test_ordered_sums_are_the_same_for_every_schedule(kernel: EmulatedKernel, name: str) -> None:
    results = {
        _run(kernel, name, seed=seed, threads=threads, random_schedule=random_schedule).tobytes()
        for seed in range(4)
        for threads in (1, 2, 5)
        for random_schedule in (True, False)
    }
    assert len(results) == 1
    if name == "by warp":
        np.testing.assert_array_equal(
            _sums(np.frombuffer(results.pop(), np.uint32)), sums_in_order(VALUES), strict=True
        )


def test_a_thread_may_wait_for_its_own_block(kernel: EmulatedKernel) -> None:
    for seed in range(4):
        for threads in (1, 3):
            assert _run(kernel, "a semaphore of one block", 4, seed=seed, threads=threads)[:4].tolist() == [2, 2, 2, 2]


def test_more_additions_than_are_held_back(kernel: EmulatedKernel) -> None:
    assert (_sums(_run(kernel, "many", 2)) == 2 * 2**16).all()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(kernel: EmulatedKernel, name: str) -> None:
    _, expected, says = FAULTS[name]
    for seed in range(3):
        for threads in (1, 3):
            with pytest.raises(EmulatorError) as caught:
                _run(kernel, name, seed=seed, random_schedule=seed % 2 == 0, threads=threads, timeout=20.0)
            assert caught.value.name in expected.split("|"), str(caught.value)
            assert says in str(caught.value)


def test_deadlock_names_the_semaphore_and_who_waits(kernel: EmulatedKernel) -> None:
    with pytest.raises(EmulatorError) as caught:
        _run(kernel, "a value that nobody gives", threads=1, random_schedule=False)
    text = str(caught.value)
    assert "block (1,0,0): no thread can run" in text
    assert "in wait_until_equal at kernel.cpp:" in text
    assert "for out[1] to be 2; it is 1" in text


def test_a_wait_for_a_later_block_is_a_deadlock_even_where_it_runs_already(kernel: EmulatedKernel) -> None:
    names = set()
    for threads in (1, 2, 3, 4):
        with pytest.raises(EmulatorError) as caught:
            _run(kernel, "every block waits for the next", threads=threads, timeout=20.0)
        names.add(caught.value.name)
    assert names == {"deadlock"}


def test_faults_of_order_are_the_shadows_alone(kernel: EmulatedKernel) -> None:
    """Without checks the sums still come out; a deadlock is named all the same."""
    _run(kernel, "no sync_warp after the wait", checks=False)
    with pytest.raises(EmulatorError, match="it is 1"):
        _run(kernel, "a value that nobody gives", checks=False)


# ---- From launch to launch


def _workspace(words: int) -> Buffer:
    """As a plan's workspace: without values, NaN underneath."""
    return Buffer("dq_accum", np.full(4 * words, 0xFF, np.uint8), 1, initialised=np.zeros(2 * words, np.bool_))


def _launch(kernel: EmulatedKernel, name: str, buffer: Buffer) -> None:
    run(kernel, probe_launch(_which(name), 2), [buffer])


def test_a_workspace_keeps_its_state(kernel: EmulatedKernel) -> None:
    buffer = _workspace(2 * NUM_THREADS)
    _launch(kernel, "write the even words", buffer)
    assert buffer.initialised is not None
    np.testing.assert_array_equal(buffer.initialised, np.arange(4 * NUM_THREADS) // 2 % 2 == 0)
    _launch(kernel, "add to the even words", buffer)
    values = buffer.data.view(np.float32)
    assert (values[::2] == np.array([1], np.uint32).view(np.float32) + np.float32(2)).all()
    assert np.isnan(values[1::2]).all()
    _launch(kernel, "write", buffer)  # a later launch may write again
    _launch(kernel, "read all words", buffer)
    assert (buffer.data.view(np.uint32) == 1).all()


@pytest.mark.parametrize("name", ["add to all words", "read all words"])
def test_use_of_a_workspace_without_values_is_named(kernel: EmulatedKernel, name: str) -> None:
    buffer = _workspace(2 * NUM_THREADS)
    _launch(kernel, "write the even words", buffer)
    state = (buffer.data.copy(), np.copy(buffer.initialised))
    with pytest.raises(EmulatorError, match=r"global-uninitialised-read.*of dq_accum at byte"):
        _launch(kernel, name, buffer)
    np.testing.assert_array_equal(buffer.data, state[0])
    np.testing.assert_array_equal(buffer.initialised, state[1])


def test_a_semaphore_without_a_value_is_named(kernel: EmulatedKernel) -> None:
    buffers = [Buffer("in", VALUES.view(np.uint8).reshape(-1), 0), _workspace(OUT_WORDS)]
    with pytest.raises(EmulatorError, match=r"global-uninitialised-read.*wait_until_equal reads"):
        run(kernel, probe_launch(_which("by warp"), GRID), buffers)


def test_an_output_of_several_launches_is_written_once(kernel: EmulatedKernel) -> None:
    buffer = dataclasses.replace(_workspace(2 * NUM_THREADS), name="dq", output=True)
    _launch(kernel, "write the even words", buffer)
    with pytest.raises(EmulatorError, match="256 bytes of dq were never written, the first at byte 4"):
        require_written(buffer)
    with pytest.raises(EmulatorError, match=r"global-two-writers.*an earlier launch already wrote"):
        _launch(kernel, "write", buffer)
