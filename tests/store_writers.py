"""Work on tables and studies that is killed at random moments (see ``kills.py``): each runs until it dies."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fa2gen.hardware import get_gpu
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import save_entries
from fa2gen.tuning.space import Space, legal_space
from fa2gen.tuning.study import TuningStudy
from tests.tuning_fakes import PROBLEM, entry

GPU = get_gpu("a100")
SPEC = KernelSpec()
# An eighth of the legal space: enough to last, few enough to open fast. Made here, once for all processes forked later.
SPACE = Space(legal_space(SPEC, GPU).configs[::8], ())


def fake_ms(config: FwdConfig) -> float:
    """A time that a config always has."""
    return 1.0 + config.block_m / 128 + config.block_n / 1024 + config.num_stages / 64 + config.step_n / 4096


def open_study(folder: Path, **options: object) -> TuningStudy:
    """A study of ``SPACE``."""
    bucket = PROBLEM.bucket(GPU.num_sms)
    return TuningStudy(GPU, SPEC, bucket, template_hash="t", space=SPACE, directory=folder, **options)


def report(path: Path, line: str) -> None:
    """Appends a line that a kill leaves whole or not at all, after what it tells of has returned."""
    with open(path, "a") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())


def save_for_ever(round: int, root: str, reported: str) -> None:
    """Saves entries one by one and reports each."""
    for number in range(10**6):
        ratio = 1 + (100 * round + number) % 1024
        ms = 1.0 + round + number / 4096
        utc = f"2026-01-{1 + round // 24 % 28:02d}T{round % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}Z"
        save_entries(GPU, [entry(KernelSpec(gqa_ratio=ratio), ms=ms, utc=utc)], root=Path(root))
        report(Path(reported), f"{ratio} {ms} {utc}")


def try_for_ever(round: int, root: str, reported: str) -> None:
    """Completes and fails trials and reports each; a new study for every ten rounds."""
    folder = Path(root) / str(round // 10)
    with open_study(folder, seed=round) as study:
        # Without the sampler, whose thinking would take most of the time that a kill may fall in.
        for config in SPACE.configs:
            study.enqueue(config)
            asked = study.ask()
            if asked is None:
                break
            if asked.config.softmax == "guarded":
                study.complete(asked, fake_ms(asked.config), p20=1.0)
                outcome = "complete"
            else:
                study.fail(asked, "launch_failed", f"no {asked.config.slug()}")
                outcome = "launch_failed"
            report(Path(reported), f"{round // 10} {outcome} {asked.config.key()}")
    # Killed at work, not when it was done.
    while True:
        time.sleep(1)
