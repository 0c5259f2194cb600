"""Several devices of one product share a session's jobs; each has a thread, a measuring process and a study."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from fa2gen.errors import LaunchError

from .device import MeasuringDevice
from .measured import MeasuredTuning, Options, Shared
from .report import Ledger, TuneJob
from .tools import Tools


def tune_measured(
    jobs: Sequence[TuneJob],
    ledger: Ledger,
    tools: Tools,
    devices: Sequence[MeasuringDevice],
    options: Options,
) -> None:
    """Does every job on one of the devices; the caller ends their processes.

    A device that is lost gives its job back to the others, and the session goes on while there is one.

    Raises:
        LaunchError: No device is left (DeviceLost), or none is fit (DeviceUnfit).
        KeyboardInterrupt: The second one; the first has what was timed proved and saved.
    """
    shared = Shared()
    pool = _Pool(jobs, ledger)
    alive = {device.index: (device, MeasuredTuning(ledger, tools, device, options, shared)) for device in devices}
    # A device that idles when another is lost may still take over: another round.
    while alive and not pool.done():
        lost = pool.work([tuning for _, tuning in alive.values()], [device for device, _ in alive.values()])
        for index in [index for index, error in zip(list(alive), lost, strict=True) if error is not None]:
            alive[index][0].stop()
            del alive[index]
    if not pool.done():
        raise pool.last_error


class _Pool:
    """Jobs that wait for a device."""

    def __init__(self, jobs: Sequence[TuneJob], ledger: Ledger) -> None:
        self._waiting, self._ledger = deque(jobs), ledger
        self._lock = threading.Lock()
        self.last_error = LaunchError("no device can be used")

    def done(self) -> bool:
        return not self._waiting or self._ledger.interrupted or self._ledger.late()

    def work(self, tunings: Sequence[MeasuredTuning], devices: Sequence[MeasuringDevice]) -> list[LaunchError | None]:
        """Lets every device take jobs until none is left; the error of each that was lost."""
        if len(tunings) == 1:
            # In this thread, where Ctrl-C interrupts whatever it finds.
            return [self._serve(tunings[0])]
        with ThreadPoolExecutor(len(tunings), thread_name_prefix="fa2gen-device") as threads:
            return self._gather(threads, tunings, devices)

    def _serve(self, tuning: MeasuredTuning) -> LaunchError | None:
        while not self.done():
            with self._lock:
                if not self._waiting:
                    break
                job = self._waiting.popleft()
            try:
                tuning.tune(job)
            except LaunchError as error:
                with self._lock:
                    self._waiting.appendleft(job)
                    self.last_error = error
                return error
        return None

    def _gather(
        self, threads: ThreadPoolExecutor, tunings: Sequence[MeasuredTuning], devices: Sequence[MeasuringDevice]
    ) -> list[LaunchError | None]:
        """Hands Ctrl-C on: after the first the threads end in order, after the second at once."""
        futures: list[Future[LaunchError | None]] = []
        while True:
            try:
                # Interrupted in the midst of it, a device may be given a second thread, which finds nothing to do.
                while len(futures) < len(tunings):
                    futures.append(threads.submit(self._serve, tunings[len(futures)]))
                wait(futures)
                break
            except KeyboardInterrupt:
                self._ledger.interrupted = True
                self._ledger.stops += 1
                if self._ledger.stops > 1:
                    for device in devices:
                        device.kill()
        # A thread that Ctrl-C ended raises it here.
        return [future.result() for future in futures]
