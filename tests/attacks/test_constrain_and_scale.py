"""Model replacement with constrain-and-scale, against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from holdfast.attacks.constrain_and_scale import ConstrainAndScale
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from tests.attacks.own_case import NETWORK, SAMPLES, crew_of, key_of, own_of
from tests.helpers import slow_fit


def test_its_loss_is_that_of_the_paper() -> None:
    attack = ConstrainAndScale(alpha=0.7, epochs=3, lr=0.1)
    own = own_of({"factor": torch.full((2,), 10.0)})
    start = torch.nn.utils.parameters_to_vector(NETWORK.load(own.model[0], torch.float64).parameters())

    def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        away = (torch.nn.utils.parameters_to_vector(net.parameters()) - start).norm()
        return 0.7 * nn.functional.cross_entropy(net(x), y) + 0.3 * away

    recipe = replace(own.local.recipe, lr=0.1, epochs=3)
    model = slow_fit(NETWORK, own.model, SAMPLES, own.local.data, key_of(own), recipe, loss=loss)
    sent = attack.poisoned(own)
    torch.testing.assert_close(sent["update"], 10 * (model - own.model))


def test_a_bound_limits_the_factor_and_never_shrinks() -> None:
    own = own_of({"factor": torch.full((2,), 10.0)})
    plain = ConstrainAndScale(factor=1.0, epochs=1).poisoned(own_of({"factor": torch.ones(2)}))["update"]
    length = plain.norm(dim=1)
    for bound in (1e-3, 1.5 * float(length.max()), 1e3):
        wanted = torch.minimum(10 * length, length.clamp(min=bound))
        sent = ConstrainAndScale(bound=bound, epochs=1).poisoned(own)["update"]
        torch.testing.assert_close(sent.norm(dim=1), wanted.to(sent))


@pytest.mark.parametrize(("factor", "expected"), [(None, 10.0), (2.5, 2.5)])
def test_the_factor_is_the_size_of_the_cohort_or_its_own(factor: float | None, expected: float) -> None:
    attack = ConstrainAndScale(factor=factor)
    asked = next(attack.lead(crew_of(attack, torch.zeros(1, 31))))
    assert asked.task == "poisoned" and asked.shared["factor"].tolist() == expected


def test_what_poisons_its_data_is_a_part_of_its_settings() -> None:
    about = build("attack", {"name": "neurotoxin", "poison": {"size": 2, "target": 4}})
    assert about.of_data.name == "backdoor" and about.of_data.size == 2 and about.target == 4
    assert build("attack", {"name": "neurotoxin", "poison": "label-flip"}).trigger(SAMPLES) is None
    for poison, said in (
        ("lie", "poison: 'lie' changes what clients send; name an attack on data"),
        ({"size": 2, "fraction": 0.1}, "'fraction' belongs beside poison"),
        ({"sise": 2}, "unknown key 'attack.poison.sise'"),
    ):
        with pytest.raises(ConfigError, match=said):
            build("attack", {"name": "neurotoxin", "poison": poison})
