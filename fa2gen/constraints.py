"""Which configs are legal, and the shared-memory plan: the only arithmetic on shared memory and registers there is.

The backward's part of it is in ``constraints_backward.py``, the sm90 family's in ``constraints_sm90.py``; what is
asked here serves all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from . import constraints_backward as backward
from . import constraints_sm90 as sm90
from .errors import UnsupportedError
from .hardware import ArchLimits, occupancy
from .spec import FAMILIES, BwdConfig, Config, FwdConfig, FwdSm90Config, KernelSpec
from .tiles import panel_columns, rows_per_pass

_BYTES_PER_ELEMENT = 2
# Registers beyond accumulators and fragments: addresses, row state, loop and schedule. Compiled kernels of the sm80
# family use 30 to 60 besides; 24 keeps every config that can compile without spilling in the space.
_REGISTERS_BESIDES = 24


@dataclass(frozen=True)
class SmemPlan:
    """Byte offsets in a block's dynamic shared memory.

    Q, all stages of K, all of V; where warps share rows two tiles of P and a float for each of their rows; a ring's
    mbarriers. O leaves through Q's area.
    """

    q: int
    k: int
    v: int
    p: int
    exchange: int
    barriers: int
    total: int


def smem_plan(spec: KernelSpec, config: FwdConfig) -> SmemPlan:
    """Where the forward's tiles lie; rendered into the kernel, which asserts it."""
    row = spec.native_head_dim * _BYTES_PER_ELEMENT
    k = config.block_m * row
    v = k + config.num_stages * config.block_n * row
    p = v + config.num_stages * config.block_n * row
    shared = config.warps_n > 1
    exchange = p + (2 * config.block_m * config.step_n * _BYTES_PER_ELEMENT if shared else 0)
    barriers = exchange + (4 * config.warps_n * config.block_m if shared else 0)
    # A full and an empty one of 8 bytes for each stage.
    total = barriers + (16 * config.num_stages if config.pipeline == "ring" else 0)
    return SmemPlan(q=0, k=k, v=v, p=p, exchange=exchange, barriers=barriers, total=total)


def smem_bytes(spec: KernelSpec, config: Config) -> int:
    """Dynamic shared memory of a block of the main kernel."""
    if isinstance(config, BwdConfig):
        return backward.smem_plan(spec, config).total
    if isinstance(config, FwdSm90Config):
        return sm90.smem_plan(spec, config).total
    return smem_plan(spec, config).total


def estimate_registers(spec: KernelSpec, config: Config) -> int:
    """Lower estimate of the registers a thread needs without spilling.

    Forward: acc_o and acc_s in float32, Q's fragments where they are kept, and a fixed part. P's fragments take over
    acc_s's registers as it dies.
    """
    if isinstance(config, BwdConfig):
        return backward.estimate_registers(spec, config) + _REGISTERS_BESIDES
    if isinstance(config, FwdSm90Config):
        return sm90.estimate_registers(spec, config)
    rows = config.warp_rows
    acc_o = rows * spec.native_head_dim // config.warps_n // 32
    acc_s = rows * config.step_n // config.warps_n // 32
    frag_q = rows * spec.native_head_dim // 64 if config.q_in_regs else 0
    return acc_o + acc_s + frag_q + _REGISTERS_BESIDES


def infeasible_reason(spec: KernelSpec, config: Config, arch: ArchLimits) -> str | None:
    """Why a config cannot serve a spec on an architecture, or None if it can.

    The reason is one clause that names the tunable and the limit.
    """
    if type(config) not in FAMILIES[spec.kind].values():
        return f"a {type(config).__name__} is for kind {'bwd' if isinstance(config, BwdConfig) else 'fwd'}"
    if isinstance(config, FwdSm90Config):
        return sm90.infeasible_reason(spec, config, arch)
    for check in (_shape_reason, _block_reason, _residency_reason):
        reason = check(spec, config, arch)
        if reason:
            return reason
    return None


def config_reason(config: Config) -> str | None:
    """Why a config can serve no spec on any architecture, or None if some spec may take it."""
    if isinstance(config, BwdConfig):
        return backward.config_reason(config)
    if isinstance(config, FwdSm90Config):
        return sm90.config_reason(config)
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps {config.num_warps} is not a power of two up to 16"
    if config.warps_n > 2 or (config.warps_n > 1 and config.num_warps < 4):
        return f"warps_n {config.warps_n} of {config.num_warps} warps: two of at least four can share rows"
    warps_m = config.num_warps // config.warps_n
    if config.block_m % (16 * warps_m):
        return f"block_m {config.block_m} does not give each of {warps_m} warps whole 16-row tiles"
    if config.warp_rows > 64:
        return f"{config.warp_rows} query rows a warp: above 64 the accumulators cannot fit"
    if config.block_n % config.step_n or config.step_n % 16:
        return f"step_n {config.step_n} does not divide block_n {config.block_n} into multiples of 16 keys"
    if config.block_n > 256:
        return f"block_n {config.block_n} is above 256"
    if config.num_stages > 3:
        return f"num_stages {config.num_stages} is above 3"
    if config.num_stages == 1 and config.step_n != config.block_n:
        return "num_stages 1 needs step_n == block_n: K is released after one step"
    if config.pipeline == "ring" and config.num_stages < 2:
        return "a ring needs at least 2 stages"
    if config.proof == "block" and config.softmax != "guarded":
        return "proof block is for the guarded softmax: the online one needs none"
    if config.warps_n > 1 and config.step_n not in (32, 64):
        return f"warps_n {config.warps_n} needs steps of 32 or 64 keys, whose P has rows of 64 or 128 bytes"
    if config.warps_n > 1 and (config.num_stages < 2 or config.q_in_regs):
        return f"warps_n {config.warps_n} needs two stages, and Q in shared memory, where both warps read it"
    return None


def _shape_reason(spec: KernelSpec, config: Config, arch: ArchLimits) -> str | None:
    if reason := config_reason(config):
        return reason
    if isinstance(config, BwdConfig):
        return backward.shape_reason(spec, config, arch)
    assert isinstance(config, FwdConfig)
    pass_rows = rows_per_pass(spec, config)
    if config.block_n % pass_rows:
        return f"block_n {config.block_n} is not whole copy passes of {pass_rows} rows"
    if pass_rows % 8:
        return f"{config.num_warps} warps copy {pass_rows} rows a pass, but the swizzle needs 8"
    if spec.native_head_dim // panel_columns(spec) % config.warps_n:
        return f"warps_n {config.warps_n}: head dim {spec.native_head_dim} is not so many times whole panels"
    if config.pack_gqa and spec.gqa_ratio == 1:
        return "pack_gqa packs the query heads of a key/value head, and gqa_ratio is 1"
    if config.proof == "block" and spec.dtype == "fp16":
        return "proof block: fp16's range is too narrow, whole query blocks would often be repeated"
    return None


def _block_reason(spec: KernelSpec, config: Config, arch: ArchLimits) -> str | None:
    smem = smem_bytes(spec, config)
    if smem > arch.max_smem_per_block:
        return f"{smem} bytes of shared memory, {arch.target} grants a block {arch.max_smem_per_block}"
    if config.num_threads > arch.max_threads_per_block:
        return f"{config.num_threads} threads, a block may have {arch.max_threads_per_block}"
    registers = estimate_registers(spec, config)
    if registers > arch.max_registers_per_thread:
        return f"at least {registers} registers a thread, {arch.max_registers_per_thread} exist"
    return None


def _residency_reason(spec: KernelSpec, config: Config, arch: ArchLimits) -> str | None:
    registers = min(arch.max_registers_per_thread, estimate_registers(spec, config))
    possible = occupancy(arch, config.num_threads, registers, smem_bytes(spec, config))
    if possible.blocks_per_sm < config.min_blocks:
        return f"min_blocks {config.min_blocks}: only {possible.blocks_per_sm} fit an SM, limited by {possible.limiter}"
    return None


def borrowed_config(spec: KernelSpec, config: Config) -> tuple[Config, str]:
    """A config of another spec without what this spec's dtype or heads forbid, and what was changed.

    A block-wide proof becomes one of each step (fp16's range is too narrow for it), packed heads come apart where there
    is nothing to pack; a backward's heads stay together where there is one, or their order must be fixed. The rest may
    still be illegal; see :func:`infeasible_reason`.

    Returns:
        The config, and the changes in words; ``""`` if there are none.
    """
    changes = []
    if isinstance(config, BwdConfig):
        if config.split_heads and (spec.gqa_ratio == 1 or spec.deterministic):
            return replace(config, split_heads=False), "heads not split"
        return config, ""
    if isinstance(config, FwdSm90Config):
        return config, ""
    if config.proof == "block" and spec.dtype == "fp16":
        config = replace(config, proof="step")
        changes.append("proof step instead of block")
    if config.pack_gqa and spec.gqa_ratio == 1:
        config = replace(config, pack_gqa=False)
        changes.append("heads not packed")
    return config, ", ".join(changes)


def families_on(spec: KernelSpec, arch: ArchLimits) -> tuple[str, ...]:
    """The families whose kernels serve a spec on an architecture, in the order of ``spec.FAMILIES``.

    The first runs everywhere. What a call's tensors ask for besides, such as strides that TMA can express, is not
    looked at.
    """
    return tuple(
        family
        for family in FAMILIES[spec.kind]
        if infeasible_reason(spec, default_config_of(spec, family), arch) is None
    )


def default_config_of(spec: KernelSpec, family: str) -> Config:
    """A family's default for a spec: legal wherever the family serves it (see :func:`families_on`)."""
    return sm90.default_forward_config(spec) if family == "sm90" else default_config(spec)


def default_config_on(spec: KernelSpec, arch: ArchLimits, families: Collection[str] | None = None) -> Config:
    """What runs on an architecture where nothing is tuned: the default of the newest family that serves the spec.

    Args:
        spec, arch: What runs where.
        families: Only these.

    Raises:
        UnsupportedError: None of the families asked for serves the spec there.
    """
    serving = families_on(spec, arch)
    for family in reversed(serving):
        if families is None or family in families:
            return default_config_of(spec, family)
    asked = " or ".join(families or ()) or "none"
    raise UnsupportedError(f"family {asked} does not serve {spec.slug()} on {arch.target}: {', '.join(serving)} does")


def default_config(spec: KernelSpec) -> Config:
    """A config that is legal for every spec of its kind on every architecture from 8.0 up, and fast on all."""
    return backward.default_config(spec) if spec.kind == "bwd" else default_forward_config(spec)


def default_forward_config(spec: KernelSpec) -> FwdConfig:
    """The sm80 family's: a config that is legal for every spec on every architecture from 8.0 up, and fast on all.

    At least four warps find room on an SM that grants a block 99 KB, eight where it has 164. Up to head dim 128 a warp
    has 32 rows; beyond, registers for the output of 16. Shared memory of a block in KiB: 16 at head dim 32, 48 at 64,
    72 at 96, 64 at 128, 96 at 192 and 256. By the model these are 0 to 18 % faster than the 64 x 64 tiles before them,
    on an H200, an A100, an L40S and an RTX 4090 (at worst 3 % slower: head dim 128 on the last).
    """
    width = spec.native_head_dim
    block_n = 64 if width in (64, 96) else 32
    return FwdConfig(
        block_m=64 if width == 256 else 128,
        block_n=block_n,
        step_n=block_n,
        num_warps=8 if width == 192 else 4,
        num_stages=2,
        q_in_regs=width not in (96, 128),
        softmax="guarded",
        min_blocks=1,
        pipeline="ring" if width in (96, 128, 192) else "barrier",
    )
