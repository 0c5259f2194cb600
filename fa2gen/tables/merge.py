"""Which of two entries for the same spec, sizes and kernel family a table keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from fa2gen.spec import Config, KernelSpec

from .schema import EntryKey, TunedEntry

TemplateHash = Callable[[str, str], str]
"""(kind, family) -> the hash of today's templates: ``codegen.template_hash``, which lies above this room."""


def merge_entries(
    old: Iterable[TunedEntry],
    new: Iterable[TunedEntry],
    *,
    template_hash: TemplateHash | None = None,
    refused: Collection[tuple[KernelSpec, Config]] = (),
) -> tuple[TunedEntry, ...]:
    """Union of two sets of entries, one for each spec, bucket and family; families do not contend here.

    A measured entry wins over a predicted one, whatever their age and templates. Else a predicted one of today's
    templates wins over a stale one. Else the newer wins, and ``new`` on equal times; but a measured one with another
    config and the same templates must be faster or slower by more than the noise
    (:meth:`Measurement.within_noise`), unless it was timed beside the incumbent in one session, or the present config
    is refused.

    Args:
        old, new: Entries; those of ``new`` come in one after the other.
        template_hash: Tells stale entries; None takes all as current.
        refused: Configs that the session of ``new`` found to be wrong or unable to run.
    """
    merged: dict[EntryKey, TunedEntry] = {entry.key: entry for entry in old}
    for entry in new:
        present = merged.get(entry.key)
        if present is None or _replaces(entry, present, template_hash, refused):
            merged[entry.key] = entry
    return tuple(merged.values())


def is_measured(entry: TunedEntry) -> bool:
    """Whether the entry rests on times of the GPU itself."""
    return entry.measurement.kind == "measured"


def is_current(entry: TunedEntry, template_hash: TemplateHash | None) -> bool:
    """Whether the entry was made with today's templates."""
    return template_hash is None or entry.provenance.template_hash == _today(entry, template_hash)


def is_gated(entry: TunedEntry, template_hash: TemplateHash) -> bool:
    """Whether the config of a stale entry passed the gate again with today's templates."""
    regate = entry.provenance.regate
    return regate is not None and regate.template_hash == _today(entry, template_hash)


def _today(entry: TunedEntry, template_hash: TemplateHash) -> str:
    return template_hash(entry.spec.kind, entry.config.family)


def _replaces(
    new: TunedEntry,
    present: TunedEntry,
    template_hash: TemplateHash | None,
    refused: Collection[tuple[KernelSpec, Config]],
) -> bool:
    if is_measured(new) != is_measured(present):
        return is_measured(new)
    if not is_measured(new) and is_current(new, template_hash) != is_current(present, template_hash):
        return is_current(new, template_hash)
    if _age(new) < _age(present):
        return False
    noise = (
        is_measured(new)
        and new.config != present.config
        and new.provenance.template_hash == present.provenance.template_hash
        and new.provenance.incumbent is None
        and (present.spec, present.config) not in refused
        and new.measurement.within_noise(present.measurement)
    )
    return not noise


def _age(entry: TunedEntry) -> tuple[str, str]:
    regate = entry.provenance.regate
    return entry.provenance.utc, "" if regate is None else regate.utc
