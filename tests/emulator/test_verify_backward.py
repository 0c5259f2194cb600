"""``fa2gen verify --kind bwd`` on the emulator: right kernels pass, wrong ones do not, bad input is one line."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner, Result

from fa2gen import driver
from fa2gen.cli import main
from fa2gen.codegen import KernelSource, render_kernel
from fa2gen.constraints import default_config
from fa2gen.emulator import launches
from fa2gen.spec import KernelSpec

ARGUMENTS = ("verify", "--kind", "bwd", "--headdim", "32", "--dtype", "bf16", "--causal", "--backend", "emulator")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "hidden by a test")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*ARGUMENTS, *arguments])


def test_right_and_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("--deterministic", "--seqlen-q", "17", "--seqlen-k", "33", "--json")
    assert result.exit_code == 0, result.output
    (kernel,) = json.loads(result.stdout)["kernels"]
    spec = KernelSpec("bwd", head_dim=32, causal=True, deterministic=True)
    assert (kernel["spec"], kernel["config"]) == (spec.canonical(), default_config(spec).canonical())
    assert (kernel["passed"], kernel["config_chosen"]) == (True, "default")
    assert kernel["text"].startswith("passed 6 cases: gradient ")

    def without_d(*arguments: str) -> KernelSource:
        """D is left out of dS = P (dP - D)."""
        source = render_kernel(*arguments)
        old = "    float delta = dot_chunk(chunk_dout[i], chunk_o[i]);\n"
        assert source.text.count(old) == (source.kernel == "bwd_preprocess")
        return dataclasses.replace(source, text=source.text.replace(old, "    float delta = 0.f;\n"))

    monkeypatch.setattr(launches, "render_kernel", without_d)
    result = run("--seqlen-q", "17", "--seqlen-k", "33")
    assert result.exit_code == 1
    assert result.stdout.startswith("WRONG  bwd_d32_bf16_causal_gqa1 ")
    assert "0 of 1 kernels right" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config", '{"q_in_regs": true}'), "BwdConfig has no field q_in_regs"),
        (("--config", '{"roles": 3}'), "cannot run bwd_d32_bf16_causal_gqa1"),
        (("--headdim", "33"), "a call pads 33 columns to 40"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    (line,) = result.stderr.strip().splitlines()
    assert (result.exit_code, line[:7]) == (1, "error: ")
    assert words in line
