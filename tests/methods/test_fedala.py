"""FedALA: the weights by hand on models of two numbers, when learning ends, and p = 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.registry import build
from holdfast.data.client_rows import Padded
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import assert_same, everything
from tests.methods.by_hand import W, both_plans, close, local_of, received

Simulate = Callable[..., Run]


def settings(**changes: float) -> dict[str, float]:
    return {"eta": 0.5, "share": 100.0, "threshold": 0.1, **changes}


def state_of(learned: bool = True, **changes: Tensor) -> dict[str, Tensor]:
    yes = torch.ones(2, dtype=torch.bool)
    state = {
        "own": torch.tensor([[0.0, 2.0], [1.0, 1.0]], dtype=torch.float64),
        "weights": torch.tensor([[0.5, 0.5], [1.0, 1.0]], dtype=torch.float64),
        "trained": yes,
        "learned": yes & learned,
    }
    return {**state, **changes}


def client(**options: Any):
    method = build("method", {"name": "fedala", "layers": 1, **options})
    return method.Client(method)


@both_plans
def test_one_epoch_of_weights_by_hand(plan: Plan) -> None:
    """w_g = (1, 2). Client 4: own (0, 2), so they are (1, 0) apart and the mixture is (0.5, 2): residuals 2.5
    and 0, gradient (1.25, 1.25), W = (0.5 - 0.5 * 1.25 * 1, 0.5), clipped to (0, 0.5): the mixture is (0, 2).
    Client 7: own (1, 1), (0, 1) apart, mixture (1, 2): gradient (0, 2), W = (1, 1 - 0.5 * 2), so it begins at
    (1, 1)."""
    mixed, told = client()._mixed(local_of(plan, **settings()), state_of(), received())
    close(told["weights"], [[0.0, 0.5], [1.0, 0.0]])
    close(mixed, [[0.0, 2.0], [1.0, 1.0]])
    slow, told = client()._mixed(local_of(plan, **settings(eta=0.1)), state_of(), received())
    close(told["weights"], [[0.375, 0.5], [1.0, 0.8]])
    close(slow, [[0.375, 2.0], [1.0, 1.8]])


@both_plans
def test_training_goes_on_from_the_mixture(plan: Plan) -> None:
    """From (0, 2) and (1, 1): residuals 2 and -1 (gradient (0, 1)), and 1 (gradient (0, 1))."""
    state, sent = client().train(local_of(plan, **settings()), state_of(), received(), {})
    close(state["own"], [[0.0, 1.9], [1.0, 0.9]])
    close(sent["update"], [[-1.0, -0.1], [0.0, -1.1]])
    assert state["trained"].tolist() == state["learned"].tolist() == [True, True]


@both_plans
def test_a_client_that_has_not_trained_takes_the_received_model(plan: Plan) -> None:
    """In any round; and whoever has the received model already has no choice. Neither counts as having
    learned."""
    new = torch.tensor([False, True])
    own = torch.stack([torch.zeros_like(W), W])
    state = state_of(learned=False, trained=new, own=own, weights=torch.ones_like(own))
    mixed, told = client()._mixed(local_of(plan, **settings()), state, received())
    close(mixed, [[1.0, 2.0], [1.0, 2.0]])
    assert told["learned"].tolist() == [False, False]


@both_plans
def test_a_client_whose_training_diverged_takes_the_received_model(plan: Plan) -> None:
    """There is nothing to be mixed in of a model that is no number; its weights stay for when there is."""
    own = torch.tensor([[float("nan"), 2.0], [1.0, 1.0]], dtype=torch.float64)
    mixed, told = client()._mixed(local_of(plan, **settings()), state_of(own=own), received())
    close(mixed, [[1.0, 2.0], [1.0, 1.0]])
    close(told["weights"], [[0.5, 0.5], [1.0, 0.0]])


def count_epochs(rule: Any, local: Any, state: dict[str, Tensor]) -> list[int]:
    """How many epochs of weights each client took."""
    taken = torch.zeros(2, dtype=torch.int64)
    plain = type(local).fit

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal taken
        taken = taken + options["epochs"]
        return plain(self, *args, **options)

    type(local).fit = counted
    try:
        rule._mixed(local, state, received())
    finally:
        type(local).fit = plain
    return taken.tolist()


@both_plans
def test_the_first_learning_ends_when_the_loss_has_settled_and_each_client_for_itself(plan: Plan) -> None:
    """Client 7 has learned before: one epoch. Client 4's loss changes from epoch to epoch until W is at its
    bound."""
    mixed = state_of(learned=False)
    mixed["learned"] = torch.tensor([False, True])
    assert count_epochs(client(window=3), local_of(plan, **settings(threshold=1e9)), mixed) == [4, 1]
    assert count_epochs(client(window=3), local_of(plan, **settings(threshold=0.0)), mixed) == [100, 1]
    assert count_epochs(
        client(window=3, most_epochs=7), local_of(plan, **settings(threshold=0.0)), mixed
    ) == [7, 1]
    # W goes 0.5, then 0: losses 0.5 * 6.25 / 2 = 1.5625, then (4 + 1) / 4 = 1.25 for good: three alike after
    # epoch 4
    assert count_epochs(client(window=3), local_of(plan, **settings(threshold=0.01)), mixed) == [4, 1]


def test_only_top_tensors_are_mixed() -> None:
    layout = [(6, False), (2, False), (4, False), (2, False), (3, True)]
    slots, start = [], 0
    for size, buffer in layout:
        slots.append(type("Slot", (), {"start": start, "stop": start + size, "buffer": buffer})())
        start += size
    network: Any = type("Network", (), {"layout": type("Layout", (), {"slots": slots, "parameters": 14})()})()
    assert [client(layers=p)._top(network).start for p in (0, 1, 2, 4, 9)] == [14, 12, 8, 0, 0]
    assert client(layers=2)._top(network).stop == 14


def test_a_share_of_the_samples_is_drawn() -> None:
    table = Padded(torch.arange(8).view(2, 4), torch.arange(8).view(2, 4), torch.tensor([4, 2]))
    luck = torch.tensor([[3, 1, 2, 0], [5, 4, 0, 0]])
    part = table.drawn(luck, torch.tensor([0, 0]), torch.tensor([3, 1]))
    assert part.rows.tolist() == [[3, 1, 2], [5, 4, 6]] and part.count.tolist() == [3, 1]  # 6 is padding
    rest = table.drawn(luck, torch.tensor([3, 1]), torch.tensor([1, 1]))
    assert rest.rows.tolist() == [[0], [4]] and torch.equal(rest.rows, rest.labels)


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_with_nothing_to_mix_it_is_fedavg_with_fine_tuning(participation: float, simulate: Simulate) -> None:
    """p = 0, the slice that breaks the authors' code."""
    tables = [hard(name, train={"participation": participation}) for name in ("fedala", "fedavg-ft")]
    tables[0]["method"]["layers"] = 0
    ala, ft = (everything(simulate(**table)) for table in tables)
    assert_same({k: ala[k] for k in ft}, ft, 1e-12)
    assert ala["rows/weights"].shape[1] == 0


def test_weights_are_learned_in_whole_runs_and_stay_in_their_bounds(simulate: Simulate) -> None:
    found = everything(simulate(**hard("fedala", train={"participation": 1.0, "rounds": 3})))
    weights = found["rows/weights"]
    assert weights.shape[1] == 6 * 10 + 10  # the last layer's weight and bias
    assert (
        bool((weights >= 0).all() and (weights <= 1).all())
        and bool((weights < 1).any(1).all())
        and bool(found["rows/learned"].all())
    )
    wide = everything(simulate(**{**hard("fedala"), "method": {"name": "fedala", "layers": 99}}))
    assert wide["rows/weights"].shape[1] == wide["server/model"].shape[0] - 13  # all but the buffers
