"""What the documents claim is so: diagnostics, Python examples, commands, files they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa2gen.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# Reports about the emulator itself, which no kernel can cause.
_INTERNAL = {"out-of-memory", "protocol"}


def test_every_diagnostic_is_explained() -> None:
    host = ROOT / "fa2gen" / "emulator"
    sources = "\n".join(path.read_text() for path in host.rglob("*") if path.suffix in (".h", ".cpp", ".py"))
    raised = set(re.findall(r"(?:Diagnostic|EmulatorError)\(\s*\"([a-z-]+)\"", sources)) - _INTERNAL
    assert len(raised) > 15
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "emulator.md").read_text(), re.M)
    explained = {name for row in table for name in re.findall(r"`([a-z-]+)`", row)}
    assert raised <= explained, raised - explained
    assert all(f'"{name}"' in sources for name in explained)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_exist(path: Path) -> None:
    names = re.findall(r"`((?:fa2gen|templates|tests|docs|tuned_tables)/[\w./-]+)`", path.read_text())
    assert all((ROOT / name).exists() for name in names), [n for n in names if not (ROOT / n).exists()]
    links = re.findall(r"\]\((?!https?:)([\w./-]+)\)", path.read_text())
    assert all((path.parent / link).exists() for link in links), links


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_use_options_that_exist(path: Path) -> None:
    for command, rest in re.findall(r"^fa2gen (\w+)([^#\n]*)", path.read_text(), re.M):
        help_text = CliRunner().invoke(main, [command, "--help"]).output
        for option in re.findall(r"(?<!\w)--?[a-z][\w-]*", rest):
            assert option in help_text, f"{path.name}: fa2gen {command} has no {option}"


def test_emulator_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "emulator.md").read_text(), re.S)
    exec(code, {})
    assert "mma=" in capsys.readouterr().out
