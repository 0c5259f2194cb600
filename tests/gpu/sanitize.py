"""compute-sanitizer's memcheck, racecheck and synccheck over a covering set of forward and backward kernels.

    python tests/gpu/sanitize.py [memcheck] [racecheck] [synccheck]

Exit status 0: every tool ran and found nothing. 1: a tool found something, or a kernel's result was wrong under it.
2: a tool is missing or refuses to run on this machine.

This process compiles, makes the inputs and compares the results by the gate's rule (``sanitize_jobs.py``). A second
one, which the tools watch, only launches (``sanitize_launch.py``).
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from fa2gen import driver  # noqa: E402
from fa2gen.compile.nvcc import find_nvcc  # noqa: E402
from fa2gen.errors import ToolchainError  # noqa: E402
from fa2gen.runtime.plan import device_gpu  # noqa: E402
from tests.gpu.sanitize_jobs import Prepared, prepare, wrong_results  # noqa: E402

TOOLS = {
    # What PyCUDA asks the driver in vain is no finding; the launching process checks what its own calls return.
    # Allocations follow each other without a gap; with padding what runs over the end of one does not end up in the
    # next: 1 MiB is more than the memory of any array here.
    "memcheck": ["--report-api-errors", "no", "--padding", str(1 << 20)],
    # mbarriers of a block, of which a ring of three stages has six.
    "racecheck": ["--num-cuda-barriers", "16"],
    "synccheck": ["--num-cuda-barriers", "4096"],
}
TIMEOUT = 300.0
FOUND = 99  # exit status by which a tool says that it found something
# Before this release racecheck reports races that mbarriers rule out (its release notes: "Fixed multiple
# false-positives in racecheck involving mbarrier usage"), so that of kernels with a ring nothing can be concluded.
MBARRIERS_SINCE = (2025, 4)
MBARRIER_NOTE = (
    "excluded: hazards in kernels with mbarriers (_ring), of which racecheck before 2025.4 reports false ones (its "
    "release notes); they are printed above, and the emulator's tests check these kernels' waits and arrivals"
)


@dataclass(frozen=True)
class Verdict:
    """What a tool's output says: ``found`` counts, ``excluded`` does not; ``refused`` is why it says nothing at all."""

    found: int
    excluded: int
    refused: str | None


def read_report(tool: str, version: tuple[int, ...], output: str) -> Verdict:
    """Findings of a tool's output, which must hold its summary line."""
    if "Device not supported" in output:
        return Verdict(0, 0, "Device not supported")
    pattern = r"RACECHECK SUMMARY: (\d+) hazard" if tool == "racecheck" else r"ERROR SUMMARY: (\d+) error"
    summary = re.search(pattern, output)
    if summary is None:
        return Verdict(0, 0, "it printed no summary")
    total = int(summary[1])
    if tool != "racecheck" or version >= MBARRIERS_SINCE:
        return Verdict(total, 0, None)
    reports = re.split(r"^========= (?=Error: |Warning: |Info: )", output, flags=re.MULTILINE)[1:]
    kernels = [set(re.findall(r"fa2gen_(?:fwd|bwd)_\w+", report.split("RACECHECK SUMMARY")[0])) for report in reports]
    excluded = sum(bool(names) and all("_ring" in name for name in names) for names in kernels)
    # Reports that were not printed, or do not read as expected, are not excluded.
    return Verdict(max(0, total - excluded), min(excluded, total), None)


def find_sanitizer() -> Path | None:
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return Path(found)
    try:
        root = find_nvcc().root
    except ToolchainError:
        return None
    places = (root / "bin", root / "compute-sanitizer", Path("/usr/local/cuda/bin"))
    return next((place / "compute-sanitizer" for place in places if (place / "compute-sanitizer").is_file()), None)


def run_tool(tool: str, sanitizer: Path, version: tuple[int, ...], prepared: Sequence[Prepared]) -> int:
    """Run one tool over all jobs, print its report and a summary line; returns the exit status."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fa2gen-sanitize-") as folder:
        path, results = Path(folder, "jobs"), Path(folder, "results")
        path.write_bytes(pickle.dumps([item.job for item in prepared]))
        watched = [sys.executable, "-m", "tests.gpu.sanitize_launch", str(path), str(results)]
        command = [str(sanitizer), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "50", *TOOLS[tool]]
        output, status = _run_in_time([*command, *watched])
        if status is None:
            print(f"{output}\n{tool}: FAILED: it had not ended after {TIMEOUT:.0f} s")
            return 1
        written = pickle.loads(results.read_bytes()) if results.exists() else None
    verdict = read_report(tool, version, output)
    wrong = [] if written is None else wrong_results(prepared, written)
    # A tool that says it found something has found something, whatever could be read of its output.
    found = verdict.found or int(status == FOUND and not verdict.excluded)
    if found or verdict.excluded or verdict.refused or written is None:
        print(output)
    for text in wrong:
        print(f"{tool}: wrong result: {text}")
    if verdict.excluded:
        print(f"{tool}: {MBARRIER_NOTE}")
    name = f"{tool} {'.'.join(map(str, version))}"
    seconds = time.monotonic() - start
    if verdict.refused:
        print(f"{name}: REFUSED to run on this machine: {verdict.refused} (exit status {status})")
        return 2
    if found or wrong or written is None or status not in (0, FOUND):
        died = "" if status in (0, FOUND) else f", the launching process ended with {status}"
        print(f"{name}: FAILED: {found} findings, {len(wrong)} wrong results{died}, {seconds:.1f} s")
        return 1
    excluded = f", {verdict.excluded} excluded" if verdict.excluded else ""
    steps = [step for item in prepared for step in item.job.steps]
    kernels = len({step.kernel.key for step in steps})
    print(f"{name}: clean{excluded}: {len(steps)} launches of {kernels} kernels, {seconds:.1f} s", flush=True)
    return 0


def _run_in_time(command: Sequence[str]) -> tuple[str, int | None]:
    """Output and exit status; None if time was up, when the launching process, a child of the tool, is ended too."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=TIMEOUT)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], None


def main(arguments: Sequence[str]) -> int:
    unknown = [name for name in arguments if name not in TOOLS]
    if unknown:
        print(f"error: unknown tool {', '.join(unknown)}; tools are {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    reason = driver.unavailable_reason()
    sanitizer = find_sanitizer()
    if reason is not None or sanitizer is None:
        print(f"error: {reason or 'compute-sanitizer is neither on PATH nor in the CUDA toolkit'}", file=sys.stderr)
        return 2
    stated = subprocess.run([str(sanitizer), "--version"], capture_output=True, text=True, timeout=60).stdout
    match = re.search(r"[Vv]ersion:? (\d+(?:\.\d+)+)", stated)
    version = tuple(map(int, match[1].split("."))) if match else (0,)
    prepared = prepare(device_gpu(0))
    statuses = [run_tool(tool, sanitizer, version, prepared) for tool in arguments or TOOLS]
    return 1 if 1 in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
