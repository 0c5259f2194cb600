"""Parameter structs of the kernels: one list of fields, rendered into the kernel and packed by the host."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

# C type -> (struct code, size and alignment in bytes). All fields are naturally aligned, as in C++.
_TYPES = {"pointer": ("Q", 8), "i64": ("q", 8), "int": ("i", 4), "float": ("f", 4)}


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
        fields: In order; fields of 8 bytes come before fields of 4, so that padding is needed at the end only.
    """

    name: str
    comment: str
    fields: tuple[Field, ...]

    @cached_property
    def format(self) -> str:
        """``struct`` format of the packed bytes, little-endian; as in C++ the end is padded to a multiple of 8."""
        fields = "<" + "".join(_TYPES[field.kind][0] for field in self.fields)
        return f"{fields}{-struct.calcsize(fields) % 8}x"

    @cached_property
    def size(self) -> int:
        """Bytes, C++'s sizeof."""
        return struct.calcsize(self.format)

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """Names of the pointer fields, which lead the struct: pointer i lies at byte 8 * i."""
        return tuple(field.name for field in self.fields if field.kind == "pointer")

    @cached_property
    def _defaults(self) -> dict[str, int | None]:
        return {field.name: 0 if field.kind == "pointer" else None for field in self.fields}

    def declaration(self) -> str:
        """The C++ declaration, one commented field a line, as clang-format leaves it."""
        lines = [self.comment, "", f"struct {self.name} {{"]
        for field in self.fields:
            lines += [f"  // {line}" for line in field.heading]
            lines.append(f"  {field.ctype} {field.name};  // {field.meaning}")
        lines += ["};", f'static_assert(sizeof({self.name}) == {self.size}, "the host packs {self.size} bytes");', ""]
        return "\n".join(lines)

    def pack(self, **values: int | float) -> bytes:
        """Packs the struct; pointer fields left out are null.

        Raises:
            KeyError: A field that is not a pointer is missing.
        """
        merged = {**self._defaults, **values}
        if len(merged) != len(self.fields):
            raise KeyError(f"{self.name} has no field {', '.join(sorted(set(merged) - set(self._defaults)))}")
        missing = [name for name, value in merged.items() if value is None]
        if missing:
            raise KeyError(f"{self.name} needs {', '.join(missing)}")
        return struct.pack(self.format, *merged.values())


def _strides(tensor: str, heading: tuple[str, ...] = ()) -> tuple[Field, ...]:
    return tuple(
        Field("i64", f"{tensor}_{axis}_stride", f"elements from one {axis} of {tensor} to the next", heading * (not i))
        for i, axis in enumerate(("batch", "row", "head"))
    )


FWD_PARAMS = ParamStruct(
    "FwdParams",
    "// ---- Parameters, passed by value",
    (
        Field("gptr<const Element>", "q", "(batch, seqlen_q, num_heads, head_dim)", ("Addresses on the GPU.",)),
        Field("gptr<const Element>", "k", "(batch, seqlen_k, num_heads / gqa_ratio, head_dim)"),
        Field("gptr<const Element>", "v", "(batch, seqlen_k, num_heads / gqa_ratio, head_dim)"),
        Field("gptr<Element>", "o", "(batch, seqlen_q, num_heads, head_dim)"),
        Field("gptr<float>", "softmax_lse", "(batch, num_heads, seqlen_q), contiguous, natural logarithm; may be null"),
        Field("gptr<u32>", "repairs", "guarded softmax: each warp adds the number of its repeated steps; may be null"),
        *_strides("q", ("A row is one query or key. An input's stride may be 0: that dimension is repeated.",)),
        *_strides("k"),
        *_strides("v"),
        *_strides("o"),
        # Uniform operands of the loop's adds. Multiplying the row stride there took some 20 instructions of 640 a tile;
        # without them, and with lane addresses kept, d 128 full went from 1.16 to 1.19 of FA2 (H200, geomean).
        Field(
            "i64",
            "k_pass_bytes",
            "kRowsPerPass * k_row_stride * 2: bytes from one copy pass to the next",
            ("Multiples of the row strides, so that the loop adds where it would multiply.",),
        ),
        Field("i64", "v_pass_bytes", "kRowsPerPass * v_row_stride * 2"),
        Field("i64", "k_tile_bytes", "block_n * k_row_stride * 2: bytes from one tile to the next"),
        Field("i64", "v_tile_bytes", "block_n * v_row_stride * 2"),
        Field("int", "batch", "at least 1", ("Sizes.",)),
        Field("int", "num_heads", "query heads, at least 1"),
        Field("int", "seqlen_q", "at least 1"),
        Field("int", "seqlen_k", "may be 0"),
        Field("int", "num_m_blocks", "ceil(rows / block_m); rows are seqlen_q, of packed heads seqlen_q * gqa_ratio"),
        Field(
            "int",
            "heads_per_section",
            "heads (or sets of packed ones) whose K and V fit in half of L2; 1 to all are right",
        ),
        Field(
            "int",
            "tail_m_blocks",
            "query blocks, each head's first, that start after all others; 0 to num_m_blocks are right",
        ),
        Field("float", "softmax_scale", "at least 0, usually 1 / sqrt(head_dim)"),
        Field("float", "scale_log2", "softmax_scale * log2(e); where that is 0, a positive number as small as 2^-149"),
    ),
)

PARAMS = {"fwd": FWD_PARAMS}
