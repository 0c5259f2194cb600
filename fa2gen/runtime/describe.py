"""What a call would run, and why: for people, and for tests that must know which kernel they test."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fa2gen.launch import fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec

from .dispatch import emulated_config
from .plan import device_gpu, kernel_state, match_config
from .request import Request, read_request, require_config

_KNOWN = {"measured": "measured", "predicted": "predicted by the performance model, not measured"}


@dataclass(frozen=True)
class Description:
    """A call as fa2gen would serve it; ``str()`` is the readable form.

    Attributes:
        backend: ``"cuda"``, ``"emulator"`` or ``"reference"``.
        spec, problem: The kernel's identity and the sizes.
        config: None where no kernel runs: the reference, or an empty problem.
        softmax: ``"online"``, ``"guarded"``; for the reference ``"float64"``; ``"none"`` for an empty problem.
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
        copies: Tensors that the call copies, and why.
    """

    backend: str
    spec: KernelSpec
    problem: Problem
    config: FwdConfig | None
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

    def __str__(self) -> str:
        p = self.problem
        sizes = f"batch {p.batch}, seqlen {p.seqlen_q} x {p.seqlen_k}, heads {p.num_heads_q} over {p.num_heads_k}"
        lines = [f"backend  {self.backend}" + (f" on {self.gpu}" if self.gpu else "")]
        lines += [f"spec     {self.spec.slug()}", f"problem  {sizes}"]
        lines.append(f"config   {self.config.slug() if self.config else 'none'} ({self.source})")
        if self.entry is not None:
            lines.append(f"entry    {self.entry}, {_KNOWN[str(self.known)]}")
        if self.gated:
            lines.append("         stale, passed the gate again: its time is that of earlier templates")
        elif self.stale:
            lines.append("         nearer entries are stale: the templates have changed since (fa2gen table check)")
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
    backend: str = "auto",
    config: FwdConfig | None = None,
) -> Description:
    """What :func:`fa2gen.runtime.attention` would do with the same arguments; nothing is compiled or launched.

    Raises:
        ArgumentError, InfeasibleError: As the call itself.
    """
    request = read_request(q, k, v, causal=causal, softmax_scale=softmax_scale, backend=backend)
    return describe_request(request, config)


def describe_request(request: Request, config: FwdConfig | None) -> Description:
    """:func:`describe` of arguments that have been read."""
    require_config(request.backend, config)
    backend, spec, problem, copies = request.backend, request.spec, request.problem, _copies(request)
    if backend == "reference":
        return Description(backend, spec, problem, None, "float64", "the definition, in float64", copies=copies)
    if request.is_empty:
        return Description(backend, spec, problem, None, "none", "nothing to compute", copies=copies)
    if backend == "emulator":
        source = "default" if config is None else "forced by the caller"
        config = emulated_config(request, config)
        _require_launchable(request, config)
        return Description(backend, spec, problem, config, config.softmax, source, target="host", copies=copies)
    index = request.device.index
    match, gpu = match_config(request, index, config), device_gpu(index)
    _require_launchable(request, match.config)
    entry = match.entry
    return Description(
        backend,
        spec,
        problem,
        match.config,
        match.config.softmax,
        match.origin,
        known=None if entry is None else entry.measurement.kind,
        entry=None if entry is None else f"{match.gpu} {entry.spec.slug()} {entry.bucket.label()}",
        stale=match.stale,
        gated=match.gated,
        gpu=gpu.name,
        target=gpu.target,
        state=kernel_state(spec, match.config, index),
        copies=copies,
    )


def _require_launchable(request: Request, config: FwdConfig) -> None:
    """Raise where the call would, whose launch has limits of its own; strides and the L2 play no part in them."""
    strides, scale = dict.fromkeys("qkvo", (0, 0, 0)), abs(request.softmax_scale)
    fwd_plan(request.spec, config, request.problem, strides=strides, softmax_scale=scale, l2_bytes=0)


def _copies(request: Request) -> tuple[str, ...]:
    copies = [f"{name}: {reason}" for name, reason in request.copied.items()]
    if request.softmax_scale < 0:
        copies.append("q: negated, since softmax_scale is negative")
    if request.head_dim != request.spec.head_dim:
        copies.append(f"output: cut back to head_dim {request.head_dim}")
    # The reference reads any strides and takes any scale.
    return () if request.backend == "reference" else tuple(copies)
