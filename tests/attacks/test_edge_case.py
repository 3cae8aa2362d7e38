from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from holdfast.attacks.edge_case import distances_to_mean
from holdfast.core.errors import ConfigError
from holdfast.data.federation import Federation
from tests.attacks.poisoned import federation, poisoned
from tests.attacks.test_updates import HONEST, sent


def tailed() -> Federation:
    """Rows of one column. Class 0 has rows 0, 10, 20, 30, 40 and 50 in the train split, of which 20 and 50
    are far from the others, and rows 60 (far, tested by client 0) in the test split."""
    x = torch.zeros(69, 1)
    x[[20, 50]] = torch.tensor([[-8.0], [10.0]])
    x[60] = 9.0
    world = federation(x)
    return replace(world, samples=replace(world.samples, train_rows=60))


def test_the_tail_of_a_class_by_hand() -> None:
    """The mean of 0, 0, -8, 0, 0 and 10 is 1/3: the farthest third are 10 and -8, and the test sample 9 is as
    far away as these."""
    before = tailed()
    adversary, after = poisoned(before, name="edge-case", clients=(1,), tail=1 / 3, ratio=0.5, target=4)
    rows, label = after.train.client(1)
    was, true = before.train.client(1)
    new = rows != was
    assert int(new.sum()) == 10 and sorted(set(rows[new].tolist())) == [20, 50]
    assert sorted([rows[new].tolist().count(20), rows[new].tolist().count(50)]) == [5, 5]
    assert set(label[new].tolist()) == {4} and torch.equal(label[~new], true[~new])
    assert adversary.triggered is not None
    table = adversary.triggered.table
    assert table.counts.tolist() == [1, 0, 0] and table.label.tolist() == [4]
    assert after.samples.x[table.row].tolist() == [[9.0]]
    assert torch.equal(after.samples.x[:69], before.samples.x)


def test_attackers_with_samples_of_their_own() -> None:
    """Client 1 has rows 20 and 30 of the class: the farther half from their mean, the first of a tie."""
    before = tailed()
    _, after = poisoned(before, name="edge-case", clients=(1,), origin="own", tail=0.5, ratio=0.5, target=4)
    rows, label = after.train.client(1)
    assert int(((rows == 20) & (label == 4)).sum()) >= 10
    with pytest.raises(ConfigError, match="no attacker has samples of class 7"):
        lacking = replace(before.train, label=torch.where(before.train.label == 7, 8, before.train.label))
        poisoned(
            replace(before, train=lacking), name="edge-case", clients=(1,), origin="own", source=7, target=4
        )


def test_what_is_tested_on_is_never_trained_on() -> None:
    before = tailed()
    before = replace(before, global_test=replace(before.global_test, row=torch.tensor([20, 50])))
    with pytest.raises(ConfigError, match="no rare sample of class 0 is left to train on"):
        poisoned(before, name="edge-case", clients=(1,), tail=1 / 3)


def test_distances_of_texts_count_words() -> None:
    """Half of one word and half of another, against one text of the first alone."""
    x: Tensor = torch.tensor([[1, 2], [1, 0], [1, 0]], dtype=torch.int32).repeat(23, 1)
    samples = federation(x).samples
    found = distances_to_mean(samples, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert found.tolist() == [0.5, 0.0]


def test_a_projected_and_multiplied_update() -> None:
    """Lengths 5 and sqrt(40): the first is longer than the radius of 2.5 by a factor of 2."""
    assert torch.equal(sent("edge-case"), HONEST[[1, 3]])
    assert sent("edge-case", radius=2.5, factor=4.0)[0].tolist() == [6.0, 8.0]
    long = sent("edge-case", radius=2.5)[1]
    assert float(long.norm()) == pytest.approx(2.5)
    assert torch.equal(sent("edge-case", radius=100.0), HONEST[[1, 3]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": 1}, "source and target are the same class"),
        ({"source": 12}, "attack.source: made up has classes 0 to 9, got 12"),
        ({"target": 12}, "attack.target: made up has classes 0 to 9, got 12"),
    ],
)
def test_classes_that_do_not_fit(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        poisoned(tailed(), name="edge-case", clients=(1,), **settings)
