"""APFL: w for all, v for oneself, and a mixture of the two that is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.helpers import NORMALISED
from tests.methods.two import World, both_plans, close, numbers, rows, server


def state_of(world: World, alpha: float, v: list[list[float]], seen: bool = True) -> dict[str, torch.Tensor]:
    """The vector of a pair: alpha, w (b, h), v (b, h)."""
    assert [slot.name for slot in world.network.layout.slots] == [
        "alpha",
        "shared.backbone.weight",
        "shared.head.weight",
        "own.backbone.weight",
        "own.head.weight",
    ]
    return {
        "own": torch.cat([numbers([alpha, 9, 9], [alpha, 9, 9]), numbers(*v)], 1),
        "seen": torch.full((2,), seen),
    }


@both_plans
def test_a_step_of_both_models(plan: Plan) -> None:
    """w = (1, 2) moves as in FedAvg. v = (3, 0): the mixture by 1/4 is (1.5, 1.5). Client 4 has r = 2.25
    there and gradient (3.375, 3.375); client 7 r = 3.5, gradient (10.5, 10.5): v moves a quarter of 0.1 of
    that."""
    world = World(plan, name="apfl", alpha=0.25, adaptive=False)
    state, sent = world.rule.train(
        world.local, state_of(world, 0.25, [[3, 0], [3, 0]]), world.sent(1.0, 2.0), {}
    )
    close(sent["update"], [[-0.4, -0.2], [-1.2, -0.6]])
    close(state["own"], [[0.25, 0.6, 1.8, 3 - 0.084375, -0.084375], [0.25, -0.2, 1.4, 3 - 0.2625, -0.2625]])
    close(sent["loss"], [2.0, 4.5])  # of w


@both_plans
def test_the_mixture_follows_w_from_step_to_step(plan: Plan) -> None:
    """Two steps of client 4, by plain autograd."""
    world = World(plan, name="apfl", alpha=0.5, adaptive=False, epochs=2)
    state, _ = world.rule.train(world.local, state_of(world, 0.5, [[3, 0], [3, 0]]), world.sent(1.0, 2.0), {})
    w, v = numbers(1, 2), numbers(3, 0)
    for _ in range(2):
        leaves = w.clone().requires_grad_(), v.clone().requires_grad_()
        mixed = 0.5 * leaves[1] + 0.5 * w
        (dw,) = torch.autograd.grad(0.5 * leaves[0].prod() ** 2, leaves[0])
        (dv,) = torch.autograd.grad(0.5 * mixed.prod() ** 2, leaves[1])
        w, v = w - 0.1 * dw, v - 0.1 * dv
    close(state["own"][0], torch.cat([numbers(0.5), w, v]))


@both_plans
def test_alpha_moves_by_one_step_a_round(plan: Plan) -> None:
    """Client 4: v - w = (2, -2) and the gradient at (1.5, 1.5) is (3.375, 3.375): no move. If v = (2, 2) it
    is (1.25, 2), r = 2.5, gradient (5, 3.125), v - w = (1, 0): alpha <- 0.25 - 0.1 * 5. Client 7: r = 4,
    gradient (16, 10): far below 0, where it stops."""
    still = World(plan, name="apfl", alpha=0.25, epochs=0)
    state, _ = still.rule.train(
        still.local, state_of(still, 0.25, [[3, 0], [3, 0]]), still.sent(1.0, 2.0), {}
    )
    close(state["own"][:, 0], [0.25, 0.25])
    world = World(plan, name="apfl", alpha=0.75, epochs=0, lr=0.01)
    state, _ = world.rule.train(
        world.local, state_of(world, 0.25, [[2, 2], [2, 2]]), world.sent(1.0, 2.0), {}
    )
    close(state["own"][:, 0], [0.2, 0.25 - 0.16])
    fast = World(plan, name="apfl", epochs=0)
    state, _ = fast.rule.train(fast.local, state_of(fast, 0.25, [[2, 2], [2, 2]]), fast.sent(1.0, 2.0), {})
    close(state["own"][:, 0], [0.0, 0.0])


@both_plans
def test_what_is_used_is_the_mixture_with_the_newest_w(plan: Plan) -> None:
    world = World(plan, name="apfl")
    state = state_of(world, 0.25, [[1, 2], [3, 5]])
    used = world.rule.personal(world.local, state, world.sent(5.0, 6.0, has=(True, False)))
    close(used[:, 1:3], [[4, 5], [7.5, 8]])


@both_plans
def test_v_begins_as_the_first_w_it_is_sent(plan: Plan) -> None:
    world = World(plan, start=(7.0, 7.0), name="apfl", alpha=0.5, adaptive=False, epochs=0)
    first = world.rule.init(world.local)
    close(first["own"][:, 0], [0.5, 0.5])
    state, _ = world.rule.train(world.local, first, world.sent(1.0, 2.0), {})
    close(state["own"], [[0.5, 1, 2, 1, 2]] * 2)
    assert bool(state["seen"].all())


@pytest.mark.parametrize("model", [{"name": "mlp", "hidden": 6}, NORMALISED])
def test_with_alpha_0_it_is_fedavg(model: dict[str, Any], simulate: Callable[..., Run]) -> None:
    train = {"rounds": 3, "participation": 0.6, "momentum": 0.5, "weight_decay": 0.01}
    average = simulate(method="fedavg", model=model, train=train)
    mixed = simulate(method={"name": "apfl", "alpha": 0.0, "adaptive": False}, model=model, train=train)
    close(server(mixed), average.vector())
    module = mixed.model()
    assert type(module) is type(average.model()) and not isinstance(module, nn.ModuleDict)
    assert module.state_dict().keys() == average.model().state_dict().keys()
    w = mixed._experiment.network.layout.under("shared")
    for client in mixed.store.arrays(3)["cohort"].tolist():
        close(mixed.vector(client)[w], average.vector())
    assert mixed.metrics["bytes/up"].tolist() == average.metrics["bytes/up"].tolist()
    assert mixed.metrics["bytes/down"].tolist() == average.metrics["bytes/down"].tolist()
    assert mixed.metrics["loss/train"].tolist() == pytest.approx(average.metrics["loss/train"].tolist())


@pytest.mark.parametrize("model", [{"name": "mlp", "hidden": 6}, NORMALISED])
def test_with_alpha_1_v_is_trained_alone(model: dict[str, Any], simulate: Callable[..., Run]) -> None:
    """Running statistics included."""
    one = simulate(method={"name": "apfl", "alpha": 1.0, "adaptive": False}, model=model, train={"rounds": 3})
    alone = simulate(method="local", model=model, train={"rounds": 3})
    w = one._experiment.network.layout.under("shared")
    for client in range(5):
        close(one.vector(client)[w], alone.vector(client))


def test_alphas_differ_between_clients_and_stay_within_bounds(simulate: Callable[..., Run]) -> None:
    run = simulate(method="apfl", train={"rounds": 4, "lr": 0.3})
    alphas = [float(rows(run, client)["own"][0]) for client in range(5)]
    assert len(set(alphas)) > 1 and all(0 <= alpha <= 1 for alpha in alphas)
