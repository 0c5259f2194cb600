"""``fa2gen emit`` of Hopper's forward: the folder builds, and its C++ example makes fa2gen's launch and tensor maps."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fa2gen.cli import main
from fa2gen.codegen import FWD_SM90_PARAMS
from fa2gen.compile.nvcc import find_nvcc
from fa2gen.emit import choose, emit, manifest, workspace_rules
from fa2gen.emit_example import Call, example_files
from fa2gen.hardware import get_gpu
from fa2gen.launch import LaunchPlan, fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, FwdSm90Config, KernelSpec
from fa2gen.tensor_map import BYTES
from tests.emit_runs import SIZES, built, launched, require_formatted, run_example
from tests.sm90_covering import TARGET

H200 = get_gpu("h200")
# Those of the stub driver.
NUM_SMS = 5
FLAGS = "-gencode arch=compute_90a,code=sm_90a"
# The output by TMA and from registers; tiles in a fixed order and drawn; one consumer to four; more tiles than SMs;
# sections of a given size; short causal query tiles that come last.
KERNELS = [
    (KernelSpec(causal=True), FwdSm90Config()),
    (KernelSpec(head_dim=40, dtype="fp16", gqa_ratio=3), FwdSm90Config(block_m=64, ping_pong=False, epilogue="direct")),
    (KernelSpec(head_dim=256, causal=True), FwdSm90Config(block_n=64, scheduler="dynamic", section_mib=9)),
    (
        KernelSpec(head_dim=64, gqa_ratio=2),
        FwdSm90Config(block_m=192, block_n=96, scheduler="dynamic", epilogue="direct"),
    ),
    (
        KernelSpec(head_dim=32, causal=True, gqa_ratio=2),
        FwdSm90Config(block_m=64, ping_pong=False, softmax="guarded", k_extra=1),
    ),
    (KernelSpec(head_dim=48, dtype="fp16"), FwdSm90Config(block_m=256, block_n=64, softmax="guarded", q_extra=1)),
]


def written(kernels: list[tuple[KernelSpec, Any]], out: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with kernels of several configs, which one run of ``fa2gen emit`` gets from tuned tables only."""
    chosen = [choose(spec, H200, config=config) for spec, config in kernels]
    emitted = [kernel for call in chosen for kernel in call]
    form = manifest(emitted, H200)
    calls = [Call(tuple((kernel.file, kernel.source) for kernel in call)) for call in chosen]
    texts = {kernel.file: kernel.source.text for kernel in emitted} | example_files(calls, H200)
    out.mkdir()
    for name, text in texts.items():
        (out / name).write_text(text)
    return out, json.loads(json.dumps(form))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return written(KERNELS, tmp_path_factory.mktemp("emit") / "out")


@pytest.fixture(scope="module")
def example(folder: tuple[Path, dict[str, Any]], cuda_include: Path, tmp_path_factory: Any) -> Path:
    return built(folder[0], cuda_include, tmp_path_factory.mktemp("example") / "out")


def sizes_of(kernel: dict[str, Any], arguments: tuple[int, ...] = SIZES) -> dict[str, int]:
    """Everything that the manifest's formulas name, at the example's sizes."""
    seqlen_q, seqlen_k, batch, heads_k = arguments
    d, heads = kernel["spec"]["head_dim"], heads_k * kernel["spec"]["gqa_ratio"]
    strides = {}
    for tensor, rows, count in (("q", seqlen_q, heads), ("k", seqlen_k, heads_k), ("v", seqlen_k, heads_k)):
        strides |= {f"{tensor}_row_stride": count * d, f"{tensor}_head_stride": d}
        strides |= {f"{tensor}_batch_stride": rows * count * d}
    strides |= {name.replace("q_", "o_"): stride for name, stride in strides.items() if name.startswith("q_")}
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": batch, "num_heads": heads, "num_sms": NUM_SMS}
    return sizes | strides


def value(rule: str, sizes: dict[str, int]) -> int:
    return int(eval(rule, {"ceil": math.ceil, "min": min, "max": max, **sizes}))


def plan_of(kernel: dict[str, Any], arguments: tuple[int, ...] = SIZES) -> LaunchPlan:
    """What fa2gen launches for the example's sizes; where the config says no more, all heads in one section."""
    spec, config = KernelSpec.from_canonical(kernel["spec"]), FwdSm90Config.from_canonical(kernel["config"])
    sizes = sizes_of(kernel, arguments)
    strides = {
        tensor: tuple(sizes[f"{tensor}_{axis}_stride"] for axis in ("batch", "row", "head")) for tensor in "qkvo"
    }
    seqlen_q, seqlen_k, batch, heads_k = arguments
    problem = Problem(batch, seqlen_q, seqlen_k, sizes["num_heads"], heads_k)
    scale = 1 / math.sqrt(spec.head_dim)
    return fwd_plan(
        spec, config, problem, strides=strides, softmax_scale=scale, l2_bytes=2**50, num_sms=NUM_SMS
    )  # fmt: skip


def fields_of(params: bytes) -> dict[str, Any]:
    values = struct.unpack(FWD_SM90_PARAMS.format, params)
    return dict(zip((field.name for field in FWD_SM90_PARAMS.fields), values, strict=True))


def test_example_launches_what_fa2gen_would(folder: tuple[Path, dict[str, Any]], example: Path) -> None:
    kernels = folder[1]["kernels"]
    launches = launched(example, folder[1])
    assert len(launches) == len(kernels)
    assert [fields_of(bytes.fromhex(words[-1]))["tail_m_blocks"] for words in launches] == [0, 0, 0, 0, 1, 0]
    maps = len(FWD_SM90_PARAMS.tensor_maps)
    for words, kernel in zip(launches, kernels, strict=True):
        (launch,) = plan_of(kernel).launches
        entry, *numbers, params = words
        assert entry == kernel["entry"]
        assert [int(n) for n in numbers] == [
            *launch.grid, launch.num_threads, 1, 1, launch.smem_bytes, launch.smem_bytes,
        ]  # fmt: skip
        data = bytes.fromhex(params)
        given, expected = (struct.unpack(FWD_SM90_PARAMS.format, each) for each in (data, launch.params))
        fields = fields_of(data)
        # Of every kernel, also where the output leaves by TMA: tiles without keys get zeros by address.
        assert fields["o"]
        assert fields["softmax_lse"]
        assert not fields["repairs"]
        assert bool(fields["tickets"]) == (kernel["config"]["scheduler"] == "dynamic")
        first = maps + len(FWD_SM90_PARAMS.pointers)
        assert given[first:] == expected[first:]
        for index, tensor_map in enumerate(launch.tensor_maps):
            encoded = data[index * BYTES : (index + 1) * BYTES]
            if tensor_map is None:
                assert not any(encoded)
                continue
            assert encoded[8:] == tensor_map.emulated()[8:], tensor_map
            (address,) = struct.unpack_from("<Q", encoded)
            assert address
            assert tensor_map.tensor != "o" or address == fields["o"]


def test_example_obeys_the_size_of_sections(folder: tuple[Path, dict[str, Any]], example: Path) -> None:
    """9 MiB hold K and V of three heads of 3,000 keys of 256; four heads are two equal sections."""
    sections = by_head_dim("heads_per_section", folder[1], example, (1, 3000, 2, 2))
    assert (sections[256], sections[128], sections[64]) == (2, 4, 8)


def test_example_leaves_as_many_short_tiles_as_fa2gen(folder: tuple[Path, dict[str, Any]], example: Path) -> None:
    """On 5 SMs: of 11 tiles of 12 heads 4, for sqrt(2 * 5 * 11 / 12) is 3.03; of 6 tiles of 6 heads half."""
    tails = by_head_dim("tail_m_blocks", folder[1], example, (700, 3, 3, 2))
    assert (tails[32], tails[128], tails[64]) == (4, 3, 0)


def by_head_dim(name: str, form: dict[str, Any], example: Path, sizes: tuple[int, ...]) -> dict[int, int]:
    """A parameter of the example's launches, which is the one that fa2gen would give."""
    (example / "launches.txt").unlink(missing_ok=True)
    run_example(example, *sizes)
    launches = [line.split() for line in (example / "launches.txt").read_text().splitlines()]
    given = {}
    for (*_, params), kernel in zip(launches, form["kernels"], strict=True):
        value = fields_of(bytes.fromhex(params))[name]
        assert value == fields_of(plan_of(kernel, sizes).launches[0].params)[name]
        given[kernel["spec"]["head_dim"]] = value
    return given


@pytest.mark.parametrize("sizes", [(33, 70, 2, 1), (70, 33, 1, 2), (200, 3, 2, 3)])
def test_example_tells_right_from_wrong(sizes: tuple[int, ...], example: Path) -> None:
    right = run_example(example, *sizes, stub="right")
    assert right.returncode == 0, right.stdout + right.stderr
    assert right.stdout.count("ok ") == len(KERNELS)
    wrong = run_example(example, *sizes, stub="drops a key")
    assert wrong.returncode == 1
    assert wrong.stdout.count("WRONG ") == len(KERNELS)


@pytest.mark.parametrize("sizes", [(0, 7, 1, 1), (7, 7, 0, 1), (7, 7, 1, 0)])
def test_nothing_is_launched_for_an_empty_output(sizes: tuple[int, ...], example: Path) -> None:
    (example / "launches.txt").unlink(missing_ok=True)
    done = run_example(example, *sizes, stub="right")
    assert done.returncode == 0, done.stderr
    assert not (example / "launches.txt").exists()


def test_tensors_without_keys_have_maps(example: Path) -> None:
    assert run_example(example, 7, 0, 1, 1, stub="right").returncode == 0


def test_example_says_what_is_wrong(example: Path) -> None:
    other = run_example(example, 7, 7, stub="other chip")
    assert other.returncode == 1
    assert "needs compute capability 9.0, Stub is sm_89" in other.stderr
    small = run_example(example, 7, 7, stub="small chip")
    assert "bytes of shared memory a block, Stub has 1024" in small.stderr


def test_manifest_rules(folder: tuple[Path, dict[str, Any]]) -> None:
    for kernel in folder[1]["kernels"]:
        plan, sizes = plan_of(kernel), sizes_of(kernel)
        (launch,) = plan.launches
        assert kernel["targets"] == [TARGET]
        assert tuple(value(rule, sizes) for rule in kernel["launch"]["grid"]) == launch.grid
        assert kernel["launch"]["dynamic_smem_bytes"] == launch.smem_bytes
        fields = kernel["parameters"]["fields"]
        assert [field["name"] for field in fields] == [field.name for field in FWD_SM90_PARAMS.fields]
        # The end is padded to a multiple of 64, as maps are aligned.
        assert -(-(fields[-1]["offset"] + 4) // 64) * 64 == kernel["parameters"]["bytes"] == FWD_SM90_PARAMS.size
        for field, expected in zip(fields, launch.tensor_maps, strict=False):
            rules = field["tensor_map"]
            assert (rules is None) == (expected is None)
            if expected is not None:
                assert rules["tensor"] == expected.tensor
                assert tuple(value(rule, sizes) for rule in rules["sizes"]) == expected.sizes
                assert tuple(value(rule, sizes) for rule in rules["strides_bytes"]) == expected.strides
                assert tuple(rules["box"]) == expected.box
                assert rules["data_type"].endswith({"bf16": "BFLOAT16", "fp16": "_FLOAT16"}[kernel["spec"]["dtype"]])
        needed = {workspace.pointer: workspace.num_bytes for workspace in plan.workspaces}
        assert kernel["workspaces"].keys() == needed.keys()
        # Allocations are rounded up.
        assert all(value(rule, sizes) <= needed[name] for name, rule in kernel["workspaces"].items())


def test_families_share_a_folder(cuda_include: Path, tmp_path: Path) -> None:
    """As tuned tables may have it: each kernel gets its own parameters."""
    kernels = [(KernelSpec(head_dim=64, causal=True), FwdConfig()), *KERNELS[:2]]
    out, form = written(kernels, tmp_path / "out")
    require_formatted(out / "main.cpp")
    example = built(out, cuda_include, tmp_path / "example")
    for stub, mark in (("right", "ok "), ("drops a key", "WRONG ")):
        assert run_example(example, 70, 33, 1, 2, stub=stub).stdout.count(mark) == 3
    assert [len(kernel["targets"]) > 1 for kernel in form["kernels"]] == [True, False, False]
    commands = make(out, "ARCH=sm_86")
    assert [FLAGS in line for line in commands] == [False, True, True]
    assert "-arch=sm_86" in commands[0]
    readme = (out / "README.md").read_text()
    assert "`make_params` and `make_sm90_params`" in readme
    assert "whose `targets` are `sm_90a`" in readme


def make(out: Path, *arguments: str) -> list[str]:
    """The commands by which make compiles the kernels."""
    command = [str(shutil.which("make")), "-n", "NVCC=/x/nvcc", *arguments]
    done = subprocess.run(command, cwd=out, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_texts_around_the_kernels(folder: tuple[Path, dict[str, Any]]) -> None:
    out, form = folder
    require_formatted(out / "main.cpp")
    commands = make(out)
    assert len(commands) == len(KERNELS)
    assert all(re.fullmatch(rf"/x/nvcc -std=c\+\+17 -O3 -cubin {FLAGS} -o \S+ \S+", line) for line in commands)
    assert make(out, "ARCH=sm_80") == commands
    text = (out / "README.md").read_text()
    assert f"nvcc -std=c++17 -O3 -cubin {FLAGS} {form['kernels'][0]['file']}" in text
    assert "nor PTX" in text
    assert "nor PTX" in (out / "Makefile").read_text()


def test_command_writes_what_nvcc_builds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = "sm90_128x128_st2_q1_ov_pp_static_tma"
    arguments = ["emit", "--headdim", "128", "--causal", "--dtype", "bf16", "--gpu", "h200", "--config", config]
    result = CliRunner().invoke(main, [*arguments, "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert result.output.rstrip().endswith("for sm_90a")
    done = subprocess.run(
        ["make", f"NVCC={find_nvcc().path}"], cwd=out, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), "a warning in somebody else's build"
    assert (out / "fwd_d128_bf16_causal_gqa1.cubin").read_bytes().startswith(b"\x7fELF")
    refused = CliRunner().invoke(main, [*arguments[:-4], "--gpu", "a100", "--config", config, "--stdout"])
    assert refused.exit_code == 1
    assert "family sm90 needs compute capability 9.0" in refused.stderr


def test_a_word_is_drawn_from_only_where_tiles_are() -> None:
    spec = KernelSpec()
    assert workspace_rules(spec, FwdSm90Config()) == {}
    assert workspace_rules(spec, FwdSm90Config(scheduler="dynamic")) == {"tickets": "8"}


def test_one_folder_by_one_config(tmp_path: Path) -> None:
    emit([KernelSpec(), KernelSpec(head_dim=64)], H200, tmp_path / "out", config=FwdSm90Config())
    form = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [kernel["config"]["family"] for kernel in form["kernels"]] == ["sm90", "sm90"]
