"""A sweep is a grid of configs: lists multiply, overrides pick cells, labels tell them apart."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from holdfast.aggregators.krum import Krum
from holdfast.core.errors import ConfigError
from holdfast.detectors.norm import Norm
from holdfast.experiment.config import make_config
from holdfast.experiment.object_names import agree, unnamed
from holdfast.methods.ditto import Ditto
from holdfast.methods.fedavg import FedAvg
from holdfast.models.own_module import Model
from holdfast.sweeps.grid import configs, expand
from holdfast.wrappers.nnm import NearestNeighbourMixing


def cells(**table: Any) -> list[tuple[str, dict[str, Any]]]:
    return expand(table)


def my_loss(net: Any, batch: Any) -> Any: ...


class Mine(Ditto):
    """Not registered."""


def test_without_a_sweep_there_is_one_cell() -> None:
    assert cells(seed=3) == [("", {"seed": 3})]
    assert cells(seed=3, sweep={}) == [("", {"seed": 3})]


def test_lists_multiply_in_their_order() -> None:
    found = cells(sweep={"method.name": ["fedavg", "ditto"], "seed": [0, 1], "train.lr": [0.1]})
    assert [label for label, _ in found] == [
        "fedavg seed=0 lr=0.1",
        "fedavg seed=1 lr=0.1",
        "ditto seed=0 lr=0.1",
        "ditto seed=1 lr=0.1",
    ]
    assert found[3][1] == {"method": {"name": "ditto"}, "seed": 1, "train": {"lr": 0.1}}
    for _, table in found:
        make_config(table).parts()


def test_nested_tables_and_dotted_keys_mean_the_same() -> None:
    dotted = cells(sweep={"method.name": ["ditto"], "method.lam": [1.0, 2.0]})
    assert cells(sweep={"method": {"name": ["ditto"], "lam": [1.0, 2.0]}}) == dotted


def test_a_cell_does_not_share_tables_with_another() -> None:
    found = cells(train={"lr": 1.0}, sweep={"seed": [0, 1]})
    found[0][1]["train"]["lr"] = 5.0
    assert found[1][1]["train"]["lr"] == 1.0


def test_a_part_is_named_before_it_is_set() -> None:
    """Naming another part resets its settings, so the order of the axes must not matter."""
    for sweep in (
        {"method.lam": [0.5], "method.name": ["ditto"]},
        {"method.lam": [0.5], "method": ["ditto"]},
    ):
        assert cells(method={"name": "fedprox", "mu": 3}, sweep=sweep)[0][1] == {
            "method": {"name": "ditto", "lam": 0.5}
        }
    found = cells(sweep={"data.partition.beta": [0.5], "data.partition": ["dirichlet"]})
    assert found[0][1]["data"]["partition"] == {"name": "dirichlet", "beta": 0.5}


def test_settings_of_a_part_stay_with_it() -> None:
    found = cells(method={"name": "ditto", "lam": 0.7}, sweep={"method.name": ["ditto", "fedavg"]})
    assert [table["method"] for _, table in found] == [{"name": "ditto", "lam": 0.7}, {"name": "fedavg"}]


def test_overrides_apply_where_their_conditions_hold() -> None:
    override = [
        {"when": {"method.name": "ditto", "seed": 1}, "set": {"method.lam": 1.0}},
        {"when": {"method": {"name": "fedavg"}}, "set": {"train": {"lr": 0.5}}},
        {"set": {"train.rounds": 3}},
    ]
    found = cells(sweep={"method.name": ["fedavg", "ditto"], "seed": [0, 1], "override": override})
    assert [table["method"].get("lam") for _, table in found] == [None, None, None, 1.0]
    assert [table["train"].get("lr") for _, table in found] == [0.5, 0.5, None, None]
    assert all(table["train"]["rounds"] == 3 for _, table in found)


def test_overrides_know_the_defaults() -> None:
    """What is not written down has a value all the same."""
    for when in (
        {"method.name": "fedcap"},
        {"train.rounds": 50},
        {"data.partition.name": "pathological"},
        {"model.name": "auto"},
    ):
        found = cells(sweep={"seed": [0], "override": [{"when": when, "set": {"train.lr": 0.5}}]})
        assert found[0][1]["train"]["lr"] == 0.5, when
    for when in ({"method.lam": 0.1}, {"attack.name": "ipm"}, {"data.partition.classes_per_client": 2}):
        override = [{"when": when, "set": {"train.lr": 0.5}}]
        found = cells(method="local", data={"partition": "iid"}, sweep={"seed": [0], "override": override})
        assert "train" not in found[0][1], when
    by_name = cells(
        method="ditto",
        sweep={"seed": [0], "override": [{"when": {"method.name": "ditto"}, "set": {"method.lam": 0.5}}]},
    )
    assert by_name[0][1]["method"] == {"name": "ditto", "lam": 0.5}


def test_an_override_may_choose_a_part_and_set_it() -> None:
    override = [{"set": {"method.lam": 0.5, "method.name": "ditto"}}]
    assert cells(sweep={"seed": [0], "override": override})[0][1]["method"] == {"name": "ditto", "lam": 0.5}


@pytest.mark.parametrize(
    "sweep, words",
    [
        ([], "must be a table"),
        ({"seed": 3}, "sweep.seed: needs a list"),
        ({"seed": []}, "sweep.seed: needs a list"),
        ({"override": {"set": {"seed": 3}}}, r"\[\[sweep.override\]\]"),
        ({"override": ["x"]}, "expected a table `set`"),
        ({"override": [{"when": {"seed": 1}}]}, "expected a table `set`"),
        ({"override": [{"when": 3, "set": {"seed": 1}}]}, "expected a table `set`"),
        ({"override": [{"wenn": {"seed": 1}, "set": {"seed": 1}}]}, "expected a table `set`"),
        ({"override": [{"when": {"metod.name": "ditto"}, "set": {"seed": 1}}]}, "did you mean 'method'"),
        (
            {"override": [{"when": {"train.lrr": 0.1}, "set": {"seed": 1}}]},
            "unknown key 'sweep.override.when.train.lrr'; did you mean 'lr'",
        ),
        ({"override": [{"when": {"method.lamm": 0.1}, "set": {"seed": 1}}]}, "did you mean 'lam'"),
        ({"override": [{"when": {"data.partition.betta": 0.1}, "set": {"seed": 1}}]}, "did you mean 'beta'"),
        ({"seed.x": [1]}, "'seed' is not a section"),
        ({"metod.name": ["ditto"]}, "unknown key 'sweep.metod'; did you mean 'method'"),
        ({"overide": [{"set": {"seed": 3}}]}, "unknown key 'sweep.overide'; did you mean 'override'"),
    ],
)
def test_mistakes_in_a_sweep_are_refused(sweep: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        cells(seed=3, sweep=sweep)
    assert "\n" not in str(error.value)


def test_an_override_that_no_cell_fits_is_told() -> None:
    def sweep(*overrides: Any) -> dict[str, Any]:
        return {"sweep": {"method.name": ["fedavg", "ditto"], "override": list(overrides)}}

    first = {"when": {"method.name": "ditto"}, "set": {"train.lr": 0.5}}
    second = {"when": {"train.lr": 0.5}, "set": {"train.rounds": 3}}  # fits what the first one set
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configs(sweep(first, second))
    with pytest.warns(UserWarning, match="sweep.override: no cell has method.name = 'local' and seed = 0"):
        configs(sweep({"when": {"method.name": "local", "seed": 0}, "set": {"train.lr": 0.5}}))
    with pytest.raises(ConfigError, match="override.when.method.name: unknown method 'dito'; did you mean"):
        configs(sweep({"when": {"method.name": "dito"}, "set": {"train.lr": 0.5}}))


def test_a_part_is_labelled_as_a_table_that_says_the_same() -> None:
    usual = Ditto().lam
    found = cells(sweep={"method": [Ditto(), Ditto(lam=usual), Ditto(lam=0.5)]})
    tables = ["ditto", {"name": "ditto", "lam": usual}, {"name": "ditto", "lam": 0.5}]
    assert [label for label, _ in found] == [label for label, _ in cells(sweep={"method": tables})]
    assert [label for label, _ in found] == ["ditto", f"ditto lam={usual}", "ditto lam=0.5"]


def test_a_setting_in_the_wrong_section_is_pointed_to_its_own() -> None:
    for table in ({"rounds": 3}, {"sweep": {"rounds": [1, 2]}}, {"data": {"rounds": 3}}):
        with pytest.raises(ConfigError, match="rounds'; did you mean 'train.rounds'"):
            configs(table)
    with pytest.raises(ConfigError, match="unknown key 'train.optimizer'; did you mean 'optimizer'"):
        make_config({"train": {"optimizer": "adam"}})


def test_a_misspelt_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 'sweeep'; did you mean 'sweep'"):
        cells(sweeep={"seed": [0, 1]})


def test_a_misspelt_setting_is_found_in_the_cell() -> None:
    with pytest.raises(ConfigError, match="unknown key 'train.lrr'; did you mean 'lr'"):
        make_config(cells(sweep={"train.lrr": [0.1]})[0][1])
    with pytest.raises(ConfigError, match="did you mean 'lr'. .in the sweep's cell 'lrr=0.1 seed=0'"):
        configs({"sweep": {"train.lrr": [0.1], "seed": [0, 1]}})
    with pytest.raises(ConfigError, match="unknown method 'dito'.*in the sweep's cell 'dito'"):
        configs({"sweep": {"method.name": ["ditto", "dito"]}})


def test_settings_that_all_parts_of_a_kind_have_are_kept() -> None:
    """The same attackers and the same assumptions, whichever attack or rule: else a cell would quietly have
    the defaults."""
    attack = {"name": "lie", "z": 1.0, "fraction": 0.1, "knows": "colluders", "lies": {"count": 2.0}}
    found = [
        table["attack"] for _, table in cells(attack=attack, sweep={"attack.name": ["lie", "ipm", "none"]})
    ]
    assert found[0] == attack and found[1] == {
        "name": "ipm",
        "fraction": 0.1,
        "knows": "colluders",
        "lies": {"count": 2.0},
    }
    assert make_config({"attack": found[2]}).attack is None
    rule = {"name": "norm-bound", "bound": 2.0, "f": 0.3, "wrap": [{"name": "nnm"}]}
    found = [
        table["aggregator"] for _, table in cells(aggregator=rule, sweep={"aggregator.name": ["median"]})
    ]
    assert found == [{"name": "median", "f": 0.3, "wrap": [{"name": "nnm"}]}]


def test_settings_without_a_name_apply_to_the_chosen_part() -> None:
    found = cells(attack={"fraction": 0.1}, sweep={"attack.name": ["lie", "ipm"]})
    assert [table["attack"] for _, table in found] == [
        {"fraction": 0.1, "name": "lie"},
        {"fraction": 0.1, "name": "ipm"},
    ]
    with pytest.raises(ConfigError, match="unknown key 'attack.fracton'; did you mean 'fraction'"):
        configs({"attack": {"fracton": 0.1}, "sweep": {"attack.name": ["lie"]}})


# ---- Python objects in a grid


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.width, self.body = width, nn.Linear(64, width)


class Focal:
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def __call__(self, net: Any, batch: Any) -> Any: ...


def scaled(tau: float) -> Any:
    def loss(net: Any, batch: Any) -> Any:
        return tau

    return loss


@pytest.mark.parametrize(
    "path, values, words",
    [
        (
            "model",
            [Model(Net, head=None), Model(Net(7)), Model(partial(Net, width=9))],
            ["Net head=none", "Net(width=7)", "Net(width=9)"],
        ),
        ("model", [Model(nn.Identity()), Model(nn.Identity())], ["Identity-1", "Identity-2"]),
        (
            "train.loss",
            [my_loss, scaled(0.5), scaled(2.0), Focal(1.5)],
            ["loss=my_loss", "loss=loss(tau=0.5)", "loss=loss(tau=2.0)", "loss=Focal(gamma=1.5)"],
        ),
        (
            "train.loss",
            ["cross-entropy", lambda n, b: 1, lambda n, b: 2],
            ["loss=cross-entropy", "loss=lambda-1", "loss=lambda-2"],
        ),
        (
            "method",
            [FedAvg(), Ditto(), Ditto(lam=0.5), {"name": "ditto", "lam": 0.1}, Mine(lam=2.0)],
            ["fedavg", "ditto", "ditto lam=0.5", "ditto lam=0.1", "Mine lam=2.0"],
        ),
        (
            "aggregator",
            [NearestNeighbourMixing()(Krum(f=0.2)), {"name": "krum"}, {"name": "mean", "wrap": ["nnm"]}],
            ["krum f=0.2 wrap=nnm", "krum", "mean wrap=nnm"],
        ),
        (
            "attack",
            [None, {"name": "lie", "clients": [0, 1], "lies": {"count": 2.0}}],
            ["none", "lie clients=0+1 lies.count=2.0"],
        ),
        ("data.partition", ["iid", {"name": "dirichlet", "beta": 0.3}], ["iid", "dirichlet beta=0.3"]),
        ("privacy", [None, {"clip": 1.0, "noise": 2.0}], ["privacy=none", "clip=1.0 noise=2.0"]),
        ("server.name", ["none", "fedadam"], ["server=none", "fedadam"]),
        ("detectors", [[Norm(), "norm"], []], ["detectors=norm+norm", "detectors=none"]),
        ("data.dir", [Path("/a/b"), None], ["dir=/a/b", "dir=none"]),
        ("method", ["ditto", "ditto"], ["ditto", "ditto #2"]),
    ],
)
def test_labels_are_short_and_another_process_gives_them_too(
    path: str, values: list[Any], words: list[str]
) -> None:
    assert [label for label, _ in expand({"sweep": {path: values}})] == words


def test_configs_distinguish_objects_as_their_labels_do() -> None:
    made = [
        config.plain()["train"]["loss"]
        for _, config in configs({"sweep": {"train.loss": [lambda n, b: 1, lambda n, b: 2]}})
    ]
    assert made[0] != made[1] and all(word.startswith("<") and word.endswith(">") for word in made)
    assert unnamed({"loss": made[0]}) == ["loss"]
    losses = [
        config.plain()["train"]["loss"]
        for _, config in configs({"sweep": {"train.loss": [scaled(1.0), scaled(2.0)]}})
    ]
    assert losses == ["<scaled.<locals>.loss(tau=1.0)>", "<scaled.<locals>.loss(tau=2.0)>"]
    assert make_config({"model": Model(Net, head="body")}).plain()["model"] == "<Model(Net,head=body)>"


def test_older_configs_without_settings_of_objects_are_recognised() -> None:
    for was, wanted in (
        ("<Model>", "<Model(Net)>"),
        ("<loss>", "<loss(tau=1.0)-2>"),
        ("<a>", "<a>"),
        ({"x": [1]}, {"x": [1]}),
    ):
        assert agree(was, wanted)
    for was, wanted in (
        ("<Model(Net)>", "<Model(Other)>"),
        ("<Mod>", "<Model(Net)>"),
        ("a", "a(b)"),
        ([1], [2]),
        ({}, {"x": 1}),
    ):
        assert not agree(was, wanted)
