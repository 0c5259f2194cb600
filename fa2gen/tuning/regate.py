"""Which tuned entries still hold, and the gate again for those whose templates have changed since they were made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa2gen.codegen import template_hash as todays_hash
from fa2gen.compile import usable_cores
from fa2gen.constraints import infeasible_reason
from fa2gen.errors import CompileError, GateError, UnsupportedError
from fa2gen.hardware import Gpu, arch_limits, match_device, supported_compute_capabilities
from fa2gen.spec import Config, KernelSpec
from fa2gen.tables import EntryKey, Regate, Table, TableFile, TunedEntry, save_table, scan_tables, utc_now
from fa2gen.tables.merge import TemplateHash, is_current, is_gated, is_measured

from .builds import Build, compile_configs
from .device import MeasuringDevice
from .report import TuneEvent
from .tools import Tools

STATES = ("current", "stale", "gated", "replaced", "illegal")
"""``current``: made with today's templates. ``stale``: made with others, and passed over. ``gated``: stale, but passed
the gate again, and used. ``replaced``: stale, and a usable entry of an earlier folder, of the same family, serves in
its place. ``illegal``: no GPU of its target can run it."""


@dataclass(frozen=True)
class EntryStatus:
    """A tuned entry, where it lies, and whether it holds: ``state`` is one of ``STATES``, ``reason`` says why."""

    entry: TunedEntry
    file: TableFile
    state: str
    reason: str

    @property
    def fails(self) -> bool:
        """Whether something is to be done about it."""
        return self.state in ("stale", "illegal")


@dataclass(frozen=True)
class RegateResult:
    """What the gate said of a stale entry's config with today's templates."""

    status: EntryStatus
    passed: bool
    text: str


def check(
    gpu: Gpu | str | None = None,
    *,
    roots: Sequence[Path] | None = None,
    template_hash: TemplateHash = todays_hash,
    files: Iterable[TableFile] | None = None,
) -> list[EntryStatus]:
    """The state of every tuned entry.

    Args:
        gpu: Only this GPU's entries.
        roots: Folders of tables, the first one's entries before the others'; default the user's and the package's.
        template_hash: Tells today's templates.
        files: The tables, if they have been read already.
    """
    if files is None:
        files = scan_tables(gpu.name if isinstance(gpu, Gpu) else gpu, roots)
    statuses = []
    serving: dict[tuple[str, EntryKey], EntryStatus] = {}
    for file in files:
        for entry in () if file.table is None else file.table.entries:
            status = _status(entry, file, template_hash)
            before = serving.get((file.gpu, entry.key))
            if status.state == "stale" and before is not None and is_measured(before.entry) >= is_measured(entry):
                reason = f"{status.reason}; {before.file.path} holds one that is used in its place"
                status = dataclasses.replace(status, state="replaced", reason=reason)
            elif status.state in ("current", "gated"):
                serving.setdefault((file.gpu, entry.key), status)
            statuses.append(status)
    return statuses


def _status(entry: TunedEntry, file: TableFile, template_hash: TemplateHash) -> EntryStatus:
    assert file.table is not None
    reason = _illegal_reason(entry, file.table.target)
    if reason is not None:
        return EntryStatus(entry, file, "illegal", reason)
    try:
        today = template_hash(entry.spec.kind, entry.config.family)
    except UnsupportedError as error:
        return EntryStatus(entry, file, "illegal", str(error))
    if is_current(entry, template_hash):
        return EntryStatus(entry, file, "current", "made with today's templates")
    changed = f"made with templates {entry.provenance.template_hash}, today's are {today}"
    regate = entry.provenance.regate
    if regate is not None and is_gated(entry, template_hash):
        return EntryStatus(entry, file, "gated", f"{changed}; passed the gate again {regate.utc}: {regate.numerics}")
    return EntryStatus(entry, file, "stale", changed)


def _illegal_reason(entry: TunedEntry, target: str) -> str | None:
    for capability in supported_compute_capabilities():
        if arch_limits(capability).target == target:
            return infeasible_reason(entry.spec, entry.config, arch_limits(capability))
    return f"target {target} is unknown"


def regate(
    statuses: Iterable[EntryStatus],
    tools: Tools | None = None,
    *,
    out: Path | None = None,
    progress: Callable[[TuneEvent], None] | None = None,
) -> list[RegateResult]:
    """Proves the configs of the stale entries with today's templates; those that pass are usable again.

    Each entry that passes is saved at once to the user's table, marked with what the gate said; package tables stay as
    they are. On a GPU that is in this machine the gate runs there; for others the kernels are compiled for their target
    and proved in the emulator.

    Args:
        statuses: As :func:`check` gives them; only stale ones count.
        tools: Replaces compiling, proving and measuring, for tests.
        out: Folder of tables to write to; default the user's.
        progress: Called after every step.

    Raises:
        ToolchainError: There is no nvcc or, without the GPU, no C++ compiler.
        TableError: The table cannot be written.
        DeviceLost: The GPU fails.
    """
    tools = tools or Tools()
    stale = [status for status in statuses if status.state == "stale"]
    if not stale:
        return []
    tools.nvcc_version()
    results = []
    for gpu in dict.fromkeys(status.file.gpu for status in stale):
        mine = [status for status in stale if status.file.gpu == gpu]
        for status, passed, text in _Proofs(gpu, mine, tools, progress).run():
            if passed:
                _save(status, text, tools, out)
            results.append(RegateResult(status, passed, text))
    return results


def _save(status: EntryStatus, text: str, tools: Tools, out: Path | None) -> None:
    entry, table = status.entry, status.file.table
    assert table is not None
    mark = Regate(tools.template_hash(entry.spec.kind, entry.config.family), text, utc_now())
    marked = dataclasses.replace(entry, provenance=dataclasses.replace(entry.provenance, regate=mark))
    save_table(Table(table.gpu, table.target, table.kind, (marked,)), root=out, template_hash=tools.template_hash)


_Kernel = tuple[KernelSpec, Config]


class _Proofs:
    """Proofs of one GPU's stale entries: a kernel is compiled and proved once, for all the sizes that it serves."""

    def __init__(
        self, gpu: str, statuses: Sequence[EntryStatus], tools: Tools, progress: Callable[[TuneEvent], None] | None
    ) -> None:
        self._gpu, self._tools, self._progress = gpu, tools, progress
        self._statuses = statuses
        self._kernels = list(dict.fromkeys((status.entry.spec, status.entry.config) for status in statuses))

    def run(self) -> Iterator[tuple[EntryStatus, bool, str]]:
        """Statuses with the gate's verdict, each kernel's as soon as it is there."""
        device = self._device()
        if device is None:
            self._tools.require_emulator()
        else:
            device.start()
        try:
            compiled = dict(zip(self._kernels, self._compile(), strict=True))
            verdicts = self._on_device(device, compiled) if device is not None else self._in_emulator(compiled)
            for done, (kernel, passed, text) in enumerate(verdicts, 1):
                self._tell("prove", done, f"{kernel[0].slug()} {kernel[1].slug()}")
                for status in self._statuses:
                    if (status.entry.spec, status.entry.config) == kernel:
                        yield status, passed, text
        finally:
            if device is not None:
                device.stop()

    def _device(self) -> MeasuringDevice | None:
        for info in self._tools.devices():
            try:
                found = match_device(info.name, info.compute_capability, info.num_sms, info.l2_bytes)
            except UnsupportedError:
                continue
            if found.name == self._gpu:
                return MeasuringDevice(info.index, info.driver_version, self._tools.worker(info.index))
        return None

    def _compile(self) -> list[Build | CompileError]:
        table = self._statuses[0].file.table
        assert table is not None
        done = 0

        def on_done(index: int, result: Any) -> None:
            nonlocal done
            done += 1
            spec, config = self._kernels[index]
            self._tell("compile", done, f"{spec.slug()} {config.slug()}")

        return compile_configs(self._tools, self._kernels, table.target, on_done)

    def _on_device(
        self, device: MeasuringDevice, compiled: dict[_Kernel, Build | CompileError]
    ) -> Iterator[tuple[_Kernel, bool, str]]:
        from .measure import GateRequest

        for kernel, result in compiled.items():
            if isinstance(result, CompileError):
                yield kernel, False, str(result)
            else:
                verdict = device.gate(GateRequest(result, *kernel))
                yield kernel, verdict.outcome is None, verdict.text

    def _in_emulator(self, compiled: dict[_Kernel, Build | CompileError]) -> Iterator[tuple[_Kernel, bool, str]]:
        pool = ThreadPoolExecutor(max(1, usable_cores()), thread_name_prefix="fa2gen-gate")
        try:
            running = {}
            for kernel, result in compiled.items():
                if isinstance(result, CompileError):
                    yield kernel, False, str(result)
                else:
                    running[pool.submit(self._tools.prove, *kernel)] = kernel
            for future in as_completed(running):
                try:
                    yield running[future], True, future.result()
                except (GateError, CompileError) as error:
                    yield running[future], False, str(error)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _tell(self, stage: str, done: int, text: str) -> None:
        if self._progress is not None:
            self._progress(TuneEvent(stage, done, len(self._kernels), text))
