"""Limits and rates of a streaming multiprocessor (SM), one row per compute capability.

Limits are those of the CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications per compute
capability), and agree with the toolkit's occupancy calculator (``cuda_occupancy.h`` of CUDA 13.0). Rates are per clock
and SM; the tensor rate is that of ``mma.sync.m16n8k16`` with 16-bit inputs and float32 accumulators, the instruction of
the sm80 kernel family. That of newer instructions stands beside it where a family uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa2gen.errors import UnsupportedError

_KB = 1024


@dataclass(frozen=True)
class ArchLimits:
    """One compute capability's limits (per SM, block or thread) and rates (per clock and SM).

    Attributes:
        compute_capability: ``(major, minor)``.
        target: nvcc's name of it, e.g. ``"sm_80"``.
        max_smem_per_sm: Bytes of shared memory of an SM.
        max_smem_per_block: Bytes one block may opt in to.
        reserved_smem_per_block: Bytes the system takes for every resident block.
        smem_allocation_unit: A block's shared memory is rounded up to a multiple of this.
        max_registers_per_sm: 32-bit registers of an SM.
        max_registers_per_thread: What the instruction set can name.
        register_allocation_unit: Registers are granted to a warp in multiples of this.
        max_warps_per_sm, max_blocks_per_sm, max_threads_per_block: Residency limits.
        tensor_fma_per_clk: Multiply-adds of ``mma.sync`` (see module); a product may halve it (``Gpu.tensor_rate``).
        wgmma_fma_per_clk: Multiply-adds of ``wgmma`` with the same inputs and accumulators, of the sm90 family; 0 where
            there is none.
        mma_blocks_issue: While a scheduler's tensor instruction runs, that scheduler issues nothing else (measured on
            sm_90, where an mma takes 6 issue cycles and every other instruction adds one).
        fp32_lanes_per_clk, mufu_lanes_per_clk: float32 FMA and special-function (exp2) results.
        smem_bytes_per_clk: Shared-memory bandwidth.
        l2_bytes_per_clk: Sustained L2 read bandwidth when every SM reads. A round figure, good to about 20 %.
    """

    compute_capability: tuple[int, int]
    target: str
    max_smem_per_sm: int
    max_smem_per_block: int
    max_warps_per_sm: int
    max_blocks_per_sm: int
    tensor_fma_per_clk: float
    fp32_lanes_per_clk: int
    l2_bytes_per_clk: int
    wgmma_fma_per_clk: float = 0.0
    mma_blocks_issue: bool = False
    mufu_lanes_per_clk: int = 16
    smem_bytes_per_clk: int = 128
    reserved_smem_per_block: int = 1 * _KB
    smem_allocation_unit: int = 128
    max_registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    register_allocation_unit: int = 256
    max_threads_per_block: int = 1024

    @property
    def schedulers_per_sm(self) -> int:
        """Warp schedulers of an SM: four on every supported chip."""
        return 4

    @property
    def mma_cycles(self) -> float:
        """Cycles one scheduler's tensor core needs for one m16n8k16 (2048 multiply-adds): 8 on sm_80, 6 on sm_90."""
        return 2048 * self.schedulers_per_sm / self.tensor_fma_per_clk


def _arch(
    major: int,
    minor: int,
    smem_kb: int,
    warps: int,
    blocks: int,
    tensor: float,
    fp32: int,
    l2: int,
    wgmma: float = 0.0,
    mma_blocks_issue: bool = False,
) -> ArchLimits:
    # A block may opt in to all of an SM's shared memory but the 1 KB that the system reserves for it.
    return ArchLimits(
        compute_capability=(major, minor),
        target=f"sm_{major}{minor}",
        max_smem_per_sm=smem_kb * _KB,
        max_smem_per_block=(smem_kb - 1) * _KB,
        max_warps_per_sm=warps,
        max_blocks_per_sm=blocks,
        tensor_fma_per_clk=tensor,
        fp32_lanes_per_clk=fp32,
        l2_bytes_per_clk=l2,
        wgmma_fma_per_clk=wgmma,
        mma_blocks_issue=mma_blocks_issue,
    )


# sm_90: 645 TFLOP/s of mma.sync measured on an H200 at 1.79 GHz = 2048 * 4 / 6 multiply-adds per clock and SM. wgmma is
# what NVIDIA's 989 TFLOP/s are of: 132 SMs at 1.83 GHz.
# sm_100: no figure for mma.sync is published; 1024 (the rate of sm_80) is an assumption.
_ARCHS = {
    arch.compute_capability: arch
    for arch in (
        _arch(8, 0, smem_kb=164, warps=64, blocks=32, tensor=1024, fp32=64, l2=32),
        _arch(8, 6, smem_kb=100, warps=48, blocks=16, tensor=512, fp32=128, l2=16),
        _arch(8, 7, smem_kb=164, warps=48, blocks=16, tensor=1024, fp32=128, l2=16),
        _arch(8, 9, smem_kb=100, warps=48, blocks=24, tensor=512, fp32=128, l2=16),
        _arch(
            9, 0, smem_kb=228, warps=64, blocks=32, tensor=2048 * 4 / 6, fp32=128, l2=24, wgmma=2048,
            mma_blocks_issue=True,
        ),
        _arch(10, 0, smem_kb=228, warps=64, blocks=32, tensor=1024, fp32=128, l2=24),
        _arch(12, 0, smem_kb=100, warps=48, blocks=24, tensor=512, fp32=128, l2=16),
    )
}  # fmt: skip


def supported_compute_capabilities() -> tuple[tuple[int, int], ...]:
    """Every compute capability that :func:`arch_limits` knows, ascending."""
    return tuple(sorted(_ARCHS))


def arch_limits(compute_capability: tuple[int, int]) -> ArchLimits:
    """Limits of a compute capability.

    Raises:
        UnsupportedError: The capability is older than 8.0 or unknown to this version. The message says which are
            supported, and which of them has kernels that a newer chip of the same major version runs.
    """
    try:
        return _ARCHS[(int(compute_capability[0]), int(compute_capability[1]))]
    except (KeyError, IndexError, TypeError, ValueError):
        raise UnsupportedError(_refusal(compute_capability)) from None


def _refusal(compute_capability: object) -> str:
    known = ", ".join(f"{major}.{minor}" for major, minor in supported_compute_capabilities())
    if not isinstance(compute_capability, tuple):
        return f"compute capability {compute_capability} is not supported; supported are {known}"
    shown = ".".join(map(str, compute_capability))
    text = f"compute capability {shown} is not supported; supported are {known}"
    # (10, 3) runs cubins of (10, 0): same major version, later minor one.
    older = [each for each in supported_compute_capabilities() if each[:1] == compute_capability[:1]]
    older = [each for each in older if each < compute_capability]
    if not older:
        return text
    major, minor = older[-1]
    return (
        f"{text}. A GPU of {shown} runs what is compiled for sm_{major}{minor}: name a GPU of {major}.{minor} "
        "(fa2gen list gpus) to emit such kernels, untuned for this one"
    )
