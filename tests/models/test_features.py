"""Features are whatever the head is called with, in any module, and the same where a loss runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.models.features import catching, features, features_and_logits

X = torch.arange(6, dtype=torch.float32).view(3, 2) / 6


class Odd(nn.Module):
    """A head that is no child of the module itself, and gets a square to classify."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.ends = nn.ModuleDict({"last": nn.Sequential(nn.Flatten(), nn.Linear(4, 3))})

    def forward(self, x: Tensor) -> Tensor:
        return self.ends["last"](self.body(x).tanh().view(-1, 2, 2)) * 2


def test_a_split_networks_features_are_its_backbones() -> None:
    net = build("model", {"name": "mlp", "hidden": 5}).build((2,), 3).eval()
    found, logits = features_and_logits(net, X, "head")
    assert torch.equal(found, net.backbone(X)) and torch.equal(logits, net(X))


def test_any_module_with_a_named_head_has_features() -> None:
    net = Odd()
    assert torch.equal(features(net, X, "ends.last"), net.body(X).tanh())
    assert torch.equal(features(net, X, None), net(X))  # without a head, the whole answer


def test_other_tensors_may_replace_the_modules_own() -> None:
    net, other = Odd(), Odd()
    expected = features(other, X, "ends.last")
    assert torch.equal(features(net, X, "ends.last", dict(other.named_parameters())), expected)
    assert torch.equal(features(net, X, "ends.last"), net.body(X).tanh())  # and are gone again


def test_features_in_stacks_under_swapped_tensors_and_traced() -> None:
    nets = [Odd(), Odd()]
    stacked = {
        name: torch.stack([dict(net.named_parameters())[name] for net in nets])
        for name, _ in nets[0].named_parameters()
    }

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nets[0]

        def forward(self, x: Tensor) -> Tensor:
            return features(self.net, x, "ends.last")

    def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(Wrapped(), {f"net.{name}": value for name, value in tensors.items()}, (x,))

    expected = torch.stack([features(net, X, "ends.last") for net in nets])
    torch.testing.assert_close(vmap(one, in_dims=(0, None))(stacked, X), expected)
    traced = make_fx(partial(vmap(one, in_dims=(0, None)), stacked))(X)
    torch.testing.assert_close(traced(X), expected)


def test_the_hook_is_removed_also_after_an_error() -> None:
    net = Odd()
    with pytest.raises(RuntimeError):
        features(net, torch.zeros(3, 7), "ends.last")
    features(net, X, "ends.last")
    assert not net.get_submodule("ends.last")._forward_pre_hooks and not net._forward_hooks


def test_a_head_that_is_not_called_is_an_error() -> None:
    net = Odd()
    net.spare = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="never calls the head 'spare'"):
        features(net, X, "spare")
    with catching(net, "ends.last") as caught:
        net(X), net(X)
    assert len(caught) == 2
