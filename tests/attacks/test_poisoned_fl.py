"""PoisonedFL against a slow reference over rounds, and its claim in small."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.attacks import Adversary
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import Field, Uplink, broadcast
from tests.attacks.played import SimulateAll, kept

D = 50
UP = Uplink(torch.arange(4), {"update": Key(1).normal(4, D, dtype=torch.float64)})


def played(models: list[Tensor], **settings: Any) -> list[Tensor]:
    """What is sent in round after round, when these models are received."""
    attack = build("attack", {"name": "poisoned-fl", "clients": (1, 3), **settings})
    made, sent = Adversary(attack, torch.arange(4), Key(0)), []
    for round, model in enumerate(models, 1):
        asked = broadcast("train", model, UP.ids)
        rows = made.poison("train", {"update": Field("update", (D,))}, UP, Key(round), round, asked)["update"]
        assert torch.equal(rows[1], rows[3]) and torch.equal(rows[0], UP["update"][0])
        sent.append(rows[1])
    return sent


def slow(models: list[Tensor], s: list[float], every: int, c: float) -> list[list[float]]:
    """The paper's steps, number by number."""
    size = lambda x: math.sqrt(sum(a * a for a in x))  # noqa: E731
    out = [[0.0] * D]
    tested, since = models[0].tolist(), 1
    for round in range(2, len(models) + 1):
        now, before, last = models[round - 1].tolist(), models[round - 2].tolist(), out[-1]
        g = [a - b for a, b in zip(now, before, strict=True)]
        share = size(g) / size(last) if size(last) else 0.0
        v = [abs(a - b * share) for a, b in zip(g, last, strict=True)]
        if round - since >= every:
            agree = sum((a - b) * sign > 0 for a, b, sign in zip(now, tested, s, strict=True))
            if agree < D / 2 + 2.3263478740 * math.sqrt(D) / 2 and c * 0.7 >= 0.5:
                c *= 0.7
            tested, since = now, round
        out.append([c * size(g) * a / size(v) * sign for a, sign in zip(v, s, strict=True)])
    return out


@pytest.mark.parametrize("every", [2, 50])
@pytest.mark.parametrize("knows", ["own", "colluders"])
def test_it_equals_the_slow_reference(knows: str, every: int) -> None:
    models = [Key(round).normal(D, dtype=torch.float64) for round in range(9)]
    sent = played(models, every=every, knows=knows)
    s = sent[1].sign()
    assert not sent[0].any() and all(torch.equal(row.sign(), s) for row in sent[1:])
    torch.testing.assert_close(torch.stack(sent), torch.tensor(slow(models, s.tolist(), every, 8.0)).double())
    assert 10 < int((s > 0).sum()) < 40


def test_c_stays_where_the_model_follows() -> None:
    """Each model is a step along the signs, longer in some coordinates than in others, or against them."""
    zeros = [torch.zeros(D, dtype=torch.float64), torch.ones(D, dtype=torch.float64)]
    s = played(zeros)[1].sign()
    steps = [(1 + Key(round).uniform(D, dtype=torch.float64)) * s for round in range(6)]
    models = torch.stack(steps).cumsum(0)
    for way, factors in ((1, [8.0] * 5), (-1, [8 * 0.7**tests for tests in range(1, 6)])):
        sent = played([*(way * models)], every=1)[1:]
        c = [float(row.norm() / step.norm()) for row, step in zip(sent, steps[1:], strict=True)]
        assert c == pytest.approx(factors)


def test_nothing_of_the_updates_is_read() -> None:
    models = [Key(round).normal(D, dtype=torch.float64) for round in range(3)]
    before = played(models)[2]
    others, UP.fields["update"][:] = UP["update"].clone(), 7.0  # type: ignore[index]
    try:
        assert torch.equal(played(models)[2], before)
    finally:
        UP.fields["update"][:] = others  # type: ignore[index]


@pytest.mark.slow
def test_a_mean_of_bounded_updates_loses_more_than_to_attacks_that_know_them(
    simulate_all: SimulateAll,
) -> None:
    """The paper's claim holds for a mean of updates that are cut to a fixed length: it costs more than LIE
    and Min-Max, who know everybody's updates (seed 0: 0.65 of 0.94 is left, and 0.91 and 0.89). The trimmed
    mean loses little, against the paper, whose runs have a larger network and many more rounds."""
    bound, trimmed = {"name": "norm-bound", "bound": 1.0}, {"name": "trimmed-mean", "f": 4}
    cases = [(bound, name) for name in ("lie", "min-max", "poisoned-fl")]
    cases += [(trimmed, None), (trimmed, "poisoned-fl")]
    lie, min_max, poisoned, honest, resisted = kept(simulate_all, cases, rounds=100)
    assert poisoned < min(lie, min_max) - 0.05 and resisted > honest - 0.05
