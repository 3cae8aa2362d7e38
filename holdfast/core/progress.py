"""A bar on stderr for work on data that takes more than two seconds; a plain line where stderr is not a
terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PATIENCE = 2.0  # seconds before anything is shown

Advance = Callable[[int], None]


@contextmanager
def progress(title: str, total: int, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """with progress("decoding mnist", 70_000) as advance: ... advance(1024)"""
    bar = _Bar(title, total, clock)
    try:
        yield bar.advance
    finally:
        bar.stop()


class _Bar:
    def __init__(self, title: str, total: int, clock: Callable[[], float]):
        self.title, self.total, self.clock = title, total, clock
        self.begun, self.done, self.shown = clock(), 0, False
        self.stop: Callable[[], None] = lambda: None
        self._move: Callable[[int], object] = lambda done: None

    def advance(self, count: int) -> None:
        self.done += count
        if not self.shown and self.done < self.total and self.clock() - self.begun > PATIENCE:
            self.shown = True
            self._show()
        self._move(self.done)

    def _show(self) -> None:
        if not sys.stderr.isatty():
            print(f"{self.title}: {self.done:,} of {self.total:,}", file=sys.stderr, flush=True)
            return
        from rich.console import Console
        from rich.errors import LiveError
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
        )
        bar = Progress(
            *columns, TimeRemainingColumn(compact=True), console=Console(stderr=True), transient=True
        )
        with suppress(LiveError):  # another display has the terminal: go without
            bar.start()
            task = bar.add_task(self.title, total=self.total, completed=self.done)
            self._move = lambda done: bar.update(task, completed=done)
            self.stop = bar.stop
