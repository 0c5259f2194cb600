"""Inputs that broke kernel caches and first runs in public reports: keys, concurrency, permissions, toolkits, chips."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fa2gen.codegen import KernelSource, render_kernel
from fa2gen.compile import CompiledKernel, CubinCache, Nvcc, compile_kernel, find_nvcc, location
from fa2gen.compile.cache import cache_key
from fa2gen.compile.invoke import compile_failure
from fa2gen.compile.location import cache_root
from fa2gen.compile.nvcc import key_flags
from fa2gen.constraints import default_config
from fa2gen.driver import kernel as driver_kernel
from fa2gen.driver import libcuda as driver_libcuda
from fa2gen.errors import CacheError, Fa2genError, LaunchError, ToolchainError, UnsupportedError
from fa2gen.hardware import arch_limits, match_device
from fa2gen.spec import FwdConfig, KernelSpec
from tests.cache_fakes import (
    DAMAGE,
    RESOURCES,
    build_of,
    check_clean,
    entry_folder,
    fail,
    key_of,
    mounted,
    run_processes,
    store_one,
)

SOURCE = KernelSource(KernelSpec(), FwdConfig(), "fwd", "cuda", "text", "text", "small", 128, 512)
NVCC = Nvcc(Path("/opt/nvcc"), (13, 0, 88), "13.0.88-a")


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "_warned", set())


# ---- cache-key


def test_launch_parameters_are_in_the_key_and_their_order_is_not() -> None:
    """BL-129."""
    spec = KernelSpec()
    base = default_config(spec)

    def key(config: FwdConfig) -> str:
        return cache_key(render_kernel(spec, config).text, "13.0.88-a", "sm_80", key_flags("sm_80")).full

    changed = [base, dataclasses.replace(base, num_warps=8, block_m=128), dataclasses.replace(base, num_stages=3)]
    changed += [dataclasses.replace(base, num_warps=8, block_m=128, num_stages=3)]
    assert len({key(config) for config in changed}) == len(changed)
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    backwards = FwdConfig(**dict(reversed(fields.items())))
    assert key(backwards) == key(base)
    assert KernelSpec(causal=True, head_dim=64) == KernelSpec(head_dim=64, causal=True)


# ---- cache-concurrency


@pytest.mark.parametrize("kernels", [1, 8])
def test_sixteen_processes_on_a_slow_disk(tmp_path: Path, kernels: int) -> None:
    """BL-132."""
    counts = run_processes(tmp_path, 16, kernels, slow_disk=True)
    assert counts == {str(index): 1 for index in range(kernels)}
    check_clean(tmp_path / "cache", kernels)


@pytest.mark.parametrize("name", ["build.json", "kernel.cubin"])
@pytest.mark.parametrize("damage", ["empty", "half", "bit", "folder", "brackets"])
def test_truncated_or_corrupted_entry(tmp_path: Path, name: str, damage: str) -> None:
    """BL-135."""
    DAMAGE[damage](store_one(tmp_path) / name)
    with pytest.warns(RuntimeWarning) as caught:
        assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a")) == (build_of("a"), False)
    assert len(caught) == 1
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", fail) == (build_of("a"), True)


# ---- jit-cache-permission


@contextlib.contextmanager
def _as_another_user(monkeypatch: pytest.MonkeyPatch, owned: Path) -> Iterator[int]:
    """Whoever runs this, ``owned`` and all in it belongs to somebody who is neither this user nor root."""
    owner = owned.stat().st_uid
    if owner == 0:
        for path in [owned, *owned.rglob("*")]:
            os.chown(path, 12345, -1)
        yield 12345
    else:
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: owner + 1)
            yield owner


def test_cache_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BL-140: user B gets a folder of B's own; one that B named is refused."""
    shared = tmp_path / "fa2gen"
    shared.mkdir(mode=0o755)
    store_one(shared)
    monkeypatch.delenv("FA2GEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with _as_another_user(monkeypatch, shared) as owner:
        if owner == 12345:
            with pytest.warns(RuntimeWarning, match=r"belongs to another user .uid 12345.*is used instead"):
                root = cache_root()
            assert root == tmp_path / f"fa2gen-{os.geteuid()}"
            assert CubinCache(root).get(key_of("a")) is None
            assert CubinCache(root).get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False
        monkeypatch.setenv("FA2GEN_CACHE_DIR", str(shared))
        with pytest.raises(CacheError, match=f"belongs to another user .uid {owner}.*of your own"):
            cache_root()


def test_code_of_another_user_in_a_right_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BL-140: an entry, or one file of it, that somebody else owns is not loaded."""
    folder = store_one(tmp_path)
    if os.geteuid() == 0:
        for path in (folder, folder / "build.json", folder / "kernel.cubin"):
            os.chown(path, 12345, -1)
            assert CubinCache(tmp_path).get(key_of("a")) is None
            os.chown(path, 0, -1)
            assert CubinCache(tmp_path).get(key_of("a")) == build_of("a")
        os.chown(folder / "kernel.cubin", 12345, -1)
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(RuntimeWarning, match="kernel.cubin belongs to another user|its folder belongs to another user"):
        assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False


@pytest.mark.parametrize("name", [".", "build.json", "kernel.cubin"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_code_that_others_may_write_in_a_right_folder(tmp_path: Path, name: str, mode: int) -> None:
    """BL-140."""
    path = store_one(tmp_path) / name
    path.chmod(path.stat().st_mode | mode)
    assert CubinCache(tmp_path).get(key_of("a")) is None
    with pytest.warns(RuntimeWarning, match="others may write to"):
        assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", lambda: build_of("a"))[1] is False
    assert CubinCache(tmp_path).get_or_build(key_of("a"), "a", fail)[1] is True


def test_cache_on_a_full_disk(tmp_path: Path) -> None:
    """BL-141: the kernel runs all the same, with one warning, and no part of an entry stays."""
    root = tmp_path / "disk"
    with mounted(root, "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs"):
        (root / "filler").write_bytes(bytes((1 << 20) - 65536))
        cache = CubinCache(root)
        with pytest.warns(RuntimeWarning) as caught:
            builds = [cache.get_or_build(key_of(t), t, lambda t=t: build_of(t, size=100_000)) for t in "abc"]
        assert builds == [(build_of(text, size=100_000), False) for text in "abc"]
        assert len(caught) == 1
        assert "No space left on device" in str(caught[0].message)
        for text in "abc":
            assert cache.get_or_build(key_of(text), text, fail) == (build_of(text, size=100_000), True)
            assert not entry_folder(root, key_of(text)).exists()
        assert not list((root / "tmp").iterdir())


# ---- nvcc-missing


@pytest.fixture
def _no_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FA2GEN_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("fa2gen.compile.nvcc._candidates", lambda: iter(()))


@pytest.mark.usefixtures("_no_toolkit")
def test_no_toolkit_on_the_machine(tmp_path: Path) -> None:
    """BL-142: a kernel that was compiled once is served; another says how to get nvcc, and from which CUDA on."""
    cache = CubinCache(tmp_path)
    key = cache_key(SOURCE.text, NVCC.build_id, "sm_80", key_flags("sm_80"))
    cache.get_or_build(key, SOURCE.text, lambda: build_of("a"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_kernel(SOURCE, "sm_80", cache=cache).cubin == build_of("a").cubin
    for target, release in (("sm_90a", "12.0"), ("sm_120", "12.8"), ("sm_86", "11.8")):
        with pytest.raises(ToolchainError) as raised:
            compile_kernel(SOURCE, target, cache=cache)
        text = str(raised.value)
        assert f"small for {target} is not in the cache" in text
        assert f"CUDA {release} or newer" in text
        assert 'pip install "fa2gen[nvcc]"' in text
        assert "FA2GEN_NVCC" in text
    with pytest.raises(Fa2genError):
        find_nvcc()


@pytest.mark.parametrize(
    ("version", "target", "needed"),
    [
        ((11, 8, 89), "sm_90a", "12.0"),
        ((12, 2, 140), "sm_100", "12.8"),
        ((12, 2, 140), "sm_120", "12.8"),
        ((12, 8, 61), "sm_103", "12.9"),
        ((11, 4, 48), "sm_80", "11.8"),
    ],
)
def test_nvcc_too_old_for_the_architecture(
    tmp_path: Path, version: tuple[int, int, int], target: str, needed: str
) -> None:
    """BL-144: the message names the CUDA release that is needed; nvcc is not run to find out."""
    old = dataclasses.replace(NVCC, version=version)
    with pytest.raises(ToolchainError, match=rf"needs CUDA {needed} or newer; install one with") as raised:
        compile_kernel(SOURCE, target, nvcc=old, cache=CubinCache(tmp_path))
    assert ".".join(map(str, version)) in str(raised.value)


@pytest.mark.parametrize(
    "log",
    [
        "nvcc fatal   : Unsupported gpu architecture 'sm_200'",
        "nvcc fatal   : Value 'sm_200' is not defined for option 'gpu-architecture'",
    ],
)
def test_nvcc_older_than_the_chip(log: str) -> None:
    """BL-144, for a chip whose first CUDA release this version does not know."""
    error = compile_failure(NVCC, "sm_200", 1, log)
    assert isinstance(error, ToolchainError)
    assert "nvcc 13.0.88, which does not know sm_200, and a newer CUDA is needed; install one with" in str(error)


class _Driver:
    """A driver that refuses every image with one status."""

    def __init__(self, status: int) -> None:
        self._status = status

    def cuModuleLoadData(self, *_: object) -> int:
        return self._status

    def cuGetErrorString(self, _status: int, text: Any) -> int:
        text._obj.value = b"the provided PTX was compiled with an unsupported toolchain."
        return 0


def _load(monkeypatch: pytest.MonkeyPatch, target: str, capability: tuple[int, int], status: int) -> None:
    """Loads a kernel, compiled for ``target`` by CUDA 13.0, on a device whose driver knows CUDA 12.4."""
    info = SimpleNamespace(compute_capability=capability, cuda_version=(12, 4))
    monkeypatch.setattr(driver_kernel, "require_device", lambda index: None)
    monkeypatch.setattr(driver_kernel, "device_info", lambda index: info)
    monkeypatch.setattr(driver_kernel, "device_count", lambda: 1)
    monkeypatch.setattr(driver_kernel, "primary_context", lambda index: 1)
    monkeypatch.setattr(driver_kernel, "active_context", lambda context: contextlib.nullcontext())
    for module in (driver_kernel, driver_libcuda):
        monkeypatch.setattr(module, "libcuda", lambda: _Driver(status))
    driver_kernel.load(
        CompiledKernel(SOURCE, target, b"\x7fELF", RESOURCES, "key", False, 1.0, "", "13.0.88-compiler.1_0"), 0
    )


@pytest.mark.parametrize("status", [200, 209, 218, 222])
def test_driver_older_than_the_toolkit(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """BL-144: the message names both releases and both ways out."""
    with pytest.raises(LaunchError) as raised:
        _load(monkeypatch, "sm_80", (8, 0), status)
    text = str(raised.value)
    assert "cannot load kernel small on device 0: the provided PTX was compiled with an unsupported toolchain." in text
    assert "by the nvcc of CUDA 13.0, and this driver knows CUDA 12.4 only" in text
    assert "install a driver for CUDA 13.0, or an nvcc of CUDA 12.4 or older" in text


def test_other_errors_of_loading_do_not_blame_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError) as raised:
        _load(monkeypatch, "sm_80", (8, 0), 2)
    assert "install a driver" not in str(raised.value)


# ---- sm-version


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 5), None), ((10, 3), "sm_100"), ((12, 1), "sm_120"), ((8, 8), "sm_87"), ((11, 0), None), ((13, 0), None)],
)
def test_chip_that_is_not_supported(capability: tuple[int, int], runs: str | None) -> None:
    """BL-146: the capability, the supported list, and what a newer chip of a known major version can run."""
    shown = ".".join(map(str, capability))
    for call in (lambda: arch_limits(capability), lambda: match_device("NVIDIA Unknown", capability, 100, 1 << 25)):
        with pytest.raises(UnsupportedError) as raised:
            call()
        text = str(raised.value)
        assert f"compute capability {shown} is not supported" in text
        assert "8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 12.0" in text
        assert (f"runs what is compiled for {runs}:" in text) == (runs is not None)
        assert ("emit" in text) == (runs is not None)


@pytest.mark.parametrize(
    ("target", "capability", "runs"),
    [
        ("sm_80", (7, 5), False),
        ("sm_80", (12, 0), False),
        ("sm_90a", (10, 3), False),
        ("sm_86", (8, 0), False),
        ("sm_100a", (10, 3), False),
        ("sm_80", (8, 6), True),
        ("sm_100", (10, 3), True),
        ("sm_120", (12, 1), True),
    ],
)
def test_binary_that_is_not_for_this_chip(
    monkeypatch: pytest.MonkeyPatch, target: str, capability: tuple[int, int], runs: bool
) -> None:
    """BL-146: never the driver's "no kernel image"; a cubin of the same major, lower minor version is loaded."""
    with pytest.raises(LaunchError) as raised:
        _load(monkeypatch, target, capability, 2)
    text = str(raised.value)
    if runs:
        assert "cannot load kernel small" in text, "it came to the driver"
        return
    assert f"compiled for {target}, which device 0 (compute capability {capability[0]}.{capability[1]})" in text
    assert "8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 12.0" in text
