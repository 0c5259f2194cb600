"""What makes a specification or a config an identity: its canonical form, the key derived from it, checks of fields."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, TypeVar

from .errors import ArgumentError

_Identity = TypeVar("_Identity", bound="Canonical")


class Canonical:
    """Canonical form and key of a frozen dataclass."""

    # Always written, whatever their value: a table row that leaves them out would be unreadable.
    _always: tuple[str, ...] = ()

    def canonical(self) -> dict[str, Any]:
        """Fields that differ from their default (and the ones a reader always needs), in declaration order."""
        form = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name in self._always or value != field.default:
                form[field.name] = value
        return form

    @classmethod
    def from_canonical(cls: type[_Identity], form: dict[str, Any]) -> _Identity:
        """Inverse of :meth:`canonical`.

        Raises:
            ArgumentError: A field is unknown or its value is not legal.
        """
        known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(form) - known)
        if unknown:
            raise ArgumentError(
                f"{cls.__name__} has no field {', '.join(unknown)}; fields are {', '.join(sorted(known))}"
            )
        return cls(**form)

    def key(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical form."""
        return hashlib.sha256(json.dumps(self.canonical(), sort_keys=True).encode()).hexdigest()[:16]


def require_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ArgumentError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")


def require_one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    # The type first: 16.0 equals 16 but is written otherwise, and an array has no truth value.
    if not isinstance(value, type(allowed[0])) or value not in allowed:
        raise ArgumentError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
