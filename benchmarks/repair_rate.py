"""How often the guarded softmax repairs a tile: on the logits of a GPT, as it starts and as it learns.

    python benchmarks/repair_rate.py --context 2048 --steps 200 --out rates.json

The model, its text and its training are those of `train_gpt.py`. A count is of one layer's call in one step: (warp, key
tile) pairs whose sums left the range of the rows' reference, beside all pairs that the call's query tiles visit.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpt.model import SHAPES, Attention  # noqa: E402
from benchmarks.gpt.text import Batches, read_text  # noqa: E402
from benchmarks.gpt.training import train  # noqa: E402
from fa2gen.bench.cells import Cell  # noqa: E402
from fa2gen.bench.machine import provenance  # noqa: E402
from fa2gen.bench.own import count_repairs  # noqa: E402
from fa2gen.driver import unavailable_reason  # noqa: E402
from fa2gen.errors import Fa2genError, UnsupportedError  # noqa: E402
from fa2gen.roofline import tile_work  # noqa: E402
from fa2gen.runtime import attention, describe  # noqa: E402
from fa2gen.spec import FwdSm90Config  # noqa: E402

LAYERS = 4
TOKENS = 32768  # a step


@dataclass(frozen=True)
class Count:
    """Of a layer's call in a step: repaired and visited (warp, key tile) pairs; None where the softmax is online."""

    step: int
    layer: int
    config: str
    repaired: int | None
    visited: int


class Counter:
    """An attention that counts the repairs of chosen steps besides.

    Args:
        steps: In which steps, from 0.
    """

    def __init__(self, steps: set[int]) -> None:
        self._steps, self._calls = steps, 0
        self.counts: list[Count] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step, layer = divmod(self._calls, LAYERS)
        self._calls += 1
        if step in self._steps:
            self.counts.append(count(step, layer, *(x.detach() for x in (q, k, v))))
        out = attention(q, k, v, causal=True)
        assert isinstance(out, Tensor)
        return out


def count(step: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Count:
    """What a causal call of these inputs repairs and visits."""
    description = describe(q, k, v, causal=True)
    spec, problem, config = description.spec, description.problem, description.config
    if not isinstance(config, FwdSm90Config):
        raise UnsupportedError(f"repairs are counted of the sm90 family, this call runs {config}")
    work = tile_work(spec, config, problem)
    visited = work.heads * work.tiles * 4 * config.warpgroups
    return Count(step, layer, config.slug(), count_repairs(Cell(spec, problem), q, k, v, description), visited)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--shape", type=click.Choice(["1.3b", "2.7b"]), default="1.3b", show_default=True, help="Of the layers.")
@click.option("--context", type=click.IntRange(min=1, max=TOKENS), default=2048, show_default=True, metavar="N")
@click.option("--steps", type=click.IntRange(min=2), default=200, show_default=True, metavar="N")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write all counts as JSON."
)
def main(shape: str, context: int, steps: int, out: Path | None) -> None:
    """Count what the guarded softmax repairs while a GPT learns."""
    reason = unavailable_reason()
    if reason is not None:
        raise click.ClickException(f"no GPU can be used: {reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    counter = Counter({0, 10, 30, steps // 2, steps - 1})
    try:
        batches = Batches(read_text(), steps, TOKENS // context, context, device)
        losses = train(
            SHAPES[shape], LAYERS, Attention("counted", counter), batches,
            steps=steps, context=context, seed=0, device=device,
        ).losses  # fmt: skip
    except Fa2genError as error:
        raise click.ClickException(str(error)) from None
    for one in counter.counts:
        share = "online" if one.repaired is None else f"{one.repaired:>7,}  {one.repaired / one.visited:8.4%}"
        click.echo(f"step {one.step:4}  layer {one.layer}  {share}  of {one.visited:,}  {one.config}")
    click.echo(f"loss {losses[0]:.2f} at the start, {losses[-1]:.2f} at the end")
    if out is not None:
        document = {
            "provenance": provenance(device.index),
            "setting": {"shape": shape, "layers": LAYERS, "context": context, "tokens": TOKENS, "steps": steps},
            "losses": [losses[0], losses[-1]],
            "counts": [asdict(one) for one in counter.counts],
        }
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
