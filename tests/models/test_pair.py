"""Two networks of one shape side by side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.core.keys import Key
from holdfast.local import programs
from holdfast.local.plan import Plan
from holdfast.local.programs import forget
from holdfast.models.pair import Pair, filled, halves, loss_with, taken
from tests.helpers import network_of
from tests.methods.two import World


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 4))


def test_both_models_of_a_pair_start_equal_and_the_first_is_visible() -> None:
    network = network_of(lambda: Pair(layers()))
    first, second = halves(network)
    start = network.initial(Key(0))
    assert (
        torch.equal(taken(start, first), taken(start, second))
        and len(first) + len(second) == network.layout.size
    )
    assert (
        int((first < network.layout.parameters).sum())
        == int((second < network.layout.parameters).sum())
        == 8 + 4 + 12
    )
    other = filled(start[None].repeat(2, 1), second, torch.zeros(2, len(second), dtype=torch.float64))
    assert torch.equal(other[:, first], start[first].expand(2, -1)) and not other[:, second].any()
    x = torch.ones(5, 3, dtype=torch.float64)
    for vector in (start, other[0]):
        pair = network.load(vector, torch.float64).eval()
        torch.testing.assert_close(pair(x), pair.get_submodule("shared")(x))


def test_a_loss_with_other_parameters_uses_its_own_statistics() -> None:
    net = layers().double()
    zeros = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    x = torch.ones(5, 3, dtype=torch.float64)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = loss_with(net, zeros, lambda module, batch: module(batch).sum(1) + module[0].weight.sum(), x)
    assert not found.any()
    after = net.state_dict()
    assert all(torch.equal(after[name], before[name]) for name, _ in net.named_parameters())
    assert int(after["1.num_batches_tracked"]) == 1 and torch.equal(
        after["1.running_mean"], torch.zeros(2, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", ["apfl", "pfedme"])
def test_steps_of_a_pair_can_be_compiled(name: str) -> None:
    """A second model inside the loss, or several passes in one step: nothing of that must stop it from being
    traced."""
    forget()
    world = World(Plan("compiled-vmap"), name=name)
    world.rule.train(world.local, world.rule.init(world.local), world.sent(1.0, 2.0), {})
    kept = list(programs._programs.values())
    assert len(kept) == (2 if name == "apfl" else 1)  # alpha's step and the others
    for ready in kept:
        want, got = ready._step(ready.memory), ready.traced()(ready.memory)
        assert want.keys() == got.keys()
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-12)
