"""``tune``: from requests to saved table entries, measured where the GPU is at hand and predicted elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa2gen.errors import ArgumentError, LaunchError, UnsupportedError
from fa2gen.hardware import Gpu, match_device
from fa2gen.spec import FAMILIES
from fa2gen.tables import require_writable

from .report import Failure, Ledger, TuneEvent, TuneJob, TuneReport, TuneRequest, default_requests

if TYPE_CHECKING:
    from fa2gen.driver import DeviceInfo

    from .tools import Tools

__all__ = ["Failure", "TuneEvent", "TuneReport", "TuneRequest", "default_requests", "tune"]


def tune(
    requests: Sequence[TuneRequest],
    gpu: Gpu,
    *,
    out: Path | None = None,
    trials: int | None = None,
    timeout: float | None = None,
    resume: bool = True,
    progress: Callable[[TuneEvent], None] | None = None,
    measured: bool | None = None,
    devices: Sequence[int] | None = None,
    seed: int = 0,
    storage: str | None = None,
    families: Collection[str] | None = None,
    tools: Tools | None = None,
) -> TuneReport:
    """Finds the fastest right config of each family for each request and saves them.

    Ctrl-C ends the session in order: what was proved by then is saved, and the report says interrupted.

    Args:
        requests: Kernels and the sizes to tune them for.
        gpu: The GPU to tune for.
        out: Folder of tables to write to; default the user's.
        trials: Measured: configs to time for each request and family (default ``MEASURED_TRIALS``), besides the default
            config and the one that the tables hold, which are timed in any case. Predicted: configs to compile for each
            spec and family (default ``PREDICTED_TRIALS``). 0: none besides those.
        timeout: Seconds for the whole session.
        resume: Go on with the studies of an earlier session; False puts them aside.
        progress: Called after every step, by one thread at a time.
        measured: None: measure if the GPU is in this machine. True: insist on it. False: predict in any case.
        devices: Indices of the devices to measure on, as torch counts them; default all that are this GPU.
        seed: Of the samplers.
        storage: Optuna storage URL for the studies, for several hosts; default a journal file each.
        families: Only kernels of these families; None: all that serve a request on the GPU.
        tools: Replaces compiling, proving and measuring, for tests.

    Raises:
        ArgumentError: A bad argument, or ``measured`` is True or ``devices`` are given and the GPU is not there.
        ToolchainError: No nvcc or, for predictions, no C++ compiler.
        TableError: The table cannot be written. StudyError: The studies cannot.
        LaunchError: The GPU was lost, or has too little memory; what was proved before is saved.
    """
    _require_count("trials", trials, optional=True)
    _require_count("seed", seed)
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"timeout must be above 0 seconds, got {timeout!r}")
    if out is not None and Path(out).is_file():
        raise ArgumentError(f"out must be a folder of tables, {out} is a file")
    if measured is False and devices is not None:
        raise ArgumentError("devices are for measuring, got measured=False")
    from .tools import Tools

    tools = tools or Tools()
    found = [] if measured is False else find_devices(gpu, tools, devices)
    if measured and not found:
        raise ArgumentError(f"gpu {gpu.name} cannot be measured: this machine's GPUs are: {_names(tools)}")
    jobs = make_jobs(requests, gpu, families)
    # No more than there is work for.
    found = found[: len(jobs)]
    ledger = Ledger(
        gpu=gpu,
        measured=bool(found),
        out=None if out is None else Path(out),
        progress=progress,
        deadline=time.monotonic() + (timeout if timeout is not None else float("inf")),
        template_hash=tools.template_hash,
        devices=tuple(info.index for info in found),
    )
    # Everything that would stop the session at its end stops it here.
    if storage is not None:
        from .storage import require_storage

        require_storage(storage)
    tools.nvcc_version()
    require_writable(gpu, {job.request.spec.kind for job in jobs}, root=ledger.out)
    try:
        if not found:
            from .predicted import tune_predicted

            tune_predicted(jobs, ledger, tools, trials, resume=resume, seed=seed, storage=storage)
        else:
            _tune_measured(jobs, ledger, tools, found, trials, resume=resume, seed=seed, storage=storage)
    except KeyboardInterrupt:
        ledger.interrupted = True
    except LaunchError as error:
        raise type(error)(f"{error}; {len(ledger.entries)} entries had been saved before") from None
    return ledger.report()


def make_jobs(requests: Sequence[TuneRequest], gpu: Gpu, wanted: Collection[str] | None = None) -> list[TuneJob]:
    """The jobs of a session: each request once, for every family that competes for it, the families side by side.

    Args:
        requests, gpu: What is tuned for what.
        wanted: Only these families.

    Raises:
        ArgumentError: No requests, or a family that does not exist.
        UnsupportedError: None of the families wanted serves a request on the GPU.
    """
    from .space import families

    if not requests:
        raise ArgumentError("requests must hold at least one request")
    known = dict.fromkeys(family for each in FAMILIES.values() for family in each)
    if unknown := [family for family in wanted or () if family not in known]:
        raise ArgumentError(f"family must be one of {', '.join(known)}, got {', '.join(unknown)}")
    jobs = []
    for request in dict.fromkeys(requests):
        serving = families(request.spec, gpu, wanted)
        if not serving:
            raise UnsupportedError(
                f"family {' or '.join(wanted or ())} does not serve {request.spec.slug()} on {gpu.name}: "
                f"{', '.join(families(request.spec, gpu))} does"
            )
        jobs += [TuneJob(request, family) for family in serving]
    return jobs


def _tune_measured(
    jobs: Sequence[TuneJob],
    ledger: Ledger,
    tools: Tools,
    found: Sequence[DeviceInfo],
    trials: int | None,
    **study: Any,
) -> None:
    from .device import MeasuringDevice

    devices = [MeasuringDevice(info.index, info.driver_version, tools.worker(info.index)) for info in found]
    try:
        for device in devices:
            # Its start takes seconds (torch, a CUDA context), this process's imports of Optuna included.
            device.start()
        from .devices import tune_measured
        from .measured import Options

        tune_measured(jobs, ledger, tools, devices, Options(trials=trials, **study))
    finally:
        for device in devices:
            device.stop()


def _require_count(name: str, value: object, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(f"{name} must be an integer of at least 0, got {value!r}")


def _names(tools: Tools) -> str:
    return ", ".join(f"{info.index} {info.name}" for info in tools.devices()) or "none"


def _is_product(info: DeviceInfo, gpu: Gpu) -> bool:
    return match_device(info.name, info.compute_capability, info.num_sms, info.l2_bytes).name == gpu.name


def find_devices(gpu: Gpu, tools: Tools, wanted: Sequence[int] | None) -> list[DeviceInfo]:
    """The devices of this machine that are this GPU, or those of them that are wanted.

    Raises:
        ArgumentError: A wanted one does not exist or is another product.
    """
    if wanted is None:
        return [info for info in tools.devices() if _is_product(info, gpu)]
    known = {info.index: info for info in tools.devices()}
    for index in wanted:
        if index not in known:
            raise ArgumentError(f"device {index!r} does not exist: this machine's GPUs are: {_names(tools)}")
        if not _is_product(known[index], gpu):
            raise ArgumentError(f"device {index} is the {known[index].name}, not the {gpu.title} ({gpu.name})")
    if not wanted:
        raise ArgumentError("devices must name at least one device")
    return [known[index] for index in dict.fromkeys(wanted)]
