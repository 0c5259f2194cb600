"""``fa2gen emit``: one kernel to stdout, a given config, JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fa2gen.cli import main
from fa2gen.codegen import render_kernel, template_hash
from fa2gen.constraints import default_config
from fa2gen.emit import EXTRA_FILES, choose, emit
from fa2gen.errors import ArgumentError, InfeasibleError
from fa2gen.hardware import get_gpu
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import save_entries, store
from fa2gen.tuning.report import usual_problem
from tests.tuning_fakes import entry

ONE = ("emit", "--headdim", "64", "--dtype", "bf16", "--causal", "--gpu", "a100")
SPEC = KernelSpec(head_dim=64, causal=True)
CONFIG = FwdConfig(block_m=64, num_warps=2, softmax="guarded")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_stdout_is_the_file(tmp_path: Path) -> None:
    printed = invoke(*ONE, "--stdout")
    assert printed.exit_code == 0
    assert invoke(*ONE, "-o", str(tmp_path)).exit_code == 0
    assert printed.stdout == (tmp_path / "fwd_d64_bf16_causal_gqa1.cu").read_text()


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("default", default_config(SPEC)),
        (CONFIG.slug(), CONFIG),
        (json.dumps(CONFIG.canonical()), CONFIG),
        (' {"num_stages": 3}', FwdConfig(num_stages=3)),
    ],
)
def test_given_config(text: str, config: FwdConfig, tmp_path: Path) -> None:
    assert invoke(*ONE, "--config", text, "--stdout").stdout == render_kernel(SPEC, config).text
    result = invoke(*ONE, "--config", text, "-o", str(tmp_path), "--json")
    form = json.loads(result.stdout)
    assert form["out"] == str(tmp_path)
    assert sorted(form["files"]) == sorted(path.name for path in tmp_path.iterdir())
    assert set(EXTRA_FILES) < set(form["files"])
    (kernel,) = form["kernels"]
    assert FwdConfig.from_canonical(kernel["config"]) == config
    assert kernel["config_chosen"]["source"] == ("default" if text == "default" else "given")
    assert {key: form[key] for key in form if key not in ("out", "files")} == json.loads(
        (tmp_path / "manifest.json").read_text()
    )


def test_a_borrowed_config_names_all_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(store, "package_dir", lambda: tmp_path / "package")
    spec = KernelSpec("bwd", head_dim=96, causal=True, gqa_ratio=8)
    row = entry(spec, usual_problem(spec, 2048, 2048), template=template_hash("bwd", "sm80"))
    save_entries(get_gpu("a100"), [row])
    call = ("emit", "--kind", "bwd", "--causal", "--gpu", "a100", "-o", str(tmp_path / "out"))
    for options, how in (
        (("--headdim", "96", "--dtype", "bf16", "--gqa", "8"), "exact"),
        (
            ("--headdim", "80", "--dtype", "fp16", "--gqa", "2", "--deterministic"),
            "nearest gqa ratio + non-deterministic entry + other dtype + native head dim",
        ),
    ):
        result = invoke(*call, *options)
        assert result.exit_code == 0, result.output
        assert f"  {row.config.slug()}: {how}, predicted, from a100 {spec.slug()} q11_k11_w4\n" in result.stdout


def test_launch_rule_and_targets_are_machine_readable() -> None:
    (small,) = choose(SPEC, get_gpu("a100"), config=FwdConfig(num_stages=1))
    (large,) = choose(SPEC, get_gpu("a100"), config=FwdConfig(block_n=128, step_n=64, num_stages=3))
    from fa2gen.emit import manifest

    entries = manifest([small, large], get_gpu("a100"))["kernels"]
    assert [entry["launch"]["max_dynamic_smem_must_be_set"] for entry in entries] == [False, True]
    assert "sm_86" in entries[0]["targets"]
    assert entries[1]["targets"] == ["sm_80", "sm_87", "sm_90", "sm_100"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((*ONE,), 2, "either --out or --stdout"),
        ((*ONE, "--stdout", "-o", "x"), 2, "either --out or --stdout"),
        ((*ONE, "--stdout", "--json"), 2, "--json"),
        (("emit", "--headdim", "64", "--gpu", "a100", "--stdout"), 2, "the options name 4"),
        ((*ONE, "--stdout", "--config", "fastest"), 1, "config must"),
        ((*ONE, "--stdout", "--config", "{"), 1, "not JSON"),
        ((*ONE, "--stdout", "--config", '{"tile": 1}'), 1, "no field tile"),
        ((*ONE, "--stdout", "--config", '{"block_m": 48}'), 1, "block_m 48"),
        ((*ONE, "--stdout", "--config", "sm80_128x256s64_w4_st3_qs_online_mb1"), 1, "grants a block"),
        ((*ONE, "--stdout", "--config", "sm80_128x64s64_w4_st2_qs_lazy_mb1"), 1, "softmax"),
    ],
)
def test_refused(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_an_illegal_config_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InfeasibleError, match="a10:"):
        emit([SPEC], get_gpu("a10"), out, config=FwdConfig(block_n=128, step_n=64, num_stages=3))
    assert not out.exists()


def test_config_slug_round_trip() -> None:
    for config in (FwdConfig(), CONFIG, FwdConfig(block_n=96, step_n=48, q_in_regs=True, min_blocks=4)):
        assert FwdConfig.from_slug(config.slug()) == config
    for wrong in ("", "default", CONFIG.slug() + "x", CONFIG.slug().upper(), "sm80_0x64s64_w4_st2_qs_online_mb1"):
        with pytest.raises(ArgumentError):
            FwdConfig.from_slug(wrong)
