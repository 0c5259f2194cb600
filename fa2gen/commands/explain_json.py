"""An explanation as one JSON document: everything the text shows, unrounded."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..explain import Explanation, MeasuredTime
from ..hardware import Gpu
from ..roofline import Roofline, Traffic
from ..spec import Config
from ..tuning.model import model_version, validity


def explanation_json(e: Explanation, *, list_excluded: bool = False) -> dict[str, Any]:
    """The document; infinite times are null.

    Args:
        e: The explanation.
        list_excluded: Every excluded config with its reason, not only their counts.
    """
    memory, roof, intensity = e.memory, e.roofline, e.memory.tiled.intensity
    return {
        "gpu": _gpu(e.gpu),
        "spec": {"slug": e.spec.slug(), **e.spec.canonical()},
        "problem": {**dataclasses.asdict(e.problem), "bucket": e.problem.bucket(e.gpu.num_sms).label()},
        "work": {"flops": e.flops, "executed_flops": e.executed_flops},
        "traffic": {
            "standard": _traffic(memory.standard, roof),
            "tiled": _traffic(memory.tiled, roof),
            "tiled_without_l2": _traffic(memory.uncached, roof),
            "reread_bytes_per_head": memory.reread_bytes,
            "l2_bytes": memory.l2_bytes,
            "heads_per_section": memory.heads_per_section,
            "heads_per_section_by_l2": memory.heads_by_l2,
            "reread_bytes_per_section": memory.section_bytes,
            "reread_bytes_in_use": memory.used_bytes,
            "reread_bytes_of_tail": memory.tail_bytes,
            "l2_serves_rereads": memory.l2_serves,
        },
        "roofline": {
            "peak_tflops": roof.peak_tflops,
            "instruction": roof.instruction,
            "hbm_gbs": roof.hbm_gbs,
            "ridge_point": roof.ridge_point,
            "intensity": intensity,
            "bound": roof.bound(intensity),
            "attainable_tflops": roof.attainable_tflops(intensity),
        },
        "config": _config(e),
        "shared_memory": {
            "bytes": e.smem_bytes,
            "limit": e.gpu.arch.max_smem_per_block,
            "areas": [
                {"name": name, "offset": offset, "bytes": size, "shape": shape}
                for name, offset, size, shape in e.smem_areas()
            ],
        },
        "registers": _registers(e),
        "occupancy": {
            "blocks_per_sm": e.occupancy.blocks_per_sm,
            "warps_per_sm": e.occupancy.warps_per_sm,
            "max_warps_per_sm": e.gpu.arch.max_warps_per_sm,
            "limiters": list(e.occupancy.limiters),
            "blocks_by_limit": e.occupancy.blocks_by_limit,
        },
        "launches": [
            {"kernel": step.kernel, "blocks": step.grid[0], "threads": step.num_threads, "smem_bytes": step.smem_bytes}
            for step in e.plan.launches
        ],
        "workspaces": {workspace.pointer: workspace.num_bytes for workspace in e.plan.workspaces},
        "grid": {
            "blocks": e.grid.blocks,
            "persistent": e.grid.persistent,
            "tiles": e.grid.work,
            "blocks_per_wave": e.grid.wave,
            "waves": e.grid.waves,
            "full_waves": e.grid.full_waves,
            "tail_blocks": e.grid.tail,
            "tiles_per_block": [e.grid.full_waves, e.grid.full_waves + bool(e.grid.tail)]
            if e.grid.persistent
            else [1, 1],
            "efficiency": e.grid.efficiency,
        },
        "prediction": {
            "model_version": model_version(e.spec.kind, e.selection.config.family),
            "validity": validity(e.gpu, e.spec.kind, e.selection.config.family),
            "ms": e.prediction.ms if e.tflops else None,
            "tflops": e.tflops,
            "limit": e.prediction.limit,
            "ms_by_resource": e.prediction.shares,
        },
        "measured": [_measured(time) for time in e.measured],
        "space": {
            "legal": e.legal,
            "excluded": sum(len(group.configs) for group in e.excluded),
            "groups": [
                {"reason": group.reason, "count": len(group.configs)}
                | ({"configs": _reasons(group.configs)} if list_excluded else {})
                for group in e.excluded
            ],
        },
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "title": gpu.title,
        "target": gpu.target,
        "num_sms": gpu.num_sms,
        "boost_ghz": gpu.boost_ghz,
        "hbm_gbs": gpu.hbm_gbs,
        "l2_bytes": gpu.l2_bytes,
        "mma_tflops": gpu.mma_tflops,
        "source": gpu.source,
    }


def _traffic(traffic: Traffic, roof: Roofline) -> dict[str, Any]:
    return {
        "flops": traffic.flops,
        "bytes": traffic.bytes,
        "intensity": traffic.intensity,
        "least_ms": roof.least_ms(traffic),
        "bound": roof.bound(traffic.intensity),
        "passes": [{"what": what, "bytes": size} for what, size in traffic.passes],
    }


def _config(e: Explanation) -> dict[str, Any]:
    selection, match = e.selection, e.selection.match
    entry = match.entry
    return {
        "slug": selection.config.slug(),
        **selection.config.canonical(),
        "origin": selection.origin,
        "why": selection.why,
        "excluded": selection.excluded,
        "illegal": selection.illegal,
        "lookup": {
            "slug": match.config.slug(),
            "source": match.source,
            "distance": match.distance,
            "stale": match.stale,
            "gpu": match.gpu or None,
            "kind": entry.measurement.kind if entry else None,
            "spec": entry.spec.slug() if entry else None,
            "bucket": entry.bucket.label() if entry else None,
        },
    }


def _registers(e: Explanation) -> dict[str, Any]:
    registers = e.registers
    resources = registers.compiled.resources if registers.compiled else None
    return {
        "source": "ptxas" if resources else "estimate",
        "note": registers.note,
        "registers": registers.facts.registers,
        "spill_bytes": registers.facts.spill_bytes,
        "spill_store_bytes": resources.spill_store_bytes if resources else None,
        "spill_load_bytes": resources.spill_load_bytes if resources else None,
        "stack_bytes": resources.stack_bytes if resources else None,
        "least": registers.least,
        "cap": registers.cap,
        "producer": registers.split.producer if registers.split else None,
        "consumer": registers.split.consumer if registers.split else None,
    }


def _measured(time: MeasuredTime) -> dict[str, Any]:
    measurement = time.entry.measurement
    return {
        "config": time.entry.config.slug(),
        "problem": dataclasses.asdict(measurement.problem),
        "ms": measurement.ms,
        "p20": measurement.p20,
        "p80": measurement.p80,
        "n": measurement.n,
        "tflops": measurement.problem.flops(time.entry.spec) / measurement.ms / 1e9,
        "predicted_ms": time.predicted_ms,
        "stale": time.stale,
    }


def _reasons(configs: tuple[tuple[Config, str], ...]) -> list[dict[str, str]]:
    return [{"slug": config.slug(), "reason": reason} for config, reason in configs]
