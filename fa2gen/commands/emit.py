"""``fa2gen emit``: kernels as files."""

from __future__ import annotations

from pathlib import Path

import click

from .options import gpu_option, make_specs, resolve_gpu, seqlen_options, spec_options


@click.command("emit")
@spec_options(gqa=(1,))
@gpu_option("GPU whose tuned configs and target are used. [default: the one found, else a100]")
@seqlen_options(2048)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder for the files.",
)
def command(
    headdims: tuple[int, ...],
    dtypes: tuple[str, ...],
    causal: bool | None,
    gqa_ratios: tuple[int, ...],
    gpu_name: str | None,
    seqlen_q: int,
    seqlen_k: int | None,
    out: Path,
) -> None:
    """Write kernels as CUDA files that nvcc compiles alone.

    Every combination of the options is one file; the lengths say which tuned config it gets, the kernel serves any.
    With them come manifest.json (specs, configs, launch rules, parameters), main.cpp (launches the kernels through the
    CUDA driver API and checks the results) and a Makefile.

    \b
    Example:
      fa2gen emit --headdim 128 --causal --gpu a100 -o out/
      nvcc -cubin -arch=sm_80 out/fwd_d128_bf16_causal_gqa1.cu
    """
    from ..emit import emit as write

    specs = make_specs(headdims, dtypes, causal, gqa_ratios)
    gpu = resolve_gpu(gpu_name, default="a100")
    kernels = write(specs, gpu, out, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    for kernel in kernels:
        click.echo(f"{out / kernel.file}")
        click.echo(f"  {kernel.match.describe()}")
    click.echo(f"{out / 'main.cpp'}, manifest.json, Makefile: make -C {out}, for {gpu.target}")
