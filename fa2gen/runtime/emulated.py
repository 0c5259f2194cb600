"""Calls on CPU tensors that the emulator runs: the generated kernels, as a GPU would run them."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fa2gen.constraints import default_config, infeasible_reason
from fa2gen.errors import InfeasibleError
from fa2gen.hardware import arch_limits
from fa2gen.spec import BwdConfig, Config, ForwardConfig

from .families import require_tma
from .request import Request

# The emulator runs what chips of these compute capabilities would, by the family of kernels.
EMULATED_CAPABILITIES = {"sm80": (8, 0), "sm90": (9, 0)}


def emulated_config(request: Request, config: Config | None) -> Config:
    """The config that the emulator runs: the caller's if it is legal on the emulated chip, else the default.

    Raises:
        InfeasibleError: The caller's config is not legal, or TMA cannot read what it is to read; the message is the
            reason.
    """
    if config is None:
        return default_config(request.spec)
    arch = arch_limits(EMULATED_CAPABILITIES[config.family])
    require_tma(request, config, arch)
    reason = infeasible_reason(request.spec, config, arch)
    if reason is not None:
        raise InfeasibleError(f"config {config.slug()} cannot run {request.spec.slug()} on {arch.target}: {reason}")
    return config


def emulated_forward(
    request: Request, config: ForwardConfig | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a request that needs no copy."""
    from fa2gen.emulator.forward import run_forward

    chosen = cast(ForwardConfig, emulated_config(request, config))
    out, lse, _ = run_forward(request.spec, chosen, q, k, v, softmax_scale=request.softmax_scale)
    return out, lse


def emulated_gradients(
    request: Request,
    config: BwdConfig | None,
    tensors: dict[str, Tensor],
    lse: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a request for gradients that needs no copy; tensors are q, k, v, o and dout."""
    from fa2gen.emulator.backward import run_backward

    q, k, v, out, dout = (tensors[name] for name in ("q", "k", "v", "o", "dout"))
    chosen, scale = cast(BwdConfig, emulated_config(request, config)), request.softmax_scale
    dq, dk, dv, _ = run_backward(request.spec, chosen, q, k, v, out, lse, dout, softmax_scale=scale, dlse=dlse)
    return dq, dk, dv
