"""``fa2gen emit --kind bwd``: three kernels a call, and a C++ example that launches them exactly as fa2gen would."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa2gen.cli import main
from fa2gen.codegen import PARAMS, kernels_of, template_hash
from fa2gen.compile.nvcc import find_nvcc
from fa2gen.emit import EXTRA_FILES, choose, emit, workspace_rules
from fa2gen.hardware import get_gpu
from fa2gen.launch import LaunchPlan, bwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import BwdConfig, KernelSpec
from tests.emit_runs import (
    BATCH,
    NUM_HEADS_K,
    SEQLEN_K,
    SEQLEN_Q,
    built,
    calls,
    launched,
    require_formatted,
    run_example,
)

KERNELS = kernels_of("bwd")
# Split heads, a head dim that is not native, ordered sums, tiles of 96 columns; forward kernels beside them.
SPECS = [
    KernelSpec(head_dim=72, causal=True, gqa_ratio=2),
    KernelSpec("bwd", head_dim=72, causal=True, gqa_ratio=2),
    KernelSpec("bwd", head_dim=72, causal=True, gqa_ratio=2, deterministic=True),
    KernelSpec("bwd", head_dim=64, dtype="fp16"),
]


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with kernels of both kinds and of several configs: default ones, as no table is for such chips."""
    out = tmp_path_factory.mktemp("emit") / "out"
    emit(SPECS, get_gpu("rtx-3090"), out)
    return out


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("split") / "out"
    config = BwdConfig(block_m=64, block_n=64, step_m=32, num_warps=4, reduction="vector", split_heads=True)
    emit([KernelSpec("bwd", head_dim=64, gqa_ratio=3)], get_gpu("h100"), out, config=config)
    return out


def manifest_of(folder: Path) -> dict[str, Any]:
    form: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return form


def plan_of(kernel: dict[str, Any]) -> LaunchPlan:
    """What fa2gen launches for the example's sizes; all heads in one section, as in the example."""
    spec, config = KernelSpec.from_canonical(kernel["spec"]), BwdConfig.from_canonical(kernel["config"])
    heads_q, d = NUM_HEADS_K * spec.gqa_ratio, spec.head_dim
    of_q, of_k = (SEQLEN_Q * heads_q * d, heads_q * d, d), (SEQLEN_K * NUM_HEADS_K * d, NUM_HEADS_K * d, d)
    strides = dict.fromkeys(("q", "o", "dout", "dq"), of_q) | dict.fromkeys(("k", "v", "dk", "dv"), of_k)
    problem = Problem(BATCH, SEQLEN_Q, SEQLEN_K, heads_q, NUM_HEADS_K)
    return bwd_plan(spec, config, problem, strides=strides, softmax_scale=1 / math.sqrt(d), l2_bytes=2**50)


def value(rule: str, kernel: dict[str, Any]) -> int:
    """A formula of the manifest at the example's sizes."""
    ratio = kernel["spec"]["gqa_ratio"]
    sizes = {"seqlen_q": SEQLEN_Q, "seqlen_k": SEQLEN_K, "batch": BATCH, "num_heads_k": NUM_HEADS_K}
    return int(eval(rule, {"ceil": math.ceil, "num_heads": NUM_HEADS_K * ratio, **sizes}))


def test_every_kernel_is_listed_in_order(emitted: Path, split: Path) -> None:
    for folder, specs in ((emitted, SPECS), (split, [KernelSpec("bwd", head_dim=64, gqa_ratio=3)])):
        kernels = manifest_of(folder)["kernels"]
        wanted = [(spec, name) for spec in specs for name in kernels_of(spec.kind)]
        assert [(KernelSpec.from_canonical(kernel["spec"]), kernel["kernel"]) for kernel in kernels] == wanted
        files = [kernel["file"] for kernel in kernels]
        assert len(set(files)) == len(files)
        assert {path.name for path in folder.iterdir()} == {*files, *EXTRA_FILES}
        for kernel in kernels:
            text = (folder / kernel["file"]).read_text()
            assert f"{kernel['entry']}(" in text
            assert "#include" not in text
            assert kernel["template_hash"] == template_hash(kernel["spec"]["kind"], "sm80")
            assert kernel["parameters"]["bytes"] == PARAMS[kernel["kernel"]].size


@pytest.mark.parametrize("folder", ["emitted", "split"])
def test_example_launches_what_fa2gen_would(
    folder: str, cuda_include: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = request.getfixturevalue(folder)
    manifest = manifest_of(out)
    example = built(out, cuda_include, tmp_path / "example")
    launches = launched(example, manifest)
    assert len(launches) == len(manifest["kernels"])
    pointers: dict[tuple[str, str], int] = {}
    for words, kernel in zip(launches, manifest["kernels"], strict=True):
        entry, *numbers, params = words
        assert entry == kernel["entry"]
        given = struct.unpack(PARAMS[kernel["kernel"]].format, bytes.fromhex(params))
        assert [value(rule, kernel) for rule in kernel["launch"]["grid"]] == [int(n) for n in numbers[:3]]
        assert kernel["launch"]["block"] == [int(n) for n in numbers[3:6]]
        assert kernel["launch"]["dynamic_smem_bytes"] == int(numbers[6])
        if kernel["spec"]["kind"] == "fwd":
            assert kernel["workspaces"] == {}
            continue
        plan = plan_of(kernel)
        (launch,) = (step for step in plan.launches if step.kernel == kernel["kernel"])
        size = (*launch.grid, launch.num_threads, 1, 1, launch.smem_bytes, launch.smem_bytes)
        assert tuple(int(n) for n in numbers) == size
        names = PARAMS[kernel["kernel"]].pointers
        expected = struct.unpack(PARAMS[kernel["kernel"]].format, launch.params)
        assert given[len(names) :] == expected[len(names) :]
        workspaces = {workspace.pointer: workspace.num_bytes for workspace in plan.workspaces}
        for name, address in zip(names, given, strict=False):
            # Every kernel of a call is given the same memory; what a call does not have is null.
            is_workspace = name.endswith("_accum") or name in ("lse_log2", "delta", "semaphores")
            assert (address != 0) == (name in workspaces if is_workspace else name != "dlse"), name
            slug = KernelSpec.from_canonical(kernel["spec"]).slug()
            assert pointers.setdefault((slug, name), address) == address, name
            assert (name in kernel["workspaces"]) == (is_workspace and name in workspaces)
        for name, rule in kernel["workspaces"].items():
            assert -(-value(rule, kernel) // 256) * 256 == workspaces[name], name
    for sizes in ((33, 70, 2, 1), (70, 33, 1, 2)):
        right = run_example(example, *sizes, stub="right")
        assert right.returncode == 0, right.stdout + right.stderr
        assert right.stdout.count("ok ") == calls(manifest)
        wrong = run_example(example, *sizes, stub="drops a key")
        assert wrong.returncode == 1
        assert wrong.stdout.count("WRONG ") == calls(manifest)
    nothing = run_example(example, 0, 5, 1, 1, stub="right")
    backwards = sum(kernel["kernel"] == "bwd" for kernel in manifest["kernels"])
    assert (nothing.returncode, nothing.stdout.count("nothing to launch")) == (0, backwards)


def test_workspaces_of_a_forward_are_none() -> None:
    (kernel,) = choose(SPECS[0], get_gpu("a100"))
    assert workspace_rules(SPECS[0], kernel.source.config) == {}


def test_nvcc_compiles_the_files_alone(emitted: Path, cuda_include: Path, tmp_path: Path) -> None:
    kernels = [kernel for kernel in manifest_of(emitted)["kernels"] if kernel["spec"].get("deterministic")]
    for kernel in kernels:
        shutil.copy(emitted / kernel["file"], tmp_path)
        done = subprocess.run(
            [find_nvcc().path, "-cubin", "-arch=sm_80", kernel["file"]],
            cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not done.stderr.strip(), "a warning in somebody else's build"


def test_texts_beside_the_kernels(emitted: Path, split: Path) -> None:
    for folder in (emitted, split):
        require_formatted(folder / "main.cpp")
        text = (folder / "README.md").read_text()
        for kernel in manifest_of(folder)["kernels"]:
            (row,) = (line for line in text.splitlines() if line.startswith(f"| `{kernel['file']}`"))
            numbers = [kernel["spec"]["head_dim"], kernel["launch"]["block"][0], kernel["launch"]["dynamic_smem_bytes"]]
            assert all(f"| {number} |" in row for number in numbers), row
        cubins = [f"{path.stem}.cubin" for path in folder.glob("*.cu")]
        makefile = (folder / "Makefile").read_text()
        assert all(makefile.count(cubin) == 1 for cubin in cubins)


def test_command_line(tmp_path: Path) -> None:
    arguments = ["emit", "--headdim", "64", "--dtype", "bf16", "--causal", "--gpu", "h100"]

    def run(*more: str) -> Any:
        return CliRunner().invoke(main, [*arguments, *more])

    result = run("--kind", "both", "--deterministic", "-o", str(tmp_path / "out"), "--json")
    form = json.loads(result.stdout)
    assert [kernel["kernel"] for kernel in form["kernels"]] == ["fwd", *KERNELS]
    assert form["files"] == [
        "fwd_d64_bf16_causal_gqa1.cu",
        "bwd_preprocess_d64_bf16_causal_gqa1_det.cu",
        "bwd_d64_bf16_causal_gqa1_det.cu",
        "bwd_postprocess_d64_bf16_causal_gqa1_det.cu",
        *EXTRA_FILES,
    ]
    config = BwdConfig(block_m=32, block_n=64, step_m=32, num_warps=4)
    result = run("--kind", "bwd", "--config", config.slug(), "-o", str(tmp_path / "given"))
    assert result.exit_code == 0, result.output
    assert f"  {config.slug()}: given\n" in result.stdout
    for more, words in (
        (("--kind", "bwd", "--stdout"), "--stdout prints one kernel, a backward is three"),
        (("--kind", "both", "--config", config.slug(), "-o", "x"), "no config serves both kinds"),
        (("--kind", "fwd", "--config", config.slug(), "-o", "x"), "config must read like"),
        (("--deterministic", "-o", "x"), "--deterministic is for backward kernels"),
    ):
        result = run(*more)
        assert (result.exit_code in (1, 2), words in result.stderr) == (True, True), result.stderr
        assert result.stderr.count("\n") == 1
