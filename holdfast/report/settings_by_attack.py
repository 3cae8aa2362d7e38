"""Which settings faced which attacks: the lines of a page as rows and columns, with the worst case of each
row.

A line's label says what tells it from its neighbours ('fedcap lie fraction=0.3'). The words that are about
the attack or the data name the column and the table; what remains names the row. Labels rather than configs
decide, because a sweep may give a method other settings under each attack, and it is one row all the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.report.numbers import percent_and_spread
from holdfast.report.read_runs import SettingRuns
from holdfast.report.table import Entry, Table
from holdfast.results.run import name_of
from holdfast.sweeps.grid import flatten

HIGHLIGHTED = 8  # lines that a chart can tell apart at a glance
BENIGN, WORST = "no attack", "worst case"


@dataclass(frozen=True)
class Faced:
    """A line with its setting, its attack and its data."""

    line: SettingRuns
    setting: str
    attack: str
    data: str


@dataclass(frozen=True)
class Score:
    """Mean accuracy over seeds, its spread, and the attack where it is a worst case."""

    mean: float
    spread: float | None
    attack: str = ""


@dataclass(frozen=True)
class ScoreGrid:
    """The lines on one dataset: settings down, the best worst case first, and attacks across, none of them
    first."""

    data: str
    settings: tuple[str, ...]
    attacks: tuple[str, ...]
    lines: dict[tuple[str, str], SettingRuns]

    def score(self, setting: str, attack: str) -> Score | None:
        line = self.lines.get((setting, attack))
        mean = line.mean("accuracy") if line else None
        return None if line is None or mean is None else Score(mean, line.spread("accuracy"), attack)

    def worst(self, setting: str) -> Score | None:
        """Over all attacks; none where one is missing, because a worst case of fewer attacks would win by
        it."""
        found = [self.score(setting, attack) for attack in self.attacks if attack != BENIGN]
        known = [score for score in found if score is not None]
        return min(known, key=lambda score: score.mean) if known and len(known) == len(found) else None

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.attacks, WORST) if len([a for a in self.attacks if a != BENIGN]) > 1 else self.attacks

    @cached_property
    def scores(self) -> list[list[Score | None]]:
        """A list per setting, in the order of the columns."""
        return [
            [self.worst(s) if column == WORST else self.score(s, column) for column in self.columns]
            for s in self.settings
        ]

    @cached_property
    def best(self) -> list[float | None]:
        """The highest of every column; none where nothing is compared."""
        columns = [
            [score.mean for score in column if score is not None] for column in zip(*self.scores, strict=True)
        ]
        return [max(known) if len(known) > 1 and max(known) != min(known) else None for known in columns]

    def table(self) -> Table:
        rows = []
        for setting, scores in zip(self.settings, self.scores, strict=True):
            entries = [
                Entry("–") if s is None else _entry(s, s.mean == best)
                for s, best in zip(scores, self.best, strict=True)
            ]
            rows.append((Entry(setting), *entries))
        return Table(("", *self.columns), tuple(rows))


def _entry(score: Score, best: bool) -> Entry:
    return Entry(percent_and_spread(score.mean, score.spread), score.mean, best, score.spread)


class SettingsByAttack:
    """All lines of a page."""

    def __init__(self, lines: Sequence[SettingRuns]):
        attack_keys = {key for line in lines for key in _attack(line)}
        self.faced: list[Faced] = []
        taken: set[tuple[str, str, str]] = set()
        for line in lines:
            one = _faced(line, attack_keys)
            if (one.setting, one.attack, one.data) in taken:  # their difference is not in their labels
                one = Faced(line, f"{one.setting} ({line.records[0].path.name})", one.attack, one.data)
            taken.add((one.setting, one.attack, one.data))
            self.faced.append(one)

    @cached_property
    def settings(self) -> list[str]:
        """In the order of their colours: as they come, or, where they are too many to tell apart, those that
        hold best first."""
        known = list(dict.fromkeys(one.setting for one in self.faced))
        return (
            known if len(known) <= HIGHLIGHTED else sorted(known, key=lambda setting: -self._lowest(setting))
        )

    @property
    def many(self) -> bool:
        return len(self.settings) > HIGHLIGHTED

    def _lowest(self, setting: str) -> float:
        means = [one.line.mean("accuracy") for one in self.faced if one.setting == setting]
        return min((mean for mean in means if mean is not None), default=-1.0)

    def place(self, line: SettingRuns) -> int:
        """Of its colour: a setting has the same one under every attack."""
        return self.settings.index(next(one.setting for one in self.faced if one.line is line))

    def met(self, line: SettingRuns) -> tuple[str, str]:
        """Attack and data: lines are compared where both are the same."""
        return next((one.attack, one.data) for one in self.faced if one.line is line)

    @property
    def panels(self) -> list[tuple[str, list[Faced]]]:
        """Lines that belong into one chart: those that faced the same on the same data."""
        datas = list(dict.fromkeys(one.data for one in self.faced))
        found: dict[tuple[str, str], list[Faced]] = {}
        for one in self.faced:
            found.setdefault((one.data, one.attack), []).append(one)
        order = sorted(found, key=lambda pair: (datas.index(pair[0]), pair[1] != BENIGN))
        return [
            (f"{data}, {attack}" if len(datas) > 1 else attack, found[data, attack]) for data, attack in order
        ]

    @property
    def grids(self) -> list[ScoreGrid]:
        """One for each dataset on which anything was attacked and compared."""
        found = []
        for data in dict.fromkeys(one.data for one in self.faced):
            here = [one for one in self.faced if one.data == data]
            attacks = sorted(dict.fromkeys(one.attack for one in here), key=lambda attack: attack != BENIGN)
            if attacks == [BENIGN] or len(here) < 2:
                continue
            grid = ScoreGrid(
                data,
                tuple(dict.fromkeys(one.setting for one in here)),
                tuple(attacks),
                {(one.setting, one.attack): one.line for one in here},
            )
            found.append(
                ScoreGrid(
                    data,
                    tuple(sorted(grid.settings, key=lambda s: -_held(grid, s))),
                    grid.attacks,
                    grid.lines,
                )
            )
        return found


def _held(grid: ScoreGrid, setting: str) -> float:
    worst = grid.worst(setting)
    return -1.0 if worst is None else worst.mean


def _attack(line: SettingRuns) -> dict[str, Any]:
    given = line.records[0].config["attack"]
    return {key: value for key, value in given.items() if key != "name"} if isinstance(given, dict) else {}


def _faced(line: SettingRuns, attack_keys: set[str]) -> Faced:
    config, attack = line.records[0].config, _attack(line)
    name, data = name_of(config["attack"]), str(config["data"]["name"])
    data_settings = {path.rpartition(".")[2]: str(value) for path, value in flatten(config["data"]).items()}
    names = {data, str(name_of(config["data"]["partition"]))}
    rest = {
        path.rpartition(".")[2]
        for path in flatten({k: v for k, v in config.items() if k not in ("attack", "data")})
    }
    of_attack, of_data, of_setting = [], [], []
    label, whole = _without_table(line.label)
    of_attack += whole
    for word in label.split():
        key, _, value = word.partition("=")
        if word in (name, "none") or key == "seed":
            continue
        if "=" in word and (str(attack.get(key)) == value or name is None and key in attack_keys - rest):
            of_attack.append(word)
        elif word in names or "=" in word and data_settings.get(key) == value and key not in rest:
            of_data.append(word)
        else:
            of_setting.append(word)
    against = BENIGN if name is None else " ".join([name, *of_attack])
    return Faced(
        line,
        " ".join(of_setting) or line.records[0].method,
        against,
        " ".join([data, *(w for w in of_data if w != data)]),
    )


def _without_table(label: str) -> tuple[str, list[str]]:
    """An axis of whole attacks, as `attack = ["none", { name = "ipm", eps = 10.0 }]`, is written into a label
    as the table it is."""
    found = re.search(r"\battack=(\{[^{}]*\}|\S+)", label)
    if found is None:
        return label, []
    try:
        told = ast.literal_eval(found[1])
    except (SyntaxError, ValueError):
        told = {}
    words = (
        [f"{key}={value}" for key, value in told.items() if key != "name"] if isinstance(told, dict) else []
    )
    return label[: found.start()] + label[found.end() :], words
