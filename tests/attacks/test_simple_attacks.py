"""Attacks of a few lines, by hand: numbers that are not finite, sybils, fake clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.attacks import Adversary
from holdfast.attacks.mpaf import base_model
from holdfast.attacks.target import Target
from holdfast.core.flat import Layout
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.screening import screen
from holdfast.core.types import broadcast
from holdfast.results.run import Run
from tests.attacks.played import SimulateAll, kept
from tests.attacks.test_updates import ATTACKERS, HONEST, SCHEMA, UP, adversary, sent


@pytest.mark.parametrize("value", ["infinity", "minus-infinity", "nan"])
def test_numbers_that_are_not_finite_are_refused(value: str) -> None:
    for single in (False, True):
        after = adversary("not-finite", value=value, single=single).poison("train", SCHEMA, UP, Key(1))
        spoilt = ~torch.isfinite(after["update"][ATTACKERS])
        assert int(spoilt.sum()) == (2 if single else 4) and bool(spoilt[:, 0].all())
        good = screen(after, SCHEMA, None)
        assert good.ids.tolist() == [0, 3] and set(good.refused) == {2, 6}
    assert torch.equal(after["update"][ATTACKERS][:, 1], HONEST[ATTACKERS][:, 1])


def test_sybils_copy_the_first_attacker_and_their_noise_cancels_out() -> None:
    rows = sent("sybils")
    copied = torch.tensor([-3.0, -4.0], dtype=torch.float64)
    torch.testing.assert_close(rows.mean(0), copied)
    noise = rows - copied
    assert torch.equal(noise[0], -noise[1]) and 0 < float(noise.norm()) < 0.5
    assert sent("sybils", noise=0.0, scale=2.0).tolist() == [[6, 8], [6, 8]]
    many = UP.having(update=torch.ones(4, 20000))  # the root mean square of what is copied is 1
    assert (sent("sybils", many, noise=0.1)[0] + 1).std().item() == pytest.approx(0.1, rel=0.02)
    three = adversary("sybils", clients=(0, 2, 6)).poison("train", SCHEMA, UP, Key(1))["update"]
    torch.testing.assert_close(three[[0, 1]].mean(0), -HONEST[0])
    assert torch.equal(three[3], -HONEST[0]) and torch.equal(three[2], HONEST[2])


def fake(round: int, model: torch.Tensor, **settings: Any) -> torch.Tensor:
    made = Adversary(
        build("attack", {"name": "mpaf", "clients": (2, 6), **settings}), torch.arange(10), Key(0)
    )
    made.target = Target(layout=lambda: layout)
    asked = broadcast("train", model, UP.ids)
    return made.poison("train", SCHEMA, UP, Key(round), round, asked)["update"][ATTACKERS]


layout = Layout.of(torch.nn.Linear(2, 1, bias=False))


def test_fake_clients_pull_to_one_model_in_all_rounds() -> None:
    """The model is (1, 3), and a buffer; the base is within 1 / sqrt(2) of 0."""
    model = torch.tensor([1.0, 3.0, 9.0])
    first, second = fake(1, model), fake(2, 2 * model, factor=10.0)
    base = first[0] / 1e6 + model[:2]
    assert torch.equal(first[0], first[1]) and float(base.abs().max()) <= math.sqrt(0.5) + 1e-9
    torch.testing.assert_close(second[1], 10 * (base - 2 * model[:2]))
    bare = adversary("mpaf", factor=1.0).poison("train", SCHEMA, UP, Key(1))["update"]  # no model was sent
    assert float(bare[1].abs().max()) <= math.sqrt(0.5) and torch.equal(bare[1], bare[3])
    assert not torch.equal(base_model(layout, Key(0), base), base_model(layout, Key(1), base))


@pytest.mark.slow
def test_sybils_against_foolsgold_and_the_mean(simulate_all: Callable[..., list[Run]]) -> None:
    """The claim of FoolsGold's paper, in small: it tells copies of one update from the clients whose updates
    differ, and the mean does not; noise makes them harder to tell only when it is longer than the update."""
    common = {"train": {"rounds": 20, "lr": 0.1, "batch_size": 20, "dtype": "float32"}}
    common |= {"data": {"name": "digits", "clients": 10}, "model": {"name": "mlp", "hidden": 16}}
    tables = [
        {**common, "aggregator": rule, "attack": {"name": "sybils", "fraction": 0.4, "noise": noise}}
        for rule, noise in (("mean", 0.01), ("foolsgold", 0.0), ("foolsgold", 0.01), ("foolsgold", 3.0))
    ]
    mean, copies, noisy, loud = (run.final for run in simulate_all(tables))
    assert min(copies["accuracy"], noisy["accuracy"]) > mean["accuracy"] + 0.1
    assert copies["detection/auc/weights"] == noisy["detection/auc/weights"] == 1.0
    assert loud["detection/auc/weights"] < 0.95


@pytest.mark.slow
def test_fake_clients_against_norm_clipping_and_the_median(simulate_all: SimulateAll) -> None:
    """The paper's claim that fake clients ruin the mean, also with updates that are cut to a fixed length,
    holds (seed 0: nothing is left, and 0.14 of 0.87); its claim about the median does not at this size:
    there a fifth of attackers costs nothing."""
    bound = {"name": "norm-bound", "bound": 1.0}
    cases = [("mean", "mpaf"), (bound, None), (bound, "mpaf"), ("median", None), ("median", "mpaf")]
    ruined, clipped, pulled, median, fake = kept(simulate_all, cases)
    assert ruined < 0.2 and pulled < clipped - 0.4 and fake > median - 0.1
