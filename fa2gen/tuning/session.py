"""``tune``: from requests to saved table entries, measured where the GPU is at hand and predicted elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fa2gen.errors import ArgumentError
from fa2gen.hardware import Gpu, match_device
from fa2gen.tables import require_writable

from .report import Failure, Ledger, TuneEvent, TuneReport, TuneRequest, default_requests

if TYPE_CHECKING:
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
    tools: Tools | None = None,
) -> TuneReport:
    """Finds the fastest right config for each request and saves it.

    Ctrl-C ends the session in order: what was proved by then is saved, and the report says interrupted.

    Args:
        requests: Kernels and the sizes to tune them for.
        gpu: The GPU to tune for.
        out: Folder of tables to write to; default the user's.
        trials: Measured: configs to time for each request (default 40). Predicted: configs to compile for each spec
            (default 24). 0: only the default config is proved and saved.
        timeout: Seconds for the whole session.
        resume: Go on with the studies of an earlier session; False puts them aside.
        progress: Called after every step, from one thread at a time.
        measured: None: measure if the GPU is in this machine. True: insist on it. False: predict in any case.
        tools: Replaces compiling, proving and measuring, for tests.

    Raises:
        ArgumentError: A bad argument, or ``measured`` is True and the GPU is not in this machine.
        ToolchainError: No nvcc or, for predictions, no C++ compiler.
        TableError: The table cannot be written.
    """
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 0):
        raise ArgumentError(f"trials must be an integer of at least 0, got {trials!r}")
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"timeout must be above 0 seconds, got {timeout!r}")
    if out is not None and Path(out).is_file():
        raise ArgumentError(f"out must be a folder of tables, {out} is a file")
    from .tools import Tools

    tools = tools or Tools()
    device = None if measured is False else _find_device(gpu, tools)
    if measured and device is None:
        here = ", ".join(info.name for info in tools.devices()) or "none"
        raise ArgumentError(f"gpu {gpu.name} cannot be measured: this machine's GPUs are: {here}")
    ledger = Ledger(
        gpu=gpu,
        measured=device is not None,
        out=None if out is None else Path(out),
        progress=progress,
        deadline=time.monotonic() + (timeout if timeout is not None else float("inf")),
    )
    unique = list(dict.fromkeys(requests))
    # Everything that would stop the session at its end stops it here.
    tools.nvcc_version()
    require_writable(gpu, {request.spec.kind for request in unique}, root=ledger.out)
    try:
        if device is None:
            from .predicted import tune_predicted

            tune_predicted(unique, ledger, tools, trials, resume=resume)
        else:
            index, driver = device
            worker = tools.worker(index)
            # Its start takes seconds (torch, a CUDA context), this process's imports of Optuna included.
            worker.start()
            from .measured import MeasuredTuning

            MeasuredTuning(ledger, tools, worker, driver, trials=trials, resume=resume).run(unique)
    except KeyboardInterrupt:
        ledger.interrupted = True
    return ledger.report()


def _find_device(gpu: Gpu, tools: Tools) -> tuple[int, str] | None:
    """Index and driver version of the first device that is this GPU."""
    for info in tools.devices():
        found = match_device(info.name, info.compute_capability, info.num_sms, info.l2_bytes)
        if found.name == gpu.name:
            return info.index, info.driver_version
    return None
