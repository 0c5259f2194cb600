"""What a tuned table holds; its JSON form is in ``document.py``."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from fa2gen.errors import ArgumentError
from fa2gen.problem import Bucket, Problem
from fa2gen.spec import FAMILIES, Config, KernelSpec

MEASUREMENT_KINDS = ("measured", "predicted")
NOISE_BAND = 0.02
"""Medians this close, relative, are no ground to change a config: repeated sessions differ by about as much."""

EntryKey = tuple[KernelSpec, Bucket, str]

_CONFIGS = {kind: tuple(families.values()) for kind, families in FAMILIES.items()}
_CONFIG_NAMES = {kind: " or a ".join(each.__name__ for each in configs) for kind, configs in _CONFIGS.items()}
_UTC = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


def utc_now() -> str:
    """The time as tables write it, e.g. ``"2026-01-31T09:30:00Z"``; sorts as text."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Clocks:
    """What the chip's clock did while a config was timed, by NVML.

    Attributes:
        sm_mhz: Median of the samples of the SM clock, MHz.
        sm_mhz_min, sm_mhz_max: Extremes of the samples, MHz.
        throttle: Reasons seen for a clock below the highest, e.g. ``("sw_power_cap",)``; sorted.
    """

    sm_mhz: int
    sm_mhz_min: int
    sm_mhz_max: int
    throttle: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("sm_mhz", "sm_mhz_min", "sm_mhz_max"):
            _require_count(name, getattr(self, name), "a clock in MHz")
        if not self.sm_mhz_min <= self.sm_mhz <= self.sm_mhz_max:
            raise ArgumentError(
                f"sm_mhz_min <= sm_mhz <= sm_mhz_max must hold, got {self.sm_mhz_min}, {self.sm_mhz}, {self.sm_mhz_max}"
            )
        if not isinstance(self.throttle, tuple) or not all(isinstance(reason, str) for reason in self.throttle):
            raise ArgumentError(f"throttle must be a tuple of reasons, got {self.throttle!r}")
        if list(self.throttle) != sorted(set(self.throttle)):
            raise ArgumentError(f"throttle must be sorted and name each reason once, got {self.throttle!r}")


@dataclass(frozen=True)
class Measurement:
    """How fast, and how that is known.

    Attributes:
        kind: ``"measured"`` on the GPU, or ``"predicted"`` by the performance model.
        ms: Kernel time, milliseconds: the median, or the model's figure.
        p20, p80: Quantiles, milliseconds; equal to ``ms`` for a prediction.
        n: Launches timed; 0 for a prediction.
        method: How it was timed or predicted, for people.
        problem: The sizes it holds for, one representative of the entry's bucket.
        clocks: What the clock did meanwhile; None for a prediction, and where NVML does not answer.
    """

    kind: str
    ms: float
    p20: float
    p80: float
    n: int
    method: str
    problem: Problem
    clocks: Clocks | None = None

    def __post_init__(self) -> None:
        if self.kind not in MEASUREMENT_KINDS:
            raise ArgumentError(f"kind must be one of {', '.join(MEASUREMENT_KINDS)}, got {self.kind!r}")
        for name in ("ms", "p20", "p80"):
            _require_time(name, getattr(self, name))
        if not self.p20 <= self.ms <= self.p80:
            raise ArgumentError(f"p20 <= ms <= p80 must hold, got {self.p20}, {self.ms}, {self.p80}")
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < (self.kind == "measured"):
            raise ArgumentError(f"n must be a count of launches (0 only for a prediction), got {self.n!r}")
        _require_text("method", self.method)
        if self.clocks is not None and self.kind == "predicted":
            raise ArgumentError("clocks are of a measured entry, a prediction has none")

    @property
    def spread(self) -> float:
        """Width of the middle of the samples, relative to the median: (p80 - p20) / ms."""
        return (self.p80 - self.p20) / self.ms

    def within_noise(self, other: Measurement) -> bool:
        """Whether two times are too close to tell apart: within ``NOISE_BAND``, or their p20 to p80 ranges overlap."""
        close = abs(self.ms - other.ms) <= NOISE_BAND * max(self.ms, other.ms)
        return close or (self.p20 <= other.p80 and other.p20 <= self.p80)


@dataclass(frozen=True)
class Incumbent:
    """The config that the tables held before, timed in the session that made an entry; ``ms`` in milliseconds."""

    config: Config
    ms: float

    def __post_init__(self) -> None:
        if not any(type(self.config) in configs for configs in _CONFIGS.values()):
            raise ArgumentError(f"config must be a {' or a '.join(_CONFIG_NAMES.values())}, got {self.config!r}")
        _require_time("ms", self.ms)


@dataclass(frozen=True)
class Regate:
    """A stale entry's config passed the gate again.

    Attributes:
        template_hash: ``codegen.template_hash`` of the kernel that passed.
        numerics: What the gate said.
        utc: When, see :func:`utc_now`.
    """

    template_hash: str
    numerics: str
    utc: str

    def __post_init__(self) -> None:
        _require_text("template_hash", self.template_hash)
        _require_text("numerics", self.numerics)
        _require_utc(self.utc)


@dataclass(frozen=True)
class Provenance:
    """Where an entry comes from.

    Attributes:
        template_hash: ``codegen.template_hash`` of the kernel that was compiled; an entry of another hash is stale.
        nvcc: Version text of the compiler.
        driver: Driver version, ``""`` for a prediction.
        versions: Python packages that took part, name to version.
        trials: Configs compiled or tried for this entry.
        feasible: How many of them could have been chosen.
        numerics: What the gate said of this config.
        model_version: Version of the performance model, for a prediction; else None.
        utc: When, see :func:`utc_now`.
        incumbent: The config that this one was timed against, if the tables held one.
        regate: For an entry of older templates: the last time its config passed the gate with newer ones.
    """

    template_hash: str
    nvcc: str
    driver: str
    trials: int
    feasible: int
    numerics: str
    utc: str
    model_version: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    incumbent: Incumbent | None = None
    regate: Regate | None = None

    def __post_init__(self) -> None:
        for name in ("template_hash", "nvcc", "numerics"):
            _require_text(name, getattr(self, name))
        if not isinstance(self.driver, str):
            raise ArgumentError(f"driver must be text, got {self.driver!r}")
        if self.model_version is not None:
            _require_text("model_version", self.model_version)
        for name in ("trials", "feasible"):
            _require_count(name, getattr(self, name), "a count")
        _require_utc(self.utc)
        if not isinstance(self.versions, Mapping) or not all(
            isinstance(key, str) and isinstance(value, str) for key, value in self.versions.items()
        ):
            raise ArgumentError(f"versions must map names to version texts, got {self.versions!r}")


@dataclass(frozen=True)
class TunedEntry:
    """The fastest config of a kernel family for a spec and a bucket of sizes, with the evidence."""

    spec: KernelSpec
    bucket: Bucket
    config: Config
    measurement: Measurement
    provenance: Provenance

    def __post_init__(self) -> None:
        if (self.measurement.kind == "predicted") != (self.provenance.model_version is not None):
            raise ArgumentError("a predicted entry carries the model's version, a measured one does not")
        incumbent = self.provenance.incumbent
        if incumbent is not None and incumbent.config.family != self.config.family:
            raise ArgumentError(
                f"incumbent of a config of family {self.config.family} must be one too, got {incumbent.config.slug()}"
            )
        for config in (self.config, *([] if incumbent is None else [incumbent.config])):
            if type(config) not in _CONFIGS[self.spec.kind]:
                raise ArgumentError(
                    f"config of a {self.spec.kind} kernel must be a {_CONFIG_NAMES[self.spec.kind]}, got {config!r}"
                )

    @property
    def key(self) -> EntryKey:
        """What is unique in a table: spec, bucket and family.

        A call that the fastest family cannot serve, of unaligned rows for example, runs the best of another.
        """
        return self.spec, self.bucket, self.config.family


@dataclass(frozen=True)
class Table:
    """One file: every tuned entry of a GPU and a kernel kind."""

    gpu: str
    target: str
    kind: str
    entries: tuple[TunedEntry, ...] = ()


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{name} must be text, got {value!r}")


def _require_count(name: str, value: object, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(f"{name} must be {meaning}, got {value!r}")


def _require_time(name: str, value: object) -> None:
    # Compared, not converted: an integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ArgumentError(f"{name} must be a finite number above 0, got {value!r}")


def _require_utc(value: object) -> None:
    if not isinstance(value, str) or not _UTC.fullmatch(value):
        raise ArgumentError(f"utc must look like 2026-01-31T09:30:00Z, got {value!r}")
