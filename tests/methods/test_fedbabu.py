"""FedBABU: a head that stays as it was drawn, and a tuning at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.helpers import NORMALISED
from tests.methods.two import World, both_plans, close, rows, server


@both_plans
def test_the_body_is_trained_under_the_common_head(plan: Plan) -> None:
    """Two steps: client 4 from b = 1 to 0.6 (r = 2), then r = 1.2, gradient 2.4; client 7 to -0.2, then r =
    -1.8, gradient -7.2."""
    world = World(plan, start=(9.0, 2.0), epochs=2, name="fedbabu")
    start = world.rule.init(world.local)
    state, sent = world.rule.train(world.local, start, world.sent(1.0), {})
    close(sent["update"], [[0.36 - 1], [0.52 - 1]])
    close(state["own"], [[1, 2], [1, 2]])
    close(world.rule.personal(world.local, state, world.sent(5.0, has=(True, False))), [[5, 2], [1, 2]])
    assert not state["tuned"].any()


@both_plans
@pytest.mark.parametrize(
    ("what", "expected"), [("head", [[1, 1.8], [1, 1.4]]), ("all", [[0.6, 1.8], [-0.2, 1.4]])]
)
def test_tuning(what: str, expected: list[list[float]], plan: Plan) -> None:
    world = World(plan, start=(9.0, 2.0), name="fedbabu", tune=what, tune_epochs=1)
    state, sent = world.rule.tune(world.local, world.rule.init(world.local), world.sent(1.0), {})  # type: ignore[attr-defined]
    close(state["own"], expected)
    close(sent["loss"], [2.0, 4.5])
    close(
        world.rule.personal(world.local, state, world.sent(5.0)), expected
    )  # a tuned model is not overwritten
    assert world.rule.schema("tune", world.wire).keys() == sent.keys()


@both_plans
@pytest.mark.parametrize(
    "method", [{"name": "fedbabu", "tune": "head"}, {"name": "c-pfl"}], ids=["fedbabu", "c-pfl"]
)
def test_a_copy_that_is_trained_for_evaluation_is_tuned(method: dict[str, str], plan: Plan) -> None:
    """Training proper is for the common body and leaves a client nothing of its own: late joiners would be
    scored untuned."""
    world = World(plan, start=(9.0, 2.0), tune_epochs=1, **method)
    state = world.rule.finetune(world.local, world.rule.init(world.local), world.sent(1.0))
    close(world.rule.personal(world.local, state, world.sent(1.0)), [[1, 1.8], [1, 1.4]])


def test_all_available_clients_tune_at_the_end() -> None:
    world = World(plan=None, name="fedbabu")  # type: ignore[arg-type]
    server_half, ctx = world.method.Server(world.method), world.ctx()
    steps = server_half.finish({"model": torch.ones(1)}, ctx)
    asked = next(steps)
    assert asked.task == "tune" and asked.to.tolist() == [4, 5, 7] and asked.bank.tolist() == [[1.0]]
    never = World(plan=None, name="fedbabu", tune_epochs=0)  # type: ignore[arg-type]
    assert list(never.method.Server(never.method).finish({"model": torch.ones(1)}, ctx)) == []


def test_a_run(simulate: Callable[..., Run]) -> None:
    """Before the end the head never moves; whoever is away then keeps the common model; the tuning is one
    more round with its bytes."""
    table = {
        "model": NORMALISED,
        "train": {"rounds": 2, "participation": 0.6, "availability": {"4": [[9, 10]]}},
    }
    run = simulate(method={"name": "fedbabu", "tune": "head"}, **table)
    head, initial = run._experiment.network.head, run._experiment.initial
    before = simulate(method={"name": "fedbabu", "tune_epochs": 0}, **table)
    assert run.round == 3 and before.round == 2 and torch.equal(server(run), server(before))
    for client in range(4):
        tuned = rows(run, client)["own"]
        assert torch.equal(tuned[~head], server(run)) and not torch.equal(tuned[head], initial[head])
        assert torch.equal(run.vector(client), tuned)
    assert torch.equal(run.vector(4), before.vector()) and torch.equal(before.vector()[head], initial[head])
    assert (
        run.metrics["bytes/down"].iloc[-1] == 4 * int((~head).sum()) * 8
        and run.metrics["bytes/up"].iloc[-1] == 4 * 8
    )


def test_it_is_c_pfl_without_a_committee(simulate: Callable[..., Run]) -> None:
    tables = ({"name": "fedbabu", "tune": "head"}, {"name": "c-pfl", "committee": False})
    babu, committee = (
        simulate(method=method, train={"rounds": 2, "participation": 0.6}, model=NORMALISED)
        for method in tables
    )
    close(server(babu), server(committee))
    for client in range(5):
        close(babu.vector(client), committee.vector(client))
    assert babu.metrics["bytes/down"].tolist() == committee.metrics["bytes/down"].tolist()


def test_without_tuning_it_is_fedrep_whose_heads_never_move(simulate: Callable[..., Run]) -> None:
    tables = ({"name": "fedbabu", "tune_epochs": 0}, {"name": "fedrep", "head_epochs": 0})
    babu, rep = (simulate(method=method, train={"rounds": 3, "participation": 0.6}) for method in tables)
    close(server(babu), server(rep))
