"""What the tables tell a measured session: configs to begin with, and which of the timed ones it keeps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from fa2gen.constraints import borrowed_config, infeasible_reason
from fa2gen.hardware import Gpu
from fa2gen.problem import Bucket
from fa2gen.spec import Config, KernelSpec
from fa2gen.tables import NOISE_BAND, TunedEntry, table_path
from fa2gen.tables.lookup import bucket_distance
from fa2gen.tables.merge import is_measured
from fa2gen.tables.store import cached_table

#: Winners of other sizes and of the other dtype that are tried first. On an H200 fp16's winner for head dim 64 at 8k
#: was 6 % faster than the best of ten configs that bf16 had tried.
MAX_RELATIVES = 6


def find_incumbent(spec: KernelSpec, bucket: Bucket, family: str, gpu: Gpu, roots: Iterable[Path]) -> Config | None:
    """What the tables hold of a family for the spec and bucket, stale or not: a measured entry of the first folder.

    None if none knows a config that is still legal. As in a lookup, an earlier folder's prediction hides no measured
    entry of a later one.
    """
    found = [
        entry
        for entry in _entries(spec.kind, gpu, roots)
        if entry.key == (spec, bucket, family) and infeasible_reason(spec, entry.config, gpu.arch) is None
    ]
    return min(found, key=lambda entry: not is_measured(entry)).config if found else None


def find_relatives(
    spec: KernelSpec, bucket: Bucket, family: str, gpu: Gpu, roots: Iterable[Path], count: int
) -> tuple[Config, ...]:
    """A family's fastest for the same head dim and mask, where measured: other sizes, heads, dtype, determinism.

    Nearest first, of equally near ones the same dtype; each made legal as a lookup would, or left out.
    """
    near: list[tuple[float, bool, Config]] = []
    for entry in _entries(spec.kind, gpu, roots):
        other = entry.spec
        if (other.head_dim, other.causal, other.alignment) != (spec.head_dim, spec.causal, spec.alignment):
            continue
        if entry.config.family != family:
            continue
        config, _ = borrowed_config(spec, entry.config)
        if entry.key == (spec, bucket, family) or not is_measured(entry) or infeasible_reason(spec, config, gpu.arch):
            continue
        distance = bucket_distance(entry.bucket, bucket) + abs(math.log2(other.gqa_ratio / spec.gqa_ratio))
        distance += other.deterministic != spec.deterministic
        near.append((distance, other.dtype != spec.dtype, config))
    near.sort(key=lambda item: item[:2])
    return tuple(dict.fromkeys(config for _, _, config in near))[:count]


def _entries(kind: str, gpu: Gpu, roots: Iterable[Path]) -> list[TunedEntry]:
    """A GPU's entries, those of an earlier folder first, stale or not: a config is worth a try all the same."""
    tables = [cached_table(table_path(root, gpu.name, kind)) for root in roots]
    return [entry for table in tables if table is not None for entry in table.entries]


def ranking(
    times: Mapping[Config, float],
    incumbent: Config | None,
    today: Collection[Config],
    noise_band: float = NOISE_BAND,
) -> list[Config]:
    """Configs in the order in which they should be proved, the first that is right being kept.

    Args:
        times: Milliseconds of the configs that could be chosen.
        incumbent: What the tables hold; it stays unless one that was timed today beats it by more than the noise band.
        today: Those timed in this session, under the same conditions as the incumbent.
        noise_band: Relative.
    """
    by_time = sorted(times, key=times.__getitem__)
    if incumbent is None or incumbent not in times:
        return by_time
    bound = times[incumbent] * (1 - noise_band)
    better = [config for config in by_time if times[config] < bound and config in today and incumbent in today]
    rest = [config for config in by_time if config not in better and config != incumbent]
    return [*better, incumbent, *rest]
