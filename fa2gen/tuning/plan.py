"""What a session would do, without doing it: ``fa2gen tune --dry-run``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fa2gen.codegen import kernels_of
from fa2gen.compile import usable_cores
from fa2gen.constraints import default_config_of
from fa2gen.hardware import Gpu
from fa2gen.problem import Bucket
from fa2gen.spec import Config

from . import defaults
from .report import TuneRequest
from .session import find_devices, make_jobs
from .shortlist import shortlist
from .space import legal_space
from .tools import Tools
from .winner import MAX_RELATIVES, find_incumbent, find_relatives

# The model's favourites that are listed.
_TOP = 3
# Core-seconds of compiling one config and of proving one in the emulator. `fa2gen tune --headdim 128 --gpu a100` with
# `--trials 24` took 822 core-seconds from nothing: 8 specs of 24 kernels, and two proofs for each. A backward's main
# kernel takes 2 to 8 s, those around it 1 s each, which most configs share.
_COMPILE_SECONDS, _PROOF_SECONDS, _PROOFS = {"fwd": 3.9, "bwd": 5.0}, {"fwd": 3.7, "bwd": 12.0}, 2.0


@dataclass(frozen=True)
class PlannedRequest:
    """One request for one family.

    Attributes:
        request, bucket, family: What is tuned.
        default: Timed, or compiled, first.
        incumbent: What the tables hold, timed next; None if they hold nothing, or nothing is timed.
        relatives: What the tables hold for the same head dim and mask at other sizes, heads and dtype; they come then.
        favourites: The model's best of the legal configs, in order; they come after these.
        legal, excluded: Numbers of configs of the family's grid.
    """

    request: TuneRequest
    bucket: Bucket
    family: str
    default: Config
    incumbent: Config | None
    relatives: tuple[Config, ...]
    favourites: tuple[Config, ...]
    legal: int
    excluded: int


@dataclass(frozen=True)
class Plan:
    """A session that was not held.

    Attributes:
        gpu: What it is for.
        devices: Devices it would measure on; empty: it would predict.
        requests: In the order in which they would be tuned.
        kernels: How many kernels it would compile at most.
        seconds: Wall time, about, if none of them is cached: of the whole session, or of compiling alone where it
            would measure.
        cores: That many were assumed for it.
    """

    gpu: Gpu
    devices: tuple[int, ...]
    requests: tuple[PlannedRequest, ...]
    kernels: int
    seconds: float
    cores: int


def make_plan(
    requests: Sequence[TuneRequest],
    gpu: Gpu,
    *,
    out: Path | None = None,
    trials: int | None = None,
    devices: Sequence[int] | None = None,
    families: Collection[str] | None = None,
    tools: Tools | None = None,
) -> Plan:
    """What :func:`fa2gen.tuning.session.tune` would do with these arguments; studies of earlier sessions are not read.

    Raises:
        ArgumentError: As ``tune`` does.
    """
    tools = tools or Tools()
    found = find_devices(gpu, tools, devices)
    roots = tools.table_roots(out) if found else ()
    each = trials if trials is not None else defaults.MEASURED_TRIALS if found else defaults.PREDICTED_TRIALS
    rows = []
    for job in make_jobs(requests, gpu, families):
        request, family = job.request, job.family
        spec, bucket = request.spec, request.problem.bucket(gpu.num_sms)
        space, default = legal_space(spec, gpu, family), default_config_of(spec, family)
        incumbent = find_incumbent(spec, bucket, family, gpu, roots)
        favourites = tuple(shortlist(spec, [request.problem], gpu, min(_TOP, each), family))
        known = {default, incumbent}
        relatives = find_relatives(spec, bucket, family, gpu, roots, min(MAX_RELATIVES, each // 2))
        rows.append(
            PlannedRequest(
                request,
                bucket,
                family,
                default,
                incumbent,
                tuple(config for config in relatives if config not in known),
                favourites,
                len(space.configs),
                len(space.excluded),
            )
        )
    cores = usable_cores()
    if found:
        configs = [(row.request.spec, min(each, row.legal) + 1 + (row.incumbent is not None)) for row in rows]
    else:
        legal = {(row.request.spec, row.family): row.legal for row in rows}
        configs = [(spec, min(each, count) + 1) for (spec, _), count in legal.items()]
    kernels = sum(count * len(kernels_of(spec.kind)) for spec, count in configs)
    seconds = sum(count * _COMPILE_SECONDS[spec.kind] for spec, count in configs) / cores
    if not found:
        seconds += sum(_PROOFS * _PROOF_SECONDS[spec.kind] for spec, _ in configs) / cores
    return Plan(gpu, tuple(info.index for info in found), tuple(rows), kernels, seconds, cores)
