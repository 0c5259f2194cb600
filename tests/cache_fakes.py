"""A fake compiler for the kernel cache, and what processes do with it in the tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fa2gen.compile import admin, entry, store
from fa2gen.compile.cache import Build, CacheKey, CubinCache, cache_key
from fa2gen.compile.entry import Contents
from fa2gen.compile.ptxas import ResourceUsage
from fa2gen.compile.store import EntryStore, leftovers, scratch_folder

RESOURCES = ResourceUsage(168, 0, 8, 16, 32, 1)
FLAGS = ["-O3", "-arch", "sm_80"]
BUILD_ID = "13.0.88-a"


def key_of(text: str, build_id: str = BUILD_ID) -> CacheKey:
    return cache_key(text, build_id, "sm_80", FLAGS)


def build_of(
    text: str, version: tuple[int, int, int] = (13, 0, 88), size: int = 5000, build_id: str = BUILD_ID
) -> Build:
    """A fake compilation: bytes that depend on the text."""
    return Build(random.Random(text).randbytes(size), RESOURCES, f"log of {text}", version, build_id, 1.25)


def fail() -> Build:
    raise AssertionError("built although cached")


def entry_folder(root: Path, key: CacheKey) -> Path:
    return root / "kernels" / key.source / key.full


def store_one(root: Path, text: str = "a", size: int = 5000) -> Path:
    """Puts one kernel into the cache; its folder."""
    CubinCache(root).get_or_build(key_of(text), text, lambda: build_of(text, size=size), kernel=f"kernel_{text}")
    return entry_folder(root, key_of(text))


def program_of(name: str) -> Contents:
    """A fake program of the emulator: a script that prints its name."""
    script = f"#!/bin/sh\necho {name}\n".encode()
    facts = {"kernel": f"program_{name}", "target": "host", "compiler": "g++ 12"}
    return Contents({"kernel.cpp": name.encode(), "kernel": script}, facts, executable=("kernel",))


def program_name(number: int) -> str:
    return f"kernel-{number:032x}"


# ---- damage


def _truncate(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def _flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(bytes(data))


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def _link_to_copy(path: Path) -> None:
    copy = path.parents[2] / "copy"
    os.replace(path, copy)
    path.symlink_to(copy)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: _truncate(path, 0),
    "half": lambda path: _truncate(path, 0.5),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "bit": _flip_bit,
    "missing": lambda path: path.unlink(),
    "folder": _replace(lambda path: path.mkdir()),
    "pipe": _replace(os.mkfifo),
    "dead link": _replace(lambda path: path.symlink_to("nowhere")),
    "link to the right bytes": _link_to_copy,
    "group may write": lambda path: path.chmod(0o660),
    "all may write": lambda path: path.chmod(0o602),
    "null": lambda path: path.write_text("null"),
    "brackets": lambda path: path.write_text("{}"),
    "list": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\0"),
}


# ---- file systems


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A file system mounted on ``folder`` with the options of mount; skips where that is not allowed."""
    folder.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    command = [mount or "mount", *options, str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root and the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# ---- what processes do


def build_all(root: str, number: int, counts: str, kernels: int, slow_disk: bool) -> None:
    """Asks for every kernel in an order of its own; writes a line for each that it compiles."""
    generator = random.Random(number)
    if slow_disk:
        real_rename = os.rename

        def rename(source: str | Path, target: str | Path) -> None:
            time.sleep(generator.uniform(0, 0.05))
            real_rename(source, target)

        store.os.rename = rename  # type: ignore[assignment]
    order = [str(index) for index in range(kernels)]
    generator.shuffle(order)
    warnings.simplefilter("error")
    for text in order:

        def build(text: str = text) -> Build:
            with open(Path(counts) / text, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.02)
            return build_of(text)

        assert CubinCache(Path(root)).get_or_build(key_of(text), text, build)[0] == build_of(text)


def run_processes(tmp_path: Path, processes: int, kernels: int, slow_disk: bool) -> dict[str, int]:
    """How often each kernel was compiled by processes that all want all of them at once."""
    counts = tmp_path / "counts"
    counts.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cache_fakes"])
    arguments = [(str(tmp_path / "cache"), number, str(counts), kernels, slow_disk) for number in range(processes)]
    started = [context.Process(target=build_all, args=each) for each in arguments]
    for process in started:
        process.start()
    for process in started:
        process.join(240)
    assert [process.exitcode for process in started] == [0] * processes
    return {path.name: len(path.read_text().splitlines()) for path in counts.iterdir()}


def check_clean(root: Path, kernels: int) -> None:
    """So many whole entries, no other, no leftovers."""
    verdict = admin.verify(root)
    assert (verdict.checked, verdict.bad) == (kernels, ())
    assert leftovers(root) == []


KILLED_CUBIN_BYTES = 60_000
KILLED_KERNELS = 40


def use_cache_for_ever(*, root: str, temporary: str, round: int) -> None:
    """Builds, reads, replaces damaged and removes entries until it is killed; raises if it reads a wrong one."""

    def write_in_pieces(path: Path, data: bytes, mode: int) -> None:  # so that a kill hits the middle of a file
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        for start in range(0, len(data), 512):
            os.write(handle, data[start : start + 512])
        os.close(handle)

    entry.write_file = write_in_pieces  # type: ignore[assignment]
    warnings.simplefilter("error")  # a damaged entry warns
    tempfile.tempdir = temporary  # Python would try the folder out with a file of its own, and a kill would leave that
    generator = random.Random(round)
    cache, programs = CubinCache(Path(root)), EntryStore(Path(root), "emulator")
    while True:
        number = generator.randrange(KILLED_KERNELS)
        text = str(number)

        def build(text: str = text) -> Build:
            with scratch_folder() as folder:
                (folder / "kernel.cu").write_text(text)
                return build_of(text, size=KILLED_CUBIN_BYTES)

        assert cache.get_or_build(key_of(text), text, build)[0] == build_of(text, size=KILLED_CUBIN_BYTES)
        found, _ = programs.read_or_build(program_name(number), ("kernel",), lambda text=text: program_of(text))
        assert found.files["kernel"] == program_of(text).files["kernel"]
        if generator.random() < 0.2:
            admin.collect(Path(root), max_bytes=KILLED_CUBIN_BYTES * KILLED_KERNELS // 2)
