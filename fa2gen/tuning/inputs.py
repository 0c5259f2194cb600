"""Tensors to time kernels on.

Random normal: matrix work on zeros runs up to 13 % faster than on real data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fa2gen.problem import Problem
from fa2gen.spec import KernelSpec

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Scores that are computed at a time, in elements: 256 MiB of float32.
_SCORES = 1 << 26


def make_tensors(spec: KernelSpec, problem: Problem, device: torch.device) -> dict[str, Tensor]:
    """A call's tensors by the names of the kernels' parameters, what it writes among them (uninitialised).

    A backward's output and LSE are those of its q, k and v: with others its probabilities might be infinite.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(seqlen: int, heads: int) -> Tensor:
        shape = (problem.batch, seqlen, heads, spec.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[spec.dtype])

    q = normal(problem.seqlen_q, problem.num_heads_q)
    k, v = (normal(problem.seqlen_k, problem.num_heads_k) for _ in range(2))
    if spec.kind == "fwd":
        lse = torch.empty((problem.batch, problem.num_heads_q, problem.seqlen_q), dtype=torch.float32, device=device)
        return {"q": q, "k": k, "v": v, "o": torch.empty_like(q), "softmax_lse": lse}
    dout = normal(problem.seqlen_q, problem.num_heads_q)
    o, lse = attention(q, k, v, causal=spec.causal)
    written = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    return {"q": q, "k": k, "v": v, "o": o, "lse": lse, "dout": dout, **written}


def read_by(spec: KernelSpec) -> tuple[str, ...]:
    """Names of the tensors that a call reads and must not change."""
    return ("q", "k", "v") if spec.kind == "fwd" else ("q", "k", "v", "o", "lse", "dout")


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and LSE in float32, the output rounded to q's dtype; a few heads or rows at a time.

    A float64 reference would do, but a chip of no data centre computes a 64th as fast in it.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim).
        k, v: (batch, seqlen_k, num_heads_k, head_dim).
        causal: Bottom-right mask.
    """
    (batch, rows, heads, width), keys = q.shape, k.shape[1]
    ratio = heads // k.shape[2]
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
    step = max(1, min(rows, _SCORES // max(1, keys * ratio)))
    key = torch.arange(keys, device=q.device)
    for b in range(batch):
        for head_k in range(k.shape[2]):
            group = slice(head_k * ratio, (head_k + 1) * ratio)
            keys_t, values = k[b, :, head_k].float().t(), v[b, :, head_k].float()
            for first in range(0, rows, step):
                last = min(rows, first + step)
                # (ratio, rows, keys)
                scores = q[b, first:last, group].float().transpose(0, 1) @ keys_t / math.sqrt(width)
                if causal:
                    row = torch.arange(first, last, device=q.device)[:, None]
                    scores.masked_fill_(key > row + keys - rows, -math.inf)
                row_lse = scores.logsumexp(-1)
                lse[b, group, first:last] = row_lse
                # A row that sees no key has an LSE of -inf, and an output of 0.
                weights = (scores - row_lse[..., None]).exp_().nan_to_num_(nan=0.0)
                out[b, first:last, group] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out, lse
