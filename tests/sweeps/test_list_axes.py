"""Lists in sections are axes, except where a setting is a list by nature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.core.errors import ConfigError
from holdfast.data.handed.data import Data
from holdfast.methods.ditto import Ditto
from holdfast.privacy.settings import PrivacySettings
from holdfast.sweeps.grid import configs, expand
from holdfast.sweeps.list_axes import check_not_swept, laid_over, settled, with_list_axes

ROWS, LABELS = np.arange(40.0).reshape(20, 2), np.arange(20) % 2


@pytest.mark.parametrize(
    "table, axes",
    [
        ({"seed": range(2)}, {"seed": [0, 1]}),
        (
            {"method": ["fedavg", "ditto"], "train": {"rounds": 2, "lr": (0.1, 0.2)}},
            {"method.name": ["fedavg", "ditto"], "train.lr": [0.1, 0.2]},
        ),
        ({"method": {"name": "ditto", "lam": [1.0, 2.0]}}, {"method.lam": [1.0, 2.0]}),
        ({"method": {"name": ["fedprox", "ditto"]}}, {"method.name": ["fedprox", "ditto"]}),
        ({"data": {"partition": {"name": "dirichlet", "beta": [0.1, 1]}}}, {"data.partition.beta": [0.1, 1]}),
        ({"data": {"clients": [4, 8], "root": 0}}, {"data.clients": [4, 8]}),
        ({"data": ["digits", "wine"]}, {"data.name": ["digits", "wine"]}),
        ({"data": [{"clients": 4}, {"clients": 8}]}, {"data": [{"clients": 4}, {"clients": 8}]}),
        ({"detectors": [["norm"], []]}, {"detectors": [["norm"], []]}),
        ({"privacy": {"clip": 1.0, "noise": [0.0, 0.1]}}, {"privacy.noise": [0.0, 0.1]}),
        ({"evaluate": {"metrics": [["auc"], []]}}, {"evaluate.metrics": [["auc"], []]}),
        (
            {"seed": [0, 1], "sweep": {"seed": [5], "method.name": ["fedavg"]}},
            {"method.name": ["fedavg"], "seed": [0, 1]},
        ),
        ({"method": ["fedavg"], "sweep": {"method.name": ["ditto"]}}, {"method.name": ["fedavg"]}),
    ],
)
def test_a_list_for_one_value_is_an_axis(table: dict[str, Any], axes: dict[str, Any]) -> None:
    assert with_list_axes(table)["sweep"] == axes


@pytest.mark.parametrize(
    "table",
    [
        {"detectors": ["norm"]},
        {"evaluate": {"metrics": ["auc"], "targets": [0.5, 0.9], "models": ["global"]}},
        {"attack": {"name": "ipm", "clients": [0, 1]}},
        {"aggregator": {"name": "mean", "wrap": ["nnm"]}},
        {"train": {"availability": {"0": [[1, 2]]}}},
        {"seed": 3, "train": {"lr": 0.1}, "unknown": [1, 2]},
        {"data": [([1.0], [0]), ([2.0], [1])]},
        {"data": {"Berlin": (ROWS, LABELS), "Paris": (ROWS, LABELS)}},
        {"data": [(ROWS, LABELS), (ROWS, LABELS)]},
    ],
)
def test_a_list_by_nature_is_not(table: dict[str, Any]) -> None:
    assert with_list_axes(table) == table


def test_a_table_in_a_list_changes_only_what_it_names() -> None:
    table = with_list_axes(
        {
            "attack": [None, "lie", {"name": "ipm", "eps": 2.0}],
            "method": [Ditto(lam=0.5), {"name": "fedprox", "mu": 1.0}],
        }
    )
    found = expand({**table, "attack": {"fraction": 0.4}})
    assert [label for label, _ in found][::2] == [
        "none ditto lam=0.5",
        "lie ditto lam=0.5",
        "ipm eps=2.0 ditto lam=0.5",
    ]
    assert found[0][1]["attack"] is None and found[2][1]["attack"] == {"fraction": 0.4, "name": "lie"}
    assert found[4][1]["attack"] == {"fraction": 0.4, "name": "ipm", "eps": 2.0}
    data = with_list_axes({"data": [{"clients": 4}, {"clients": 8}]})
    made = [config.data for _, config in configs({**data, "data": {"partition": "iid"}})]
    assert [(one.clients, one.partition) for one in made] == [(4, "iid"), (8, "iid")]


def test_a_table_of_a_section_in_a_list_changes_only_what_it_names() -> None:
    base = {"train": {"rounds": 2}, "privacy": {"level": "sample", "noise": 1.0, "clip": 3.0}}
    over = {"train": [{"lr": 0.1}, {"lr": 0.2}], "privacy": [None, {"noise": 0.5}]}
    made = [config for _, config in configs(laid_over(base, over))]
    assert [(one.train.rounds, one.train.lr) for one in made] == [(2, 0.1), (2, 0.1), (2, 0.2), (2, 0.2)]
    assert made[0].privacy is None
    assert made[1].privacy == PrivacySettings(level="sample", noise=0.5, clip=3.0)
    in_a_file = {**base, "sweep": {"privacy": ["none", {"noise": 0.5}]}}
    assert [config.privacy for _, config in configs(in_a_file)] == [made[0].privacy, made[1].privacy]


def test_one_value_for_what_is_swept_is_refused() -> None:
    swept = {"method.name": ["fedavg", "ditto"], "train": {"lr": [0.1]}}
    for sections, key in (({"method": "local"}, "method"), ({"train": {"lr": 0.2}}, "train.lr")):
        with pytest.raises(ConfigError, match=f"^{key}: the config sweeps over it"):
            check_not_swept(sections, swept)
    check_not_swept({"method": ["local"], "train": {"rounds": 2}, "seed": 3}, swept)


def test_whole_datasets_in_a_list_are_an_axis() -> None:
    data = [Data(ROWS, LABELS, clients=2, partition="iid", title=title) for title in ("first", "second")]
    table = laid_over({"data": {"held_out": 1}}, {"data": data})
    found = configs({**table, "model": "mlp", "method": "fedavg"})
    assert [(label, config.data.held_out) for label, config in found] == [
        ("data=first", 1),
        ("data=second", 1),
    ]


def test_keyword_sections_are_laid_over_key_by_key() -> None:
    given = {
        "train": {"rounds": 9, "lr": 0.5},
        "method": {"name": "ditto", "lam": 0.3},
        "sweep": {"seed": [0, 1]},
    }
    assert laid_over(given, {"train": {"rounds": 2}, "method": {"lam": 0.4}}) == {
        "train": {"rounds": 2, "lr": 0.5},
        "method": {"name": "ditto", "lam": 0.4},
        "sweep": {"seed": [0, 1]},
    }
    over = {"seed": [5], "sweep": {"train.lr": [0.1], "override": [{"set": {"seed": 3}}]}}
    assert laid_over(given, over)["sweep"] == {
        "train.lr": [0.1],
        "seed": [5],
        "override": [{"set": {"seed": 3}}],
    }


def test_a_file_gets_whole_sections() -> None:
    """`tune` writes the sweep that repeats it as TOML, which has no values that are laid over others."""
    table = laid_over(
        {"attack": {"fraction": 0.4}}, {"attack": [None, {"name": "ipm", "eps": 2.0}], "seed": [0]}
    )
    plain = settled(table)
    assert plain["sweep"]["attack"] == [None, {"fraction": 0.4, "name": "ipm", "eps": 2.0}]
    assert [cell for _, cell in expand(plain)] == [cell for _, cell in expand(table)]
