"""The two axes of the map: all registered defences and all registered attacks, with the few settings that
differ from their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.attacks.base import Attack
from holdfast.core.registry import Part, parts

Table = Mapping[str, Any]

F = 0.3
"""The share of attackers that rules assume, and that there are."""
OTHER_F: Mapping[str, float] = {
    "bulyan": 0.2,  # it needs n >= 4 f + 3
    "bucketing": 0.2,  # buckets of two: the rule inside needs n > 4 f
}
Settings = Mapping[str, Mapping[str, Table]]
SETTINGS: Settings = {
    "detector": {"norm": {"threshold": 2.0, "unit": "median"}},  # FedCAP's 10 belongs to its network
}
"""Settings that differ from the defaults, by kind and name of the part. A scale may add to them."""
INSIDE: Mapping[str, str] = dict.fromkeys(("clip", "weak-dp", "crfl", "lfr", "err"), "mean")
"""The rule inside a wrapper. One that shortens, adds noise or rejects is a defence of the mean; one that
prepares updates for a robust rule has the median inside, which is the default."""
GROUPS = ("none", "own", "others", "defence", "data", "backdoor")
"""Groups of attacks, in the order of the tables."""


@dataclass(frozen=True)
class Defence:
    """One row of the map: what it changes in a config."""

    name: str
    kind: str
    """rule, wrapper or detector"""
    part: str
    """The name of the registered part."""
    table: Table
    paper: str = ""

    def laid_over(self, config: Table) -> dict[str, Any]:
        return {**config, **self.table}


@dataclass(frozen=True)
class Attacked:
    """One column of the map."""

    name: str
    group: str
    knows: str = ""
    paper: str = ""
    table: Table = field(default_factory=dict)

    def laid_over(self, config: Table) -> dict[str, Any]:
        if self.name == "none":
            return dict(config)
        return {**config, "attack": {"name": self.name, "fraction": F, **self.table}}


def defences(more: Settings | None = None) -> list[Defence]:
    """All of them: rules, wrappers with a rule inside, detectors beside the mean. `more`: further
    settings."""
    own = _settings(more)
    rules = [
        Defence(name, "rule", name, {"aggregator": _rule(name, name, own)}, of.paper)
        for name, of in _built_in("aggregator").items()
    ]
    wrappers = [_wrapped(name, of, own) for name, of in _built_in("wrapper").items()]
    detectors = [
        Defence(
            f"{name} + mean",
            "detector",
            name,
            {"aggregator": {"name": "mean"}, "detectors": [{"name": name, **own("detector", name)}]},
            of.paper,
        )
        for name, of in _built_in("detector").items()
    ]
    plain = [rule for rule in rules if rule.name == "mean"]
    return [*plain, *(rule for rule in rules if rule.name != "mean"), *wrappers, *detectors]


def _rule(name: str, of: str, own: Callable[[str, str], Table]) -> dict[str, Any]:
    return {"name": name, "f": OTHER_F.get(of, F), **own("aggregator", name)}


def _wrapped(name: str, of: type[Part], own: Callable[[str, str], Table]) -> Defence:
    inside = INSIDE.get(name, "median")
    rule = {**_rule(inside, name, own), "wrap": [{"name": name, **own("wrapper", name)}]}
    return Defence(f"{name}({inside})", "wrapper", name, {"aggregator": rule}, of.paper)


def attacks(more: Settings | None = None) -> list[Attacked]:
    """None, then all of them in the order of their groups."""
    own = _settings(more)
    found = [
        Attacked(name, group_of(of), str(of.model_fields["knows"].default), of.paper, own("attack", name))
        for name, of in _built_in("attack").items()
        if issubclass(of, Attack)
    ]
    return sorted([Attacked("none", "none"), *found], key=lambda one: (GROUPS.index(one.group), one.name))


def _settings(more: Settings | None) -> Callable[[str, str], Table]:
    def of(kind: str, name: str) -> Table:
        return {**SETTINGS.get(kind, {}).get(name, {}), **(more or {}).get(kind, {}).get(name, {})}

    return of


def group_of(attack: type[Attack]) -> str:
    """backdoor: has a trigger. data: changes training data alone. Otherwise the attack changes what is sent,
    and the group says what it knows: its own training, other clients' updates, or the defence."""
    if attack.planted is not Attack.planted or attack.moving is not Attack.moving:
        return "backdoor"
    if not attack.kinds:
        return "data"
    return {"own": "own", "defence": "defence"}.get(str(attack.model_fields["knows"].default), "others")


def chosen(names: Sequence[str] | None, known: Sequence[Any], what: str) -> list[Any]:
    """Those that are named, by the name of the row or of the part; all of them where none is named."""
    if not names:
        return list(known)
    by_part = {part: one for one in known if (part := getattr(one, "part", None))}
    by_name = by_part | {one.name: one for one in known}  # `flame` is a rule and a detector
    for name in names:
        if name not in by_name:
            raise SystemExit(f"there is no {what} {name!r}; there are {', '.join(one.name for one in known)}")
    return [one for one in known if any(by_name[name] is one for name in names)]


def _built_in(kind: str) -> dict[str, type[Part]]:
    return {name: of for name, of in parts(kind).items() if of.__module__.startswith("holdfast.")}
