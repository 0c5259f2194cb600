"""The kernels that ``sanitize.py`` runs, their inputs, and whether what they wrote is right."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa2gen.codegen import PARAMS, kernels_of, param_struct, render_kernel
from fa2gen.compile import CompiledKernel, compile_many
from fa2gen.constraints import infeasible_reason
from fa2gen.constraints_sm90 import compile_target
from fa2gen.errors import CompileError
from fa2gen.gate import GateCase, check_backward, check_forward, laid_out, make_gradients, make_inputs
from fa2gen.hardware import Gpu
from fa2gen.launch import LaunchPlan, bwd_plan, fwd_plan
from fa2gen.problem import Problem
from fa2gen.reference import attention_forward
from fa2gen.runtime.copies import used_strides
from fa2gen.spec import BwdConfig, Config, ForwardConfig, KernelSpec, config_from_slug
from tests.gpu.sanitize_launch import Array, Job, Step, unwritten

Results = Mapping[str, bytes]
Strides = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """A kernel and its inputs: data and amount of a ``GateCase``, and whether the kernel must repair a step of it."""

    spec: KernelSpec
    config: Config
    inputs: tuple[tuple[str, float], ...] = (("normal", 1.0),)
    repaired: tuple[bool, ...] = (False,)


def _forward(slug: str, *, repaired: str = "", **spec: Any) -> Case:
    """Normal data, and data on which the guarded softmax must be ``repaired``."""
    inputs = [("normal", 1.0), *([(repaired, 200.0)] if repaired else [])]
    return Case(KernelSpec(**spec), config_from_slug("fwd", slug), tuple(inputs), (False, True)[: len(inputs)])


def _backward(slug: str, head_dim: int, **spec: Any) -> Case:
    return Case(KernelSpec("bwd", head_dim, **spec), BwdConfig.from_slug(slug))


# So few that the blocks of kernels that walk over tiles have several.
NUM_SMS = 2
FORWARD = (
    _forward("sm80_128x64s64_w4_st3_qr_guarded_mb1_pb", head_dim=64, causal=True, repaired="spike_first"),
    _forward("sm80_128x64s64_w4_st2_qs_guarded_mb1_ring", head_dim=128, repaired="both"),
    _forward("sm80_128x64s64_w4_st2_qs_guarded_mb1_pb_ring", head_dim=128, causal=True, repaired="spike_first"),
    _forward("sm80_256x64s64_w8_st3_qs_guarded_mb1_pb_ring", head_dim=128, repaired="spike_first"),
    _forward("sm80_128x64s64_w8_st2_qs_guarded_mb1_ring_wn2", head_dim=256, causal=True, repaired="both"),
    _forward("sm80_64x64s64_w4_st2_qs_guarded_mb1_pb_wn2", head_dim=128, causal=True, repaired="spike_first"),
    _forward("sm80_64x64s64_w4_st2_qs_guarded_mb1_pack", head_dim=96, causal=True, gqa_ratio=3, repaired="both"),
    _forward("sm80_64x64s64_w2_st2_qr_guarded_mb2", head_dim=64, causal=True, alignment=2),
    _forward("sm80_64x64s64_w4_st2_qs_guarded_mb1_ring", head_dim=40, dtype="fp16", alignment=2),
    _forward("sm80_64x64s64_w2_st1_qs_guarded_mb2", head_dim=128, dtype="fp16", causal=True, repaired="both"),
    _forward("sm80_64x64s32_w4_st2_qs_online_mb1", head_dim=200, gqa_ratio=7),
    _forward("sm90_192x128_st3_q2_ov_pp_dynamic_tma", head_dim=64, causal=True, gqa_ratio=2),
    _forward("sm90_128x128_st2_q2_ov_pp_static_tma", head_dim=128, gqa_ratio=3),
    _forward("sm90_128x96_st2_q1_ps_ov_pp_dynamic_direct", head_dim=128, dtype="fp16", causal=True, gqa_ratio=2),
    _forward("sm90_128x80_st2_q1_ov_pp_dynamic_direct", head_dim=256, causal=True, gqa_ratio=2),
    _forward("sm90_64x64_st2_q1_static_tma", head_dim=40, dtype="fp16", gqa_ratio=2),
    _forward("sm90_256x64_st4_q2_ov_xt_pp_guarded_dynamic_tma", head_dim=64, causal=True, repaired="spike_first"),
    _forward("sm90_128x64_st2x1_q1x1r4_ov_xt_pp_guarded_static_direct", head_dim=128, repaired="both"),
    _forward("sm90_192x64_st3_q1_ps_ov_guarded_dynamic_tma", head_dim=128, causal=True, repaired="both"),
    _forward("sm90_128x64_st2_q1r8_ov_pp_guarded_static_direct", head_dim=256, dtype="fp16", repaired="spike_first"),
)
BACKWARD = (
    _backward("sm80_64x64s16_w2_st2_r1_mb1_v4", 32, dtype="fp16"),
    _backward("sm80_64x64s64_w4_st1_r2_mb1", 40, causal=True, gqa_ratio=2, deterministic=True),
    _backward("sm80_64x128s32_w4_st2_r1_mb1_v4", 64, causal=True),
    _backward("sm80_32x64s32_w4_st2_r1_mb1_kvr_v4_ds2", 64, deterministic=True),
    _backward("sm80_64x64s32_w4_st1_r1_mb1_wd2", 64, causal=True, gqa_ratio=3),
    _backward("sm80_32x32s32_w4_st2_r2_mb1_ds2_sh", 96, causal=True, gqa_ratio=2),
    _backward("sm80_64x128s64_w8_st2_r2_mb1_v4_ds2", 128, causal=True, deterministic=True),
    _backward("sm80_32x64s32_w8_st1_r2_mb1_wd2_v4_sh", 128, gqa_ratio=4),
    _backward("sm80_64x64s64_w8_st2_r2_mb1_wd2_v4_ds2", 192, deterministic=True),
    _backward("sm80_64x64s64_w8_st2_r2_mb1_wd2_v4_ds2", 256, causal=True),
    _backward("sm80_32x32s32_w4_st2_r1_mb1_wd2", 256, dtype="fp16", gqa_ratio=2, deterministic=True),
)
CASES = (*FORWARD, *BACKWARD)


@dataclass(frozen=True)
class Prepared:
    """A job, the tensors that it holds by the names of its arrays, and what is wrong with results (None: nothing)."""

    label: str
    job: Job
    tensors: Mapping[str, Tensor]
    fault: Callable[[Results], str | None]


def prepare(gpu: Gpu) -> list[Prepared]:
    """Inputs and compiled kernels of all cases that are legal on a GPU; names the others."""
    legal = []
    for case in CASES:
        reason = infeasible_reason(case.spec, case.config, gpu.arch)
        if reason is None:
            legal.append(case)
        else:
            print(f"not run here: {case.spec.slug()} {case.config.slug()}: {reason}")
    sources = [render_kernel(case.spec, case.config, kernel=name) for case in legal for name in _kernels(case)]
    compiled = compile_many([(source, compile_target(source.config, gpu.target)) for source in sources])
    prepared = []
    for number, case in enumerate(legal):
        kernels = {}
        for name in _kernels(case):
            kernel = compiled.pop(0)
            if isinstance(kernel, CompileError):
                raise kernel
            kernels[name] = kernel
        prepared += prepared_jobs(case, number, kernels, gpu.l2_bytes)
    return prepared


def _kernels(case: Case) -> tuple[str, ...]:
    return kernels_of(case.spec.kind)


def prepared_jobs(case: Case, number: int, kernels: Mapping[str, CompiledKernel], l2_bytes: int) -> list[Prepared]:
    """The jobs of a case, one for each of its inputs; ``number`` chooses the layouts of a backward's tensors."""
    if isinstance(case.config, BwdConfig):
        return [_backward_job(case.spec, case.config, number, kernels, l2_bytes)]
    return [_forward_job(case, case.config, i, kernels, l2_bytes) for i in range(len(case.inputs))]


def _forward_job(
    case: Case, config: ForwardConfig, number: int, kernels: Mapping[str, CompiledKernel], l2_bytes: int
) -> Prepared:
    spec, (data, amount), repaired = case.spec, case.inputs[number], case.repaired[number]
    # A ragged tile at both ends; enough key tiles for every stage to be filled twice.
    problem = Problem(1, config.block_m + 17, 2 * config.num_stages * config.block_n + 5, spec.gqa_ratio, 1)
    scale = 1.0 / math.sqrt(spec.head_dim)
    period = config.step_n if data == "both" else 1
    gate_case = GateCase(problem, data, scale, amount, period, layout=("padded", "heads_first")[number % 2])
    q, k, v = make_inputs(spec, gate_case, "cpu")
    rows, heads = problem.seqlen_q, problem.num_heads_q
    tensors = {"q": q, "k": k, "v": v}
    strides = _strides(tensors, {"o": q})
    plan = fwd_plan(spec, config, problem, strides=strides, softmax_scale=scale, l2_bytes=l2_bytes, num_sms=NUM_SMS)
    start = 0 if spec.alignment == 16 else 2
    arrays = {name: Array(_span(x), start) for name, x in tensors.items()}
    arrays |= {"o": unwritten(2 * q.numel()), "softmax_lse": unwritten(4 * rows * heads), "repairs": Array(bytes(4))}
    # What the kernel touches of it; the plan rounds it up.
    arrays |= {workspace.pointer: unwritten(8) for workspace in plan.workspaces}

    def fault(results: Results) -> str | None:
        out, lse = _like(results["o"], q), _read(results["softmax_lse"], torch.float32).view(1, heads, rows)
        report = check_forward(out, lse, q, k, v, causal=spec.causal, softmax_scale=scale)
        if not report.passed:
            return report.text
        if repaired and not any(results["repairs"]):
            return "nothing was repaired, so the repair was not watched"
        return None

    job = Job(_steps(plan, config, kernels), arrays, ("o", "softmax_lse", "repairs"))
    return Prepared(f"{spec.slug()} {config.slug()} {gate_case.label()}", job, tensors, fault)


def _backward_job(
    spec: KernelSpec, config: BwdConfig, number: int, kernels: Mapping[str, CompiledKernel], l2_bytes: int
) -> Prepared:
    # Each stage is filled twice by whole tiles of queries and once more by a ragged one; a block may walk over several
    # heads. Two key blocks at least, the last one ragged; with a mask and enough queries half a tile sees no key.
    tiles = 2 * config.num_stages // (1 if config.split_heads else spec.gqa_ratio)
    rows = max(1, tiles) * config.block_m + 5
    keys = config.block_n + 17
    keys = max(keys, rows - config.block_m // 2 - 1) if spec.causal else keys
    problem, scale = Problem(1, rows, keys, spec.gqa_ratio, 1), 1.0 / math.sqrt(spec.head_dim)
    gate_case = GateCase(
        problem,
        "normal",
        scale,
        layout=("padded", "heads_first")[number % 2],
        grad_layout=("heads_first", "broadcast_row", "padded", "expanded")[number % 4],
        dlse=number % 3 != 0,
    )
    q, k, v = make_inputs(spec, gate_case, "cpu")
    dout, dlse = make_gradients(spec, gate_case, "cpu")
    ref, lse = attention_forward(q, k, v, causal=spec.causal, softmax_scale=scale)
    tensors = {"q": q, "k": k, "v": v, "o": laid_out(ref.to(q.dtype), gate_case.layout, 16), "dout": dout}
    rows_of = {"lse": lse.float(), **({} if dlse is None else {"dlse": dlse})}
    outputs = {"dq": q, "dk": k, "dv": v}
    plan = bwd_plan(spec, config, problem, strides=_strides(tensors, outputs), softmax_scale=scale, l2_bytes=l2_bytes)
    arrays = {name: Array(_span(x)) for name, x in tensors.items()}
    arrays |= {name: Array(x.numpy().tobytes()) for name, x in rows_of.items()}
    arrays |= {name: unwritten(2 * x.numel()) for name, x in outputs.items()}
    arrays |= {name: unwritten(size) for name, size in workspace_bytes(plan, problem).items()}

    def fault(results: Results) -> str | None:
        grads = [_like(results[name], x) for name, x in outputs.items()]
        report = check_backward(grads, q, k, v, dout, causal=spec.causal, softmax_scale=scale, dlse=dlse)
        return None if report.passed else report.text

    job = Job(_steps(plan, config, kernels), arrays, tuple(outputs))
    return Prepared(f"{spec.slug()} {config.slug()} {gate_case.label()}", job, tensors | rows_of, fault)


def workspace_bytes(plan: LaunchPlan, problem: Problem) -> dict[str, int]:
    """Bytes of a backward's workspaces as its kernels count them; the plan rounds them up."""
    struct_of, (preprocess, *_) = PARAMS["bwd_preprocess"], plan.launches
    values = struct.unpack(struct_of.format, preprocess.params)
    told = dict(zip((member.name for member in struct_of.fields), values, strict=True))
    rows = 4 * problem.batch * problem.num_heads_q * told["padded_seqlen_q"]
    dkv = told["dkv_accum_bytes"]
    sizes = {"lse_log2": rows, "delta": rows, "dq_accum": told["dq_accum_bytes"], "dk_accum": dkv, "dv_accum": dkv}
    sizes["semaphores"] = told["semaphores_bytes"]
    return {workspace.pointer: sizes[workspace.pointer] for workspace in plan.workspaces}


def _strides(tensors: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Strides]:
    """Of inputs, and of outputs that are contiguous and shaped like tensors."""
    strides = {name: used_strides(x) for name, x in tensors.items()}
    for name, x in outputs.items():
        _, rows, heads, head_dim = x.shape
        strides[name] = (rows * heads * head_dim, heads * head_dim, head_dim)
    return strides


def _steps(plan: LaunchPlan, config: Config, kernels: Mapping[str, CompiledKernel]) -> tuple[Step, ...]:
    return tuple(
        Step(
            kernels[launch.kernel],
            launch.grid,
            launch.num_threads,
            launch.params,
            param_struct(launch.kernel, config.family).pointers,
            launch.tensor_maps,
        )
        for launch in plan.launches
    )


def _span(x: Tensor) -> bytes:
    """A view's memory from its first element to its last."""
    length = 1 + sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    data: bytes = x.as_strided((length,), (1,)).view(torch.int16).numpy().tobytes()
    return data


def _read(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


def _like(data: bytes, x: Tensor) -> Tensor:
    return _read(data, x.dtype).view(x.shape)


def wrong_results(prepared: Sequence[Prepared], results: Sequence[Results | None]) -> list[str]:
    """What is wrong with the results that a watched process brought back."""
    faults = [
        (item.label, "no result" if found is None else item.fault(found))
        for item, found in zip(prepared, results, strict=True)
    ]
    return [f"{label}: {fault}" for label, fault in faults if fault is not None]
