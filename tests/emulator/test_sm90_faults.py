"""Faults of single instructions of sm_90a, each named; those of their order are in test_sm90_diagnostics.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fa2gen.emulator import EmulatedKernel, build
from fa2gen.errors import EmulatorError
from fa2gen.tensor_map import TensorMap
from tests.emulator.test_sm90_primitives import run_probe
from tests.sm90_kernels import MappedTensor, Sm90Probe, counting, sm90_source

A = MappedTensor(counting(1, 128, 1, 128), (64, 64, 1, 1))
SHAPES = (("ss", 64, False), ("ss", 128, True))

INIT = "init_barriers(smem, 2, 1);"
EXPECT = "mbarrier_arrive_expect_tx(smem, 8192);"
LOAD = "tma_load(tile, p.a, smem, 0, 0, 0, 0);"
WAIT = "mbarrier_try_wait(smem, 0);"
# One thread loads a tile, nobody has waited.
LOADED = f"{INIT} if (tid == 0) {{ {EXPECT} {LOAD} }}"
FILL = "for (int i = tid; i < 2048; i += kThreads) st_shared(tile + 4 * i, u32(i));"
FENCE = "fence_proxy_async();"
STORE = "if (tid == 0) { tma_store(p.o, tile, 0, 0, 0, 0); tma_store_commit(); tma_store_wait_read<0>(); }"
TICKETS = "if (tid == 0)"

# Two panels of 64 columns for b, MN-major; a is anything that fits.
PANELS = f"""{INIT}
  if (tid == 0) {{
    mbarrier_arrive_expect_tx(smem, 16384);
    for (int i = 0; i < 2; i++) tma_load(tile + 8192 * i, p.a, smem, 64 * i, 0, 0, 0);
  }}
  {WAIT}
  float d[64];
  wgmma_fence();
  wgmma_ss<Element, 128, true>(d, operand(tile), operand(tile, LEADING), false);
  wgmma_commit();
  wgmma_wait<0>();"""

# Whole bodies, after which every thread stores: text, name, part of the message.
CASES: dict[str, tuple[str, str, str]] = {
    # Copies in
    "a load reads what is on its way": (
        f"{LOADED} ld_shared<u32>(tile + 4 * tid);",
        "tma-load-not-waited|shared-un",
        "",
    ),
    "an ldmatrix of it": (
        f"{LOADED} sync_threads(); u32 r[4]; ldmatrix_x4(r, tile + 16 * lane);",
        "tma-load-not-waited",
        "ldmatrix_x4",
    ),
    "a store to it": (f"{LOADED} sync_threads(); st_shared(tile + 4 * tid, 0u);", "tma-load-overwrite", "st_shared"),
    "a stmatrix to it": (
        f"{LOADED} sync_threads(); stmatrix_x4(tile + 16 * tid, 0, 0, 0, 0);",
        "tma-load-overwrite",
        "stmatrix_x4",
    ),
    "a copy of the other kind to it": (
        f"{LOADED} sync_threads(); cp_async16(tile + 16 * tid, p.in);",
        "tma-load-overwrite",
        "cp_async16",
    ),
    "another copy to it": (
        f"{INIT} if (tid == 0) {{ {EXPECT} {EXPECT} {LOAD} {LOAD} }}",
        "mbarrier-over-arrival",
        "bytes",
    ),
    "another copy to it, by another mbarrier": (
        f"{LOADED} sync_threads(); if (tid == 0) {{ mbarrier_arrive_expect_tx(smem + 8, 8192); "
        "tma_load(tile, p.a, smem + 8, 0, 0, 0, 0); }",
        "tma-load-over-write",
        "tma_load of thread 0",
    ),
    "a store of it": (f"{LOADED} {STORE}", "tma-load-not-waited", "tma_store reads"),
    "a thread that has not waited reads": (
        f"{LOADED} if (warp == 0) {WAIT} shfl_xor(1, 1); if (warp == 1) {{ bar_sync(1, 32); ld_shared<u32>(tile); }}",
        "tma-load-not-waited|shared-uninitialised-read",
        "",
    ),
    "over what was stored": (
        f"{FILL} {INIT} if (tid == 0) {{ {EXPECT} {LOAD} }} {WAIT}",
        "proxy-fence-missing",
        "tma_load",
    ),
    "over what was stored, not met": (
        f"{INIT} if (tid == 1) st_shared(tile, 1u); {FENCE} if (tid == 0) {{ {EXPECT} {LOAD} }} {WAIT}",
        "tma-load-over-write|tma-load-overwrite",
        "",
    ),
    "over what others read": (
        f"{FILL} {FENCE} {INIT} ld_shared<u32>(tile + 4 * (tid ^ 32)); if (tid == 0) {{ {EXPECT} {LOAD} }} {WAIT}",
        "tma-load-over-read|tma-load-not-waited",
        "",
    ),
    "over an mbarrier": (
        f"{INIT} if (tid == 0) {{ {EXPECT} tma_load(smem, p.a, smem, 0, 0, 0, 0); }}",
        "mbarrier-plain-access|shared-",
        "",
    ),
    "nobody waits": (LOADED, "tma-load-left-at-exit", "nobody has waited for the tma_load at"),
    "no mbarrier": ("if (tid == 0) tma_load(tile, p.a, smem, 0, 0, 0, 0);", "mbarrier-not-initialised", "tma_load"),
    "too many bytes": (
        f"{INIT} if (tid == 0) mbarrier_arrive_expect_tx(smem, 1 << 20);",
        "mbarrier-tx-count",
        "1048575 at most",
    ),
    "bytes that nobody brings": (f"{INIT} if (tid == 0) {EXPECT}", "mbarrier-tx-count", "the block ends"),
    "a destination between": (
        LOADED.replace("tma_load(tile,", "tma_load(tile + 64,"),
        "shared-misaligned",
        "multiple of 128",
    ),
    "beyond the block's memory": (
        LOADED.replace("tma_load(tile,", "tma_load(tile + 0x16000,"),
        "shared-out-of-range",
        "tma_load of 8192 bytes",
    ),
    "a map between": (
        "alignas(64) u64 copy[32]; __builtin_memcpy(copy + 1, &p.a, 128); "
        "tma_prefetch_map(*reinterpret_cast<const TensorMap*>(copy + 1));",
        "tma-map",
        "64 bytes",
    ),
    "a map that TMA refuses": ("tma_prefetch_map(p.b);", "tma-map", "box 64 257 1 1"),
    # Copies out
    "before the tensor": (
        f"{FILL} {FENCE} sync_threads(); {STORE.replace('0, 0, 0, 0', '0, -5, 0, 0')}",
        "tma-store-before-tensor",
        "row -5",
    ),
    "what nobody wrote": (STORE, "shared-uninitialised-read", "tma_store reads"),
    "what nobody waited for in the end": (
        f"{FILL} {FENCE} sync_threads(); {STORE.replace('tma_store_wait_read<0>();', '')}",
        "tma-store-left-at-exit",
        "",
    ),
    "a wait that leaves one group out": (
        f"{FILL} {FENCE} sync_threads(); {STORE.replace('wait_read<0>', 'wait_read<1>')}",
        "tma-store-left-at-exit",
        "",
    ),
    "written twice": (f"{FILL} {FENCE} sync_threads(); {STORE} {STORE}", "global-two-writers", "tma_store writes o"),
    # Warps
    "half a warp elects": (
        "if (lane < 16)\n elect_one();\n else\n sync_warp();",
        "warp-divergence",
        "elect_one",
    ),
    "stmatrix between": ("stmatrix_x4(tile + 16 * lane + 8, 0, 0, 0, 0);", "shared-misaligned", "stmatrix_x4"),
    "stmatrix twice without a barrier": (
        "stmatrix_x4(tile + 16 * lane, 0, 0, 0, 0);",
        "shared-race-write-after-write",
        "stmatrix_x4",
    ),
    # Registers
    "20 registers": ("setmaxnreg_dec<20>();", "setmaxnreg-budget", "24 to 256"),
    "a number that is no multiple of 8": ("setmaxnreg_dec<100>();", "setmaxnreg-budget", "multiples of 8"),
    "264 registers": ("setmaxnreg_inc<264>();", "setmaxnreg-budget", "24 to 256"),
    "gives back what it has not": ("setmaxnreg_dec<176>();", "setmaxnreg-budget", "with 168 registers"),
    "takes fewer than it has": ("setmaxnreg_inc<160>();", "setmaxnreg-budget", "with 168 registers"),
    "nobody gives back": (
        "if (group == 0) setmaxnreg_inc<176>();",
        "deadlock",
        "setmaxnreg_inc: warp 0 has 168 registers a thread and waits for 176; 0 are free",
    ),
    "more than are given back": (
        "if (group == 0) setmaxnreg_dec<40>(); else setmaxnreg_inc<240>();",
        "deadlock",
        "waits for 240",
    ),
    "a warp that does not take part": (
        "if (warp != 2) setmaxnreg_dec<40>();",
        "warpgroup-divergence",
        "warp 2 has not executed the setmaxnreg",
    ),
    "warps in two places": (
        "if (warp % 2)\n setmaxnreg_dec<40>();\n else\n setmaxnreg_dec<40>();",
        "warpgroup-divergence",
        "setmaxnreg_dec",
    ),
    # Tickets
    "opened twice": (
        f"{TICKETS} {{ open_tickets(p.tickets); open_tickets(p.tickets); }}",
        "tickets-opened-twice",
        "tickets",
    ),
    "drawn after the last": (
        f"{TICKETS} {{ open_tickets(p.tickets); for (int i = 0; i < 3; i++) draw_ticket(p.tickets, 1); }}",
        "tickets-closed",
        "its last number, 1",
    ),
    "never closed": (
        f"{TICKETS} {{ open_tickets(p.tickets); draw_ticket(p.tickets, 5); }}",
        "tickets-left-open",
        "1 numbers were drawn",
    ),
    "never opened": (f"{TICKETS} draw_ticket(p.tickets, 5);", "deadlock", "draw_ticket"),
    # wgmma
    "panels closer than they are": (
        PANELS.replace("LEADING", "4096"),
        "wgmma-descriptor",
        "row 0, columns 64 to 71 of operand b",
    ),
    "leading and stride offsets confused": (
        PANELS.replace("operand(tile, LEADING)", "operand(tile, 1024, 8192)"),
        "wgmma-descriptor",
        "of operand b",
    ),
    "the second panel of another row": (
        PANELS.replace("LEADING", "8192").replace("64 * i, 0, 0, 0", "64 * i, 8 * i, 0, 0"),
        "wgmma-descriptor",
        "are row 8, column 64",
    ),
    "a start that is none": (
        PANELS.replace("operand(tile, LEADING)", "operand(0, 8192)"),
        "shared-out-of-range",
        "wgmma_ss",
    ),
    "beyond the end": (
        PANELS.replace("operand(tile, LEADING)", "operand(tile, 0x30000)"),
        "shared-out-of-range|wgmma-descriptor",
        "",
    ),
    "accumulators that overlap": (
        PANELS.replace("LEADING", "8192").replace(
            "wgmma_commit();",
            "auto& half = reinterpret_cast<float (&)[32]>(d[32]); "
            "wgmma_ss<Element, 64, false>(half, operand(tile), operand(tile), false); wgmma_commit();",
        ),
        "wgmma-accumulator-touched",
        "partly those of one in flight with 128 columns",
    ),
    "an operand that nobody wrote": (
        PANELS.replace("operand(tile), operand(tile, LEADING)", "operand(tile + 0x8000), operand(tile, 8192)"),
        "shared-uninitialised-read",
        "wgmma_ss reads",
    ),
}

PROBE = Sm90Probe(
    "",
    np.arange(384, dtype=np.uint32),
    a=A,
    b=dataclasses.replace(A, box=(64, 257, 1, 1)),
    o=MappedTensor(np.zeros((1, 64, 1, 64), np.uint16), (64, 64, 1, 1)),
    inputs=np.zeros(4, np.uint32),
)


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    bodies = {name: f"{text}\n  st_global(p.out + tid, u32(tid));" for name, (text, _, _) in CASES.items()}
    return build(sm90_source(bodies, "host", "bf16", SHAPES))


@pytest.mark.parametrize("name", CASES)
def test_fault_is_named(kernel: EmulatedKernel, name: str) -> None:
    _, expected, says = CASES[name]
    for seed in range(2):
        for lazy in (True, False):
            for random_schedule in (True, False):
                with pytest.raises(EmulatorError) as caught:
                    run_probe(
                        kernel,
                        PROBE,
                        list(CASES).index(name),
                        seed=seed,
                        lazy_wgmma=lazy,
                        random_schedule=random_schedule,
                        timeout=30,
                    )
                error = caught.value
                assert any(error.name.startswith(each) for each in expected.split("|")), str(error)
                assert says in str(error), str(error)


def _fault(probe: Sm90Probe, text: str, **options: object) -> EmulatorError:
    kernel = build(sm90_source({"fault": f"{text}\n  st_global(p.out + tid, u32(tid));"}, "host", "bf16", SHAPES))
    with pytest.raises(EmulatorError) as caught:
        run_probe(kernel, probe, 0, **options)
    return caught.value


def test_maps_that_show_more_than_the_tensor() -> None:
    """TMA follows the map, wherever it leads."""

    class Longer(MappedTensor):
        def map(self, name: str) -> TensorMap:
            map = super().map(name)
            return dataclasses.replace(map, sizes=(map.sizes[0], 2 * map.sizes[1], *map.sizes[2:]))

    probe = dataclasses.replace(PROBE, a=Longer(A.values, A.box), o=Longer(PROBE.o.values, PROBE.o.box))
    load = LOADED.replace("tile, p.a, smem, 0, 0", "tile, p.a, smem, 0, 96")
    error = _fault(probe, load)
    assert error.name == "global-out-of-range"
    assert "tma_load reads" in str(error)
    error = _fault(probe, f"{FILL} {FENCE} sync_threads(); {STORE.replace('0, 0, 0, 0', '0, 32, 0, 0')}")
    assert error.name == "global-out-of-range"
    assert "tma_store writes" in str(error)


@pytest.mark.parametrize("threads", [1, 2])
def test_tickets_that_a_later_block_opens(threads: int) -> None:
    text = """if (tid == 0) {
    if (blockIdx.x == 1) open_tickets(p.tickets);
    draw_ticket(p.tickets, gridDim.x - 1);
  }
  if (blockIdx.x > 0) return;"""
    error = _fault(dataclasses.replace(PROBE, grid=3), text, threads=threads)
    assert error.name == "deadlock"
    assert "draw_ticket" in str(error) or "was opened by block number 1" in str(error)


def test_a_block_without_whole_warpgroups() -> None:
    text = "wgmma_fence(); st_global(p.out + tid, u32(tid));"
    kernel = build(sm90_source({"fault": text}, "host", "bf16", SHAPES, num_threads=192))
    with pytest.raises(EmulatorError) as caught:
        run_probe(kernel, PROBE, 0)
    assert caught.value.name == "warpgroup-divergence"
    assert "fewer than four warps" in str(caught.value)


def test_more_registers_than_a_small_block_has() -> None:
    kernel = build(sm90_source({"fault": "setmaxnreg_inc<256>();"}, "host", "bf16", SHAPES, num_threads=128))
    with pytest.raises(EmulatorError) as caught:
        run_probe(kernel, PROBE, 0)
    assert caught.value.name == "setmaxnreg-budget"
    assert "have 248 registers a thread each at entry" in str(caught.value)
