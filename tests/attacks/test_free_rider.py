"""Free riders, by hand: what they send of the models that they were sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.keys import Key
from holdfast.core.types import broadcast
from tests.attacks.played import SimulateAll, kept
from tests.attacks.test_updates import ATTACKERS, SCHEMA, UP, adversary

MODELS = [torch.tensor([1.0, 3.0, 9.0]), torch.tensor([2.0, 1.0, 8.0]), torch.tensor([2.0, 4.0, 7.0])]


def rounds(**settings: Any) -> list[Tensor]:
    """What both attackers send in three rounds; the last number of a model is a buffer."""
    made = adversary("free-rider", **settings)
    sent = []
    for round, model in enumerate(MODELS, 1):
        asked = broadcast("train", model, UP.ids)
        sent.append(made.poison("train", SCHEMA, UP, Key(round), round, asked)["update"][ATTACKERS])
    return sent


def test_zeros_and_the_last_change_of_the_model() -> None:
    assert all(rows.tolist() == [[0, 0], [0, 0]] for rows in rounds())
    first, second, third = rounds(what="delta", noise=0.0)
    assert first.tolist() == [[0, 0], [0, 0]] and second.tolist() == [[1, -2], [1, -2]]
    assert third.tolist() == [[0, 3], [0, 3]]
    noisy = rounds(what="delta")
    assert 0 < float((noisy[2] - third).abs().max()) < 2 and not torch.equal(noisy[2][0], noisy[2][1])


def test_noise_decays_and_has_the_size_of_the_first_change() -> None:
    first, second, third = rounds(what="noise")
    unit = rounds(what="noise", sigma=1.0, decay=0.0)
    assert not first.any()
    torch.testing.assert_close(second, unit[1] * torch.tensor([1.0, -2.0]).std() / 2)
    torch.testing.assert_close(third, unit[2] * torch.tensor([1.0, -2.0]).std() / 3)
    assert unit[0].any() and not torch.equal(unit[0], unit[1])


def test_without_a_model_there_is_nothing_to_ride_on() -> None:
    made = adversary("free-rider", what="delta")
    assert not made.poison("train", SCHEMA, UP, Key(1))["update"][ATTACKERS].any()


@pytest.mark.slow
def test_free_riders_do_not_stop_the_mean(simulate_all: SimulateAll) -> None:
    """The claim of Fraboni et al.: with free riders of any kind, 4 of 20 clients here, FedAvg still comes to
    a model about as good, which they then have for nothing."""
    kinds = [{"name": "free-rider", "what": what} for what in ("zeros", "noise", "delta")]
    honest, *ridden = kept(simulate_all, [("mean", kind) for kind in (None, *kinds)])
    assert min(ridden) > honest - 0.1
