"""Neurotoxin: which coordinates stay, and how the others are trained, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.attacks.coordinates import largest
from holdfast.attacks.neurotoxin import Neurotoxin
from tests.attacks.own_case import NETWORK, SAMPLES, crew_of, key_of, own_of
from tests.helpers import slow_fit

SIZE = NETWORK.layout.size


def slow(own: object, left_out: torch.Tensor) -> torch.Tensor:
    """Plain training that puts back what must stay, after every step."""

    def put_back(net: nn.Module, row: int) -> None:
        vector = nn.utils.parameters_to_vector(net.parameters())
        kept = torch.where(left_out[row], own.model[row], vector)  # type: ignore[attr-defined]
        nn.utils.vector_to_parameters(kept.detach(), net.parameters())

    data, recipe = own.local.data, own.local.recipe  # type: ignore[attr-defined]
    return slow_fit(NETWORK, own.model, SAMPLES, data, key_of(own), recipe, after=put_back)  # type: ignore


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_coordinates_that_moved_most_stay(plan: str) -> None:
    moved = torch.zeros(2, SIZE, dtype=torch.float64)
    moved[:, 3], moved[:, 7], moved[:, 20] = -5.0, 4.0, 1.0  # int(0.08 * 31) = 2 are left out
    own = own_of({"moved": moved}, plan)
    sent = Neurotoxin(top=0.08, epochs=2).poisoned(own)["update"]
    left_out = torch.zeros(2, SIZE, dtype=torch.bool)
    left_out[:, [3, 7]] = True
    torch.testing.assert_close(sent, slow(own, left_out) - own.model)
    assert bool((sent[:, [3, 7]] == 0).all()) and bool((sent[:, 20] != 0).all())


def test_without_a_last_update_nothing_stays() -> None:
    own = own_of({"moved": torch.zeros(2, SIZE, dtype=torch.float64)})
    expected = slow(own, torch.zeros(2, SIZE, dtype=torch.bool)) - own.model
    torch.testing.assert_close(Neurotoxin(epochs=2, top=0.5).poisoned(own)["update"], expected)


def test_the_authors_leave_out_where_the_gradient_on_clean_samples_is_largest() -> None:
    own = own_of()
    sent = Neurotoxin(variant="authors", top=0.2, epochs=2).poisoned(own)["update"]
    left_out = torch.zeros(2, SIZE, dtype=torch.bool)
    for row, count in enumerate(own.clean.count.tolist()):
        net = NETWORK.load(own.model[row], torch.float64).double()
        x = SAMPLES.batch(own.clean.rows[row, :count], torch.float64)
        nn.functional.cross_entropy(net(x), own.clean.labels[row, :count]).backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        left_out[row, gradient.abs().argsort(descending=True)[:6]] = True
    torch.testing.assert_close(sent, slow(own, left_out) - own.model)


def test_each_epoch_ends_within_the_radius() -> None:
    sent = Neurotoxin(epochs=2, radius=0.05).poisoned(own_of())["update"]
    torch.testing.assert_close(sent.norm(dim=1), torch.full((2,), 0.05, dtype=torch.float64))


def test_the_last_update_is_the_difference_of_what_was_sent() -> None:
    attack, bank = Neurotoxin(), torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    first = crew_of(attack, bank)
    assert next(attack.lead(first)).shared["moved"].tolist() == [0, 0]
    assert first.memory.fresh["sent"].tolist() == [2.0, 4.0]  # of both
    second = crew_of(attack, bank, {"sent": torch.tensor([2.0, 1.0])})
    assert next(attack.lead(second)).shared["moved"].tolist() == [0.0, 3.0]
    other = crew_of(attack, bank, {"sent": torch.tensor([2.0])})  # what travels has changed
    assert next(attack.lead(other)).shared["moved"].tolist() == [0, 0]
    assert not next(Neurotoxin(variant="authors").lead(second)).shared


def test_equal_scores_are_chosen_together() -> None:
    score = torch.tensor([[5.0, 2.0, 2.0 + 4e-16, 1.0, 9.0], [3.0, 3.0, 3.0, 1.0, 9.0]], dtype=torch.float64)
    among = torch.tensor([True, True, True, True, False])
    assert largest(score, among, 0.5).tolist() == [
        [True, True, True, False, False],
        [True, True, True, False, False],
    ]
    assert largest(score, among, 0.3).tolist() == [
        [True, False, False, False, False],
        [True, True, True, False, False],
    ]
    assert not largest(score, among, 0.2).any()
