"""LG-FedAvg: the head travels, the backbone stays."""

from __future__ import annotations

from collections.abc import Callable

from holdfast import Model
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.methods.one_part_model import whole
from tests.methods.two import World, both_plans, close, numbers


@both_plans
def test_the_received_head_on_the_own_body(plan: Plan) -> None:
    """Client 7 has the body 0.5: r = 1, gradient (4, 1)."""
    world = World(plan, name="lg-fedavg")
    state, sent = world.rule.train(world.local, {"own": numbers([1, 9], [0.5, 9])}, world.sent(2.0), {})
    close(state["own"], [[0.6, 1.8], [0.1, 1.9]])
    close(sent["update"], [[-0.2], [-0.1]])
    close(world.rule.personal(world.local, state, world.sent(5.0)), [[0.6, 5], [0.1, 5]])


def test_with_a_head_that_is_the_whole_model_it_is_fedavg(simulate: Callable[..., Run]) -> None:
    train = {"rounds": 3, "participation": 0.6}
    average, mine = (
        simulate(method=name, model=Model(whole, head="0"), train=train) for name in ("fedavg", "lg-fedavg")
    )
    for client in mine.store.arrays(3)["cohort"].tolist():
        close(mine.vector(client), average.vector())


def test_only_the_head_is_paid_for(simulate: Callable[..., Run]) -> None:
    run = simulate(method="lg-fedavg")
    head = 6 * 10 + 10
    assert run.metrics["bytes/down"].tolist() == [5 * head * 8] * 2
    assert run.metrics["bytes/up"].tolist() == [5 * (head + 2) * 8] * 2
