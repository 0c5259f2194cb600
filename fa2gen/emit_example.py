"""The C++ program, Makefile and README that are written beside emitted kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from . import __version__
from .codegen import KernelSource, grid_rule, param_struct
from .constraints_backward import POSTPROCESS_ROWS, PREPROCESS_ROWS
from .constraints_sm90 import TARGET as SM90_TARGET
from .data import data_dir
from .hardware import Gpu
from .spec import BwdConfig, FwdSm90Config
from .tiles import rows_per_pass

#: What is written beside the kernels and their manifest.
EXAMPLE_FILES = ("main.cpp", "Makefile", "README.md")

# Field kind of the kernels' parameter structs -> type in host code.
_HOST_TYPES = {
    "TensorMap": "CUtensorMap",
    "pointer": "CUdeviceptr",
    "i64": "int64_t",
    "int": "int",
    "float": "float",
}


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
    structs = dict.fromkeys((source.kernel, source.config.family) for call in calls for _, source in call.kernels)
    families = {call.main.config.family for call in calls if call.main.spec.kind == "fwd"}
    fillers = {
        "`make_params`": "sm80" in families,
        "`make_sm90_params`": "sm90" in families,
        "`make_backward_params`": bool(backward),
    }
    context = {
        "version": __version__,
        "gpu": gpu.name,
        "target": gpu.target,
        "cubins": [step["cubin"] for step in steps],
        "structs": [_struct(*name) for name in structs],
        "sm80": "sm80" in families,
        "sm90": "sm90" in families,
        "only_sm90": families == {"sm90"} and not backward,
        "sm90_target": SM90_TARGET,
        "sm90_flags": f"-gencode arch={SM90_TARGET.replace('sm', 'compute')},code={SM90_TARGET}",
        "draws": any(call["drawn"] == "true" for call in forward),
        "sections": any(call["section_mib"] for call in forward),
        "fillers": [name for name, has in fillers.items() if has],
        "sm90_cubins": [step["cubin"] for call in forward if call["sm90"] for step in call["steps"]],
        "forward": forward,
        "backward": backward,
    }
    return {
        name: environment.get_template(f"emit/{name}.j2").render(context).rstrip("\n") + "\n" for name in EXAMPLE_FILES
    }


def _struct(kernel: str, family: str) -> dict[str, Any]:
    params = param_struct(kernel, family)
    fields = [(f.heading, f"{_HOST_TYPES[f.kind]} {f.name};", f.meaning) for f in params.fields]
    # A folder may hold forwards of both families, whose files use the same name.
    name = "FwdSm90Params" if (kernel, family) == ("fwd", "sm90") else params.name
    return {"name": name, "kernels_name": params.name, "bytes": params.size, "fields": fields}


def _common(call: Call) -> dict[str, Any]:
    spec, config = call.main.spec, call.main.config
    return {
        "steps": [_step(file, source) for file, source in call.kernels],
        "dtype": spec.dtype,
        "head_dim": spec.head_dim,
        "gqa_ratio": spec.gqa_ratio,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "bf16": _literal(spec.dtype == "bf16"),
        "causal": _literal(spec.causal),
        "mask": "causal" if spec.causal else "none",
    }


def _forward(call: Call) -> dict[str, Any]:
    spec, config = call.main.spec, call.main.config
    assert not isinstance(config, BwdConfig)
    (step,) = (_step(file, source) for file, source in call.kernels)
    sm90 = isinstance(config, FwdSm90Config)
    return (
        _common(call)
        | step
        | {
            "packed_heads": spec.gqa_ratio if config.pack_gqa else 1,
            "rows_per_pass": 0 if isinstance(config, FwdSm90Config) else rows_per_pass(spec, config),
            "sm90": sm90,
            "is_sm90": _literal(sm90),
            "drawn": _literal(isinstance(config, FwdSm90Config) and config.scheduler == "dynamic"),
            "stored_by_tma": _literal(isinstance(config, FwdSm90Config) and config.epilogue == "tma"),
            "section_mib": config.section_mib if isinstance(config, FwdSm90Config) else 0,
        }
    )


def _backward(call: Call) -> dict[str, Any]:
    spec, config = call.main.spec, call.main.config
    assert isinstance(config, BwdConfig)
    return _common(call) | {
        "rows_per_pass": rows_per_pass(spec, config),
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
