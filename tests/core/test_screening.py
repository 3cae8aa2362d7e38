from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.core.columns import Columns, OneRank
from holdfast.core.keys import Key
from holdfast.core.screening import _extremes, _of_rows, screen, screen_together
from holdfast.core.types import Field, Schema, Uplink
from tests.pretended_gpu import pretended_gpu
from tests.thread_ranks import ThreadRanks, on_ranks

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


def replies() -> tuple[list[Uplink], list[Schema], list[float | None]]:
    """Seven replies of one memory and one schema, of which each has another fault, and some that are
    different."""
    nan, inf = float("nan"), float("inf")
    stack = Key(3).normal(7, 3, 40).clamp(-1, 1) / 7
    means = stack[:, :, :2] + 0.5
    stack[1, 2, 7], stack[2, 0, 39], stack[3, 1, 0] = nan, inf, -inf
    stack[4, 1], stack[4, 2, 3] = 30.0, nan
    means[5, 0, 1], means[5, 1, 0] = 1.5, -0.5
    counts = torch.ones(7, 3)
    counts[5, 1], counts[6, 2] = nan, -1.0
    fields = {"update": stack, "means": means, "count": counts}
    schema: Schema = {
        "update": Field("update", (40,)),
        "means": Field("feature", (2,), low=0, high=1),
        "count": Field("count", low=0),
    }
    ids = torch.tensor([4, 6, 8])
    ups = [
        Uplink(ids, {name: value[place] for name, value in fields.items()}, {1: "earlier"})
        for place in range(7)
    ]
    others = [
        ups[0].having(update=stack[0, :, :30].clone()),
        ups[4].only(torch.tensor([0, 2])),
        ups[0].only(torch.zeros(3, dtype=torch.bool)),
        ups[1].having(update=stack[1].double()),
    ]
    several = [*ups[:3], others[0], *ups[3:], *others[1:], ups[4]]
    return several, [schema] * len(several), [*[2.0] * (len(several) - 1), None]


def on(device: torch.device, up: Uplink) -> Uplink:
    """The same reply as a GPU leaves it: what has one number for each client is on the host."""
    return up.having(**{name: value.to(device) for name, value in up.fields.items() if value.ndim > 1})


def assert_alike(found: list[Uplink], expected: list[Uplink]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.refused == other.refused and torch.equal(one.ids, other.ids)
        assert all(torch.equal(one[name].cpu(), other[name]) for name in other.fields)


def test_replies_are_screened_together_as_one_by_one() -> None:
    given = replies()
    expected = [screen(*one) for one in zip(*given, strict=True)]
    assert {reason for up in expected for reason in up.refused.values()} == {
        "earlier",
        "update is not finite",
        "update has a norm above 2",
        "update has shape (30,), expected (40,)",
        "means is above 1",
        "means is below 0",
        "count is not finite",
        "count is below 0",
    } - {"count is not finite"}  # the client is refused for its means
    assert_alike(screen_together(*given), expected)


def test_a_device_tells_only_which_rows_are_bad_and_once() -> None:
    ups, schemas, caps = replies()
    expected = [screen(*one) for one in zip(ups, schemas, caps, strict=True)]
    with pretended_gpu() as gpu:
        far = [on(gpu.device, up) for up in ups]
        found = screen_together(far, schemas, caps)
        assert gpu.reads == 1 and gpu.largest_read <= 5 * 3 * len(ups)  # five faults of three rows each
        alone = [screen(*one) for one in zip(far, schemas, caps, strict=True)]
        assert gpu.reads == 1 + sum(len(up) > 0 or "expected" not in str(up.refused) for up in expected)
        with gpu.not_counted():
            assert_alike(found, expected)
            assert_alike(alone, expected)


def test_replies_of_one_memory_are_looked_at_without_a_copy() -> None:
    """Also where other rows lie between them."""
    stack = torch.zeros(6, 3, 4)
    stack[4, 1, 2] = torch.nan
    stack[5] = torch.nan
    parts = [stack[place] for place in (4, 0, 2)]
    least, most = _of_rows(_extremes, parts)
    assert least.isnan().tolist() == [False, True] + [False] * 7 and torch.equal(least.isnan(), most.isnan())
    calls: list[int] = []
    assert _of_rows(lambda rows: (calls.append(len(rows)) or rows.sum(1),), parts)[0].shape == (9,)
    assert calls == [15]


SHARED: Schema = {
    "update": Field("update", (200,), low=-50.0, high=50.0),
    "means": Field("feature", (2,), low=0, high=1),
    "count": Field("count", low=0),
}


def shared_replies() -> list[tuple[Uplink, float | None]]:
    """Each with a cap: good ones, faults in a column that one rank alone has, and norms to which all ranks
    contribute."""
    update = Key(4).normal(5, 200, dtype=torch.float64).clamp(-1, 1)
    ids, fields = torch.tensor([2, 3, 5, 8, 9]), {"means": torch.full((5, 2), 0.5), "count": torch.ones(5)}
    faulty = update.clone()
    faulty[0, 199], faulty[1, 0], faulty[2, 100] = torch.nan, torch.inf, -torch.inf
    faulty[3, 70], faulty[4, 199] = 51.0, -51.0
    long = update / update.norm(dim=1, keepdim=True) * torch.tensor([1.0, 2.1, 1.9, 2.0001, 4.0])[:, None]
    good = Uplink(ids, {"update": update, **fields}, {1: "earlier"})
    counts = fields["count"].clone()
    counts[2] = -1.0
    return [
        (good, None),
        (good.having(update=faulty), None),
        (good.having(update=faulty, count=counts), 3.0),
        (good.having(update=long), 2.0),
        (good.having(update=long.float()), 2.0),
        (good.having(update=update[:, :40]), None),
        (good.only(torch.zeros(5, dtype=torch.bool)), 2.0),
        (good.having(update=torch.full_like(update, torch.nan)), 2.0),
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_shared_replies_are_screened_as_whole_ones(count: int) -> None:
    expected = [screen(up, SHARED, cap) for up, cap in shared_replies()]
    assert expected[1].refused == {1: "earlier"} | dict.fromkeys([2, 3, 5], "update is not finite") | {
        8: "update is above 50",
        9: "update is below -50",
    }
    assert set(expected[3].refused) == {1, 3, 8, 9}

    def work(ranks: ThreadRanks) -> list[Uplink]:
        found = []
        for up, cap in shared_replies():
            columns = Columns(up["update"].shape[1], ranks)
            cut = replace(up.having(update=columns.mine(up["update"])), columns=columns)
            found.append(screen(cut, SHARED, cap))
            if len(up):
                found[-1] = found[-1].whole()
        return found

    for found in on_ranks(count, work):
        for one, other in zip(found, expected, strict=True):
            assert one.refused == other.refused and torch.equal(one.ids, other.ids)
            if len(other):
                assert all(torch.equal(one[name], other[name]) for name in other.fields)


def test_a_rank_with_other_columns_than_its_own_is_an_error() -> None:
    up = replace(shared_replies()[0][0], columns=Columns(100, OneRank()))
    with pytest.raises(ValueError, match=r"\(200,\) columns of 'update' are here, not 100"):
        screen(up, SHARED)
