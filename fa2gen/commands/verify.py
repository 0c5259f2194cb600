"""``fa2gen verify``: run kernels against the float64 reference, on the GPU or in the emulator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from ..constraints import default_config, default_config_on, infeasible_reason
from ..errors import ArgumentError, EmulatorError, InfeasibleError, LaunchError
from ..hardware import Gpu, arch_limits
from ..problem import Problem
from ..spec import BwdConfig, Config, KernelSpec
from .options import (
    config_option,
    given,
    gpu_at_hand,
    gpu_option,
    json_option,
    kind_options,
    kinds_of,
    make_specs,
    parse_config,
    resolve_gpu,
    seqlen_options,
    spec_options,
)
from .progress import StageProgress

if TYPE_CHECKING:
    from ..gate import GateCase, GateReport


@dataclass(frozen=True)
class _Event:
    """Progress of one kernel's gate."""

    stage: str
    done: int
    total: int
    text: str


@dataclass(frozen=True)
class _Job:
    """A kernel that is to be checked, and on what."""

    spec: KernelSpec
    config: Config
    chosen: str
    cases: Sequence[GateCase]


@dataclass(frozen=True)
class _Verdict:
    spec: KernelSpec
    config: Config
    chosen: str
    passed: bool
    text: str


@click.command("verify")
@kind_options
@spec_options(gqa=(1,))
@gpu_option("GPU whose tuned configs are checked. [default: the one found, else none: the default config]")
@seqlen_options(None)
@click.option(
    "--backend",
    type=click.Choice(("auto", "cuda", "emulator")),
    default="auto",
    show_default=True,
    help="Where kernels run; auto is cuda where a GPU is found.",
)
@click.option(
    "--budget",
    type=click.Choice(("quick", "full")),
    default="quick",
    show_default=True,
    help="Without lengths: about twenty cases, or about a hundred.",
)
@config_option("check")
@json_option
def command(
    kind: str,
    deterministic: bool,
    headdims: tuple[int, ...],
    dtypes: tuple[str, ...],
    causal: bool | None,
    gqa_ratios: tuple[int, ...],
    gpu_name: str | None,
    seqlen_q: int | None,
    seqlen_k: int | None,
    backend: str,
    budget: str,
    config: str,
    as_json: bool,
) -> int:
    """Run kernels and compare every row with attention in float64: outputs, or of a backward gradients.

    Without lengths the cases are the ones a config must pass before it enters a table: sizes at tile edges, empty rows,
    one key that holds all the weight, scores that grow, views into memory filled with NaN. With lengths, the same kinds
    of data at those lengths, at least one query and, of a backward, one key: without, no kernel runs. The emulator also
    reports races, missing waits, uninitialised reads and deadlocks.

    \b
    Examples:
      fa2gen verify --headdim 64 --causal --seqlen-q 113 --seqlen-k 203 --dtype bf16 --backend emulator
      fa2gen verify --headdim 64 --kind bwd --deterministic --seqlen-q 113
    """
    kinds = kinds_of(kind, deterministic=deterministic)
    specs = make_specs(headdims, dtypes, causal, gqa_ratios, kinds, deterministic=deterministic)
    if seqlen_k is not None and seqlen_q is None:
        raise click.UsageError("--seqlen-k needs --seqlen-q", click.get_current_context())
    if seqlen_q is not None and given("budget"):
        raise click.UsageError("--budget is for the cases without --seqlen-q", click.get_current_context())
    parsed = parse_config(config, kind)
    lengths = None if seqlen_q is None else (seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)
    if lengths is not None:
        _require_a_kernel_to_run(kinds, *lengths)
    backend = _resolve_backend(backend)
    gpu = resolve_gpu(gpu_name) if gpu_name is not None else gpu_at_hand()
    # All that may be refused is refused before the first kernel runs: its verdict would be lost.
    jobs = [_job(spec, gpu, lengths, budget, parsed) for spec in specs]
    with StageProgress() as progress:
        verdicts = [_verify(job, backend, progress.on_event) for job in jobs]
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if as_json:
        click.echo(json.dumps({"backend": backend, "kernels": [_as_json(v) for v in verdicts]}, indent=2))
    else:
        for verdict in verdicts:
            mark = "ok    " if verdict.passed else "WRONG "
            click.echo(
                f"{mark} {verdict.spec.slug()}  {verdict.config.slug()} ({verdict.chosen})\n       {verdict.text}"
            )
        click.echo(f"{len(verdicts) - len(failed)} of {len(verdicts)} kernels right, on the {backend} backend")
    return 1 if failed else 0


def _require_a_kernel_to_run(kinds: Sequence[str], seqlen_q: int, seqlen_k: int) -> None:
    """A verdict on lengths that no kernel ever sees would be one on nothing.

    Raises:
        click.UsageError: No queries; or no keys for a backward. A forward without keys writes zeros and an LSE of -inf.
    """
    context = click.get_current_context()
    if seqlen_q == 0:
        raise click.UsageError(
            "--seqlen-q 0: the output is empty and gradients are zeros, so no kernel runs; give at least 1", context
        )
    if seqlen_k == 0 and "bwd" in kinds:
        raise click.UsageError(
            "--seqlen-k 0: gradients without keys are zeros, so no backward kernel runs; give at least 1 or --kind fwd",
            context,
        )


def _resolve_backend(name: str) -> str:
    if name == "emulator":
        return name
    from .. import driver

    reason = driver.unavailable_reason()
    if name == "auto":
        return "emulator" if reason else "cuda"
    if name == "cuda" and reason:
        raise LaunchError(f"the cuda backend is not available: {reason}; use --backend emulator")
    return name


def _choose_config(
    spec: KernelSpec, gpu: Gpu | None, lengths: tuple[int, int] | None, asked: Config | Literal["tuned", "default"]
) -> tuple[Config, str]:
    if not isinstance(asked, str):
        # Without a GPU it has to run on the one that grants a block most.
        title, arch = (gpu.title, gpu.arch) if gpu is not None else ("any GPU", arch_limits((9, 0)))
        if reason := infeasible_reason(spec, asked, arch):
            raise InfeasibleError(f"{asked.slug()} cannot run {spec.slug()} on {title}: {reason}")
        return asked, "given"
    if gpu is None:
        return default_config(spec), "default"
    if asked == "default":
        return default_config_on(spec, gpu.arch), "default"
    from ..codegen import template_hash
    from ..tables import lookup
    from ..tuning.report import usual_problem

    bucket = usual_problem(spec, *(lengths or (2048, 2048))).bucket(gpu.num_sms)
    match = lookup(spec, bucket, gpu, template_hash=template_hash)
    return match.config, match.source


def _job(
    spec: KernelSpec,
    gpu: Gpu | None,
    lengths: tuple[int, int] | None,
    budget: str,
    asked: Config | Literal["tuned", "default"],
) -> _Job:
    from ..tuning.tools import gate_cases

    config, chosen = _choose_config(spec, gpu, lengths, asked)
    cases = gate_cases(spec, config, budget) if lengths is None else _cases_at(spec, config, *lengths)
    return _Job(spec, config, chosen, cases)


def _verify(job: _Job, backend: str, on_event: Callable[[Any], None]) -> _Verdict:
    spec, config, chosen, cases = job.spec, job.config, job.chosen, job.cases

    def reported() -> Iterator[GateCase]:
        for done, case in enumerate(cases):
            on_event(_Event(spec.slug(), done, len(cases), case.label()))
            yield case
        on_event(_Event(spec.slug(), len(cases), len(cases), ""))

    try:
        report = _run_gate(spec, config, backend, reported())
    except EmulatorError as error:
        return _Verdict(spec, config, chosen, False, str(error))
    return _Verdict(spec, config, chosen, report.passed, report.text)


def _run_gate(spec: KernelSpec, config: Config, backend: str, cases: Iterator[GateCase]) -> GateReport:
    from ..gate import run_backward_gate, run_gate

    if backend == "emulator":
        from ..tuning.tools import emulated_gate

        return emulated_gate(spec, config, cases)
    if isinstance(config, BwdConfig):
        import torch

        from ..runtime.warmup import backward_runner

        device = torch.device("cuda", torch.cuda.current_device())
        return run_backward_gate(spec, config, backward_runner(spec, config, device), cases, device=device)
    from ..runtime import attention

    def launch(q: Any, k: Any, v: Any, softmax_scale: float) -> Any:
        return attention(
            q, k, v, causal=spec.causal, softmax_scale=softmax_scale, return_lse=True, backend="cuda", config=config
        )

    return run_gate(spec, config, launch, cases, device="cuda")


def _cases_at(spec: KernelSpec, config: Config, seqlen_q: int, seqlen_k: int) -> Sequence[GateCase]:
    """The gate's kinds of data at one pair of lengths, in its three layouts."""
    from ..gate import GateCase

    step = config.block_n if isinstance(config, BwdConfig) else config.step_n
    # Two key/value heads show a wrong head stride; a large group has enough query heads with one.
    heads_k = 2 if spec.gqa_ratio <= 2 else 1
    problem = Problem(1, seqlen_q, seqlen_k, heads_k * spec.gqa_ratio, heads_k)
    _require_memory(spec, problem)
    scale = float(spec.head_dim**-0.5)
    kinds: tuple[tuple[str, float, int, str], ...] = (
        ("normal", 1.0, 1, "contiguous"),
        ("normal", 60.0, 1, "padded"),
        ("walk", 1.0, 1, "heads_first"),
        ("growing", 8.0, step, "contiguous"),
        ("falling", 8.0, step, "padded"),
        ("spike_last", 200.0, 1, "heads_first"),
    )
    if seqlen_k == 0:
        kinds = kinds[:1]
    return [
        GateCase(
            problem, data, scale, amount, period, layout=layout, seed=seed, dlse=spec.kind == "bwd" and seed % 2 == 0
        )
        for seed, (data, amount, period, layout) in enumerate(kinds)
    ]


def _require_memory(spec: KernelSpec, problem: Problem) -> None:
    """The reference keeps all tensors in float64, some of them twice, beside the kernel's own; a backward's more."""
    tensors = problem.num_heads_q * problem.seqlen_q + problem.num_heads_k * problem.seqlen_k
    needed = (4 if spec.kind == "fwd" else 10) * 8 * problem.batch * tensors * spec.head_dim
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present:
        raise ArgumentError(
            f"seqlen_q {problem.seqlen_q} and seqlen_k {problem.seqlen_k} with {problem.num_heads_q} query heads need "
            f"about {needed / 2**30:.0f} GiB for the check, this machine has {present / 2**30:.0f} GiB"
        )


def _as_json(verdict: _Verdict) -> dict[str, Any]:
    return {
        "spec": verdict.spec.canonical(),
        "config": verdict.config.canonical(),
        "config_chosen": verdict.chosen,
        "passed": verdict.passed,
        "text": verdict.text,
    }
