"""One device's measuring process as a session sees it: times, verdicts, and whether the GPU is still there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa2gen.errors import LaunchError

from .tools import MeasuringProcess
from .worker import TrialFailure

if TYPE_CHECKING:
    from .timing import Timing

# Seconds. The first call starts the child, imports torch and makes a CUDA context; later starts find all in memory.
FIRST_START_TIMEOUT, RESTART_TIMEOUT = 180.0, 60.0
MEASURE_TIMEOUT, GATE_TIMEOUT = 60.0, 120.0
# Fresh processes that must fail one after the other before the GPU counts as gone.
MAX_STARTS = 3


class DeviceLost(LaunchError):
    """Fresh measuring processes cannot use the GPU: it has gone, or was never fit."""


@dataclass(frozen=True)
class Verdict:
    """What came of a proof: ``outcome`` is None if the kernel is right, else one of ``study.OUTCOMES``."""

    outcome: str | None
    text: str


class MeasuringDevice:
    """A device and its measuring process.

    Args:
        index: Device index.
        driver: Driver version, for the provenance.
        process: Not necessarily started yet.
    """

    def __init__(self, index: int, driver: str, process: MeasuringProcess) -> None:
        self.index, self.driver = index, driver
        self._process = process
        self._started = self._killed = False

    def start(self) -> None:
        """Starts the process; returns at once."""
        self._process.start()

    def stop(self) -> None:
        """Ends the process."""
        self._process.stop()

    def kill(self) -> None:
        """Ends the process from another thread than the one that waits for it, which gets a KeyboardInterrupt."""
        self._killed = True
        self._process.kill()

    def ready(self) -> None:
        """Waits until the process can use the GPU; a trial's time does not include this.

        Raises:
            DeviceLost: It cannot, and neither can its replacements.
            DeviceUnfit: The GPU has too little memory left.
        """
        for attempt in range(1, MAX_STARTS + 1):
            try:
                self._call("ready", None, RESTART_TIMEOUT if self._started else FIRST_START_TIMEOUT)
                return
            except TrialFailure as failure:
                self._process.stop()
                if attempt == MAX_STARTS:
                    raise DeviceLost(
                        f"device {self.index} cannot be used: {MAX_STARTS} measuring processes in a row failed to "
                        f"start, the last one: {failure}"
                    ) from None

    def measure(self, payload: Any) -> Timing:
        """Times a kernel.

        Raises:
            TrialFailure: The kernel is to blame.
            DeviceLost: The GPU is: a fresh process does not work either, so no kernel shall take the blame.
        """
        self.ready()
        try:
            timing: Timing = self._call("measure", payload, MEASURE_TIMEOUT)
        except TrialFailure as failure:
            if failure.fatal or failure.outcome == "timeout":
                self.ready()
            raise
        return timing

    def gate(self, payload: Any) -> Verdict:
        """Proves a kernel; a crash or a hang is tried once more in a fresh process.

        Raises:
            DeviceLost: As for :meth:`measure`.
        """
        for _ in range(2):
            self.ready()
            try:
                passed, text = self._call("gate", payload, GATE_TIMEOUT)
            except TrialFailure as failure:
                self._process.stop()
                verdict = Verdict(failure.outcome, f"the gate did not end, in two processes: {failure}")
            else:
                return Verdict(None if passed else "wrong", f"GPU: {text}")
        self.ready()
        return verdict

    def _call(self, operation: str, payload: Any, timeout: float) -> Any:
        try:
            return self._process.call(operation, payload, timeout=timeout)
        except TrialFailure:
            if self._killed:
                raise KeyboardInterrupt from None
            raise
        finally:
            self._started = True
