"""``fa2gen emit``: kernels as files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import (
    config_option,
    given,
    gpu_option,
    json_option,
    kind_options,
    kinds_of,
    make_specs,
    out_option,
    parse_config,
    resolve_gpu,
    seqlen_options,
    spec_options,
)

if TYPE_CHECKING:
    from ..emit import EmittedKernel


@click.command("emit")
@kind_options
@spec_options(gqa=(1,))
@gpu_option("GPU whose tuned configs and target are used. [default: the one found, else a100]")
@seqlen_options(2048)
@config_option("emit")
@out_option("Folder for the files.", checked=False)
@click.option("--stdout", "to_stdout", is_flag=True, help="Print one kernel instead of writing files.")
@json_option
def command(
    kind: str,
    deterministic: bool,
    headdims: tuple[int, ...],
    dtypes: tuple[str, ...],
    causal: bool | None,
    gqa_ratios: tuple[int, ...],
    gpu_name: str | None,
    seqlen_q: int,
    seqlen_k: int | None,
    config: str,
    out: Path | None,
    to_stdout: bool,
    as_json: bool,
) -> None:
    """Write kernels as CUDA files that nvcc compiles alone.

    Every combination of the options is one file, or three of a backward; the lengths say which tuned config it gets,
    the kernel serves any. With them come manifest.json (specs, configs, launch rules, parameters), main.cpp (launches
    the kernels through the CUDA driver API and checks the results), a Makefile and a README.md.

    \b
    Examples:
      fa2gen emit --headdim 128 --causal --gpu a100 -o out/
      nvcc -cubin -arch=sm_80 out/fwd_d128_bf16_causal_gqa1.cu
      fa2gen emit --kind both --headdim 128 --gpu h200 -o out/
      fa2gen emit --headdim 64 --dtype fp16 --causal --config default --stdout
      fa2gen emit --headdim 128 --gpu h200 --config sm90_128x128_st2_q1_ov_pp_static_tma -o out/
    """
    from ..emit import EXTRA_FILES, choose, emit, manifest

    if (out is None) != to_stdout:
        raise click.UsageError("give either --out or --stdout", click.get_current_context())
    if to_stdout and as_json:
        raise click.UsageError(
            "--json tells what --out wrote; it does not go with --stdout", click.get_current_context()
        )
    kinds = kinds_of(kind, deterministic=deterministic)
    specs = make_specs(headdims, dtypes, causal, gqa_ratios, kinds, deterministic=deterministic)
    parsed = parse_config(config, kind)
    chosen = None if parsed == "tuned" else parsed
    if chosen is not None and (given("seqlen_q") or given("seqlen_k")):
        raise click.UsageError(
            "--seqlen-q and --seqlen-k choose among the tuned configs; they do not go with --config",
            click.get_current_context(),
        )
    gpu = resolve_gpu(gpu_name, default="a100")
    if out is None:
        if "bwd" in kinds:
            raise click.UsageError(
                "--stdout prints one kernel, a backward is three: give --out", click.get_current_context()
            )
        if len(specs) > 1:
            raise click.UsageError(
                f"--stdout prints one kernel, the options name {len(specs)}: "
                "give --headdim, --dtype, --causal or --no-causal, and --gqa once each",
                click.get_current_context(),
            )
        (kernel,) = choose(specs[0], gpu, seqlen_q=seqlen_q, seqlen_k=seqlen_k, config=chosen)
        click.echo(kernel.source.text, nl=False)
        return
    kernels = emit(specs, gpu, out, seqlen_q=seqlen_q, seqlen_k=seqlen_k, config=chosen)
    form = manifest(kernels, gpu)
    if as_json:
        files = [*(kernel.file for kernel in kernels), *EXTRA_FILES]
        click.echo(json.dumps({"out": str(out), "files": files, **form}, indent=2))
        return
    _report(kernels, out)
    make = f"make -C {shlex.quote(str(out))}"
    # Kernels of the sm90 family have one target, which is not the chip's.
    built = [gpu.target if gpu.target in entry["targets"] else entry["targets"][0] for entry in form["kernels"]]
    click.echo(f"{out / EXTRA_FILES[0]}, {', '.join(EXTRA_FILES[1:])}: {make}, for {' and '.join(sorted(set(built)))}")


def _report(kernels: list[EmittedKernel], out: Path) -> None:
    for kernel in kernels:
        click.echo(f"{out / kernel.file}")
        # The kernels around a backward's main one have its config.
        if kernel.source.kernel == kernel.source.spec.kind:
            click.echo(f"  {kernel.match.describe()}")
