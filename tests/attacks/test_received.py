"""Attacks that remember the models they were sent: over rounds, neither company nor ranks nor a device change
what they send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.columns import Columns
from holdfast.core.keys import Key
from holdfast.core.together import alone, in_lockstep
from tests.checks.attack_cases import EXPERIMENTS, World
from tests.pretended_gpu import pretended_gpu
from tests.thread_ranks import ThreadRanks, on_ranks

REMEMBER: list[dict[str, Any]] = [
    {"name": "free-rider", "what": "delta"},
    {"name": "free-rider", "what": "noise", "knows": "colluders"},
    {"name": "poisoned-fl", "every": 2},
    {"name": "poisoned-fl", "every": 2, "knows": "own"},
]
ROUNDS = 5
remembering = pytest.mark.parametrize(
    "settings", REMEMBER, ids=lambda settings: "-".join(map(str, settings.values()))
)


def sent_in_rounds(
    settings: dict[str, Any], batch: bool, ranks: ThreadRanks | None = None, device: Any = "cpu", d: int = 300
) -> list[Tensor]:
    """What all clients send in each round of each experiment. In the third round the attackers are away."""
    world, found = World(settings, d, device), []
    for round in range(1, ROUNDS + 1):
        bank = Key(round).normal(2, d + 1, dtype=torch.float64).to(device)
        asked = replace(world.sent, bank=bank)
        steps = []
        for place, up in enumerate(world.ups):
            if round == 3:
                mine = world.adversaries[place].malicious
                up = up.only(~torch.isin(up.ids, mine))
                asked = asked.only(~torch.isin(asked.to, mine))
            if ranks is not None:
                columns = Columns(d, ranks)
                up = replace(up.having(update=columns.mine(up["update"]).clone()), columns=columns)
            key = Key(100 * place + round)
            steps.append(world.adversaries[place].poisoning("train", world.schema, up, key, round, asked))
            asked = replace(world.sent, bank=bank)
        ups = in_lockstep(steps, batch=True) if batch else [alone(one) for one in steps]
        found += [up.whole()["update"] for up in ups]
    return found


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-9, atol=1e-11)


@remembering
def test_nothing_changes_what_they_send_in_any_round(settings: dict[str, Any]) -> None:
    expected = sent_in_rounds(settings, batch=False)
    honest = World(settings, 300).stack
    assert len({float(rows.sum()) for rows in expected[::EXPERIMENTS]}) == ROUNDS
    assert all(not torch.equal(rows, honest[0]) for rows in expected[:6])
    assert_close(sent_in_rounds(settings, batch=True), expected)
    one = on_ranks(1, lambda ranks: sent_in_rounds(settings, False, ranks))[0]
    assert_close(one, expected)
    for found in on_ranks(2, lambda ranks: sent_in_rounds(settings, False, ranks)):
        assert all(torch.equal(a, b) for a, b in zip(found, one, strict=True))
    with pretended_gpu() as gpu:
        found = sent_in_rounds(settings, True, device=gpu.device)
        assert gpu.largest_read < 300 * 8
        with gpu.not_counted():
            assert_close(found, expected)
