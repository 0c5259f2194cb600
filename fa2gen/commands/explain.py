"""``fa2gen explain``: what bounds a kernel on a GPU, and which configs are legal."""

from __future__ import annotations

import json

import click

from .options import (
    config_option,
    gpu_option,
    json_option,
    kinds_of,
    make_spec,
    one_kind_options,
    one_spec_options,
    parse_config,
    resolve_gpu,
    seqlen_options,
)


@click.command("explain")
@one_kind_options
@one_spec_options
@gpu_option("GPU to explain it for. [default: the one found, else a100]")
@seqlen_options(2048, minimum=1)
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="N", help="Sequences. [default: about 16384 tokens in all]"
)
@click.option(
    "--heads", type=click.IntRange(min=1), metavar="N", help="Query heads. [default: about 2048 columns in all]"
)
@config_option("explain")
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=True,
    show_default=True,
    help="Take registers and spills from ptxas where nvcc is found, or estimate them.",
)
@click.option("--all", "list_excluded", is_flag=True, help="List every excluded config with its reason.")
@json_option
def command(
    kind: str,
    deterministic: bool,
    head_dim: int,
    dtype: str,
    causal: bool,
    gqa_ratio: int,
    gpu_name: str | None,
    seqlen_q: int,
    seqlen_k: int | None,
    batch: int | None,
    heads: int | None,
    config: str,
    compiled: bool,
    list_excluded: bool,
    as_json: bool,
) -> None:
    """Show what bounds a kernel on a GPU, which config the tables choose, and why others are excluded.

    FLOPs; HBM bytes of standard attention and of this kernel; the roofline; shared memory, registers, occupancy, waves;
    the time the performance model predicts by resource, and the measured one where a table has it. Of a backward the
    main kernel of three; traffic and time are those of all. No GPU is needed.

    \b
    Examples:
      fa2gen explain --headdim 128 --causal --gpu a100 --seqlen-q 4096
      fa2gen explain --headdim 64 --gpu rtx-4090 --config sm80_128x128s64_w4_st3_qs_online_mb1
      fa2gen explain --kind bwd --headdim 128 --gpu h200
    """
    from ..explain import explain
    from ..tuning.report import usual_problem

    kinds_of(kind, deterministic=deterministic)
    spec = make_spec(kind, head_dim, dtype, causal=causal, gqa_ratio=gqa_ratio, deterministic=deterministic)
    chosen = parse_config(config, kind)
    gpu = resolve_gpu(gpu_name, default="a100")
    problem = usual_problem(spec, seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, batch=batch, heads=heads)
    explanation = explain(spec, problem, gpu, config=chosen, compile=compiled)
    if as_json:
        from .explain_json import explanation_json

        click.echo(json.dumps(explanation_json(explanation, list_excluded=list_excluded), indent=2))
    else:
        from .explain_text import explanation_text

        click.echo(explanation_text(explanation, list_excluded=list_excluded))
