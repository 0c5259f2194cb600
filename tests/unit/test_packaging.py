"""Data files are found and packed: in a checkout, and in the wheel that pip builds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fa2gen
from fa2gen.data import data_dir

ROOT = Path(__file__).resolve().parents[2]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _files(folder: str, *patterns: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / folder).rglob(pattern)}


def test_data_folders_are_the_checkout_s() -> None:
    assert data_dir("templates").samefile(ROOT / "templates")
    assert data_dir("tuned_tables").samefile(ROOT / "tuned_tables")


def test_unknown_data_folder() -> None:
    with pytest.raises(ValueError, match="templates, tuned_tables"):
        data_dir("secrets")


def test_data_folder_is_found_from_elsewhere(tmp_path: Path) -> None:
    code = "from fa2gen.data import data_dir; print(data_dir('templates'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert Path(done.stdout.strip()).samefile(ROOT / "templates")


def test_every_package_is_listed() -> None:
    on_disk = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "fa2gen").rglob("__init__.py")} | {
        "fa2gen.templates",
        "fa2gen.tuned_tables",
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk


def test_version_is_written_once_more_only() -> None:
    assert PROJECT["project"]["version"] == fa2gen.__version__


def test_extras() -> None:
    assert {"gpu", "nvcc", "report", "test"} <= set(PROJECT["project"]["optional-dependencies"])
    for requirement in PROJECT["project"]["dependencies"]:
        assert not requirement.startswith(("pycuda", "nvidia", "cuda")), (
            "a machine without CUDA must be able to install"
        )


def test_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("tune", "test"):
        assert f"\nmake {target} " in readme
        assert f"\n{target}:" in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names inside the wheel, built from a copy so that no build folder appears in the checkout."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("sdist") / "fa2gen"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, tracked.stdout.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    out = copy.parent / "dist"
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), str(copy)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (path,) = out.glob("fa2gen-*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_wheel_holds_code_and_data(wheel: set[str]) -> None:
    wanted = _files("fa2gen", "*.py", "*.toml", "*.h", "*.cpp", "*.S", "py.typed")
    wanted |= {f"fa2gen/{name}" for name in _files("templates", "*.j2", "*.cuh", "__init__.py")}
    wanted |= {f"fa2gen/{name}" for name in _files("tuned_tables", "*.json", "__init__.py")}
    assert any(name.endswith(".cuh") for name in wanted)
    assert any(name.endswith("gpus.toml") for name in wanted)
    assert wanted <= wheel, sorted(wanted - wheel)


def test_wheel_holds_nothing_else(wheel: set[str]) -> None:
    strangers = {name for name in wheel if not name.startswith("fa2gen/") and ".dist-info/" not in name}
    assert not strangers
