"""Compare methods fairly: the same number of trials for each, chosen by validation data, then reported on
test data under other seeds.

    trials/       one sweep with the trials of all methods (space.py decides which)
    report/       one sweep with what was chosen, under the seeds of the report
    trials.csv    what was tried, its validation figures, and what was chosen
    tuned.toml    the config of the report

Both sweeps are started, continued or completed by the same call. Test figures of a trial are never used.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, RunError
from holdfast.core.files import plain_disk_errors, write_atomically
from holdfast.data.handed.kept import keep_all
from holdfast.experiment.manifest import TRIALS
from holdfast.experiment.runner import RunCallbacks
from holdfast.report.numbers import percent, percent_and_spread
from holdfast.report.read_runs import SettingRuns, by_setting, read_records
from holdfast.report.rerun_config import as_text
from holdfast.report.table import CHOSEN, STATUS, Entry, Table, to_markdown
from holdfast.storage.status import RunStatus
from holdfast.sweeps.grid import Settings, combinations, configs, label
from holdfast.sweeps.runner import Launcher, sweep
from holdfast.tuning.space import Candidate, SearchSpace


@dataclass(frozen=True)
class Choice:
    """What was chosen for one line of the table, and its validation accuracy."""

    candidate: Candidate
    settings: Settings
    validation: float
    """Accuracy on the benign clients' validation data, in the trial."""
    done: int
    """Trials that have a validation figure; the others failed."""

    @property
    def trials(self) -> str:
        tried, possible = len(self.candidate.trials), self.candidate.possible
        failed = f", {tried - self.done} failed" if self.done < tried else ""
        return (f"all {tried}" if tried == possible else f"{tried} of {possible}") + failed

    @property
    def words(self) -> str:
        return label(self.settings)

    @property
    def at_the_edge(self) -> bool:
        """Whether the best learning rate may lie beyond those that were tried."""
        rates = self.candidate.ranges.get("train.lr", [])
        return len(rates) > 1 and self.settings["train.lr"] in (min(rates), max(rates))


class Tuning:
    """Runs the trials with `try_all`, then the report with `report`; each continues where it was stopped."""

    def __init__(
        self,
        config: Mapping[str, Any],
        budget: int,
        out: Path,
        under_attack: bool = False,
        launcher: Launcher | None = None,
    ):
        self.launcher = launcher
        """What runs both sweeps; without it, this process."""
        self.search, self.out = SearchSpace(config, budget, under_attack), Path(out)
        self.cells = self.search.cells()
        if (self.out / "manifest.json").exists() or (self.out / "sweep.json").exists():
            raise ConfigError(f"{self.out} holds a run or a sweep already; choose another --out")

    def try_all(
        self, watch: RunCallbacks | None = None, plugins: Sequence[str] = (), retry: bool = False
    ) -> list[Choice]:
        """Run every trial and choose; write what was tried and chosen."""
        self._keep_data(watch or RunCallbacks())
        statuses = sweep(self.cells, self.out / "trials", watch, plugins, retry=retry, launcher=self.launcher)
        waiting = [run_status for run_status in statuses if not run_status.done]
        if waiting:
            raise RunError(
                f"{len(waiting)} of {len(statuses)} trials are being run by another process, such as"
                f" '{waiting[0].label}'; wait for it, then run this again"
            )
        shares, begin = [], 0
        for candidate in self.search.candidates:
            shares.append(statuses[begin : begin + len(candidate.trials)])
            begin += len(candidate.trials)
        places = [
            _best(candidate, share) for candidate, share in zip(self.search.candidates, shares, strict=True)
        ]
        _write_trials(self.out / TRIALS, self.search.candidates, shares, places)
        choices = [
            Choice(
                candidate,
                candidate.trials[place],
                _validation(share[place])[0],
                sum(s.result is not None for s in share),
            )
            for candidate, share, place in zip(self.search.candidates, shares, places, strict=True)
        ]
        _write_config(self.out / "tuned.toml", self._tuned(choices))
        return choices

    def _keep_data(self, watch: RunCallbacks) -> None:
        """Write data that was handed over in Python once, for the trials and the report."""
        configs = [config for _, config in self.cells]
        if any(config.data.name == "arrays" for config in configs):
            with plain_disk_errors(self.out):
                self.out.mkdir(parents=True, exist_ok=True)
            keep_all(configs, self.out, watch.say)

    def _tuned(self, choices: Sequence[Choice]) -> Settings:
        return self.search.tuned([choice.settings for choice in choices])

    def report(
        self,
        choices: Sequence[Choice],
        watch: RunCallbacks | None = None,
        plugins: Sequence[str] = (),
        retry: bool = False,
    ) -> Tuned:
        """Run what was chosen under the seeds of the report."""
        table = self._tuned(choices)
        statuses = sweep(
            configs(table), self.out / "report", watch, plugins, retry=retry, launcher=self.launcher
        )
        mine = [self.search.candidate(chosen) for chosen, _ in combinations(table)]
        by_path = {
            run_status.path: next(c for c in choices if c.candidate is m)
            for run_status, m in zip(statuses, mine, strict=True)
        }
        return Tuned(self.out, self.search, tuple(choices), tuple(statuses), by_path)


@dataclass(frozen=True)
class Tuned:
    """A finished comparison: what was chosen for each line, and its results on test data."""

    path: Path
    search: SearchSpace
    choices: tuple[Choice, ...]
    statuses: tuple[RunStatus, ...]
    """The cells of the report."""
    by_path: dict[Path, Choice]

    def __str__(self) -> str:
        return f"{to_markdown(self.table())}\n{self.words()}"

    def lines(self) -> list[tuple[SettingRuns, Choice]]:
        """Return one line for each setting of the report, over its seeds."""
        return [
            (line, self.by_path[line.records[0].path])
            for line in by_setting(read_records(self.path / "report"))
        ]

    def table(self) -> Table:
        """Return the table: test accuracy over the report's seeds beside the validation accuracy."""
        lines = self.lines()
        means = [line.mean("accuracy") for line, _ in lines]
        best = max((mean for mean in means if mean is not None), default=None)
        rows = []
        for (line, choice), mean in zip(lines, means, strict=True):
            figures = [
                _figure(line, "accuracy", mean == best and len(lines) > 1),
                _figure(line, "accuracy/worst10"),
            ]
            words = [percent(choice.validation), choice.trials, choice.words]
            finished = all(record.run_status.status == "finished" for record in line.records)
            status = "" if finished else line.status
            rows.append((Entry(line.label), *figures, *map(Entry, words), Entry(status)))
        titles = ("", "test accuracy", "worst 10 %", "validation", "trials", CHOSEN, STATUS)
        kept = len(titles) - all(row[-1].text == "" for row in rows)
        return Table(titles[:kept], tuple(row[:kept] for row in rows))

    def words(self) -> str:
        """Describe how the comparison was made: what makes it fair, and what it leaves open."""
        search = self.search
        setting = (
            "under each attack"
            if search.under_attack and search.attacks
            else "without an attack"
            if search.attacks
            else ""
        )
        trials = f"{search.budget} trials for every line" if search.budget > 1 else "1 trial for every line"
        seeds = f"seed{'s' if len(search.seeds) > 1 else ''} {', '.join(map(str, search.seeds))}"
        tried = " ".join(filter(None, ["tried", setting, f"on seed {search.seed}"]))
        fewer = (
            " (all combinations, where its range has fewer)"
            if any(c.candidate.possible < search.budget for c in self.choices)
            else ""
        )
        summary = (
            f"{trials}{fewer}, {tried}, chosen by the clients' validation data; test data of {seeds}, ± over"
            " seeds"
        )
        edge = sum(choice.at_the_edge for choice in self.choices)
        of = f"{edge} of {len(self.choices)} lines" if len(self.choices) > 1 else "it"
        return (
            f"{summary}; {of} chose the lowest or highest learning rate that was tried: better ones may"
            " lie beyond"
            if edge
            else summary
        )

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain data for --json."""
        search = self.search
        methods = [
            {
                "label": choice.candidate.label,
                "settings": choice.settings,
                "validation/accuracy": choice.validation,
                "trials": len(choice.candidate.trials),
                "failed": len(choice.candidate.trials) - choice.done,
                "possible": choice.candidate.possible,
                "ranges": choice.candidate.ranges,
            }
            for choice in self.choices
        ]
        report = [
            {
                "label": line.label,
                "tuned": choice.candidate.label,
                "seeds": line.seeds,
                "accuracy": line.mean("accuracy"),
                "accuracy/spread": line.spread("accuracy"),
                "accuracy/worst10": line.mean("accuracy/worst10"),
            }
            for line, choice in self.lines()
        ]
        about = {
            "budget": search.budget,
            "seed": search.seed,
            "seeds": search.seeds,
            "under_attack": search.under_attack,
        }
        cells = [run_status.plain() for run_status in self.statuses]
        return {"run_dir": str(self.path), **about, "tuned": methods, "report": report, "cells": cells}


def _validation(run_status: RunStatus) -> tuple[float, float]:
    """Return accuracy and loss on validation data; for a trial without any, worse than all others."""
    final = {} if run_status.result is None else run_status.result["final"]
    accuracy, loss = final.get("validation/accuracy"), final.get("validation/loss")
    return -1.0 if accuracy is None else accuracy, float("inf") if loss is None else loss


def _best(candidate: Candidate, statuses: Sequence[RunStatus]) -> int:
    """Return the trial with the highest validation accuracy; among equals the one with the smaller loss, then
    the first. A diverged trial is chosen only where no other finished."""

    def merit(place: int) -> tuple[bool, float, float, int]:
        accuracy, loss = _validation(statuses[place])
        return statuses[place].status == "finished", accuracy, -loss, -place

    place = max(range(len(statuses)), key=merit)
    if _validation(statuses[place])[0] < 0:
        failed = next((s for s in statuses if s.status == "failed"), None)
        if failed is None:
            raise RunError(
                f"no benign client of '{candidate.label}' has validation data; raise data.split.validation"
            )
        raise RunError(
            f"all trials of '{candidate.label}' failed: '{failed.label}' {failed.words}; --retry runs"
            " them again"
        )
    return place


def _write_trials(
    file: Path, candidates: Sequence[Candidate], shares: Sequence[Sequence[RunStatus]], chosen: Sequence[int]
) -> None:
    paths = list(dict.fromkeys(path for candidate in candidates for path in candidate.ranges))
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["label", *paths, "validation/accuracy", "validation/loss", "chosen", "status", "folder"])
    for candidate, share, best in zip(candidates, shares, chosen, strict=True):
        for place, (settings, run_status) in enumerate(zip(candidate.trials, share, strict=True)):
            accuracy, loss = _validation(run_status)
            figures = [accuracy, loss] if accuracy >= 0 else ["", ""]
            tried = [settings.get(path, "") for path in paths]
            out.writerow(
                [
                    candidate.label,
                    *tried,
                    *figures,
                    int(place == best),
                    run_status.words,
                    f"trials/{run_status.path.name}",
                ]
            )
    write_atomically(file, text.getvalue().encode(errors="replace"))


def _write_config(file: Path, table: Settings) -> None:
    """Write the config, unless it holds Python objects, which TOML cannot express."""
    try:
        write_atomically(file, as_text(table).encode(errors="replace"))
    except TypeError:
        return


def _figure(line: SettingRuns, metric: str, best: bool = False) -> Entry:
    values = line.values(metric)
    if not values:
        return Entry("–")
    mean = statistics.fmean(values)
    return Entry(percent_and_spread(mean, line.spread(metric)), mean, best)
