"""Parameter structs: one list of fields, rendered into the kernel and packed by the host."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from .. import tensor_map

# C type -> struct code. All fields are naturally aligned, as in C++.
_TYPES = {"TensorMap": f"{tensor_map.BYTES}s", "pointer": "Q", "i64": "q", "int": "i", "float": "f"}
# Of fields that need not be given.
_DEFAULTS: dict[str, int | bytes] = {"TensorMap": b"", "pointer": 0}


@dataclass(frozen=True)
class Field:
    """One field: C++ type as kernel text writes it, name, what it means, and lines that head it and the next ones."""

    ctype: str
    name: str
    meaning: str
    heading: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "pointer" if self.ctype.startswith("gptr<") else self.ctype


@dataclass(frozen=True)
class ParamStruct:
    """A kernel's parameter struct.

    Attributes:
        name: C++ name.
        comment: Comment lines above the declaration.
        fields: In order; tensor maps come first, fields of 8 bytes before fields of 4, so that padding is needed at the
            end only.
    """

    name: str
    comment: str
    fields: tuple[Field, ...]

    @cached_property
    def format(self) -> str:
        """``struct`` format of the packed bytes, little-endian; as in C++ the end is padded to the widest alignment."""
        fields = "<" + "".join(_TYPES[field.kind] for field in self.fields)
        return f"{fields}{-struct.calcsize(fields) % (64 if self.tensor_maps else 8)}x"

    @cached_property
    def size(self) -> int:
        """Bytes, C++'s sizeof."""
        return struct.calcsize(self.format)

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """Names of the pointer fields: pointer i lies at byte ``pointers_at + 8 * i``."""
        return tuple(field.name for field in self.fields if field.kind == "pointer")

    @cached_property
    def tensor_maps(self) -> tuple[str, ...]:
        """Names of the tensor maps, which lead the struct."""
        return tuple(field.name for field in self.fields if field.kind == "TensorMap")

    @property
    def pointers_at(self) -> int:
        """Bytes before the first pointer."""
        return len(self.tensor_maps) * tensor_map.BYTES

    @cached_property
    def _defaults(self) -> dict[str, int | bytes | None]:
        return {field.name: _DEFAULTS.get(field.kind) for field in self.fields}

    def declaration(self) -> str:
        """The C++ declaration, one commented field a line, as clang-format leaves it."""
        lines = [self.comment, "", f"struct {self.name} {{"]
        for field in self.fields:
            lines += [f"  // {line}" for line in field.heading]
            lines.append(f"  {field.ctype} {field.name};  // {field.meaning}")
        lines += ["};", f'static_assert(sizeof({self.name}) == {self.size}, "the host packs {self.size} bytes");', ""]
        return "\n".join(lines)

    def pack(self, **values: int | float) -> bytes:
        """Packs the struct; tensor maps and pointers left out are null.

        Raises:
            KeyError: Another field is missing.
        """
        merged = {**self._defaults, **values}
        if len(merged) != len(self.fields):
            raise KeyError(f"{self.name} has no field {', '.join(sorted(set(merged) - set(self._defaults)))}")
        missing = [name for name, value in merged.items() if value is None]
        if missing:
            raise KeyError(f"{self.name} needs {', '.join(missing)}")
        return struct.pack(self.format, *merged.values())
