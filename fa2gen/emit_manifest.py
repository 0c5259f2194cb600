"""What a program needs to know of emitted kernels to compile and launch them: the contents of ``manifest.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import __version__
from .codegen import KernelSource, ParamStruct, grid_rule, param_struct, template_hash
from .config_sm90 import GROUP_ROWS
from .constraints_sm90 import TARGET as SM90_TARGET
from .hardware import Gpu, arch_limits, supported_compute_capabilities
from .problem import Problem
from .spec import BwdConfig, Config, FwdSm90Config, KernelSpec
from .tables import Match
from .tensor_map import BYTES, PANEL_COLUMNS

_FIELD_BYTES = {"TensorMap": BYTES, "pointer": 8, "i64": 8, "int": 4, "float": 4}


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


def manifest(kernels: Sequence[EmittedKernel], gpu: Gpu) -> dict[str, Any]:
    """The document, as JSON.

    The kernels of a backward follow each other in the order in which they are launched, one after the other on a
    stream; workspaces of the same name are the same memory.
    """
    return {
        "fa2gen": __version__,
        "gpu": gpu.name,
        "target": gpu.target,
        "kernels": [_entry(kernel) for kernel in kernels],
    }


def targets(source: KernelSource) -> list[str]:
    """What a kernel may be compiled for: chips that have its instructions and the shared memory of a block."""
    if isinstance(source.config, FwdSm90Config):
        return [SM90_TARGET]
    chips = map(arch_limits, supported_compute_capabilities())
    return [chip.target for chip in chips if source.smem_bytes <= chip.max_smem_per_block]


def workspace_rules(spec: KernelSpec, config: Config) -> dict[str, str]:
    """Scratch memory of a call: pointer to bytes, as formulas like ``codegen.grid_rule``; {} where there is none.

    Its contents do not matter, but for tickets, which are 0 before their first launch. Launches that may run at the
    same time do not share it.
    """
    if isinstance(config, FwdSm90Config):
        return {"tickets": "8"} if config.scheduler == "dynamic" else {}
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


def tensor_map_rules(spec: KernelSpec, config: FwdSm90Config) -> dict[str, dict[str, Any] | None]:
    """Field to the arguments of ``cuTensorMapEncodeTiled`` that make its map; None: the kernel does not read it.

    Sizes and strides are formulas of the call's sizes and of its tensors' strides in elements; axes are (column, row,
    head, batch).
    """
    heads_k = "num_heads" if spec.gqa_ratio == 1 else f"num_heads / {spec.gqa_ratio}"
    queries, keys = ("seqlen_q", "num_heads", GROUP_ROWS), ("seqlen_k", heads_k, config.block_n)
    return {
        "q_map": _tensor_map(spec, "q", *queries),
        "k_map": _tensor_map(spec, "k", *keys),
        "v_map": _tensor_map(spec, "v", *keys),
        "o_map": _tensor_map(spec, "o", *queries) if config.epilogue == "tma" else None,
    }


def _tensor_map(spec: KernelSpec, tensor: str, rows: str, heads: str, box_rows: int) -> dict[str, Any]:
    return {
        "tensor": tensor,
        "data_type": f"CU_TENSOR_MAP_DATA_TYPE_{'BFLOAT16' if spec.dtype == 'bf16' else 'FLOAT16'}",
        # No axis may be empty; of a tensor without rows nothing is loaded.
        "sizes": [str(spec.head_dim), f"max({rows}, 1)", heads, "batch"],
        "strides_bytes": [f"{tensor}_{axis}_stride * 2" for axis in ("row", "head", "batch")],
        "box": [PANEL_COLUMNS, box_rows, 1, 1],
        "element_strides": [1, 1, 1, 1],
        "interleave": "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "swizzle": "CU_TENSOR_MAP_SWIZZLE_128B",
        "l2_promotion": "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "oob_fill": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    }


def _entry(kernel: EmittedKernel) -> dict[str, Any]:
    source, match, problem = kernel.source, kernel.match, kernel.problem
    spec, config = source.spec, source.config
    params = param_struct(source.kernel, config.family)
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
    maps = tensor_map_rules(spec, config) if isinstance(config, FwdSm90Config) else {}
    return {
        "file": kernel.file,
        "entry": source.entry,
        "kernel": source.kernel,
        "spec": spec.canonical(),
        "config": config.canonical(),
        "targets": targets(source),
        "launch": {
            "grid": [grid_rule(spec, config, source.kernel), "1", "1"],
            "block": [source.num_threads, 1, 1],
            "dynamic_smem_bytes": source.smem_bytes,
            "max_dynamic_smem_must_be_set": source.smem_bytes > 48 * 1024,
        },
        "workspaces": {name: rule for name, rule in workspace_rules(spec, config).items() if name in params.pointers},
        "alignment_bytes": spec.alignment,
        "parameters": {"struct": params.name, "bytes": params.size, "fields": _field_list(params, maps)},
        "config_chosen": chosen,
        "template_hash": template_hash(spec.kind, config.family),
    }


def _field_list(params: ParamStruct, maps: dict[str, dict[str, Any] | None]) -> list[dict[str, Any]]:
    fields, offset = [], 0
    for field in params.fields:
        form = {"name": field.name, "type": field.kind, "offset": offset, "meaning": field.meaning}
        if field.name in maps:
            form["tensor_map"] = maps[field.name]
        fields.append(form)
        offset += _FIELD_BYTES[field.kind]
    return fields
