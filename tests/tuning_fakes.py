"""Tuned entries and stand-ins for the compiler, the gate and the measuring process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fa2gen.codegen import KernelSource
from fa2gen.compile import CompiledKernel, ResourceUsage
from fa2gen.driver import DeviceInfo
from fa2gen.errors import CompileError, GateError
from fa2gen.problem import Problem
from fa2gen.spec import Config, FwdSm90Config, KernelSpec, config_class
from fa2gen.tables import Measurement, Provenance, Table, TunedEntry
from fa2gen.tuning.report import TuneRequest
from fa2gen.tuning.timing import Timing
from fa2gen.tuning.tools import Tools

PROBLEM = Problem(4, 4096, 4096, 16, 16)


def entry(
    spec=None,
    problem=PROBLEM,
    *,
    kind="predicted",
    ms=1.5,
    utc="2026-01-01T00:00:00Z",
    template="t",
    sms=108,
    **config,
):
    """An entry of an A100, or of a GPU of so many SMs; the rest is the config's."""
    spec = spec or KernelSpec()
    measured = kind == "measured"
    return TunedEntry(
        spec=spec,
        bucket=problem.bucket(sms),
        config=config_class(spec.kind, config.get("family", "sm80"))(**config),
        measurement=Measurement(kind, ms, ms, ms, 9 if measured else 0, "test", problem),
        provenance=Provenance(
            template_hash=template,
            nvcc="13.0.88",
            driver="580" if measured else "",
            trials=24,
            feasible=20,
            numerics="passed",
            utc=utc,
            model_version=None if measured else "m1",
            versions={"python": "3.11"},
        ),
    )


def table(*entries, kind="fwd"):
    return Table("a100", "sm_80", kind, entries)


def request_for(spec: KernelSpec | None = None, seqlen: int = 4096) -> TuneRequest:
    """A tuning request of 16k tokens and 16 query heads."""
    spec = spec or KernelSpec()
    return TuneRequest(spec, Problem(16384 // seqlen, seqlen, seqlen, 16, 16 // spec.gqa_ratio))


def registers_of(config: Config) -> int:
    """What ptxas reports of a good kernel; of the sm90 family the launch's share."""
    return {1: 255, 2: 168, 3: 128, 4: 96}[config.warpgroups] if isinstance(config, FwdSm90Config) else 200


class FakeWorker:
    """The measuring process's answers from two functions; counts what it was asked."""

    def __init__(self, milliseconds: Callable[[Config], float], gate: Callable[[Config], tuple[bool, str]]):
        self.milliseconds, self.gate = milliseconds, gate
        self.measured: list[Config] = []
        self.gated: list[Config] = []
        self.running = False

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def kill(self) -> None:
        self.stop()

    def call(self, operation: str, payload: Any = None, *, timeout: float) -> Any:
        if operation == "ready":
            self.running = True
            return None
        if operation == "measure":
            self.measured.append(payload.config)
            ms = self.milliseconds(payload.config)
            return Timing(ms, 0.99 * ms, 1.01 * ms, 9)
        self.gated.append(payload.config)
        return self.gate(payload.config)


@dataclass
class FakeRooms:
    """Compiler, gate and devices of a session; every function can be replaced before ``tools()``."""

    device: DeviceInfo | None = None
    milliseconds: Callable[[Config], float] = lambda config: 1.0
    wrong: Callable[[Config], bool] = lambda config: False
    resources: Callable[[Config], ResourceUsage] = lambda config: ResourceUsage(registers_of(config), 0, 0, 0, 0, 1)
    refused: Callable[[Config], bool] = lambda config: False
    refused_kernel: Callable[[KernelSource], bool] = lambda source: False
    on_compiled: Callable[[int], None] = lambda index: None
    compiled: list[tuple[KernelSpec, Config]] = field(default_factory=list)
    proved: list[tuple[KernelSpec, Config]] = field(default_factory=list)
    template: str = "t"
    count: int = 1
    workers: list[FakeWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = self.make_worker()
        if self.count > 1:
            self.workers = [self.make_worker() for _ in range(self.count)]

    def make_worker(self) -> FakeWorker:
        return FakeWorker(
            lambda config: self.milliseconds(config),
            lambda config: (not self.wrong(config), "FAILED: row 3" if self.wrong(config) else "passed 20 cases"),
        )

    def tools(self) -> Tools:
        return Tools(
            compile_many=self._compile_many,
            prove=self._prove,
            require_emulator=lambda: None,
            template_hash=lambda kind, family: self.template,
            nvcc_version=lambda: "13.0.88",
            versions=lambda: {"python": "3"},
            devices=lambda: [replace(self.device, index=index) for index in range(self.count)] if self.device else [],
            worker=lambda index: self.workers[index] if self.workers else self.worker,
            table_roots=lambda out: [] if out is None else [out],
        )

    def _compile_many(self, jobs: Any, on_done: Any) -> list[Any]:
        results: list[Any] = []
        for index, (source, target) in enumerate(jobs):
            if source.kernel == source.spec.kind:
                self.compiled.append((source.spec, source.config))
            if self.refused(source.config) or self.refused_kernel(source):
                results.append(CompileError("nvcc failed", "line 3"))
            else:
                resources, cubin = self.resources(source.config), source.config.slug().encode()
                results.append(CompiledKernel(source, target, cubin, resources, "key", False, 1.0, ""))
            on_done(index, results[-1])
            self.on_compiled(index)
        return results

    def _prove(self, spec: KernelSpec, config: Config) -> str:
        self.proved.append((spec, config))
        if self.wrong(config):
            raise GateError("row 3 is wrong")
        return "emulator: passed 20 cases"
