"""The experiments of a study: every combination of labels, seeds and variants, as configs."""

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

At = dict[str, str]
"""A cell's place: its label on every axis, and on the axis `variant` where both are played."""


@dataclass(frozen=True)
class Wanted:
    """What the user asked for."""

    scale: str = "quick"
    seeds: int | None = None
    """None: as many as the scale says."""
    variant: str = "paper"
    """`card` is the name of `paper` in version 0.1."""
    only: tuple[str, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()
    """--set: keys and values, for every cell."""
    stand_ins: bool = False
    """Also at full scale."""

    def __post_init__(self) -> None:
        if self.variant == "card":
            object.__setattr__(self, "variant", "paper")


@dataclass(frozen=True)
class Cell:
    at: At
    seed: int
    label: str
    config: Config


class Grid:
    """Every cell, and the few configs that differ: cells that are the same experiment are played once."""

    def __init__(self, study: Study, wanted: Wanted):
        if wanted.scale not in SCALES:
            raise ConfigError(f"--scale {wanted.scale}: one of {', '.join(SCALES)}")
        if wanted.variant not in (*VARIANTS, "both"):
            raise ConfigError(f"--variant {wanted.variant}: one of {', '.join(VARIANTS)}, both")
        self.study, self.scale = study, study.scale.get(_known(wanted.scale), Scale())
        self.seeds = self.scale.seeds if wanted.seeds is None else wanted.seeds
        if self.seeds < 1:
            raise ConfigError(f"--seeds {self.seeds}: at least 1")
        self.wanted = replace(wanted, seeds=self.seeds)
        self.labels = chosen_labels(study, self.scale, wanted.only)
        self.variants = VARIANTS if wanted.variant == "both" else (wanted.variant,)
        many = math.prod(map(len, self.labels.values())) * len(self.variants) * self.seeds
        if many > MOST_CELLS:
            raise ConfigError(
                f"{study.key}: {many:,} cells are more than the {MOST_CELLS:,} that are played; take fewer"
                " seeds or labels"
            )
        self.cells = [cell for at in self._places() for cell in self._seeded(at)]
        if not self.cells:
            raise ConfigError(f"{study.key}: nothing is left to play; keep more labels with --only")

    def _places(self) -> Iterable[At]:
        for labels in itertools.product(*self.labels.values()):
            at = dict(zip(self.labels, labels, strict=True))
            if not any(matches(one.when, at) for one in self.study.skip):
                for variant in self.variants:
                    yield {**at, "variant": variant} if len(self.variants) > 1 else at

    def _seeded(self, at: At) -> list[Cell]:
        table = self._table(at)
        cells = []
        for seed in range(self.seeds):
            names = [_label_of_variant(name) if axis == "variant" else name for axis, name in at.items()]
            label = " ".join([*names, f"seed={seed}"])
            try:
                config = make_config({**table, "seed": seed})
                config.parts()
            except HoldfastError as error:
                raise type(error)(f"{error} (in {self.study.key}, cell '{label}')") from None
            cells.append(Cell(at, seed, label, config))
        return cells

    def _table(self, at: At) -> dict[str, Any]:
        """A cell's config: what is more particular comes later and wins."""
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
        _apply(table, dict(self.wanted.changes))
        return table

    @staticmethod
    def _override(table: dict[str, Any], at: At, overrides: Sequence[Override]) -> None:
        for override in overrides:
            if matches(override.when, at):
                _apply(table, override.set)

    def stand_ins(self, at: At) -> list[StandIn]:
        """A scale's own stand-ins replace those of the study."""
        if self.wanted.scale == "full" and not self.wanted.stand_ins:
            return []
        return [one for one in self.scale.stand_in or self.study.stand_in if matches(one.when, at)]

    @property
    def substitutes(self) -> list[str]:
        """What stands in for what, in words."""
        said = {}
        for cell in self.cells:
            for one in self.stand_ins(cell.at):
                said[f"{one.name} for {' '.join(cell.at[axis] for axis in one.when) or 'all data'}"] = True
        return list(said)

    def to_run(self) -> list[tuple[str, Config]]:
        """(label, config) of every experiment, each once."""
        found: dict[str, tuple[str, Config]] = {}
        for cell in self.cells:
            found.setdefault(identity(cell.config), (cell.label, cell.config))
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
    """Names of parts before their settings; a part given as a whole table replaces what was there."""
    for path, value in sorted(_paths(settings).items(), key=lambda pair: rank(pair[0])):
        assign(table, path, copied(value))


def _paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys; nested tables mean the same, but a part's table (partition = { name = ... }) is one
    value."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        whole = not isinstance(value, Mapping) or key.rpartition(".")[2] in PART_SECTIONS or not value
        out |= {key: value} if whole else {f"{key}.{path}": inner for path, inner in _paths(value).items()}
    return out


def _as_released(table: dict[str, Any]) -> None:
    """variant = "authors" for every part that has one."""
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
    """What this scale and --set change for all cells, in words."""
    return [f"{key} = {value}" for key, value in {**flatten(scale.set), **dict(changes)}.items()]
