"""What a session tunes and how much it tries when it is not told."""

from __future__ import annotations

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
"""Lengths that tables and benchmarks cover, at 16k tokens a call."""

MEASURED_TRIALS = 30
"""Configs to time for each kernel and size class: with the default and what the table holds, two rounds of 16 kernels,
which 16 cores compile in about 2 s each."""

PREDICTED_TRIALS = 12
"""Configs to compile for each kernel, the model's first. Of 24 tried for head dim 128 on an A100, all 24 winners were
among its first two; with 8 tried for five head dims on four chips, 349 of 360 were among its first seven."""
