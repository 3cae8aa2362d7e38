"""Claims and derived values, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.experiment.config import make_config
from holdfast.reproduction.claims import examine
from holdfast.reproduction.study import Claim, Metric, make
from holdfast.reproduction.values import Value, Values, _derive, _read, _subtract, place, printed

FIGURES = {
    ("none", "Mean"): (80.0, 82.0),
    ("none", "Ditto"): (85.0, 87.0),
    ("IPM", "Mean"): (10.0,),
    ("IPM", "Ditto"): (9.0,),
}


@pytest.fixture
def values(small: dict[str, Any]) -> Values:
    study = make(small)
    out = Values(study, {"attack": ["none", "IPM"], "method": ["Mean", "Ditto"]})
    out.by_place = {
        place("TAcc(%)", {"attack": a, "method": m}): Value(seeds) for (a, m), seeds in FIGURES.items()
    }
    return out


@pytest.mark.parametrize(
    ("claim", "right", "wrong"),
    [
        ({"check": "best", "axis": "method", "label": "Ditto"}, 1, ("IPM",)),
        ({"check": "best", "axis": "method", "label": "Ditto", "by": 1.0}, 2, ()),
        ({"check": "best", "axis": "method", "label": "Ditto", "where": {"attack": "IPM"}}, 0, ("IPM",)),
        ({"check": "beats", "axis": "method", "label": "Ditto", "over": ["Mean"], "by": 5.0}, 1, ("IPM",)),
        (
            {"check": "beats", "axis": "method", "label": "Ditto", "over": ["Mean"], "by": 5.5},
            0,
            ("none", "IPM"),
        ),
        ({"check": "within", "axis": "method", "label": "Ditto", "over": ["Mean"], "by": 1.0}, 2, ()),
        ({"check": "within", "axis": "method", "over": ["Mean"], "by": 1.0}, 2, ()),
        ({"check": "within", "axis": "attack", "over": ["none"], "by": 71.0}, 1, ("Ditto",)),
        ({"check": "below", "value": 15, "where": {"attack": "IPM"}}, 2, ()),
        ({"check": "below", "value": 9.5, "axis": "method", "label": "Ditto"}, 1, ("none",)),
        ({"check": "above", "value": 82}, 1, ("none Mean", "IPM Mean", "IPM Ditto")),
        ({"check": "falls", "axis": "attack"}, 2, ()),
        ({"check": "falls", "axis": "attack", "by": 75}, 1, ("Mean",)),
        ({"check": "rises", "axis": "attack"}, 0, ("Mean", "Ditto")),
    ],
)
def test_claims_by_hand(values: Values, claim: dict[str, Any], right: int, wrong: tuple[str, ...]) -> None:
    finding = examine(Claim(says="x", **claim), values)
    assert (finding.right, finding.wrong) == (right, wrong)
    assert finding.holds is (not wrong)


THREE = {"Mean": 20.0, "Ditto": 50.0, "Third": 30.0}


@pytest.fixture
def three(values: Values, small: dict[str, Any]) -> Values:
    """Three methods under one attack, and what the paper prints of them."""
    small["axes"]["method"]["Third"] = {"method.name": "local"}
    out = Values(make(small), {"attack": ["IPM"], "method": list(THREE)})
    out.by_place = {place("TAcc(%)", {"attack": "IPM", "method": m}): Value((v,)) for m, v in THREE.items()}
    return out


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        ({"check": "worst", "label": "Mean"}, True),
        ({"check": "worst", "label": "Third"}, False),  # neither the best nor the worst
        ({"check": "worst", "label": "Third", "by": 10.0}, True),
        ({"check": "worst", "label": "Ditto"}, False),
        ({"check": "beats", "label": "Ditto", "over": ["Mean"], "factor": 2.5}, True),
        ({"check": "beats", "label": "Ditto", "over": ["Mean"], "factor": 2.6}, False),
        (
            {"check": "beats", "label": "Ditto", "over": ["Mean", "Third"], "factor": 2.0},
            False,
        ),  # better than each, but 1.7 times one
        ({"check": "within", "label": "Mean", "over": ["Ditto"], "factor": 2.5}, True),
        ({"check": "within", "label": "Mean", "over": ["Ditto"], "factor": 2.4}, False),
    ],
)
def test_claims_of_three_by_hand(three: Values, claim: dict[str, Any], holds: bool) -> None:
    assert examine(Claim(says="x", axis="method", **claim), three).holds is holds


@pytest.mark.parametrize(
    ("ours", "holds"), [(44.0, False), (45.0, True), (50.0, True), (55.0, True), (56.0, False)]
)
def test_within_the_printed_value_is_neither_below_nor_above(three: Values, ours: float, holds: bool) -> None:
    said = Values(three.study, three.labels, dict(three.by_place))
    three.by_place = {place("TAcc(%)", {"attack": "IPM", "method": "Ditto"}): Value((ours,))}
    claim = Claim(says="x", check="within", axis="method", label="Ditto", by=5.0)
    assert examine(claim, three, said).holds is holds


def test_less_may_be_better(values: Values, small: dict[str, Any]) -> None:
    small["metrics"]["TAcc(%)"]["better"] = "less"
    values.study = make(small)
    finding = examine(Claim(says="x", check="best", axis="method", label="Mean"), values)
    assert finding.wrong == ("IPM",)  # 10 is more than Ditto's 9


def test_a_claim_without_values_is_not_tested(values: Values) -> None:
    claim = Claim(says="x", check="best", axis="method", label="Ditto", least=0.5)
    assert examine(claim, values).words == "holds: in 1 of 2 cases"
    del values.by_place[place("TAcc(%)", {"attack": "IPM", "method": "Ditto"})]
    assert examine(claim, values).words == "holds" and examine(claim, values).cases == 1
    values.by_place = {}
    assert examine(claim, values).holds is None and examine(claim, values).words == "not tested"
    values.by_place = {
        place("TAcc(%)", {"attack": "none", "method": m}): Value((v,))
        for m, v in (("Mean", math.nan), ("Ditto", 1.0))
    }
    assert examine(claim, values).cases == 0


def test_differences_ranks_and_means(values: Values, small: dict[str, Any]) -> None:
    figure = {"figure": "accuracy", "times": 100}
    small["metrics"] |= {
        "cost": {**figure, "minus": {"attack": "none"}},
        "rank": {**figure, "rank": "method", "mean": ["attack"]},
        "average": {**figure, "mean": ["attack"]},
        "all": {"of": ["rank", "average"]},
    }
    small["claims"][0]["metric"] = "TAcc(%)"
    values.study = make(small)
    for name in ("cost", "rank", "average"):
        for (attack, method), seeds in FIGURES.items():
            values.by_place[place(name, {"attack": attack, "method": method})] = Value(seeds)
    _derive(values)
    assert values.mean("cost", {"attack": "IPM", "method": "Ditto"}) == 9 - 86
    assert values.get("cost", {"attack": "none", "method": "Mean"}) == Value((0.0, 0.0))
    assert [values.mean("rank", {"method": method}) for method in ("Mean", "Ditto")] == [
        1.5,
        1.5,
    ]  # 2 and 1, 1 and 2
    assert values.mean("average", {"method": "Mean"}) == 45.5
    assert values.mean("all", {"method": "Mean"}) == (1.5 + 45.5) / 2
    assert values.axes_of("all") == ["method"] and len(list(values.places("all"))) == 2


def test_values_that_are_not_finite_improve_no_rank_and_no_mean(
    values: Values, small: dict[str, Any]
) -> None:
    small["metrics"]["TAcc(%)"] |= {"rank": "method"}
    small["metrics"]["average"] = {"figure": "accuracy", "mean": ["attack"]}
    small["claims"][0]["metric"] = "TAcc(%)"
    values.study = make(small)
    figures = {
        ("none", "Mean"): (math.inf, -math.inf),
        ("none", "Ditto"): (1.0, 2.0),
        ("IPM", "Ditto"): (3.0, 4.0),
    }
    for name in ("TAcc(%)", "average"):
        values.by_place |= {
            place(name, {"attack": a, "method": m}): Value(seeds) for (a, m), seeds in figures.items()
        }
    broken = Value((math.inf, -math.inf))
    assert math.isnan(broken.mean) and broken.spread is None  # and no exception of the statistics module
    for diverged in (math.nan, math.inf):
        some = Value((80.0, diverged, 82.0))
        assert math.isnan(some.mean) and some.spread is None, (
            "the seeds that did not diverge are not the method"
        )
    del values.by_place[place("TAcc(%)", {"attack": "IPM", "method": "Mean"})]
    _derive(values)
    assert [values.mean("TAcc(%)", {"attack": "none", "method": m}) for m in ("Mean", "Ditto")] == [
        2,
        1,
    ]  # not first, not both first
    assert (
        values.mean("average", {"method": "Mean"}) is None
        and values.mean("average", {"method": "Ditto"}) == 2.5
    )
    short = values.get("average", {"method": "Mean"})
    assert short is not None and short.note == "mean of 1 cells, others of 2"


def test_a_printed_loss_has_the_sign_of_ours(values: Values, small: dict[str, Any]) -> None:
    small["metrics"]["lost"] = {
        "figure": "accuracy",
        "times": -100,
        "minus": {"attack": "none"},
        "better": "less",
    }
    small["claims"][0]["metric"] = "TAcc(%)"
    values.study = make(small)
    _subtract(values)
    assert values.mean("lost", {"attack": "IPM", "method": "Ditto"}) == 86 - 9


def test_equals_share_the_better_rank(values: Values, small: dict[str, Any]) -> None:
    small["axes"]["method"]["Third"] = {"method.name": "local"}
    small["metrics"]["TAcc(%)"]["rank"] = "method"
    values.study = make(small)
    figures = {"Mean": 5.0, "Ditto": 5.0, "Third": 1.0}
    values.by_place = {
        place("TAcc(%)", {"attack": "IPM", "method": m}): Value((v,)) for m, v in figures.items()
    }
    _derive(values)
    assert [values.mean("TAcc(%)", {"attack": "IPM", "method": m}) for m in ("Mean", "Ditto", "Third")] == [
        1,
        1,
        3,
    ]


def test_printed_values_and_their_doubts(small: dict[str, Any]) -> None:
    small |= {
        "printed": "III",
        "print": {"dataset": "EMNIST", "setting": "attack={attack}, malicious=0.3", "method": "FedCAP"},
    }
    small["axes"] = {
        "attack": {"SF": {"attack.name": "sign-flip"}},
        "method": {"Mean": {"method.name": "fedavg"}, "Ditto": {}},
    }
    small["metrics"] = {
        "DAcc(%)": {"figure": "detection/dacc", "times": 100},
        "accuracy": {"figure": "accuracy", "printed": "TAcc(%)"},
    }
    small |= {"scale": {"quick": {}, "smoke": {}}, "claims": []}
    found = printed(make(small), {"attack": ["SF"], "method": ["Mean"], "variant": ["paper", "authors"]})
    value = found.get("DAcc(%)", {"attack": "SF", "method": "Mean"})
    assert value is not None and value.seeds == (80.0,) and value.note == "doubtful in print"
    assert found.mean("accuracy", {"attack": "SF", "method": "Mean"}) is not None


def test_seconds_per_round_count_the_tuning_round() -> None:
    """12 seconds in three rounds and a tuning at the end, which is one more: 3 seconds each."""
    run: Any = SimpleNamespace(
        final={"seconds/client": 12.0}, round=4, config=make_config({"train": {"rounds": 3}})
    )
    figure = {"figure": "seconds/client", "times": 10}
    assert [_read(Metric(**figure, per_round=per_round), run, {}) for per_round in (False, True)] == [
        120.0,
        30.0,
    ]
