"""How much a session tries when it is not told."""

from __future__ import annotations

MEASURED_TRIALS = 40
"""Configs to time for each kernel and size class."""

PREDICTED_TRIALS = 24
"""Configs to compile for each kernel."""
