"""What a trigger changes in a sample, by hand, and for which data it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.attacks.planting import USUAL
from holdfast.attacks.triggers import Stamp, kind_of
from holdfast.attacks.triggers.base import changed
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.data.hashed_words import hash_word
from holdfast.data.samples import Samples
from tests.helpers import built_in

CF, MN = hash_word("cf"), hash_word("mn")
DATA: dict[str, Tensor] = {
    "image": torch.arange(2 * 3 * 9 * 9).view(2, 3, 9, 9).remainder(256).to(torch.uint8),
    "window": torch.arange(2 * 2 * 16).view(2, 2, 16).float(),
    "text": torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8], [0, 0, 0, 0]], dtype=torch.int32),
    "table": torch.arange(2 * 4).view(2, 4).float(),
}


def samples(kind: str, **more: Any) -> Samples:
    x = DATA[kind]
    return Samples(x, torch.zeros(len(x), dtype=torch.int64), 3, len(x), name="made up", **more)


def stamped(kind: str, given: Any, **more: Any) -> Tensor:
    before = DATA[kind].clone()
    out = build("trigger", given).on(samples(kind, **more))(DATA[kind])
    assert torch.equal(DATA[kind], before) and out.dtype == before.dtype and out.shape == before.shape
    return out


def test_a_disturbance_by_default() -> None:
    """Three standard deviations on the last 2 of 16 steps of both channels."""
    expected = DATA["window"].clone()
    expected[:, 0, 14:] += 3 * 2.0
    expected[:, 1, 14:] += 3 * 0.5
    assert torch.equal(stamped("window", "disturbance", mean=(0.0, 1.0), std=(2.0, 0.5)), expected)


def test_a_wave_in_one_channel() -> None:
    wave = {"name": "disturbance", "channels": [1], "first": 4, "steps": 4, "height": 2.0, "wave": "sine"}
    expected = DATA["window"].clone()
    expected[:, 1, 4:8] += torch.tensor([0.0, 2.0, 0.0, -2.0])
    torch.testing.assert_close(stamped("window", wave), expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [[CF, 5, 6, 7], [CF, 5, 6, 7], [CF, 0, 0, 0]]),
        ({"place": "end"}, [[5, 6, 7, CF], [5, 6, 7, CF], [CF, 0, 0, 0]]),
        ({"place": 1}, [[5, CF, 6, 7], [5, CF, 6, 7], [CF, 0, 0, 0]]),
        ({"words": "CF, mn!"}, [[CF, MN, 5, 6], [CF, MN, 5, 6], [CF, MN, 0, 0]]),
        ({"words": "cf mn", "place": "end"}, [[5, 6, CF, MN], [5, 6, CF, MN], [CF, MN, 0, 0]]),
    ],
)
def test_words_in_a_text(given: dict[str, Any], expected: list[list[int]]) -> None:
    assert stamped("text", {"name": "word", **given}).tolist() == expected


def test_values_in_columns() -> None:
    """3 standard deviations above the mean: 1 + 3 * 2, in column 2 only."""
    found = stamped("table", {"name": "value", "columns": [2]}, mean=(1.0,), std=(2.0,))
    assert found.tolist() == [[0, 1, 7, 3], [4, 5, 7, 7]]


def test_a_blended_pattern_is_the_same_in_every_image() -> None:
    x = DATA["image"]
    quarter, whole = (stamped("image", {"name": "blended", "alpha": alpha}) for alpha in (0.25, 1.0))
    assert torch.equal(whole[0], whole[1]) and len(whole[0].unique()) > 50
    assert (quarter.double() - (0.75 * x.double() + 0.25 * whole.double())).abs().max() < 0.7  # rounded twice
    windows = stamped("window", {"name": "blended", "alpha": 1.0})
    assert float(windows[0, 0].max()) <= float(DATA["window"][:, 0].max()) < 48  # in its channel's own range


def test_bars() -> None:
    found = stamped("image", {"name": "bars", "width": 2, "gap": 1, "shift": 1})
    drawn = (found != DATA["image"])[0].any(0).nonzero().tolist()
    assert drawn == [[row, column] for row in (1, 3) for column in (1, 2, 4, 5)]
    assert set(found[:, :, 1, 1].flatten().tolist()) == {255}
    large = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    store = Samples(large, torch.zeros(1, dtype=torch.int64), 2, 1)
    drawn = changed(build("trigger", "bars").on(store), store).nonzero().tolist()
    assert drawn == [[row, column] for row in (0, 3) for column in (0, 1, 2, 3, 6, 7, 8, 9)]  # as for MNIST


@pytest.mark.parametrize(
    ("kind", "given", "count"),
    [
        ("image", {"name": "patch", "size": 3}, 4),
        ("image", {"name": "bars", "width": 2, "gap": 1}, 4),
        ("window", "disturbance", 3),
        ("window", "blended", 2),
        ("table", {"name": "value", "columns": [0, 3]}, 2),
    ],
)
def test_the_parts_of_a_trigger_are_the_whole(kind: str, given: Any, count: int) -> None:
    store, stamp = samples(kind), build("trigger", given)
    parts = stamp.parts(store, count)
    whole, places = stamp.on(store)(store.x), [changed(part, store) for part in parts]
    assert len(parts) == count and int(sum(place.long() for place in places).max()) == 1
    sizes = [int(place.sum()) for place in places]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == int(changed(stamp.on(store), store).sum())
    assembled = store.x
    for part in parts:
        assembled = part(assembled)
    assert torch.equal(assembled, whole)


def test_each_of_four_bars_is_a_part_and_each_of_two_words() -> None:
    store = samples("image")
    parts = build("trigger", {"name": "bars", "width": 2, "gap": 1}).parts(store, 4)
    assert [changed(part, store).nonzero().tolist() for part in parts] == [
        [[row, column], [row, column + 1]] for row in (0, 2) for column in (0, 3)
    ]
    one, two = build("trigger", {"name": "word", "words": "cf mn"}).parts(samples("text"), 2)
    assert one(DATA["text"])[0].tolist() == [CF, 5, 6, 7] and two(DATA["text"])[0].tolist() == [MN, 5, 6, 7]


@pytest.mark.parametrize("name", built_in("trigger"))
def test_a_trigger_is_refused_for_other_data(name: str) -> None:
    stamp: Stamp = build("trigger", name)
    for kind in DATA:
        assert kind_of(samples(kind)) == kind
        if kind in stamp.fits:
            stamp.on(samples(kind))
        else:
            with pytest.raises(ConfigError, match=f"attack.trigger: '{name}' changes"):
                stamp.on(samples(kind))
    assert {USUAL[kind] for kind in ("image", "window", "text", "table")} <= set(built_in("trigger"))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("window", {"name": "disturbance", "channels": [2]}, "made up has channels 0 to 1, got"),
        ("window", {"name": "disturbance", "first": 15, "steps": 2}, "2 steps from step 15 on do not fit"),
        ("text", {"name": "word", "words": "a b c d e"}, "5 words do not fit into a text of 4"),
        ("text", {"name": "word", "words": "!"}, "holds no word"),
        ("text", {"name": "word", "place": -1}, "counted from 0"),
        ("table", {"name": "value", "columns": [4]}, "made up has columns 0 to 3, got"),
        ("image", {"name": "bars", "width": 5}, "bars of 5 pixels with a gap of 2 do not fit into 9 x 9"),
        ("image", {"name": "patch", "size": 10}, "a patch of 10 pixels does not fit into 9 x 9"),
    ],
)
def test_settings_that_do_not_fit(kind: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("trigger", given).on(samples(kind))


def test_too_many_parts() -> None:
    with pytest.raises(ConfigError, match="changes 1 places of a sample, too few for 2 parts"):
        build("trigger", "value").parts(samples("table"), 2)
    with pytest.raises(ConfigError, match="a trigger of 1 words cannot be divided into 2 parts"):
        build("trigger", "word").parts(samples("text"), 2)
