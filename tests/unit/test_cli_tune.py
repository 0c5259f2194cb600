"""``fa2gen tune``: sizes, devices, dry runs and reports as a user or a program sees them."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fa2gen import driver
from fa2gen.cli import main
from fa2gen.constraints import default_config, default_config_of
from fa2gen.driver import DeviceInfo
from fa2gen.hardware import get_gpu
from fa2gen.problem import Problem
from fa2gen.spec import FwdConfig, KernelSpec
from fa2gen.tables import Clocks, Incumbent, save_entries
from fa2gen.tuning.report import Failure, TuneReport, TuneRequest, usual_problem
from fa2gen.tuning.space import legal_space
from fa2gen.tuning.tools import Tools
from tests.tuning_fakes import FakeRooms, entry

ROOT = Path(__file__).resolve().parents[2]
H200 = get_gpu("h200")
DEVICE = DeviceInfo(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30, 232448, 1980.0, (13, 0), "580.95")
SPEC = KernelSpec(head_dim=64, causal=True)
ONE = ("tune", "--headdim", "64", "--dtype", "bf16", "--causal", "--gqa", "1", "--gpu")


@pytest.fixture(autouse=True)
def _no_gpu_and_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unavailable_reason", lambda: "hidden by a test")
    monkeypatch.setenv("FA2GEN_TABLES_DIR", str(tmp_path / "tables"))
    monkeypatch.setenv("FA2GEN_STATE_DIR", str(tmp_path / "state"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def plan(*arguments: str) -> dict:
    result = run(*ONE, "a100", *arguments, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def lengths(form: dict) -> list[tuple[int, int]]:
    return [(row["seqlen_q"], row["seqlen_k"]) for row in form["requests"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [(512, 512)]),
        ("1x8192, 512", [(1, 8192), (512, 512)]),
        ("512,512x512,2048", [(512, 512), (2048, 2048)]),
        ("all", [(2**n, 2**n) for n in range(9, 15)]),
        ("ALL,1X8192", [*((2**n, 2**n) for n in range(9, 15)), (1, 8192)]),
    ],
)
def test_buckets(text, expected):
    assert lengths(plan("--buckets", text)) == expected


def test_without_buckets_three_lengths():
    assert lengths(plan()) == [(512, 512), (2048, 2048), (8192, 8192)]
    assert lengths(plan("--seqlen-q", "33", "--seqlen-k", "77")) == [(33, 77)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--buckets", ""), "'' is no size"),
        (("--buckets", "512,"), "'' is no size"),
        (("--buckets", "5x"), "'5x' is no size: give a length (512), queries x keys (1x8192), or all"),
        (("--buckets", "1x2x3"), "is no size"),
        (("--buckets", "-5"), "is no size"),
        (("--buckets", "1.5"), "is no size"),
        (("--buckets", "0"), "lengths must be 1 to"),
        (("--buckets", "99999999999"), "lengths must be 1 to"),
        (("--buckets", "512", "--seqlen-q", "4"), "--buckets and --seqlen-q exclude each other"),
        (("--seed", "-1"), "--seed"),
        (("--device", "-1"), "--device"),
        (("--timeout", "0"), "--timeout"),
    ],
)
def test_bad_options_are_one_line(arguments, words):
    result = run(*ONE, "a100", *arguments, "--dry-run")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_device_that_is_not_there_is_one_line():
    for extra in ((), ("--dry-run",)):
        result = run(*ONE, "a100", "--device", "0", *extra)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == "error: device 0 does not exist: this machine's GPUs are: none\n"


def test_usual_problems_fit_a_gpu():
    assert usual_problem(SPEC, 1, 8192) == Problem(2, 1, 8192, 32, 32)
    assert usual_problem(SPEC, 8192, 8192) == Problem(2, 8192, 8192, 32, 32)
    assert usual_problem(SPEC, 0, 0).batch == 16384


def test_a_dry_run_names_what_comes_first(tmp_path, monkeypatch):
    old = FwdConfig(block_m=64, block_n=64, step_n=32, num_warps=4, num_stages=3)
    problem = usual_problem(SPEC, 512, 512)
    row = dataclasses.replace(entry(SPEC, problem, kind="measured", **old.canonical()), bucket=problem.bucket(132))
    save_entries(H200, [row])
    monkeypatch.setattr("fa2gen.tuning.plan.Tools", lambda: dataclasses.replace(
        FakeRooms(device=DEVICE, count=2).tools(), table_roots=Tools().table_roots
    ))  # fmt: skip
    arguments = (*ONE, "h200", "--buckets", "512", "--dry-run")
    form = json.loads(run(*arguments, "--json").stdout)
    assert (form["kind"], form["devices"]) == ("measured", [0, 1])
    planned, hopper = form["requests"]
    # The second one's is of the package's table.
    assert (planned["family"], hopper["family"], hopper["incumbent"]["family"]) == ("sm80", "sm90", "sm90")
    assert hopper["default"] == default_config_of(SPEC, "sm90").canonical()
    assert [config["family"] for config in hopper["model_favourites"]] == 3 * ["sm90"]
    form, both = json.loads(run(*arguments, "--family", "sm80", "--json").stdout), form
    assert both["kernels_to_compile"] == form["kernels_to_compile"] + 32
    (planned,) = form["requests"]
    space = legal_space(SPEC, H200)
    assert (planned["legal_configs"], planned["excluded_configs"]) == (len(space.configs), len(space.excluded))
    assert planned["default"] == default_config(SPEC).canonical()
    assert planned["incumbent"] == old.canonical()
    # What the package's table holds for other sizes and heads.
    assert len(planned["relatives"]) >= 3
    assert len(planned["model_favourites"]) == 3
    assert form["kernels_to_compile"] == 32
    text = run(*arguments, "--family", "sm80").stdout
    marks = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert marks == ["default", "incumbent", *["relative"] * len(planned["relatives"]), "model", "model", "model"]
    assert "measured on device 0, 1" in text
    assert "legal configs" in text
    # Nothing was begun.
    assert not (tmp_path / "state").exists()


def test_a_dry_run_without_the_gpu_predicts_and_times_nothing():
    form = plan("--trials", "0")
    assert (form["kind"], form["devices"], form["kernels_to_compile"]) == ("predicted", [], 1)
    assert all(row["incumbent"] is None for row in form["requests"])
    assert 0 < form["estimated_seconds"] < 60
    assert "in all" in form["estimate"]


def test_a_dry_run_is_quick():
    """24 requests of 950 configs each: 3 to 4 s of one core alone."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "tune", "--headdim", "128", "--gpu", "a100", "--dry-run"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert used < 8.0, "twice what is wanted, for machines half as fast"


class Tuner:
    """Stands in for a session: two measured or predicted entries, and some failures."""

    def __init__(self, measured: bool) -> None:
        self.measured, self.options = measured, {}

    def __call__(self, requests, gpu, **options):
        self.options = options
        kind = "measured" if self.measured else "predicted"
        rows = [entry(request.spec, request.problem, kind=kind, ms=0.5) for request in requests]
        if self.measured:
            clocks = Clocks(1755, 1700, 1980, ("hw_thermal_slowdown", "sw_power_cap"))
            first = rows[0]
            rows[0] = dataclasses.replace(
                first,
                measurement=dataclasses.replace(first.measurement, clocks=clocks),
                provenance=dataclasses.replace(first.provenance, incumbent=Incumbent(FwdConfig(num_stages=3), 0.55)),
            )
        failures = [Failure(SPEC, FwdConfig(num_stages=n % 3 + 1, block_m=64), "spilled", f"n{n}") for n in range(7)]
        failures.append(Failure(SPEC, FwdConfig(), "timeout", "no answer"))
        return TuneReport(
            gpu=gpu,
            measured=self.measured,
            entries=tuple(rows),
            failures=tuple(failures),
            paths=(Path("/tables/fwd.json"),),
            compiled=4,
            cached=5,
            seconds=6.0,
            stage_seconds={},
            interrupted=False,
            default_ms={rows[0].key: 0.75},
            devices=(0, 1) if self.measured else (),
        )


@pytest.fixture(params=[True, False], ids=["measured", "predicted"])
def tuner(request, monkeypatch):
    made = Tuner(request.param)
    monkeypatch.setattr("fa2gen.tuning.session.tune", made)
    return made


def test_options_reach_the_session(tuner):
    run(*ONE, "a100", "--seed", "0", "--device", "1", "--device", "0", "--storage", "sqlite:///x.db", "--trials", "0")
    assert {name: tuner.options[name] for name in ("seed", "devices", "storage", "trials")} == {
        "seed": 0, "devices": (1, 0), "storage": "sqlite:///x.db", "trials": 0,
    }  # fmt: skip
    run(*ONE, "a100")
    assert (tuner.options["devices"], tuner.options["storage"], tuner.options["seed"]) == (None, None, 0)


def test_the_report_compares_and_counts(tuner):
    text = run(*ONE, "a100", "--buckets", "512,2048").stdout
    assert "1.50x" in text
    assert "failed: 7 spilled, 1 timeout; --json lists them all" in text
    assert text.count("spilled: fwd_d64") == 3
    assert text.count("timeout: fwd_d64") == 1
    last = text.splitlines()[-1]
    if tuner.measured:
        assert "1.10x" in text
        assert "│   1755 │" in text
        assert re.search(
            r"doubtful although timed twice: fwd_d64_bf16_causal_gqa1 \S+: throttled: hw_thermal_slow", text
        )
        assert "measured on 2 of this machine's GPUs" in last
        assert "unvalidated" not in text
    else:
        assert "the model is calibrated on an H200 SXM 141GB; its transfer to the A100 SXM4 80GB is unvalidated" in last


def test_the_report_as_json(tuner):
    form = json.loads(run(*ONE, "a100", "--buckets", "512,2048", "--json").stdout)
    first, second = form["entries"]
    assert first["times_faster_than_default"] == 1.5
    assert second["times_faster_than_default"] is None
    assert form["failures_by_outcome"] == {"spilled": 7, "timeout": 1}
    assert len(form["failures"]) == 8
    if tuner.measured:
        assert first["incumbent"] == {"config": FwdConfig(num_stages=3).canonical(), "ms": 0.55}
        assert first["times_faster_than_incumbent"] == pytest.approx(1.1)
        assert first["clocks"]["throttle"] == ["hw_thermal_slowdown", "sw_power_cap"]
        assert (second["clocks"], second["spread"], form["devices"]) == (None, 0.0, [0, 1])
    else:
        assert "unvalidated" in form["model"]
        assert (first["incumbent"], first["method"]) == (None, "test")


def test_predicted_entries_say_how_far_the_model_is_known(tmp_path):
    from fa2gen.tuning.session import tune

    rooms = FakeRooms()
    requests = [TuneRequest(SPEC, usual_problem(SPEC, 512, 512))]
    for name, words in (("a100", "its transfer to the A100 SXM4 80GB is unvalidated"), ("h200", "on this chip")):
        report = tune(requests, get_gpu(name), out=tmp_path / "out", tools=rooms.tools(), measured=False, trials=2)
        assert {row.config.family for row in report.entries} == ({"sm80", "sm90"} if name == "h200" else {"sm80"})
        for row in report.entries:
            assert words in row.measurement.method
            assert report.default_ms[row.key] >= row.measurement.ms
