"""Limits, product rows and occupancy."""

from __future__ import annotations

import pytest

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.hardware import arch_limits, get_gpu, list_gpus, match_device, occupancy, supported_compute_capabilities

A100, RTX, H100 = arch_limits((8, 0)), arch_limits((8, 6)), arch_limits((9, 0))


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "smem", "blocks", "limiter"),
    [
        # 255 registers are granted as 256 a thread, 8,192 a warp; a scheduler's quarter of 65,536 holds 2 warps.
        (A100, 128, 255, 0, 2, "registers"),
        # 168 * 32 = 5,376 = 21 * 256: 3 warps a scheduler, so 12 warps, 3 blocks of 4.
        (A100, 128, 168, 0, 3, "registers"),
        # 169 rounds up to 176 a thread (5,632 a warp): 16,384 / 5,632 = 2 warps a scheduler, 2 blocks.
        (A100, 128, 169, 0, 2, "registers"),
        # 8 warps of 255 registers: 2 a scheduler, 8 in all, one block.
        (A100, 256, 255, 0, 1, "registers"),
        # 64 KB + 1 KB reserved: 164 / 65 = 2; registers would allow 4.
        (A100, 128, 128, 65536, 2, "shared memory"),
        # 80 KB + 1 KB: 164 / 81 = 2; 81 KB + 1 KB = 82 fills exactly; one unit more leaves one block.
        (A100, 128, 128, 81 * 1024, 2, "shared memory"),
        (A100, 128, 128, 81 * 1024 + 1, 1, "shared memory"),
        # The 163 KB a block may have.
        (A100, 128, 32, 163 * 1024, 1, "shared memory"),
        (A100, 128, 32, 163 * 1024 + 1, 0, "shared memory"),
        # 64 KB on a 100 KB SM: one.
        (RTX, 128, 128, 65536, 1, "shared memory"),
        # 48 warps on sm_86, 64 on sm_80; blocks of one warp stop at 16 and 32.
        (RTX, 256, 32, 0, 6, "warps"),
        (A100, 256, 32, 0, 8, "registers"),
        (RTX, 32, 32, 0, 16, "blocks"),
        (A100, 32, 32, 0, 32, "blocks"),
        # 112 KB + 1 KB on 228 KB.
        (H100, 256, 128, 112 * 1024, 2, "registers"),
        (H100, 128, 128, 113 * 1024, 2, "shared memory"),
        (H100, 1056, 32, 0, 0, "warps"),
        (A100, 128, 256, 0, 0, "registers"),
    ],
)
def test_occupancy_worked_by_hand(arch, threads, registers, smem, blocks, limiter):
    result = occupancy(arch, threads, registers, smem)
    assert (result.blocks_per_sm, result.limiter) == (blocks, limiter)
    assert result.warps_per_sm == blocks * -(-threads // 32)


@pytest.mark.parametrize("bad", [(0, 32, 0), (128, 0, 0), (128, 32, -1)])
def test_occupancy_refuses_nonsense(bad):
    with pytest.raises(ArgumentError):
        occupancy(A100, *bad)


def test_limits_of_an_sm():
    assert A100.max_smem_per_block == 163 * 1024
    assert H100.max_smem_per_block == 232448
    assert RTX.max_smem_per_block == 99 * 1024
    assert A100.mma_cycles == 8
    assert H100.mma_cycles == 6
    assert {arch_limits(cc).target for cc in supported_compute_capabilities()} == {
        "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120",
    }  # fmt: skip


@pytest.mark.parametrize("unknown", [(7, 5), (9, 9), (), "8.0"])
def test_unknown_capability_names_the_known(unknown):
    with pytest.raises(UnsupportedError, match=r"8\.0, 8\.6"):
        arch_limits(unknown)


def test_every_row_is_complete_and_consistent():
    names = [name for gpu in list_gpus() for name in gpu.device_names]
    assert len(names) == len(set(names))
    for gpu in list_gpus():
        assert gpu.source
        assert gpu.target == gpu.arch.target
        assert gpu.num_sms > 0
        assert 0.5 < gpu.boost_ghz < 4
        assert gpu.tensor_rate in (0.5, 1.0)


def test_peaks_agree_with_the_datasheets():
    # Dense 16-bit with float32 accumulation. On Hopper mma.sync reaches two thirds of the wgmma peak.
    for name, tflops in (
        ("a100", 312),
        ("a30", 165),
        ("a40", 149.7),
        ("rtx-3090", 71),
        ("rtx-4090", 165.2),
        ("l4", 121),
    ):
        assert get_gpu(name).mma_tflops == pytest.approx(tflops, rel=0.01)


def test_gpu_names():
    assert get_gpu("A100").title == "A100 SXM4 80GB"
    assert get_gpu("rtx_4090").name == "rtx-4090"
    with pytest.raises(ArgumentError, match="did you mean h100"):
        get_gpu("h10")
    with pytest.raises(ArgumentError, match="known are a100"):
        get_gpu("voodoo")


def test_a_listed_device_is_found_by_name_and_shape():
    assert match_device("NVIDIA H200", (9, 0), 132, 60 << 20).name == "h200"
    assert match_device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40 << 20).name == "a100"


def test_a_slice_or_unknown_device_is_never_a_listed_one():
    listed = {gpu.name for gpu in list_gpus()}
    for name, sms in (("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42), ("NVIDIA A100-SXM4-80GB", 42), ("NVIDIA A10G", 80)):
        gpu = match_device(name, (8, 0), sms, 20 << 20)
        assert gpu.name not in listed
        assert (gpu.num_sms, gpu.l2_bytes, gpu.target) == (sms, 20 << 20, "sm_80")
    with pytest.raises(UnsupportedError):
        match_device("Tesla T4", (7, 5), 40, 4 << 20)
