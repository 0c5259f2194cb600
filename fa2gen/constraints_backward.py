"""Shared memory, registers and legality of the backward kernels; asked through ``constraints.py``."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import ArchLimits
from .spec import BwdConfig, KernelSpec
from .tiles import panel_columns, rows_per_pass

_BYTES_PER_ELEMENT = 2
# Blocks of the kernels before and after the main one: threads, and rows that a block takes.
PREPROCESS_THREADS, PREPROCESS_ROWS = 256, 64
POSTPROCESS_THREADS, POSTPROCESS_ROWS = 128, 64


@dataclass(frozen=True)
class BwdSmemPlan:
    """Byte offsets in a block's dynamic shared memory.

    K, V, all stages of Q, all of dO; where warps hand P over or share it a tile of P; dS; for each stage L and D of its
    rows in float32. dK and dV leave through the places of K and V.
    """

    k: int
    v: int
    q: int
    dout: int
    p: int
    ds: int
    rows: int
    total: int


def smem_plan(spec: KernelSpec, config: BwdConfig) -> BwdSmemPlan:
    """Where the main kernel's tiles lie; rendered into the kernel, which asserts it."""
    row = spec.native_head_dim * _BYTES_PER_ELEMENT
    scores = config.block_m * config.block_n * _BYTES_PER_ELEMENT
    v = config.block_n * row
    q = 2 * v
    dout = q + config.num_stages * config.block_m * row
    p = dout + config.num_stages * config.block_m * row
    ds = p + (scores if config.roles * config.warps_d > 1 else 0)
    rows = ds + config.ds_stages * scores
    total = rows + config.num_stages * 8 * config.block_m
    return BwdSmemPlan(k=0, v=v, q=q, dout=dout, p=p, ds=ds, rows=rows, total=total)


def postprocess_smem_bytes(spec: KernelSpec) -> int:
    """Shared memory of the kernel after the main one: 16 rows of a panel for each warp, padded by 16 bytes."""
    return POSTPROCESS_THREADS // 32 * 16 * (panel_columns(spec) * _BYTES_PER_ELEMENT + 16)


def dq_warps_m(spec: KernelSpec, config: BwdConfig) -> int | None:
    """Warps along the rows of a tile of dQ: 32 rows each if the other warps can share its columns; None: impossible.

    A warp of 32 x 32 loads a fragment for every two products, one of 16 x 64 five for every eight.
    """
    pairs = spec.native_head_dim // 16
    for warps_m in (config.block_m // 32, config.block_m // 16):
        if warps_m and config.num_warps % warps_m == 0 and pairs % (config.num_warps // warps_m) == 0:
            return warps_m
    return None


def estimate_registers(spec: KernelSpec, config: BwdConfig) -> int:
    """Accumulators of dV and dK, of the scores at hand, and fragments of K and V where they are kept."""
    keys, width = config.warp_keys, spec.native_head_dim
    gradients = (3 - config.roles) * keys * width // config.warps_d // 32
    scores = keys * config.step_m // config.warps_d // 32
    # With one role P and dP are there together; a large P is packed first.
    held = scores * config.roles % 2 * min(scores, 16 + scores // 4)
    kept = (3 - config.roles) * keys * width // 64 if config.kv_in_regs else 0
    dq = config.block_m * width // config.num_warps // 32
    return gradients + kept + max(scores + held, dq)


def config_reason(config: BwdConfig) -> str | None:
    """Why a config can serve no spec on any architecture, or None if some spec may take it."""
    if config.num_warps not in (2, 4, 8, 16):
        return f"num_warps {config.num_warps} is not a power of two from 2 to 16"
    if config.roles > 2 or config.warps_d > 2:
        return f"roles {config.roles}, warps_d {config.warps_d}: each is 1 or 2"
    if config.num_warps < 2 * config.roles * config.warps_d:
        return f"{config.num_warps} warps are too few for {config.roles} roles of {config.warps_d} warps a row"
    groups = config.num_warps // (config.roles * config.warps_d)
    if config.block_n % (16 * groups):
        return f"block_n {config.block_n} does not give each of {groups} warps whole 16-row tiles"
    if config.warp_keys > 64:
        return f"{config.warp_keys} key rows a warp: above 64 the accumulators cannot fit"
    if config.block_m not in (32, 64, 128):
        return f"block_m {config.block_m} is not 32, 64 or 128"
    if config.step_m < 16 * config.warps_d or config.block_m % config.step_m or config.step_m & (config.step_m - 1):
        return (
            f"step_m {config.step_m} does not divide block_m {config.block_m} into powers of two that warps can share"
        )
    if config.roles == 2 and config.step_m != config.block_m:
        return "roles 2 needs step_m == block_m: P is handed over once a tile"
    if config.num_stages > 2:
        return f"num_stages {config.num_stages} is above 2"
    if config.ds_stages > 2:
        return f"ds_stages {config.ds_stages} is above 2"
    if config.ds_stages == 2 and config.num_stages < 2:
        return "ds_stages 2 needs num_stages 2: otherwise a tile needs its second barrier anyway"
    if config.warps_d > 1 and config.num_warps > 8:
        return f"warps_d {config.warps_d} of {config.num_warps} warps: there are too few named barriers"
    if config.kv_in_regs and config.warps_d > 1:
        return "kv_in_regs with warps_d 2 would keep the same fragments twice"
    return None


def shape_reason(spec: KernelSpec, config: BwdConfig, arch: ArchLimits) -> str | None:
    """Why a config that some spec may take cannot serve this one."""
    pass_rows = rows_per_pass(spec, config)
    for name in ("block_m", "block_n"):
        if getattr(config, name) % pass_rows:
            return f"{name} {getattr(config, name)} is not whole copy passes of {pass_rows} rows"
    if pass_rows % 8:
        return f"{config.num_warps} warps copy {pass_rows} rows a pass, but the swizzle needs 8"
    if config.block_m // 2 > config.num_threads:
        return f"{config.num_threads} threads are too few to copy L and D of {config.block_m} rows"
    if spec.native_head_dim // 16 % config.warps_d:
        return f"warps_d {config.warps_d}: head dim {spec.native_head_dim} is not so many times 16 columns"
    if dq_warps_m(spec, config) is None:
        return f"{config.num_warps} warps cannot share dQ of {config.block_m} rows and {spec.native_head_dim} columns"
    if config.split_heads and spec.gqa_ratio == 1:
        return "split_heads splits the query heads of a key/value head, and gqa_ratio is 1"
    if config.split_heads and spec.deterministic:
        return "split_heads adds dK and dV up in any order: not for a deterministic backward"
    if config.reduction == "vector" and arch.compute_capability < (9, 0):
        return f"reduction vector needs compute capability 9.0, {arch.target} has none"
    return None


def default_config(spec: KernelSpec) -> BwdConfig:
    """A config that is legal for every backward spec on every architecture from 8.0 up.

    It takes at most 99 KB of shared memory, and up to head dim 128 two blocks find room where a block is granted 163.
    """
    width = spec.native_head_dim
    if width <= 64:
        return BwdConfig(block_m=64, block_n=128, step_m=32, num_warps=4, num_stages=2)
    if width <= 128:
        return BwdConfig(block_m=64, block_n=64, step_m=64, num_warps=4, num_stages=1, roles=2)
    block_n = 32 if width > 192 else 64
    return BwdConfig(block_m=32, block_n=block_n, step_m=32, num_warps=8, num_stages=1, roles=2, warps_d=2)
