"""What studies of a paper have in common, and what the released code does differently."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import ConfigError
from holdfast.reproduction.experiments import StudyGrid, StudyRequest
from holdfast.reproduction.inheritance import completed
from holdfast.reproduction.study import make, read

SHARED: dict[str, Any] = {
    "config": {"train": {"rounds": 100, "lr": 0.1}},
    "axes": {"data": {"A": {"x": 1}, "B": {"x": 2}}, "method": {"M": {}}},
    "override": [
        {"when": {"data": ["A", "B"]}, "set": {"y": 1}},
        {"when": {"data": "B"}, "set": {"y": 2}},
        {"when": {"attack": "IPM"}, "set": {"y": 3}},
        {"set": {"y": 4}},
    ],
    "scale": {"smoke": {"set": {"r": 2, "s": 3}, "stand_in": [{"name": "digits", "set": {}}]}},
}


def test_a_study_inherits_the_labels_it_names_and_their_overrides() -> None:
    own = {
        "axes": {"data": ["A"], "alpha": {"1": {}}, "method": {}},
        "config": {"train": {"lr": 0.2}},
        "override": [{"set": {"y": 5}}],
        "scale": {"smoke": {"set": {"r": 1}, "keep": {"data": ["A"]}}, "quick": {}},
    }
    out = completed(own, SHARED, "p/table-1")
    assert out["axes"] == {"data": {"A": {"x": 1}}, "alpha": {"1": {}}}
    assert out["config"] == {"train": {"rounds": 100, "lr": 0.2}}
    assert [(one.get("when", {}), one["set"]["y"]) for one in out["override"]] == [
        ({"data": ["A"]}, 1),
        ({}, 4),
        ({}, 5),
    ]
    assert "method" not in out["axes"] and completed({"override": []}, SHARED, "p")["override"] == []
    assert out["scale"]["smoke"]["set"] == {"r": 1} and out["scale"]["smoke"]["keep"] == {"data": ["A"]}
    assert out["scale"]["smoke"]["stand_in"] == [{"name": "digits", "set": {}}]
    with pytest.raises(ConfigError, match="p/table-1: the axis 'data' of what it is like has no 'C'"):
        completed({"axes": {"data": ["C"]}}, SHARED, "p/table-1")


def test_the_released_code_is_more_than_the_variants_of_its_parts(small: dict[str, Any]) -> None:
    krum, median = {"aggregator.name": "multi-krum", "aggregator.f": 1}, {"aggregator.name": "median"}
    small["axes"]["method"] = {"M-Krum": krum, "Median": median, "LIE": {"attack.name": "lie"}}
    small["claims"] = [{"says": "-", "check": "above", "value": 0}]
    small["scale"] = {"quick": {}, "smoke": {}}
    small["authors"] = [
        {"set": {"train.shuffle": False}},
        {"when": {"method": "M-Krum"}, "set": {"aggregator.variant": "paper"}},
    ]
    grid = StudyGrid(make(small), StudyRequest(scale="full", variant="both", only=("attack=none",)))
    by = {(cell.at["method"], cell.at["variant"]): cell.config for cell in grid.planned_runs}
    assert [by["Median", v].train.shuffle for v in ("paper", "authors")] == [True, False]
    assert (
        by["M-Krum", "authors"].plain()["aggregator"].get("variant", "paper") == "paper"
    )  # another paper's authors
    assert (
        by["Median", "authors"].plain()["aggregator"].get("variant", "paper") == "paper"
    )  # has other variants
    assert by["LIE", "authors"].plain()["attack"]["variant"] == "authors"


@pytest.mark.parametrize(
    ("at", "tuned"),
    [
        (("CIFAR-10", "SF"), (10, 0.1, 1)),
        (("CIFAR-10", "MR"), (10, 0.3, 10)),
        (("CIFAR-10", "LIE"), (10, 0.2, 0.1)),
        (("CIFAR-10", "IPM"), (10, 0.3, 0.1)),
        (("EMNIST", "SF"), (10, 0.3, 0.1)),
        (("EMNIST", "MR"), (10, 0.1, 0.1)),
        (("EMNIST", "LIE"), (10, 0.1, 0.5)),
        (("EMNIST", "Min-Max"), (10, 0.3, 0.5)),
        (("EMNIST", "IPM"), (10, 0.1, 0.5)),
        (("WISDM", "SF"), (2, 0.2, 0.1)),
        (("WISDM", "MR"), (2, 0.1, 0.1)),
        (("WISDM", "LIE"), (1, 0.2, 0.1)),
        (("WISDM", "Min-Max"), (2, 0.2, 0.5)),
        (("WISDM", "Min-Sum"), (2, 0.3, 0.5)),
        (("WISDM", "IPM"), (2, 0.1, 0.1)),
    ],
)
def test_the_authors_settings_of_fedcap_cell_by_cell(at: tuple[str, str], tuned: tuple[float, ...]) -> None:
    dataset, attack = at
    only = (f"dataset={dataset}", f"attack={attack}", "method=FedCAP")
    method = (
        StudyGrid(read("fedcap/table-1"), StudyRequest(scale="full", only=only))
        .planned_runs[0]
        .config.plain()["method"]
    )
    assert (method["alpha"], method["phi"], method["lam"]) == tuned
