"""The kernels of the GPU grid: head dims, dtypes, masks and head ratios; and configs with every tunable's values.

Of the backward, a few that together hold every way of computing it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from fa2gen.constraints import infeasible_reason
from fa2gen.constraints_backward import default_config
from fa2gen.hardware import Gpu
from fa2gen.spec import NATIVE_HEAD_DIMS, BwdConfig, FwdConfig, KernelSpec
from fa2gen.tuning.space import GRIDS, legal_space

DTYPES = ("bf16", "fp16")
MASKS = (False, True)
RATIOS = (1, 3, 7, 8, 16)
# Predicated in the first panel, in the middle and in the last; 111 is padded by the runtime.
OTHER_HEAD_DIMS = (40, 72, 111, 200)
SHAPES = ((113, 203), (1025, 1025), (1, 700), (64, 1), (203, 113))

# Head dims whose configs are forced, and how many configs of each.
FORCED_HEAD_DIMS = (64, 128, 256)
FORCED_CONFIGS = 16

# Fast configs of an H200: head dim, mask, config. Each runs in any order of additions and in a fixed one.
ORDERED = (
    (64, True, "sm80_64x128s32_w4_st2_r1_mb1_v4"),
    (128, False, "sm80_64x128s64_w8_st2_r2_mb1_v4_ds2"),
    (256, True, "sm80_64x64s64_w8_st2_r2_mb1_wd2_v4_ds2"),
)
SPLIT_HEADS = (128, True, "sm80_64x128s64_w8_st2_r2_mb1_v4_ds2_sh")


@dataclass(frozen=True)
class GridCell:
    """One kernel of the grid; ``head_dim`` is the caller's."""

    head_dim: int
    dtype: str
    causal: bool
    gqa_ratio: int

    @property
    def label(self) -> str:
        return f"d{self.head_dim}-{self.dtype}-{'causal' if self.causal else 'full'}-gqa{self.gqa_ratio}"


def grid_cells() -> list[GridCell]:
    """80 kernels.

    A native head dim has every pair of ratio, dtype and mask (10 kernels), another one every dtype with every mask and
    every ratio (5).
    """
    cells = []
    for head_dim in NATIVE_HEAD_DIMS:
        for (i, ratio), (j, dtype) in itertools.product(enumerate(RATIOS), enumerate(DTYPES)):
            cells.append(GridCell(head_dim, dtype, MASKS[(i + j) % 2], ratio))
    kinds = list(itertools.product(DTYPES, MASKS))
    for number, head_dim in enumerate(OTHER_HEAD_DIMS):
        for i, ratio in enumerate(RATIOS):
            cells.append(GridCell(head_dim, *kinds[(i + number) % 4], ratio))
    return cells


def forced_kernels(gpu: Gpu) -> Iterator[tuple[KernelSpec, FwdConfig]]:
    """Configs that together hold every value of every tunable that is legal on a GPU, with specs that take turns."""
    for head_dim in FORCED_HEAD_DIMS:
        for number, config in enumerate(covering_configs(head_dim, gpu)):
            # fp16 has no proof of whole blocks; unaligned views stay where they are for few queries only.
            unaligned = number % 5 == 4
            ratio = (3, 8, 7)[number % 3] if config.pack_gqa else (1, 3, 8)[number % 3]
            spec = KernelSpec(
                head_dim=head_dim,
                dtype="fp16" if number % 3 == 1 and config.proof == "step" else "bf16",
                causal=number % 2 == 0,
                gqa_ratio=min(ratio, 3) if unaligned else ratio,
                alignment=2 if unaligned else 16,
            )
            yield spec, config


def covering_configs(head_dim: int, gpu: Gpu) -> list[FwdConfig]:
    """Up to ``FORCED_CONFIGS`` members of the tuner's space, each the one with most pairs of values not seen yet.

    What it takes for every single value is among them, as is every pair of what interacts most.
    """
    space = legal_space(KernelSpec(head_dim=head_dim, gqa_ratio=8), gpu).configs
    pairs = {config: value_pairs(config) for config in space}
    missing = set().union(*pairs.values())
    chosen: list[FwdConfig] = []
    while missing and len(chosen) < FORCED_CONFIGS:
        best = max(space, key=lambda config: sum(_weight(pair) for pair in pairs[config] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def value_pairs(config: FwdConfig) -> frozenset[tuple[tuple[str, object], ...]]:
    """Every single (tunable, value) of a config, and every two of them."""
    values = tuple(GRIDS["fwd"]["sm80"].params_of(config).items())
    return frozenset([*((value,) for value in values), *itertools.combinations(values, 2)])


# Each changes the order of copies, waits and softmax: their pairs are the ones that break.
_INTERACTING = {"copies", "softmax", "warps_n", "pack_gqa"}


def is_interacting(pair: tuple[tuple[str, object], ...]) -> bool:
    return {name for name, _ in pair} <= _INTERACTING


def _weight(pair: tuple[tuple[str, object], ...]) -> int:
    return 100 if len(pair) == 1 else 20 if is_interacting(pair) else 1


BackwardKernel = tuple[KernelSpec, BwdConfig]


def backward_kernels(gpu: Gpu) -> list[BackwardKernel]:
    """13 kernels, those of them that are legal on a GPU: every native head dim's default, and fast ones."""
    kernels = []
    for number, head_dim in enumerate(NATIVE_HEAD_DIMS):
        dtype, causal = DTYPES[number // 2 % 2], MASKS[number % 2]
        spec = KernelSpec("bwd", head_dim, dtype, causal, 1 + number % 3, deterministic=number % 4 == 3)
        kernels.append((spec, default_config(spec)))
    for pair in ordered_kernels(gpu):
        kernels += pair
    head_dim, causal, slug = SPLIT_HEADS
    kernels.append((KernelSpec("bwd", head_dim, causal=causal, gqa_ratio=4), BwdConfig.from_slug(slug)))
    return [(spec, config) for spec, config in kernels if infeasible_reason(spec, config, gpu.arch) is None]


def ordered_kernels(gpu: Gpu) -> list[tuple[BackwardKernel, BackwardKernel]]:
    """Pairs of kernels that differ in nothing but that the second one adds in a fixed order."""
    pairs = []
    for head_dim, causal, slug in ORDERED:
        config = BwdConfig.from_slug(slug)
        specs = [KernelSpec("bwd", head_dim, causal=causal, deterministic=fixed) for fixed in (False, True)]
        if all(infeasible_reason(spec, config, gpu.arch) is None for spec in specs):
            pairs.append(((specs[0], config), (specs[1], config)))
    return pairs
