"""Writes kernels for people without fa2gen: CUDA files, a manifest, and a C++ program that launches and checks them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from .codegen import render_kernels, template_hash
from .constraints import default_config_on, infeasible_reason
from .emit_example import EXAMPLE_FILES, Call, example_files
from .emit_manifest import EmittedKernel as EmittedKernel
from .emit_manifest import manifest as manifest
from .emit_manifest import workspace_rules as workspace_rules
from .errors import ArgumentError, InfeasibleError
from .hardware import Gpu
from .spec import Config, KernelSpec
from .tables import Match, lookup
from .tuning.report import usual_problem

#: What :func:`emit` writes besides the kernels.
EXTRA_FILES = ("manifest.json", *EXAMPLE_FILES)


def choose(
    spec: KernelSpec,
    gpu: Gpu,
    *,
    seqlen_q: int = 2048,
    seqlen_k: int | None = None,
    config: Config | Literal["default"] | None = None,
) -> tuple[EmittedKernel, ...]:
    """The kernels for a spec in the order in which they run: their sources, and how their config was chosen.

    Args:
        spec, gpu: What is computed, and on which chip.
        seqlen_q, seqlen_k: The lengths that the config is chosen for; ``seqlen_k`` defaults to ``seqlen_q``.
        config: A config instead of the tuned one, or ``"default"``: what runs where nothing is tuned.

    Raises:
        InfeasibleError: The given config is not legal for the spec on this GPU.
    """
    problem = usual_problem(spec, seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)
    if config is None:
        match = lookup(spec, problem.bucket(gpu.num_sms), gpu, template_hash=template_hash)
    elif config == "default":
        match = Match(default_config_on(spec, gpu.arch), "default", 0, False, None)
    else:
        if reason := infeasible_reason(spec, config, gpu.arch):
            raise InfeasibleError(f"{config.slug()} cannot run {spec.slug()} on {gpu.name}: {reason}")
        match = Match(config, "given", 0, False, None)
    sources = render_kernels(spec, match.config)
    # The spec's slug, with the kernel's name in the place of the kind.
    names = [f"{source.kernel}{spec.slug().removeprefix(spec.kind)}.cu" for source in sources]
    return tuple(EmittedKernel(name, source, match, problem) for name, source in zip(names, sources, strict=True))


def emit(
    specs: Sequence[KernelSpec],
    gpu: Gpu,
    out: Path,
    *,
    seqlen_q: int = 2048,
    seqlen_k: int | None = None,
    config: Config | Literal["default"] | None = None,
) -> list[EmittedKernel]:
    """Writes one ``.cu`` for each kernel of the specs, and ``EXTRA_FILES``.

    Args:
        specs: What to write; no two alike.
        gpu: The GPU whose tuned configs and target are used.
        out: Folder, made if need be; files of the same names are replaced.
        seqlen_q, seqlen_k, config: As for :func:`choose`.

    Raises:
        ArgumentError: No specs, or ``out`` is a file or has folders of the files' names.
        InfeasibleError: The given config is not legal for a spec on this GPU; nothing is written.
        OSError: The folder cannot be written.
    """
    if not specs:
        raise ArgumentError("specs must name at least one kernel")
    if os.path.lexists(out) and not out.is_dir():
        raise ArgumentError(f"out must be a folder, {out} is a {'file' if out.exists() else 'link that leads nowhere'}")
    chosen = [choose(spec, gpu, seqlen_q=seqlen_q, seqlen_k=seqlen_k, config=config) for spec in specs]
    kernels = [kernel for call in chosen for kernel in call]
    texts = {kernel.file: kernel.source.text for kernel in kernels}
    texts["manifest.json"] = json.dumps(manifest(kernels, gpu), indent=2) + "\n"
    calls = [Call(tuple((kernel.file, kernel.source) for kernel in call)) for call in chosen]
    _write_all(out, texts | example_files(calls, gpu))
    return kernels


def _write_all(out: Path, texts: Mapping[str, str]) -> None:
    """Writes every file or none: a full disk neither cuts off an older file nor mixes two runs."""
    for name in texts:
        if (out / name).is_dir():
            raise ArgumentError(f"out has a folder where the file {name} belongs: {out / name}")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".emit-", dir=out, ignore_cleanup_errors=True) as staging:
            for name, text in texts.items():
                Path(staging, name).write_text(text, encoding="utf-8")
            for name in texts:
                Path(staging, name).replace(out / name)
    except OSError as error:
        # A full disk: write() does not say where.
        raise OSError(error.errno, error.strerror, str(out)) from error
