"""Limits per compute capability, product rows, and which row a device is."""

from __future__ import annotations

import pytest

from fa2gen.errors import ArgumentError, UnsupportedError
from fa2gen.hardware import arch_limits, get_gpu, list_gpus, match_device, supported_compute_capabilities

A100, H100 = arch_limits((8, 0)), arch_limits((9, 0))


# "Technical specifications per compute capability" of the CUDA programming guide: warps and blocks of an SM, KB of
# shared memory of an SM and of a block.
LIMITS = {
    (8, 0): (64, 32, 164, 163),
    (8, 6): (48, 16, 100, 99),
    (8, 7): (48, 16, 164, 163),
    (8, 9): (48, 24, 100, 99),
    (9, 0): (64, 32, 228, 227),
    (10, 0): (64, 32, 228, 227),
    (12, 0): (48, 24, 100, 99),
}


def test_limits_of_an_sm():
    assert supported_compute_capabilities() == tuple(LIMITS)
    for capability, (warps, blocks, smem_kb, block_kb) in LIMITS.items():
        arch = arch_limits(capability)
        assert (arch.max_warps_per_sm, arch.max_blocks_per_sm) == (warps, blocks)
        assert (arch.max_smem_per_sm, arch.max_smem_per_block) == (smem_kb * 1024, block_kb * 1024)
        assert (arch.max_registers_per_sm, arch.max_registers_per_thread, arch.max_threads_per_block) == (
            65536,
            255,
            1024,
        )
        assert arch.reserved_smem_per_block == 1024
        assert arch.target == "sm_{}{}".format(*capability)
    assert A100.mma_cycles == 8
    assert H100.mma_cycles == 6


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
        assert isinstance(gpu.l2_bytes, int)
        assert gpu.l2_bytes >= 6 << 20
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
        ("a10", 125),
        ("rtx-a6000", 154.8),
        ("rtx-5090", 209.5),
        # 362 on the datasheet, which is 142 SMs at 2.49 GHz; the maximum clock is 2.52.
        ("l40s", 366.4),
    ):
        assert get_gpu(name).mma_tflops == pytest.approx(tflops, rel=0.01)


def test_bandwidth_is_memory_clock_times_bus_width():
    # Memory clock in MHz and bus width in bits as the driver reports them; two transfers a clock.
    for name, mhz, bits in (
        ("a100", 1593, 5120),
        ("a100-40gb", 1215, 5120),
        ("a100-pcie", 1512, 5120),
        ("a30", 1215, 3072),
        ("a40", 7251, 384),
        ("rtx-a6000", 8001, 384),
        ("rtx-3090", 9751, 384),
        ("l4", 6251, 192),
        ("l40s", 9001, 384),
        ("rtx-4090", 10501, 384),
        ("h100", 2619, 5120),
        ("h100-pcie", 1593, 5120),
        ("gh200", 2619, 6144),
        ("b200", 3996, 7680),
        ("rtx-5090", 14001, 512),
    ):
        assert get_gpu(name).hbm_gbs == pytest.approx(2e-3 * mhz * bits / 8, rel=1e-3), name


def test_every_product_of_the_list_is_there():
    assert [gpu.name for gpu in list_gpus()] == [
        "a100", "a100-40gb", "a100-pcie", "a100-pcie-40gb", "a30", "a10", "a40", "rtx-a6000", "rtx-3090", "l4", "l40s",
        "rtx-4090", "h100", "h100-pcie", "h100-nvl", "h200", "gh200", "b200", "rtx-5090",
    ]  # fmt: skip
    for gpu in list_gpus():
        assert (gpu.tensor_rate == 0.5) == ("GeForce" in gpu.title)
        assert gpu.memory_gb
        if "GB" in gpu.title:
            assert gpu.title.endswith(f" {gpu.memory_gb}GB")


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
    assert match_device("NVIDIA A100-SXM-80GB", (8, 0), 108, 40 << 20).name == "a100"
    assert match_device("NVIDIA H100 80GB HBM3", (9, 0), 132, 50 << 20).name == "h100"
    for name in ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"):
        assert match_device(name, (9, 0), 132, 60 << 20).name == "gh200"


def test_names_of_old_drivers():
    assert match_device("A100-SXM4-40GB", (8, 0), 108, 40 << 20).name == "a100-40gb"
    assert match_device("GeForce RTX 3090", (8, 6), 82, 6 << 20).name == "rtx-3090"
    assert match_device("RTX A6000", (8, 6), 84, 6 << 20).name == "rtx-a6000"
    # A slice of one is none.
    assert match_device("A100-SXM4-40GB", (8, 0), 42, 20 << 20).name == "dev-a100-sxm4-40gb-42sm"


@pytest.mark.parametrize(
    "name", ["NVIDIA H200 NVL", "NVIDIA GH200 144G HBM3e", "NVIDIA H100", "NVIDIA GeForce RTX 4090 D", "H200 NVIDIA"]
)
def test_near_names_are_other_products(name):
    for capability in ((9, 0), (8, 9)):
        assert match_device(name, capability, 132, 60 << 20).name.startswith("dev-")


def test_a_slice_or_unknown_device_is_never_a_listed_one():
    listed = {gpu.name for gpu in list_gpus()}
    for name, sms in (("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42), ("NVIDIA A100-SXM4-80GB", 42), ("NVIDIA A10G", 80)):
        gpu = match_device(name, (8, 0), sms, 20 << 20)
        assert gpu.name not in listed
        assert (gpu.num_sms, gpu.l2_bytes, gpu.target) == (sms, 20 << 20, "sm_80")
    with pytest.raises(UnsupportedError):
        match_device("Tesla T4", (7, 5), 40, 4 << 20)
