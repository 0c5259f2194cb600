"""Runs the launches of a plan in order, over memory that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..codegen import PARAMS, render_kernel
from ..launch import LaunchPlan
from ..spec import Config, KernelSpec
from .builder import build
from .runner import Buffer, Counters, require_written, run


def run_plan(
    spec: KernelSpec, config: Config, plan: LaunchPlan, buffers: Sequence[Buffer], **options: object
) -> Counters:
    """Renders, builds and runs the plan's kernels.

    Args:
        spec, config, plan: The kernels and their launches.
        buffers: Tensors and workspaces, by the names of the pointer fields; written in place. A field without a buffer
            is null.
        **options: For every :func:`~fa2gen.emulator.run`.

    Returns:
        What all launches together did.

    Raises:
        EmulatorError: A kernel broke a rule, crashed or did not end, or an output is not complete after the last.
    """
    # What one launch writes the next may read, so all of them keep what is initialised.
    shared = [
        dataclasses.replace(b, initialised=np.zeros(b.data.size // 2, np.bool_)) if b.output else b for b in buffers
    ]
    counters = Counters()
    for launch in plan.launches:
        kernel = build(render_kernel(spec, config, "host", launch.kernel))
        fields = PARAMS[launch.kernel].pointers
        bound = [dataclasses.replace(b, pointer_index=fields.index(b.name)) for b in shared if b.name in fields]
        counters += run(kernel, launch, bound, **options)  # type: ignore[arg-type]
    for b in shared:
        if b.output:
            require_written(b)
    return counters
