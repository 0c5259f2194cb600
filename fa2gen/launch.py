"""From a problem to launches: grid, parameters, workspaces. The one place where a kernel's launch rule is computed.

The forward has one launch and no workspace; a backward has three, which share workspaces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .codegen import BWD_PARAMS, BWD_POSTPROCESS_PARAMS, BWD_PREPROCESS_PARAMS, FWD_PARAMS, FWD_SM90_PARAMS
from .codegen.render import launch_size
from .config_sm90 import GROUP_ROWS
from .constraints_backward import POSTPROCESS_ROWS, PREPROCESS_ROWS
from .errors import ArgumentError, UnsupportedError
from .problem import MAX_SEQLEN, Problem
from .spec import BwdConfig, Config, ForwardConfig, FwdSm90Config, KernelSpec
from .tensor_map import TensorMap, tensor_map
from .tiles import rows_per_pass

_MAX_INT = 2**31 - 1
# The kernel multiplies scores by scale_log2 even where softmax_scale is 0. A positive value this small makes every
# exponent 0 for any finite score (2^128 * 2^-149 = 2^-21), while -inf, a masked score, stays -inf (0 * -inf would be
# NaN). It is float32's smallest number; neither the GPU's fma and mul nor the emulator's flush it.
_SMALLEST_SCALE = 2.0**-149
_FLOAT32_MAX = 2.0**128 - 2.0**104


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: Which of the kind's.
        grid, num_threads, smem_bytes: Blocks, threads of a block, its dynamic shared memory.
        params: The packed struct, with null pointers and empty tensor maps.
        tensor_maps: What belongs into the tensor maps that lead the struct; None: nothing reads that one.
    """

    kernel: str
    grid: tuple[int, int, int]
    num_threads: int
    smem_bytes: int
    params: bytes
    tensor_maps: tuple[TensorMap | None, ...] = ()


@dataclass(frozen=True)
class Workspace:
    """Scratch memory that a plan's launches share: the name of their pointer fields, and bytes, a multiple of 256.

    Its contents do not matter.
    """

    pointer: str
    num_bytes: int


L2_PARTS = {"sm80": 2, "sm90": 4}
"""Of so many parts of L2 a section of a forward's heads fills one with K and V, by family.

A line that SMs of both halves of the chip read lies in both halves of L2, and Q and O pass through it too. H200, 11
causal cells of the sm90 family: a quarter is 1.00 to 1.02 times as fast as half.
"""


@dataclass(frozen=True)
class LaunchPlan:
    """Launches in order, and their workspaces."""

    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()


def heads_per_section(spec: KernelSpec, problem: Problem, section_bytes: int) -> int:
    """Query heads whose K and V have so many bytes together, whole groups of a key/value head at a time."""
    bytes_per_kv_head = 2 * 2 * problem.seqlen_k * spec.head_dim
    kv_heads = max(1, section_bytes // max(1, bytes_per_kv_head))
    return min(kv_heads * spec.gqa_ratio, problem.batch * problem.num_heads_q)


def fwd_plan(
    spec: KernelSpec,
    config: ForwardConfig,
    problem: Problem,
    *,
    strides: Mapping[str, tuple[int, int, int]],
    softmax_scale: float,
    l2_bytes: int,
    num_sms: int,
) -> LaunchPlan:
    """Plan of one forward call.

    Args:
        spec, config: The kernel.
        problem: Sizes; batch, num_heads_q and seqlen_q at least 1 (an empty output needs no launch).
        strides: For ``"q"``, ``"k"``, ``"v"`` and ``"o"``: element strides of (batch, row, head).
        softmax_scale: At least 0; log2(e) times it is finite in float32.
        l2_bytes: The chip's L2, for the order of the blocks; any value is right.
        num_sms: Its multiprocessors, for kernels whose blocks walk over all tiles; any from 1 is right.

    Raises:
        ArgumentError: The problem does not fit the spec, or a size or the scale is out of range.
    """
    _require_launchable(spec, problem, softmax_scale)
    if isinstance(config, FwdSm90Config):
        return _fwd_sm90_plan(spec, config, problem, strides, softmax_scale, l2_bytes, num_sms)
    packed = spec.gqa_ratio if config.pack_gqa else 1  # query heads whose rows share query blocks
    if problem.seqlen_q * packed > MAX_SEQLEN:
        raise UnsupportedError(f"seqlen_q * gqa_ratio = {problem.seqlen_q * packed} packed rows are above {MAX_SEQLEN}")
    heads = problem.batch * problem.num_heads_q // packed
    num_m_blocks = -(-problem.seqlen_q * packed // config.block_m)
    tiles = heads * num_m_blocks
    _require_grid("fwd", tiles)
    section = _equal_sections(
        heads, max(1, heads_per_section(spec, problem, l2_bytes // L2_PARTS["sm80"]) // packed), num_m_blocks
    )
    row_bytes = {tensor: strides[tensor][1] * 2 for tensor in ("k", "v")}
    params = FWD_PARAMS.pack(
        **_named_strides(strides, "q", "k", "v", "o"),
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
        scale_log2=_scale_log2(softmax_scale),
    )
    return LaunchPlan((_launch(spec, config, "fwd", tiles, params),))


def _equal_sections(heads: int, section: int, num_m_blocks: int) -> int:
    """Heads of a section: as many sections as at most ``section`` heads give, but of equal size.

    A small last one would leave SMs idle at the end. Tile indices inside a section are 32-bit products.
    """
    section = max(1, min(section, _MAX_INT // num_m_blocks))
    return -(-heads // -(-heads // section))


def _fwd_sm90_plan(
    spec: KernelSpec,
    config: FwdSm90Config,
    problem: Problem,
    strides: Mapping[str, tuple[int, int, int]],
    softmax_scale: float,
    l2_bytes: int,
    num_sms: int,
) -> LaunchPlan:
    heads = problem.batch * problem.num_heads_q
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    tiles = heads * num_m_blocks
    section = config.section_mib << 20 if config.section_mib else l2_bytes // L2_PARTS["sm90"]
    # A block's next tile may lie a whole grid beyond the last one.
    _require_grid("fwd", tiles + num_sms)
    params = FWD_SM90_PARAMS.pack(
        **_named_strides(strides, "o"),
        batch=problem.batch,
        num_heads=problem.num_heads_q,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        num_m_blocks=num_m_blocks,
        num_tiles=tiles,
        heads_per_section=_equal_sections(heads, heads_per_section(spec, problem, section), num_m_blocks),
        tail_m_blocks=_tail(num_m_blocks, heads, num_sms) if spec.causal else 0,
        softmax_scale=softmax_scale,
        scale_log2=_scale_log2(softmax_scale),
    )
    queries = (problem.batch, problem.seqlen_q, problem.num_heads_q, spec.head_dim)
    keys = (problem.batch, problem.seqlen_k, problem.num_heads_k, spec.head_dim)
    maps = (
        tensor_map("q", queries, strides["q"], GROUP_ROWS),
        tensor_map("k", keys, strides["k"], config.block_n),
        tensor_map("v", keys, strides["v"], config.block_n),
        tensor_map("o", queries, strides["o"], GROUP_ROWS) if config.epilogue == "tma" else None,
    )
    launch = Launch("fwd", (min(tiles, num_sms), 1, 1), *launch_size(spec, config, "fwd"), params, maps)
    return LaunchPlan((launch,), (Workspace("tickets", 256),) if config.scheduler == "dynamic" else ())


def _tail(num_m_blocks: int, heads: int, num_sms: int) -> int:
    """Causal query tiles of each head that come after all others: of the short half as many as level the SMs' ends.

    Where the others end SMs differ by up to the longest tile, of ``num_m_blocks`` units; n short tiles of a head have
    n^2 / 2 units. H200, 11 causal cells: 0.99 to 1.03 times as fast as the whole short half; a tail of half as much
    work is 0.93 to 1.04 times, and none 0.83 to 1.00 times.
    """
    return min(num_m_blocks // 2, math.ceil(math.sqrt(2 * num_sms * num_m_blocks / heads)))


def bwd_plan(
    spec: KernelSpec,
    config: BwdConfig,
    problem: Problem,
    *,
    strides: Mapping[str, tuple[int, int, int]],
    softmax_scale: float,
    l2_bytes: int = 0,
    section: int | None = None,
) -> LaunchPlan:
    """Plan of one backward call: D and cleared sums, then the gradients, then the sums' conversion.

    Args:
        spec, config: The kernels.
        problem: Sizes; batch, num_heads_q, seqlen_q and seqlen_k at least 1 (else all gradients are zero).
        strides: For ``"q"``, ``"k"``, ``"v"``, ``"o"``, ``"dout"``, ``"dq"``, ``"dk"`` and ``"dv"``: element strides of
            (batch, row, head).
        softmax_scale: At least 0; log2(e) times it is finite in float32.
        l2_bytes: The chip's L2, for the order of the blocks; any value is right.
        section: Heads (those with blocks of their own) whose blocks start together, at most all; None: as many as suit
            the chip.

    Returns:
        The launches. Their pointer fields carry the names of tensors (``q``, ``k``, ``v``, ``o``, ``dout``, ``lse``,
        ``dlse``, ``dq``, ``dk``, ``dv``; ``dlse`` may stay null) or of workspaces; those without a workspace stay null.

    Raises:
        ArgumentError, UnsupportedError: As for :func:`fwd_plan`.
    """
    _require_launchable(spec, problem, softmax_scale)
    if problem.seqlen_k < 1:
        raise ArgumentError(f"gradients without keys need no launch: {problem}")
    heads_q, heads_k = problem.batch * problem.num_heads_q, problem.batch * problem.num_heads_k
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    num_n_blocks = -(-problem.seqlen_k // config.block_n)
    padded_q, padded_k = num_m_blocks * config.block_m, num_n_blocks * config.block_n
    width = spec.native_head_dim
    sizes = {"lse_log2": heads_q * padded_q * 4, "delta": heads_q * padded_q * 4}
    sizes["dq_accum"] = heads_q * padded_q * width * 4
    if config.split_heads:
        sizes["dk_accum"] = sizes["dv_accum"] = heads_k * padded_k * width * 4
    if spec.deterministic:
        sizes["semaphores"] = _rounded(heads_q * num_m_blocks * 4, 16)
    heads = heads_q if config.split_heads else heads_k
    row_blocks = -(-padded_q // PREPROCESS_ROWS)
    dq_blocks = heads_q * -(-padded_q // POSTPROCESS_ROWS)
    dk_blocks = heads_k * -(-padded_k // POSTPROCESS_ROWS) if config.split_heads else 0
    # Before anything is packed: the structs' integers have 32 bits.
    blocks = {
        "bwd_preprocess": heads_q * row_blocks,
        "bwd": heads * num_n_blocks,
        "bwd_postprocess": dq_blocks + 2 * dk_blocks,
    }
    for kernel, count in blocks.items():
        _require_grid(kernel, count)
    if heads_q * num_m_blocks > _MAX_INT:
        raise UnsupportedError(f"batch * num_heads_q * query tiles = {heads_q * num_m_blocks} is above {_MAX_INT}")
    preprocess = BWD_PREPROCESS_PARAMS.pack(
        **_named_strides(strides, "o", "dout"),
        dq_accum_bytes=sizes["dq_accum"],
        dkv_accum_bytes=sizes.get("dk_accum", 0),
        semaphores_bytes=sizes.get("semaphores", 0),
        num_heads=problem.num_heads_q,
        seqlen_q=problem.seqlen_q,
        padded_seqlen_q=padded_q,
        num_row_blocks=row_blocks,
    )
    if section is None:
        most = max(1, min(heads, _MAX_INT // num_n_blocks))
        section = _even_section(heads, max(1, min(_backward_section(spec, problem, l2_bytes), most)), most)
    row_bytes = {tensor: strides[tensor][1] * 2 for tensor in ("q", "dout")}
    main = BWD_PARAMS.pack(
        **_named_strides(strides, "q", "k", "v", "dout", "dk", "dv"),
        **{f"{tensor}_pass_bytes": rows_per_pass(spec, config) * bytes for tensor, bytes in row_bytes.items()},
        **{f"{tensor}_tile_bytes": config.block_m * bytes for tensor, bytes in row_bytes.items()},
        batch=problem.batch,
        num_heads=problem.num_heads_q,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        num_m_blocks=num_m_blocks,
        num_n_blocks=num_n_blocks,
        heads_per_section=section,
        softmax_scale=softmax_scale,
        scale_log2=_scale_log2(softmax_scale),
    )
    postprocess = BWD_POSTPROCESS_PARAMS.pack(
        **_named_strides(strides, "dq", "dk", "dv"),
        num_heads=problem.num_heads_q,
        num_heads_k=problem.num_heads_k,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        padded_seqlen_q=padded_q,
        padded_seqlen_k=padded_k,
        num_dq_blocks=dq_blocks,
        num_dk_blocks=dk_blocks,
        softmax_scale=softmax_scale,
    )
    params = {"bwd_preprocess": preprocess, "bwd": main, "bwd_postprocess": postprocess}
    launches = tuple(_launch(spec, config, kernel, count, params[kernel]) for kernel, count in blocks.items())
    return LaunchPlan(launches, tuple(Workspace(name, _rounded(size, 256)) for name, size in sizes.items()))


# Head dims' worth of heads at a time, at least, whose key blocks add in order: so many that few blocks of one head are
# under way, each of which waits for the one before, and so few that their sums do not crowd each other out of L2. H200,
# 4096 tokens, relative to no order: d 128, 7 heads 0.94, 13 to 32 heads 0.98; d 256, 3 heads 0.86, 7 to 11 heads 0.92,
# 16 heads 0.85; causal d 128, 7 heads 0.89, 22 heads 1.00, 32 heads 1.03; d 256, 7 heads 0.80, 16 heads 0.93.
_ORDERED_COLUMNS = {False: 2048, True: 8192}


def _backward_section(spec: KernelSpec, problem: Problem, l2_bytes: int) -> int:
    """Heads whose Q, dO and float32 sums of dQ fit in half of L2 together; of a group's heads one at a time is read.

    With a causal mask half of them are in use at a time (H200: up to 9 % faster with twice as many heads).
    """
    heads = l2_bytes // 2 // max(1, problem.seqlen_q * spec.native_head_dim * (2 * 2 + 4))
    heads *= 2 if spec.causal else 1
    return max(heads, _ORDERED_COLUMNS[spec.causal] // spec.native_head_dim) if spec.deterministic else heads


def _even_section(heads: int, section: int, most: int) -> int:
    """A size from ``section`` to half as many again with which the last section lacks fewest heads.

    At the end of a section SMs idle; of large ones, which lack little, not all sizes are looked at.
    """
    sizes = range(section, min(section + section // 2, section + 64, most) + 1)
    return min(sizes, key=lambda size: (-heads % size, size))


def _require_grid(kernel: str, blocks: int) -> None:
    if blocks > _MAX_INT:
        raise UnsupportedError(f"{blocks} thread blocks of {kernel} are above the grid's limit {_MAX_INT}")


def _launch(spec: KernelSpec, config: Config, kernel: str, blocks: int, params: bytes) -> Launch:
    return Launch(kernel, (blocks, 1, 1), *launch_size(spec, config, kernel), params)


def _named_strides(strides: Mapping[str, tuple[int, int, int]], *tensors: str) -> dict[str, int]:
    return {
        f"{tensor}_{axis}_stride": stride
        for tensor in tensors
        for axis, stride in zip(("batch", "row", "head"), strides[tensor], strict=True)
    }


def _scale_log2(softmax_scale: float) -> float:
    return max(softmax_scale * math.log2(math.e), _SMALLEST_SCALE)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _require_launchable(spec: KernelSpec, problem: Problem, softmax_scale: float) -> None:
    """Raise unless kernels of the spec take the problem and the scale."""
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
