"""Which config a measured session keeps: the fastest, but what the tables held stays unless it is clearly beaten."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import Gpu
from fa2gen.problem import Bucket
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import NOISE_BAND, table_path
from fa2gen.tables.merge import is_measured
from fa2gen.tables.store import cached_table


def find_incumbent(spec: KernelSpec, bucket: Bucket, gpu: Gpu, roots: Iterable[Path]) -> FwdConfig | None:
    """What the tables hold for the spec and bucket, stale or not: a measured entry of the first folder that has one.

    None if none knows a config that is still legal. As in a lookup, an earlier folder's prediction hides no measured
    entry of a later one.
    """
    found = []
    for root in roots:
        table = cached_table(table_path(root, gpu.name, spec.kind))
        for entry in table.entries if table is not None else ():
            if entry.key == (spec, bucket) and infeasible_reason(spec, entry.config, gpu.arch) is None:
                found.append(entry)
    return min(found, key=lambda entry: not is_measured(entry)).config if found else None


def ranking(
    times: Mapping[FwdConfig, float],
    incumbent: FwdConfig | None,
    today: Collection[FwdConfig],
    noise_band: float = NOISE_BAND,
) -> list[FwdConfig]:
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
