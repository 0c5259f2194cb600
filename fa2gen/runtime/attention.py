"""The public attention function: one dictionary look-up away from a launch when the call has been seen before."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa2gen.spec import BwdConfig, ForwardConfig

from .autograd import record
from .dispatch import first_call
from .operators import traced_call
from .plan import PLANS, ForwardPlan

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_num_dispatch_modes = torch._C._len_torch_dispatch_stack


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    config: ForwardConfig | None = None,
    backward_config: BwdConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention, ``softmax(softmax_scale q kT) v`` for every query head.

    Differentiable once, in q, k, v and in the LSE; gradients are new contiguous tensors. Nothing is tuned or
    synchronised; the first call of a new kernel compiles it (see :func:`fa2gen.runtime.warmup`), later calls only
    launch. Under ``torch.autocast`` inputs in float32, and with them all others, are cast to its dtype.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), fp16 or bf16, head_dim 1 to 256. Any strides. Copied first: a
            tensor whose last dimension is not contiguous, or that negates what it views; with a head dim that is no
            multiple of 8 all three, padded to one (and the output, cut back); and a tensor whose base or strides are
            not multiples of 16 bytes, but k and v only if more than 256 queries share a key (seqlen_q times the group's
            heads): else nothing is copied for them, and a kernel runs that moves single elements. A backward copies
            likewise, and all that is unaligned, the output's gradient too.
        k, v: (batch, seqlen_k, num_heads_k, head_dim), dtype and device of q. num_heads_q is a multiple of num_heads_k;
            query head h reads key/value head ``h // (num_heads_q // num_heads_k)``.
        causal: Query i sees key j iff ``j <= i + seqlen_k - seqlen_q`` (bottom-right alignment).
        softmax_scale: Any finite number (kernels: up to 2.3e38); None is ``1 / sqrt(head_dim)``. For a negative one q
            is negated, a copy.
        return_lse: Also return the log-sum-exp of each row's scaled scores.
        deterministic: Equal inputs give equal bits in the gradients too, which else depend on the order in which blocks
            add to dq; None asks ``torch.are_deterministic_algorithms_enabled()``, now. Outputs always repeat. All that
            holds for one config: another size or table may choose another, which rounds differently.
        backend: ``"auto"``: ``"cuda"`` for CUDA tensors, ``"reference"`` (float64) for CPU tensors. ``"emulator"`` runs
            the generated kernel on the CPU.
        config: Forces a config; None takes the tuned tables' choice.
        backward_config: Likewise for the gradients.

    Returns:
        Output, a new contiguous tensor shaped like q in its dtype; with ``return_lse`` also the natural-log LSE,
        (batch, num_heads_q, seqlen_q) float32. A query that sees no key has output 0 and LSE -inf.

        NaN or infinity in keys that a query does not see leaves its output alone. So it does in values beyond the end
        of v, but under a causal mask a kernel multiplies hidden values by a weight of 0, and 0 * NaN is NaN in up to
        one tile of earlier queries (the reference backend keeps them out).

        Kernels sum in float32. In bf16 that is a limit: a product q k beyond 3e38 counts as infinite, whatever the
        scale, and |v| times the number of keys has to stay below 1e30.

    Raises:
        ArgumentError: An argument is not legal; the message names it. Raised before anything is launched.
        InfeasibleError: ``config`` is not legal for this call on this GPU, or ``backward_config`` for its gradients.
        ToolchainError: A kernel has to be compiled and there is no nvcc, or on Hopper cuda-bindings is missing.
        LaunchError: A kernel would have to be compiled during CUDA-graph capture, or the driver refused.
    """
    if _is_compiling():
        return traced_call(q, k, v, causal, softmax_scale, return_lse, deterministic, backend, config, backward_config)
    try:
        q_ptr, k_ptr, v_ptr = q.data_ptr(), k.data_ptr(), v.data_ptr()
        plan: ForwardPlan | None = PLANS[
            (
                q.shape,
                k.shape,
                v.shape,
                q.stride(),
                k.stride(),
                v.stride(),
                q.dtype,
                k.dtype,
                v.dtype,
                q.get_device(),
                k.get_device(),
                v.get_device(),
                (q_ptr | k_ptr | v_ptr) & 15,
                causal,
                softmax_scale,
                return_lse,
                deterministic,
                backend,
                config,
                backward_config,
            )
        ]
    # A call not seen before, an argument that is no tensor or not hashable, a tensor without memory.
    except (KeyError, AttributeError, TypeError, RuntimeError):
        plan = None
    # A plan's tensors have memory, which holds their values; a stand-in (a fake tensor, a wrapper, a view that negates)
    # may share everything else with them. Forward-mode differentiation and dispatch modes cannot see a launch.
    if (
        plan is None
        or not (q_ptr and k_ptr and v_ptr)
        or (q.is_neg() or k.is_neg() or v.is_neg())
        or forward_ad._current_level >= 0
        or _num_dispatch_modes()
    ):
        return first_call(q, k, v, causal, softmax_scale, return_lse, deterministic, backend, config, backward_config)
    if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return record(q, k, v, plan.differentiable, plan.record(q_ptr, k_ptr, v_ptr))  # type: ignore[no-any-return]
    return plan.run(q_ptr, k_ptr, v_ptr)  # type: ignore[no-any-return]
