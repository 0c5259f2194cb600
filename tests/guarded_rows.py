"""What a guarded softmax of either family must make of keys that are infinite, or NaN where a row does not see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from fa2gen.gate import check_forward

# (q, k, v, causal=...) -> output, LSE, and whatever else the run tells.
Run = Callable[..., tuple[Tensor, Tensor, Any]]


def require_infinite_keys(run: Run, inputs: Callable[[], tuple[Tensor, Tensor, Tensor]], firsts: Iterable[int]) -> None:
    """Keys whose scores are -inf weigh nothing, also where they fill the tiles that come first, or all.

    Args:
        run: Scale 1.
        inputs: Small q and k, the same each time, whose last columns are 0.
        firsts: The first infinite key of each try.
    """
    for first in firsts:
        q, k, v = inputs()
        q[..., -1] = 1
        k[:, first:, :, -1] = -math.inf
        out, lse, _ = run(q, k, v)
        report = check_forward(out, lse, q, k[:, :first], v[:, :first], causal=False, softmax_scale=1.0)
        assert report.passed, report.text
    k[..., -1] = -math.inf
    out, lse, _ = run(q, k, v)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    k[:, 9, :, -1] = math.inf
    out, lse, _ = run(q, k, v)
    assert out.isnan().all()
    assert lse.isnan().all()


def require_unseen_nan(run: Run, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Of 100 queries and 256 keys the last 30 rows see key 226, the others must not notice that it is NaN."""
    assert (q.shape[1], k.shape[1]) == (100, 256)
    k[:, 226] = math.nan
    out, lse, _ = run(q, k, v, causal=True)
    assert out[:, 70:].isnan().all()
    assert lse[..., 70:].isnan().all()
    report = check_forward(
        out[:, :70], lse[..., :70], q[:, :70], k[:, :226], v[:, :226], causal=True, softmax_scale=1.0
    )
    assert report.passed, report.text
