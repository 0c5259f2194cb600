"""What the sm90 family has to tune: its space, shortlist, machine code, refusals, and launches with tensor maps."""

from __future__ import annotations

import itertools
import struct
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fa2gen.codegen import param_struct, render_kernel
from fa2gen.compile import CompiledKernel, ResourceUsage
from fa2gen.constraints import default_config_of, infeasible_reason
from fa2gen.hardware import get_gpu, list_gpus
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, FwdSm90Config, KernelSpec
from fa2gen.tensor_map import BYTES
from fa2gen.tuning import launcher
from fa2gen.tuning.builds import compile_configs
from fa2gen.tuning.inputs import make_tensors
from fa2gen.tuning.report import usual_problem
from fa2gen.tuning.shortlist import code_digest, launch_reason, neighbours, shortlist, spill_reason
from fa2gen.tuning.space import GRIDS, exclusion_reason, families, legal_space
from tests.tuning_fakes import FakeRooms

H200, A100 = get_gpu("h200"), get_gpu("a100")
SPEC = KernelSpec()
GRID = GRIDS["fwd"]["sm90"]
# In the space of head dim 128.
BASE = FwdSm90Config(q_stages=2, softmax="guarded")
CLEAN = ResourceUsage(168, 0, 0, 0, 0, 5)


# ---- The space


@pytest.mark.parametrize("head_dim", [8, 32, 64, 96, 128, 192, 256])
def test_the_space_is_the_part_worth_trying_of_the_grid(head_dim):
    spec = KernelSpec(head_dim=head_dim)
    space = legal_space(spec, H200, "sm90")
    assert 32 <= len(space.configs) <= 4000
    assert all(infeasible_reason(spec, config, H200.arch) is None for config in space.configs)
    assert {*space.configs, *(config for config, _ in space.excluded)} == set(GRID.configs(False))
    assert all(reason for _, reason in space.excluded)
    assert default_config_of(spec, "sm90") in space.configs


def test_families_by_gpu_and_spec():
    assert families(SPEC, H200) == ("sm80", "sm90")
    assert families(SPEC, H200, ["sm90"]) == ("sm90",)
    for spec in (KernelSpec(alignment=2), KernelSpec("bwd")):
        assert families(spec, H200) == ("sm80",)
    for gpu in list_gpus():
        assert families(SPEC, gpu) == (("sm80", "sm90") if gpu.compute_capability == (9, 0) else ("sm80",))
    assert legal_space(SPEC, A100, "sm90").configs == ()


def test_spaces_of_families_are_spaces_of_their_own():
    assert legal_space(SPEC, H200, "sm90").key() != legal_space(SPEC, H200).key()
    assert not {*legal_space(SPEC, H200, "sm90").configs} & {*legal_space(SPEC, H200).configs}


def test_params_and_configs_correspond():
    for config in GRID.configs(True):
        assert GRID.config_of(GRID.params_of(config)) == config
    # Not in the grid, though there are kernels: products in order, the online softmax where products overlap, other
    # sections, other tiles of Q.
    for change in (
        {"overlap": False, "ping_pong": False, "softmax": "online"},
        {"softmax": "online"},
        {"scheduler": "dynamic", "section_mib": 5},
        {"block_m": 192, "block_n": 64, "q_stages": 1, "q_extra": 2},
    ):
        plain = replace(BASE, **change)
        assert not GRID.holds(plain)
        assert GRID.config_of(GRID.params_of(plain)) is None
        assert neighbours(SPEC, usual_problem(SPEC, 1024, 1024), H200, [plain])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"overlap": False, "ping_pong": False, "softmax": "online"}, "neither overlap nor turns"),
        ({"softmax": "online"}, "softmax online: 5 to 16 % behind"),
        ({"p_in_smem": True, "block_n": 64}, "P in shared memory: there are registers"),
        ({"p_in_smem": True, "block_n": 64, "q_regs": 4}, "and Q in registers takes them"),
        ({"overlap": False, "softmax": "online"}, "turns without overlap: there are registers"),
        ({"block_m": 64, "ping_pong": False, "p_in_smem": True}, "a single consumer has enough"),
        ({"block_m": 192, "block_n": 96}, "serializes"),
        ({"num_stages": 4, "block_n": 144}, "stages of 144 keys"),
        ({"num_stages": 4}, "shared memory"),
        ({"q_stages": 1}, "the next one waits for the output"),
        ({"q_regs": 4}, "there are registers for 8"),
        ({"q_regs": 4, "block_n": 144}, "Q in registers gains nothing up to head_dim 64"),
        ({"k_extra": 1, "block_n": 64}, "one more stage of K: there is shared memory"),
        ({"q_stages": 1, "q_extra": 1, "epilogue": "direct"}, "64 more rows of Q: there is shared memory"),
        ({"scheduler": "dynamic", "section_mib": 8}, "orders the tiles of a causal mask"),
    ],
)
def test_exclusions_say_why(change, text):
    spec = KernelSpec(head_dim=64) if change.get("block_n") == 144 else SPEC
    assert text in exclusion_reason(spec, replace(BASE, **change), H200.arch)


def test_registers_that_lack_make_room_for_other_ways():
    """Of 192 rows and 160 keys P does not fit in registers: in shared memory, or without overlap, it does."""
    spec, legal = KernelSpec(head_dim=64), {*legal_space(KernelSpec(head_dim=64), H200, "sm90").configs}
    wide = replace(BASE, block_m=192, block_n=160)
    assert "registers" in exclusion_reason(spec, wide, H200.arch)
    assert {replace(wide, p_in_smem=True), replace(wide, overlap=False, softmax="online")} <= legal


def test_a_shortlist_is_of_one_family_and_not_crowded_by_one_shape():
    size = usual_problem(SPEC, 2048, 2048)
    best = shortlist(SPEC, [size], H200, 12, "sm90")
    assert {config.family for config in best} == {"sm90"}
    shapes = {(c.block_m, c.block_n, c.p_in_smem, c.overlap, c.ping_pong, c.overlap_tiles) for c in best}
    assert len(shapes) == len(best) == 12
    assert {config.family for config in shortlist(SPEC, [size], H200, 12)} == {"sm80"}
    everything = shortlist(SPEC, [size], H200, 10_000, "sm90")
    assert set(everything) == {*legal_space(SPEC, H200, "sm90").configs}


def test_neighbours_differ_in_one_tunable_of_their_family():
    size = usual_problem(SPEC, 2048, 2048)
    config = default_config_of(SPEC, "sm90")
    near = neighbours(SPEC, size, H200, [config])
    mine = GRID.params_of(config)
    assert near
    for other in near:
        assert sum(value != mine[name] for name, value in GRID.params_of(other).items()) == 1
    mixed = neighbours(SPEC, size, H200, [config, default_config_of(SPEC, "sm80")])
    assert {other.family for other in mixed} == {"sm80", "sm90"}


# ---- What the compiler says


def build(config, resources=CLEAN, cubin=b"code", spec=SPEC):
    return (CompiledKernel(render_kernel(spec, config), "sm_90a", cubin, resources, "key", False, 1.0, ""),)


def test_one_block_fits_with_the_launch_s_share_of_registers():
    for config, registers in (
        (FwdSm90Config(), 168),
        (FwdSm90Config(block_m=192, block_n=80), 128),
        (FwdSm90Config(block_m=64, ping_pong=False), 255),
    ):
        assert launch_reason(build(config, replace(CLEAN, registers=registers)), H200) is None
    assert "no block fits" in launch_reason(build(FwdSm90Config(), replace(CLEAN, registers=176)), H200)


def test_any_spill_is_a_failure():
    assert spill_reason(build(FwdSm90Config())) is None
    spilling = replace(CLEAN, spill_store_bytes=4, spill_load_bytes=4, stack_bytes=8)
    assert "4 bytes of spill stores" in spill_reason(build(FwdSm90Config(), spilling))
    assert "8 of stack" in spill_reason(build(FwdSm90Config(), replace(CLEAN, stack_bytes=8)))
    assert spill_reason(build(FwdConfig(), spilling)) is None


def test_equal_code_is_alike_only_with_equal_launches():
    """Tiles decide tensor maps, the epilogue whether O has one, the scheduler the workspace."""
    base = FwdSm90Config(num_stages=3, block_n=64)
    changes = ({}, {"epilogue": "direct"}, {"scheduler": "dynamic"}, {"block_n": 80}, {"block_m": 192})
    digests = {code_digest(build(replace(base, **change))) for change in changes}
    assert len(digests) == len(changes)
    assert code_digest(build(base)) == code_digest(build(replace(base, overlap=False)))


def test_each_family_is_compiled_for_its_own_target():
    rooms, targets = FakeRooms(), []
    tools = rooms.tools()

    def compile_many(jobs, on_done):
        targets.extend(target for _, target in jobs)
        return rooms._compile_many(jobs, on_done)

    jobs = [(SPEC, FwdSm90Config()), (SPEC, FwdConfig())]
    compile_configs(replace(tools, compile_many=compile_many), jobs, "sm_90", lambda index, result: None)
    assert targets == ["sm_90a", "sm_90"]


# ---- Launches


class _Loaded:
    def __init__(self, log):
        self.log = log

    def launch(self, grid, block, params, stream):
        self.log.append((grid, block, params))


@pytest.mark.parametrize(("scheduler", "epilogue"), [*itertools.product(("static", "dynamic"), ("tma", "direct"))])
def test_a_launch_has_tensor_maps_before_its_pointers(scheduler, epilogue, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    maps = ModuleType("fa2gen.driver.tensor_maps")
    maps.encode = lambda map, address: struct.pack("<Q", address).ljust(BYTES, b"m")
    monkeypatch.setitem(sys.modules, "fa2gen.driver.tensor_maps", maps)
    config = FwdSm90Config(scheduler=scheduler, epilogue=epilogue)
    tensors = make_tensors(SPEC, Problem(2, 300, 200, 4, 4), torch.device("cpu"))
    plan = launcher.make_plan(SPEC, config, tensors, 0.125, 1 << 25, 132)
    log: list = []
    launcher.bind({"fwd": _Loaded(log)}, plan, tensors, config.family)()
    ((grid, block, params),) = log
    assert (grid, block) == ((24, 1, 1), (384, 1, 1))
    fields = param_struct("fwd", "sm90")
    assert len(params) == fields.size
    for index, name in enumerate(fields.tensor_maps):
        encoded = params[index * BYTES : (index + 1) * BYTES]
        tensor = name.removesuffix("_map")
        if tensor == "o" and epilogue == "direct":
            assert encoded == bytes(BYTES)
        else:
            assert encoded == struct.pack("<Q", tensors[tensor].data_ptr()).ljust(BYTES, b"m")
    values = struct.unpack_from(f"<{len(fields.pointers)}Q", params, fields.pointers_at)
    pointers = dict(zip(fields.pointers, values, strict=True))
    assert (pointers["o"], pointers["softmax_lse"]) == (tensors["o"].data_ptr(), tensors["softmax_lse"].data_ptr())
    assert (pointers["tickets"] != 0) == (scheduler == "dynamic")
    # The rest is the plan's.
    rest = fields.pointers_at + 8 * len(fields.pointers)
    assert params[rest:] == plan.launches[0].params[rest:]
