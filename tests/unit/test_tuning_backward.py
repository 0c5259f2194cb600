"""Tuning the backward: its space, its three kernels compiled, timed and proved together, its sessions and table."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from fa2gen import driver
from fa2gen.cli import main
from fa2gen.codegen import PARAMS, kernels_of
from fa2gen.constraints import default_config, infeasible_reason
from fa2gen.driver import DeviceInfo
from fa2gen.hardware import get_gpu, list_gpus
from fa2gen.problem import Problem
from fa2gen.spec import NATIVE_HEAD_DIMS, BwdConfig, KernelSpec
from fa2gen.tables import load_table, lookup, save_entries, table_path
from fa2gen.tuning import launcher
from fa2gen.tuning.builds import compile_configs, main_kernel
from fa2gen.tuning.inputs import make_tensors
from fa2gen.tuning.model import model_version, predict
from fa2gen.tuning.prediction import Facts
from fa2gen.tuning.regate import check, regate
from fa2gen.tuning.session import default_requests, tune
from fa2gen.tuning.shortlist import neighbours, shortlist
from fa2gen.tuning.space import GRIDS, exclusion_reason, legal_space
from tests.tuning_fakes import FakeRooms, ResourceUsage, entry, request_for

H200, A100 = get_gpu("h200"), get_gpu("a100")
EACH_ARCH = tuple({gpu.compute_capability: gpu for gpu in list_gpus()}.values())
DEVICE = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 1980.0, (13, 0), "580.95")
SPEC, ORDERED = KernelSpec("bwd", head_dim=64), KernelSpec("bwd", head_dim=64, deterministic=True)
GROUPED = KernelSpec("bwd", head_dim=64, gqa_ratio=8)
GRID = GRIDS["bwd"]["sm80"]
KERNELS = kernels_of("bwd")


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "hidden by a test")


def run(rooms, tmp_path, spec=SPEC, gpu="h200", **options):
    return tune([request_for(spec)], get_gpu(gpu), out=tmp_path / "tables", tools=rooms.tools(), **options)


def saved(tmp_path, gpu="h200"):
    table = load_table(table_path(tmp_path / "tables", gpu, "bwd"))
    return () if table is None else table.entries


# ---- Space


def test_params_and_configs_correspond():
    for config in GRID.configs(True):
        assert GRID.config_of(GRID.params_of(config)) == config
        assert GRID.holds(config)
    assert GRID.config_of({**GRID.params_of(BwdConfig(block_m=32)), "step_divisor": 4}) is None
    assert not GRID.holds(BwdConfig(block_m=16, step_m=16))


@pytest.mark.parametrize("head_dim", [*NATIVE_HEAD_DIMS, 72])
def test_every_head_dim_can_be_tuned_everywhere(head_dim):
    for gpu in EACH_ARCH:
        spec = KernelSpec("bwd", head_dim=head_dim)
        configs = legal_space(spec, gpu).configs
        assert all(infeasible_reason(spec, config, gpu.arch) is None for config in configs)
        size = request_for(spec).problem
        for config in (default_config(spec), *shortlist(spec, [size], gpu, 3)):
            prediction = predict(spec, config, size, gpu)
            assert 0 < size.flops(spec) / prediction.ms / 1e9 < gpu.mma_tflops
            assert prediction.blocks_per_sm >= config.min_blocks
            assert prediction.limit in prediction.shares


def test_the_space_is_the_legal_part_of_the_grid():
    for spec in (SPEC, ORDERED, GROUPED):
        space = legal_space(spec, H200)
        excluded = dict(space.excluded)
        assert {*space.configs, *excluded} == set(GRID.configs(spec.gqa_ratio > 1))
        assert all(reason == exclusion_reason(spec, config, H200.arch) for config, reason in excluded.items())


def test_what_a_spec_or_chip_forbids_is_not_tried():
    assert any(config.split_heads for config in legal_space(GROUPED, H200).configs)
    for spec in (SPEC, KernelSpec("bwd", head_dim=64, gqa_ratio=8, deterministic=True)):
        assert not any(config.split_heads for config in legal_space(spec, H200).configs)
    assert any(config.reduction == "vector" for config in legal_space(SPEC, H200).configs)
    assert not any(config.reduction == "vector" for config in legal_space(SPEC, A100).configs)


def test_neighbours_differ_in_one_tunable():
    size = request_for(SPEC).problem
    (first,) = shortlist(SPEC, [size], H200, 1)
    for config in neighbours(SPEC, size, H200, [first]):
        ours, theirs = GRID.params_of(first), GRID.params_of(config)
        assert sum(ours[name] != theirs[name] for name in ours) == 1


def test_more_spills_registers_or_work_never_help():
    config, size = default_config(SPEC), request_for(SPEC).problem
    for facts in (lambda x: Facts(128, 64 * x, 32768), lambda x: Facts(min(255, 100 + 16 * x), 0, 32768)):
        times = [predict(SPEC, config, size, H200, facts(x)).ms for x in range(10)]
        assert times == sorted(times)
        assert times[-1] > times[0]
    causal = predict(KernelSpec("bwd", head_dim=64, causal=True), config, size, H200).ms
    assert 0.5 < causal / predict(SPEC, config, size, H200).ms < 0.75
    assert predict(ORDERED, config, size, H200).ms > predict(SPEC, config, size, H200).ms
    assert predict(SPEC, config, size, H200, Facts(128, 0, 400_000)).ms == float("inf")
    # The kernels before and after move memory, whatever the main one does.
    thin = Problem(1, 16384, 1, 16, 16)
    assert predict(SPEC, config, thin, H200).ms > 16 * 16384 * 64 * 14 / H200.hbm_gbs / 1e6


# ---- Its kernels together


def test_kernels_of_a_config_come_back_together():
    rooms = FakeRooms()
    first, second = default_config(SPEC), BwdConfig(block_m=32, block_n=64, step_m=32, num_warps=4)
    done, counts = [], []
    jobs = [(SPEC, first), (SPEC, second)]
    builds = compile_configs(
        rooms.tools(), jobs, "sm_90", lambda index, build: done.append(index), lambda *new: counts.append(new)
    )
    assert done == [0, 1]
    for build, (_, config) in zip(builds, jobs, strict=True):
        assert [kernel.source.kernel for kernel in build] == [*KERNELS]
        assert {kernel.source.config for kernel in build} == {config}
        assert main_kernel(build).source.kernel == "bwd"
    # The kernels before and after are the same text: compiled once.
    assert counts == 4 * [(1, 0)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_refused_kernel_refuses_its_config(kernel, tmp_path):
    rooms = FakeRooms(device=DEVICE)
    bad = shortlist(SPEC, [request_for(SPEC).problem], H200, 1)[0]
    rooms.refused_kernel = lambda source: source.config == bad and source.kernel == kernel
    report = run(rooms, tmp_path, trials=4)
    assert [(failure.config, failure.outcome) for failure in report.failures] == [(bad, "compile_failed")]
    assert bad not in rooms.worker.measured
    assert len(saved(tmp_path)) == 1


class _Loaded:
    """A kernel that notes its launches."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def launch(self, grid, block, params, stream):
        self.log.append((self.name, grid, block, params))


@pytest.mark.parametrize("spec", [SPEC, ORDERED, GROUPED])
def test_a_call_launches_three_kernels_that_share_workspaces(spec, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    config = BwdConfig(block_m=64, block_n=64, step_m=32, num_warps=4, split_heads=spec is GROUPED)
    problem = Problem(2, 113, 203, 8, 8 // spec.gqa_ratio)
    tensors = make_tensors(spec, problem, torch.device("cpu"))
    plan = launcher.make_plan(spec, config, tensors, 0.125, 1 << 25, 132)
    log: list = []
    launcher.bind({name: _Loaded(name, log) for name in KERNELS}, plan, tensors)()
    assert [name for name, *_ in log] == [*KERNELS]
    assert [grid for _, grid, *_ in log] == [step.grid for step in plan.launches]
    sizes = {workspace.pointer: workspace.num_bytes for workspace in plan.workspaces}
    seen: dict[str, set[int]] = {}
    for name, _, _, params in log:
        pointers = PARAMS[name].pointers
        for pointer, address in zip(pointers, struct.unpack_from(f"<{len(pointers)}Q", params), strict=True):
            seen.setdefault(pointer, set()).add(address)
    # Every kernel is given the same address; what the call does not have is null.
    for pointer, addresses in seen.items():
        (address,) = addresses
        if pointer in tensors:
            assert address == tensors[pointer].data_ptr()
        else:
            assert (address != 0) == (pointer in sizes), pointer
    ends = sorted((address, address + sizes[name]) for name in sizes for address in seen[name])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert ("semaphores" in sizes, "dk_accum" in sizes) == (spec is ORDERED, spec is GROUPED)


# ---- Sessions


def test_a_measured_session_saves_the_fastest_right_config(tmp_path):
    rooms = FakeRooms(device=DEVICE)
    wanted = shortlist(SPEC, [request_for(SPEC).problem], H200, 3)
    rooms.milliseconds = lambda config: {wanted[1]: 0.5, wanted[2]: 0.4}.get(config, 1.0)
    rooms.wrong = lambda config: config == wanted[2]
    report = run(rooms, tmp_path, trials=8)
    (row,) = saved(tmp_path)
    assert (row.spec, row.config, row.measurement.ms) == (SPEC, wanted[1], 0.5)
    assert [(failure.config, failure.outcome) for failure in report.failures] == [(wanted[2], "wrong")]
    assert report.paths == (tmp_path / "tables" / "h200" / "bwd.json",)
    assert default_config(SPEC) in rooms.worker.measured
    # Another session goes on with the study: the incumbent and the default are timed again, nothing else.
    rooms.worker.measured.clear()
    run(rooms, tmp_path, trials=8)
    assert {*rooms.worker.measured} == {default_config(SPEC), wanted[1]}


def test_a_predicted_session_says_which_model(tmp_path):
    rooms = FakeRooms()
    run(rooms, tmp_path, gpu="a100", trials=4)
    (row,) = saved(tmp_path, "a100")
    assert row.provenance.model_version == model_version("bwd", "sm80") != model_version("fwd", "sm80")
    assert row.measurement.kind == "predicted"
    assert rooms.proved == [(SPEC, default_config(SPEC)), (SPEC, row.config)]


def test_what_spills_too_much_is_not_timed(tmp_path):
    rooms = FakeRooms(device=DEVICE)
    rooms.resources = lambda config: ResourceUsage(128, 4096 if config.block_m == 128 else 0, 0, 0, 0, 1)
    report = run(rooms, tmp_path, trials=8)
    assert {failure.outcome for failure in report.failures} == {"spilled"}
    assert all(config.block_m != 128 for config in rooms.worker.measured)


@pytest.mark.parametrize("here", [False, True], ids=["emulator", "GPU"])
def test_stale_entries_are_gated_again(here, tmp_path):
    """The three kernels of an entry's config are compiled and proved together, on the GPU where it is."""
    rooms = FakeRooms(device=DEVICE if here else None, template="new")
    rows = [row(SPEC, template="old"), row(ORDERED, template="old", block_m=128)]
    save_entries(H200, rows, root=tmp_path)
    rooms.wrong = lambda config: config.block_m == 128

    def states():
        found = check(H200, roots=[tmp_path], template_hash=rooms.tools().template_hash)
        return {status.entry.spec: status.state for status in found}

    assert states() == {SPEC: "stale", ORDERED: "stale"}
    results = regate(check(H200, roots=[tmp_path], template_hash=lambda *_: "new"), rooms.tools(), out=tmp_path)
    assert {result.status.entry.spec: result.passed for result in results} == {SPEC: True, ORDERED: False}
    assert states() == {SPEC: "gated", ORDERED: "stale"}
    assert (len(rooms.worker.gated), len(rooms.proved)) == ((2, 0) if here else (0, 2))


def test_default_requests_of_a_backward():
    requests = default_requests(128, kind="bwd", deterministic=True)
    assert {request.spec for request in requests} == {
        KernelSpec("bwd", causal=causal, gqa_ratio=ratio, deterministic=True)
        for causal in (False, True)
        for ratio in (1, 8)
    }
    # Nothing is trained on one query.
    assert min(request.problem.seqlen_q for request in requests) > 1


# ---- Look-ups


def find(rows, spec, tmp_path):
    save_entries(H200, rows, root=tmp_path)
    return lookup(spec, request_for(spec).problem.bucket(H200.num_sms), H200, roots=[tmp_path])


def row(spec, *, seqlen=4096, **config):
    return entry(spec, request_for(spec, seqlen).problem, sms=H200.num_sms, **config)


def test_a_deterministic_kernel_is_looked_up_as_itself_first(tmp_path):
    near, far = row(SPEC, block_n=128), row(ORDERED, seqlen=512, block_m=128)
    match = find([near, far], ORDERED, tmp_path)
    assert (match.source, match.entry) == ("nearest bucket", far)
    match = find([row(ORDERED, block_m=128)], ORDERED, tmp_path)
    assert (match.source, match.config.block_m) == ("exact", 128)


def test_a_deterministic_kernel_borrows_what_is_allowed(tmp_path):
    grouped = KernelSpec("bwd", head_dim=64, gqa_ratio=8, deterministic=True)
    match = find([row(GROUPED, block_n=128, split_heads=True)], grouped, tmp_path)
    assert (match.source, match.config) == ("non-deterministic entry", BwdConfig(block_n=128))
    assert "non-deterministic entry with heads not split" in match.describe()


def test_nothing_is_borrowed_from_a_deterministic_entry(tmp_path):
    assert find([row(ORDERED)], SPEC, tmp_path).source == "default"


def test_nothing_is_borrowed_from_the_other_kind(tmp_path):
    rows = [entry(KernelSpec(head_dim=64), request_for(KernelSpec(head_dim=64)).problem, sms=H200.num_sms)]
    assert find(rows, SPEC, tmp_path).source == "default"
    assert find([row(SPEC)], KernelSpec(head_dim=64), tmp_path).source == "exact"


# ---- Command line


def plan(*arguments):
    command = ("tune", "--headdim", "64", "--dtype", "bf16", "--causal", "--gqa", "1", "--gpu", "a100", "--dry-run")
    return CliRunner().invoke(main, [*command, *arguments])


@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [
        ((), ["fwd_d64_bf16_causal_gqa1"]),
        (("--kind", "fwd"), ["fwd_d64_bf16_causal_gqa1"]),
        (("--kind", "bwd"), ["bwd_d64_bf16_causal_gqa1"]),
        (("--kind", "both"), ["fwd_d64_bf16_causal_gqa1", "bwd_d64_bf16_causal_gqa1"]),
        (("--kind", "both", "--deterministic"), ["fwd_d64_bf16_causal_gqa1", "bwd_d64_bf16_causal_gqa1_det"]),
    ],
)
def test_kinds(arguments, kernels):
    result = plan("--buckets", "512", "--json", *arguments)
    assert result.exit_code == 0, result.output
    form = json.loads(result.stdout)
    assert [request["kernel"] for request in form["requests"]] == kernels
    for request in form["requests"]:
        assert request["legal_configs"] > 24
        assert ("roles" in request["default"]) == request["kernel"].startswith("bwd")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--deterministic",), 2, "--deterministic is for backward kernels"),
        (("--kind", "bwd", "--headdim", "59"), 1, "a call pads 59 columns to 64, so give --headdim 64"),
        (("--kind", "all"), 2, "--kind"),
    ],
)
def test_bad_kinds_are_one_line(arguments, code, words):
    result = plan(*arguments)
    (line,) = result.stderr.strip().splitlines()
    assert (result.exit_code, line[:7]) == (code, "error: ")
    assert words in line
