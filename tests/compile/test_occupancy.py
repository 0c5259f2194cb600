"""Occupancy against NVIDIA's own calculator, the header that every CUDA toolkit brings, on a grid of kernels."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from fa2gen.compile import find_nvcc
from fa2gen.emulator import find_host_compiler
from fa2gen.hardware import LIMITERS, arch_limits, occupancy, supported_compute_capabilities

pytestmark = pytest.mark.nvcc

KB = 1024
# Reads lines of "major minor threads_per_sm smem_per_sm smem_per_block threads registers smem", answers with
# "blocks limits": the bits of OCC_LIMIT_WARPS (1), _REGISTERS (2), _SHARED_MEMORY (4), _BLOCKS (8).
PROGRAM = """
#include <cstdio>
#include <climits>
#include "cuda_occupancy.h"
int main() {
  int major, minor, threads_per_sm, smem_per_sm, smem_per_block, threads, registers, smem;
  while (scanf("%d%d%d%d%d%d%d%d", &major, &minor, &threads_per_sm, &smem_per_sm, &smem_per_block, &threads, &registers,
               &smem) == 8) {
    cudaOccDeviceProp device;
    device.computeMajor = major;
    device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = threads_per_sm;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 << 10;
    device.sharedMemPerMultiprocessor = smem_per_sm;
    device.numSms = 1;
    device.sharedMemPerBlockOptin = smem_per_block;
    device.reservedSharedMemPerBlock = 1 << 10;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = INT_MAX;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = smem;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result;
    int failed = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, smem);
    printf("%d %u\\n", failed ? -1 : result.activeBlocksPerMultiprocessor, result.limitingFactors & 15);
  }
}
"""
BITS = {"warps": 1, "registers": 2, "shared memory": 4, "blocks": 8}


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvcc = find_nvcc()
    roots = [root for root in (nvcc.root, nvcc.path.resolve().parents[1]) if root is not None]
    headers = [root / "include" for root in roots if (root / "include" / "cuda_occupancy.h").is_file()]
    if not headers:
        pytest.skip(f"the toolkit of {nvcc.path} has no cuda_occupancy.h")
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "calculator.cpp").write_text(PROGRAM)
    build = [find_host_compiler(), "-O1", "-w", f"-I{headers[0]}", "-o", "calculator", "calculator.cpp"]
    subprocess.run(build, cwd=folder, check=True, timeout=120)
    return folder / "calculator"


def test_occupancy_agrees_with_nvidias_calculator(calculator: Path) -> None:
    grid = list(
        itertools.product(
            supported_compute_capabilities(),
            (32, 33, 64, 96, 128, 160, 224, 256, 384, 512, 800, 1024),
            (1, 16, 32, 33, 40, 41, 64, 80, 96, 97, 128, 129, 160, 168, 169, 200, 224, 240, 255),
            (
                0,
                1,
                1 * KB,
                3 * KB + 128,
                16 * KB,
                24 * KB,
                32 * KB + 1,
                49 * KB,
                64 * KB,
                75 * KB,
                81 * KB,
                99 * KB,
                113 * KB,
            ),
        )
    )
    # A block that asks for more than it may have is an error of the launch, not a residency of none.
    grid = [(cc, *rest) for cc, *rest in grid if rest[2] <= arch_limits(cc).max_smem_per_block]
    lines = []
    for capability, threads, registers, smem in grid:
        arch = arch_limits(capability)
        limits = (32 * arch.max_warps_per_sm, arch.max_smem_per_sm, arch.max_smem_per_block)
        lines.append(" ".join(map(str, (*capability, *limits, threads, registers, smem))))
    done = subprocess.run([calculator], input="\n".join(lines), capture_output=True, text=True, check=True, timeout=60)
    answers = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(answers) == len(grid) > 15_000
    seen = set()
    for (capability, *kernel), answer in zip(grid, answers, strict=True):
        result = occupancy(arch_limits(capability), *kernel)
        bits = sum(BITS[name] for name in result.limiters)
        assert (result.blocks_per_sm, bits) == answer, (capability, kernel)
        seen.update((capability, name) for name in result.limiters)
    assert seen == set(itertools.product(supported_compute_capabilities(), LIMITERS))
