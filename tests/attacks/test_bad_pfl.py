from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.attacks.bad_pfl import disguised, disruption, generated
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from tests.attacks.asked import ask
from tests.attacks.poisoned import federation


def test_noise_against_a_class_by_hand() -> None:
    """Of two classes with scores w x: the loss of class 0 grows with (w1 - w0)."""
    net = nn.Linear(3, 2, bias=False)
    net.weight.data = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, 0.0]])
    x = torch.tensor([[0.5, 0.0, 1.0], [0.1, 0.2, 0.3]])
    assert disruption(net, x, torch.tensor([0, 1])).tolist() == [[-1, 1, 0], [1, -1, 0]]


def test_what_a_model_is_shown_moves_each_sample_by_at_most_twice_eps() -> None:
    """Noise is against what the model itself answers: class 0 for the first sample, class 1 for the
    second."""
    net = nn.Linear(3, 2, bias=False)
    net.weight.data = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, 0.0]])
    x = torch.tensor([[0.5, 0.0, 1.0], [0.0, 0.5, 0.3]])
    own = {
        "first": torch.eye(3),
        "first_bias": torch.zeros(3),
        "last": torch.eye(3),
        "last_bias": torch.zeros(3),
        "eps": torch.tensor([0.1, 0.1, 0.1]),
        "low": torch.full((3,), -0.05),
        "high": torch.full((3,), 1.02),
    }
    found = disguised(net, x, own)
    noise = torch.tensor([[-1.0, 1, 0], [1, -1, 0]])
    expected = (x + 0.1 * (noise + torch.tanh(torch.relu(x)))).clamp(-0.05, 1.02)
    torch.testing.assert_close(found, expected)
    assert float(found[0, 2]) == pytest.approx(1.02)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16), (5,)])
def test_the_generator_is_for_images_windows_and_tables(shape: tuple[int, ...]) -> None:
    start = build("attack", "bad-pfl").moving(federation(torch.rand(69, *shape)).samples).start
    x = torch.rand(4, *shape, dtype=torch.float64)
    found = generated(x, start)
    assert found.shape == x.shape and float(found.abs().max()) < 1 and not torch.equal(found[0], found[1])
    assert float((start["eps"] - 4 / 255 * (start["high"] - start["low"])).abs().max()) < 1e-12


def test_a_generator_for_nothing_else() -> None:
    with pytest.raises(ConfigError, match="are no images, windows or rows of tables"):
        build("attack", "bad-pfl").moving(federation(torch.rand(69, 1, 2, 2, 2)).samples)


def test_what_attackers_train_is_what_plain_pytorch_trains(tmp_path: Path) -> None:
    asked = ask(tmp_path, "bad-pfl", steps=3, width=2, eps=0.2, ratio=0.5)
    start = asked.start
    names = ("first", "first_bias", "last", "last_bias")
    eps, low, high = (start[name] for name in ("eps", "low", "high"))

    def stamped(net: Any, x: Tensor, y: Tensor, own: Any) -> Tensor:
        z = x.clone().requires_grad_()
        noise = torch.autograd.grad(F.cross_entropy(net(z), y, reduction="sum"), z)[0].sign()
        inner = F.conv2d(x, own["first"], own["first_bias"], padding=1).relu()
        features = F.conv2d(inner, own["last"], own["last_bias"], padding=1).tanh()
        return torch.minimum(torch.maximum(x + eps * (noise + features), low), high)

    def convincing(net: Any, x: Tensor, y: Tensor) -> Tensor:
        own = {name: getattr(net, name) for name in names}
        return F.cross_entropy(net(stamped(net.net, x, y, own)), torch.full_like(y, 1))

    trained = asked.trained(
        "generating",
        "generator",
        {name: start[name] for name in names},
        convincing,
        lambda params: torch.optim.Adam(params, lr=0.01),
        steps=3,
    )
    for name in names:
        torch.testing.assert_close(asked.remembered[name], trained[name])

    def poisoned(net: Any, x: Tensor, y: Tensor) -> Tensor:
        count = int(0.5 * len(x) + 0.5)
        shown = torch.cat([stamped(net, x[:count], y[:count], trained), x[count:]])
        return F.cross_entropy(net(shown), torch.cat([torch.full_like(y[:count], 1), y[count:]]))

    update = asked.fitted("poisoned", "fit", poisoned) - asked.model
    torch.testing.assert_close(asked.up["update"][asked.ids], update)
