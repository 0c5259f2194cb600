"""The C++ program, Makefile and README that are written beside emitted kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from . import __version__
from .codegen import PARAMS, KernelSource, ParamStruct, grid_rule
from .constraints_backward import POSTPROCESS_ROWS, PREPROCESS_ROWS
from .data import data_dir
from .hardware import Gpu
from .spec import BwdConfig, FwdConfig
from .tiles import rows_per_pass

#: What is written beside the kernels and their manifest.
EXAMPLE_FILES = ("main.cpp", "Makefile", "README.md")

# Field kind of the kernels' parameter structs -> type in host code.
_HOST_TYPES = {"pointer": "CUdeviceptr", "i64": "int64_t", "int": "int", "float": "float"}


@dataclass(frozen=True)
class Call:
    """The kernels of one spec, in the order in which they run, each with its file's name."""

    kernels: tuple[tuple[str, KernelSource], ...]

    @property
    def main(self) -> KernelSource:
        """The kernel that has the kind's own name."""
        return next(source for _, source in self.kernels if source.kernel == source.spec.kind)


def example_files(calls: Sequence[Call], gpu: Gpu) -> dict[str, str]:
    """Name to text of ``EXAMPLE_FILES``.

    Args:
        calls: What was emitted, at least one.
        gpu: What it was emitted for.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    forward = [_forward(call) for call in calls if call.main.spec.kind == "fwd"]
    backward = [_backward(call) for call in calls if call.main.spec.kind == "bwd"]
    steps = [step for call in (*forward, *backward) for step in call["steps"]]
    names = [source.kernel for call in calls for _, source in call.kernels]
    context = {
        "version": __version__,
        "gpu": gpu.name,
        "target": gpu.target,
        "cubins": [step["cubin"] for step in steps],
        "structs": [_struct(PARAMS[name]) for name in dict.fromkeys(names)],
        "forward": forward,
        "backward": backward,
    }
    return {
        name: environment.get_template(f"emit/{name}.j2").render(context).rstrip("\n") + "\n" for name in EXAMPLE_FILES
    }


def _struct(params: ParamStruct) -> dict[str, Any]:
    fields = [(f.heading, f"{_HOST_TYPES[f.kind]} {f.name};", f.meaning) for f in params.fields]
    return {"name": params.name, "bytes": params.size, "fields": fields}


def _common(call: Call) -> dict[str, Any]:
    spec, config = call.main.spec, call.main.config
    return {
        "steps": [_step(file, source) for file, source in call.kernels],
        "dtype": spec.dtype,
        "head_dim": spec.head_dim,
        "gqa_ratio": spec.gqa_ratio,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "rows_per_pass": rows_per_pass(spec, config),
        "bf16": _literal(spec.dtype == "bf16"),
        "causal": _literal(spec.causal),
        "mask": "causal" if spec.causal else "none",
    }


def _forward(call: Call) -> dict[str, Any]:
    spec, config = call.main.spec, call.main.config
    assert isinstance(config, FwdConfig)
    (step,) = (_step(file, source) for file, source in call.kernels)
    return _common(call) | step | {"packed_heads": spec.gqa_ratio if config.pack_gqa else 1}


def _backward(call: Call) -> dict[str, Any]:
    spec, config = call.main.spec, call.main.config
    assert isinstance(config, BwdConfig)
    return _common(call) | {
        "width": spec.native_head_dim,
        "preprocess_rows": PREPROCESS_ROWS,
        "postprocess_rows": POSTPROCESS_ROWS,
        "deterministic": _literal(spec.deterministic),
        "split_heads": _literal(config.split_heads),
    }


def _step(file: str, source: KernelSource) -> dict[str, Any]:
    return {
        "file": file,
        "cubin": f"{file.removesuffix('.cu')}.cubin",
        "entry": source.entry,
        "grid": grid_rule(source.spec, source.config, source.kernel),
        "num_threads": source.num_threads,
        "smem_bytes": source.smem_bytes,
    }


def _literal(value: bool) -> str:
    return "true" if value else "false"
