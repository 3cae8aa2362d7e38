"""The format of a study, which is one table or figure of a paper as a TOML file in studies/: its experiments,
its metrics, and what the paper claims.

    paper = "FedCAP"                   # as in printed/fedcap.csv
    title = "Accuracy under six attacks, by defence"
    printed = "I"                      # the number of the table in the paper; a figure has claims only
    notes = ["..."]                    # where paper and code contradict each other, one sentence each
    like = "shared/fedcap"             # another study, or what the paper's studies share; then only what
                                       # differs follows (inheritance.py)

    [config]                           # what all experiments share, as for `holdfast run`
    [axes.attack]                      # an axis of the table: what each label sets. The experiments are all
                                       # combinations of labels
    SF = { "attack.name" = "sign-flip" }
    [[override]]                       # settings of some experiments only
    when = { method = "FedCAP", attack = ["SF", "MR"] }
    set = { "method.alpha" = 5 }
    [[skip]]                           # combinations that the table does not have
    when = { ... }
    [[on_request]]                     # labels that run only if --only names them: other readings of what the
                                       # paper leaves open
    when = { method = ["..."] }
    [[authors]]                        # settings of the released code for --variant authors, beside the
                                       # `variant = "authors"` of its parts
    set = { "train.shuffle" = false }
    [metrics."TAcc(%)"]                # a number of each experiment
    figure = "accuracy"
    times = 100
    [[metrics."TAcc(%)".override]]     # another number for some experiments
    when = { method = "FedAvg-FT" }
    figure = "accuracy/personal"
    [layout]
    rows = ["attack"]
    columns = ["method"]
    [print]                            # where in the paper a number is printed
    setting = "attack={attack}, malicious=0.3"
    [[claims]]                         # see claims.py
    [scale.quick]                      # a smaller version
    [scale.smoke]"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal

from pydantic import Field, model_validator

from holdfast.core.errors import ConfigError, suggest
from holdfast.core.registry import INVALID, explain
from holdfast.experiment.config import Section
from holdfast.reproduction.inheritance import completed

SCALES = ("smoke", "quick", "full")
VARIANTS = ("paper", "authors")
Labels = str | tuple[str, ...]
When = dict[str, Labels]


class Override(Section):
    """Settings for the experiments that have these labels."""

    when: When = {}
    set: dict[str, Any]


class Skip(Section):
    """Labels whose combinations are left out."""

    when: When


class StandIn(Section):
    """Other data for experiments whose own data cannot be downloaded; the title of the page says so."""

    when: When = {}
    name: str
    set: dict[str, Any]


class Scale(Section):
    """A smaller version of the study: which labels are kept, and what all experiments set."""

    keep: dict[str, tuple[str, ...]] = {}
    set: dict[str, Any] = {}
    seeds: int = Field(default=1, ge=1)
    """The number of seeds if --seeds is not given."""
    override: tuple[Override, ...] = ()
    stand_in: tuple[StandIn, ...] = ()


class MetricOverride(Section):
    """Another figure for the experiments that have these labels."""

    when: When = {}
    figure: Labels


class Metric(Section):
    """A number of each experiment. It has exactly one of figure, measure and of."""

    figure: Labels = ()
    """A name in the final results; of several the largest counts."""
    override: tuple[MetricOverride, ...] = ()
    """Experiments with another figure; the last that fits counts."""
    measure: str | None = None
    """A function of the run, by its name in measures/."""
    by: str | None = None
    """An axis whose labels change no settings: the measure gets the label, for example a part of a curve."""
    of: tuple[str, ...] = ()
    """The mean of these other metrics."""
    times: float = 1.0
    per_round: bool = False
    minus: dict[str, str] = {}
    """Subtract the same metric at the place that has these labels."""
    rank: str | None = None
    """Rank among the labels of this axis, 1 is best; equal values share the better rank."""
    mean: tuple[str, ...] = ()
    """Take the mean over all labels of these axes."""
    where: When = {}
    """Only for these labels."""
    better: Literal["more", "less", "neither"] = "more"
    digits: int = Field(2, ge=0, le=6)
    printed: str | None = None
    """Its name in the paper, if different."""

    @model_validator(mode="after")
    def _one_source(self) -> Metric:
        if sum(map(bool, (self.figure, self.measure, self.of))) != 1:
            raise ValueError("needs one of figure, measure and of")
        if self.override and not self.figure:
            raise ValueError("override needs figure, not measure or of")
        return self

    @property
    def less_is_better(self) -> bool:
        """Whether less is better; of a rank it always is."""
        return self.rank is not None or self.better == "less"


class Layout(Section):
    rows: tuple[str, ...]
    columns: tuple[str, ...]


class PrintedPlace(Section):
    """Where a published number is found in printed/: templates in which {axis} is the label."""

    dataset: str = "{dataset}"
    setting: str = "-"
    method: str = "{method}"
    instead: dict[str, str] = {}
    """What a filled template is called in the paper: { "attack=none" = "benign" }."""
    omits: tuple[str, ...] = ()
    """Published metrics that are computed from the others (margins), and are not read."""


class ChartSpec(Section):
    """A chart beside the table: accuracy over the rounds, or a metric along an axis, one line for each
    combination of the other labels; or a picture of where the models look (grad-cam)."""

    kind: Literal["rounds", "along", "matrix", "grad-cam"]
    axis: str | None = None
    metric: str | None = None
    figure: str = "accuracy"
    """Of kind rounds: the figure of each round that is drawn, or a recorded table, its mean over the clients.
    Of kind matrix: the recorded table whose last round is drawn."""
    where: When = {}


class Claim(Section):
    """A claim of the paper, and how to check it (claims.py)."""

    says: str
    check: Literal["best", "worst", "beats", "above", "below", "rises", "falls", "within", "steady"]
    metric: str | None = None
    axis: str | None = None
    label: str | None = None
    over: tuple[str, ...] = ()
    by: float = 0.0
    factor: float = Field(1.0, ge=1)
    """For beats and within: a factor on the smaller of the two."""
    value: float | None = None
    where: When = {}
    least: float = Field(1.0, gt=0, le=1)
    """The share of the cases in which it must hold."""


class Study(Section):
    key: str = ""
    """fedcap/table-1: from the file's name."""
    paper: str
    title: str
    printed: str | None = None
    notes: tuple[str, ...] = ()
    variants: bool = False
    """Whether paper and released code differ in what decides this result, so both should run."""
    fused: bool = True
    """False where time is the result."""
    config: dict[str, Any]
    axes: dict[str, dict[str, dict[str, Any]]]
    override: tuple[Override, ...] = ()
    skip: tuple[Skip, ...] = ()
    on_request: tuple[Skip, ...] = ()
    """Labels that are left out unless --only names them."""
    authors: tuple[Override, ...] = ()
    stand_in: tuple[StandIn, ...] = ()
    metrics: dict[str, Metric]
    layout: Layout
    print: PrintedPlace = PrintedPlace()
    show: tuple[ChartSpec, ...] = ()
    claims: tuple[Claim, ...]
    scale: dict[Literal["smoke", "quick", "full"], Scale]

    @property
    def name(self) -> str:
        """Table 1, or Fig. 7."""
        kind, _, number = self.key.partition("/")[2].partition("-")
        return f"Table {self.printed or number}" if kind == "table" else f"Fig. {number}"

    @model_validator(mode="after")
    def _consistent(self) -> Study:
        for where, when in self._conditions():
            self.check_labels(when, where)
        for name in (*self.layout.rows, *self.layout.columns):
            if name not in (*self.axes, "metric"):
                raise ValueError(f"layout: there is no axis '{name}'{suggest(name, [*self.axes, 'metric'])}")
        if not self.metrics:
            raise ValueError("metrics: the study has no metric")
        for claim in self.claims:
            self._check_claim(claim)
        for metric in self.metrics.values():
            for other in metric.of:
                if other not in self.metrics:
                    raise ValueError(f"metrics: there is no '{other}'{suggest(other, self.metrics)}")
        if missing := {"smoke", "quick"} - self.scale.keys():
            raise ValueError(f"scale.{sorted(missing)[0]} is missing")
        return self

    def _conditions(self) -> list[tuple[str, Mapping[str, Labels]]]:
        """Return all entries that name axes and labels."""
        found: list[tuple[str, Mapping[str, Labels]]] = [
            ("override", one.when) for one in (*self.override, *self.authors)
        ]
        found += [("on_request", one.when) for one in self.on_request]
        found += [("skip", one.when) for one in self.skip] + [("stand_in", one.when) for one in self.stand_in]
        found += [(f"claims ({one.says})", one.where) for one in self.claims] + [
            ("show", one.where) for one in self.show
        ]
        for metric, one in self.metrics.items():
            found += [(f"metrics.{metric}", one.where), (f"metrics.{metric}", one.minus)]
            found += [(f"metrics.{metric}", scored.when) for scored in one.override]
            found += [
                (f"metrics.{metric}", {axis: ()}) for axis in (*one.mean, *filter(None, [one.rank, one.by]))
            ]
        for name, scale in self.scale.items():
            found += [(f"scale.{name}", scale.keep)]
            found += [(f"scale.{name}", one.when) for one in scale.override] + [
                (f"scale.{name}", one.when) for one in scale.stand_in
            ]
        return found

    def check_labels(self, when: Mapping[str, Labels], where: str) -> None:
        for axis, labels in when.items():
            if axis not in self.axes:
                raise ValueError(f"{where}: there is no axis '{axis}'{suggest(axis, self.axes)}")
            for label in as_labels(labels):
                if label not in self.axes[axis]:
                    raise ValueError(f"{where}: {axis} has no '{label}'{suggest(label, self.axes[axis])}")

    def _check_claim(self, claim: Claim) -> None:
        where = f"claims ({claim.says})"
        if claim.metric is not None and claim.metric not in self.metrics:
            raise ValueError(
                f"{where}: there is no metric '{claim.metric}'{suggest(claim.metric, self.metrics)}"
            )
        if claim.metric is None and len(self.metrics) > 1:
            raise ValueError(f"{where}: name the metric")
        labels = (*claim.over, *filter(None, [claim.label]))
        if claim.check in ("above", "below") and claim.value is None:
            raise ValueError(f"{where}: {claim.check} needs a value")
        if claim.check not in ("above", "below") and claim.axis is None:
            raise ValueError(f"{where}: {claim.check} needs an axis")
        if claim.label is None and (
            claim.check in ("best", "worst", "beats") or claim.check == "within" and not claim.over
        ):
            raise ValueError(f"{where}: {claim.check} needs a label")
        if claim.axis is not None:
            self.check_labels({claim.axis: labels}, where)


def as_labels(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else tuple(labels)


def label_text(axis: str, label: str) -> str:
    """Return a label for people: a bare number gets its axis, as in beta 0.1 or malicious 10%."""
    return f"{axis} {label}" if re.fullmatch(r"[\d.-]+%?|yes|no", label) else label


def matches(when: Mapping[str, Labels], at: Mapping[str, str]) -> bool:
    return all(at.get(axis) in as_labels(labels) for axis, labels in when.items())


def keys() -> list[str]:
    """Return the keys of all studies, such as fedcap/table-1, by paper, tables before figures."""
    names = [
        file.name.removesuffix(".toml")
        for file in files("holdfast.reproduction.studies").iterdir()
        if file.name.endswith(".toml")
    ]
    return sorted((_key(name) for name in names), key=_order)


def _key(stem: str) -> str:
    paper, kind, number = stem.rpartition("-")[0].rpartition("-")[0], *stem.split("-")[-2:]
    return f"{paper}/{kind}-{number}"


PAPERS = ("fedcap", "fedas", "c-pfl", "fedcom", "fedcpa")


def _order(key: str) -> tuple[int, bool, int, str]:
    paper, _, what = key.partition("/")
    kind, _, number = what.partition("-")
    digits = "".join(c for c in number if c.isdigit())
    return (
        (PAPERS.index(paper) if paper in PAPERS else len(PAPERS)),
        kind != "table",
        int(digits or 0),
        number,
    )


def find(paper: str, what: str | None = None) -> list[Study]:
    """Return the studies of a paper, or one of them: I, 1, table-1, "Table I", fig-7 or figure-7."""
    known = keys()
    papers = list(dict.fromkeys(key.partition("/")[0] for key in known))
    wanted = paper.lower().replace("cpfl", "c-pfl").replace("c_pfl", "c-pfl")
    if wanted not in papers:
        raise ConfigError(f"no paper '{paper}'{suggest(wanted, papers)}")
    mine = [key for key in known if key.startswith(f"{wanted}/")]
    if what is not None:
        name = _normal(what)
        chosen = [key for key in mine if key.partition("/")[2] == name]
        if not chosen:
            there = [key.partition("/")[2] for key in mine]
            raise ConfigError(f"{wanted} has no '{what}' with results; choose one of {', '.join(there)}")
        mine = chosen
    return [read(key) for key in mine]


_ROMAN = {"i": "1", "ii": "2", "iii": "3", "iv": "4", "v": "5"}


def _normal(what: str) -> str:
    text = what.lower().replace(".", "").replace("_", "-").replace(" ", "-").replace("figure", "fig")
    kind, _, number = text.rpartition("-")
    if not kind:
        kind, number = (
            ("fig", text.removeprefix("fig"))
            if text.startswith("fig")
            else ("table", text.removeprefix("table"))
        )
    return f"{kind.strip('-')}-{_ROMAN.get(number, number)}"


def read(key: str) -> Study:
    return make({**_loaded(key.replace("/", "-")), "key": key})


def _loaded(stem: str) -> dict[str, Any]:
    table = tomllib.loads((files("holdfast.reproduction.studies") / f"{stem}.toml").read_text())
    like = table.pop("like", None)
    return table if like is None else completed(table, _loaded(like), stem)


def make(table: Mapping[str, Any]) -> Study:
    try:
        return Study(**table)
    except INVALID as error:
        raise ConfigError(explain(error, Study, str(table.get("key", "study")))) from None


def chosen_labels(study: Study, scale: Scale, only: Sequence[str]) -> dict[str, list[str]]:
    """Return the labels of every axis that run: those that the scale keeps, or those that --only names."""
    kept = {
        axis: [label for label in labels if label in scale.keep.get(axis, labels)]
        for axis, labels in study.axes.items()
    }
    for one in study.on_request:
        for axis, labels in one.when.items():
            kept[axis] = [label for label in kept[axis] if label not in as_labels(labels)]
    for choice in only:
        axis, separator, text = choice.partition("=")
        if not separator or axis not in study.axes:
            raise ConfigError(
                f"--only {choice}: write axis=label,label; the axes of {study.key} are"
                f" {', '.join(study.axes)}"
            )
        wanted = [label.strip() for label in text.split(",")]
        for label in wanted:
            if label not in study.axes[axis]:
                raise ConfigError(
                    f"--only {choice}: {axis} has no '{label}'{suggest(label, study.axes[axis])}"
                )
        kept[axis] = [label for label in study.axes[axis] if label in wanted]
    return kept
