"""Renders a spec and a config into one self-contained kernel source."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jinja2

from ..constraints import smem_plan
from ..data import data_dir
from ..errors import ArgumentError
from ..spec import FwdConfig, KernelSpec
from .manifest import body_template, platform_headers
from .params import PARAMS

PLATFORMS = ("cuda", "host")

# The emulator's header defines the primitives for g++; the types are the same file on both sides.
HOST_INCLUDE = '#include "fa2gen_host.h"\n'


@dataclass(frozen=True)
class KernelSource:
    """One rendered kernel.

    Attributes:
        platform: ``"cuda"``: text is what nvcc compiles and what ``emit`` writes; it includes nothing. ``"host"``: text
            is what the emulator builds.
        text: The whole translation unit: head comment, platform part, body.
        body: The kernel itself, equal byte for byte on both platforms.
        entry: Name of the ``extern "C"`` kernel.
        num_threads, smem_bytes: Launch rule: threads per block, bytes of dynamic shared memory.
    """

    spec: KernelSpec
    config: FwdConfig
    platform: str
    text: str
    body: str
    entry: str
    num_threads: int
    smem_bytes: int


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _literal(value: bool) -> str:
    return "true" if value else "false"


def _constants(spec: KernelSpec, config: FwdConfig, entry: str) -> dict[str, Any]:
    """Everything a body template may name."""
    return {
        "entry": entry,
        "head_dim": spec.head_dim,
        "head_dim_padded": spec.native_head_dim,
        "element": spec.dtype,
        "fp16": _literal(spec.dtype == "fp16"),
        "causal": _literal(spec.causal),
        "gqa_ratio": spec.gqa_ratio,
        "vector_bytes": spec.alignment,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "step_n": config.step_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "q_in_regs": _literal(config.q_in_regs),
        "guarded": _literal(config.softmax == "guarded"),
        "min_blocks": config.min_blocks,
        "smem": smem_plan(spec, config),
        "params_declaration": PARAMS[spec.kind].declaration(),
    }


def _assignments(form: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in form.items())


def entry_name(spec: KernelSpec, config: FwdConfig) -> str:
    """C name of the kernel, readable in a profiler: ``fa2gen_fwd_d128_..._sm80_...``."""
    return f"fa2gen_{spec.slug()}_{config.slug()}"


@functools.lru_cache(maxsize=512)
def render_kernel(spec: KernelSpec, config: FwdConfig, platform: str = "cuda") -> KernelSource:
    """Renders a kernel for nvcc (``"cuda"``) or for the emulator (``"host"``).

    Args:
        spec: What the kernel computes.
        config: How; must be legal for the spec (see ``constraints.infeasible_reason``), or the rendered file's
            ``static_assert``s refuse it.
        platform: Changes what precedes the body, never the body.

    Raises:
        ArgumentError: Unknown platform.
    """
    if platform not in PLATFORMS:
        raise ArgumentError(f"platform must be one of {', '.join(PLATFORMS)}, got {platform!r}")
    environment = _environment()
    entry = entry_name(spec, config)
    constants = _constants(spec, config, entry)
    body = environment.get_template(body_template(spec.kind, config.family)).render(constants)
    root = data_dir("templates")
    types, *primitives = ((root / name).read_text() for name in platform_headers(config.family))
    if platform == "cuda":
        head = environment.get_template("kernels/head.j2").render(
            **constants,
            spec=spec,
            config=config,
            params=PARAMS[spec.kind],
            num_threads=config.num_threads,
            spec_text=_assignments(spec.canonical()),
            config_text=_assignments(config.canonical()),
        )
        text = "\n".join((head, types, *primitives, body))
    else:
        text = "\n".join((types, HOST_INCLUDE, body))
    return KernelSource(
        spec=spec,
        config=config,
        platform=platform,
        text=text,
        body=body,
        entry=entry,
        num_threads=config.num_threads,
        smem_bytes=smem_plan(spec, config).total,
    )
