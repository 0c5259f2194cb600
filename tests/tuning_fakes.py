"""Tuned entries and stand-ins for the compiler, the gate and the measuring process."""

from __future__ import annotations

from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import Measurement, Provenance, Table, TunedEntry

PROBLEM = Problem(4, 4096, 4096, 16, 16)


def entry(spec=None, problem=PROBLEM, *, kind="predicted", ms=1.5, utc="2026-01-01T00:00:00Z", template="t", **config):
    spec = spec or KernelSpec()
    measured = kind == "measured"
    return TunedEntry(
        spec=spec,
        bucket=problem.bucket(108),
        config=FwdConfig(**config),
        measurement=Measurement(kind, ms, ms, ms, 9 if measured else 0, "test", problem),
        provenance=Provenance(
            template_hash=template,
            nvcc="13.0.88",
            driver="580" if measured else "",
            trials=24,
            feasible=20,
            numerics="passed",
            utc=utc,
            model_version=None if measured else "m1",
            versions={"python": "3.11"},
        ),
    )


def table(*entries):
    return Table("a100", "sm_80", "fwd", entries)
