"""fa2gen itself as an implementation, what it runs for a cell, and how many softmax steps it repairs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from fa2gen import __version__
from fa2gen.codegen import kernels_of
from fa2gen.compile import compile_many, kernel_source
from fa2gen.constraints import default_config_on, infeasible_reason
from fa2gen.constraints_sm90 import compile_target
from fa2gen.errors import UnsupportedError
from fa2gen.hardware import Gpu
from fa2gen.problem import Problem
from fa2gen.runtime import Description, attention, describe, warmup, warmup_specs
from fa2gen.runtime.plan import device_gpu, require_feasible
from fa2gen.runtime.plan_forward import build_plan
from fa2gen.runtime.request import read_request
from fa2gen.spec import FAMILIES, BwdConfig, Config, ForwardConfig, FwdConfig, KernelSpec

from .cells import Cell
from .peers import Call, Implementation, Peer

# A config, "tuned" (the tables choose) or "default"; see fa2gen.commands.options.parse_config.
Choice = Config | str


def _gpu() -> Gpu:
    return device_gpu(torch.cuda.current_device())


def forced_config(choice: Choice, spec: KernelSpec) -> Config | None:
    """The config to force for a spec on torch's current device; None where the tables choose.

    So they do for the kind that a config is not of.
    """
    if isinstance(choice, str):
        return default_config_on(spec, _gpu().arch) if choice == "default" else None
    return choice if type(choice) in FAMILIES[spec.kind].values() else None


def require_config(choice: Choice, specs: Sequence[KernelSpec]) -> None:
    """Raise unless the config chosen is legal for every spec of its kind on torch's current device.

    Raises:
        InfeasibleError: It is not; the message is the reason.
    """
    for spec in specs:
        config = forced_config(choice, spec)
        if config is not None:
            require_feasible(spec, config, _gpu())


def compile_ahead(cells: Sequence[Cell], choice: Choice, *, online: bool = False, deterministic: bool = False) -> None:
    """Compile the kernels of all cells into the cache, in parallel; what is refused is told when its cell comes.

    Args:
        cells: What will be measured. Head dims that the runtime pads compile with their cell.
        choice: fa2gen's config.
        online: The same configs of forward kernels with the online softmax too.
        deterministic: Deterministic backward kernels too.
    """
    calls = list(dict.fromkeys(call for cell in cells for call in _kernel_calls(cell, deterministic)))
    specs = [spec for spec, _ in calls]
    if choice == "tuned":
        configs: list[Config | None] = [description.config for description in warmup_specs(calls, gate=False)]
    else:
        configs = [forced_config(choice, spec) for spec in specs]
    kernels = [(spec, config) for spec, config in zip(specs, configs, strict=True) if config is not None]
    if online:
        kernels += [(spec, _online(config)) for spec, config in kernels if not isinstance(config, BwdConfig)]
    gpu = _gpu()
    legal = [pair for pair in dict.fromkeys(kernels) if infeasible_reason(*pair, gpu.arch) is None]
    compile_many(
        [
            (kernel_source(spec, config, kernel), compile_target(config, gpu.target))
            for spec, config in legal
            for kernel in kernels_of(spec.kind)
        ]
    )


def _kernel_calls(cell: Cell, deterministic: bool) -> list[tuple[KernelSpec, Problem]]:
    """Kernels that a cell runs: a backward needs its forward, timed or not."""
    if not cell.is_backward:
        return [(cell.spec, cell.problem)] if cell.spec.alignment == 16 else []
    specs = [cell.forward_spec, cell.spec]
    if deterministic:
        specs.append(dataclasses.replace(cell.spec, deterministic=True))
    return [(spec, cell.problem) for spec in specs]


def own_implementation(choice: Choice) -> Implementation:
    """:func:`fa2gen.runtime.attention`, with the config chosen."""
    return _implementation("fa2gen", lambda spec, *_: forced_config(choice, spec))


def _online(config: ForwardConfig) -> ForwardConfig:
    """The config with the online softmax, which has nothing to prove."""
    if isinstance(config, FwdConfig):
        return dataclasses.replace(config, softmax="online", proof="step")
    return dataclasses.replace(config, softmax="online")


def online_peer(choice: Choice) -> Peer:
    """The same configs with the online softmax in place of the guarded one: what the guard saves, and what it costs."""

    def config_of(spec: KernelSpec, q: Tensor, k: Tensor, v: Tensor) -> Config | None:
        if spec.kind == "bwd":
            return forced_config(choice, spec)
        config = chosen(spec, q, k, v, choice).config
        if not isinstance(config, ForwardConfig) or config.softmax == "online":
            raise UnsupportedError("the config has the online softmax already")
        return _online(config)

    def find() -> Implementation:
        found = _implementation("online", config_of)

        def prepare(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
            if cell.direction == "bwd":
                raise UnsupportedError("a backward has no softmax of its own: it finds it in the LSE")
            return found.prepare(cell, q, k, v)

        return dataclasses.replace(found, prepare=prepare)

    return Peer("fa2gen, same config with the online softmax", find)


def deterministic_peer(choice: Choice) -> Peer:
    """Gradients with equal bits from run to run, in place of the faster ones: what the order of additions costs."""

    def find() -> Implementation:
        found = _implementation("deterministic", lambda spec, *_: forced_config(choice, spec), deterministic=True)

        def prepare(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
            if not cell.is_backward:
                raise UnsupportedError("the forward is deterministic as it is")
            return found.prepare(cell, q, k, v)

        return dataclasses.replace(found, prepare=prepare)

    return Peer("fa2gen, deterministic backward", find)


# A spec and q, k, v -> the config to force, or None.
_ConfigOf = Callable[[KernelSpec, Tensor, Tensor, Tensor], Config | None]


def _implementation(name: str, config_of: _ConfigOf, *, deterministic: bool = False) -> Implementation:
    def prepare(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        causal, config = cell.spec.causal, cast(FwdConfig | None, config_of(cell.forward_spec, q, k, v))
        # Results are compared before they are timed, as every implementation's are.
        if not cell.is_backward:
            warmup(q, k, v, causal=causal, config=config, gate=False)
            return lambda q, k, v: attention(q, k, v, causal=causal, config=config)  # type: ignore[return-value]
        spec = dataclasses.replace(cell.spec, deterministic=deterministic)
        backward_config = cast(BwdConfig | None, config_of(spec, q, k, v))
        warmup(
            q,
            k,
            v,
            causal=causal,
            deterministic=deterministic,
            config=config,
            backward_config=backward_config,
            gate=False,
            backward=True,
        )
        return lambda q, k, v: attention(  # type: ignore[return-value]
            q, k, v, causal=causal, deterministic=deterministic, config=config, backward_config=backward_config
        )

    return Implementation(name, __version__, prepare)


def chosen(spec: KernelSpec, q: Tensor, k: Tensor, v: Tensor, choice: Choice) -> Description:
    """What fa2gen runs for a spec, and why."""
    config, causal = forced_config(choice, spec), spec.causal
    if spec.kind == "fwd":
        return describe(q, k, v, causal=causal, config=cast(FwdConfig | None, config))
    config = cast(BwdConfig | None, config)
    return describe(q, k, v, causal=causal, deterministic=spec.deterministic, backward_config=config, backward=True)


def count_repairs(cell: Cell, q: Tensor, k: Tensor, v: Tensor, description: Description) -> int | None:
    """Softmax steps that one call on these inputs repairs.

    None for a config that has nothing to repair, and where the call runs on copies of its inputs.
    """
    if not isinstance(description.config, ForwardConfig) or description.config.softmax != "guarded":
        return None
    request = read_request(q, k, v, causal=cell.spec.causal, softmax_scale=None, backend="cuda")
    if request.copied:
        return None
    repairs = torch.zeros(1, dtype=torch.int32, device=q.device)
    plan = build_plan(request, description.config, return_lse=False, repairs=repairs)
    plan(q.data_ptr(), k.data_ptr(), v.data_ptr())
    return int(repairs.item()) & 0xFFFFFFFF
