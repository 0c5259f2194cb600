"""Rendered text from the cache: the same as rendered anew, and never an old one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fa2gen.codegen import KernelSource, manifest, render_kernel, renderer_hash
from fa2gen.codegen.manifest import RENDERING
from fa2gen.compile import admin, kernel_source, sources
from fa2gen.compile.entry import MANIFEST, checksum
from fa2gen.constraints import default_config
from fa2gen.spec import FwdConfig, KernelSpec

SPEC = KernelSpec(head_dim=64, dtype="fp16", causal=True)
CONFIG = default_config(SPEC)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA2GEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """The specs that were rendered rather than read."""
    specs: list[KernelSpec] = []

    def render(spec: KernelSpec, config: FwdConfig, kernel: str | None = None) -> KernelSource:
        specs.append(spec)
        return render_kernel(spec, config, kernel=kernel)

    monkeypatch.setattr(sources, "render_kernel", render)
    return specs


def _entry(root: Path) -> Path:
    (entry,) = (root / "sources").iterdir()
    return entry


def test_read_text_equals_rendered_text(root: Path, rendered: list[KernelSpec]) -> None:
    specs = [
        SPEC,
        KernelSpec(head_dim=64, dtype="fp16"),
        KernelSpec(head_dim=64, dtype="fp16", causal=True, gqa_ratio=4),
    ]
    configs = [default_config(spec) for spec in specs]
    first = [kernel_source(spec, config) for spec, config in zip(specs, configs, strict=True)]
    again = [kernel_source(spec, config) for spec, config in zip(specs, configs, strict=True)]
    assert rendered == specs
    assert first == again == [render_kernel(spec, config) for spec, config in zip(specs, configs, strict=True)]
    assert [entry.status for entry in admin.entries(root, check=True)] == [admin.OK] * 3


def test_a_damaged_text_is_rendered_again(root: Path, rendered: list[KernelSpec]) -> None:
    kernel_source(SPEC, CONFIG)
    text = _entry(root) / "kernel.cu"
    text.write_bytes(text.read_bytes().replace(b"__global__", b"__globaL__"))
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert kernel_source(SPEC, CONFIG) == render_kernel(SPEC, CONFIG)
    assert kernel_source(SPEC, CONFIG) == render_kernel(SPEC, CONFIG)
    assert len(rendered) == 2


@pytest.mark.parametrize("body_chars", [0, -5, 10**9, "all", None])
def test_strange_facts_are_not_believed(root: Path, body_chars: object) -> None:
    kernel_source(SPEC, CONFIG)
    path = _entry(root) / MANIFEST
    fields = json.loads(path.read_text())
    del fields["checksum"]
    fields["facts"]["body_chars"] = body_chars
    path.write_text(json.dumps({**fields, "checksum": checksum(fields)}))
    assert kernel_source(SPEC, CONFIG) == render_kernel(SPEC, CONFIG)


def test_without_a_cache_folder_it_is_rendered(rendered: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "cache_root", lambda: None)
    assert kernel_source(SPEC, CONFIG) == kernel_source(SPEC, CONFIG) == render_kernel(SPEC, CONFIG)
    assert rendered == [SPEC, SPEC]


def test_another_renderer_finds_no_old_text(
    root: Path, rendered: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_source(SPEC, CONFIG)
    monkeypatch.setattr(sources, "_renderer", lambda: "another")
    kernel_source(SPEC, CONFIG)
    assert len(rendered) == 2


@pytest.mark.parametrize("name", ["kernels/head.j2", *manifest("fwd", "sm80")])
def test_the_renderers_hash_reads_every_template(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fa2gen.codegen.manifest"]
    copy = tmp_path / "templates"
    shutil.copytree(module.data_dir("templates"), copy)  # type: ignore[attr-defined]
    before = renderer_hash()
    monkeypatch.setattr(module, "data_dir", lambda _: copy)
    assert renderer_hash.__wrapped__() == before
    with (copy / name).open("a") as file:
        file.write("\n")
    assert renderer_hash.__wrapped__() != before


def test_the_renderers_hash_reads_every_module_that_rendering_imports() -> None:
    code = "import sys, fa2gen.codegen; print(*(m for m in sys.modules if m.split('.')[0] == 'fa2gen'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {module.split(".")[1] for module in done.stdout.split() if "." in module}
    assert imported == {name.removesuffix(".py") for name in RENDERING} - {"__init__"}
