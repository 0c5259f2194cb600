"""Kernel time of the forward against the peers found on this machine, interleaved in one run.

    python benchmarks/forward.py --headdim 64 --headdim 128 --out benchmarks/results/forward.json

Every cell holds 16k tokens and a hidden size of 2048 (``--tokens``, ``--hidden``). Kernel time is that of a CUDA-graph
replay, so host time takes no part; a graph walks over several sets of random inputs, so that no call finds its inputs
in L2. In each round every implementation is replayed once, in turn; a cell's figure is the median over the rounds, with
the 20th and 80th percentile. FLOPs count visible query-key pairs only.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa2gen
from fa2gen.driver import device_info
from fa2gen.problem import Problem
from fa2gen.runtime import attention, describe
from fa2gen.spec import KernelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Implementation = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def _sdpa(backend: SDPBackend) -> Implementation:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=causal,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return out.transpose(1, 2)

    return call


def implementations() -> dict[str, Implementation]:
    """fa2gen and the peers that import here: SDPA's FlashAttention-2 and cuDNN, FlashAttention-3 if it is installed."""
    found: dict[str, Implementation] = {
        "fa2gen": lambda q, k, v, causal: attention(q, k, v, causal=causal),
        "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
        "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return found

    def fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return found | {"fa3": fa3}


def capture(call: Implementation, inputs: list[tuple[Tensor, Tensor, Tensor]], causal: bool) -> torch.cuda.CUDAGraph:
    """A graph of one call for each set of inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for q, k, v in inputs[:2]:
            call(q, k, v, causal)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for q, k, v in inputs:
            call(q, k, v, causal)
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure_cell(
    calls: dict[str, Implementation], spec: KernelSpec, problem: Problem, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds (median, p20, p80) and TFLOP/s of every implementation that takes this cell."""
    dtype = DTYPES[spec.dtype]
    shape_q = (problem.batch, problem.seqlen_q, problem.num_heads_q, spec.head_dim)
    shape_k = (problem.batch, problem.seqlen_k, problem.num_heads_k, spec.head_dim)
    sets = [
        tuple(torch.randn(shape, device="cuda", dtype=dtype) for shape in (shape_q, shape_k, shape_k)) for _ in range(3)
    ]
    inputs = sets * (2 if problem.seqlen_q <= 2048 else 1)
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = capture(call, inputs, spec.causal)
        except Exception as error:  # a peer that does not take this cell leaves it empty
            if name == "fa2gen":
                raise
            torch.cuda.synchronize()
            click.echo(f"  {name}: {str(error).splitlines()[0][:100]}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_ms(graph) / len(inputs))
    result = {}
    for name, ms in times.items():
        p20, median, p80 = (statistics.quantiles(ms, n=10, method="inclusive")[i] for i in (1, 4, 7))
        result[name] = {"ms": median, "p20": p20, "p80": p80, "tflops": problem.flops(spec) / median / 1e9}
    return result


def provenance() -> dict[str, Any]:
    info = device_info(0)
    return {
        "gpu": info.name,
        "driver": info.driver_version,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "fa2gen": fa2gen.__version__,
        "utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "method": "CUDA-graph replay, three rotating sets of normal random inputs, interleaved rounds, median",
    }


@click.command(help=__doc__)
@click.option("--headdim", type=int, multiple=True, default=(64, 128), show_default=True)
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="bf16", show_default=True)
@click.option("--gqa", type=int, default=1, show_default=True, help="Query heads per key/value head.")
@click.option("--seqlen", type=int, multiple=True, default=(512, 1024, 2048, 4096, 8192, 16384), show_default=True)
@click.option("--tokens", type=int, default=16384, show_default=True)
@click.option("--hidden", type=int, default=2048, show_default=True)
@click.option("--rounds", type=int, default=7, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file for the rows.")
def main(
    headdim: tuple[int, ...],
    dtype: str,
    gqa: int,
    seqlen: tuple[int, ...],
    tokens: int,
    hidden: int,
    rounds: int,
    out: Path | None,
) -> None:
    calls = implementations()
    rows: list[dict[str, Any]] = []
    for head_dim in headdim:
        for causal in (False, True):
            spec = KernelSpec(head_dim=head_dim, dtype=dtype, causal=causal, gqa_ratio=gqa)
            heads = hidden // head_dim
            click.echo(f"{spec.slug()}, TFLOP/s at {', '.join(map(str, seqlen))} tokens a sequence")
            for length in seqlen:
                problem = Problem(tokens // length, length, length, heads, heads // gqa)
                cell = measure_cell(calls, spec, problem, rounds)
                q = torch.empty(problem.batch, length, heads, head_dim, device="cuda", dtype=DTYPES[dtype])
                kv = torch.empty(problem.batch, length, heads // gqa, head_dim, device="cuda", dtype=DTYPES[dtype])
                chosen = describe(q, kv, kv, causal=causal)
                rows.append(
                    {
                        "spec": spec.canonical(),
                        "seqlen": length,
                        "config": chosen.config.slug() if chosen.config else None,
                        "cells": cell,
                    }
                )
            for name in calls:
                figures = [row["cells"].get(name) for row in rows[-len(seqlen) :]]
                click.echo(f"  {name:8s}" + " ".join(f"{f['tflops']:6.0f}" if f else "     -" for f in figures))
    for peer in calls:
        ratios = [r["cells"][peer]["ms"] / r["cells"]["fa2gen"]["ms"] for r in rows if peer in r["cells"]]
        if peer != "fa2gen" and ratios:
            geomean = math.exp(statistics.fmean(map(math.log, ratios)))
            click.echo(f"fa2gen / {peer}: geomean {geomean:.3f}, worst {min(ratios):.3f}, over {len(ratios)} cells")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
