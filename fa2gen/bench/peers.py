"""The attention libraries that fa2gen is measured beside: which of them import here, and how each is called."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa2gen.errors import UnsupportedError

from .cells import Cell

if TYPE_CHECKING:
    from torch import Tensor

# (q, k, v) -> output, in the implementation's own layout.
Call = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
Prepare = Callable[[Cell, "Tensor", "Tensor", "Tensor"], Call]


@dataclass(frozen=True)
class Implementation:
    """A way to compute a cell.

    Attributes:
        name: Key of its figures in a row.
        version: Of the package it comes in.
        prepare: ``(cell, q, k, v)`` -> the call for tensors of these shapes and strides; everything that need not be
            done in each call is done here. It or the first call raises, with the reason, on a cell that it does not
            take.
        heads_first: Tensors are (batch, heads, seqlen, head_dim) to it; else (batch, seqlen, heads, head_dim).
        around: Makes the context that its calls need, entered outside of what is timed.
    """

    name: str
    version: str
    prepare: Prepare
    heads_first: bool = False
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def arrange(self, x: Tensor) -> Tensor:
        """A (batch, seqlen, heads, head_dim) tensor as this implementation takes it, or its output back; a view."""
        return x.transpose(1, 2) if self.heads_first else x


@dataclass(frozen=True)
class Peer:
    """A library that may be here; ``find`` returns it or raises."""

    title: str
    find: Callable[[], Implementation]


def find_peers(
    names: Sequence[str], *, peers: dict[str, Peer] | None = None
) -> tuple[list[Implementation], dict[str, str]]:
    """The peers that import here, and for each other one the reason why it does not."""
    known = PEERS if peers is None else peers
    found, missing = [], {}
    for name in names:
        try:
            found.append(known[name].find())
        except ModuleNotFoundError as error:
            missing[name] = f"not installed: there is no module {error.name}"
        except Exception as error:  # what half-installed packages raise: ImportError, OSError, RuntimeError, ...
            missing[name] = f"installed, but does not import: {first_line(error)}"
    return found, missing


def first_line(error: BaseException, limit: int = 300) -> str:
    """An exception's kind and the first line of its words."""
    lines = str(error).strip().splitlines()
    return " ".join(f"{type(error).__name__}: {lines[0] if lines else ''}".split())[:limit].rstrip(": ")


def _version(*distributions: str, module: Any = None) -> str:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    # Builds of a module that others than its authors publish have names of their own.
    if module is not None:
        for name in importlib.metadata.packages_distributions().get(_root(module), ()):
            return f"{importlib.metadata.version(name)} ({name})"
    return str(getattr(module, "__version__", "unknown"))


def _root(module: Any) -> str:
    """Name of the package that a module lies in."""
    return str(getattr(module, "__name__", "")).partition(".")[0]


def _first(result: Any) -> Any:
    """The output of functions that return it alone or before their LSE, depending on their version."""
    return result[0] if isinstance(result, (tuple, list)) else result


def _sdpa(name: str, backend: str) -> Implementation:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    version = str(torch.__version__)
    if name == "cudnn":
        version = f"{torch.backends.cudnn.version()} in torch {version}"

    def prepare(cell: Cell, *_: Tensor) -> Call:
        problem = cell.problem
        # The last query sees every key: with one query the mask hides nothing.
        options: dict[str, Any] = {"is_causal": cell.spec.causal and problem.seqlen_q > 1}
        if options["is_causal"] and problem.seqlen_q != problem.seqlen_k:
            if name != "fa2":
                raise UnsupportedError("its causal mask is aligned top-left, for as many queries as keys")
            from torch.nn.attention.bias import causal_lower_right

            options = {"attn_mask": causal_lower_right(problem.seqlen_q, problem.seqlen_k)}
        if cell.spec.gqa_ratio > 1:
            options["enable_gqa"] = True
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)

    return Implementation(name, version, prepare, True, lambda: sdpa_kernel(getattr(SDPBackend, backend)))


def _flash_attn_function(name: str, module_name: str, *distributions: str) -> Implementation:
    """flash-attention's own function, of generation 2, 3 or 4: causal is aligned bottom-right, as here."""
    module = importlib.import_module(module_name)
    function = module.flash_attn_func

    def prepare(cell: Cell, *_: Tensor) -> Call:
        causal = cell.spec.causal
        return lambda q, k, v: _first(function(q, k, v, causal=causal))

    return Implementation(name, _version(*distributions, module=module), prepare)


def _flashinfer() -> Implementation:
    module = importlib.import_module("flashinfer")

    def prepare(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Call:
        import torch

        p, d = cell.problem, cell.spec.head_dim
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")

        def ends(seqlen: int) -> Tensor:
            return torch.arange(p.batch + 1, dtype=torch.int32, device=q.device) * seqlen

        wrapper.plan(
            ends(p.seqlen_q),
            ends(p.seqlen_k),
            p.num_heads_q,
            p.num_heads_k,
            d,
            causal=cell.spec.causal,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = wrapper.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
            return out.view(q.shape)

        return call

    return Implementation("flashinfer", _version("flashinfer-python", "flashinfer", module=module), prepare)


def _xformers() -> Implementation:
    module = importlib.import_module("xformers")
    ops = importlib.import_module("xformers.ops")
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")

    def prepare(cell: Cell, *_: Tensor) -> Call:
        bias = biases.LowerTriangularFromBottomRightMask() if cell.spec.causal else None
        attend, group = ops.memory_efficient_attention, cell.spec.gqa_ratio
        if group == 1:
            return lambda q, k, v: attend(q, k, v, attn_bias=bias)
        kv_heads = cell.problem.num_heads_k

        def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q_5d = q.unflatten(2, (kv_heads, group))
            k_5d, v_5d = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
            out: Tensor = attend(q_5d, k_5d, v_5d, attn_bias=bias)
            return out.flatten(2, 3)

        return grouped

    return Implementation("xformers", _version("xformers", module=module), prepare)


PEERS: dict[str, Peer] = {
    "fa2": Peer("FlashAttention-2 as torch ships it (SDPA)", lambda: _sdpa("fa2", "FLASH_ATTENTION")),
    "cudnn": Peer("cuDNN (SDPA)", lambda: _sdpa("cudnn", "CUDNN_ATTENTION")),
    "efficient": Peer("memory-efficient attention (SDPA)", lambda: _sdpa("efficient", "EFFICIENT_ATTENTION")),
    "flash_attn": Peer(
        "FlashAttention-2, package flash-attn",
        lambda: _flash_attn_function("flash_attn", "flash_attn", "flash-attn"),
    ),
    "fa3": Peer(
        "FlashAttention-3",
        lambda: _flash_attn_function(
            "fa3", "flash_attn_interface", "flash-attn-3", "flash_attn_3", "flash-attn-hopper"
        ),
    ),
    "fa4": Peer("FlashAttention-4", lambda: _flash_attn_function("fa4", "flash_attn.cute", "flash-attn-4")),
    "flashinfer": Peer("FlashInfer, ragged batch prefill", _flashinfer),
    "xformers": Peer("xFormers memory_efficient_attention", _xformers),
}
