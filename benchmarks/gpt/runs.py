"""Training runs as numbers: their CSV files, throughput and model FLOPs utilisation."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fa2gen.bench.rows import Timing
from fa2gen.errors import ArgumentError

from .model import ATTENTIONS, SHAPES, step_flops

WARMUP_STEPS = 10
"""Steps whose times do not count: kernels are compiled and loaded, the allocator and the clocks settle."""
FEWEST_STEPS = 40
DEFAULT_LAYERS, DEFAULT_TOKENS, DEFAULT_STEPS = 4, 16384, 200
"""Of a run; what differs from them is in the names of its files."""
# Dense bf16 with float32 accumulation, TFLOP/s, by what the driver's name of the GPU holds (NVIDIA's datasheets).
_PEAKS = {
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 80GB HBM3": 989.4,
    "H100 PCIe": 756.0,
    "A100": 312.0,
}


def peak_tflops(gpu: str) -> float | None:
    """The peak that utilisation refers to; None for a GPU that is not listed."""
    return next((peak for name, peak in _PEAKS.items() if name in gpu), None)


@dataclass(frozen=True)
class Setting:
    """What runs that can be compared share.

    Attributes:
        gpu: As the driver calls it; ``"CPU"``.
        shape: A key of ``SHAPES``.
        layers, context: Depth, and tokens of a sequence.
        tokens: Of a step: whole sequences.
        steps: How many.
        compiled: Through ``torch.compile``.
        text: First digits of the text's SHA-256.
    """

    gpu: str
    shape: str
    layers: int
    context: int
    tokens: int
    steps: int = DEFAULT_STEPS
    compiled: bool = False
    text: str = ""

    def flops(self, *, causal: bool = False) -> float:
        """Of a step; see :func:`step_flops`."""
        return step_flops(SHAPES[self.shape], self.layers, self.context, self.tokens, causal=causal)

    def slug(self) -> str:
        """For file names, e.g. ``"1.3b_2k"``, or ``"1.3b_2k_24layers"``."""
        length = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        words = [self.shape, length]
        for name, usual in (("layers", DEFAULT_LAYERS), ("tokens", DEFAULT_TOKENS), ("steps", DEFAULT_STEPS)):
            if getattr(self, name) != usual:
                words.append(f"{getattr(self, name)}{name}")
        return "_".join([*words, "compiled"] if self.compiled else words)

    def title(self) -> str:
        """For people, e.g. ``"GPT-3 1.3B layers (hidden 2048, 16 heads of 128), 4 of them, context 2048, ..."``."""
        shape = SHAPES[self.shape]
        compiled = ", compiled" if self.compiled else ""
        return (
            f"GPT-3 {self.shape.upper()} layers (hidden {shape.hidden}, {shape.heads} heads of {shape.head_dim}), "
            f"{self.layers} of them{compiled}, context {self.context}, {self.steps} steps of {self.tokens} tokens, "
            f"{self.gpu}"
        )


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        setting: What was trained, and where.
        attention: A key of ``ATTENTIONS``.
        seed: Of the first weights.
        losses: Of each step, nats per token; ``ms``: wall time of each step.
    """

    setting: Setting
    attention: str
    seed: int
    losses: list[float]
    ms: list[float]

    @property
    def step_ms(self) -> Timing:
        """Median, p20 and p80 of the steps after the warm-up."""
        return Timing.of(self.ms[WARMUP_STEPS:])

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.setting.tokens / self.step_ms.median

    def tflops(self, *, causal: bool = False) -> float:
        """Model FLOPs over time, TFLOP/s; see :func:`step_flops`."""
        return self.setting.flops(causal=causal) / self.step_ms.median / 1e9

    def mfu(self, *, causal: bool = False) -> float | None:
        """Model FLOPs utilisation: the share of the GPU's dense bf16 peak; None where that is not known."""
        peak = peak_tflops(self.setting.gpu)
        return None if peak is None else self.tflops(causal=causal) / peak

    def file_name(self) -> str:
        return f"{self.setting.slug()}_{self.attention}_seed{self.seed}.csv"


_IDENTITY = (*(field.name for field in dataclasses.fields(Setting)), "attention", "seed")
_COLUMNS = (*_IDENTITY, "step", "loss", "ms")


def write_csv(run: Run, folder: Path) -> Path:
    """Write a run, a line for each step, each with all that identifies the run; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / run.file_name()
    identity = (*map(_form, dataclasses.astuple(run.setting)), run.attention, run.seed)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for step, (loss, ms) in enumerate(zip(run.losses, run.ms, strict=True)):
            writer.writerow((*identity, step, f"{loss:.6f}", f"{ms:.4f}"))
    return path


def read_csv(paths: Iterable[Path]) -> list[Run]:
    """The runs of files that :func:`write_csv` wrote, by attention and seed.

    Raises:
        ArgumentError: A file is none, or its runs cannot be compared with those of the others; the message names it.
    """
    runs: list[Run] = []
    first: Path | None = None
    for path in paths:
        first = first or path
        try:
            text = path.read_text(encoding="utf-8-sig")
            if text and not text.endswith("\n"):
                raise ValueError("its last line is not whole")
            run = _read_rows(list(csv.DictReader(text.splitlines())))
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"{path}: not a run of train_gpt: {error}") from None
        if runs and run.setting != runs[0].setting:
            raise ArgumentError(f"{path} cannot be compared with {first}: {_differences(run, runs[0])}")
        if any((run.attention, run.seed) == (other.attention, other.seed) for other in runs):
            raise ArgumentError(f"{path}: another file holds seed {run.seed} of {run.attention} too")
        runs.append(run)
    return ordered(runs)


def ordered(runs: Iterable[Run]) -> list[Run]:
    """By attention, fa2gen first, then by seed."""
    names = list(ATTENTIONS)
    return sorted(runs, key=lambda run: (names.index(run.attention), run.seed))


def _read_rows(rows: Sequence[dict[str, str]]) -> Run:
    if not rows or tuple(rows[0]) != _COLUMNS:
        raise ValueError(f"its columns must be {','.join(_COLUMNS)}")
    if len({tuple(row[name] for name in _IDENTITY) for row in rows}) > 1:
        raise ValueError("it holds several runs")
    first = rows[0]
    for name, known in (("shape", SHAPES), ("attention", ATTENTIONS)):
        if first[name] not in known:
            raise ValueError(f"{name} {first[name]!r} is none of {', '.join(known)}")
    counts = (_count(first[name], name) for name in ("layers", "context", "tokens", "steps"))
    if first["compiled"] not in ("0", "1"):
        raise ValueError(f"compiled is {first['compiled']!r}")
    setting = Setting(first["gpu"], first["shape"], *counts, first["compiled"] == "1", first["text"])
    if [row["step"] for row in rows] != [str(step) for step in range(len(rows))]:
        raise ValueError("its steps are not 0, 1, 2, ...")
    if len(rows) < FEWEST_STEPS:
        raise ValueError(f"{len(rows)} steps are too few: at least {FEWEST_STEPS}")
    if len(rows) != setting.steps:
        raise ValueError(f"it holds {len(rows)} of {setting.steps} steps")
    ms = [float(row["ms"]) for row in rows]
    if not all(math.isfinite(x) and x > 0 for x in ms):
        raise ValueError("a step's time is not positive and finite")
    return Run(setting, first["attention"], int(first["seed"]), [float(row["loss"]) for row in rows], ms)


def _form(value: object) -> object:
    return int(value) if isinstance(value, bool) else value


def _differences(run: Run, other: Run) -> str:
    """In words, e.g. ``"layers 4 and 24"``."""
    one, two = dataclasses.asdict(run.setting), dataclasses.asdict(other.setting)
    return ", ".join(f"{name} {one[name]} and {two[name]}" for name in one if one[name] != two[name])


def _count(text: str, name: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{name} is {value}")
    return value
