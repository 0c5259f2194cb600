"""Which configs of the sm90 family are legal, their shared-memory plan, how registers are split, what is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config_sm90 import GROUP_ROWS, FwdSm90Config
from .hardware import ArchLimits
from .spec import Config, KernelSpec

COMPUTE_CAPABILITY = (9, 0)
"""wgmma and setmaxnreg exist here only: sm_90a code runs on no other chip."""

TARGET = "sm_90a"
"""What nvcc compiles the family's kernels for."""

MAX_WARPGROUPS = 4
"""Consumer warpgroups of a block, at most."""

_PANEL_COLUMNS = 64
_ROW_BYTES = 128  # of a panel
_MAX_STAGES = 4
_MAX_SECTION_MIB = 1024  # no chip has as much L2
_MAX_BLOCK_N = 256  # wgmma's widest product
# mbarriers: a full and an empty one of 8 bytes a stage. Tile numbers that are drawn pass through two slots, which have
# them too.
_RING_BYTES = 16
_TILE_SLOTS, _TILE_NUMBER_BYTES = 2, 4
TILE_NUMBERS_BYTES = _TILE_SLOTS * _TILE_NUMBER_BYTES
"""Bytes of the tile numbers at the end of shared memory, where they are drawn."""
# Consumers' registers beyond accumulators and P: addresses, row state, loop and schedule. The probes that ran on an
# H200 without spilling used up to 44 besides; 24 keeps every config that can compile in the space.
_REGISTERS_BESIDES = 24
# Registers that an instruction with so many accumulators takes besides, of the launch's share: ptxas counts by that.
_INSTRUCTION_REGISTERS = 26
# What 8 steps of Q must leave.
_ROOM_BESIDE_Q = 16
# Those of A, where it comes from registers, in a k16 step.
_FRAGMENT_REGISTERS = 4


@dataclass(frozen=True)
class Sm90SmemPlan:
    """Byte offsets in a block's dynamic shared memory, which begins at a multiple of 1024.

    Stages of Q, K and V, P where it goes through shared memory, mbarriers and, where tiles are drawn, their numbers. O
    leaves through Q's place.
    """

    q: int
    k: int
    v: int
    p: int
    barriers: int
    total: int


@dataclass(frozen=True)
class RegisterSplit:
    """Registers of a thread after ``setmaxnreg``; 0: it is not executed, and the launch's share stays."""

    producer: int
    consumer: int


def padded_columns(head_dim: int) -> int:
    """Columns of a tile in shared memory: whole panels, which TMA fills up with zeros."""
    return -(-head_dim // _PANEL_COLUMNS) * _PANEL_COLUMNS


def output_columns(head_dim: int) -> int:
    """Columns of O that are multiplied: whole steps of 16."""
    return -(-head_dim // 16) * 16


def smem_plan(spec: KernelSpec, config: FwdSm90Config) -> Sm90SmemPlan:
    """Where the forward's tiles lie; rendered into the kernel, which asserts it."""
    row = padded_columns(spec.head_dim) * 2
    k = config.q_tiles * GROUP_ROWS * row
    v = k + config.k_stages * config.block_n * row
    p = v + config.num_stages * config.block_n * row
    panels = -(-config.block_n // _PANEL_COLUMNS) if config.p_in_smem else 0
    barriers = p + panels * config.warpgroups * GROUP_ROWS * _ROW_BYTES
    slots = _TILE_SLOTS if config.scheduler == "dynamic" else 0
    rings = config.q_tiles + config.k_stages + config.num_stages + slots
    total = barriers + _RING_BYTES * rings + _TILE_NUMBER_BYTES * slots
    return Sm90SmemPlan(q=0, k=k, v=v, p=p, barriers=barriers, total=total)


def register_split(config: FwdSm90Config) -> RegisterSplit:
    """How many registers a producer's and a consumer's threads have.

    Together they are what the launch grants: 128 * 24 + 256 * 240 of 384 * 168, 128 * 32 + 384 * 160 of 512 * 128,
    128 * 24 + 512 * 112 of 640 * 96. With one consumer a thread has all 255 that exist from the start.
    """
    splits = {1: (0, 0), 2: (24, 240), 3: (32, 160), 4: (24, 112)}
    return RegisterSplit(*splits[config.warpgroups])


def _launch_registers(config: FwdSm90Config) -> int:
    """Registers of a thread before they are split."""
    return {1: 255, 2: 168, 3: 128, 4: 96}[config.warpgroups]


def consumer_registers(config: FwdSm90Config) -> int:
    """Registers of a consumer's thread."""
    return register_split(config).consumer or 255


def estimate_registers(spec: KernelSpec, config: FwdSm90Config) -> int:
    """Lower estimate of the registers a consumer's thread needs without spilling.

    Accumulators of O and S in float32; what of Q lies in registers; where products overlap, P of the tile before.
    """
    accumulators = output_columns(spec.head_dim) // 2 + config.block_n // 2
    packed = config.block_n // 4 if config.overlap and not config.p_in_smem else 0
    return accumulators + packed + _FRAGMENT_REGISTERS * config.q_regs + _REGISTERS_BESIDES


def has_room_for_q(spec: KernelSpec, config: FwdSm90Config, q_regs: int) -> bool:
    """Whether so many k16 steps of Q in registers leave enough of them.

    H200: head dim 256 with 64 keys has 8 left beside 8 steps and is 0.94 to 1.03 times as fast with them as with 4,
    0.99 in the median of 21 pairs; head dim 128 with 128 keys has 24 left and is 1.01 and 1.02 times as fast.
    """
    if q_regs > output_columns(spec.head_dim) // 16:
        return False
    needed = estimate_registers(spec, replace(config, q_regs=q_regs))
    return needed + _ROOM_BESIDE_Q <= consumer_registers(config)


def config_reason(config: FwdSm90Config) -> str | None:
    """Why a config can serve no spec, or None if some spec may take it."""
    if config.block_m % GROUP_ROWS or not 1 <= config.warpgroups <= MAX_WARPGROUPS:
        return f"block_m {config.block_m} is not {GROUP_ROWS} rows for each of 1 to {MAX_WARPGROUPS} warpgroups"
    if config.block_n % 16 or config.block_n > _MAX_BLOCK_N:
        return f"block_n {config.block_n} is no multiple of 16 up to {_MAX_BLOCK_N}"
    if config.num_stages > _MAX_STAGES:
        return f"num_stages {config.num_stages} is above {_MAX_STAGES}"
    if config.k_extra > 1:
        return f"k_extra {config.k_extra} is above 1"
    if config.q_stages > 2:
        return f"q_stages {config.q_stages} is above 2"
    if config.q_extra and (config.q_stages > 1 or config.q_extra >= config.warpgroups):
        return (
            f"q_extra {config.q_extra}: beside 1 q_stages there may be {config.warpgroups - 1} for {config.warpgroups} "
            "consumers, beside 2 none"
        )
    if config.section_mib > _MAX_SECTION_MIB:
        return f"section_mib {config.section_mib} is above {_MAX_SECTION_MIB}"
    share = _launch_registers(config)
    if config.block_n // 2 + _INSTRUCTION_REGISTERS > share:
        return f"block_n {config.block_n}: its product takes more than the {share} registers of the launch's share"
    if config.ping_pong and config.warpgroups == 1:
        return "ping_pong needs warpgroups that take turns, and block_m 64 has one"
    if config.softmax == "guarded" and not config.overlap:
        return "softmax guarded needs overlap"
    if config.overlap_tiles and not config.overlap:
        return "overlap_tiles needs overlap"
    if config.overlap_tiles and config.q_stages < 2 and config.epilogue == "tma":
        return "overlap_tiles needs 2 q_stages with epilogue tma: the output leaves through a Q tile meanwhile"
    return None


def most_skipped(config: FwdSm90Config) -> int:
    """Key tiles of a causal query tile that its last consumer sees and its first does not, at most."""
    return -(-(config.block_m - GROUP_ROWS) // config.block_n)


def infeasible_reason(spec: KernelSpec, config: FwdSm90Config, arch: ArchLimits) -> str | None:
    """Why a config cannot serve a spec on an architecture, or None if it can."""
    if arch.compute_capability != COMPUTE_CAPABILITY:
        return f"family sm90 needs compute capability 9.0, {arch.target} has no wgmma"
    if spec.alignment != 16:
        return "family sm90 copies by TMA, which needs 16-byte alignment"
    if reason := config_reason(config):
        return reason
    if config.section_mib and not spec.causal:
        return "section_mib orders the tiles of a causal mask, and there is none"
    # In its turn a consumer waits for the first key tile that it sees, and those that wait for their turns hold the
    # ones before.
    if spec.causal and config.overlap_tiles and config.num_stages <= most_skipped(config):
        return (
            f"overlap_tiles with {most_skipped(config)} key tiles of {config.block_n} that not all consumers see needs "
            f"more stages than that, num_stages is {config.num_stages}"
        )
    if config.q_regs > (steps := output_columns(spec.head_dim) // 16):
        return f"q_regs {config.q_regs} is above the {steps} k16 steps of head_dim {spec.head_dim}"
    smem = smem_plan(spec, config).total
    if smem > arch.max_smem_per_block:
        return f"{smem} bytes of shared memory, {arch.target} grants a block {arch.max_smem_per_block}"
    share, fragment = _launch_registers(config), 0 if config.p_in_smem else _FRAGMENT_REGISTERS
    if output_columns(spec.head_dim) // 2 + fragment + _INSTRUCTION_REGISTERS > share:
        return (
            f"head_dim {spec.head_dim}: a warpgroup's P V takes more than the {share} registers of the launch's share"
        )
    registers, available = estimate_registers(spec, config), consumer_registers(config)
    if registers > available:
        return f"at least {registers} registers a thread, {config.warpgroups} consumers have {available}"
    return None


def compile_target(config: Config, gpu_target: str) -> str:
    """nvcc's target for a config's kernels on a GPU.

    wgmma, setmaxnreg and TMA's tensor copies are refused for ``sm_90`` without the suffix; the sm80 family's code for
    ``sm_90`` runs on later chips of that major version too.

    Args:
        config: Whose kernels are compiled.
        gpu_target: ``Gpu.target``, e.g. ``"sm_90"``.
    """
    return f"{gpu_target}a" if isinstance(config, FwdSm90Config) else gpu_target


def default_forward_config(spec: KernelSpec) -> FwdSm90Config:
    """A config that is legal for every spec with alignment 16 on compute capability 9.0, and fast there.

    The fastest of those tried on an H200 (bf16, 1k to 8k tokens a sequence) or within 4 % of it, at head dims 64, 128,
    192 and 256; at 96, tiles of 192 queries and 96 keys are 7 % faster at 8k, and 2 % slower up to 2k. With one Q tile
    the output leaves from registers: through Q's place the next tile would wait for it (head dim 128 at 1k: 585 instead
    of 529 TFLOP/s). Causal tiles differ in length and are drawn (head dim 128 at 4k: 588 instead of 552).
    """
    columns = padded_columns(spec.head_dim)
    block_m, block_n, num_stages, q_stages = {
        64: (256, 64, 4, 2),
        128: (128, 128, 2, 2),
        192: (128, 64, 2, 2),
        256: (128, 64, 2, 1),
    }[columns]
    config = FwdSm90Config(
        block_m=block_m,
        block_n=block_n,
        num_stages=num_stages,
        q_stages=q_stages,
        k_extra=1 if columns == 192 else 0,
        softmax="guarded",
        overlap_tiles=columns != 256,
        scheduler="dynamic" if spec.causal else "static",
        epilogue="tma" if q_stages > 1 else "direct",
    )
    return config if columns == 64 else replace(config, q_regs=8 if has_room_for_q(spec, config, 8) else 4)
