from __future__ import annotations

import pytest
import torch

from holdfast.core.types import Exchange, Uplink, broadcast, nothing

IDS = torch.tensor([2, 5, 9])


def exchange(**changes: object) -> Exchange:
    given = {
        "task": "train",
        "to": IDS,
        "bank": torch.zeros(4, 6),
        "pick": torch.tensor([[0, 3], [-1, -1], [2, -1]]),
        **changes,
    }
    return Exchange(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"to": torch.tensor([2, 9, 5])},
        {"to": torch.tensor([2, 2, 5])},
        {"pick": torch.zeros(2, 1, dtype=torch.int64)},
        {"pick": torch.zeros(3, dtype=torch.int64)},
        {"bank": torch.zeros(6)},
        {"pick": torch.tensor([[0], [4], [1]])},
        {"pick": torch.tensor([[0], [-2], [1]])},
        {"extra": {"a": torch.zeros(2, 5)}},
    ],
    ids=[
        "unsorted",
        "twice",
        "too few picks",
        "pick not a table",
        "bank not a table",
        "no such model",
        "below -1",
        "too few extra rows",
    ],
)
def test_a_malformed_exchange_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="exchange 'train'"):
        exchange(**changes)


def test_bytes_down_are_exact() -> None:
    e = exchange(
        extra={"votes": torch.zeros(3, 5, dtype=torch.int16), "flag": torch.zeros(3, dtype=torch.bool)}
    )
    extra = 5 * 2 + 1
    assert e.bytes_down().tolist() == [2 * 6 * 4 + extra, extra, 6 * 4 + extra]
    assert exchange(bank=torch.zeros(4, 6, dtype=torch.float64)).bytes_down().tolist() == [96, 0, 48]


def test_a_broadcast_holds_one_model() -> None:
    e = broadcast("train", torch.arange(6.0), IDS, weight=torch.ones(3))
    assert e.bank.shape == (1, 6) and e.pick.tolist() == [[0], [0], [0]]
    assert e.bytes_down().tolist() == [28, 28, 28]


def test_nothing_carries_nothing() -> None:
    assert nothing("train", IDS).bytes_down().tolist() == [0, 0, 0]
    assert nothing("train", IDS[:0]).bytes_down().tolist() == []
    assert broadcast("train", torch.zeros(6), IDS[:0], a=torch.zeros(0, 3)).bytes_down().tolist() == []


@pytest.mark.parametrize(
    "keep", [torch.tensor([True, False, True]), torch.tensor([0, 2])], ids=["mask", "positions"]
)
def test_only(keep: torch.Tensor) -> None:
    e = exchange(extra={"a": torch.tensor([1, 2, 3])}).only(keep)
    assert (
        e.to.tolist() == [2, 9] and e.pick.tolist() == [[0, 3], [2, -1]] and e.extra["a"].tolist() == [1, 3]
    )
    assert e.bank.shape == (4, 6)
    up = Uplink(IDS, {"x": torch.arange(6).view(3, 2)}, {7: "late"}).only(keep)
    assert up.ids.tolist() == [2, 9] and up["x"].tolist() == [[0, 1], [4, 5]] and up.refused == {7: "late"}
    assert len(up) == 2


def test_bytes_up() -> None:
    fields = {
        "update": torch.zeros(3, 6),
        "buffers": torch.zeros(3, 0),
        "count": torch.zeros(3),
        "vote": torch.zeros(3, 2, dtype=torch.int8),
    }
    assert Uplink(IDS, fields).bytes_up().tolist() == [24 + 4 + 2] * 3
    assert Uplink(IDS[:0], {k: v[:0] for k, v in fields.items()}).bytes_up().tolist() == []
