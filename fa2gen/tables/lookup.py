"""Which config to use for a spec and a size on a GPU, and why."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fa2gen.constraints import borrowed_config, default_config_on, infeasible_reason
from fa2gen.errors import TableError
from fa2gen.hardware import Gpu
from fa2gen.problem import Bucket
from fa2gen.spec import FAMILIES, Config, KernelSpec

from . import store
from .merge import TemplateHash, is_current, is_gated, is_measured
from .schema import Table, TunedEntry

# What had to be relaxed, least first; each name also allows all before it.
SOURCES = (
    "exact",
    "alignment",
    "nearest bucket",
    "native head dim",
    "other dtype",
    "non-deterministic entry",
    "nearest gqa ratio",
    "other gpu",
)
DEFAULT_SOURCE = "default"


@dataclass(frozen=True)
class Match:
    """A config and where it comes from.

    Attributes:
        config: Legal for the caller's spec on the caller's GPU.
        source: One of ``SOURCES`` or ``"default"``: the furthest relaxation that was needed.
        distance: How far the bucket and the GQA ratio are, in powers of two; 0 for an exact match or the default.
        stale: The kernel's templates have changed since the entry was made, or since nearer entries were, which were
            passed over (``fa2gen table check`` lists them).
        entry: The entry borrowed from; None for the default.
        gpu: Name of the GPU whose table it came from; ``""`` for the default.
        gated: The entry itself is stale; its config passed the gate again with today's templates.
        changes: What of the entry's config the caller's spec forbids and was changed, in words; else ``""``.
        relaxed: All of ``SOURCES`` that were needed, the furthest first; empty for an exact match or the default.
        lost_family: A faster family than the config's, passed over because all its entries are stale; else None.
    """

    config: Config
    source: str
    distance: float
    stale: bool
    entry: TunedEntry | None
    gpu: str = ""
    gated: bool = False
    changes: str = ""
    relaxed: tuple[str, ...] = ()
    lost_family: str | None = None

    @property
    def origin(self) -> str:
        """``source``, and ``changes`` if there are any."""
        return f"{self.source} with {self.changes}" if self.changes else self.source

    @property
    def staleness(self) -> str:
        """What ``stale`` means here, for people; ``""`` where it is False."""
        if self.gated:
            return "stale, passed the gate again"
        return "nearer entries are stale" if self.stale else ""

    def describe(self) -> str:
        """One line for people: the config, all that was relaxed to come to it, and how it is known."""
        text = f"{self.config.slug()}: {' + '.join(self.relaxed) or self.source}"
        text += f" with {self.changes}" if self.changes else ""
        if self.entry is not None:
            entry = self.entry
            text += f", {entry.measurement.kind}, from {self.gpu} {entry.spec.slug()} {entry.bucket.label()}"
        return text + (f" ({self.staleness})" if self.stale else "")


def lookup(
    spec: KernelSpec,
    bucket: Bucket,
    gpu: Gpu,
    *,
    template_hash: TemplateHash | None = None,
    roots: Sequence[Path] | None = None,
    strict: bool | None = None,
    families: Collection[str] | None = None,
) -> Match:
    """The config to use.

    The order, each step legal on this GPU: exact; for alignment 2 the alignment-16 entry; the nearest bucket; the
    native head dim above; the other 16-bit dtype; for a deterministic backward the entry of the other one; the nearest
    GQA ratio; another GPU of the same target; the default config of the GPU's architecture. Later steps include the
    earlier relaxations. Kind and causal never relax, and what is relaxed is where the config comes from: the caller's
    own spec is compiled, deterministic where it says so. What a borrowed config may not do for this spec it does
    without (:func:`fa2gen.constraints.borrowed_config`). Of equally near entries a measured one wins, then one of
    today's templates over one that is stale but passed the gate again, then the earlier root's (the user's over the
    package's), then the newer.

    Where several families serve the call each is asked like that, and of the measured ones that whose entry does most
    operations a second is taken: between families lies more (a factor of 1.5 on an H200) than between neighbours of
    one. Where the entries are of different sizes, those that the families have of one size decide if there are any as
    near: longer sequences give more operations a second by themselves. But for a family whose sizes are further away
    than the neighbouring class: it may be fast at what the call is not.

    Args:
        spec: The caller's spec.
        bucket: The caller's sizes.
        gpu: The GPU at hand.
        template_hash: ``codegen.template_hash``; entries of another hash are stale and passed over, unless they passed
            the gate again with today's templates. None accepts every entry.
        roots: Folders of tables; default the user's and the package's.
        strict: Anything but an exact match is an error; default ``FA2GEN_STRICT=1`` in the environment.
        families: Only kernels of these families, for a call that others cannot serve; None: of all.

    Raises:
        TableError: ``strict``, and there is no exact match.
        UnsupportedError: None of ``families`` serves the spec on this GPU.
    """
    if strict is None:
        strict = os.environ.get("FA2GEN_STRICT", "") not in ("", "0")
    candidates = list(_candidates(spec, bucket, gpu, store.search_dirs() if roots is None else roots, families))
    candidates.sort(key=lambda candidate: candidate.cost)
    found: list[tuple[_Candidate, Match]] = []
    lost: list[_Candidate] = []  # nearest entries of families that have stale ones only
    for family in FAMILIES[spec.kind]:
        mine = [candidate for candidate in candidates if candidate.config.family == family]
        best, passed_over = _nearest(mine, template_hash)
        if best is None:
            lost += mine[:1]
        else:
            found.append((best, best.match(passed_over, template_hash)))
    exact = [each for each in found if each[1].source == "exact"]
    if found:
        usable = [candidate for candidate in candidates if candidate.is_usable(template_hash)]
        best, match = _between_families(exact if strict and exact else found, usable)
        faster = [each.config.family for each in lost if each.flops_per_ms > best.flops_per_ms]
        match = replace(match, stale=match.stale or bool(faster), lost_family=faster[0] if faster else None)
    else:
        match = Match(default_config_on(spec, gpu.arch, families), DEFAULT_SOURCE, 0.0, bool(lost), None)
    if strict and match.source != "exact":
        raise TableError(
            f"FA2GEN_STRICT: no tuned entry for {spec.slug()} {bucket.label()} on {gpu.name}; the nearest is "
            f"{match.describe()}. Run: fa2gen tune --headdim {spec.head_dim}{_kind_options(spec)} --gpu {gpu.name}"
        )
    return match


class _Cost(NamedTuple):
    """What is relaxed to come to a candidate, compared left to right: the furthest relaxation first."""

    other_gpu: bool
    gqa_ratio: float
    non_deterministic: bool
    dtype: bool
    head_dim: bool
    bucket: float
    alignment: bool

    @property
    def relaxed(self) -> tuple[str, ...]:
        return tuple(name for name, value in zip(reversed(SOURCES[1:]), self, strict=True) if value)

    @property
    def source(self) -> str:
        return self.relaxed[0] if self.relaxed else SOURCES[0]


@dataclass(frozen=True)
class _Candidate:
    """An entry whose config, with ``changes``, is legal for the caller; of a GPU's table in the root of that index."""

    cost: _Cost
    entry: TunedEntry
    config: Config
    changes: str
    gpu: str
    root: int

    @property
    def flops_per_ms(self) -> float:
        """Operations that the entry's own problem needs, over its time."""
        measurement = self.entry.measurement
        return measurement.problem.flops(self.entry.spec) / measurement.ms

    def is_usable(self, template_hash: TemplateHash | None) -> bool:
        """Of today's templates, or gated with them."""
        entry = self.entry
        return template_hash is None or is_current(entry, template_hash) or is_gated(entry, template_hash)

    def match(self, stale: bool, template_hash: TemplateHash | None) -> Match:
        """The answer; ``stale``: nearer entries were passed over."""
        cost, gated = self.cost, not is_current(self.entry, template_hash)
        return Match(
            self.config,
            cost.source,
            cost.bucket + cost.gqa_ratio,
            stale or gated,
            self.entry,
            self.gpu,
            gated=gated,
            changes=self.changes,
            relaxed=cost.relaxed,
        )


# Powers of two between buckets, up to which times of one tell about the other: one class in both lengths, and waves.
_NEIGHBOURS = 2.5


def _between_families(
    found: Sequence[tuple[_Candidate, Match]], usable: Sequence[_Candidate]
) -> tuple[_Candidate, Match]:
    """Of the families' answers, all of which can serve the call, the one to take (see :func:`lookup`)."""
    nearest = min(candidate.cost.bucket for candidate, _ in found)
    near = [each for each in found if each[0].cost.bucket <= nearest + _NEIGHBOURS]
    near = [each for each in near if is_measured(each[0].entry)] or near
    rates = {candidate.config.family: candidate.flops_per_ms for candidate, _ in near}
    if len({candidate.entry.bucket for candidate, _ in near}) > 1:
        rates = _rates_at_one_size(rates, [each for each in usable if each.cost.bucket <= nearest + _NEIGHBOURS])
    return max(near, key=lambda each: rates[each[0].config.family])


def _rates_at_one_size(rates: dict[str, float], candidates: Sequence[_Candidate]) -> dict[str, float]:
    """The families' operations a millisecond at the nearest spec and size that a table has of all, else ``rates``."""
    measured: dict[tuple[int, str, KernelSpec, Bucket], dict[str, float]] = {}
    for each in candidates:  # sorted by cost: the nearest first
        if is_measured(each.entry) and each.config.family in rates:
            size = (each.root, each.gpu, each.entry.spec, each.entry.bucket)
            measured.setdefault(size, {}).setdefault(each.config.family, each.flops_per_ms)
    return next((at_one for at_one in measured.values() if len(at_one) == len(rates)), rates)


def _nearest(candidates: Sequence[_Candidate], template_hash: TemplateHash | None) -> tuple[_Candidate | None, bool]:
    """Of one family's candidates, sorted by cost, the one to take, and whether nearer ones are stale."""
    stale = False
    for _, group in itertools.groupby(candidates, key=lambda candidate: candidate.cost):
        best, passed_over = _best(list(group), template_hash)
        stale = stale or passed_over
        if best is not None:
            return best, stale
    return None, stale


def _best(candidates: Sequence[_Candidate], template_hash: TemplateHash | None) -> tuple[_Candidate | None, bool]:
    """Of equally near candidates the one to take (see :func:`lookup`), and whether better ones are stale."""
    usable = [candidate for candidate in candidates if candidate.is_usable(template_hash)]
    if not usable:
        return None, bool(candidates)
    best = min(usable, key=lambda candidate: _order(candidate, template_hash))
    order = _order(best, template_hash)
    return best, any(_order(other, template_hash) < order for other in candidates if other not in usable)


def _order(candidate: _Candidate, template_hash: TemplateHash | None) -> tuple[bool, bool, int, int]:
    """A key to sort equally near candidates of a family by, the best first."""
    entry = candidate.entry
    return (
        not is_measured(entry),
        not is_current(entry, template_hash),
        candidate.root,
        -int("".join(filter(str.isdigit, entry.provenance.utc))),
    )


def _kind_options(spec: KernelSpec) -> str:
    """What ``fa2gen tune`` needs besides to tune such kernels."""
    return (f" --kind {spec.kind}" if spec.kind != "fwd" else "") + (" --deterministic" if spec.deterministic else "")


def _candidates(
    spec: KernelSpec, bucket: Bucket, gpu: Gpu, roots: Sequence[Path], families: Collection[str] | None
) -> Iterator[_Candidate]:
    for root, table in _tables(spec.kind, gpu, roots):
        for entry in table.entries:
            other = entry.spec
            if families is not None and entry.config.family not in families:
                continue
            if other.causal != spec.causal or other.alignment not in (spec.alignment, 16):
                continue
            # A fixed order of the sums costs waits that other tiles avoid: of no use to those who need none.
            if other.deterministic and not spec.deterministic:
                continue
            if other.head_dim not in (spec.head_dim, spec.native_head_dim):
                continue
            cost = _Cost(
                other_gpu=table.gpu != gpu.name,
                gqa_ratio=abs(math.log2(other.gqa_ratio / spec.gqa_ratio)),
                non_deterministic=other.deterministic != spec.deterministic,
                dtype=other.dtype != spec.dtype,
                head_dim=other.head_dim != spec.head_dim,
                bucket=bucket_distance(entry.bucket, bucket),
                alignment=other.alignment != spec.alignment,
            )
            config, changes = entry.config, ""
            if cost.dtype or cost.non_deterministic or cost.gqa_ratio:
                config, changes = borrowed_config(spec, config)
            if infeasible_reason(spec, config, gpu.arch) is None:
                yield _Candidate(cost, entry, config, changes, table.gpu, root)


def bucket_distance(a: Bucket, b: Bucket) -> float:
    """Powers of two between two buckets. Waves count half: they follow from the lengths for most callers."""
    lengths = abs(a.log2_seqlen_q - b.log2_seqlen_q) + abs(a.log2_seqlen_k - b.log2_seqlen_k)
    return lengths + 0.5 * abs(a.log2_waves - b.log2_waves)


def _tables(kind: str, gpu: Gpu, roots: Sequence[Path]) -> Iterator[tuple[int, Table]]:
    """Tables of this GPU and of others of its target, with the index of their root."""
    for index, root in enumerate(roots):
        own = store.cached_table(store.table_path(root, gpu.name, kind))
        if own is not None:
            yield index, own
        try:
            others = sorted(path for path in root.iterdir() if path.name != gpu.name)
        except OSError:
            continue
        for folder in others:
            table = store.cached_table(store.table_path(root, folder.name, kind))
            if table is not None and table.target == gpu.target:
                yield index, table
