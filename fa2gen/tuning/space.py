"""Which configs are worth trying for a spec on a GPU, and for every other one the reason why not.

Legality itself is decided in ``constraints.py``; the grids (``space_forward.py``, ``space_sm90.py`` and
``space_backward.py``) list what there is and drop what would compile to the same code as another member, or is known to
lose everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fa2gen.constraints import families_on
from fa2gen.hardware import ArchLimits, Gpu
from fa2gen.spec import Config, KernelSpec

from . import space_backward, space_forward, space_sm90
from .grid import Grid

# kind -> family -> grid. Any: what a grid says is of the configs of its family, which is known at run time only.
GRIDS: dict[str, dict[str, Grid[Any]]] = {
    "fwd": {"sm80": space_forward.GRID, "sm90": space_sm90.GRID},
    "bwd": {"sm80": space_backward.GRID},
}


@dataclass(frozen=True)
class Space:
    """The configs to choose from, in the grid's order, and every excluded one with its reason."""

    configs: tuple[Config, ...]
    excluded: tuple[tuple[Config, str], ...]

    def key(self) -> str:
        """12 hex digits over the members: a study of one space is never resumed on another."""
        text = json.dumps([config.canonical() for config in self.configs])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def families(spec: KernelSpec, gpu: Gpu, wanted: Collection[str] | None = None) -> tuple[str, ...]:
    """The families that compete for a spec on a GPU.

    Args:
        spec, gpu: What is to run where.
        wanted: Only these; None: all that serve the spec there.
    """
    return tuple(family for family in families_on(spec, gpu.arch) if wanted is None or family in wanted)


def exclusion_reason(spec: KernelSpec, config: Config, arch: ArchLimits) -> str | None:
    """Why a config is not in its family's space, or None."""
    return GRIDS[spec.kind][config.family].exclusion_reason(spec, config, arch)


def legal_space(spec: KernelSpec, gpu: Gpu, family: str = "sm80") -> Space:
    """The space of a spec on a GPU: the configs of a family."""
    return _legal_space(spec, gpu.arch, family)


@functools.lru_cache(maxsize=64)
def _legal_space(spec: KernelSpec, arch: ArchLimits, family: str) -> Space:
    configs, excluded = [], []
    for config in GRIDS[spec.kind][family].configs(spec.gqa_ratio > 1):
        reason = exclusion_reason(spec, config, arch)
        if reason is None:
            configs.append(config)
        else:
            excluded.append((config, reason))
    return Space(tuple(configs), tuple(excluded))
