"""Studies as they are written, and the experiments they make."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import ConfigError
from holdfast.reproduction.experiments import StudyGrid, StudyRequest
from holdfast.reproduction.study import find, keys, make


def test_accepted_names_of_tables() -> None:
    for name in ("I", "1", "table-1", "Table I", "table_1", "TABLE 1"):
        assert [study.key for study in find("FedCAP", name)] == ["fedcap/table-1"]
    assert [study.key for study in find("fedcap")] == [key for key in keys() if key.startswith("fedcap/")]
    with pytest.raises(ConfigError, match="no paper 'fedcapp'; did you mean 'fedcap'"):
        find("fedcapp")
    with pytest.raises(ConfigError, match="fedcap has no 'table-99'"):
        find("fedcap", "table-99")


def test_the_product_of_the_axes(small: dict[str, Any]) -> None:
    grid = StudyGrid(make(small), StudyRequest(scale="full", seeds=2))
    assert [(cell.at["attack"], cell.at["method"], cell.seed) for cell in grid.planned_runs] == [
        (attack, method, seed)
        for attack in ("none", "IPM")
        for method in ("Mean", "Ditto")
        for seed in (0, 1)
    ]
    assert grid.planned_runs[-1].label == "IPM Ditto seed=1"
    assert (
        grid.planned_runs[-1].config.plain()["attack"]["name"] == "ipm"
        and grid.planned_runs[0].config.attack is None
    )


def test_more_specific_settings_win(small: dict[str, Any]) -> None:
    small["override"] = [
        {"when": {"method": "Ditto", "attack": ["none", "IPM"]}, "set": {"method.lam": 2.0, "train.lr": 0.5}}
    ]
    small["scale"]["quick"]["override"] = [{"when": {"attack": "none"}, "set": {"train.lr": 0.25}}]
    grid = StudyGrid(make(small), StudyRequest(scale="quick", changes=(("train.rounds", 7),)))
    by = {(cell.at["attack"], cell.at["method"]): cell.config for cell in grid.planned_runs}
    assert by["IPM", "Ditto"].plain()["method"]["lam"] == 2.0
    assert [
        by[at].train.lr for at in (("none", "Mean"), ("none", "Ditto"), ("IPM", "Ditto"), ("IPM", "Mean"))
    ] == [0.25, 0.25, 0.5, 0.01]
    assert {config.train.rounds for config in by.values()} == {7}  # not the scale's 1


def test_equal_experiments_run_once(small: dict[str, Any]) -> None:
    small["axes"]["share"] = {"10 %": {"attack.fraction": 0.2}, "30 %": {"attack.fraction": 0.4}}
    small["layout"]["rows"] = ["attack", "share"]
    grid = StudyGrid(make(small), StudyRequest(scale="full"))
    assert (
        len(grid.planned_runs) == 8 and len(grid.to_run()) == 6
    )  # without an attack its fraction says nothing


def test_skipped_kept_and_only(small: dict[str, Any]) -> None:
    small["skip"] = [{"when": {"attack": "none", "method": "Ditto"}}]
    study = make(small)
    assert len(StudyGrid(study, StudyRequest(scale="full")).planned_runs) == 3
    assert [cell.at for cell in StudyGrid(study, StudyRequest(scale="smoke")).planned_runs] == [
        {"attack": "IPM", "method": m} for m in ("Mean", "Ditto")
    ]
    assert [
        cell.at["method"]
        for cell in StudyGrid(
            study, StudyRequest(scale="full", only=("attack=IPM", "method=Ditto"))
        ).planned_runs
    ] == ["Ditto"]
    wrong = {
        "attack=IPN": "attack has no 'IPN'; did you mean 'IPM'",
        "attak=IPM": "the axes of",
        "attack": "write axis=label",
    }
    for only, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            StudyGrid(study, StudyRequest(scale="full", only=(only,)))
    with pytest.raises(ConfigError, match="no experiments are left"):
        StudyGrid(study, StudyRequest(scale="full", only=("attack=none", "method=Ditto")))


def test_labels_on_request_run_only_if_named(small: dict[str, Any]) -> None:
    small["axes"]["method"]["Ditto (mild)"] = {"method.name": "ditto", "method.lam": 0.1}
    small["on_request"] = [{"when": {"method": ["Ditto (mild)"]}}]
    study = make(small)
    for scale in ("full", "quick", "smoke"):
        assert {cell.at["method"] for cell in StudyGrid(study, StudyRequest(scale=scale)).planned_runs} == {
            "Mean",
            "Ditto",
        }
    asked = StudyGrid(study, StudyRequest(scale="full", only=("method=Mean,Ditto (mild)",)))
    assert asked.labels == {"attack": ["none", "IPM"], "method": ["Mean", "Ditto (mild)"]}
    with pytest.raises(ConfigError, match="on_request: method has no 'Dito'; did you mean 'Ditto'"):
        make({**small, "on_request": [{"when": {"method": "Dito"}}]})


def test_a_scale_may_ask_for_several_seeds(small: dict[str, Any]) -> None:
    small["scale"]["quick"]["seeds"] = 3
    seeds = [
        StudyGrid(make(small), StudyRequest(scale=scale, seeds=asked)).seeds
        for scale in ("quick", "full")
        for asked in (None, 2)
    ]
    assert seeds == [3, 2, 1, 2]
    assert {cell.seed for cell in StudyGrid(make(small), StudyRequest(scale="quick")).planned_runs} == {
        0,
        1,
        2,
    }


def test_both_variants_of_the_parts_that_have_them(small: dict[str, Any]) -> None:
    small["axes"]["method"]["FedAS"] = {"method.name": "fedas"}
    grid = StudyGrid(make(small), StudyRequest(scale="smoke", variant="both"))
    variants = {
        (cell.at["method"], cell.at["variant"]): cell.config.plain()["method"].get("variant")
        for cell in grid.planned_runs
    }
    assert variants["FedAS", "authors"] == "authors" and variants["FedAS", "paper"] is None  # its default
    assert len(grid.planned_runs) == 6 and len(grid.to_run()) == 4  # the others have none


def test_the_variant_card_of_version_0_1_is_paper(small: dict[str, Any]) -> None:
    small["axes"]["method"]["FedAS"] = {"method.name": "fedas"}
    old, new = (
        StudyGrid(make(small), StudyRequest(scale="smoke", variant=name)) for name in ("card", "paper")
    )
    assert old.request == new.request and [c.label for c in old.planned_runs] == [
        c.label for c in new.planned_runs
    ]
    both = StudyGrid(make(small), StudyRequest(scale="smoke", variant="both"))
    assert {cell.at["variant"] for cell in both.planned_runs} == {"paper", "authors"}
    assert any(
        "card" in cell.label for cell in both.planned_runs
    )  # so that old reproductions can be continued


def test_stand_ins_are_named(small: dict[str, Any]) -> None:
    small["stand_in"] = [{"when": {"attack": "IPM"}, "name": "fewer digits", "set": {"data.clients": 3}}]
    full, quick = (StudyGrid(make(small), StudyRequest(scale=scale)) for scale in ("full", "quick"))
    assert {cell.config.data.clients for cell in full.planned_runs} == {6} and not full.substitutes
    assert [cell.config.data.clients for cell in quick.planned_runs] == [
        6,
        6,
        3,
        3,
    ] and quick.substitutes == ["fewer digits for IPM"]
    assert StudyGrid(make(small), StudyRequest(scale="full", stand_ins=True)).substitutes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"override": [{"when": {"method": "Dito"}, "set": {}}]},
            "override: method has no 'Dito'; did you mean 'Ditto'",
        ),
        (
            {"layout": {"rows": ["atack"], "columns": []}},
            "layout: there is no axis 'atack'; did you mean 'attack'",
        ),
        ({"claims": [{"says": "x", "check": "best", "axis": "method"}]}, "best needs a label"),
        ({"claims": [{"says": "x", "check": "below"}]}, "below needs a value"),
        ({"scale": {"quick": {}}}, "scale.smoke is missing"),
        ({"metrics": {"a": {"times": 2}}}, "needs one of figure, measure and of"),
        (
            {"metrics": {"a": {"measure": "seconds", "override": [{"figure": "accuracy"}]}}},
            "override needs figure, not measure or of",
        ),
        (
            {
                "metrics": {
                    "a": {"figure": "accuracy", "override": [{"when": {"method": "Dito"}, "figure": "x"}]}
                }
            },
            "method has no 'Dito'",
        ),
        ({"titel": "x"}, "unknown key 'fedcap/table-9.titel'; did you mean 'title'"),
    ],
)
def test_mistakes_in_a_study_are_reported(
    small: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make({**small, **change})


def test_an_invalid_experiment_is_named(small: dict[str, Any]) -> None:
    small["axes"]["method"]["Odd"] = {"method.name": "fedavg", "method.lam": 1}
    with pytest.raises(ConfigError, match=r"in fedcap/table-9, cell 'none Odd seed=0'"):
        StudyGrid(make(small), StudyRequest(scale="full"))
    for request, message in [
        (StudyRequest(scale="big"), "--scale big"),
        (StudyRequest(variant="x"), "--variant x"),
        (StudyRequest(seeds=0), "--seeds 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            StudyGrid(make(small), request)
