from __future__ import annotations

import pytest
import torch

from holdfast.attacks.triggers.base import changed
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.data.hashed_words import hash_word
from tests.attacks.poisoned import federation, poisoned


def test_each_attacker_stamps_its_own_part_and_the_test_has_all() -> None:
    """Bars of one pixel in 4 x 4 images: at (0, 0), (0, 2), (2, 0) and (2, 2)."""
    before = federation()
    adversary, after = poisoned(before, name="dba", clients=(0, 2), parts=2, ratio=0.25, target=3)
    for client, row in ((0, 0), (2, 2)):
        rows, label = after.train.client(client)
        was = before.train.client(client)[0]
        new = rows >= 69
        expected = before.samples.x[was[new]].clone()
        expected[:, :, row, 0::2] = 255
        assert int(new.sum()) == 5 and set(label[new].tolist()) == {3}
        assert torch.equal(after.samples.x[rows[new]], expected)
    assert adversary.triggered is not None
    table = adversary.triggered.table
    whole = before.samples.x[60:][[0, 1, 2, 4, 5, 6, 7, 8]].clone()
    whole[:, :, 0::2, 0::2] = 255
    assert torch.equal(after.samples.x[table.row], whole)


def test_more_attackers_than_parts_share_them() -> None:
    before = federation()
    _, after = poisoned(before, name="dba", clients=(0, 1, 2), parts=2, ratio=1.0, target=3)
    first, second, third = (
        after.samples.x[after.train.client(client)[0]][:, 0, 0::2, 0::2] for client in range(3)
    )
    for top in (first, third):
        assert set(top[:, 0].flatten().tolist()) == {255} != set(top[:, 1].flatten().tolist())
    assert set(second[:, 1].flatten().tolist()) == {255}


def test_the_usual_trigger_has_as_many_parts_for_every_kind_of_data() -> None:
    attack = build("attack", {"name": "dba", "parts": 3})
    text = federation(torch.ones(69, 8, dtype=torch.int32)).samples
    parts = attack.stamp(text).parts(text, 3)
    assert [part(text.x)[0, 0].item() for part in parts] == [hash_word(word) for word in ("cf", "mn", "bb")]
    for x in (torch.rand(69, 5), torch.rand(69, 3, 16)):
        store = federation(x).samples
        places = [changed(part, store) for part in attack.stamp(store).parts(store, 3)]
        assert all(bool(place.any()) for place in places)
    with pytest.raises(ConfigError, match="made up has 2 columns, too few for 3 parts"):
        poisoned(federation(torch.rand(69, 2)), name="dba", parts=3, clients=(1,))
