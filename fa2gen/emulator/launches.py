"""Runs the launches of a plan in order, over memory that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..codegen import param_struct, render_kernel
from ..launch import Launch, LaunchPlan
from ..spec import Config, KernelSpec
from ..tensor_map import BYTES
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
        pointers, maps = _pointer_words(launch, config), _map_words(launch)
        bound = [
            dataclasses.replace(b, pointer_index=pointers.get(b.name, -1), map_index=maps.get(b.name, -1))
            for b in shared
            if b.name in pointers or b.name in maps
        ]
        launch = dataclasses.replace(launch, params=_with_maps(launch))
        counters += run(kernel, launch, bound, **options)  # type: ignore[arg-type]
    for b in shared:
        if b.output:
            require_written(b)
    return counters


def _pointer_words(launch: Launch, config: Config) -> dict[str, int]:
    """For each tensor and workspace the 8-byte word of the parameters that holds its address."""
    struct = param_struct(launch.kernel, config.family)
    return {name: struct.pointers_at // 8 + i for i, name in enumerate(struct.pointers)}


def _map_words(launch: Launch) -> dict[str, int]:
    """For each tensor that a map shows the word at which the map begins."""
    return {each.tensor: i * BYTES // 8 for i, each in enumerate(launch.tensor_maps) if each is not None}


def _with_maps(launch: Launch) -> bytes:
    maps = b"".join(each.emulated() if each is not None else bytes(BYTES) for each in launch.tensor_maps)
    return maps + launch.params[len(maps) :]
