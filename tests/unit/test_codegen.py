"""Rendering: one body for both platforms, one struct for both sides, hashes that follow the files."""

from __future__ import annotations

import itertools
import re
import shutil
import struct
import sys

import jinja2
import pytest

from fa2gen.codegen import FWD_PARAMS, grid_rule, manifest, render_kernel, template_hash
from fa2gen.codegen.files import environment as template_environment
from fa2gen.constraints import default_config, infeasible_reason, smem_plan
from fa2gen.data import data_dir
from fa2gen.errors import ArgumentError
from fa2gen.hardware import arch_limits
from fa2gen.launch import fwd_plan
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec

SPECS = [
    KernelSpec(head_dim=64),
    KernelSpec(head_dim=128, dtype="fp16", causal=True, gqa_ratio=7),
    KernelSpec(head_dim=59, alignment=2),
]


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.slug)
def test_body_is_equal_on_both_platforms(spec):
    config = default_config(spec)
    cuda, host = (render_kernel(spec, config, platform) for platform in ("cuda", "host"))
    assert cuda.body == host.body
    assert cuda.text.endswith(cuda.body)
    assert host.text.endswith(host.body)
    assert (cuda.entry, cuda.smem_bytes, cuda.num_threads) == (host.entry, host.smem_bytes, host.num_threads)


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.slug)
def test_cuda_text_is_self_contained(spec):
    source = render_kernel(spec, default_config(spec))
    assert "#include" not in source.text
    assert 'extern "C" __global__ void __launch_bounds__(kThreads, ' in source.text
    assert source.text.count(source.entry) == 2  # head comment and kernel
    assert source.text.isascii()
    assert max(len(line) for line in source.text.splitlines()) <= 120


def test_rendering_is_deterministic_and_depends_on_every_field():
    spec = KernelSpec()
    texts = {
        render_kernel(spec, config).text for config in (FwdConfig(), FwdConfig(num_stages=1), FwdConfig(min_blocks=2))
    }
    assert len(texts) == 3
    render_kernel.cache_clear()
    assert render_kernel(spec, FwdConfig()).text in texts


def test_body_keeps_to_primitives():
    body = render_kernel(KernelSpec(causal=True), FwdConfig(softmax="guarded")).body
    code = re.sub(r"//[^\n]*", "", body)
    for forbidden in ("asm", "__shfl", "__sync", "__cvta", "blockDim", "std::", "__shared__", "printf"):
        assert forbidden not in code, forbidden


def test_kernel_templates_hold_includes_only():
    for path in (data_dir("templates") / "kernels").glob("*.j2"):
        tags = re.findall(r"{%-? *(\w+)", path.read_text())
        # The head is a comment: it says what this kernel does, and no more.
        is_head = path.name.startswith("head")
        allowed = {"set", "endset", "if", "elif", "else", "endif"} if is_head else {"include"}
        assert len(tags) <= (50 if is_head else 10), (path, tags)
        assert set(tags) <= allowed, (path, tags)


def test_undefined_names_fail(monkeypatch):
    environment = template_environment()
    with pytest.raises(jinja2.UndefinedError):
        environment.from_string("{{ no_such_constant }}").render()
    with pytest.raises(ArgumentError, match="platform"):
        render_kernel(KernelSpec(), FwdConfig(), "metal")


def test_manifest_is_what_the_template_includes():
    root = data_dir("templates")
    files = manifest("fwd", "sm80")
    assert all((root / name).is_file() for name in files)
    included = re.findall(r'{% include "([^"]+)" %}', (root / files[0]).read_text())
    assert list(files[1 : 1 + len(included)]) == included


def test_template_hash_follows_the_code_of_the_manifest_only(tmp_path, monkeypatch):
    # By name: in the package, the function of the same name hides the module.
    module = sys.modules["fa2gen.codegen.manifest"]
    copy = tmp_path / "templates"
    shutil.copytree(data_dir("templates"), copy)
    monkeypatch.setattr(module, "data_dir", lambda name: copy)
    before = template_hash.__wrapped__("fwd", "sm80")
    (copy / "sm90" / "tile.cuh").write_text("int of_another_family;\n")
    assert template_hash.__wrapped__("fwd", "sm80") == before
    mask = copy / "sm80" / "mask.cuh"
    text = mask.read_text()
    mask.write_text("// Another comment.\n" + text.replace("; ", ";\n    ").replace("//", "/* more */ //"))
    assert template_hash.__wrapped__("fwd", "sm80") == before
    mask.write_text(text + "int x;")
    assert template_hash.__wrapped__("fwd", "sm80") != before
    primitives = copy / "sm80" / "primitives.cuh"
    mask.write_text(text)
    mask.write_text(text + "int x = {{ head_dim // 2 }};")
    half = template_hash.__wrapped__("fwd", "sm80")
    mask.write_text(text + "int x = {{ head_dim // 4 }};")
    assert template_hash.__wrapped__("fwd", "sm80") != half
    # Inside a string nothing is a comment: assembly is code.
    primitives.write_text(primitives.read_text().replace('asm volatile("', 'asm volatile("//', 1))
    assert template_hash.__wrapped__("fwd", "sm80") != before


def test_params_pack_like_the_declaration():
    declared = re.findall(r"^  (\S.*?) (\w+);", FWD_PARAMS.declaration(), re.MULTILINE)
    assert [name for _, name in declared] == [field.name for field in FWD_PARAMS.fields]
    values = {field.name: index + 1 for index, field in enumerate(FWD_PARAMS.fields)}
    packed = FWD_PARAMS.pack(**values)
    assert len(packed) == FWD_PARAMS.size == struct.calcsize(FWD_PARAMS.format)
    assert FWD_PARAMS.size % 8 == 0
    offset = 0
    for field in FWD_PARAMS.fields:  # natural alignment without padding, as in C++
        size = 4 if field.kind in ("int", "float") else 8
        assert offset % size == 0, field.name
        code = {"pointer": "<Q", "i64": "<q", "int": "<i", "float": "<f"}[field.kind]
        assert struct.unpack_from(code, packed, offset)[0] == values[field.name]
        offset += size
    assert FWD_PARAMS.size - offset < 8  # the end is padded, as sizeof is
    with pytest.raises(KeyError, match="seqlen_q"):
        FWD_PARAMS.pack(**{k: v for k, v in values.items() if k != "seqlen_q"})
    with pytest.raises(KeyError, match="window"):
        FWD_PARAMS.pack(**values, window=1)


def test_smem_plan_is_rendered():
    spec, config = KernelSpec(head_dim=96), FwdConfig(block_m=64, block_n=96, step_n=48, num_stages=3)
    plan = smem_plan(spec, config)
    assert plan.total == 2 * 96 * (64 + 2 * 3 * 96)
    assert f"kSmemBytes = {plan.total};" in render_kernel(spec, config).text


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("gqa_ratio", "heads"), [(2, 32), (3, 30), (7, 28), (8, 32), (64, 64)])
def test_the_example_of_the_head_keeps_its_own_rules(gqa_ratio, heads, packed):
    spec, config = KernelSpec(gqa_ratio=gqa_ratio), FwdConfig(pack_gqa=packed)
    text = render_kernel(spec, config).text
    plan = fwd_plan(
        spec,
        config,
        Problem(2, 4000, 64, heads, heads // gqa_ratio),
        strides=dict.fromkeys("qkvo", (0, 0, 0)),
        softmax_scale=1.0,
        l2_bytes=1,
        num_sms=132,
    )
    blocks = plan.launches[0].grid[0]
    assert f"E.g. batch 2, num_heads {heads}, seqlen_q 4000: 2 * {heads // gqa_ratio if packed else heads} * " in text
    assert f" = {blocks} thread blocks:" in text
    assert f"cuLaunchKernel(f, {blocks}, 1, 1, " in text
    assert f"grid            ({grid_rule(spec, config)}, 1, 1)" in text


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_head_says_how_this_kernel_goes(dtype, causal):
    """Every sentence of the head that only some kernels have is in those, and lines are wrapped."""
    spec = KernelSpec(dtype=dtype, causal=causal, gqa_ratio=2)
    says = {
        "Guarded softmax: ": lambda c: c.softmax == "guarded",
        "that is how the first step goes; in the others": lambda c: c.softmax == "guarded" and not causal,
        "those with a mask; in the others": lambda c: c.softmax == "guarded" and causal,
        "Any input gives the exact result.": lambda c: c.softmax == "guarded",
        "is computed again": lambda c: c.proof == "block",
        "from K still in shared memory": lambda c: c.softmax == "guarded" and c.proof == "step",
        "Ring: copies and warps": lambda c: c.pipeline == "ring",
        "mbarriers at ": lambda c: c.pipeline == "ring",
        "Packed heads: ": lambda c: c.pack_gqa,
        "Two warps share rows: ": lambda c: c.warps_n > 1,
        "is below 2e30: a step may add": lambda c: c.softmax == "guarded" and c.proof == "step" and dtype == "bf16",
    }
    for softmax, proof, pipeline, warps_n, packed in itertools.product(
        ("online", "guarded"), ("step", "block"), ("barrier", "ring"), (1, 2), (False, True)
    ):
        config = FwdConfig(softmax=softmax, proof=proof, pipeline=pipeline, warps_n=warps_n, pack_gqa=packed)
        if infeasible_reason(spec, config, arch_limits((9, 0))) is not None:
            continue
        head = render_kernel(spec, config).text.partition("\n\n")[0]
        assert max(map(len, head.splitlines())) <= 120
        assert all(line.startswith("//") for line in head.splitlines())
        text = " ".join(line[2:].strip() for line in head.splitlines())
        for sentence, is_said in says.items():
            assert (sentence in text) == is_said(config), (sentence, config.slug())


def test_products_are_widened_before_they_are_multiplied():
    """batch * num_heads alone may be beyond 2^31 where the heads of a group are packed into few blocks."""
    config = FwdConfig(pack_gqa=True, num_stages=1)
    body = render_kernel(KernelSpec(head_dim=64, gqa_ratio=8, causal=True), config).body
    assert re.findall(r"i64\(\w+\)", body)
    assert not re.findall(r"i64\([^()]*\*[^()]*\)", body)


def test_fields_that_nothing_reads_are_left_out():
    """Whatever the comments beside them hold: "-1 forces the exact path (a large reference)"."""
    spec = KernelSpec(causal=True)
    for config, reads in (
        (FwdConfig(softmax="guarded"), True),
        (FwdConfig(softmax="guarded", proof="block"), False),
        (FwdConfig(softmax="online"), False),
    ):
        assert ("guard_limit" in render_kernel(spec, config).body) == reads
