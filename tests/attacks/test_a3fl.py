from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.attacks.a3fl import along_the_sign
from holdfast.attacks.learned_trigger import first_ones
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.local.losses import Batch
from tests.attacks.asked import Asked, Bounded, ask
from tests.attacks.poisoned import federation


def poisoned_like(asked: Asked, values: Tensor, places: Tensor, target: int, ratio: float) -> Tensor:
    """The update of a model that is trained on batches whose first samples carry the values."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        count = int(ratio * len(x) + 0.5)
        stamped = torch.where(places > 0.5, values, x[:count])
        labels = torch.cat([torch.full_like(y[:count], target), y[count:]])
        return F.cross_entropy(net(torch.cat([stamped, x[count:]])), labels)

    return asked.fitted("poisoned", "fit", loss) - asked.model


def test_what_attackers_train_is_what_plain_pytorch_trains(tmp_path: Path) -> None:
    asked = ask(tmp_path, "a3fl", searches=2, unlearning=1, weight=0.5, rate=0.05)
    start = asked.start
    places, low, high, values = (start[name] for name in ("places", "low", "high", "values"))
    assert places.sum() == 4 and places[0, :2, :2].all()  # a quarter of the side of 8
    assert values[0, 0, 0] == pytest.approx(float((low + high)[0, 0, 0] / 2), abs=0.01)  # grey
    network = asked.experiment.run_context.network

    def stamped(x: Tensor, value: Tensor) -> Tensor:
        return torch.where(places > 0.5, value, x)

    for search in range(2):
        before = values
        hard = asked.fitted(
            "adapted",
            f"unlearn {search}",
            lambda net, x, y, before=before: F.cross_entropy(net(stamped(x, before)), y),
            epochs=1,
        )
        other = network.load(hard[0], dtype=torch.float64).double()
        weight = 0.5 * float(F.cosine_similarity(hard, asked.model))

        def loss(net: Any, x: Tensor, y: Tensor, other: Any = other, weight: float = weight) -> Tensor:
            wrong = torch.full_like(y, 1)
            at = stamped(x, net.values)
            return F.cross_entropy(net(at), wrong) + weight * F.cross_entropy(other(at), wrong)

        values = asked.trained(
            "adapted",
            f"adapt {search}",
            {"values": values},
            loss,
            lambda params: Bounded(params, 0.05, low, high, sign=True),
            epochs=1,
        )["values"]
    assert not torch.equal(values[places > 0.5], start["values"][places > 0.5])
    torch.testing.assert_close(asked.remembered["values"], values)
    update = poisoned_like(asked, values, places, target=1, ratio=0.25)
    torch.testing.assert_close(asked.up["update"][asked.ids], update)


def test_a_step_along_the_sign_stays_within_the_bounds_of_the_data() -> None:
    own = {"low": torch.tensor([-1.0, -1.0, -1.0]), "high": torch.tensor([1.0, 1.0, 0.2])}
    batch = Batch(torch.zeros(1, 3), torch.zeros(1).long(), torch.ones(1), own)
    params = {"values": torch.tensor([0.0, -0.9, 0.1]), "other": torch.ones(2)}
    found = along_the_sign(
        lambda p, b: {"values": torch.tensor([0.0, 5.0, -0.01])}, params, batch, torch.tensor(0.3)
    )
    assert found["values"].tolist() == pytest.approx([0.0, -1.0, 0.2]) and found["other"] is params["other"]


def test_the_share_of_a_batch_counts_real_samples() -> None:
    mask = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0])
    batch = Batch(torch.zeros(8, 1), torch.zeros(8).long(), mask, {})
    assert [int(first_ones(batch, ratio).sum()) for ratio in (0.0, 0.25, 0.5, 1.0)] == [0, 2, 3, 6]


def test_its_trigger_is_of_numbers() -> None:
    text = federation(torch.ones(69, 8, dtype=torch.int32)).samples
    with pytest.raises(ConfigError, match="'a3fl' trains the numbers of a trigger, but made up is text"):
        build("attack", "a3fl").moving(text)
    window = federation(torch.rand(69, 2, 16)).samples
    steps = {"name": "disturbance", "steps": 4}
    start = build("attack", {"name": "a3fl", "trigger": steps}).moving(window).start
    assert start["places"].sum() == 8 and start["values"].shape == (2, 16)
    with pytest.raises(ConfigError, match="attack.target: made up has classes 0 to 9, got 10"):
        build("attack", {"name": "a3fl", "target": 10}).moving(window)
