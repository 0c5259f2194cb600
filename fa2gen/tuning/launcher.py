"""A config's kernels on a device, launched in a row on tensors that stay where they are."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fa2gen.codegen import param_struct
from fa2gen.driver import LoadedKernel, load
from fa2gen.launch import Launch, LaunchPlan, bwd_plan, fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, Config, KernelSpec
from fa2gen.tensor_map import BYTES

from .builds import Build


@contextlib.contextmanager
def loaded(build: Build, device_index: int) -> Iterator[dict[str, LoadedKernel]]:
    """A config's kernels on a device by name, for as long as the context lasts."""
    kernels: dict[str, LoadedKernel] = {}
    try:
        for compiled in build:
            kernels[compiled.source.kernel] = load(compiled, device_index)
        yield kernels
    finally:
        for kernel in kernels.values():
            kernel.unload()


def make_plan(
    spec: KernelSpec, config: Config, tensors: Mapping[str, Tensor], softmax_scale: float, l2_bytes: int, num_sms: int
) -> LaunchPlan:
    """The launches of a call.

    Args:
        spec, config: The kernels.
        tensors: The call's, by the names of the kernels' parameters; those of four dimensions (batch, seqlen, heads,
            head_dim) have strides there.
        softmax_scale: Factor of the scores.
        l2_bytes, num_sms: The chip's.
    """
    q, k = tensors["q"], tensors["k"]
    problem = Problem(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    strides = {name: (x.stride(0), x.stride(1), x.stride(2)) for name, x in tensors.items() if x.dim() == 4}
    if isinstance(config, BwdConfig):
        return bwd_plan(spec, config, problem, strides=strides, softmax_scale=softmax_scale, l2_bytes=l2_bytes)
    return fwd_plan(
        spec, config, problem, strides=strides, softmax_scale=softmax_scale, l2_bytes=l2_bytes, num_sms=num_sms
    )


def workspace_bytes(plan: LaunchPlan) -> int:
    """What a plan's workspaces take together."""
    return sum(workspace.num_bytes for workspace in plan.workspaces)


def bind(
    kernels: Mapping[str, LoadedKernel], plan: LaunchPlan, tensors: Mapping[str, Tensor], family: str = "sm80"
) -> Callable[[], None]:
    """A call that launches a plan of a family's kernels on torch's current stream, everything packed beforehand.

    Its workspaces are filled with NaN: no result may rest on what was there.

    Raises:
        LaunchError: A tensor cannot be copied by TMA, or tensor maps cannot be made here.
    """
    device = tensors["q"].device
    memory = torch.full((workspace_bytes(plan),), 0xFF, dtype=torch.uint8, device=device)
    starts = itertools.accumulate((workspace.num_bytes for workspace in plan.workspaces), initial=memory.data_ptr())
    addresses = {name: x.data_ptr() for name, x in tensors.items()}
    addresses |= {workspace.pointer: start for workspace, start in zip(plan.workspaces, starts, strict=False)}
    steps = []
    for step in plan.launches:
        packed = _with_addresses(step, family, addresses)
        steps.append((kernels[step.kernel].launch, step.grid, (step.num_threads, 1, 1), packed))
    stream = torch.cuda.current_stream(device).cuda_stream

    def launch(_workspaces: Tensor = memory) -> None:  # which live as long as the call
        for run, grid, block, packed in steps:
            run(grid, block, packed, stream)

    return launch


def _with_addresses(step: Launch, family: str, addresses: Mapping[str, int]) -> bytes:
    """A launch's parameters with tensor maps and pointers filled in; those that nothing reads stay null."""
    fields, params = param_struct(step.kernel, family), bytearray(step.params)
    for index, tensor_map in enumerate(step.tensor_maps):
        if tensor_map is not None:
            # Only these kernels need cuda-bindings.
            from fa2gen.driver.tensor_maps import encode

            start = index * BYTES
            params[start : start + BYTES] = encode(tensor_map, addresses[tensor_map.tensor])
    for index, name in enumerate(fields.pointers):
        struct.pack_into("<Q", params, fields.pointers_at + 8 * index, addresses.get(name, 0))
    return bytes(params)
