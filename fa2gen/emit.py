"""Writes kernels for people without fa2gen: CUDA files, a manifest, and a C++ program that launches and checks them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import __version__
from .codegen import PARAMS, KernelSource, ParamStruct, grid_rule, render_kernels, template_hash
from .constraints import default_config, infeasible_reason
from .emit_example import EXAMPLE_FILES, Call, example_files
from .errors import ArgumentError, InfeasibleError
from .hardware import Gpu, arch_limits, supported_compute_capabilities
from .problem import Problem
from .spec import BwdConfig, Config, KernelSpec
from .tables import Match, lookup
from .tuning.report import usual_problem

#: What :func:`emit` writes besides the kernels.
EXTRA_FILES = ("manifest.json", *EXAMPLE_FILES)

_FIELD_BYTES = {"pointer": 8, "i64": 8, "int": 4, "float": 4}


@dataclass(frozen=True)
class EmittedKernel:
    """One kernel that was written.

    Attributes:
        file: Name inside the output folder.
        source: What the file holds.
        match: How its config was chosen.
        problem: The sizes it was chosen for; the kernel itself serves any size.
    """

    file: str
    source: KernelSource
    match: Match
    problem: Problem


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
        config: A config instead of the tuned one, or ``"default"``: the one that serves every chip.

    Raises:
        InfeasibleError: The given config is not legal for the spec on this GPU.
    """
    problem = usual_problem(spec, seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)
    if config is None:
        match = lookup(spec, problem.bucket(gpu.num_sms), gpu, template_hash=template_hash)
    elif config == "default":
        match = Match(default_config(spec), "default", 0, False, None)
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


def manifest(kernels: Sequence[EmittedKernel], gpu: Gpu) -> dict[str, Any]:
    """What a program needs to know to compile and launch the kernels, as JSON.

    The kernels of a backward follow each other in the order in which they are launched, one after the other on a
    stream; workspaces of the same name are the same memory.
    """
    return {
        "fa2gen": __version__,
        "gpu": gpu.name,
        "target": gpu.target,
        "kernels": [_manifest_entry(kernel) for kernel in kernels],
    }


def _manifest_entry(kernel: EmittedKernel) -> dict[str, Any]:
    source, match, problem = kernel.source, kernel.match, kernel.problem
    params = PARAMS[source.kernel]
    chosen: dict[str, Any] = {
        "for": {name: getattr(problem, name) for name in Problem.__dataclass_fields__},
        "source": match.source,
        "gpu": match.gpu or None,
    }
    if match.entry is not None:
        measurement = match.entry.measurement
        chosen |= {
            "kind": measurement.kind,
            "ms": measurement.ms,
            "tuned_for": match.entry.spec.canonical() | {"bucket": match.entry.bucket.label()},
        }
    return {
        "file": kernel.file,
        "entry": source.entry,
        "kernel": source.kernel,
        "spec": source.spec.canonical(),
        "config": source.config.canonical(),
        "targets": _targets(source),
        "launch": {
            "grid": [grid_rule(source.spec, source.config, source.kernel), "1", "1"],
            "block": [source.num_threads, 1, 1],
            "dynamic_smem_bytes": source.smem_bytes,
            "max_dynamic_smem_must_be_set": source.smem_bytes > 48 * 1024,
        },
        "workspaces": {
            name: rule for name, rule in workspace_rules(source.spec, source.config).items() if name in params.pointers
        },
        "alignment_bytes": source.spec.alignment,
        "parameters": {"struct": params.name, "bytes": params.size, "fields": _field_list(params)},
        "config_chosen": chosen,
        "template_hash": template_hash(source.spec.kind, source.config.family),
    }


def workspace_rules(spec: KernelSpec, config: Config) -> dict[str, str]:
    """Scratch memory of a call: pointer to bytes, as formulas like ``codegen.grid_rule``; {} for a forward.

    Its contents do not matter.
    """
    if not isinstance(config, BwdConfig):
        return {}
    m_blocks, width = f"ceil(seqlen_q / {config.block_m})", spec.native_head_dim
    rows = f"batch * num_heads * {m_blocks} * {config.block_m} * 4"
    rules = {"lse_log2": rows, "delta": rows, "dq_accum": f"{rows} * {width}"}
    if config.split_heads:
        keys = f"batch * num_heads_k * ceil(seqlen_k / {config.block_n}) * {config.block_n}"
        rules["dk_accum"] = rules["dv_accum"] = f"{keys} * 4 * {width}"
    if spec.deterministic:
        # Cleared 16 bytes at a time.
        rules["semaphores"] = f"ceil(batch * num_heads * {m_blocks} * 4 / 16) * 16"
    return rules


def _targets(source: KernelSource) -> list[str]:
    """Chips that grant a block the shared memory it needs."""
    chips = map(arch_limits, supported_compute_capabilities())
    return [chip.target for chip in chips if source.smem_bytes <= chip.max_smem_per_block]


def _field_list(params: ParamStruct) -> list[dict[str, Any]]:
    fields, offset = [], 0
    for field in params.fields:
        fields.append({"name": field.name, "type": field.kind, "offset": offset, "meaning": field.meaning})
        offset += _FIELD_BYTES[field.kind]
    return fields
