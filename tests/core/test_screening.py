from __future__ import annotations

import pytest
import torch

from holdfast.core.screening import screen
from holdfast.core.types import Field, Uplink

SCHEMA = {
    "update": Field("update", (2,)),
    "buffers": Field("buffer", (0,)),
    "count": Field("count", (), low=0),
    "share": Field("score", (3,), low=0, high=1),
}


def uplink(**changes: torch.Tensor) -> Uplink:
    fields = {
        "update": torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 0.0]]),
        "buffers": torch.zeros(3, 0),
        "count": torch.tensor([1.0, 2.0, 3.0]),
        "share": torch.full((3, 3), 0.5),
    }
    return Uplink(torch.tensor([4, 6, 8]), fields | changes, {1: "earlier"})


def test_good_rows_pass_untouched() -> None:
    up = screen(uplink(), SCHEMA)
    assert (
        up.ids.tolist() == [4, 6, 8]
        and up.refused == {1: "earlier"}
        and torch.equal(up["update"], uplink()["update"])
    )


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (
            {"update": torch.tensor([[3.0, 4.0], [float("nan"), 1.0], [1.0, 0.0]])},
            {6: "update is not finite"},
        ),
        (
            {"update": torch.tensor([[3.0, 4.0], [0.0, 1.0], [float("-inf"), 0.0]])},
            {8: "update is not finite"},
        ),
        ({"count": torch.tensor([1.0, -1.0, 3.0])}, {6: "count is below 0"}),
        (
            {"share": torch.tensor([[0.5, 0.5, 1.5], [0.0, 0.0, 1.0], [-0.1, 0.0, 0.0]])},
            {4: "share is above 1", 8: "share is below 0"},
        ),
        (
            {"count": torch.tensor([float("nan"), -2.0, 3.0])},
            {4: "count is not finite", 6: "count is below 0"},
        ),
    ],
    ids=["nan", "inf", "below", "both bounds", "two reasons"],
)
def test_bad_rows_are_refused_with_a_reason(
    changes: dict[str, torch.Tensor], refused: dict[int, str]
) -> None:
    up = screen(uplink(**changes), SCHEMA)
    assert up.refused == {1: "earlier"} | refused
    assert up.ids.tolist() == [i for i in (4, 6, 8) if i not in refused]
    assert all(len(value) == len(up) for value in up.fields.values())


def test_the_cap_holds_for_updates_only() -> None:
    up = screen(
        uplink(share=torch.tensor([[0.0, 0.0, 0.0]] * 3), count=torch.tensor([100.0, 100.0, 100.0])),
        SCHEMA,
        norm_cap=2.0,
    )
    assert up.refused == {1: "earlier", 4: "update has a norm above 2"} and up.ids.tolist() == [6, 8]


def test_the_cap_holds_for_an_update_by_any_name() -> None:
    schema = {
        "update": Field("update", (2,)),
        "personal": Field("update", (2,)),
        "prototypes": Field("feature", (2,)),
    }
    short, long = torch.ones(2, 2), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    up = screen(
        Uplink(torch.tensor([4, 6]), {"update": short, "personal": long, "prototypes": 100 * short}),
        schema,
        norm_cap=2.0,
    )
    assert up.refused == {4: "personal has a norm above 2"} and up.ids.tolist() == [6]


@pytest.mark.parametrize(
    "up",
    [
        uplink(update=torch.zeros(3, 5)),
        uplink(more=torch.zeros(3)),
        Uplink(torch.tensor([4, 6, 8]), {"update": torch.zeros(3, 2)}),
        uplink(update=torch.zeros(3, 2, dtype=torch.int64)),
        uplink(update=torch.zeros(3, 2, dtype=torch.complex64)),
        uplink(count=torch.ones(3, dtype=torch.bool)),
    ],
    ids=["shape", "a field too many", "fields missing", "whole numbers", "complex numbers", "truth values"],
)
def test_a_wrong_shape_or_type_refuses_every_row(up: Uplink) -> None:
    got = screen(up, SCHEMA)
    assert len(got) == 0 and {4, 6, 8} <= set(got.refused)


def test_a_type_that_the_schema_names_is_the_only_one() -> None:
    schema = {"place": Field("score", dtype=torch.int64)}
    up = Uplink(torch.tensor([1, 2]), {"place": torch.tensor([3.0, 4.0])})
    assert screen(up, schema).refused == dict.fromkeys([1, 2], "place has type float32, expected int64")
    assert len(screen(Uplink(up.ids, {"place": torch.tensor([3, 4])}), schema)) == 2


def test_no_rows_pass_screening() -> None:
    nobody = uplink().only(torch.zeros(3, dtype=torch.bool))
    assert len(screen(nobody, SCHEMA, norm_cap=1.0)) == 0
    every = screen(uplink(update=torch.full((3, 2), float("nan"))), SCHEMA)
    assert len(every) == 0 and every["update"].shape == (0, 2)
