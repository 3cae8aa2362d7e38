"""Studies that say only what differs from another, and claims by a factor and of the worst."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.reproduction.claims import examine
from holdfast.reproduction.inheritance import _merged
from holdfast.reproduction.study import Claim, make, read
from holdfast.reproduction.values import Value, Values, place


def test_entries_are_replaced_added_and_taken_away() -> None:
    base = {
        "data": {"name": "mnist", "clients": 5},
        "attack": {"name": "backdoor", "size": 3},
        "train": {"lr": 1},
    }
    own = {"data": {"clients": 9}, "attack": {"name": "ipm"}, "train": {}, "seed": 1}
    expected = {
        "data": {"name": "mnist", "clients": 9},
        "attack": {"name": "ipm"},
        "train": {"lr": 1},
        "seed": 1,
    }
    assert _merged(base, own, 2) == expected  # another attack has nothing of the old one
    assert _merged({"a": {"x": 1}, "b": {"y": 2}}, {"a": {"z": 3}, "b": {}}, 1) == {"a": {"z": 3}}


def test_table_9_is_table_1_with_one_pollution_ratio() -> None:
    first, ninth = read("fedcpa/table-1"), read("fedcpa/table-9")
    assert (
        ninth.axes == {**first.axes, "pollution": {"0.8": {"attack.ratio": 0.8}}}
        and ninth.config == first.config
    )
    assert (first.printed, ninth.printed) == ("1", "9") and read("fedcpa/fig-2").printed is None
    assert (
        ninth.scale["quick"].set == first.scale["quick"].set
        and ninth.scale["quick"].keep != first.scale["quick"].keep
    )


TABLE: dict[str, Any] = {
    "key": "fedcpa/table-99",
    "paper": "FedCPA",
    "title": "",
    "config": {},
    "axes": {"method": {"a": {}, "b": {}, "c": {}}},
    "metrics": {
        "more": {"figure": "accuracy"},
        "less": {"figure": "loss", "better": "less"},
        "place": {"figure": "accuracy", "rank": "method"},
    },
    "layout": {"rows": ["method"], "columns": ["metric"]},
    "claims": [],
    "scale": {"quick": {}, "smoke": {}},
}
FIGURES = {"more": (10, 21, 40), "less": (10, 21, 40), "place": (3, 2, 1)}


@pytest.mark.parametrize(
    ("claim", "so"),
    [
        ({"check": "worst", "metric": "more", "label": "a"}, True),
        ({"check": "worst", "metric": "less", "label": "a"}, False),
        ({"check": "worst", "metric": "less", "label": "b", "by": 19}, True),
        ({"check": "worst", "metric": "less", "label": "b", "by": 18}, False),
        ({"check": "best", "metric": "place", "label": "c"}, True),
        ({"check": "best", "metric": "place", "label": "a"}, False),
        ({"check": "beats", "metric": "more", "label": "b", "over": ["a"], "factor": 2}, True),
        ({"check": "beats", "metric": "more", "label": "c", "over": ["b"], "factor": 2}, False),
        ({"check": "beats", "metric": "less", "label": "a", "over": ["b", "c"], "factor": 2}, True),
        ({"check": "beats", "metric": "less", "label": "b", "over": ["c"], "factor": 2}, False),
        ({"check": "within", "metric": "less", "label": "b", "over": ["a"], "factor": 2.1}, True),
        ({"check": "within", "metric": "less", "label": "b", "over": ["a"], "factor": 2}, False),
        ({"check": "within", "metric": "more", "label": "b", "over": ["c"], "factor": 2}, True),
        ({"check": "within", "metric": "more", "label": "a", "over": ["c"], "factor": 3}, False),
    ],
)
def test_claims(claim: dict[str, Any], so: bool) -> None:
    study = make(TABLE)
    places = {
        place(m, {"method": label}): Value((float(v),))
        for m, row in FIGURES.items()
        for label, v in zip("abc", row, strict=True)
    }
    found = examine(Claim(says="", axis="method", **claim), Values(study, {"method": "abc"}, places))
    assert found.cases == 1 and found.holds is so
