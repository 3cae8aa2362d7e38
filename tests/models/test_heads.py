"""A module in the place of the head: names stay, the head's own tensors are found through it, and sizes are
read off its matrices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Wire
from holdfast.models.features import head_sizes, linear_head
from holdfast.models.heads import ReplacedHead, replace_head


class Doubled(ReplacedHead):
    def __init__(self, head: nn.Module, classes: int, features: int):
        super().__init__(head)
        self.sizes = classes, features

    def forward(self, features: Tensor) -> Tensor:
        return 2 * self.inner(features)


def deep() -> nn.Module:
    """A head of two layers, inside another module, in front of the body's parameters."""
    head = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return nn.ModuleDict({"out": nn.ModuleDict({"fc": head}), "body": nn.Linear(2, 5)})


def test_a_replaced_head_also_works_in_a_sequence() -> None:
    net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(4, 2)
    before = net(x)
    assert replace_head(net, "2", Doubled) is net
    torch.testing.assert_close(net(x), 2 * before)
    assert net[2].sizes == (3, 5) and net[2].weight is net[2].inner.weight
    assert [name for name, _ in net.named_parameters()] == [
        "0.weight",
        "0.bias",
        "2.inner.weight",
        "2.inner.bias",
    ]
    torch.testing.assert_close(copy.deepcopy(net)(x), 2 * before)
    with pytest.raises(AttributeError):
        _ = net[2].nonsense


def test_head_sizes_are_read_from_the_layout() -> None:
    layout = Layout.of(deep(), "out.fc")
    assert head_sizes(layout) == (3, 5)
    with pytest.raises(ConfigError, match="one linear layer"):
        linear_head(layout)
    with pytest.raises(ConfigError, match="needs a head"):
        head_sizes(Layout.of(deep()))
    with pytest.raises(ConfigError, match="needs a head"):
        replace_head(deep(), None, Doubled)


def test_a_linear_head_is_found_in_the_vector() -> None:
    """Of a wire that carries the head alone, the places are those of the packed vector."""
    layout = Layout.of(nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3)), "1")
    weight, bias = linear_head(layout)
    assert (
        bias is not None
        and (weight.start, weight.stop, bias.stop) == (15, 30, 33)
        and layout.slot("1.bias") == bias
    )
    weight, bias = linear_head(Wire.of(layout, layout.under("1")).layout(layout))
    assert (
        bias is not None and (weight.start, weight.stop, bias.stop) == (0, 15, 18) and weight.shape == (3, 5)
    )
    assert linear_head(Layout.of(nn.Sequential(nn.Linear(2, 5, bias=False)), "0"))[1] is None
