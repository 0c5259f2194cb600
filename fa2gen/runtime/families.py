"""Which kernel families can serve a call, beside what its spec says: the copy engine's rules for its tensors."""

from __future__ import annotations

from fa2gen.constraints_sm90 import COMPUTE_CAPABILITY
from fa2gen.errors import InfeasibleError
from fa2gen.hardware import ArchLimits
from fa2gen.spec import Config
from fa2gen.tensor_map import tma_reason

from .request import Request


def tma_obstacle(request: Request) -> str | None:
    """Why TMA cannot read the tensors of a call in place, or None if it can.

    Of a tensor that is copied the copy counts, which is contiguous. A request without strides is for sizes alone.
    """
    p, spec = request.problem, request.spec
    sizes = {"q": (p.seqlen_q, p.num_heads_q), "k": (p.seqlen_k, p.num_heads_k), "v": (p.seqlen_k, p.num_heads_k)}
    for name, (rows, heads) in sizes.items():
        if name in request.copied or name not in request.strides:
            continue
        reason = tma_reason(name, (p.batch, rows, heads, spec.head_dim), request.strides[name], 0)
        if reason is not None:
            return reason
    if spec.alignment != 16:
        # A request for sizes alone knows no tensor.
        name = next(iter(request.unaligned), "q, k or v")
        return f"{name} begins at an address that is no multiple of 16 bytes"
    return None


def require_tma(request: Request, config: Config, arch: ArchLimits) -> None:
    """Raise where the config's kernel would read by TMA on this chip and cannot read the tensors of the call.

    It goes before the rules of specs, which know alignment 2 but not the tensor that has it.

    Raises:
        InfeasibleError: It cannot; the message names the tensor and the rule.
    """
    if config.family != "sm90" or arch.compute_capability != COMPUTE_CAPABILITY:
        return
    if (obstacle := tma_obstacle(request)) is not None:
        raise InfeasibleError(f"config {config.slug()} cannot run this call, as TMA cannot read it: {obstacle}")
