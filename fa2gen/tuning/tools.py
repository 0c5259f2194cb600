"""What a tuning session needs from the other rooms, in one replaceable object."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fa2gen.codegen import KernelSource, render_kernel, render_kernels, template_hash
from fa2gen.compile import CompiledKernel, compile_many, find_nvcc
from fa2gen.constraints import default_config
from fa2gen.driver import DeviceInfo, device_count, device_info, unavailable_reason
from fa2gen.errors import CompileError, EmulatorError, GateError
from fa2gen.spec import BwdConfig, Config, KernelSpec
from fa2gen.tables.store import search_dirs

from .worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

    from fa2gen.gate import GateCase, GateReport

CompileMany = Callable[
    [Sequence[tuple[KernelSource, str]], Callable[[int, Any], None]], "list[CompiledKernel | CompileError]"
]


class MeasuringProcess(Protocol):
    """What ``worker.Worker`` is to a session."""

    def start(self) -> None: ...
    def call(self, operation: str, payload: Any = None, *, timeout: float) -> Any: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


def _compile_many(
    jobs: Sequence[tuple[KernelSource, str]], on_done: Callable[[int, Any], None]
) -> list[CompiledKernel | CompileError]:
    return compile_many(jobs, on_done=on_done)


def prove_in_emulator(spec: KernelSpec, config: Config) -> str:
    """Runs the gate's quick cases through the emulator, the kernels of a backward in a row; what the gate says.

    Raises:
        GateError: The kernel is wrong, or the emulator stopped it.
        ToolchainError: There is no C++ compiler.
        CompileError: It refused the kernel, which says nothing of the kernel's results.
    """
    try:
        # One thread: the session proves as many configs at a time as there are cores.
        report = emulated_gate(spec, config, gate_cases(spec, config), threads=1)
    except EmulatorError as error:
        raise GateError(f"{spec.slug()} {config.slug()}: the emulator stopped it: {error}") from None
    if not report.passed:
        raise GateError(report.text)
    return f"emulator: {report.text}"


def gate_cases(spec: KernelSpec, config: Config, budget: str = "quick") -> tuple[GateCase, ...]:
    """The gate's cases of a kernel of either kind; see ``gate.forward_cases``."""
    from fa2gen.gate import backward_cases, forward_cases

    if isinstance(config, BwdConfig):
        return backward_cases(spec, config, budget=budget)
    return forward_cases(spec, config, budget=budget)


def emulated_gate(
    spec: KernelSpec, config: Config, cases: Iterable[GateCase], *, threads: int | None = None
) -> GateReport:
    """Runs a kernel, or those of a backward in a row, over cases in the emulator.

    Args:
        spec, config: What is under test.
        cases: Of its kind.
        threads: Of the emulator; default: as many as there are cores.
    """
    from fa2gen.emulator.backward import run_backward
    from fa2gen.emulator.forward import run_forward
    from fa2gen.gate import run_backward_gate, run_gate

    if isinstance(config, BwdConfig):

        def run_gradients(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, scale: float
        ) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv, _ = run_backward(
                spec, config, q, k, v, out, lse, do, softmax_scale=scale, dlse=dlse, threads=threads
            )
            return dq, dk, dv

        return run_backward_gate(spec, config, run_gradients, cases)

    def run_output(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, _ = run_forward(spec, config, q, k, v, softmax_scale=scale, threads=threads)
        return out, lse

    return run_gate(spec, config, run_output, cases)


def _require_emulator() -> None:
    """Builds a kernel for the emulator at once: the first proof comes only after minutes of compiling.

    A compiler that is missing or broken, and a cache folder that is unsafe, full or read-only, all show here.
    """
    from fa2gen.emulator import build

    spec = KernelSpec()
    build(render_kernel(spec, default_config(spec), platform="host"))


def _nvcc_version() -> str:
    return ".".join(map(str, find_nvcc().version))


def _versions() -> dict[str, str]:
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for package in ("fa2gen", "optuna", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _devices() -> Sequence[DeviceInfo]:
    if unavailable_reason() is not None:
        return ()
    return [device_info(index) for index in range(device_count())]


def _table_roots(out: Path | None) -> Sequence[Path]:
    return tuple(dict.fromkeys([*([] if out is None else [out]), *search_dirs()]))


def _start_worker(device_index: int) -> MeasuringProcess:
    return Worker("fa2gen.tuning.measure:device_handler", {"device_index": device_index})


@dataclass(frozen=True)
class Tools:
    """Rendering, compiling, proving, measuring; tests put fakes here.

    Attributes:
        render: (spec, config) -> sources in the order in which they run: ``codegen.render_kernels``.
        compile_many: (jobs, on_done(index, result)) -> results in the jobs' order.
        prove: (spec, config) -> gate text; raises GateError.
        require_emulator: Raises ToolchainError where ``prove`` cannot work.
        template_hash: ``codegen.template_hash``.
        nvcc_version: Version text of the compiler.
        versions: Versions of the packages that take part.
        devices: The GPUs of this machine, by device index.
        worker: device index -> measuring process, not yet started.
        table_roots: Folder to save to, or None -> folders of tables that may hold an incumbent, nearest first.
    """

    render: Callable[[KernelSpec, Config], tuple[KernelSource, ...]] = render_kernels
    compile_many: CompileMany = _compile_many
    prove: Callable[[KernelSpec, Config], str] = prove_in_emulator
    require_emulator: Callable[[], None] = _require_emulator
    template_hash: Callable[[str, str], str] = template_hash
    nvcc_version: Callable[[], str] = _nvcc_version
    versions: Callable[[], dict[str, str]] = _versions
    devices: Callable[[], Sequence[DeviceInfo]] = _devices
    worker: Callable[[int], MeasuringProcess] = _start_worker
    table_roots: Callable[[Path | None], Sequence[Path]] = _table_roots
