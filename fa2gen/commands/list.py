"""``fa2gen list``: the GPUs that fa2gen knows, and the kernels it can make."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..constraints import families_on
from ..hardware import Gpu, get_gpu, list_gpus
from ..spec import ALIGNMENTS, DTYPES, FAMILIES, KINDS, MAX_GQA_RATIO, NATIVE_HEAD_DIMS, SOFTMAXES, KernelSpec
from .options import gpu_option, json_option

if TYPE_CHECKING:
    from ..tables import TunedEntry


@click.group("list", no_args_is_help=False)
def command() -> None:
    """List the GPUs that fa2gen knows, or the kernels it can make.

    \b
    Examples:
      fa2gen list gpus
      fa2gen list kernels --gpu rtx-4090
    """


@command.command("gpus", short_help="List the GPUs that fa2gen knows.")
@click.option("--verbose", "-v", is_flag=True, help="Also the source of each row, and the names the driver reports.")
@json_option
def gpus(verbose: bool, as_json: bool) -> None:
    """List the GPUs that fa2gen knows, with their figures and what is tuned for them.

    TFLOP/s is the peak of mma.sync with 16-bit inputs and float32 sums at the maximum clock: what the sm80 kernels can
    use. Families are those of the forward's kernels that run there. Tables are measured on the chip or predicted by the
    performance model, an entry for each kernel, family and size class; stale entries were made with other templates.

    \b
    Examples:
      fa2gen list gpus
      fa2gen list gpus --json
    """
    rows = [{**_gpu_row(gpu), "tables": _tables(gpu)} for gpu in list_gpus()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    columns = ("name", "GPU", "cc", "SMs", "GHz", "GB", "GB/s", "L2 MiB", "TFLOP/s", "families", "tables")
    cells = [
        (
            row["name"], row["title"], row["compute_capability"], str(row["num_sms"]), f"{row['boost_ghz']:.3f}",
            str(row["memory_gb"]), f"{row['hbm_gbs']:,.0f}", str(row["l2_bytes"] >> 20), f"{row['mma_tflops']:.1f}",
            " ".join(row["families"]), _tables_text(row["tables"]),
        )
        for row in rows
    ]  # fmt: skip
    for row, line in zip([None, *rows], _aligned([columns, *cells], left=(0, 1, 9, 10)), strict=True):
        click.echo(line)
        if verbose and row is not None:
            click.echo(f"    {', '.join(row['device_names'])}\n    {row['source']}")


def _gpu_row(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "title": gpu.title,
        "compute_capability": "{}.{}".format(*gpu.compute_capability),
        "target": gpu.target,
        "num_sms": gpu.num_sms,
        "boost_ghz": gpu.boost_ghz,
        "memory_gb": gpu.memory_gb,
        "hbm_gbs": gpu.hbm_gbs,
        "l2_bytes": gpu.l2_bytes,
        "mma_tflops": gpu.mma_tflops,
        "families": list(families_on(KernelSpec(), gpu.arch)),
        "device_names": list(gpu.device_names),
        "source": gpu.source,
    }


def _tables(gpu: Gpu) -> dict[str, int]:
    """Tuned entries for a GPU in the package's and the user's tables together, one a kernel, family and size class.

    ``stale`` ones, which are among the others, were made with other templates and have not passed the gate since.
    """
    from ..codegen import template_hash
    from ..tables.merge import is_current, is_gated, merge_entries
    from ..tables.store import cached_table, search_dirs, table_path

    counts = {"measured": 0, "predicted": 0, "stale": 0}
    for kind in KINDS:
        merged: tuple[TunedEntry, ...] = ()
        for root in reversed(search_dirs()):
            table = cached_table(table_path(root, gpu.name, kind))
            merged = merge_entries(merged, table.entries if table else (), template_hash=template_hash)
        for entry in merged:
            counts[entry.measurement.kind] += 1
            counts["stale"] += not is_current(entry, template_hash) and not is_gated(entry, template_hash)
    return counts


def _tables_text(counts: dict[str, int]) -> str:
    known = ", ".join(f"{counts[kind]} {kind}" for kind in ("measured", "predicted") if counts[kind]) or "none"
    return f"{known} ({counts['stale']} stale)" if counts["stale"] else known


@command.command("kernels", short_help="List the kernels that fa2gen can make.")
@click.option("--kind", type=click.Choice(KINDS), help="Only forward or only backward kernels. [default: both]")
@gpu_option("Also count the configs that are legal on this GPU.")
@json_option
def kernels(kind: str | None, gpu_name: str | None, as_json: bool) -> None:
    """List the kernels that fa2gen can make: what they support, and the templates that make them.

    A backward is three kernels, which are made, tuned and stored together. The hash is over those templates: a tuned
    entry with another one is stale.

    \b
    Examples:
      fa2gen list kernels
      fa2gen list kernels --gpu a100 --json
    """
    gpu = get_gpu(gpu_name) if gpu_name is not None else None
    kinds = KINDS if kind is None else (kind,)
    rows = [_kernel_row(each, family, gpu) for each in kinds for family in FAMILIES[each]]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['kind']}, family {row['family']}")
        low, high = row["head_dims"]
        *narrower, widest = row["native_head_dims"]
        multiple = "" if row["head_dim_multiple"] == 1 else f", multiples of {row['head_dim_multiple']}"
        lines = {
            "kernels": f"{', '.join(row['kernels'])}, in this order" if len(row["kernels"]) > 1 else "",
            "head dims": f"{low} to {high}{multiple}; tiles have {', '.join(map(str, narrower))} or {widest} columns",
            "dtypes": f"{', '.join(row['dtypes'])}; sums, softmax and log-sum-exp in float32",
            "masks": f"{', '.join(row['masks'])} (bottom-right)",
            "heads": f"1 to {row['max_gqa_ratio']} query heads per key/value head",
            "rows": f"{' or '.join(map(str, row['alignments']))}-byte aligned; head dim contiguous, other strides any",
            "softmax": ", ".join(row.get("softmaxes", ())),
            "gradients": "sums of dq in any order, or deterministic" if row["kind"] == "bwd" else "",
            "runs on": ", ".join(row["targets"]),
            "templates": ", ".join(row["templates"]),
            "template hash": row["template_hash"],
        }
        if gpu is not None:
            counts = ", ".join(f"{count:,} for head dim {width}" for width, count in row["legal_configs"].items())
            lines[f"legal on {gpu.name}"] = f"{counts}, of {row['configs']:,}"
        for name, text in ((name, text) for name, text in lines.items() if text):
            click.echo(textwrap.fill(text, 100, initial_indent=f"  {name:<16}  ", subsequent_indent=" " * 20))


def _kernel_row(kind: str, family: str, gpu: Gpu | None) -> dict[str, Any]:
    from ..codegen import kernels_of, manifest, template_hash
    from ..constraints import default_config_of
    from ..constraints_sm90 import compile_target, padded_columns
    from ..hardware import arch_limits, supported_compute_capabilities

    # A call with other head dims pads them, one with other views copies them or runs another family.
    unaligned = (kind, family) == ("fwd", "sm80")
    multiple = 1 if unaligned else 8
    widths = NATIVE_HEAD_DIMS if family == "sm80" else tuple(dict.fromkeys(map(padded_columns, NATIVE_HEAD_DIMS)))
    config, archs = default_config_of(KernelSpec(kind), family), map(arch_limits, supported_compute_capabilities())
    row: dict[str, Any] = {
        "kind": kind,
        "family": family,
        "kernels": list(kernels_of(kind)),
        "head_dims": [multiple, NATIVE_HEAD_DIMS[-1]],
        "head_dim_multiple": multiple,
        "native_head_dims": list(widths),
        "dtypes": list(DTYPES),
        "masks": ["full", "causal"],
        "max_gqa_ratio": MAX_GQA_RATIO,
        "alignments": list(ALIGNMENTS) if unaligned else [16],
        **({"softmaxes": list(SOFTMAXES)} if kind == "fwd" else {"deterministic": [False, True]}),
        "targets": [
            compile_target(config, arch.target) for arch in archs if family in families_on(KernelSpec(kind), arch)
        ],
        "templates": list(manifest(kind, family)),
        "template_hash": template_hash(kind, family),
    }
    if gpu is not None:
        from ..tuning.space import GRIDS, legal_space

        row["gpu"] = gpu.name
        row["configs"] = len(GRIDS[kind][family].configs(False))
        row["legal_configs"] = {
            str(width): len(legal_space(KernelSpec(kind, width), gpu, family).configs) for width in widths
        }
    return row


def _aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    """Columns padded to their widest cell: the numbered ones to the left, the rest to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
