"""Which configs are worth trying for a spec on a GPU, and for every other one the reason why not.

Legality itself is decided in ``constraints.py``; the grids (``space_forward.py``, ``space_backward.py``) list what
there is and drop what would compile to the same code as another member, or is known to lose everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from fa2gen.hardware import ArchLimits, Gpu
from fa2gen.spec import Config, KernelSpec

from . import space_backward, space_forward
from .grid import Grid

# Any: what a grid of one kind says is of the configs of that kind, which the spec decides at run time.
GRIDS: dict[str, Grid[Any]] = {"fwd": space_forward.GRID, "bwd": space_backward.GRID}


@dataclass(frozen=True)
class Space:
    """The configs to choose from, in the grid's order, and every excluded one with its reason."""

    configs: tuple[Config, ...]
    excluded: tuple[tuple[Config, str], ...]

    def key(self) -> str:
        """12 hex digits over the members: a study of one space is never resumed on another."""
        text = json.dumps([config.canonical() for config in self.configs])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def exclusion_reason(spec: KernelSpec, config: Config, arch: ArchLimits) -> str | None:
    """Why a config is not in the space, or None."""
    return GRIDS[spec.kind].exclusion_reason(spec, config, arch)


def legal_space(spec: KernelSpec, gpu: Gpu) -> Space:
    """The space of a spec on a GPU."""
    return _legal_space(spec, gpu.arch)


@functools.lru_cache(maxsize=64)
def _legal_space(spec: KernelSpec, arch: ArchLimits) -> Space:
    configs, excluded = [], []
    for config in GRIDS[spec.kind].configs(spec.gqa_ratio > 1):
        reason = exclusion_reason(spec, config, arch)
        if reason is None:
            configs.append(config)
        else:
            excluded.append((config, reason))
    return Space(tuple(configs), tuple(excluded))
