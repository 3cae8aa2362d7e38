"""Which trials a comparison makes: as many for each method, from its own range, never with the report's
seeds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import Part, build, find, parts
from holdfast.sweeps.grid import configs
from holdfast.tuning.space import Candidate, SearchSpace, draw

DATA = {"split": {"train": 0.6, "validation": 0.2, "test": 0.2}}


def search(budget: int = 4, under_attack: bool = False, **table: Any) -> SearchSpace:
    return SearchSpace({"data": DATA, **table}, budget, under_attack)


def by_label(found: SearchSpace) -> dict[str, Candidate]:
    return {candidate.label: candidate for candidate in found.candidates}


@pytest.mark.parametrize("name", sorted(parts("method")))
def test_declared_search_values_are_valid_settings(name: str) -> None:
    declared = find("method", name).search
    assert set(declared) <= set(find("method", name).model_fields)
    for setting, values in declared.items():
        assert len(set(values)) == len(values) > 1
        for value in values:
            part: Part = build("method", {"name": name, setting: value})
            assert part.settings()[setting] == value


def test_every_method_has_the_same_number_of_trials() -> None:
    found = by_label(
        search(4, sweep={"method.name": ["fedavg", "fedprox", "ditto", "fedcap"], "seed": [0, 1]})
    )
    assert {label: (len(c.trials), c.possible) for label, c in found.items()} == {
        "fedavg": (4, 5),
        "fedprox": (4, 12),
        "ditto": (4, 12),
        "fedcap": (4, 81),
    }
    assert found["fedprox"].ranges["train.lr"] == [0.002, 0.01, 0.05]
    assert set(found["fedcap"].ranges) == {"train.lr", "method.alpha", "method.phi", "method.lam"}


def test_a_method_with_few_settings_gets_more_learning_rates() -> None:
    """Within the same bounds, the config's own among them; what the user lists is left as it is, and a line
    may then have fewer trials."""
    found = by_label(search(20, train={"lr": 0.1}, sweep={"method.name": ["fedavg", "ditto"]}))
    assert {label: len(c.trials) for label, c in found.items()} == {"fedavg": 20, "ditto": 20}
    rates = found["fedavg"].ranges["train.lr"]
    assert (
        len(set(rates)) == 21
        and rates == sorted(rates)
        and (rates[0], rates[10], rates[-1]) == (0.02, 0.1, 0.5)
    )
    assert found["ditto"].ranges["train.lr"] == [0.02, 0.0447, 0.1, 0.224, 0.5]  # times four of lam
    listed = search(20, tune={"train.lr": [0.1, 0.2]}, method="fedavg").candidates[0]
    assert len(listed.trials) == listed.possible == 2


def test_draws_do_not_repeat_and_are_balanced() -> None:
    ranges = {"lr": [1, 2], "mu": [1, 2, 3, 4]}
    all_of_them = {(lr, mu) for lr in (1, 2) for mu in (1, 2, 3, 4)}
    for seed in range(20):
        drawn = [tuple(settings.values()) for settings in draw(ranges, 100, Key(seed))]
        assert set(drawn) == all_of_them and len(drawn) == 8
        assert drawn[:3] == [tuple(settings.values()) for settings in draw(ranges, 3, Key(seed))]
        assert Counter(lr for lr, _ in drawn[:4]) == {1: 2, 2: 2} and Counter(mu for _, mu in drawn[:4]) == {
            1: 1,
            2: 1,
            3: 1,
            4: 1,
        }
    assert len({str(draw(ranges, 4, Key(seed))) for seed in range(20)}) > 10  # by chance, for all that
    assert draw({}, 5, Key(0)) == [{}]


def test_draws_of_a_method_do_not_depend_on_other_methods() -> None:
    alone, beside = (
        by_label(search(sweep={"method.name": names}))["ditto"].trials
        for names in (["ditto"], ["fedavg", "ditto"])
    )
    assert alone == beside


def test_the_tune_section_takes_precedence() -> None:
    own = {"ditto": {"lam": [0.3, 3.0], "train.lr": [0.5]}, "fedprox": {"method.mu": [0.9]}}
    tune = {"train.lr": [0.1, 0.1, 0.2], "method.lam": [7.0], **own}
    found = by_label(search(tune=tune, sweep={"method.name": ["fedavg", "ditto", "fedprox", "fedcap"]}))
    assert found["fedavg"].ranges == {"train.lr": [0.1, 0.2]}
    assert found["ditto"].ranges == {"train.lr": [0.5], "method.lam": [0.3, 3.0]}
    assert found["fedprox"].ranges == {"train.lr": [0.1, 0.2], "method.mu": [0.9]}
    assert found["fedcap"].ranges["method.lam"] == [7.0]


def test_axes_of_the_sweep_are_not_searched() -> None:
    found = by_label(search(sweep={"train.lr": [0.1, 0.2], "method.name": ["fedavg", "ditto"]}))
    assert list(found) == ["lr=0.1 fedavg", "lr=0.1 ditto", "lr=0.2 fedavg", "lr=0.2 ditto"]
    assert found["lr=0.2 fedavg"].trials == ({},) and set(found["lr=0.2 ditto"].ranges) == {"method.lam"}


def test_trials_have_a_seed_of_their_own_and_no_attack() -> None:
    sweep = {"method.name": ["fedavg", "ditto"], "attack.name": ["none", "ipm", "sign-flip"]}
    found = search(2, attack={"fraction": 0.2}, seed=5, sweep=sweep)
    assert list(by_label(found)) == ["fedavg", "ditto"] and found.seeds == [5, 6, 7]
    assert {(config.seed, config.attack) for _, config in found.cells()} == {(1000, None)}
    against = search(2, True, attack={"fraction": 0.2}, tune={"seed": 9}, sweep=sweep)
    assert list(by_label(against))[:3] == ["fedavg none", "fedavg ipm", "fedavg sign-flip"]
    assert [c.attack and c.attack["name"] for _, c in against.cells()[:6]] == [
        None,
        None,
        "ipm",
        "ipm",
        "sign-flip",
        "sign-flip",
    ]
    assert {config.seed for _, config in against.cells()} == {9}


def test_the_report_is_the_sweep_with_overrides() -> None:
    found = search(sweep={"method": ["fedavg", "ditto"], "attack": ["none", "ipm"]})
    table = found.tuned([{"train.lr": 0.1}, {"train.lr": 0.2, "method.lam": 3.0}])
    made = {
        label: (config.train.lr, config.parts().method.settings().get("lam"))
        for label, config in configs(table)
    }
    assert len(made) == 12 and made["fedavg ipm seed=2"] == (0.1, None)
    assert made["ditto none seed=0"] == made["ditto ipm seed=1"] == (0.2, 3.0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"data": {}}, "never on test data; set for example data.split"),
        ({"tune": {"seed": 2}}, "tune.seed: 2 is also a seed of the report"),
        ({"tune": {"train.lr": []}}, "tune.train.lr: needs a list"),
        ({"tune": {"ditto": {"lam": 1.0}}}, "tune.ditto.lam: needs a list"),
        ({"tune": {"dito": {"lam": [1.0]}}}, "unknown key 'tune.dito.lam'; did you mean 'ditto'"),
        ({"tune": {"method.lamb": [1.0]}}, "unknown key 'tune.method.lamb'; did you mean 'lam'"),
        ({"tune": {"ditto": {"lamb": [1.0]}}}, "unknown key 'tune.ditto.lamb'; did you mean 'lam'"),
        (
            {"tune": {"fedprox": {"mv": [1.0]}}},
            "unknown key 'tune.fedprox.mv'; did you mean 'mu'",
        ),  # also where it is not compared
        (
            {"tune": {"data.clients": [5, 10]}},
            "tune.data.clients: all trials use the data, attack and evaluation of the config",
        ),
        ({"tune": {"ditto": {"attack.fraction": [0.1]}}}, "tune.ditto.attack.fraction: all trials use"),
        ({"tune": {"evaluate.unselected": ["deliver"]}}, "tune.evaluate.unselected: all trials use"),
        ({"tune": {"ditto": {"lam": [-1.0]}}}, "method.lam: input should be greater than or equal to 0"),
        ({"tune": 3}, "tune: must be a table"),
        ({"evaluate": {"models": ["global"]}}, 'add "personal" to evaluate.models'),
        ({"method": find("method", "ditto")()}, "give method ditto by its name"),
        ({"tune": {"train.lr": [float(i) for i in range(1, 50000)]}}, "too many to draw from"),
        ({"trian": {}}, "unknown key 'trian'"),
    ],
)
def test_wrong_tune_sections_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=".*") as said:
        search(**{"method": "ditto", **table}).cells()
    assert message in str(said.value) and "seed=" not in str(said.value)


def test_a_budget_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="--budget 0"):
        search(0)
