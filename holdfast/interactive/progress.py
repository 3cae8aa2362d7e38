"""Shows progress: bars on a terminal or in a notebook. Elsewhere commands print a few plain lines, and Python
nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from holdfast.core.errors import in_print
from holdfast.interactive.notebook import NotebookBars, in_notebook

if TYPE_CHECKING:
    from holdfast.experiment.loop import Experiment
    from holdfast.experiment.runner import RunCallbacks

MOST_BARS = 12  # a sweep of more cells than this has one bar for all


class Follow:
    """Follows running experiments. Use it as a context manager and pass `watch()` to the session."""

    def __init__(
        self,
        console: Console,
        unit: str = "rounds",
        figure: str = "accuracy",
        notebook: NotebookBars | None = None,
    ):
        self.console, self.unit, self.metric, self.notebook = console, unit, figure, notebook
        self.live = sys.stderr.isatty() or notebook is not None
        self.total = 0
        self.done: dict[int, int] = {}  # by experiment: committed rounds
        self.accuracy: dict[int, float] = {}
        self.diverged: set[int] = set()
        self.tenth = 0
        self.bars: dict[int, TaskID] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figure]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self.live or notebook is not None,
        )

    def watch(self) -> RunCallbacks:
        from holdfast.experiment.runner import RunCallbacks

        return RunCallbacks(say=self.say, moved=self.moved, planned=self.planned)

    def __enter__(self) -> Follow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.notebook is not None:
            self.notebook.show(self.progress.tasks, at_once=True)

    def say(self, line: str) -> None:
        if self.notebook is not None:
            self.notebook.say(line)
        else:
            self.console.print(line, markup=False, style="dim")

    def planned(self, experiments: list[Experiment]) -> None:
        """Add bars; called once for each group of experiments that run together, one group after the
        other."""
        self.total += sum(e.rounds for e in experiments)
        if len(experiments) <= MOST_BARS:
            for experiment in experiments:
                name = experiment.label if len(experiments) > 1 else experiment.method.name
                self.bars[id(experiment)] = self.progress.add_task(
                    escape(in_print(name)), total=experiment.rounds, figure=""
                )
        else:
            together = self.progress.add_task(
                f"{len(experiments)} experiments", total=sum(e.rounds for e in experiments), figure=""
            )
            self.bars |= {id(e): together for e in experiments}
        self.progress.start()

    def moved(self, experiment: Experiment) -> None:
        """Update the bar of an experiment; called after every exchange. Only a newly committed round changes
        it."""
        committed = min(experiment.committed, experiment.rounds)
        before = self.done.get(id(experiment), 0)
        if committed <= before:
            return
        self.done[id(experiment)] = committed
        part = experiment.store.part(committed) or {}
        accuracy = part.get("metrics", {}).get(self.metric)
        if accuracy is not None:
            self.accuracy[id(experiment)] = accuracy
        if part.get("diverged") and id(experiment) not in self.diverged:
            self.diverged.add(id(experiment))
            self.say(
                f"{experiment.label or experiment.method.name} diverged in round {committed}:"
                f" {part['diverged']}"
            )
        if self.live:
            self.progress.update(
                self.bars[id(experiment)], advance=committed - before, figure=self._figure(experiment)
            )
            if self.notebook is not None:
                self.notebook.show(self.progress.tasks)
        else:
            self._line()

    def _figure(self, experiment: Experiment) -> str:
        shared = len(set(self.bars.values())) < len(self.bars)
        seen = (
            self.accuracy.values()
            if shared
            else [self.accuracy[id(experiment)]]
            if id(experiment) in self.accuracy
            else []
        )
        return self._span(list(seen))

    def _line(self) -> None:
        """Print one line for every tenth of the work, where there is no terminal."""
        done = sum(self.done.values())
        tenth = 10 * done // max(self.total, 1)
        if tenth > self.tenth:
            self.tenth = tenth
            self.say(f"{done}/{self.total} {self.unit}  {self._span(list(self.accuracy.values()))}".rstrip())

    def _span(self, accuracies: list[float]) -> str:
        if not accuracies:
            return ""
        low, high = min(accuracies), max(accuracies)
        return (
            f"{self.metric} {low:.3f}" if len(accuracies) == 1 else f"{self.metric} {low:.3f} to {high:.3f}"
        )


@contextmanager
def shown(
    progress: bool | None, watch: RunCallbacks | None, figure: str = "accuracy"
) -> Iterator[RunCallbacks]:
    """What follows runs that are started from Python: bars in a notebook or on a terminal, nothing elsewhere
    or where `progress` is False, and what the caller has given."""
    from holdfast.experiment.runner import RunCallbacks

    given = watch or RunCallbacks()
    notebook = NotebookBars() if in_notebook() else None
    if progress is False or notebook is None and not (progress or sys.stderr.isatty()):
        yield given
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, force_jupyter=False)
    with Follow(console, figure=figure, notebook=notebook) as follow:
        yield _both(follow.watch(), given)


@contextmanager
def shown_status(progress: bool | None, watch: RunCallbacks | None) -> Iterator[RunCallbacks]:
    """The same for a forecast, which says what it does and has no rounds to count."""
    from holdfast.experiment.runner import RunCallbacks

    given = watch or RunCallbacks()
    if progress is False or not (progress or in_notebook() or sys.stderr.isatty()):
        yield given
        return
    if in_notebook():
        yield _both(RunCallbacks(say=NotebookBars(most_lines=1).say), given)
        return
    console = Console(stderr=True, highlight=False, emoji=False)
    with console.status("building") as status:
        yield _both(RunCallbacks(say=lambda line: status.update(escape(in_print(line)))), given)


def _both(first: RunCallbacks, second: RunCallbacks) -> RunCallbacks:
    from holdfast.experiment.runner import RunCallbacks

    def say(line: str) -> None:
        first.say(line)
        second.say(line)

    def moved(experiment: Experiment) -> None:
        first.moved(experiment)
        second.moved(experiment)

    def planned(experiments: list[Experiment]) -> None:
        first.planned(experiments)
        second.planned(experiments)

    return RunCallbacks(say, moved, planned)
