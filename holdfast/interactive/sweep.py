"""A sweep as Python holds it: a list of its cells, and tables and pictures of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from holdfast.core.errors import ConfigError, RunError
from holdfast.data.handed.content import HandedOver
from holdfast.experiment.config import Config
from holdfast.experiment.manifest import read_manifest, run_folders
from holdfast.interactive.best_setting import BestSetting, best_setting
from holdfast.interactive.figure import check_metric
from holdfast.interactive.notebook import rows_table
from holdfast.interactive.run import Run, _opened
from holdfast.interactive.sweep_figure import Look, sweep_figure
from holdfast.report.compare import Comparison
from holdfast.report.config_differences import MISSING, differing
from holdfast.report.page import write_page
from holdfast.report.read_runs import SettingRuns, by_setting, one_each, read_records
from holdfast.storage.status import RunStatus, run_status
from holdfast.sweeps.folder import listed

_MOST_ROWS = 40  # of a table in a notebook
_MAY_BE_NONE = ("aggregator", "attack", "schedule", "server")  # parts that an experiment can do without


@dataclass(frozen=True, repr=False)
class SweepCell:
    """One experiment of a sweep.

    `status` is finished, diverged, failed, begun, not begun, running elsewhere or other shard; `round` the
    last round, `reason` why it failed, `run` its run if it has begun. What a run has, its cell has too:
    `cell.metrics` is `cell.run.metrics`.

    >>> sweep = holdfast.sweep(method=["fedavg", "ditto"], out="runs/two")
    >>> sweep[1].label, sweep[1].status, sweep[1].final["accuracy"]"""

    label: str
    status: str
    round: int
    reason: str | None
    run: Run | None

    @property
    def final(self) -> dict[str, Any] | None:
        """The final metrics; None if the cell has not ended."""
        return self.run.final if self.run is not None and self.status in ("finished", "diverged") else None

    def __repr__(self) -> str:
        accuracy = None if self.run is None else self.run.accuracy
        said = [repr(self.label), self.status, f"round {self.round}"]
        return f"SweepCell({', '.join([*said, *([] if accuracy is None else [f'accuracy {accuracy:.4f}'])])})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self.run is None:
            if hasattr(Run, name):
                raise RunError(f"cell '{self.label}' has no {name}: it is {self.status}")
            raise AttributeError(f"'SweepCell' object has no attribute '{name}'")
        return getattr(self.run, name)


def cell_of(
    status: RunStatus,
    config: Config | None = None,
    data: Sequence[HandedOver] = (),
    again: Mapping[str, Any] | None = None,
) -> SweepCell:
    """The cell whose status was read. A config is needed where it holds objects, or `again`, the sections
    that hold them; data where the directory has no copy of what was handed over."""
    run = Run(status.path, config, data, again) if (status.path / "manifest.json").exists() else None
    return SweepCell(status.label, status.shared or status.status, status.round, status.reason, run)


class Sweep(list[SweepCell]):
    """The cells of a sweep, in the order of its grid; it behaves as a list of them.

    >>> sweep = holdfast.sweep(method=["fedavg", "ditto"], seed=[0, 1], train={"rounds": 3})
    >>> len(sweep), sweep[0].label
    (4, 'fedavg seed=0')
    >>> sweep.frame[["method", "seed", "accuracy"]]      # a row per cell
    >>> sweep.best()                                     # the setting with the best mean over its seeds
    >>> sweep.plot()                                     # a line per setting, a band over its seeds
    >>> sweep.report(open=True)

    `holdfast.open(path)` opens a sweep again."""

    def __init__(self, path: str | Path, cells: Iterable[SweepCell]):
        super().__init__(cells)
        self.path = Path(path)

    def __dir__(self) -> list[str]:
        """Without what changes a list."""
        return [name for name in super().__dir__() if name.startswith("_") or not hasattr(list, name)]

    @classmethod
    def opened(
        cls, path: str | Path, data: Sequence[HandedOver] = (), again: Mapping[str, Any] | None = None
    ) -> Sweep:
        """Read a sweep, or a folder of runs, from disk."""
        folder = Path(path)
        cells = [run_status(folder / cell["folder"], cell["label"]) for cell in listed(folder)]
        if not cells:
            cells = [run_status(run, _name(run)) for run in run_folders(folder)]
        return cls(folder, [cell_of(status, data=data, again=again) for status in cells])

    @property
    def runs(self) -> list[Run]:
        """The runs of all cells that have begun."""
        return [cell.run for cell in self if cell.run is not None]

    @property
    def frame(self) -> pd.DataFrame:
        """A row per cell: label, status, round, the settings in which cells differ (method, seed, train.lr
        ...), and the final metrics, which are empty for a cell that has not ended."""
        settings = self._settings
        rows = [
            {
                "label": cell.label,
                "status": cell.status,
                "round": cell.round,
                **{name: values[place] for name, values in settings.items()},
                **(cell.final or {}),
            }
            for place, cell in enumerate(self)
        ]
        return pd.DataFrame(rows)

    @cached_property
    def _settings(self) -> dict[str, list[Any]]:
        """The keys of the configs in which cells differ, with each cell's value."""
        configs = [cell["config"] for cell in listed(self.path)]
        if not configs:
            configs = [run.manifest["config"] for run in self.runs]
        return {
            name: [_shown(name, value) for value in values] for name, values in differing(configs).items()
        }

    def best(self, metric: str = "accuracy", over: str | None = "seed") -> BestSetting:
        """The setting with the best mean of a final metric over its seeds: the highest, or the lowest of
        losses, bytes, seconds and error rates.

        >>> sweep.best()
        BestSetting('ditto', accuracy 0.8714 on average over 3 seeds, 0.8602 to 0.8811)
        >>> sweep.best().run.model(client=3)             # of its first seed
        >>> sweep.best("loss").mean
        >>> sweep.best(over=None)                        # the best single cell

        A setting of which all seeds are finished comes before one of which some are not. It looks at test
        data: to choose settings fairly use `holdfast.tune`; to compare them `compare`."""
        if over not in ("seed", None):
            raise ConfigError(f'best: over must be "seed", or None for single cells, not {over!r}')
        if known := {name for cell in self for name in cell.final or {}}:
            check_metric(metric, known)
        lines = one_each(read_records(self.path)) if over is None else self._lines()
        cells = {cell.run.path: cell for cell in self if cell.run is not None}
        settings = [(line.label, [cells[record.path] for record in line.records]) for line in lines]
        return best_setting(settings, metric, self.path)

    def plot(
        self,
        metric: str = "accuracy",
        lines: Sequence[str] | Callable[[str], bool] | None = None,
        panels: bool | None = None,
        names: Mapping[str, str] | None = None,
        size: tuple[float, float] | None = None,
    ) -> Any:
        """Draw one metric over the rounds, a line per setting with a band over its seeds, and return a
        matplotlib Figure. Settings that faced different attacks are drawn in a panel for each attack.

        >>> sweep.plot("accuracy/worst10").savefig("worst.pdf")
        >>> sweep.plot(lines=["fedavg", "ditto"], names={"ditto": "Ditto"}, size=(5, 3))
        >>> sweep.plot(lines=lambda label: "ditto" in label)

        `lines` chooses lines: their labels without the seed, or a function that is true for the label of a
        line to draw. `panels=False` draws all lines in one chart. `names` renames lines, with or without
        the attack in their label, and attacks. `size` is the width and the height in inches.

        A notebook shows the figure. matplotlib comes with `pip install 'holdfast[figures]'`."""
        known = self._lines()
        check_metric(metric, {name for run in self.runs for name in run.metrics.columns if name != "round"})
        return sweep_figure(known, metric, Look(lines, panels, names, size))

    def report(self, open: bool = False) -> Path:
        """Write the page about all runs, report.html in the folder of the sweep, and return its path; `open`
        shows it in a browser."""
        return _opened(write_page(self.path), open)

    def compare(self, against: str | None = None, metric: str = "accuracy") -> pd.DataFrame:
        """Compare settings over the seeds that they share: a row per pair, as `holdfast compare` prints it.

        >>> sweep.compare(against="fedavg")[["setting", "against", "difference", "p_holm"]]

        `difference` is the mean of `setting` less that of `against`, so above 0 `setting` has the higher
        value; `low` and `high` are its 95 % interval. `p` is of the paired t-test, `p_signed_rank` of
        Wilcoxon's signed-rank test; `p_holm` and `p_signed_rank_holm` are these after Holm's correction for
        the number of pairs.

        `against` is the label of a setting, without its seed; without it, all pairs are compared. What
        limits the comparison is in `frame.attrs["notes"]`."""
        comparison = Comparison(self._lines(), metric, against).plain()
        frame = pd.DataFrame([_row(pair) for pair in comparison["pairs"]])
        frame.attrs["notes"] = comparison["notes"]
        return frame

    def _lines(self) -> list[SettingRuns]:
        if not self.runs:
            raise ConfigError(f"no cell of {self.path} has begun")
        return by_setting(read_records(self.path))

    def __repr__(self) -> str:
        return f"Sweep({self._summary()}: {self.path})"

    def _summary(self) -> str:
        states = [cell.status for cell in self]
        said = [f"{states.count(status)} {status}" for status in dict.fromkeys(states)]
        return f"{len(self)} cells, {', '.join(said)}" if self else "no cells"

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = []
        for cell in self[:_MOST_ROWS]:
            accuracy = None if cell.run is None else cell.run.accuracy
            rows.append((cell.label, cell.status, cell.round, "" if accuracy is None else f"{accuracy:.4f}"))
        more = f"and {len(self) - _MOST_ROWS} more cells" if len(self) > _MOST_ROWS else ""
        heads = ("cell", "status", "round", "accuracy")
        return rows_table(f"Sweep of {self._summary()} in {self.path}", heads, rows, more)


def _name(run: Path) -> str:
    return str(read_manifest(run)["label"] or run.name)


def _shown(setting: str, value: Any) -> Any:
    """A setting in the frame: "none" where a cell has no attack; empty where its part has no such setting."""
    if value is None and setting in _MAY_BE_NONE:
        return "none"
    return None if value == MISSING else value


def _row(pair: dict[str, Any]) -> dict[str, Any]:
    """One line of a comparison."""
    kept = {name: pair[name] for name in ("label", "setting", "against", "difference", "low", "high")}
    tests = {
        "p": pair["t"]["p"],
        "p_holm": pair["t"]["holm"],
        "p_signed_rank": pair["wilcoxon"]["p"],
        "p_signed_rank_holm": pair["wilcoxon"]["holm"],
    }
    return {**kept, **tests, "seeds": len(pair["seeds"])}
