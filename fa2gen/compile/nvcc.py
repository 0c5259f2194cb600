"""nvcc: where it is, which build it is, what it can compile for, and the one list of flags.

Finding out which build an nvcc is takes two processes and a hash over cicc and ptxas (0.3 s), too long for a path that
only loads a cached kernel. The answer is kept per path, in the process and in ``toolchains.json`` of the kernel cache,
with the modification times and sizes of the files that make up the compiler, and asked for again when one changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CacheError, ToolchainError
from .entry import checksum, read_trusted
from .location import cache_root
from .store import replace_file

#: Options of every compilation, whoever runs nvcc. Part of a cubin's key; ptxas writes its own into the cubin's notes.
OPTIONS = ("-std=c++17", "-O3", "-Xptxas", "-v")
#: Names that both ways of running nvcc use inside their temporary folder; PyCUDA's are fixed.
SOURCE_NAME, CUBIN_NAME = "kernel.cu", "kernel.cubin"

#: nvcc adds these to every command line, so they are part of a cubin's key as well.
_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

# First CUDA release whose nvcc knows the target (release notes). 11.8 is the floor: kernels use __grid_constant__.
_FIRST_RELEASE = {
    "sm_80": (11, 8),
    "sm_86": (11, 8),
    "sm_87": (11, 8),
    "sm_89": (11, 8),
    "sm_90": (11, 8),
    "sm_90a": (12, 0),
    "sm_100": (12, 8),
    "sm_100a": (12, 8),
    "sm_120": (12, 8),
    "sm_120a": (12, 8),
    "sm_103": (12, 9),
    "sm_103a": (12, 9),
    "sm_121": (12, 9),
    "sm_121a": (12, 9),
}

#: Ends every message about a missing or too old nvcc.
HOW_TO_GET = 'install one with: pip install "fa2gen[nvcc]", or set FA2GEN_NVCC to the path of an nvcc'


@dataclass(frozen=True)
class Nvcc:
    """One CUDA compiler.

    Attributes:
        path: The program to run; may be a wrapper script.
        version: (major, minor, patch), e.g. (13, 0, 88).
        build_id: Names the build of nvcc, ptxas and cicc together, e.g. ``13.0.88-compiler.36424714_0-6c1f0a92b3d4``.
            Equal on machines that have the same files, wherever they lie.
        root: The toolkit's folder by nvcc's own account, None if it gives none.
    """

    path: Path
    version: tuple[int, int, int]
    build_id: str
    root: Path | None = None

    def require(self, target: str) -> None:
        """Checks that this nvcc can compile for ``target``.

        Raises:
            ToolchainError: It is too old; the message names the CUDA release that is needed.
        """
        first = first_release(target)
        if self.version[:2] < first:
            raise ToolchainError(
                f"{self.path} is nvcc {'.'.join(map(str, self.version))}, and {target} needs CUDA "
                f"{first[0]}.{first[1]} or newer; {HOW_TO_GET}"
            )


def first_release(target: str) -> tuple[int, int]:
    """First CUDA release whose nvcc compiles fa2gen's kernels for ``target``; for unknown targets, for any."""
    return _FIRST_RELEASE.get(target, (11, 8))


def nvcc_options(target: str) -> list[str]:
    """Options for ``target``, in the order in which PyCUDA passes them: the target last."""
    return [*OPTIONS, "-arch", target]


def nvcc_command(nvcc: Nvcc, target: str) -> list[str]:
    """Command that compiles ``kernel.cu`` to ``kernel.cubin`` in the current folder. No -I: sources include nothing."""
    return [str(nvcc.path), "--cubin", *nvcc_options(target), SOURCE_NAME]


def key_flags(target: str) -> list[str]:
    """Everything besides source and compiler that the cubin's bytes depend on."""
    inherited = [f"{name}={os.environ[name]}" for name in _FLAG_VARIABLES if os.environ.get(name)]
    return [*nvcc_options(target), *inherited]


def find_nvcc() -> Nvcc:
    """The nvcc to use: $FA2GEN_NVCC, else the first that answers of PATH, the nvidia-cuda-nvcc wheel, $CUDA_HOME,
    $CUDA_PATH and /usr/local/cuda.

    Raises:
        ToolchainError: None answers; the message says what was tried and how to get one.
    """
    named = os.environ.get("FA2GEN_NVCC")
    if named:
        program = shutil.which(named)
        if program is None:
            raise ToolchainError(f"FA2GEN_NVCC is {named}, which is not a program; {HOW_TO_GET}")
        return identify_nvcc(Path(program))
    tried = []
    for path in _candidates():
        try:
            return identify_nvcc(path)
        except ToolchainError as error:
            tried.append(str(error))
    found = "; ".join(tried) if tried else "not on PATH, not in the nvidia-cuda-nvcc wheel, not in /usr/local/cuda"
    raise ToolchainError(f"no nvcc found ({found}); {HOW_TO_GET}")


def _candidates() -> Iterator[Path]:
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    roots = [Path(root) for name in ("CUDA_HOME", "CUDA_PATH") if (root := os.environ.get(name))]
    for folder in [*_wheel_folders(), *roots, Path("/usr/local/cuda")]:
        path = folder / "bin" / "nvcc"
        if os.access(path, os.X_OK):
            yield path


def _wheel_folders() -> list[Path]:
    # The wheels of CUDA 13 share the folder nvidia/cu13; CUDA 12's have no nvcc. Newer majors keep the pattern.
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    places = list(spec.submodule_search_locations or ()) if spec else []
    folders = [folder for place in places for folder in Path(place).glob("cu[0-9]*") if folder.name[2:].isdigit()]
    return sorted(folders, key=lambda folder: int(folder.name[2:]), reverse=True)


_identified: dict[Path, tuple[list[list[Any]], Nvcc]] = {}


def identify_nvcc(path: Path) -> Nvcc:
    """Version and build of the nvcc at ``path``, from memory, from the cache folder, or by asking it.

    Raises:
        ToolchainError: It does not run or does not answer like nvcc.
    """
    known = _identified.get(path)
    if known is not None and _unchanged(known[0]):
        return known[1]
    memo = _read_memo()
    record = memo.get(str(path))
    nvcc = _from_record(path, record)
    if nvcc is None or not isinstance(record, dict):
        nvcc, files = _ask(path)
        record = {"version": nvcc.version, "build_id": nvcc.build_id, "root": str(nvcc.root or ""), "files": files}
        _write_memo({**memo, str(path): record})
    _identified[path] = (record["files"], nvcc)
    return nvcc


def _ask(path: Path) -> tuple[Nvcc, list[list[Any]]]:
    version_text = _output([str(path), "--version"])
    match = re.search(r"release (\d+)\.(\d+), V\d+\.\d+\.(\d+)", version_text)
    if match is None:
        raise ToolchainError(f"{path} does not answer --version like nvcc")
    version = (int(match[1]), int(match[2]), int(match[3]))
    # `nvcc --version` is silent about ptxas and cicc; cicc comes in a package of its own and may be of another release.
    # A dry run names their places, also behind a wrapper script; the file that it is asked to compile need not exist.
    settings = dict(re.findall(r"^#\$ (\w+)=(.*)$", _output([str(path), "--dryrun", "-cubin", SOURCE_NAME]), re.M))
    here, cicc_folder = settings.get("_HERE_"), settings.get("CICC_PATH")
    parts = [Path(here) / "nvcc", Path(here) / "ptxas"] if here else []
    parts += [Path(cicc_folder) / "cicc"] if cicc_folder else []
    parts = [part for part in parts if part.is_file()]
    digest = hashlib.blake2b(version_text.encode(), digest_size=6)
    for part in parts[1:]:
        digest.update(part.read_bytes())
    build = re.search(r"^Build cuda_\S+?/(\S+)", version_text, re.M)
    build_id = "-".join(
        [".".join(map(str, version)), *([build[1]] if build else []), digest.hexdigest()],
    )
    root = Path(os.path.normpath(settings["TOP"])) if settings.get("TOP") else None
    return Nvcc(path, version, build_id, root), [_stamp(part) for part in dict.fromkeys([path, *parts])]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{command[0]} does not run: {error}") from error
    return done.stdout


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_mtime_ns, status.st_size]


def _unchanged(files: list[list[Any]]) -> bool:
    try:
        return all(_stamp(Path(name)) == [name, mtime, size] for name, mtime, size in files)
    except OSError:
        return False


def _memo_path() -> Path | None:
    try:
        root = cache_root()
    except CacheError:
        return None  # whoever opens the cache itself says so; finding nvcc does not depend on it
    return root / "toolchains.json" if root else None


def _read_memo() -> dict[str, Any]:
    path = _memo_path()
    try:
        memo = json.loads(read_trusted(path)) if path else {}
        compilers, own = memo["compilers"], memo["checksum"]
        return compilers if isinstance(compilers, dict) and own == checksum(compilers) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _write_memo(memo: dict[str, Any]) -> None:
    """Best effort: without it the next process asks again."""
    path = _memo_path()
    if path is None:
        return
    with contextlib.suppress(OSError):
        replace_file(path.parent, path.name, json.dumps({"compilers": memo, "checksum": checksum(memo)}).encode())


def _from_record(path: Path, record: object) -> Nvcc | None:
    """The nvcc of a memo's record, None if a file changed or the record is not as written."""
    try:
        if not isinstance(record, dict) or not _unchanged(record["files"]) or not record["files"]:
            return None
        major, minor, patch = map(int, record["version"])
        root = Path(record["root"]) if record["root"] else None
        return Nvcc(path, (major, minor, patch), str(record["build_id"]), root)
    except (KeyError, TypeError, ValueError):
        return None
