"""What ``fa2gen tune`` says of a session: predicted or measured, saved or not, in a terminal and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from fa2gen import driver
from fa2gen.cli import main
from fa2gen.commands import tune_output
from fa2gen.commands.options import make_specs
from fa2gen.hardware import Gpu
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import Measurement, Provenance, TunedEntry, utc_now
from fa2gen.tuning.report import Failure, TuneEvent, TuneReport, TuneRequest


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about a machine without a GPU, wherever they run."""
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "hidden by a test")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@dataclasses.dataclass
class FakeTuner:
    """Stands in for ``tuning.session.tune``: remembers what it was asked and reports what it was told to."""

    interrupted: bool = False
    empty: bool = False
    measured: bool = False
    superseded: int = 0
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __call__(self, requests: Sequence[TuneRequest], gpu: Gpu, **options: Any) -> TuneReport:
        self.calls.append({"requests": list(requests), "gpu": gpu, **options})
        options["progress"](TuneEvent("compile", 1, 1, "a kernel"))
        kind = "measured" if self.measured else "predicted"
        entries = []
        for number, request in enumerate([] if self.empty else requests, 1):
            measurement = Measurement(
                kind, float(number), float(number), float(number), 5 * self.measured, "test", request.problem
            )
            provenance = Provenance(
                "hash", "13.0", "", 3, 2, "test", utc_now(), model_version=None if self.measured else "1"
            )
            bucket = request.problem.bucket(gpu.num_sms)
            entries.append(TunedEntry(request.spec, bucket, FwdConfig(), measurement, provenance))
        failures = (Failure(requests[0].spec, FwdConfig(block_m=64), "spilled", "8 bytes\nof stores"),)
        paths = () if self.empty else (Path("/tables/fwd.json"),)
        return TuneReport(
            gpu, self.measured, tuple(entries), failures, paths, 4, 5, 6.0, {}, self.interrupted, self.superseded
        )


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> FakeTuner:
    fake = FakeTuner()
    monkeypatch.setattr("fa2gen.tuning.session.tune", fake)
    return fake


TUNE = ("tune", "--headdim", "64", "--gpu", "a100", "--dtype", "bf16")


def test_tune_says_that_it_predicts(tuner: FakeTuner) -> None:
    result = run(*TUNE, "--trials", "7", "--timeout", "30", "--no-resume", "-o", "somewhere")
    assert result.exit_code == 0, result.output
    (call,) = tuner.calls
    assert (call["trials"], call["timeout"], call["resume"], call["out"]) == (7, 30.0, False, Path("somewhere"))
    assert len(call["requests"]) == 2 * 2 * 3
    assert "PREDICTED" in result.stdout.splitlines()[0]
    assert "ms predicted" in result.stdout
    assert "saved 12 entries to /tables/fwd.json" in result.stdout
    assert "spilled: fwd_d64_bf16_full_gqa1" in result.stdout
    assert "compile: 1/1" in result.stderr
    rows = [line for line in result.stdout.splitlines() if "fwd_d64" in line and FwdConfig().slug() in line]
    assert len(rows) == 12
    rates = [float(row.split("│")[-2]) for row in rows]
    assert rates == sorted(rates, reverse=True)


def test_tune_measured_does_not(tuner: FakeTuner) -> None:
    tuner.measured = True
    result = run(*TUNE, "--causal")
    assert result.exit_code == 0
    assert "predicted" not in result.stdout.lower()
    assert "measured" in result.stdout


def test_tune_exit_codes(tuner: FakeTuner) -> None:
    tuner.interrupted = True
    assert run(*TUNE).exit_code == 130
    assert run(*TUNE, "--timeout", "5").exit_code == 0
    tuner.interrupted, tuner.empty = False, True
    assert run(*TUNE).exit_code == 1


def test_tune_json(tuner: FakeTuner) -> None:
    result = run(*TUNE, "--causal", "--gqa", "4", "--json")
    form = json.loads(result.stdout)
    assert (form["gpu"], form["kind"], form["compiled"], form["cached"]) == ("a100", "predicted", 4, 5)
    assert [KernelSpec.from_canonical(entry["spec"]).gqa_ratio for entry in form["entries"]] == [4, 4, 4]
    assert form["failures"][0]["outcome"] == "spilled"
    problem = tuner.calls[0]["requests"][1].problem
    assert form["entries"][1]["tflops"] == pytest.approx(problem.flops(make_specs([64], ["bf16"], True, [4])[0]) / 2e9)


def test_tune_that_saves_nothing_says_so(tuner: FakeTuner) -> None:
    tuner.empty = True
    assert "error: nothing was saved: no config" in run(*TUNE).stderr
    tuner.interrupted = True
    late = run(*TUNE, "--timeout", "5")
    assert (late.exit_code, late.stderr.count("error: ")) == (1, 1)
    assert "nothing was saved: the time was up" in late.stderr


def test_tune_does_not_claim_to_have_saved_what_gave_way(tuner: FakeTuner) -> None:
    tuner.superseded = 5
    assert "saved 7 entries to /tables/fwd.json; 5 gave way" in run(*TUNE).stdout
    assert json.loads(run(*TUNE, "--json").stdout)["superseded"] == 5


@pytest.mark.parametrize("columns", [80, 72, 200])
def test_results_fit_the_terminal(tuner: FakeTuner, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def console() -> Console:
        return Console(width=columns, highlight=False)

    monkeypatch.setattr(tune_output, "_console", console)
    out = run("tune", "--headdim", "128", "--gpu", "a100").stdout
    table = [line for line in out.splitlines() if not line.startswith(("saved ", "spilled: ", "4 kernels"))]
    assert max(map(len, table)) <= columns
    for name in ("fwd_d128_bf16_causal_gqa8", FwdConfig().slug(), "8192/8192", "TFLOP/s"):
        assert name in out
