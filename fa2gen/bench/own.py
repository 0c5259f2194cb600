"""fa2gen itself as an implementation, what it runs for a cell, and how many softmax steps it repairs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fa2gen import __version__
from fa2gen.codegen import render_kernel
from fa2gen.compile import compile_many
from fa2gen.constraints import default_config, infeasible_reason
from fa2gen.errors import UnsupportedError
from fa2gen.runtime import Description, attention, describe, warmup, warmup_specs
from fa2gen.runtime.plan import build_plan, device_gpu, require_feasible
from fa2gen.runtime.request import read_request
from fa2gen.spec import FwdConfig, KernelSpec

from .cells import Cell
from .peers import Call, Implementation, Peer

# A config, "tuned" (the tables choose) or "default"; see fa2gen.commands.options.parse_config.
Choice = FwdConfig | str


def forced_config(choice: Choice, spec: KernelSpec) -> FwdConfig | None:
    """The config to force for a spec; None where the tables choose."""
    if isinstance(choice, FwdConfig):
        return choice
    return default_config(spec) if choice == "default" else None


def require_config(choice: Choice, specs: Sequence[KernelSpec]) -> None:
    """Raise unless the config chosen is legal for every spec on torch's current device.

    Raises:
        InfeasibleError: It is not; the message is the reason.
    """
    for spec in specs:
        config = forced_config(choice, spec)
        if config is not None:
            require_feasible(spec, config, device_gpu(torch.cuda.current_device()))


def compile_ahead(cells: Sequence[Cell], choice: Choice, *, online: bool = False) -> None:
    """Compile the kernels of all cells into the cache, in parallel; what is refused is told when its cell comes.

    Args:
        cells: What will be measured. Head dims that the runtime pads compile with their cell.
        choice: fa2gen's config.
        online: The same configs with the online softmax too.
    """
    calls = list(dict.fromkeys((cell.spec, cell.problem) for cell in cells if cell.spec.alignment == 16))
    specs = [spec for spec, _ in calls]
    if choice == "tuned":
        configs = [description.config for description in warmup_specs(calls, gate=False)]
    else:
        configs = [forced_config(choice, spec) for spec in specs]
    kernels = [(spec, config) for spec, config in zip(specs, configs, strict=True) if config is not None]
    if online:
        kernels += [(spec, _online(config)) for spec, config in kernels]
    gpu = device_gpu(torch.cuda.current_device())
    legal = [pair for pair in dict.fromkeys(kernels) if infeasible_reason(*pair, gpu.arch) is None]
    compile_many([(render_kernel(spec, config), gpu.target) for spec, config in legal])


def own_implementation(choice: Choice) -> Implementation:
    """:func:`fa2gen.runtime.attention`, with the config chosen."""
    return _implementation("fa2gen", lambda cell, *_: forced_config(choice, cell.spec))


def _online(config: FwdConfig) -> FwdConfig:
    """The config with the online softmax, which has nothing to prove."""
    return dataclasses.replace(config, softmax="online", proof="step")


def online_peer(choice: Choice) -> Peer:
    """The same configs with the online softmax in place of the guarded one: what the guard saves, and what it costs."""

    def config_of(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> FwdConfig:
        config = chosen(cell, q, k, v, choice).config
        if config is None or config.softmax == "online":
            raise UnsupportedError("the config has the online softmax already")
        return _online(config)

    return Peer("fa2gen, same config with the online softmax", lambda: _implementation("online", config_of))


def _implementation(name: str, config_of: Callable[[Cell, Tensor, Tensor, Tensor], FwdConfig | None]) -> Implementation:
    def prepare(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        config, causal = config_of(cell, q, k, v), cell.spec.causal
        # Its output is compared before it is timed, as every implementation's is.
        warmup(q, k, v, causal=causal, config=config, gate=False)
        return lambda q, k, v: attention(q, k, v, causal=causal, config=config)  # type: ignore[return-value]

    return Implementation(name, __version__, prepare)


def chosen(cell: Cell, q: Tensor, k: Tensor, v: Tensor, choice: Choice) -> Description:
    """What fa2gen runs for a cell, and why."""
    return describe(q, k, v, causal=cell.spec.causal, config=forced_config(choice, cell.spec))


def count_repairs(cell: Cell, q: Tensor, k: Tensor, v: Tensor, description: Description) -> int | None:
    """Softmax steps that one call on these inputs repairs.

    None for a config that has nothing to repair, and where the call runs on copies of its inputs.
    """
    if description.config is None or description.config.softmax != "guarded":
        return None
    request = read_request(q, k, v, causal=cell.spec.causal, softmax_scale=None, backend="cuda")
    if request.copied:
        return None
    repairs = torch.zeros(1, dtype=torch.int32, device=q.device)
    plan = build_plan(request, description.config, return_lse=False, repairs=repairs)
    plan(q.data_ptr(), k.data_ptr(), v.data_ptr())
    return int(repairs.item()) & 0xFFFFFFFF
