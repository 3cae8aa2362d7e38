"""Chameleon: its contrastive loss by hand, and which part is trained when."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from holdfast.attacks.chameleon import Chameleon, contrastive
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.local.losses import Batch
from tests.attacks.own_case import NETWORK, own_of


def slow(features: list[list[float]], labels: list[int], target: int) -> list[float]:
    out = []
    unit = [[v / math.hypot(*f) for v in f] for f in features]
    for i, label in enumerate(labels):
        dots = [sum(a * b for a, b in zip(unit[i], u, strict=True)) / 0.5 for u in unit]
        total = math.log(sum(math.exp(d) for j, d in enumerate(dots) if j != i))
        same = [d - total for j, d in enumerate(dots) if j != i and labels[j] == label]
        out.append(-(6.0 if label == target else 1.0) * sum(same) / max(1, len(same)))
    return out


def test_its_loss_by_hand_and_padding_does_not_count() -> None:
    net = NETWORK.load(NETWORK.initial(Key(3)), torch.float64).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 2, 1])
    found = torch.tanh(net.get_submodule("body")(x)).tolist()
    how = {"head": "head", "temperature": 0.5, "target": 1, "weight": 6.0}
    values = contrastive(net, Batch(x, y, torch.ones(6), {}), **how)
    torch.testing.assert_close(values, torch.tensor(slow(found, y.tolist(), 1), dtype=torch.float64))
    assert float(values[4].detach()) == 0  # no other has its label
    real = torch.tensor([1.0] * 4 + [0.0] * 2)
    padded = contrastive(net, Batch(x, y, real, {}), **how)[:4]
    torch.testing.assert_close(padded, torch.tensor(slow(found[:4], y[:4].tolist(), 1), dtype=torch.float64))


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_the_backbone_is_trained_first_and_then_the_head(plan: str) -> None:
    def sent(**settings: float) -> Tensor:
        return Chameleon(**settings).poisoned(own_of(plan=plan))["update"]

    head = NETWORK.head
    both, features = sent(epochs=2, head_epochs=1), sent(epochs=2, head_epochs=0)
    only = sent(epochs=0, head_epochs=1)
    assert torch.equal(both[:, ~head], features[:, ~head]) and bool((features[:, ~head] != 0).any(1).all())
    assert bool((features[:, head] == 0).all()) and bool((only[:, ~head] == 0).all())
    assert bool((both[:, head] != 0).any(1).all()) and not torch.equal(both[:, head], only[:, head])
    near = sent(epochs=2, head_epochs=1, radius=0.01)
    assert float(near[:, ~head].norm(dim=1).max()) <= 0.01 + 1e-9


def test_plans_agree() -> None:
    one, other = (Chameleon(epochs=2).poisoned(own_of(plan=plan))["update"] for plan in ("loop", "vmap"))
    torch.testing.assert_close(one, other)


def test_a_model_without_a_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NETWORK, "head_name", None)
    with pytest.raises(ConfigError, match="chameleon trains backbone and head apart"):
        Chameleon().poisoned(own_of())
