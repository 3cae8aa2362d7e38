"""Choose the trials of a fair comparison: every line of the report (a method in its setting) gets the same
number of trials from its own ranges.

A config's [tune] section adds to the ranges that the methods declare:

    [tune]
    seed = 1000                       # random seed of all trials
    "train.lr" = [0.01, 0.05]         # for every method
    [tune.ditto]
    lam = [0.1, 1.0]                  # for this method; takes precedence over all else
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import ConfigError, HoldfastError, suggest
from holdfast.core.keys import Key
from holdfast.core.registry import Part, parts
from holdfast.experiment.config import Config, make_config
from holdfast.experiment.config_tables import PART_SECTIONS, assign, rank
from holdfast.sweeps.grid import Settings, combinations, copied, flatten, label

SEED = 1000
REPEATS = 3
AROUND = 5.0
"""Learning rates are tried from the config's divided by this to the config's times this, unless [tune] lists
them."""
GIVEN = ("data", "attack", "evaluate")
"""Sections that are the same for all methods: a method that was tried on easier data would win because of
that."""
_MOST = 10**5  # combinations that can be listed to draw from


@dataclass(frozen=True)
class Candidate:
    """A line of the report: the values of the sweep's axes, apart from seeds and attacks, and the trials for
    it."""

    label: str
    axes: Settings
    table: Settings
    """Its config at the start of the trials: on their seed, and without an attack unless tuning under
    attack."""
    ranges: dict[str, list[Any]]
    trials: tuple[Settings, ...]
    """Settings by path, in the order they were drawn."""

    @property
    def possible(self) -> int:
        return math.prod(map(len, self.ranges.values()))

    def cells(self) -> list[tuple[str, Config]]:
        """Return (label, config) of every trial, checked."""
        out = []
        for settings in self.trials:
            cell = copied(self.table)
            for path in sorted(settings, key=rank):
                assign(cell, path, settings[path])
            out.append(
                (
                    f"{self.label} {label(settings)}".strip(),
                    _made(cell, f"{self.label} {label(settings)}".strip()),
                )
            )
        return out


class SearchSpace:
    """Everything that is tried for a config: the candidates, and the config table of the sweep that will be
    reported."""

    def __init__(self, table: Mapping[str, Any], budget: int, under_attack: bool = False):
        if budget < 1:
            raise ConfigError(f"--budget {budget}: every method needs at least one trial")
        self.budget, self.under_attack = budget, under_attack
        section = _TuneSection.of(table.get("tune", {}))
        self.seed = section.seed
        self.table = _reported(table)
        cells = [(chosen, _made(cell, label(chosen))) for chosen, cell in combinations(self.table)]
        self.seeds = sorted({config.seed for _, config in cells})
        self.attacks = any(config.attack is not None for _, config in cells)
        if self.seed in self.seeds:
            raise ConfigError(f"tune.seed: {self.seed} is also a seed of the report; trials need another one")
        for chosen, config in cells:
            _check(config, label({path: value for path, value in chosen.items() if path != "seed"}))
        self.candidates = self._candidates(section)

    def _candidates(self, section: _TuneSection) -> list[Candidate]:
        tried = copied(self.table)
        tried["sweep"] = {
            path: values for path, values in tried["sweep"].items() if self.tells(path) or path == "override"
        }
        if not self.under_attack:
            tried["attack"] = "none"
        out = []
        for axes, cell in combinations(tried):
            config = _made(cell, label(axes))
            assign(cell, "seed", self.seed)
            ranges = section.ranges(config, axes, self.budget)
            name = label(axes) or config.parts().method.name
            out.append(
                Candidate(
                    name,
                    axes,
                    cell,
                    ranges,
                    tuple(draw(ranges, self.budget, Key(self.seed).fold("tune", name))),
                )
            )
        return out

    def tells(self, path: str) -> bool:
        """Return whether an axis of the sweep distinguishes candidates: seeds never do, attacks only when
        tuning under each attack."""
        return path != "seed" and (self.under_attack or path.split(".")[0] != "attack")

    def cells(self) -> list[tuple[str, Config]]:
        """Return every trial of every candidate, one candidate after the other."""
        return [cell for candidate in self.candidates for cell in candidate.cells()]

    def candidate(self, chosen: Mapping[str, Any]) -> Candidate:
        """Return the candidate that a cell of the report belongs to."""
        mine = {path: value for path, value in chosen.items() if self.tells(path)}
        return next(candidate for candidate in self.candidates if candidate.axes == mine)

    def tuned(self, settings: list[Settings]) -> Settings:
        """Return the config of the report: the given sweep, and an override for each candidate with its
        chosen settings."""
        out = copied(self.table)
        chosen = [
            {"when": _conditions(candidate.axes), "set": dict(best)}
            for candidate, best in zip(self.candidates, settings, strict=True)
            if best
        ]
        out["sweep"]["override"] = [*out["sweep"].get("override", []), *chosen]
        return out


@dataclass(frozen=True)
class _TuneSection:
    """The [tune] section."""

    seed: int
    common: dict[str, list[Any]]
    own: dict[str, dict[str, list[Any]]]

    @classmethod
    def of(cls, given: Any) -> _TuneSection:
        if not isinstance(given, Mapping):
            raise ConfigError('tune: must be a table of lists, for example "train.lr" = [0.01, 0.05]')
        seed, methods = given.get("seed", SEED), parts("method")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"tune.seed: needs one number, got {seed!r}")
        own = {name: inside for name, inside in given.items() if name in methods}
        common = flatten(
            {name: inside for name, inside in given.items() if name not in own and name != "seed"}
        )
        settings = {setting for method in methods.values() for setting in method.model_fields}
        for path in common:
            first, _, rest = path.partition(".")
            if first not in Config.model_fields or first == "seed":
                raise ConfigError(
                    f"unknown key 'tune.{path}'{suggest(first, [*Config.model_fields, *methods])}"
                )
            if first == "method" and rest.split(".")[0] not in settings:
                raise ConfigError(f"unknown key 'tune.{path}'{suggest(rest, settings)}")
        for name, inside in own.items():
            if not isinstance(inside, Mapping):
                raise ConfigError(f"tune.{name}: must be a table of lists, for example lam = [0.1, 1.0]")
            for key in flatten(inside):
                setting = _path(key).removeprefix("method.").split(".")[0]
                if _path(key).startswith("method.") and setting not in methods[name].model_fields:
                    raise ConfigError(
                        f"unknown key 'tune.{name}.{key}'{suggest(setting, methods[name].model_fields)}"
                    )
        lists = {name: _lists(flatten(inside), f"tune.{name}") for name, inside in own.items()}
        spelt = {
            name: {_path(key): values for key, values in inside.items()} for name, inside in lists.items()
        }
        return cls(seed, _lists(common, "tune"), spelt)

    def ranges(self, config: Config, axes: Settings, budget: int) -> dict[str, list[Any]]:
        """Return what is tried for a method, by path, without the sweep's own axes. A method with few
        settings gets more learning rates, so that it has as many trials as the others."""
        method = config.parts().method
        found = {f"method.{name}": list(values) for name, values in method.search.items()}
        found |= {path: values for path, values in self.common.items() if _has(method, path)}
        found |= self.own.get(method.name, {})
        found = {path: values for path, values in found.items() if path not in axes}
        listed = {path: found.pop(path) for path in ["train.lr"] if path in found}
        if "train.lr" not in axes and not listed:
            listed = {"train.lr": rates(config.train.lr, -(-budget // math.prod(map(len, found.values()))))}
        return listed | found


def rates(middle: float, least: int) -> list[float]:
    """Return an odd number of learning rates, three or more, in equal ratios around that of the config."""
    half = max(1, least // 2)
    return [
        float(f"{middle * float(f'{AROUND ** (step / half):.3g}'):.6g}") for step in range(-half, half + 1)
    ]


def draw(ranges: Mapping[str, list[Any]], budget: int, key: Key) -> list[Settings]:
    """Draw `budget` combinations without repetition, or all where there are fewer; a larger budget begins
    with the same ones. Each next combination uses the values that were tried least so far, with ties broken
    at random: otherwise few trials of many settings could miss whole values, and a method could lose only
    because the right learning rate was never drawn."""
    sizes = [len(values) for values in ranges.values()]
    possible = math.prod(sizes)
    if possible > _MOST:
        raise ConfigError(
            f"tune: {possible:,} combinations are too many to draw from; shorten the lists under [tune]"
        )
    order = key.hash(possible).argsort(stable=True)
    digits = torch.stack(torch.unravel_index(order, sizes)) if sizes else torch.zeros(0, 1, dtype=torch.int64)
    tried = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    taken = torch.zeros(possible, dtype=torch.int64)
    out = []
    for _ in range(min(budget, possible)):
        uses = sum(
            (count[digit] for count, digit in zip(tried, digits, strict=True)),
            start=taken * possible * (budget + 1),
        )
        place = int(uses.argmin())
        taken[place] = 1
        for count, digit in zip(tried, digits[:, place].tolist(), strict=True):
            count[digit] += 1
        out.append(
            {
                path: values[digit]
                for (path, values), digit in zip(ranges.items(), digits[:, place].tolist(), strict=True)
            }
        )
    return out


def _reported(table: Mapping[str, Any]) -> Settings:
    """Return the config as a sweep over the seeds of the report: those that it sweeps over, else its own and
    the next two."""
    out = copied({name: given for name, given in table.items() if name != "tune"})
    sweep = out.get("sweep", {})
    combinations(out)  # raises an error if it is not a sweep
    overrides = sweep.pop("override", [])
    axes = flatten(sweep)
    first = out.pop("seed", 0)
    axes.setdefault("seed", [first + more for more in range(REPEATS)] if isinstance(first, int) else [first])
    return {**out, "sweep": axes | ({"override": overrides} if overrides else {})}


def _check(config: Config, where: str) -> None:
    """Check that trials can be compared."""
    cell, method = f" (in the sweep's cell '{where}')" if where else "", config.parts().method
    if config.data.split.validation <= 0:
        example = "{ train = 0.65, validation = 0.1, test = 0.25 }"
        raise ConfigError(
            "tune compares trials on validation data, never on test data; set for example data.split ="
            f" {example}{cell}"
        )
    if method.deploys not in config.evaluate.models:
        raise ConfigError(
            f'tune compares trials by the model that {method.name} deploys; add "{method.deploys}" to'
            f" evaluate.models{cell}"
        )
    if isinstance(config.method, Part):
        raise ConfigError(
            f"tune: give method {method.name} by its name or as a table, so that its settings can be"
            f" varied{cell}"
        )


def _made(cell: Settings, where: str) -> Config:
    try:
        config = make_config(cell)
        config.parts()
    except HoldfastError as error:
        raise type(error)(f"{error} (in the cell '{where}')" if where else str(error)) from None
    return config


def _path(key: str) -> str:
    """Return the config path of a key under a method's name: one of its settings, unless it begins with a
    section of the config."""
    first, dot, _ = key.partition(".")
    return key if dot and first in Config.model_fields else f"method.{key}"


def _has(method: Part, path: str) -> bool:
    """Return whether a range for all methods applies to this one: it must have the setting."""
    steps = path.split(".")
    return steps[0] != "method" or steps[1] in type(method).model_fields


def _lists(given: Mapping[str, Any], where: str) -> dict[str, list[Any]]:
    for path, values in given.items():
        if path.split(".")[0] in GIVEN:
            raise ConfigError(
                f"{where}.{path}: all trials use the data, attack and evaluation of the config; sweep"
                " over it instead"
            )
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}.{path}: needs a list of values, got {values!r}")
    return {
        path: list({json.dumps(v, sort_keys=True, default=repr): v for v in values}.values())
        for path, values in given.items()
    }


def _conditions(axes: Mapping[str, Any]) -> Settings:
    """Return the conditions of an override. A part given by its name alone may have become a table by
    then."""
    named = {
        path
        for path, value in axes.items()
        if path.rpartition(".")[2] in PART_SECTIONS and isinstance(value, str)
    }
    return {f"{path}.name" if path in named else path: value for path, value in axes.items()}
