"""FedPer: the backbone travels, the head stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast import Model
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.methods.one_part_model import whole
from tests.methods.two import World, both_plans, close, numbers, rows, server


@both_plans
def test_the_received_body_and_the_own_head_are_trained_at_once(plan: Plan) -> None:
    """Client 7 has the head 1: r = 1, gradient (2, 2)."""
    world = World(plan, name="fedper")
    state, sent = world.rule.train(world.local, {"own": numbers([9, 2], [9, 1])}, world.sent(1.0), {})
    close(state["own"], [[0.6, 1.8], [0.8, 0.8]])
    close(sent["update"], [[-0.4], [-0.2]])
    close(world.rule.personal(world.local, state, world.sent(5.0, has=(True, False))), [[5, 1.8], [0.8, 0.8]])
    close(world.rule.committee_model(world.local, state, world.sent(5.0)), [[5, 1.8], [5, 0.8]])


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg"])
def test_a_client_that_does_not_take_part_is_not_overwritten_before_evaluation(
    name: str, simulate: Callable[..., Run]
) -> None:
    train = {"rounds": 4, "participation": 0.6}
    run = simulate(method=name, train=train)
    cohorts = [set(run.store.arrays(round)["cohort"].tolist()) for round in range(1, 5)]
    network, wire = run._experiment.network, run._experiment.run_context.wire()
    idle = set.union(*cohorts[:-1]) - cohorts[-1]
    assert idle
    for client in range(5):
        own, used = (
            rows(run, client)["own"] if client in set.union(*cohorts) else run._experiment.initial,
            run.vector(client),
        )
        assert torch.equal(used, own) if client in idle else torch.equal(used, wire.unpack(server(run), own))
    assert network.layout.size > wire.size
    pushed = simulate(
        method=name, train=train, evaluate={"unselected": "deliver"}
    )  # what PFLlib does, for whoever wants it
    for client in idle:
        assert torch.equal(pushed.vector(client), wire.unpack(server(run), rows(run, client)["own"]))
    left = simulate(
        method=name, train=train, evaluate={"selected": "keep_own"}
    )  # what FedAS is scored with: as training left it
    for client in set.union(*cohorts):
        assert torch.equal(left.vector(client), rows(run, client)["own"])


def test_a_client_first_seen_late_has_the_newest_body_and_the_common_head(
    simulate: Callable[..., Run],
) -> None:
    run = simulate(method="fedper", train={"rounds": 3, "availability": {"4": [[9, 10]]}})
    network = run._experiment.network
    head = network.head
    assert torch.equal(run.vector(4)[head], run._experiment.initial[head]) and torch.equal(
        run.vector(4)[~head], server(run)
    )
    late = simulate(method="fedper", train={"rounds": 3, "availability": {"4": [[3, 4]]}})
    assert not torch.equal(late.vector(4)[head], run._experiment.initial[head])


def test_with_all_of_the_model_private_it_is_local_training(simulate: Callable[..., Run]) -> None:
    train = {"rounds": 3, "participation": 0.6}
    alone, private = (
        simulate(method=name, model=Model(whole, head="0"), train=train) for name in ("local", "fedper")
    )
    for client in range(5):
        close(private.vector(client), alone.vector(client))
    assert server(private).numel() == 0


def test_only_the_body_is_paid_for(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedper")
    body = 64 * 6 + 6
    assert run.metrics["bytes/down"].tolist() == [5 * body * 8] * 2
    assert run.metrics["bytes/up"].tolist() == [5 * (body + 2) * 8] * 2  # count and loss
