"""Lists the experiments of a study: every combination of labels, seeds and variants, as configs."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.registry import parts
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import PART_SECTIONS, assign, rank
from holdfast.reproduction.study import (
    SCALES,
    VARIANTS,
    Override,
    Scale,
    StandIn,
    Study,
    chosen_labels,
    matches,
)
from holdfast.sweeps.grid import MOST_CELLS, copied, flatten

AxisLabels = dict[str, str]
"""A place in the table: its label on every axis, and on the axis `variant` where both variants run."""


@dataclass(frozen=True)
class StudyRequest:
    """The options of `holdfast reproduce`."""

    scale: str = "quick"
    seeds: int | None = None
    """None means as many as the scale says."""
    variant: str = "paper"
    """`card` is the name of `paper` in version 0.1."""
    only: tuple[str, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()
    """--set: keys and values, for every experiment."""
    stand_ins: bool = False
    """Use stand-ins also at full scale."""

    def __post_init__(self) -> None:
        if self.variant == "card":
            object.__setattr__(self, "variant", "paper")


@dataclass(frozen=True)
class PlannedRun:
    """One experiment at its place in the table. Places with the same config share one run."""

    at: AxisLabels
    seed: int
    label: str
    config: Config


class StudyGrid:
    """All planned runs of a study. Those with the same config run once (`to_run`)."""

    def __init__(self, study: Study, request: StudyRequest):
        if request.scale not in SCALES:
            raise ConfigError(f"--scale {request.scale}: choose {', '.join(SCALES)}")
        if request.variant not in (*VARIANTS, "both"):
            raise ConfigError(f"--variant {request.variant}: choose {', '.join(VARIANTS)} or both")
        self.study, self.scale = study, study.scale.get(_known(request.scale), Scale())
        self.seeds = self.scale.seeds if request.seeds is None else request.seeds
        if self.seeds < 1:
            raise ConfigError(f"--seeds {self.seeds}: at least 1")
        self.request = replace(request, seeds=self.seeds)
        self.labels = chosen_labels(study, self.scale, request.only)
        self.variants = VARIANTS if request.variant == "both" else (request.variant,)
        many = math.prod(map(len, self.labels.values())) * len(self.variants) * self.seeds
        if many > MOST_CELLS:
            raise ConfigError(
                f"{study.key}: {many:,} experiments are more than the limit of {MOST_CELLS:,}; take fewer"
                " seeds or labels"
            )
        self.planned_runs = [planned for at in self._places() for planned in self._seeded(at)]
        if not self.planned_runs:
            raise ConfigError(f"{study.key}: no experiments are left; keep more labels with --only")

    def _places(self) -> Iterable[AxisLabels]:
        for labels in itertools.product(*self.labels.values()):
            at = dict(zip(self.labels, labels, strict=True))
            if not any(matches(one.when, at) for one in self.study.skip):
                for variant in self.variants:
                    yield {**at, "variant": variant} if len(self.variants) > 1 else at

    def _seeded(self, at: AxisLabels) -> list[PlannedRun]:
        table = self._table(at)
        runs = []
        for seed in range(self.seeds):
            names = [_label_of_variant(name) if axis == "variant" else name for axis, name in at.items()]
            label = " ".join([*names, f"seed={seed}"])
            try:
                config = make_config({**table, "seed": seed})
                config.parts()
            except HoldfastError as error:
                raise type(error)(f"{error} (in {self.study.key}, cell '{label}')") from None
            runs.append(PlannedRun(at, seed, label, config))
        return runs

    def _table(self, at: AxisLabels) -> dict[str, Any]:
        """Return the config at a place: more specific settings come later and win."""
        table = copied(self.study.config)
        for axis, label in at.items():
            if axis != "variant":
                _apply(table, self.study.axes[axis][label])
        authors = at.get("variant", self.variants[0]) == "authors"
        self._override(table, at, self.study.override)
        if authors:
            _as_released(table)
            self._override(table, at, self.study.authors)
        self._override(table, at, self.scale.override)
        _apply(table, self.scale.set)
        for stand_in in self.stand_ins(at):
            _apply(table, stand_in.set)
        _apply(table, dict(self.request.changes))
        return table

    @staticmethod
    def _override(table: dict[str, Any], at: AxisLabels, overrides: Sequence[Override]) -> None:
        for override in overrides:
            if matches(override.when, at):
                _apply(table, override.set)

    def stand_ins(self, at: AxisLabels) -> list[StandIn]:
        """Return the stand-ins at a place; those of the scale replace those of the study."""
        if self.request.scale == "full" and not self.request.stand_ins:
            return []
        return [one for one in self.scale.stand_in or self.study.stand_in if matches(one.when, at)]

    @property
    def substitutes(self) -> list[str]:
        """Which dataset replaces which, in words."""
        words = {}
        for planned in self.planned_runs:
            for one in self.stand_ins(planned.at):
                words[f"{one.name} for {' '.join(planned.at[axis] for axis in one.when) or 'all data'}"] = (
                    True
                )
        return list(words)

    def to_run(self) -> list[tuple[str, Config]]:
        """Return (label, config) of every different experiment."""
        found: dict[str, tuple[str, Config]] = {}
        for planned in self.planned_runs:
            found.setdefault(identity(planned.config), (planned.label, planned.config))
        return list(found.values())


def _label_of_variant(variant: str) -> str:
    """Return a variant's name in the label of a run: that of version 0.1, whose reproductions can be
    continued."""
    return "card" if variant == "paper" else variant


def identity(config: Config) -> str:
    return json.dumps(config.plain(), sort_keys=True, default=str)


def _known(scale: str) -> Any:
    return scale


def _apply(table: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Assign settings, names of parts before their settings; a part given as a whole table replaces the old
    one."""
    for path, value in sorted(_paths(settings).items(), key=lambda pair: rank(pair[0])):
        assign(table, path, copied(value))


def _paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted keys. Nested tables mean the same, but a part's table (partition = { name =
    ... }) is one value."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        whole = not isinstance(value, Mapping) or key.rpartition(".")[2] in PART_SECTIONS or not value
        out |= {key: value} if whole else {f"{key}.{path}": inner for path, inner in _paths(value).items()}
    return out


def _as_released(table: dict[str, Any]) -> None:
    """Set variant = "authors" for every part that has it."""
    for kind in ("method", "aggregator", "attack"):
        section = table.get(kind)
        name = section.get("name") if isinstance(section, Mapping) else section
        field = (
            parts(kind)[name].model_fields.get("variant")
            if isinstance(name, str) and name in parts(kind)
            else None
        )
        if field is not None and "authors" in get_args(field.annotation):
            assign(table, f"{kind}.variant", "authors")


def changed(study: Study, scale: Scale, changes: Sequence[tuple[str, Any]]) -> list[str]:
    """Say what the scale and --set change for all experiments."""
    return [f"{key} = {value}" for key, value in {**flatten(scale.set), **dict(changes)}.items()]
