"""Progress of a long command: a bar on a terminal, a line now and then in a log. Always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Seconds between lines in a log.
_LOG_INTERVAL = 10.0


class Event(Protocol):
    """What a long task reports: so many of so many done in a stage, and what it is at."""

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def text(self) -> str: ...


class StageProgress:
    """Context manager that shows events; one bar per stage."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line = 0.0

    def __enter__(self) -> StageProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("{task.description:<8}"),
                BarColumn(bar_width=40),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                console=Console(stderr=True),
            )
            self._progress.start()
        return self

    def on_event(self, event: Event) -> None:
        """Shows one event."""
        if self._progress is None:
            self._log(event)
            return
        if event.stage not in self._tasks:
            self._tasks[event.stage] = self._progress.add_task(event.stage, text="")
        self._progress.update(self._tasks[event.stage], completed=event.done, total=event.total, text=event.text[:80])

    def _log(self, event: Event) -> None:
        now = time.monotonic()
        if event.done and (now - self._last_line >= _LOG_INTERVAL or event.done == event.total):
            self._last_line = now
            print(f"{event.stage}: {event.done}/{event.total} {event.text}".rstrip(), file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
