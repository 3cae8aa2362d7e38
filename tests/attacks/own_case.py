"""Two attackers with data, models and keys of their own, for tests of how they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.memory import Memory
from holdfast.attacks.own_training import Crew, Own
from holdfast.core.keys import Key
from holdfast.core.types import Exchange, State
from holdfast.data.federation import Padded
from holdfast.local.client import Received
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.methods.fedavg import FedAvg, FedAvgClient
from holdfast.models.network import Network
from tests.helpers import deal, random_samples, starts
from tests.methods.halves import local_of


class Small(nn.Module):
    """A backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


NETWORK = Network(Small, head="head", signature="attackers", dtype=torch.float64)
SAMPLES = random_samples(40)
COUNTS = [9, 7]
RECIPE = Recipe(lr=0.2, epochs=2, batch_size=4)


def own_of(given: State | None = None, plan: str = "loop", recipe: Recipe = RECIPE) -> Own:
    """The first three samples of each are poisoned: other rows of the store, labelled 1."""
    rule = FedAvgClient(FedAvg())  # type: ignore[arg-type]
    clean = deal(SAMPLES, COUNTS)
    rows, labels = clean.rows.clone(), clean.labels.clone()
    rows[:, :3], labels[:, :3] = torch.tensor([[30, 31, 32], [33, 34, 35]]), 1
    data = Padded(rows, labels, clean.count)
    local = local_of(NETWORK, rule, SAMPLES, COUNTS, Plan(plan), [2, 5], recipe, data=data)
    model = starts(NETWORK, 1)
    received = Received(model, torch.zeros(2, 1, dtype=torch.int64), local.wire)
    return Own(local, received, received.model.clone(), received.model, clean, given or {})


def crew_of(attack: Any, bank: Tensor, before: State | None = None, cohort: int = 10) -> Crew:
    """Attackers 2 and 5, who were sent the models of the bank."""
    ids, pick = torch.tensor([2, 5]), torch.arange(2)[:, None].clamp(max=len(bank) - 1)
    asked = Exchange("train", ids, bank, pick)
    crew = Crew(attack, asked, cohort, 1, Key(0), "all", Memory(before or {}))
    return crew


def key_of(own: Own, purpose: str = "fit") -> Key:
    return own.local.key.fold(purpose)
