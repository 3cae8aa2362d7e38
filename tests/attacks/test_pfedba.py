from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.attacks.pfedba import apart
from holdfast.local.losses import Batch
from tests.attacks.asked import Bounded, ask
from tests.attacks.test_a3fl import poisoned_like


class Holder(nn.Module):
    """A network with a trigger, as attackers train it."""

    def __init__(self, net: nn.Module, values: Tensor):
        super().__init__()
        self.net, self.values = net, nn.Parameter(values)


def distance(net: nn.Module, x: Tensor, stamped: Tensor, y: Tensor, target: int) -> Tensor:
    """By PyTorch's own gradients of gradients."""
    params = [p for p in net.parameters() if p.requires_grad]
    main = torch.autograd.grad(F.cross_entropy(net(x), y), params)
    loss = F.cross_entropy(net(stamped), torch.full_like(y, target))
    mine = torch.autograd.grad(loss, params, create_graph=True)
    return torch.cat([(a - b).flatten() for a, b in zip(mine, main, strict=True)]).norm()


def test_the_distance_of_two_gradients_by_hand() -> None:
    """Two classes, weights 0: the gradient of sample x of class 0 is -x/2 and x/2, of class 1 the opposite.
    With x = 2 of class 0 and a trigger that makes it 1, of class 1, the difference is 1/2 + 1 in both
    weights."""
    net = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(net.weight)
    batch = Batch(
        torch.tensor([[2.0], [9.0]]),
        torch.tensor([0, 1]),
        torch.tensor([1.0, 0.0]),
        {"places": torch.ones(1)},
    )
    found = apart(Holder(net, torch.tensor([1.0])), batch, target=1)
    assert found.tolist() == pytest.approx([1.5 * 2**0.5] * 2)


def test_what_attackers_train_is_what_plain_pytorch_trains(tmp_path: Path) -> None:
    asked = ask(tmp_path, "pfedba", by_loss=3, by_gradient=1, rate=0.3, target=2)
    start = asked.start
    places, low, high = (start[name] for name in ("places", "low", "high"))
    assert places.sum() == 16 and places[0, 2:6, 2:6].all()  # half of the side of 8

    def by_loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(torch.where(places > 0.5, net.values, x)), torch.full_like(y, 2))

    def by_gradient(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return distance(net.net, x, torch.where(places > 0.5, net.values, x), y, 2)

    values = {"values": start["values"]}
    steps: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("aligned_by_loss", "by loss", by_loss, {"steps": 3}),
        ("aligned_by_gradient", "by gradient", by_gradient, {"epochs": 1}),
    ]
    for work, purpose, loss, much in steps:
        values = asked.trained(
            work, purpose, values, loss, lambda params: Bounded(params, 0.3, low, high), **much
        )
    torch.testing.assert_close(asked.remembered["values"], values["values"])
    update = poisoned_like(asked, values["values"], places, target=2, ratio=0.25)
    torch.testing.assert_close(asked.up["update"][asked.ids], update)


def test_the_loss_is_aligned_in_the_first_round_only(tmp_path: Path) -> None:
    without = ask(tmp_path, "pfedba", by_loss=0, by_gradient=0)
    assert torch.equal(without.remembered["values"], without.start["values"])
