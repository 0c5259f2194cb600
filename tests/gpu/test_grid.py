"""Every head dim, dtype, mask and head ratio at odd sizes through the public function, and every tunable's values.

What runs is in ``tests/grid_kernels.py``. All kernels are compiled at the beginning, in parallel: about 130 of 3 to 4
core-seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fa2gen.codegen import render_kernel
from fa2gen.compile import compile_many
from fa2gen.constraints_sm90 import compile_target
from fa2gen.errors import CompileError
from fa2gen.gate import GateCase, check_forward, forward_cases, make_inputs
from fa2gen.problem import Problem
from fa2gen.runtime import attention, plan
from fa2gen.runtime.request import Request, read_request
from fa2gen.spec import FwdConfig, KernelSpec
from tests.grid_kernels import FORCED_CONFIGS, FORCED_HEAD_DIMS, SHAPES, GridCell, forced_kernels, grid_cells

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CELLS = grid_cells()
# Few enough queries for unaligned keys to be read in place: the ratio of those kernels is at most 3.
UNALIGNED_SHAPES = ((1, 700), (17, 203), (21, 1025))


@dataclass(frozen=True)
class _Kernels:
    """The config of each cell, and the kernels with forced ones by head dim."""

    cells: dict[GridCell, FwdConfig]
    forced: dict[int, list[tuple[KernelSpec, FwdConfig]]]


def _problem(cell: GridCell, shape: tuple[int, int]) -> Problem:
    heads_k = 2 if cell.gqa_ratio <= 3 else 1
    return Problem(1 if max(shape) > 1000 else 2, *shape, heads_k * cell.gqa_ratio, heads_k)


def _tables_choice(cell: GridCell, shape: tuple[int, int], index: int) -> tuple[KernelSpec, FwdConfig]:
    spec = KernelSpec(
        head_dim=-(-cell.head_dim // 8) * 8, dtype=cell.dtype, causal=cell.causal, gqa_ratio=cell.gqa_ratio
    )
    scale, device = 1.0 / math.sqrt(cell.head_dim), torch.device("cuda", index)
    request = Request(spec, _problem(cell, shape), cell.head_dim, scale, "cuda", device, {}, {})
    return spec, plan.match_config(request, index, None).config


@pytest.fixture(scope="module")
def kernels() -> _Kernels:
    """A cell's config is what the tables choose for one of its shapes, another one from cell to cell."""
    index = torch.cuda.current_device()
    gpu = plan.device_gpu(index)
    chosen = {cell: _tables_choice(cell, SHAPES[i % len(SHAPES)], index) for i, cell in enumerate(CELLS)}
    forced = list(forced_kernels(gpu))
    jobs = list(dict.fromkeys([*chosen.values(), *forced]))
    compiled = compile_many([(render_kernel(*job), compile_target(job[1], gpu.target)) for job in jobs])
    for (spec, config), kernel in zip(jobs, compiled, strict=True):
        assert not isinstance(kernel, CompileError), f"{spec.slug()} {config.slug()}: {kernel}"
        plan.loaded_kernel(spec, config, index, kernel)
    return _Kernels(
        {cell: config for cell, (_, config) in chosen.items()},
        {head_dim: [kernel for kernel in forced if kernel[0].head_dim == head_dim] for head_dim in FORCED_HEAD_DIMS},
    )


def _run(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, config: FwdConfig | None) -> None:
    """One call into memory that held NaN (the allocator hands the freed blocks out again), every element compared."""
    poison = (torch.full_like(q, math.nan), torch.full((q.shape[:3].numel(),), math.nan, device=q.device))
    del poison
    out, lse = attention(q, k, v, causal=causal, softmax_scale=scale, return_lse=True, config=config)
    report = check_forward(out, lse, q, k, v, causal=causal, softmax_scale=scale)
    name = "the tables' choice" if config is None else config.slug()
    assert report.passed, f"{tuple(q.shape)} {tuple(k.shape)} {name}: {report.text}"
    alone = attention(q, k, v, causal=causal, softmax_scale=scale, config=config)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_grid(cell: GridCell, kernels: _Kernels) -> None:
    config, forced = kernels.cells[cell], []
    for shape in SHAPES:
        p = _problem(cell, shape)
        torch.manual_seed(p.seqlen_q * 31 + p.seqlen_k)
        q, k, v = (
            torch.randn(p.batch, seqlen, heads, cell.head_dim, device="cuda").to(DTYPES[cell.dtype])
            for seqlen, heads in ((p.seqlen_q, p.num_heads_q), (p.seqlen_k, p.num_heads_k), (p.seqlen_k, p.num_heads_k))
        )
        forced.append(_tables_choice(cell, shape, q.device.index)[1] != config)
        _run(q, k, v, cell.causal, None, config if forced[-1] else None)
    assert not all(forced)


def _unaligned(x: Tensor) -> Tensor:
    batch, seqlen, heads, head_dim = x.shape
    storage = torch.full((batch, seqlen + 1, heads, head_dim + 3), math.nan, dtype=x.dtype, device=x.device)
    return storage[:, 1:, :, 1 : 1 + head_dim].copy_(x)


def _adversaries(spec: KernelSpec, config: FwdConfig) -> list[GateCase]:
    """Inputs on which a guarded softmax has to be repaired, over several tiles and, if aligned, query blocks.

    And the gate's own at the ends of the range: gigantic logits, v near the dtype's limit, scale 0.
    """
    block_n, step_n, ratio = config.block_n, config.step_n, spec.gqa_ratio
    rows, keys = (2 * config.block_m + 17 if spec.alignment == 16 else 17), 3 * block_n + 1
    cases = (("spike_first", 200.0, 1), ("both", 120.0, step_n), ("cold_last", 300.0, block_n), ("walk", 1.0, 1))
    made = [
        GateCase(Problem(1, rows, keys, ratio, 1), data, 1.0 / math.sqrt(spec.head_dim), amount, period, seed=number)
        for number, (data, amount, period) in enumerate(cases)
    ]
    extremes = [
        case
        for case in forward_cases(spec, config, budget="quick")
        if case.data == "constant" or case.v_scale != 1.0 or case.softmax_scale == 0.0
    ]
    # Views, so that an alignment of 2 is what the call has.
    layouts = ("padded", "heads_first")
    return [replace(case, layout=layouts[number % 2]) for number, case in enumerate([*made, *extremes])]


@pytest.mark.parametrize("number", range(FORCED_CONFIGS))
@pytest.mark.parametrize("head_dim", FORCED_HEAD_DIMS)
def test_forced_configs(head_dim: int, number: int, kernels: _Kernels) -> None:
    if number >= len(kernels.forced[head_dim]):
        pytest.skip(f"{len(kernels.forced[head_dim])} configs hold every value of every tunable")
    spec, config = kernels.forced[head_dim][number]
    aligned = spec.alignment == 16
    inputs: list[tuple[float | None, tuple[Tensor, Tensor, Tensor]]] = []
    for seqlen_q, seqlen_k in SHAPES if aligned else UNALIGNED_SHAPES:
        torch.manual_seed(seqlen_q * 31 + seqlen_k)
        q, k, v = (
            torch.randn(1, seqlen, heads, head_dim, device="cuda").to(DTYPES[spec.dtype])
            for seqlen, heads in ((seqlen_q, 2 * spec.gqa_ratio), (seqlen_k, 2), (seqlen_k, 2))
        )
        inputs.append((None, (q, k, v) if aligned else (_unaligned(q), _unaligned(k), _unaligned(v))))
    inputs += [(case.softmax_scale, make_inputs(spec, case, "cuda")) for case in _adversaries(spec, config)]
    for scale, (q, k, v) in inputs:
        request = read_request(q, k, v, causal=spec.causal, softmax_scale=scale, backend="cuda")
        assert request.spec == spec, "the call needs the kernel that was compiled"
        _run(q, k, v, spec.causal, scale, config)
