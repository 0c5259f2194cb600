"""Training runs as text and as the summary document."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .gradients import CHECKED_TOKENS, LIMIT, PARTS, GradientErrors, largest_ratio
from .model import ATTENTIONS
from .runs import WARMUP_STEPS, Run, Setting, peak_tflops
from .text import VOCABULARY
from .verdict import FEWEST_SEEDS, SMOOTHING, Verdict, judge, smooth

SCHEMA = 1
METHOD = (
    f"step time: median of the steps after the first {WARMUP_STEPS}, each between CUDA events at the ends of "
    "consecutive steps (batch, forward, backward, clipping, AdamW and the copy to bf16 included); FLOPs: Megatron-LM's "
    "72 B S L h^2 (1 + S / 6h + V / 12 L h), attention's products in full although the mask spares half of them "
    "(mfu_causal: half); MFU: over the GPU's dense bf16 peak; curves: "
    f"means over {SMOOTHING} steps, all runs on the same batches, seeds differ in the first weights; two agree where "
    "their difference is at most the width of the band that the reference's seeds span, the largest within "
    f"{SMOOTHING} steps on either side"
)
GRADIENTS_METHOD = (
    "weights that a run of the reference's first seed ended with; gradients of the weights that make q, k and v, each "
    f"layer's, from {CHECKED_TOKENS} tokens (or a whole sequence) of one more batch; relative: norm of the difference "
    "from the gradients of the same model in float32 with torch's formula, over their norm"
)


def reference_of(attentions: Sequence[str]) -> str | None:
    """Whose seeds span the band: the first of torch's own that ran; None where fa2gen ran alone."""
    return next((name for name in ATTENTIONS if name != "fa2gen" and name in attentions), None)


def judge_all(runs: Sequence[Run]) -> list[Verdict]:
    """A verdict for the first run of each attention beside the reference; none where its seeds are too few."""
    reference = reference_of([run.attention for run in runs])
    seeds = [run for run in runs if run.attention == reference]
    if len({run.seed for run in seeds}) < FEWEST_SEEDS:
        return []
    firsts = {run.attention: run for run in reversed(runs) if run.attention != reference}
    return [judge(run, seeds) for run in reversed(firsts.values())]


def show(runs: Sequence[Run], verdicts: Sequence[Verdict], console: Console) -> None:
    """Print a table of all runs, then the verdicts."""
    console.print(runs[0].setting.title(), markup=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("attention", "seed", "tokens/s", "ms a step", "p20 - p80", "TFLOP/s", "MFU", "MFU, causal", "loss"):
        table.add_column(name, justify="left" if name == "attention" else "right", no_wrap=True)
    for run in runs:
        time = run.step_ms
        table.add_row(
            run.attention,
            str(run.seed),
            f"{run.tokens_per_s:,.0f}",
            f"{time.median:.2f}",
            f"{time.p20:.2f} - {time.p80:.2f}",
            f"{run.tflops():.1f}",
            *(_percent(run.mfu(causal=causal)) for causal in (False, True)),
            f"{smooth(run.losses)[-1]:.4f}",
        )
    console.print(table)
    for verdict in verdicts:
        console.print(str(verdict), markup=False)
    if not verdicts:
        console.print(
            f"no verdict: it needs {FEWEST_SEEDS} seeds of one of torch's attentions beside another attention"
        )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def summary(
    runs: Sequence[Run],
    verdicts: Sequence[Verdict],
    details: Mapping[tuple[str, int], Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """The document of one setting's runs.

    Args:
        runs, verdicts: What was found.
        details: More of each run, by attention and seed.
        provenance: Machine, versions, text, command line.
    """
    setting = runs[0].setting
    return {
        "schema": SCHEMA,
        "provenance": {**provenance, "method": METHOD},
        "setting": {
            **dataclasses.asdict(setting),
            "vocabulary": VOCABULARY,
            "flops_per_step": setting.flops(),
            "flops_per_step_causal": setting.flops(causal=True),
            "peak_tflops": peak_tflops(setting.gpu),
        },
        "runs": [{**_run_form(run), **details.get((run.attention, run.seed), {})} for run in runs],
        "verdicts": [
            {name: _number(value) for name, value in dataclasses.asdict(verdict).items()} for verdict in verdicts
        ],
    }


def _run_form(run: Run) -> dict[str, Any]:
    time = run.step_ms
    return {
        "attention": run.attention,
        "seed": run.seed,
        "csv": run.file_name(),
        "ms": dataclasses.asdict(time),
        "tokens_per_s": run.tokens_per_s,
        "tflops": run.tflops(),
        "mfu": run.mfu(),
        "mfu_causal": run.mfu(causal=True),
        "last_loss": _number(float(smooth(run.losses)[-1])),
    }


def _number(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_gradients(setting: Setting, errors: Sequence[GradientErrors], console: Console) -> None:
    """Print the errors of a trained model's gradients, the largest of all layers."""
    console.print(f"{setting.title()}: gradients beside those in float32", markup=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("attention", *PARTS):
        table.add_column(name, justify="left" if name == "attention" else "right", no_wrap=True)
    for one in errors:
        table.add_row(one.attention, *(f"{100 * one.worst(part):.2f} %" for part in range(len(PARTS))))
    console.print(table)


def gradients_summary(
    setting: Setting,
    loss: float,
    errors: Sequence[GradientErrors],
    reference: GradientErrors,
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """The document of one comparison of gradients.

    Args:
        setting: Of the training before.
        loss: Which that ended with.
        errors, reference: What was found; of whom the others' are judged by.
        provenance: Machine, versions, text, command line.
    """
    return {
        "schema": SCHEMA,
        "provenance": {**provenance, "method": GRADIENTS_METHOD},
        "setting": dataclasses.asdict(setting),
        "loss": _number(loss),
        "reference": reference.attention,
        "limit": LIMIT,
        "gradients": [
            {
                "attention": one.attention,
                "ratio": _number(largest_ratio(one, reference)[0]),
                "relative": [dict(zip(PARTS, map(_number, layer), strict=True)) for layer in one.relative],
            }
            for one in errors
        ],
    }


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write the summary as JSON."""
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
