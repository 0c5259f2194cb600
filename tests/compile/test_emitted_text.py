"""Emitted kernels as text: same machine code as the whole templates, no warnings, nothing unused, formatted."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fa2gen.codegen import KernelSource, kernels_of, render_kernel
from fa2gen.codegen.files import environment
from fa2gen.codegen.render import full_parts, join_parts
from fa2gen.compile import CompiledKernel, compile_many, find_nvcc
from fa2gen.constraints import infeasible_reason
from fa2gen.hardware import arch_limits
from fa2gen.spec import BwdConfig, FwdConfig, FwdSm90Config, KernelSpec
from fa2gen.tuning.shortlist import code_digest
from tests import sm90_covering

# Every choice of the templates is turned both ways by the first three; the others pair what may meet.
COVERING = [
    (
        KernelSpec(head_dim=40, alignment=2, causal=True),
        FwdConfig(block_m=64, num_stages=1, softmax="guarded", q_in_regs=True),
        (12, 0),
    ),
    (
        KernelSpec(dtype="fp16", gqa_ratio=8),
        FwdConfig(step_n=32, num_warps=8, num_stages=3, pipeline="ring", pack_gqa=True),
        (8, 0),
    ),
    (
        KernelSpec(head_dim=256),
        FwdConfig(num_warps=8, softmax="guarded", proof="block", warps_n=2),
        (9, 0),
    ),
    (KernelSpec(causal=True), FwdConfig(softmax="guarded", min_blocks=2), (9, 0)),
    (
        KernelSpec(dtype="fp16", causal=True),
        FwdConfig(block_m=64, num_warps=2, num_stages=1, softmax="guarded"),
        (8, 6),
    ),
    (KernelSpec(head_dim=64), FwdConfig(block_m=64, num_warps=2, q_in_regs=True, min_blocks=4), (8, 0)),
    (
        KernelSpec(head_dim=64, causal=True),
        FwdConfig(num_stages=3, q_in_regs=True, softmax="guarded", proof="block"),
        (9, 0),
    ),
    (KernelSpec(head_dim=64, dtype="fp16"), FwdConfig(num_stages=3, q_in_regs=True, softmax="guarded"), (8, 9)),
    (KernelSpec(head_dim=64, gqa_ratio=7), FwdConfig(num_stages=1), (10, 0)),
    (KernelSpec(head_dim=40, dtype="fp16"), FwdConfig(num_stages=3, softmax="guarded"), (8, 0)),
    (KernelSpec(head_dim=111, alignment=2, dtype="fp16"), FwdConfig(num_stages=1, softmax="guarded"), (9, 0)),
    (KernelSpec(head_dim=96, causal=True), FwdConfig(block_n=32, step_n=32, num_stages=3), (8, 6)),
    (KernelSpec(alignment=2, causal=True, gqa_ratio=16), FwdConfig(step_n=32, softmax="guarded"), (8, 0)),
    (
        KernelSpec(head_dim=248, causal=True),
        FwdConfig(num_warps=8, softmax="guarded", pipeline="ring", warps_n=2),
        (9, 0),
    ),
    (
        KernelSpec(head_dim=32, alignment=2, causal=True, gqa_ratio=4),
        FwdConfig(block_m=64, softmax="guarded", proof="block", pipeline="ring", pack_gqa=True),
        (9, 0),
    ),
    (KernelSpec(head_dim=192, causal=True), FwdConfig(block_m=64, block_n=32, step_n=32), (8, 0)),
    (
        KernelSpec(causal=True, gqa_ratio=3),
        FwdConfig(block_m=256, num_warps=8, softmax="guarded", proof="block", pipeline="ring", pack_gqa=True),
        (9, 0),
    ),
]
# Every choice of the backward's templates, both ways.
BACKWARD = [
    (
        KernelSpec(kind="bwd", head_dim=40, causal=True, gqa_ratio=4),
        BwdConfig.from_slug("sm80_64x128s32_w4_st2_r1_mb1_v4_sh"),
        (9, 0),
    ),
    (
        KernelSpec(kind="bwd", dtype="fp16", causal=True, deterministic=True),
        BwdConfig.from_slug("sm80_64x128s64_w8_st2_r2_mb1_ds2"),
        (9, 0),
    ),
    (KernelSpec(kind="bwd", head_dim=256), BwdConfig.from_slug("sm80_64x64s64_w8_st1_r2_mb1_wd2"), (8, 0)),
    (
        KernelSpec(kind="bwd", head_dim=64, gqa_ratio=2),
        BwdConfig.from_slug("sm80_128x128s64_w8_st2_r1_mb1_wd2"),
        (8, 0),
    ),
    (KernelSpec(kind="bwd", head_dim=32), BwdConfig.from_slug("sm80_64x64s64_w4_st2_r2_mb1_kvr_ds2"), (8, 6)),
    (KernelSpec(kind="bwd", head_dim=192), BwdConfig.from_slug("sm80_64x64s64_w8_st2_r2_mb1_wd2_ds2"), (9, 0)),
    (KernelSpec(kind="bwd", head_dim=96), BwdConfig.from_slug("sm80_64x64s32_w4_st1_r1_mb1_kvr"), (8, 9)),
    (KernelSpec(kind="bwd", head_dim=64), BwdConfig.from_slug("sm80_64x128s64_w4_st2_r1_mb1_ds2"), (9, 0)),
]
SM90 = [(spec, config, (9, 0)) for spec, config in sm90_covering.KERNELS]
FULL = bool(os.environ.get("FA2GEN_TEST_FULL"))


def kernels(rows):
    """(spec, config, compute capability, kernel) of every kernel of the rows; those around a backward's once."""
    every = [(*row, kernel) for row in rows for kernel in kernels_of(row[0].kind)]
    return list(
        {
            render_kernel(spec, config, kernel=kernel).entry: (spec, config, chip, kernel)
            for spec, config, chip, kernel in every
        }.values()
    )


ALL = kernels([*COVERING, *BACKWARD, *SM90])
FEW = ALL if FULL else kernels([*COVERING[:3], *BACKWARD[:3], *SM90[:4]])


def target_of(config, capability):
    return sm90_covering.TARGET if isinstance(config, FwdSm90Config) else arch_limits(capability).target


def whole(source: KernelSource) -> KernelSource:
    """The kernel with everything that the templates hold, as it was before anything was left out."""
    text = join_parts(full_parts(source.spec, source.config, source.kernel)).replace("KERNEL_NAME", source.entry)
    return dataclasses.replace(source, text=text)


def test_covering_set_is_legal():
    for spec, config, capability in (*COVERING, *BACKWARD, *SM90):
        assert infeasible_reason(spec, config, arch_limits(capability)) is None, (spec, config, capability)


def test_what_is_left_out_changes_no_instruction():
    jobs = [(render_kernel(spec, config, kernel=name), target_of(config, chip)) for spec, config, chip, name in FEW]
    pairs = [(text, target) for source, target in jobs for text in (source, whole(source))]
    results = compile_many(pairs)
    for pruned, full in zip(results[::2], results[1::2], strict=True):
        assert isinstance(pruned, CompiledKernel), getattr(pruned, "log", pruned)
        assert isinstance(full, CompiledKernel), getattr(full, "log", full)
        assert len(full.source.text) > len(pruned.source.text.split("// ---- Types", 1)[1]) + 2000
        assert code_digest((pruned,)) == code_digest((full,)), pruned.source.entry


def nvcc(folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "kernel.cu").write_text(text)
    command = [str(find_nvcc().path), "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror", *flags]
    return subprocess.run(
        [*command, "-o", "kernel.out", "kernel.cu"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("index", range(len(FEW)))
def test_nothing_is_unused_by_the_compilers_account(index, tmp_path):
    """nvcc's front end names functions and constants without a use once they are plain static ones."""
    spec, config, capability, name = FEW[index]
    target = target_of(config, capability)
    for standard in ("c++17", "c++20"):
        text = render_kernel(spec, config, kernel=name).text
        # Inline functions may be without use in C++, static ones are reported.
        text = text.replace("#define FUNC __device__ __forceinline__\n", "#define FUNC static __device__\n")
        text = text.replace("  FUNC ", "  __device__ ").replace("template <>\nFUNC", "template <>\n__device__")
        done = nvcc(tmp_path, text, "-ptx", f"-arch={target}", f"-std={standard}")
        assert done.returncode == 0, done.stderr
    # And so the test can fail: one function too many.
    done = nvcc(tmp_path, f"{text}\nFUNC int unused() {{ return 1; }}\n", "-ptx", f"-arch={target}", "-std=c++17")
    assert done.returncode != 0
    assert "unused" in done.stderr


TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")


@pytest.mark.parametrize("target", TARGETS if FULL else TARGETS[3:5])
def test_plain_nvcc_has_no_warnings(target, tmp_path):
    """As a user compiles it: one command, the toolkit's own headers, every warning an error."""
    for spec, config, _, name in FEW if FULL else (FEW[0], FEW[4], FEW[-1]):
        if config.canonical().get("reduction") == "vector" and target < "sm_90":
            continue
        if isinstance(config, FwdSm90Config) != (target == sm90_covering.TARGET):
            continue
        source = render_kernel(spec, config, kernel=name)
        for standard in ("c++17", "c++20") if FULL else ("c++20",):
            done = nvcc(tmp_path, source.text, "-cubin", "-O3", f"-arch={target}", f"-std={standard}")
            assert (done.returncode, done.stderr) == (0, ""), (source.entry, target, standard, done.stderr)


def require_formatted(folder: Path) -> None:
    """Fails where clang-format would change a file of a folder, or a line is too long; skips where there is none."""
    # Beside this interpreter, whose environment need not be the shell's.
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = shutil.which("clang-format", path=folders)
    if program is None:
        pytest.skip("clang-format is not installed; the extra [test] brings it")
    for path in folder.iterdir():
        assert not re.search(r"[ \t]$|\n\n\n|[^\n]{121}", path.read_text(), re.M), path.name
    style = Path(__file__).parents[2] / ".clang-format"
    done = subprocess.run(
        [program, f"--style=file:{style}", "--dry-run", "--Werror", *sorted(map(str, folder.iterdir()))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_kernels_are_formatted(tmp_path):
    for spec, config, _, name in ALL:
        source = render_kernel(spec, config, kernel=name)
        (tmp_path / f"{source.entry}.cu").write_text(source.text)
    require_formatted(tmp_path)


def test_wgmma_of_every_width_is_formatted(tmp_path):
    """Its operand lists are filled by the template, whatever their length."""
    for element, ptx_element in (("bf16", "bf16"), ("fp16", "f16")):
        shapes = [
            {"form": form, "n": n, "transposed_b": transposed}
            for form in ("ss", "rs")
            for n in range(16, 257, 16)
            for transposed in ("false", "true")
        ]
        template = environment().get_template("sm90/wgmma.cuh.j2")
        text = template.render(element=element, ptx_element=ptx_element, wgmma_shapes=shapes)
        (tmp_path / f"{element}.cu").write_text(text)
    require_formatted(tmp_path)
