"""torch.autocast: which inputs it casts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .request import DTYPE_NAMES

_CAST = (torch.float32, *DTYPE_NAMES)


def autocast_inputs(*inputs: Any) -> list[Tensor] | None:
    """q, k and v in autocast's dtype, as autocast casts scaled_dot_product_attention's; None where there is no need.

    Inputs that share a 16-bit dtype stay as they are, also where autocast's is the other one: a call that has been seen
    before does not ask for it. What kernels cannot take after all is for the checks of arguments to say.
    """
    if not all(isinstance(x, Tensor) and x.dtype in _CAST for x in inputs):
        return None
    dtypes, device = {x.dtype for x in inputs}, inputs[0].device.type
    if (len(dtypes) == 1 and torch.float32 not in dtypes) or device not in ("cuda", "cpu"):
        return None
    if not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) for x in inputs] if dtype in DTYPE_NAMES else None
