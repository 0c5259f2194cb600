"""What a seeded bug in the text of the sm90 forward is, the problem that shows it, and whether it is caught.

Each is tried on one small problem with several tiles for every block, for several seeds, so that wgmma runs both when
it is issued and when it is waited for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

import pytest
import torch

from fa2gen.codegen import KernelSource, render_kernel
from fa2gen.emulator import launches, run_forward
from fa2gen.errors import EmulatorError
from fa2gen.gate import check_forward
from fa2gen.spec import Config, FwdSm90Config, KernelSpec

NUMBERS = "wrong numbers"
_SCALE = 0.09
CAUSAL = KernelSpec(head_dim=128, causal=True)
FULL = dataclasses.replace(CAUSAL, causal=False)

LOAD_READ = {"tma-load-over-read", "tma-load-over-write"}
# Who looks too early meets a copy in flight, or one that has landed by chance, which it has not waited for.
EARLY = {"tma-load-not-waited", "shared-race-read-after-write", "shared-uninitialised-read"}
# Whose ring is out of step: it takes what it has not waited for, gives back what it does not have, waits for what does
# not come.
OUT_OF_STEP = {*EARLY, *LOAD_READ, "mbarrier-over-arrival", "mbarrier-tx-count", "deadlock"}
OTHER_TILES = {NUMBERS, "global-two-writers", "global-not-written"}

CONFIG = FwdSm90Config(block_m=128, block_n=64, num_stages=2, q_stages=2, scheduler="dynamic")
ONE_Q = dataclasses.replace(CONFIG, q_stages=1)
SHARED_P = dataclasses.replace(CONFIG, p_in_smem=True)
# Turns order a warpgroup's warps too.
NO_TURNS = dataclasses.replace(SHARED_P, ping_pong=False)
IN_ORDER = dataclasses.replace(CONFIG, overlap=False)
DIRECT = dataclasses.replace(CONFIG, epilogue="direct")
MORE_K = dataclasses.replace(CONFIG, k_extra=1)
MORE_Q = dataclasses.replace(ONE_Q, q_extra=1)
GUARDED = dataclasses.replace(CONFIG, softmax="guarded")
GUARDED_DIRECT = dataclasses.replace(ONE_Q, softmax="guarded", epilogue="direct")
GUARDED_SHARED_P = dataclasses.replace(NO_TURNS, softmax="guarded")
ACROSS = dataclasses.replace(CONFIG, overlap_tiles=True)
ACROSS_DIRECT = dataclasses.replace(ONE_Q, overlap_tiles=True, epilogue="direct", scheduler="static")
ACROSS_REGISTERS = dataclasses.replace(ACROSS, q_regs=4)
# No more stages than key tiles that its first consumer does not see.
FEW_STAGES = dataclasses.replace(CONFIG, num_stages=1)
# Neither turns nor numbers of tiles tell a consumer how far the others are.
STATIC = dataclasses.replace(ONE_Q, scheduler="static", ping_pong=False)
# Its first consumer skips two key tiles. That the first has come it knows from the V of the query tile before.
NARROW = dataclasses.replace(STATIC, block_n=32, num_stages=3)


class Bug(NamedTuple):
    """A bug and the problem that shows it.

    Attributes:
        config: Of the kernel.
        old, new: A piece of its text, which is there exactly once, and what takes its place.
        expected: What must be reported: any of these.
        more: Further pieces.
        keys, heads: Of the problem; the queries are 300. Of five heads the last section has fewer than the others.
        lead: What the logits of the second key tile lead those of the others by, as a power of e.
        offset: All logits, if not 0: they differ by what rounding makes of them.
        amount: Factor of the logits.
        spec: Of the kernel.
    """

    config: FwdSm90Config
    old: str
    new: str
    expected: set[str]
    more: tuple[tuple[str, str], ...] = ()
    keys: int = 333
    heads: int = 3
    lead: float = 0.0
    offset: float = 0.0
    amount: float = 1.0
    spec: KernelSpec = CAUSAL


def _inputs(bug: Bug) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, seqlen, bug.heads, 128, generator=generator) for seqlen in (300, bug.keys, bug.keys))
    q *= bug.amount
    if bug.offset:
        q[..., :-1], q[..., -1], k[..., -1] = 0.0, 8.0, bug.offset / (8 * _SCALE)
    if bug.lead:
        q[..., -1], k[..., -1] = 8.0, 0.0
        k[:, 64:128, :, -1] = bug.lead / (8 * _SCALE)
    return [q.bfloat16(), k.bfloat16(), v.bfloat16()]


def require_caught(name: str, bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails unless the bug is reported as it should be; ``monkeypatch`` plants it."""

    def render(spec: KernelSpec, config: Config, platform: str, kernel: str) -> KernelSource:
        source = render_kernel(spec, config, platform, kernel)
        text = source.text
        for old, new in ((bug.old, bug.new), *bug.more):
            assert text.count(old) == 1, f"{text.count(old)} places read {old!r}"
            text = text.replace(old, new)
        return dataclasses.replace(source, text=text)

    monkeypatch.setattr(launches, "render_kernel", render)
    q, k, v = _inputs(bug)
    found: dict[str, str] = {}
    for seed in range(1, 9):
        try:
            out, lse, _ = run_forward(
                bug.spec, bug.config, q, k, v, softmax_scale=_SCALE, seed=seed, num_sms=2, timeout=60
            )
        except EmulatorError as error:
            found[error.name] = str(error)
        else:
            passed = check_forward(out, lse, q, k, v, causal=bug.spec.causal, softmax_scale=_SCALE).passed
            found["nothing" if passed else NUMBERS] = ""
        # Some need a schedule that is rare.
        if seed >= 2 and {*found} & bug.expected:
            break
    assert {*found} & bug.expected, found
    assert {*found} <= bug.expected | {"nothing"}, found
    if "deadlock" in found and name != "tickets are not opened":
        assert re.search(r"barrier .* at .*line|mbarrier .*: phase \d+ lacks", found["deadlock"]), found["deadlock"]


def require_right(config: FwdSm90Config, bugs: Iterable[Bug]) -> None:
    """Fails unless the unchanged kernel of a config is right on every problem that shows bugs of it."""
    problems = {bug[5:]: bug for bug in bugs if bug.config == config}
    for bug in problems.values():
        q, k, v = _inputs(bug)
        for seed in (1, 2, 3, 4):
            out, lse, _ = run_forward(bug.spec, config, q, k, v, softmax_scale=_SCALE, seed=seed, num_sms=2)
            report = check_forward(out, lse, q, k, v, causal=bug.spec.causal, softmax_scale=_SCALE)
            assert report.passed, report.text
