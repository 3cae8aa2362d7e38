"""How `holdfast tune` chose the settings of the runs on a page, from its file trials.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import RunError
from holdfast.experiment.manifest import TRIALS
from holdfast.report.markup import Section, fill
from holdfast.report.numbers import percent
from holdfast.report.read_runs import RunRecord

_ABOUT = ("label", "validation/accuracy", "validation/loss", "chosen", "status", "folder")
"""Columns that are not settings."""


@dataclass(frozen=True)
class Trial:
    label: str
    settings: Mapping[str, str]
    validation: float | None
    chosen: bool
    status: str

    @property
    def words(self) -> str:
        """Its settings, without the names of the sections: 'lr=0.01 lam=0.5'."""
        return " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in self.settings.items())

    @property
    def accuracy(self) -> str:
        return "–" if self.validation is None else percent(self.validation)


def trials(records: Sequence[RunRecord]) -> Section | None:
    """The trials behind these runs; None where they are not the report of a fair comparison."""
    file = records[0].path.parent.parent / TRIALS
    if not file.is_file() or any(record.path.parent != file.parent / "report" for record in records):
        return None
    tried = read_trials(file)
    by_label: dict[str, list[Trial]] = {}
    for trial in tried:
        by_label.setdefault(trial.label, []).append(trial)
    rows = [
        (label, next((one for one in some if one.chosen), None), len(some))
        for label, some in by_label.items()
    ]
    return Section("How settings were chosen", fill("sections/trials.html", rows=rows, tried=tried))


def read_trials(file: Path) -> list[Trial]:
    with file.open(newline="", encoding="utf-8", errors="replace") as lines:
        rows = list(csv.DictReader(lines))
    try:
        return [
            Trial(
                row["label"],
                {name: value for name, value in row.items() if name not in _ABOUT and value},
                float(row["validation/accuracy"]) if row["validation/accuracy"] else None,
                row["chosen"] == "1",
                row["status"],
            )
            for row in rows
        ]
    except (KeyError, ValueError):
        raise RunError(f"{file} is damaged; the command `holdfast tune` writes it again") from None
