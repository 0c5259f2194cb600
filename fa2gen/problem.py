"""A concrete size: batch, lengths, heads. Work, bytes and the bucket that tuned entries are keyed by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ArgumentError
from .spec import KernelSpec

# Key and query indices are 32-bit in the kernel. A query tile of up to 1024 rows and a key tile of up to 256 may reach
# beyond the end together (the last key that a query tile sees, rounded up to whole key tiles).
MAX_SEQLEN = 2**31 - 2048


@dataclass(frozen=True)
class Bucket:
    """Sizes that share a tuned config: short and long, few and many tiles (see :meth:`Problem.bucket`)."""

    log2_seqlen_q: int
    log2_seqlen_k: int
    log2_waves: int

    def label(self) -> str:
        """E.g. ``q12_k12_w3``; a negative wave exponent reads ``w-2``."""
        return f"q{self.log2_seqlen_q}_k{self.log2_seqlen_k}_w{self.log2_waves}"


@dataclass(frozen=True)
class Problem:
    """One attention call's sizes. Lengths may be zero.

    Attributes:
        batch, seqlen_q, seqlen_k: Sizes of q (batch, seqlen_q, num_heads_q, head_dim) and of k and v.
        num_heads_q, num_heads_k: Query heads and key/value heads; the first is a multiple of the second.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_k: int

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ArgumentError(f"{name} must be an integer of at least 0, got {value!r}")
        if self.num_heads_q and (self.num_heads_k == 0 or self.num_heads_q % self.num_heads_k):
            raise ArgumentError(
                f"num_heads_q ({self.num_heads_q}) must be a multiple of num_heads_k ({self.num_heads_k})"
            )

    @property
    def gqa_ratio(self) -> int:
        return self.num_heads_q // self.num_heads_k if self.num_heads_k else 1

    def visible_pairs(self, causal: bool) -> int:
        """Query-key pairs of one head that the mask leaves: ``seqlen_q * seqlen_k``, or the exact causal count."""
        if not causal:
            return self.seqlen_q * self.seqlen_k
        # Row i sees clamp(i + 1 + seqlen_k - seqlen_q, 0, seqlen_k) keys: an arithmetic series after the empty rows.
        first_row = max(0, self.seqlen_q - self.seqlen_k)
        rows = self.seqlen_q - first_row
        first = first_row + 1 + self.seqlen_k - self.seqlen_q
        return rows * (2 * first + rows - 1) // 2

    def flops(self, spec: KernelSpec) -> int:
        """Multiply-adds of the products counted as two, over visible pairs only.

        Two products forward (S and O), five backward (S, dP, dV, dK and dQ).
        """
        products = 2 if spec.kind == "fwd" else 5
        return 2 * products * spec.head_dim * self.batch * self.num_heads_q * self.visible_pairs(spec.causal)

    def min_bytes(self, spec: KernelSpec) -> int:
        """Bytes that must cross HBM once.

        Forward: q, k, v in, the output and the float32 LSE out. Backward: all of these and do in, dq, dk, dv out.
        """
        rows_q = self.batch * self.seqlen_q * self.num_heads_q
        rows_k = self.batch * self.seqlen_k * self.num_heads_k
        tensors = 2 if spec.kind == "fwd" else 4
        return 2 * tensors * spec.head_dim * (rows_q + rows_k) + 4 * rows_q

    def bucket(self, num_sms: int) -> Bucket:
        """(ceil log2 seqlen_q, ceil log2 seqlen_k, clamp(floor log2 of 128-row tiles per SM, -3, 4))."""
        tiles = self.batch * self.num_heads_q * math.ceil(self.seqlen_q / 128)
        waves = math.floor(math.log2(tiles / num_sms)) if tiles else -3
        return Bucket(_ceil_log2(self.seqlen_q), _ceil_log2(self.seqlen_k), max(-3, min(4, waves)))


def _ceil_log2(n: int) -> int:
    return (n - 1).bit_length() if n > 1 else 0
