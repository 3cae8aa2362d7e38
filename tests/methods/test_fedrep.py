"""FedRep: the head under the received body, then the body under that head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from holdfast.core.keys import Key
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.helpers import NORMALISED, slow_fit
from tests.methods.two import World, both_plans, close, numbers, rows, server


@both_plans
def test_first_the_head_then_the_body(plan: Plan) -> None:
    """Client 4: h = 2 - 0.1 * 2 * 1; then r = 1.8, b = 1 - 0.1 * 1.8 * 1.8. Client 7 has the head 1: h = 1 -
    0.1 * 1 * 2 = 0.8; then r = 0.6, b = 1 - 0.1 * 0.6 * 0.8 * 2."""
    world = World(plan, name="fedrep", head_epochs=1)
    state, sent = world.rule.train(world.local, {"own": numbers([9, 2], [9, 1])}, world.sent(1.0), {})
    close(state["own"], [[0.676, 1.8], [0.904, 0.8]])
    close(sent["update"], [[-0.324], [-0.096]])
    close(sent["loss"], [1.62, 0.18])  # of the body's epochs


@both_plans
def test_head_epochs_are_the_heads_own(plan: Plan) -> None:
    """Two epochs: client 4 has h = 1.8, then 1.8 - 0.1 * 1.8; no epoch for the body."""
    world = World(plan, name="fedrep", head_epochs=2, epochs=0)
    state, sent = world.rule.train(world.local, {"own": numbers([9, 2], [9, 1])}, world.sent(1.0), {})
    close(state["own"], [[1, 1.62], [1, 0.8 - 0.1 * 0.6 * 2]])
    close(sent["update"], [[0.0], [0.0]])


def test_the_frozen_part_stays_running_statistics_included(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedrep", model=NORMALISED, train={"rounds": 1, "local_epochs": 0})
    head, initial = run._experiment.network.head, run._experiment.initial
    for client in range(5):
        own = rows(run, client)["own"]
        assert torch.equal(own[~head], initial[~head]) and not torch.equal(own[head], initial[head])


def test_without_head_epochs_it_is_fedavg_of_the_body(simulate: Callable[..., Run]) -> None:
    run = simulate(method={"name": "fedrep", "head_epochs": 0}, train={"rounds": 2, "local_epochs": 2})
    experiment = run._experiment
    network, federation, w0 = experiment.network, experiment.federation, experiment.initial
    named = network.layout.unflatten(w0)

    def head_back(net: nn.Module, row: int) -> None:
        for name, value in net.named_parameters():
            if name.startswith("head"):
                value.data.copy_(named[name])

    def trained(w: Tensor, client: int, round: int) -> Tensor:
        key = Key(0).fold("client", round, 0).fold(torch.tensor([client])).fold("fit")
        data = federation.train.take(torch.tensor([client]))
        return slow_fit(
            network,
            w[None],
            federation.samples,
            data,
            key,
            Recipe(lr=0.1, epochs=2, batch_size=5),
            after=head_back,
        )[0]

    w, share = w0, federation.train.counts.double() / federation.train.counts.sum()
    for round in (1, 2):
        w = sum((share[c] * trained(w, c, round) for c in range(5)), torch.zeros_like(w0))
    torch.testing.assert_close(server(run), w[~network.head], rtol=0, atol=1e-12)
    for client in range(5):
        close(run.vector(client), w)
