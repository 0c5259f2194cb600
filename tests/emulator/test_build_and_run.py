"""The emulator's build cache, its protocol and its counters."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from fa2gen.emulator import Buffer, Counters, EmulatedKernel, build, cache_dir, find_host_compiler, run
from fa2gen.errors import ArgumentError, CacheError, CompileError, EmulatorError, ToolchainError
from fa2gen.launch import Launch
from tests.primitive_kernels import NUM_THREADS, probe_launch, probe_source

BODIES = {
    "write": "  st_global(p.out + (blockIdx.x * kThreads + tid), u32(tid));",
    "32 rows in one bank": """
  st_shared(smem + 128 * lane + 4 * warp, tid);
  sync_warp();
  st_global(p.out + tid, ld_shared<u32>(smem + 128 * lane + 4 * warp));""",
    "one word for all": """
  if (tid == 0) st_shared(smem, 7);
  sync_threads();
  st_global(p.out + tid, ld_shared<u32>(smem));""",
    "vectors side by side": """
  st_shared(smem + 16 * tid, u32x4{1, 2, 3, 4});
  st_global(p.out + tid, ld_shared<u32x4>(smem + 16 * tid).x);""",
    "vectors 128 bytes apart": """
  st_shared(smem + 128 * tid, u32x4{1, 2, 3, 4});
  st_global(p.out + tid, ld_shared<u32x4>(smem + 128 * tid).x);""",
    "ldmatrix rows 128 bytes apart": """
  st_shared(smem + 128 * tid, u32x4{1, 2, 3, 4});
  sync_warp();
  u32 r[4];
  ldmatrix_x4(r, smem + 128 * tid);
  st_global(p.out + tid, r[0]);""",
    "copies 128 bytes apart": """
  cp_async16(smem + 128 * tid, p.in + 4 * tid);
  cp_async_commit();
  cp_async_wait<0>();
  st_global(p.out + tid, ld_shared<u32>(smem + 128 * tid));""",
    "all write one word": "  st_global(p.out, u32(tid));",
}


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return build(probe_source(BODIES, "host"))


def _run(kernel: EmulatedKernel, name: str, grid: int = 1, **options: object) -> tuple[np.ndarray, Counters]:
    data = np.arange(1024, dtype=np.uint8)
    data.flags.writeable = False
    out = np.full(NUM_THREADS * grid, 0xFFFFFFFF, np.uint32)
    buffers = [Buffer("in", data, 0), Buffer("out", out.view(np.uint8), 1, output=True)]
    return out, run(kernel, probe_launch(list(BODIES).index(name), grid), buffers, **options)


def test_second_build_comes_from_the_cache(kernel: EmulatedKernel) -> None:
    again = build(probe_source(BODIES, "host"))
    assert again.from_cache
    assert again.program == kernel.program
    other = build(probe_source({"other": BODIES["write"]}, "host"))
    assert other.program != kernel.program


def test_cache_folder_is_private_and_holds_whole_entries_only(kernel: EmulatedKernel) -> None:
    folder = cache_dir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.parent == Path(os.environ["FA2GEN_CACHE_DIR"])
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".kernel")]


def test_world_writable_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "emulator").mkdir()
    (tmp_path / "emulator").chmod(0o777)
    with pytest.raises(CacheError, match="writable by all"):
        build(probe_source(BODIES, "host"))


def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="no-such-compiler"):
        find_host_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainError, match=r"install one.*CXX"):
        find_host_compiler()


def test_compile_error_carries_the_log_and_leaves_nothing_behind() -> None:
    before = set(cache_dir().iterdir())
    with pytest.raises(CompileError, match="no_such_primitive") as caught:
        build(probe_source({"wrong": "  no_such_primitive();"}, "host"))
    assert "no_such_primitive" in caught.value.log
    assert set(cache_dir().iterdir()) == before


def test_global_memory_cannot_be_dereferenced() -> None:
    with pytest.raises(CompileError):
        build(probe_source({"deref": "  u32 x = *p.in; st_global(p.out + tid, x);"}, "host"))


def test_cuda_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match="platform"):
        build(probe_source(BODIES, "cuda"))


def test_parameters_of_the_wrong_size_are_refused(kernel: EmulatedKernel) -> None:
    launch = probe_launch(0)
    with pytest.raises(EmulatorError, match="the kernel's struct has 24") as caught:
        run(kernel, dataclasses.replace(launch, params=launch.params + bytes(8)), [])
    assert caught.value.name == "params-size"


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch((0, 1, 1), 64, 0, bytes(24)), "grid"),
        (Launch((1, 1, 1), 33, 0, bytes(24)), "num_threads"),
        (Launch((1, 1, 1), 2048, 0, bytes(24)), "num_threads"),
    ],
)
def test_impossible_launches_are_refused(kernel: EmulatedKernel, launch: Launch, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(kernel, launch, [])


def test_buffers_are_checked() -> None:
    data = np.zeros(8, np.uint8)
    for change in (
        {"data": np.zeros(7, np.uint8)},
        {"data": np.zeros(8, np.float32)},
        {"start": 9},
        {"readable": np.ones(8, np.bool_)},
    ):
        with pytest.raises(ArgumentError, match="buffer x"):
            Buffer(**{"name": "x", "data": data, "pointer_index": 0, **change})


def test_blocks_are_spread_over_threads_with_the_same_result(kernel: EmulatedKernel) -> None:
    one, counters_one = _run(kernel, "write", grid=37, threads=1)
    three, counters_three = _run(kernel, "write", grid=37, threads=3)
    np.testing.assert_array_equal(one, np.tile(np.arange(64), 37))
    np.testing.assert_array_equal(one, three)
    assert counters_one == counters_three


def test_schedule_follows_from_the_seed(kernel: EmulatedKernel) -> None:
    # The thread that is second to write depends on the schedule alone.
    texts = []
    for seed in (1, 1, 2, 3, 4, 5):
        with pytest.raises(EmulatorError, match="global-two-writers") as caught:
            _run(kernel, "all write one word", seed=seed)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert len(set(texts)) > 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("32 rows in one bank", {"st_shared_conflicts": 2 * 31, "ld_shared_conflicts": 2 * 31}),
        ("one word for all", {"ld_shared_conflicts": 0}),
        ("vectors side by side", {"st_shared_conflicts": 0, "ld_shared_conflicts": 0}),
        ("vectors 128 bytes apart", {"st_shared_conflicts": 8 * 7, "ld_shared_conflicts": 8 * 7}),
        ("ldmatrix rows 128 bytes apart", {"ldmatrix": 2, "ldmatrix_conflicts": 2 * 4 * 7}),
        ("copies 128 bytes apart", {"cp_async": 64, "cp_async_conflicts": 8 * 7}),
    ],
)
def test_bank_conflicts(kernel: EmulatedKernel, name: str, expected: dict[str, int]) -> None:
    _, counters = _run(kernel, name)
    assert {key: getattr(counters, key) for key in expected} == expected
