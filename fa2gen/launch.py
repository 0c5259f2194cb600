"""From a problem to launches: grid, parameters, workspaces. The one place where a kernel's launch rule is computed.

A plan is a list from the start: the forward has one launch and no workspace; kinds that need several (a backward, a
split over keys) add to the lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .codegen import FWD_PARAMS
from .constraints import rows_per_pass, smem_plan
from .errors import ArgumentError, UnsupportedError
from .problem import MAX_SEQLEN, Problem
from .spec import FwdConfig, KernelSpec

POINTERS = FWD_PARAMS.pointers
"""Pointer fields that lead the parameter struct: pointer i is the 8 bytes at 8 * i. Null in a fresh plan."""

_MAX_INT = _MAX_GRID_X = 2**31 - 1
# The kernel multiplies scores by scale_log2 even where softmax_scale is 0. A positive value this small makes every
# exponent 0 for any finite score (2^128 * 2^-149 = 2^-21), while -inf, a masked score, stays -inf (0 * -inf would be
# NaN). It is float32's smallest number; neither the GPU's fma and mul nor the emulator's flush it.
_SMALLEST_SCALE = 2.0**-149
_FLOAT32_MAX = 2.0**128 - 2.0**104


@dataclass(frozen=True)
class Launch:
    """One kernel launch; ``params`` is the packed struct with null pointers."""

    grid: tuple[int, int, int]
    num_threads: int
    smem_bytes: int
    params: bytes


@dataclass(frozen=True)
class Workspace:
    """Scratch memory a plan needs: a pointer field's name, bytes, and whether it must be zero at the start."""

    pointer: str
    num_bytes: int
    zeroed: bool


@dataclass(frozen=True)
class LaunchPlan:
    """Launches in order, and their workspaces."""

    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()


def heads_per_section(spec: KernelSpec, problem: Problem, l2_bytes: int) -> int:
    """Query heads whose K and V fit in half of L2 together, whole groups of a key/value head at a time."""
    bytes_per_kv_head = 2 * 2 * problem.seqlen_k * spec.head_dim
    kv_heads = max(1, l2_bytes // 2 // max(1, bytes_per_kv_head))
    return min(kv_heads * spec.gqa_ratio, problem.batch * problem.num_heads_q)


def fwd_plan(
    spec: KernelSpec,
    config: FwdConfig,
    problem: Problem,
    *,
    strides: Mapping[str, tuple[int, int, int]],
    softmax_scale: float,
    l2_bytes: int,
) -> LaunchPlan:
    """Plan of one forward call.

    Args:
        spec, config: The kernel.
        problem: Sizes; batch, num_heads_q and seqlen_q at least 1 (an empty output needs no launch).
        strides: For ``"q"``, ``"k"``, ``"v"`` and ``"o"``: element strides of (batch, row, head).
        softmax_scale: At least 0; log2(e) times it is finite in float32.
        l2_bytes: The chip's L2, for the order of the blocks; any value is right.

    Raises:
        ArgumentError: The problem does not fit the spec, or a size or the scale is out of range.
    """
    if problem.batch < 1 or problem.num_heads_q < 1 or problem.seqlen_q < 1:
        raise ArgumentError(f"an empty output needs no launch: {problem}")
    if problem.gqa_ratio != spec.gqa_ratio:
        raise ArgumentError(f"the kernel has gqa_ratio {spec.gqa_ratio}, the problem {problem.gqa_ratio}")
    if not (math.isfinite(softmax_scale) and softmax_scale >= 0):
        raise ArgumentError(f"softmax_scale must be finite and at least 0 here, got {softmax_scale}")
    if softmax_scale * math.log2(math.e) > _FLOAT32_MAX:
        raise UnsupportedError(
            f"softmax_scale {softmax_scale} is too large: kernels take up to {_FLOAT32_MAX / math.log2(math.e):.4g}"
        )
    for name in ("seqlen_q", "seqlen_k"):
        if getattr(problem, name) > MAX_SEQLEN:
            raise UnsupportedError(f"{name} {getattr(problem, name)} is above {MAX_SEQLEN}")
    if problem.num_heads_q > _MAX_INT:
        raise UnsupportedError(f"num_heads_q {problem.num_heads_q} is above {_MAX_INT}")
    packed = spec.gqa_ratio if config.pack_gqa else 1  # query heads whose rows share query blocks
    if problem.seqlen_q * packed > MAX_SEQLEN:
        raise UnsupportedError(f"seqlen_q * gqa_ratio = {problem.seqlen_q * packed} packed rows are above {MAX_SEQLEN}")
    heads = problem.batch * problem.num_heads_q // packed
    num_m_blocks = -(-problem.seqlen_q * packed // config.block_m)
    tiles = heads * num_m_blocks
    if tiles > _MAX_GRID_X:
        raise UnsupportedError(f"batch * num_heads_q * query blocks = {tiles} is above the grid's limit {_MAX_GRID_X}")
    named_strides = {
        f"{tensor}_{axis}_stride": stride
        for tensor in ("q", "k", "v", "o")
        for axis, stride in zip(("batch", "row", "head"), strides[tensor], strict=True)
    }
    section = max(1, heads_per_section(spec, problem, l2_bytes) // packed)
    # Tile indices inside a section are 32-bit products.
    section = max(1, min(section, _MAX_GRID_X // num_m_blocks))
    # As many sections, but of equal size: a small last one would leave SMs idle at the end.
    section = -(-heads // -(-heads // section))
    row_bytes = {tensor: strides[tensor][1] * 2 for tensor in ("k", "v")}
    params = FWD_PARAMS.pack(
        **named_strides,
        **{f"{tensor}_pass_bytes": rows_per_pass(spec, config) * bytes for tensor, bytes in row_bytes.items()},
        **{f"{tensor}_tile_bytes": config.block_n * bytes for tensor, bytes in row_bytes.items()},
        batch=problem.batch,
        num_heads=problem.num_heads_q,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        num_m_blocks=num_m_blocks,
        heads_per_section=section,
        tail_m_blocks=num_m_blocks // 2 if spec.causal else 0,
        softmax_scale=softmax_scale,
        scale_log2=max(softmax_scale * math.log2(math.e), _SMALLEST_SCALE),
    )
    return LaunchPlan((Launch((tiles, 1, 1), config.num_threads, smem_plan(spec, config).total, params),))
