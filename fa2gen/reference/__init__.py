"""Attention by its definition, forward and backward: in float64 (the reference) or with 16-bit rounding (``plain16``).

Everything is computed in chunks of batches, key/value heads and query rows, so that memory stays bounded at any length.
Importing it imports torch.
"""

from .backward import attention_backward, plain16_backward
from .forward import attention_forward, plain16_forward, weight_noise
from .roundoff import backward_roundoff

__all__ = [
    "attention_backward",
    "attention_forward",
    "backward_roundoff",
    "plain16_backward",
    "plain16_forward",
    "weight_noise",
]
