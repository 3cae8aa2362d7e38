"""Everything goes with everything: each pair of a method, an aggregator, a wrapper and an attack plays at
least once. What is registered joins by itself; pairs that make no sense must be refused in one line, before
anything runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError
from tests.checks.attack_cases import QUICK
from tests.helpers import built_in, run_all, tiny

FACTORS: dict[str, tuple[str | None, ...]] = {
    "method": tuple(built_in("method")),
    "aggregator": tuple(built_in("aggregator")),
    "wrapper": (None, *built_in("wrapper")),
    "attack": (None, *built_in("attack")),
}
Choice = tuple[str | None, ...]
Pair = tuple[tuple[int, str | None], tuple[int, str | None]]
SETTINGS: dict[str, dict[str, Any]] = {
    "backdoor": {"size": 2},
    "gas": {"p": 5},
    "deepsight": {"samples": 10},
    **QUICK,
}
"""What does not fit images of 8x8 or a network of a few hundred parameters by default, or takes long."""


def table_of(choice: Choice) -> dict[str, Any]:
    method, rule, wrapper, attack = choice
    table: dict[str, Any] = {
        "method": method,
        "attack": attack and {"name": attack, **SETTINGS.get(attack, {})},
        "data": {"clients": 16, "partition": {"name": "iid", "samples_per_client": 8}, "root": 20},
        "aggregator": {
            "name": rule,
            **SETTINGS.get(rule or "", {}),
            "f": 1,
            "wrap": [{"name": wrapper, **SETTINGS.get(wrapper, {})}] if wrapper else [],
        },
        "train": {"rounds": 2},
    }
    if method and not built_in("method")[method].reduces:
        del table["aggregator"]
    return table


def refused(choice: Choice) -> bool:
    """Whether the combination makes no sense; then it is refused by one line."""
    try:
        tiny(**table_of(choice)).parts()
    except ConfigError as error:
        assert "\n" not in str(error)
        return True
    return False


def pairs_of(choice: Choice) -> set[Pair]:
    return set(itertools.combinations(enumerate(choice), 2))


SENSELESS = {
    ("foolsgold", "bucketing"),
    ("foolsgold", "foundation"),
    ("foolsgold", "gas"),
    ("centered-clip", "gas"),
    ("fedcpa", "gas"),
    ("deepsight", "gas"),
}
"""Rules that remember clients or coordinates, in wrappers that mix them anew in every round; and one that
needs whole models."""
HEADLESS = {"c-pfl", "fedas", "fedbabu", "fedper", "fedrep"}
"""Methods in which the head does not travel, which `deepsight` finds out when it sees the network."""


def sensible(choice: Choice) -> bool:
    return choice[1:3] not in SENSELESS and not (choice[0] in HEADLESS and choice[1] == "deepsight")


def covering() -> Iterator[Choice]:
    """Few combinations in which every pair occurs: each is the best of some drawn around a pair that is still
    missing."""
    luck, factors = random.Random(0), list(FACTORS.values())
    possible = [choice for choice in itertools.product(*factors) if sensible(choice)]
    missing = set().union(*map(pairs_of, possible))
    for pair in sorted(missing, key=repr):
        if pair not in missing:
            continue
        fixed = dict(pair)
        drawn = [
            tuple(fixed.get(i, luck.choice(factor)) for i, factor in enumerate(factors)) for _ in range(60)
        ]
        best = max((c for c in drawn if sensible(c)), key=lambda choice: len(pairs_of(choice) & missing))
        missing -= pairs_of(best)
        yield best
    assert not missing


CHOICES = list(covering())


def test_only_what_makes_no_sense_is_refused() -> None:
    rules, wrappers = FACTORS["aggregator"], FACTORS["wrapper"]
    assert {
        (rule, wrapper) for rule in rules for wrapper in wrappers if refused(("fedavg", rule, wrapper, None))
    } == SENSELESS
    assert not any(map(refused, CHOICES))


def check(choices: list[Choice], out: Path) -> None:
    for choice, run in zip(choices, run_all([table_of(choice) for choice in choices], out), strict=True):
        assert run.round in (2, 3) and run.final["accuracy"] is not None, choice
        assert all(torch.isfinite(value.double()).all() for value in run.state().values()), choice


def test_a_sample_of_all_combinations(tmp_path: Path, quick_disk: None) -> None:
    check(CHOICES[:: max(1, len(CHOICES) // 30)], tmp_path)


@pytest.mark.slow
def test_all_combinations(tmp_path: Path, quick_disk: None) -> None:
    for place in range(0, len(CHOICES), 40):
        check(CHOICES[place : place + 40], tmp_path / str(place))
