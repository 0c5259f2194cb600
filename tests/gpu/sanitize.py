"""compute-sanitizer's memcheck, racecheck and synccheck over a covering set of kernels.

    python tests/gpu/sanitize.py [memcheck] [racecheck] [synccheck]

Exit status 0: every tool ran and found nothing. 1: a tool found something, or a kernel's result was wrong under it.
2: a tool is missing or refuses to run on this machine.

This process compiles, makes the inputs and compares the results by the gate's rule. A second one, which the tools
watch, only launches: it imports no torch, so that no other kernel is instrumented, and every tensor is an allocation of
its own, of just its size, so that memcheck knows where each one ends.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa2gen.compile import CompiledKernel
from fa2gen.spec import FwdConfig, KernelSpec

TOOLS = {
    # What PyCUDA asks the driver in vain is no finding; the launching process checks what its own calls return.
    "memcheck": ["--report-api-errors", "no"],
    # mbarriers of a block, of which a ring of three stages has six.
    "racecheck": ["--num-cuda-barriers", "16"],
    "synccheck": ["--num-cuda-barriers", "4096"],
}
TIMEOUT = 180.0
FOUND = 99  # exit status by which a tool says that it found something
# Before this release racecheck reports races that mbarriers rule out (its release notes: "Fixed multiple
# false-positives in racecheck involving mbarrier usage"), so that of kernels with a ring nothing can be concluded.
MBARRIERS_SINCE = (2025, 4)
MBARRIER_NOTE = (
    "excluded: hazards in kernels with mbarriers (_ring), of which racecheck before 2025.4 reports false ones (its "
    "release notes); they are printed above, and the emulator's tests check these kernels' waits and arrivals"
)


@dataclass(frozen=True)
class Case:
    """A kernel and its inputs: data and amount of a ``GateCase``, and whether the kernel must repair a step of it."""

    spec: KernelSpec
    config: FwdConfig
    inputs: tuple[tuple[str, float], ...]
    repaired: tuple[bool, ...]


def _case(slug: str, *, repaired: str = "", **spec: Any) -> Case:
    """Normal data, and data on which the guarded softmax must be ``repaired``."""
    inputs = [("normal", 1.0), *([(repaired, 200.0)] if repaired else [])]
    return Case(KernelSpec(**spec), FwdConfig.from_slug(slug), tuple(inputs), (False, True)[: len(inputs)])


CASES = (
    _case("sm80_128x64s64_w4_st3_qr_guarded_mb1_pb", head_dim=64, causal=True, repaired="spike_first"),
    _case("sm80_128x64s64_w4_st2_qs_guarded_mb1_ring", head_dim=128, repaired="both"),
    _case("sm80_128x64s64_w4_st2_qs_guarded_mb1_pb_ring", head_dim=128, causal=True, repaired="spike_first"),
    _case("sm80_256x64s64_w8_st3_qs_guarded_mb1_pb_ring", head_dim=128, repaired="spike_first"),
    _case("sm80_128x64s64_w8_st2_qs_guarded_mb1_ring_wn2", head_dim=256, causal=True, repaired="both"),
    _case("sm80_64x64s64_w4_st2_qs_guarded_mb1_pb_wn2", head_dim=128, causal=True, repaired="spike_first"),
    _case("sm80_64x64s64_w4_st2_qs_guarded_mb1_pack", head_dim=96, causal=True, gqa_ratio=3, repaired="both"),
    _case("sm80_64x64s64_w2_st2_qr_guarded_mb2", head_dim=64, causal=True, alignment=2),
    _case("sm80_64x64s64_w4_st2_qs_guarded_mb1_ring", head_dim=40, dtype="fp16", alignment=2),
    _case("sm80_64x64s64_w2_st1_qs_guarded_mb2", head_dim=128, dtype="fp16", causal=True, repaired="both"),
    _case("sm80_64x64s32_w4_st2_qs_online_mb1", head_dim=200, gqa_ratio=7),
)


@dataclass
class Job:
    """One launch, without anything that only torch can read.

    Attributes:
        kernel: Compiled.
        grid, num_threads, params: The launch; the pointers at the head of ``params`` are null.
        inputs: Bytes of q, k and v from the first element of each to the last, and where in its allocation it begins.
        outputs: Bytes of the output and the LSE.
        results: What came back: output, LSE, repaired steps.
    """

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    num_threads: int
    params: bytes
    inputs: list[tuple[bytes, int]]
    outputs: tuple[int, int]
    results: tuple[bytes, bytes, int] | None = field(default=None)


# ---- The watched process


def launch_all(jobs: Sequence[Job]) -> None:
    """Run every job on device 0 and keep what it wrote; outputs hold NaN (all bits set) before."""
    from fa2gen import driver

    driver.ensure_context(0)
    cuda = _Memory()
    for job in jobs:
        kernel = driver.load(job.kernel, 0)
        tensors = [cuda.upload(b"\xff" * start + data) + start for data, start in job.inputs]
        out, lse = (cuda.upload(b"\xff" * size) for size in job.outputs)
        repairs = cuda.upload(bytes(4))
        pointers = struct.pack("<6Q", *tensors, out, lse, repairs)
        kernel.launch(job.grid, (job.num_threads, 1, 1), pointers + job.params[len(pointers) :], 0)
        cuda.synchronize()
        (count,) = struct.unpack("<I", cuda.download(repairs, 4))
        job.results = (cuda.download(out, job.outputs[0]), cuda.download(lse, job.outputs[1]), count)
        cuda.free_all()
        kernel.unload()


class _Memory:
    """Device memory through libcuda, an allocation for each array."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        address, size = ctypes.c_uint64, ctypes.c_size_t
        self._allocate, self._free = library.cuMemAlloc_v2, library.cuMemFree_v2
        self._to_device, self._to_host = library.cuMemcpyHtoD_v2, library.cuMemcpyDtoH_v2
        self._synchronize = library.cuCtxSynchronize
        self._allocate.argtypes = (ctypes.POINTER(address), size)
        self._free.argtypes = (address,)
        self._to_device.argtypes = (address, ctypes.c_char_p, size)
        self._to_host.argtypes = (ctypes.c_char_p, address, size)
        self._allocated: list[int] = []

    def upload(self, data: bytes) -> int:
        pointer = ctypes.c_uint64()
        self._check(self._allocate(ctypes.byref(pointer), len(data)), "allocate")
        self._allocated.append(pointer.value)
        self._check(self._to_device(pointer.value, data, len(data)), "copy to the device")
        return pointer.value

    def download(self, pointer: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self._check(self._to_host(data, pointer, size), "copy from the device")
        return data.raw

    def synchronize(self) -> None:
        self._check(self._synchronize(), "wait for the kernel")

    def free_all(self) -> None:
        while self._allocated:
            self._check(self._free(self._allocated.pop()), "free")

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"cannot {what}: CUDA error {status}")


# ---- The process that judges


@dataclass(frozen=True)
class Prepared:
    """A job with what its results are compared with."""

    case: Case
    label: str
    repaired: bool
    job: Job
    tensors: tuple[Any, Any, Any]
    softmax_scale: float


def prepare(gpu: Any) -> list[Prepared]:
    """Inputs and compiled kernels of all cases that are legal on a GPU; names the others."""
    from fa2gen.codegen import render_kernel
    from fa2gen.compile import compile_many
    from fa2gen.constraints import infeasible_reason
    from fa2gen.errors import CompileError

    legal = []
    for case in CASES:
        reason = infeasible_reason(case.spec, case.config, gpu.arch)
        if reason is None:
            legal.append(case)
        else:
            print(f"not run here: {case.spec.slug()} {case.config.slug()}: {reason}")
    compiled = compile_many([(render_kernel(case.spec, case.config), gpu.target) for case in legal])
    prepared = []
    for case, kernel in zip(legal, compiled, strict=True):
        if isinstance(kernel, CompileError):
            raise kernel
        prepared += [_prepared(case, i, kernel, gpu.l2_bytes) for i in range(len(case.inputs))]
    return prepared


def _prepared(case: Case, number: int, kernel: CompiledKernel, l2_bytes: int) -> Prepared:
    from fa2gen.gate import GateCase, make_inputs
    from fa2gen.launch import fwd_plan
    from fa2gen.problem import Problem
    from fa2gen.runtime.copies import used_strides

    spec, config, (data, amount) = case.spec, case.config, case.inputs[number]
    # A ragged tile at both ends; enough key tiles for every stage to be filled twice.
    problem = Problem(1, config.block_m + 17, 2 * config.num_stages * config.block_n + 5, spec.gqa_ratio, 1)
    scale = 1.0 / math.sqrt(spec.head_dim)
    period = config.step_n if data == "both" else 1
    gate_case = GateCase(problem, data, scale, amount, period, layout=("padded", "heads_first")[number % 2])
    tensors = make_inputs(spec, gate_case, "cpu")
    rows, heads = problem.seqlen_q, problem.num_heads_q
    strides = {name: used_strides(x) for name, x in zip("qkv", tensors, strict=True)}
    strides["o"] = (rows * heads * spec.head_dim, heads * spec.head_dim, spec.head_dim)
    (launch,) = fwd_plan(spec, config, problem, strides=strides, softmax_scale=scale, l2_bytes=l2_bytes).launches
    start = 0 if spec.alignment == 16 else 2
    inputs = [(_span(x), start) for x in tensors]
    outputs = (2 * rows * heads * spec.head_dim, 4 * rows * heads)
    job = Job(kernel, launch.grid, launch.num_threads, launch.params, inputs, outputs)
    label = f"{spec.slug()} {config.slug()} {gate_case.label()}"
    return Prepared(case, label, case.repaired[number], job, tensors, scale)


def _span(x: Any) -> bytes:
    """A view's memory from its first element to its last."""
    import torch

    length = 1 + sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    data: bytes = x.as_strided((length,), (1,)).view(torch.int16).numpy().tobytes()
    return data


def wrong_results(prepared: Sequence[Prepared], jobs: Sequence[Job]) -> list[str]:
    """What is wrong with the results that a watched process brought back."""
    import torch

    from fa2gen.gate import check_forward

    wrong = []
    for item, job in zip(prepared, jobs, strict=True):
        if job.results is None:
            wrong.append(f"{item.label}: no result")
            continue
        q, k, v = item.tensors
        out = torch.frombuffer(bytearray(job.results[0]), dtype=q.dtype).view(q.shape)
        lse = torch.frombuffer(bytearray(job.results[1]), dtype=torch.float32).view(1, q.shape[2], q.shape[1])
        report = check_forward(out, lse, q, k, v, causal=item.case.spec.causal, softmax_scale=item.softmax_scale)
        if not report.passed:
            wrong.append(f"{item.label}: {report.text}")
        if item.repaired and not job.results[2]:
            wrong.append(f"{item.label}: nothing was repaired, so the repair was not watched")
    return wrong


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
    kernels = [set(re.findall(r"fa2gen_fwd_\w+", report.split("RACECHECK SUMMARY")[0])) for report in reports]
    excluded = sum(bool(names) and all("_ring" in name for name in names) for names in kernels)
    # Reports that were not printed, or do not read as expected, are not excluded.
    return Verdict(max(0, total - excluded), min(excluded, total), None)


def find_sanitizer() -> Path | None:
    from fa2gen.compile.nvcc import find_nvcc
    from fa2gen.errors import ToolchainError

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
        watched = [sys.executable, __file__, "--launch", str(path), str(results)]
        command = [str(sanitizer), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "50", *TOOLS[tool]]
        try:
            done = subprocess.run(
                [*command, *watched], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            print(f"{tool}: FAILED: it had not ended after {TIMEOUT:.0f} s")
            return 1
        jobs = pickle.loads(results.read_bytes()) if results.exists() else None
    verdict = read_report(tool, version, done.stdout)
    wrong = wrong_results(prepared, jobs) if jobs is not None else []
    # A tool that says it found something has found something, whatever could be read of its output.
    found = verdict.found or int(done.returncode == FOUND and not verdict.excluded)
    if found or verdict.excluded or verdict.refused or jobs is None:
        print(done.stdout)
    for text in wrong:
        print(f"{tool}: wrong result: {text}")
    if verdict.excluded:
        print(f"{tool}: {MBARRIER_NOTE}")
    name = f"{tool} {'.'.join(map(str, version))}"
    seconds = time.monotonic() - start
    if verdict.refused:
        print(f"{name}: REFUSED to run on this machine: {verdict.refused} (exit status {done.returncode})")
        return 2
    if found or wrong or jobs is None or done.returncode not in (0, FOUND):
        died = "" if done.returncode in (0, FOUND) else f", the launching process ended with {done.returncode}"
        print(f"{name}: FAILED: {found} findings, {len(wrong)} wrong results{died}, {seconds:.1f} s")
        return 1
    excluded = f", {verdict.excluded} excluded" if verdict.excluded else ""
    kernels = len({item.job.kernel.key for item in prepared})
    print(f"{name}: clean{excluded}: {len(prepared)} launches of {kernels} kernels, {seconds:.1f} s", flush=True)
    return 0


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--launch"]:
        jobs = pickle.loads(Path(arguments[1]).read_bytes())
        launch_all(jobs)
        Path(arguments[2]).write_bytes(pickle.dumps(jobs))
        return 0
    unknown = [name for name in arguments if name not in TOOLS]
    if unknown:
        print(f"error: unknown tool {', '.join(unknown)}; tools are {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    from fa2gen import driver
    from fa2gen.runtime.plan import device_gpu

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
