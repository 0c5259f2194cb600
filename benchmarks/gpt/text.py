"""Real text that every machine with Python and torch has, the sources of both, and the batches drawn from it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fa2gen.errors import ArgumentError

VOCABULARY = 256
"""A token is a byte, and 0, which text does not hold, ends a file: a multiple of 128 with nothing to pad."""

# The order of the batches: the same for every run, whatever its seed.
_DATA_SEED = 1234


@dataclass(frozen=True)
class Text:
    """A text as tokens.

    Attributes:
        tokens: (length,) uint8, on the CPU.
        files: How many files it is.
        sha256: Of its bytes: two machines whose digests are equal trained on the same text.
    """

    tokens: Tensor
    files: int
    sha256: str


def read_text(most_bytes: int | None = None) -> Text:
    """The .py files of Python's standard library and of torch, in the order of their names: some 60 MB of text and
    code, by thousands of authors.

    Args:
        most_bytes: Stop after the file that reaches so many.
    """
    parts, length = [], 0
    for path in _sources():
        data = path.read_bytes().replace(b"\0", b"") + b"\0"
        parts.append(data)
        length += len(data)
        if most_bytes is not None and length >= most_bytes:
            break
    whole = bytearray(b"".join(parts))
    return Text(torch.frombuffer(whole, dtype=torch.uint8), len(parts), hashlib.sha256(whole).hexdigest())


def _sources() -> Iterator[Path]:
    for root in (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            # Packages that happen to be installed below the standard library are no part of it.
            if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
                yield path


class Batches:
    """Random windows of a text, the same ones for every run.

    Args:
        text: What to draw from.
        steps, sequences, context: ``steps`` batches of ``sequences`` windows of ``context`` tokens.
        device: Where the text and its batches lie.

    Raises:
        ArgumentError: The text is shorter than a window.
    """

    def __init__(self, text: Text, steps: int, sequences: int, context: int, device: torch.device) -> None:
        last = len(text.tokens) - context - 1
        if last < 0:
            raise ArgumentError(f"--context {context} is longer than the text, {len(text.tokens)} tokens")
        generator = torch.Generator().manual_seed(_DATA_SEED)
        starts = torch.randint(0, last + 1, (steps, sequences, 1), generator=generator)
        self._starts = starts.to(device)
        self._window = torch.arange(context + 1, device=device)
        self._tokens = text.tokens.to(device)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, (sequences, context) int64 both; targets are one token further on."""
        window = self._tokens[self._starts[step] + self._window].long()
        return window[:, :-1], window[:, 1:]
