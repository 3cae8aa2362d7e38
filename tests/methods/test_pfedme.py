"""pFedMe: theta within reach of w, found on every batch; w follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.core.together import computed_alone
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.helpers import NORMALISED
from tests.methods.two import World, both_plans, close, numbers, reply, rows, server


@both_plans
def test_two_inner_steps(plan: Plan) -> None:
    """lam = 2, inner_lr = 0.1. Client 4: theta = (1, 2) - 0.1 (4, 2) = (0.6, 1.8); r = 1.08, gradient (1.944,
    0.648), pull 2 (-0.4, -0.2): theta = (0.6 - 0.1144, 1.8 - 0.0248). Client 7: theta = (-0.2, 1.4); r =
    -1.56, gradient (-4.368, 0.624), pull 2 (-1.2, -0.6): theta = (-0.2 + 0.6768, 1.4 + 0.0576). Then w moves
    by 0.1 * 2 of the way to theta."""
    world = World(plan, name="pfedme", lam=2.0, inner_lr=0.1, inner_steps=2)
    state, sent = world.rule.train(world.local, world.rule.init(world.local), world.sent(1.0, 2.0), {})
    theta = numbers([0.4856, 1.7752], [0.4768, 1.4576])
    close(state["theta"], theta)
    close(sent["update"], 0.2 * (theta - numbers(1, 2)))
    close(sent["loss"], [1.08**2 / 2, 1.56**2 / 2])
    close(world.rule.personal(world.local, state, world.sent(5.0, 6.0))[:, :2], theta)


@both_plans
def test_theta_starts_from_w_on_every_batch(plan: Plan) -> None:
    world = World(plan, name="pfedme", lam=2.0, inner_lr=0.1, inner_steps=3, epochs=2)
    state, sent = world.rule.train(world.local, world.rule.init(world.local), world.sent(1.0, 2.0), {})
    w = theta = numbers(1, 2)
    for _ in range(2):
        theta = w
        for _ in range(3):
            b, h = theta
            theta = theta - 0.1 * (torch.stack([b * h * h, b * h * b]) + 2 * (theta - w))
        w = w - 0.1 * 2 * (w - theta)
    close(state["theta"][0], theta)
    close(sent["update"][0], w - numbers(1, 2))


@pytest.mark.parametrize(("beta", "expected"), [(1.0, [0.8, 1.9]), (0.5, [0.9, 1.95]), (2.0, [0.6, 1.8])])
def test_the_server_mixes(beta: float, expected: list[float]) -> None:
    world = World(plan=None, name="pfedme", beta=beta)  # type: ignore[arg-type]
    half = world.method.Server(world.method)
    ctx = world.ctx()
    steps = computed_alone(half.round({"model": ctx.initial}, ctx))
    assert next(steps).bank.tolist() == [[1.0, 2.0]]
    with pytest.raises(StopIteration) as end:
        steps.send(reply([-0.4, -0.2], [0.0, 0.0]))
    close(end.value.value[0]["model"], expected)


@pytest.mark.parametrize("model", [{"name": "mlp", "hidden": 6}, NORMALISED])
def test_with_one_inner_step_of_one_over_lambda_it_is_fedavg(
    model: dict[str, Any], simulate: Callable[..., Run]
) -> None:
    train = {"rounds": 3, "participation": 0.6, "local_epochs": 2}
    average = simulate(method="fedavg", model=model, train=train)
    mine = simulate(
        method={"name": "pfedme", "lam": 4.0, "inner_lr": 0.25, "inner_steps": 1, "beta": 1.0},
        model=model,
        train=train,
    )
    close(server(mine), average.vector())
    assert mine.metrics["bytes/up"].tolist() == average.metrics["bytes/up"].tolist()
    assert mine.model().state_dict().keys() == average.model().state_dict().keys()


def test_a_client_that_never_trained_has_the_newest_w(simulate: Callable[..., Run]) -> None:
    run = simulate(method="pfedme", train={"rounds": 2, "availability": {"4": [[9, 10]]}})
    w = run._experiment.network.layout.under("shared")
    assert torch.equal(run.vector(4)[w], server(run))
    assert torch.equal(run.vector(0)[w], rows(run, 0)["theta"]) and not torch.equal(
        run.vector(0)[w], server(run)
    )
