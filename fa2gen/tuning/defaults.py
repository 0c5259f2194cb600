"""How much a session tries when it is not told."""

from __future__ import annotations

MEASURED_TRIALS = 32
"""Configs to time for each kernel and size class. Of the configs that an H200 was given, its fastest is among the
model's first ten in nearly every case; two rounds of 16 compilers cost about 4 s."""

PREDICTED_TRIALS = 24
"""Configs to compile for each kernel."""
