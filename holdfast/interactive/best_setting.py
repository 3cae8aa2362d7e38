"""The best setting of a sweep, by the mean of a final metric over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core.errors import RunError
from holdfast.interactive.run import Run

if TYPE_CHECKING:
    from holdfast.interactive.sweep import SweepCell

_LOWER_IS_BETTER = ("loss", "std", "bytes", "seconds", "rounds_to", "fpr", "fnr", "asr", "refused")


@dataclass(frozen=True, repr=False)
class BestSetting:
    """The best setting of a sweep: its `label`, the `metric` with its `mean`, and its `cells`, one per seed.

    >>> best = sweep.best()
    >>> best.label, best.mean
    >>> best.run                 # of its first seed; best.runs has those of all seeds"""

    label: str
    metric: str
    values: tuple[float, ...]
    """The metric under each seed that is finished."""
    cells: tuple[SweepCell, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def runs(self) -> list[Run]:
        """The runs of its cells."""
        return [cell.run for cell in self.cells if cell.run is not None]

    @property
    def run(self) -> Run:
        """The run of its first cell."""
        return self.runs[0]

    def __repr__(self) -> str:
        said = f"{self.metric} {self.mean:.4f}"
        if len(self.cells) > 1:
            many = len(self.values)
            of = "" if many == len(self.cells) else f"{many} of "
            said += f" on average over {of}{len(self.cells)} seeds"
            said += f", {min(self.values):.4f} to {max(self.values):.4f}" if many > 1 else ""
        return f"BestSetting({self.label!r}, {said})"


def best_setting(
    settings: Sequence[tuple[str, Sequence[SweepCell]]], metric: str, where: Path
) -> BestSetting:
    """The best of these settings, which are labels and cells; complete ones come first."""
    found = []
    for label, cells in settings:
        known = [cell for cell in cells if _value(cell, metric) is not None]
        values = tuple(value for cell in known if (value := _value(cell, metric)) is not None)
        if known:  # a run of the first cell is one that has the figure
            rest = [cell for cell in cells if cell not in known]
            found.append(BestSetting(label, metric, values, (*known, *rest)))
    if not found:
        raise RunError(f"no finished cell of {where} has a value of '{metric}'")
    sign = -1 if set(metric.split("/")) & set(_LOWER_IS_BETTER) else 1
    return max(found, key=lambda one: (len(one.values) == len(one.cells), sign * one.mean))


def _value(cell: SweepCell, metric: str) -> float | None:
    """The final figure of a finished cell."""
    return (cell.final or {}).get(metric) if cell.status == "finished" else None
