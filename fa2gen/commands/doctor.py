"""``fa2gen doctor``: what fa2gen needs, what is here, and how to get the rest."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from .. import __version__
from ..data import data_dir
from ..errors import Fa2genError
from .options import json_option
from .units import count_text, size_text

# ok: works. missing: something optional is not there. error: fa2gen cannot do its job.
_MARKS = {"ok": ("ok", "green"), "missing": ("--", "yellow"), "error": ("!!", "red")}


@dataclass(frozen=True)
class Check:
    """One line of the report; ``fix`` is what to do about it, empty when nothing is to be done."""

    name: str
    status: str
    detail: str
    fix: str = ""


@click.command("doctor")
@json_option
def command(as_json: bool) -> int:
    """Check Python, torch, the compilers, PyCUDA, the GPU, the cache and the tuned tables.

    Nothing is changed. The exit code is 1 if something that fa2gen cannot do without is missing or broken.

    \b
    Example:
      fa2gen doctor
    """
    checks = [check for probe in _PROBES for check in _guarded(probe)]
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mark, colour = _MARKS[check.status]
            click.echo(f"{click.style(mark, fg=colour)}  {check.name:<{width}}  {check.detail}")
            if check.fix:
                click.echo(f"    {'':<{width}}  -> {check.fix}")
    return 1 if any(check.status == "error" for check in checks) else 0


def _guarded(probe: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """A probe that fails is a line of the report: the rest is still wanted."""
    try:
        yield from probe()
    except (Fa2genError, OSError) as error:
        yield Check(probe.__name__.lstrip("_"), "error", str(error))


def _python() -> Iterator[Check]:
    enough = sys.version_info >= (3, 10)
    text = f"{platform.python_version()}, fa2gen {__version__} in {Path(__file__).resolve().parents[1]}"
    yield Check("python", "ok" if enough else "error", text, "" if enough else "install Python 3.10 or newer")


def _torch() -> Iterator[Check]:
    try:
        import torch
    except ImportError as error:
        yield Check("torch", "error", f"does not import: {error}", "pip install torch")
        return
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Check("torch", "ok", f"{torch.__version__}, {cuda}")


def _nvcc() -> Iterator[Check]:
    from ..compile.nvcc import find_nvcc

    try:
        nvcc = find_nvcc()
        nvcc.require("sm_80")  # no other target takes an older one
    except Fa2genError as error:
        yield Check("nvcc", "missing", str(error), "needed to tune and to run kernels: pip install 'fa2gen[nvcc]'")
        return
    version = ".".join(map(str, nvcc.version))
    yield Check("nvcc", "ok", f"{version}, {nvcc.path} ({_nvcc_origin(nvcc.path)})")


def _nvcc_origin(path: Path) -> str:
    if os.environ.get("FA2GEN_NVCC"):
        return "from FA2GEN_NVCC"
    if "nvidia" in path.parts and "site-packages" in path.parts:
        return "from the nvidia-cuda-nvcc wheel"
    if shutil.which("nvcc") == str(path):
        return "from PATH"
    return "from an installed toolkit"


def _host_compiler() -> Iterator[Check]:
    from ..emulator import find_host_compiler

    try:
        path = find_host_compiler()
    except Fa2genError as error:
        yield Check("g++", "missing", str(error), "needed by nvcc and by the emulator: install g++, or set CXX")
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    yield Check("g++", "ok", f"{done.stdout.partition(chr(10))[0]}, {path}")


def _gpu() -> Iterator[Check]:
    from .. import driver

    try:
        yield Check("pycuda", "ok", importlib.metadata.version("pycuda"))
    except importlib.metadata.PackageNotFoundError:
        fix = "only to run on a GPU, and where a CUDA toolkit is installed: pip install 'fa2gen[gpu]'"
        yield Check("pycuda", "missing", "not installed", fix)
    reason = driver.unavailable_reason()
    if reason is not None:
        version = Path("/proc/driver/nvidia/version")
        kernel_module = version.read_text().partition("\n")[0] if version.is_file() else "no NVIDIA kernel module"
        yield Check("driver", "missing", kernel_module)
        yield Check("gpu", "missing", reason, "tuning is predicted, kernels run in the emulator; both need no GPU")
        return
    from .options import gpu_at_hand

    info = driver.device_info(0)
    release = f"{info.driver_version}, " if info.driver_version else ""
    yield Check("driver", "ok", f"{release}knows CUDA {_dotted(info.cuda_version)}")
    gpu = gpu_at_hand()
    name = f"known as {gpu.name}" if gpu else "not in the GPU database"
    capability = _dotted(info.compute_capability)
    yield Check("gpu", "ok", f"{info.name}, compute capability {capability}, {info.num_sms} SMs, {name}")
    if info.compute_capability[0] == 9:
        yield _tensor_maps()


def _tensor_maps() -> Check:
    from ..driver.tensor_maps import INSTALL, bindings_version

    try:
        return Check("cuda-bindings", "ok", f"{bindings_version()}, encodes tensor maps")
    except Fa2genError:
        fix = f"only for kernels of the sm90 family, which need tensor maps: {INSTALL}"
        return Check("cuda-bindings", "missing", "cannot be imported", fix)


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _cache() -> Iterator[Check]:
    from ..compile.admin import totals
    from ..compile.location import cache_root
    from ..compile.store import leftovers

    try:
        root = cache_root()
        if root is None:
            raise OSError("no folder can be made")
        with tempfile.TemporaryFile(dir=root):
            pass
        number, size = totals(root)
    except (Fa2genError, OSError) as error:
        fix = "every run compiles anew; set FA2GEN_CACHE_DIR to a folder of your own"
        yield Check("cache", "missing", f"cannot be written: {error}", fix)
        return
    left = len(leftovers(root))
    text = f"{root}: {count_text(number, 'entry', 'entries')}, {size_text(size)}"
    if left:
        text += f", {count_text(left, 'leftover')} or builds under way"
    yield Check("cache", "ok", text, "fa2gen cache gc removes leftovers" if left else "")


def _tables() -> Iterator[Check]:
    from ..tables import scan_tables
    from ..tables.store import search_dirs
    from ..tuning.regate import check

    yield Check("templates", "ok", str(data_dir("templates")))
    for root in search_dirs():
        if root.exists() and not root.is_dir():
            yield Check("tables", "error", f"{root} is not a folder", "set FA2GEN_TABLES_DIR to a folder of your own")
    files = scan_tables()
    statuses = check(files=files)
    for file in files:
        path = file.path
        if file.table is None:
            fix = f"it is passed over; move it away, or tune again: {path}"
            yield Check("table", "error", file.problem, fix)
            continue
        mine = [status for status in statuses if status.file is file]
        measured = sum(status.entry.measurement.kind == "measured" for status in mine)
        text = f"{file.gpu}/{path.name} in {file.root}: {measured} measured, {len(mine) - measured} predicted"
        # As table check counts them: what has passed the gate again, or a usable entry replaces, is not waiting for it.
        stale = sum(status.state == "stale" for status in mine)
        fix = f"they are passed over; to gate and use them: fa2gen table check --gpu {file.gpu} --regate"
        yield Check("table", "ok", text + (f", {stale} stale" if stale else ""), fix if stale else "")
    if not files:
        yield Check(
            "table", "missing", "no tuned tables", "kernels run with default configs: fa2gen tune --headdim 128"
        )


_PROBES = (_python, _torch, _nvcc, _host_compiler, _gpu, _cache, _tables)
