"""Imports flow one way: a module imports only lower layers, or rooms listed before its own in its layer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fa2gen"

# Lowest first. Within a layer the order is the order in which rooms may import each other, except where a layer's rooms
# are given as a set: those never import each other.
LAYERS: tuple[tuple[str, ...] | frozenset[str], ...] = (
    ("errors", "data", "identity", "config_sm90", "spec", "problem", "tensor_map", "hardware", "roofline"),
    ("tiles", "constraints_backward", "constraints_sm90", "constraints", "tables"),
    ("codegen", "launch", "compile", "emulator", "driver", "reference", "gate"),
    frozenset({"tuning", "runtime"}),
    ("compat", "emit_example", "emit_manifest", "emit", "explain_smem", "explain", "bench", "report"),
    ("commands", "cli", "__main__"),
)
# Cheap modules that the package itself offers as attributes, on demand.
PACKAGE_ROOM = "__init__"

HEAVY = ("torch", "pycuda", "cuda", "optuna", "matplotlib")


def _place(room: str) -> tuple[int, int]:
    for layer, rooms in enumerate(LAYERS):
        if room in rooms:
            return layer, sorted(rooms).index(room) if isinstance(rooms, frozenset) else rooms.index(room)
    raise AssertionError(f"fa2gen/{room} has no place in the layers: add it to LAYERS here and in CONTRIBUTING.md")


def _may_import(importer: str, imported: str) -> bool:
    if importer == imported or imported == PACKAGE_ROOM:
        return True
    (layer_a, index_a), (layer_b, index_b) = _place(importer), _place(imported)
    if layer_a != layer_b:
        return layer_b < layer_a
    return not isinstance(LAYERS[layer_a], frozenset) and index_b < index_a


def _room(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _imported_rooms(path: Path, tree: ast.AST) -> set[str]:
    """Rooms of fa2gen that a module imports anywhere in its text, functions included."""
    # Dotted name of the package that holds the module, against which relative imports are resolved.
    package = ["fa2gen", *path.relative_to(PACKAGE).parts[:-1]]
    rooms = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "fa2gen":
                known = len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file())
                rooms.add(parts[1] if known else PACKAGE_ROOM)
    return rooms


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_flow_downwards(path: Path) -> None:
    room = _room(path)
    imported = _imported_rooms(path, ast.parse(path.read_text()))
    if room == PACKAGE_ROOM:
        assert not imported - {PACKAGE_ROOM}, "fa2gen/__init__.py imports its rooms on demand only"
        return
    wrong = sorted(other for other in imported if not _may_import(room, other))
    assert not wrong, f"fa2gen/{room} may not import {', '.join(wrong)}"


def test_the_rule_sees_wrong_imports() -> None:
    text = "from ..tuning import session\nfrom .. import cli\ndef f():\n    import fa2gen.runtime\n"
    rooms = _imported_rooms(PACKAGE / "gate" / "x.py", ast.parse(text))
    assert rooms == {"tuning", "cli", "runtime"} or rooms == {"tuning", PACKAGE_ROOM, "runtime"}
    assert not _may_import("tuning", "runtime")
    assert not _may_import("runtime", "tuning")
    assert not _may_import("codegen", "compile")
    assert not _may_import("spec", "constraints")
    assert _may_import("compile", "codegen")
    assert _may_import("cli", "tuning")


def _modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=PACKAGE.parent
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import fa2gen",
        "import fa2gen.cli",
        "import fa2gen; fa2gen.KernelSpec(head_dim=64); fa2gen.Problem(1, 1, 1, 1, 1)",
    ],
)
def test_import_is_cheap(statement: str) -> None:
    loaded = _modules_after(statement)
    assert "fa2gen" in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize(("package", "rooms"), [("pycuda", {"driver", "compile"}), ("cuda", {"driver"})])
def test_cuda_is_imported_only_where_it_is_touched(package: str, rooms: set[str]) -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            if any(name.partition(".")[0] == package for name in names):
                assert _room(path) in rooms, f"{path} imports {package}"


def test_rendering_needs_no_torch() -> None:
    assert not _modules_after("import fa2gen.codegen, fa2gen.compile, fa2gen.driver, fa2gen.tables") & {
        "torch",
        "pycuda",
        "cuda",
        "optuna",
    }
