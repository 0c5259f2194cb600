"""What a call would run, and why: for people, and for tests that must know which kernel they test."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa2gen.constraints_sm90 import COMPUTE_CAPABILITY, compile_target
from fa2gen.launch import bwd_plan, fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, Config, ForwardConfig, KernelSpec

from .emulated import emulated_config
from .families import tma_obstacle
from .plan import device_gpu, kernel_state, match_config
from .request import Request, backward_request, read_deterministic, read_flag, read_request, require_config

_KNOWN = {"measured": "measured", "predicted": "predicted by the performance model, not measured"}


@dataclass(frozen=True)
class Description:
    """A call, or its gradients, as fa2gen would serve it; ``str()`` is the readable form.

    Attributes:
        backend: ``"cuda"``, ``"emulator"`` or ``"reference"``.
        spec, problem: The kernel's identity and the sizes.
        config: None where no kernel runs: the reference, or an empty problem.
        softmax: ``"online"``, ``"guarded"``; for the reference ``"float64"``; ``"none"`` for an empty problem, and for
            gradients, whose kernels find the softmax in the LSE.
        source: How the config was found: a source of the tuned tables, ``"forced by the caller"``, ``"default"``, or
            why there is none.
        known: ``"measured"`` or ``"predicted"``: what the table's entry rests on; None where there is no entry.
        entry: The table entry's GPU, spec and bucket; None where there is none.
        stale: The templates have changed since the entry was made (``gated``), or since nearer ones were, which were
            passed over.
        gated: The entry itself is stale, and its config passed the gate again with today's templates.
        gpu: Slug of the GPU; None off it.
        target: What the kernel is compiled for; None where nothing is compiled.
        state: ``"loaded"``, ``"compiled"`` (in the cache on disk), ``"not compiled"``; None where nothing is compiled.
            Of the three kernels of a backward, the state of the one that is furthest from a launch.
        copies: Tensors that the call copies, and why.
        obstacle: Why the sm90 family, which the GPU runs, cannot serve the call; None where it can, or for another
            reason does not.
    """

    backend: str
    spec: KernelSpec
    problem: Problem
    config: Config | None
    softmax: str
    source: str
    known: str | None = None
    entry: str | None = None
    stale: bool = False
    gated: bool = False
    gpu: str | None = None
    target: str | None = None
    state: str | None = None
    copies: tuple[str, ...] = ()
    obstacle: str | None = None

    def __str__(self) -> str:
        p = self.problem
        sizes = f"batch {p.batch}, seqlen {p.seqlen_q} x {p.seqlen_k}, heads {p.num_heads_q} over {p.num_heads_k}"
        lines = [f"backend  {self.backend}" + (f" on {self.gpu}" if self.gpu else "")]
        lines += [f"spec     {self.spec.slug()}", f"problem  {sizes}"]
        lines.append(f"config   {self.config.slug() if self.config else 'none'} ({self.source})")
        if self.obstacle is not None:
            lines.append(f"family   sm80, since TMA cannot read the tensors: {self.obstacle}")
        if self.entry is not None:
            lines.append(f"entry    {self.entry}, {_KNOWN[str(self.known)]}")
        if self.gated:
            lines.append("         stale, passed the gate again: its time is that of earlier templates")
        elif self.stale:
            lines.append("         nearer entries are stale: the templates have changed since (fa2gen table check)")
        if self.softmax != "none":
            lines.append(f"softmax  {self.softmax}")
        if self.target is not None:
            lines.append(f"kernel   {self.target}" + (f", {self.state}" if self.state else ""))
        lines += [f"copy     {copy}" for copy in self.copies]
        return "\n".join(lines)


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
    config: ForwardConfig | None = None,
    backward_config: BwdConfig | None = None,
    backward: bool = False,
) -> Description:
    """What :func:`fa2gen.runtime.attention` would do with the same arguments; nothing is compiled or launched.

    Args:
        q, k, v, causal, softmax_scale, deterministic, backend, config, backward_config: As for the call.
        backward: Describe the gradients of the call, not the call. The copies named are those of q, k and v; that of
            the output's gradient depends on its strides.

    Raises:
        ArgumentError, InfeasibleError: As the call itself.
    """
    request = read_request(q, k, v, causal=causal, softmax_scale=softmax_scale, backend=backend)
    require_config(request.backend, config, backward_config)
    deterministic = read_deterministic(deterministic)
    if not read_flag("backward", backward):
        return describe_request(request, config)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    request = backward_request(request, {"q": q, "k": k, "v": v}, deterministic=deterministic)
    return describe_request(request, backward_config)


def describe_request(request: Request, config: Config | None) -> Description:
    """:func:`describe` of a call, or of gradients, whose arguments have been read."""
    backend, spec, problem, copies = request.backend, request.spec, request.problem, _copies(request)
    if backend == "reference":
        return Description(backend, spec, problem, None, "float64", "the definition, in float64", copies=copies)
    if request.is_empty:
        return Description(backend, spec, problem, None, "none", "nothing to compute", copies=copies)
    if backend == "emulator":
        source = "default" if config is None else "forced by the caller"
        config = emulated_config(request, config)
        _require_launchable(request, config)
        return Description(backend, spec, problem, config, _softmax(config), source, target="host", copies=copies)
    index = request.device.index
    match, gpu = match_config(request, index, config), device_gpu(index)
    _require_launchable(request, match.config)
    entry = match.entry
    return Description(
        backend,
        spec,
        problem,
        match.config,
        _softmax(match.config),
        match.origin,
        known=None if entry is None else entry.measurement.kind,
        entry=None if entry is None else f"{match.gpu} {entry.spec.slug()} {entry.bucket.label()}",
        stale=match.stale,
        gated=match.gated,
        gpu=gpu.name,
        target=compile_target(match.config, gpu.target),
        state=kernel_state(spec, match.config, index),
        copies=copies,
        obstacle=tma_obstacle(request) if spec.kind == "fwd" and gpu.compute_capability == COMPUTE_CAPABILITY else None,
    )


def _softmax(config: Config) -> str:
    return "none" if isinstance(config, BwdConfig) else config.softmax


def _require_launchable(request: Request, config: Config) -> None:
    """Raise where the call would, whose launch has limits of its own; strides and the L2 play no part in them."""
    tensors, scale = ("q", "k", "v", "o", "dout", "dq", "dk", "dv"), abs(request.softmax_scale)
    strides, spec, problem = dict.fromkeys(tensors, (0, 0, 0)), request.spec, request.problem
    if isinstance(config, BwdConfig):
        bwd_plan(spec, config, problem, strides=strides, softmax_scale=scale, l2_bytes=0)
    else:
        fwd_plan(spec, config, problem, strides=strides, softmax_scale=scale, l2_bytes=0, num_sms=1)


def _copies(request: Request) -> tuple[str, ...]:
    copies = [f"{name}: {reason}" for name, reason in request.copied.items()]
    if request.softmax_scale < 0:
        copies.append("q: negated, since softmax_scale is negative")
    if request.head_dim != request.spec.head_dim:
        results = "output" if request.spec.kind == "fwd" else "output and its gradient: padded likewise; gradients"
        copies.append(f"{results}: cut back to head_dim {request.head_dim}")
    # The reference reads any strides and takes any scale.
    return () if request.backend == "reference" else tuple(copies)
