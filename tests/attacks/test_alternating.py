"""Alternating minimisation, against the same steps in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from holdfast.attacks.alternating import Alternating
from tests.attacks.own_case import NETWORK, SAMPLES, crew_of, key_of, own_of
from tests.helpers import slow_fit

SIZE = NETWORK.layout.size


def test_its_turns_are_those_of_the_paper() -> None:
    moved = torch.linspace(-0.1, 0.1, SIZE, dtype=torch.float64).expand(2, -1)
    own = own_of({"boost": torch.full((2,), 3.0), "moved": moved})
    model, aim = own.model, own.model + moved
    assert own.poisoned.count.tolist() == [3, 3] and bool((own.poisoned.labels == 1).all())
    once = replace(own.local.recipe, epochs=1, lr=0.05)
    for turn in range(2):
        purpose = f"poisoned {turn}"
        bad = slow_fit(NETWORK, model, SAMPLES, own.poisoned, key_of(own, purpose), once)
        model = model + 3 * (bad - model)

        def near(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            away = (nn.utils.parameters_to_vector(net.parameters()) - aim[0]).norm()
            return nn.functional.cross_entropy(net(x), y) + 0.5 * away

        recipe = replace(own.local.recipe, epochs=2)
        key = key_of(own, f"stealth {turn}")
        model = slow_fit(NETWORK, model, SAMPLES, own.clean, key, recipe, loss=near)
    attack = Alternating(epochs=2, stealth_epochs=2, rho=0.5, lr=0.05)
    torch.testing.assert_close(attack.poisoned(own)["update"], model - own.base)


def test_it_boosts_by_the_cohort_and_remembers_what_was_sent() -> None:
    attack, bank = Alternating(), torch.tensor([[1.0, 2.0]])
    crew = crew_of(attack, bank, {"sent": torch.tensor([0.5, 4.0])})
    handed = next(attack.lead(crew)).shared
    assert handed["boost"].tolist() == 10.0 and handed["moved"].tolist() == [0.5, -2.0]
    assert crew.memory.fresh["sent"].tolist() == [1.0, 2.0]
