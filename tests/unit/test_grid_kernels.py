"""The GPU grid covers what it says, within the kernels that it may cost."""

from __future__ import annotations

import itertools

import pytest

from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import get_gpu
from fa2gen.spec import NATIVE_HEAD_DIMS, KernelSpec
from fa2gen.tuning.space import legal_space
from tests.grid_kernels import (
    DTYPES,
    FORCED_HEAD_DIMS,
    MASKS,
    ORDERED,
    OTHER_HEAD_DIMS,
    RATIOS,
    backward_kernels,
    covering_configs,
    forced_kernels,
    grid_cells,
    is_interacting,
    ordered_kernels,
    value_pairs,
)


def test_every_mask_dtype_and_ratio_of_every_head_dim() -> None:
    cells = grid_cells()
    assert len(cells) == len(set(cells)) == 80
    for head_dim in (*NATIVE_HEAD_DIMS, *OTHER_HEAD_DIMS):
        mine = [cell for cell in cells if cell.head_dim == head_dim]
        assert {(cell.dtype, cell.causal) for cell in mine} == set(itertools.product(DTYPES, MASKS))
        assert {cell.gqa_ratio for cell in mine} == set(RATIOS)
    for head_dim in NATIVE_HEAD_DIMS:
        mine = [cell for cell in cells if cell.head_dim == head_dim]
        assert {(cell.dtype, cell.gqa_ratio) for cell in mine} == set(itertools.product(DTYPES, RATIOS))
        assert {(cell.causal, cell.gqa_ratio) for cell in mine} == set(itertools.product(MASKS, RATIOS))


@pytest.mark.parametrize("head_dim", FORCED_HEAD_DIMS)
def test_every_value_of_every_tunable(head_dim: int) -> None:
    gpu = get_gpu("h200")
    possible = set().union(*map(value_pairs, legal_space(KernelSpec(head_dim=head_dim, gqa_ratio=8), gpu).configs))
    covered = set().union(*map(value_pairs, covering_configs(head_dim, gpu)))
    wanted = {pair for pair in possible if len(pair) == 1 or is_interacting(pair)}
    assert wanted <= covered


def test_forced_kernels_are_legal_and_varied() -> None:
    gpu = get_gpu("h200")
    kernels = list(forced_kernels(gpu))
    assert all(infeasible_reason(spec, config, gpu.arch) is None for spec, config in kernels)
    for head_dim in FORCED_HEAD_DIMS:
        specs = [spec for spec, _ in kernels if spec.head_dim == head_dim]
        assert {spec.alignment for spec in specs} == {2, 16}
        assert {(spec.dtype, spec.causal) for spec in specs} == set(itertools.product(DTYPES, MASKS))
        assert len({spec.gqa_ratio for spec in specs}) >= 3


def test_backward_kernels_hold_every_way_of_computing_it() -> None:
    gpu = get_gpu("h200")
    kernels = backward_kernels(gpu)
    assert len(kernels) == len(set(kernels)) == 13
    assert len(ordered_kernels(gpu)) == len(ORDERED)
    assert {spec.head_dim for spec, _ in kernels} == {*NATIVE_HEAD_DIMS}
    assert {(spec.dtype, spec.causal) for spec, _ in kernels} == set(itertools.product(DTYPES, MASKS))
    assert {spec.gqa_ratio for spec, _ in kernels} == {1, 2, 3, 4}
    for name, values in {
        "roles": {1, 2},
        "warps_d": {1, 2},
        "num_stages": {1, 2},
        "ds_stages": {1, 2},
        "reduction": {"scalar", "vector"},
        "split_heads": {False, True},
    }.items():
        assert {getattr(config, name) for _, config in kernels} == values
    # A chip without the vector reduction has the defaults, whose order may be fixed too.
    for name in ("a100", "l40s"):
        few = backward_kernels(get_gpu(name))
        assert len(few) == len(NATIVE_HEAD_DIMS)
        assert {spec.deterministic for spec, _ in few} == {False, True}
