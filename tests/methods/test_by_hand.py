"""The client and server halves on a model of two numbers, w = (1, 2), with a squared loss.

Client 4 has (1, 1) -> 0 and (2, 0) -> 1: residuals 3 and 1, gradient (2.5, 1.5), so one step of 0.1 leads to
(0.75, 1.85). Client 7 has (0, 1) -> 0: residual 2, gradient (0, 2), so one step leads to (1, 1.8)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.base import AggregationContext, Reduced
from holdfast.aggregators.mean import Mean
from holdfast.core.errors import RunError
from holdfast.core.flat import Wire
from holdfast.core.registry import build
from holdfast.core.together import computed_alone
from holdfast.core.types import ROOT, Exchange, Uplink, Verdict
from holdfast.local.client import Received
from holdfast.local.plan import Plan
from holdfast.methods.context import Context
from tests.helpers import network_of
from tests.methods.by_hand import (
    IDS,
    NETWORK,
    W,
    answer,
    both_plans,
    close,
    context,
    local_of,
    received,
)

# ---- client halves


@both_plans
def test_fedavg_sends_the_difference(plan: Plan) -> None:
    method = build("method", "fedavg")
    state, sent = method.Client(method).train(local_of(plan), {}, received(), {})
    close(sent["update"], [[-0.25, -0.15], [0.0, -0.2]])
    close(sent["count"], [2.0, 1.0])
    close(sent["loss"], [2.5, 2.0])
    assert state == {} and sent["buffers"].shape == (2, 0)


@both_plans
def test_fedprox_is_pulled_to_the_received_model(plan: Plan) -> None:
    """Second step: client 4 from (0.75, 1.85): gradient (1.8, 1.3) + 2 (-0.25, -0.15); client 7 from (1,
    1.8): (0, 1.8) + 2 (0, -0.2)."""
    method = build("method", {"name": "fedprox", "mu": 2.0})
    _, sent = method.Client(method).train(local_of(plan, epochs=2, mu=2.0), {}, received(), {})
    close(sent["update"] + W, [[0.75 - 0.13, 1.85 - 0.1], [1.0, 1.8 - 0.14]])


@both_plans
def test_ditto_trains_two_models_on_the_same_batches(plan: Plan) -> None:
    """v of client 4 starts at (0, 0): residuals 0 and -1, gradient (-1, 0), pull 0.5 (0 - 1, 0 - 2). v of
    client 7 starts at (1, 1): gradient (0, 1), pull 0.5 (0, -1)."""
    method = build("method", {"name": "ditto", "lam": 0.5})
    start = {"personal": torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)}
    state, sent = method.Client(method).train(local_of(plan, lam=0.5), start, received(), {})
    close(state["personal"], [[0.15, 0.1], [1.0, 0.95]])
    close(sent["update"], [[-0.25, -0.15], [0.0, -0.2]])
    close(sent["loss"], [2.5, 2.0])  # of w, not of v


@both_plans
def test_dittos_anchor_is_frozen(plan: Plan) -> None:
    """Two steps of v = w: were the anchor the moving w, the pull would stay 0."""
    method = build("method", {"name": "ditto", "lam": 2.0})
    state, _ = method.Client(method).train(
        local_of(plan, epochs=2, lam=2.0), {"personal": W.repeat(2, 1)}, received(), {}
    )
    close(state["personal"], [[0.62, 1.75], [1.0, 1.66]])


@both_plans
def test_fedavg_ft_keeps_what_it_trained(plan: Plan) -> None:
    method = build("method", "fedavg-ft")
    rule = method.Client(method)
    state, sent = rule.train(local_of(plan, mu=0.0), {"own": torch.zeros(2, 2)}, received(), {})
    close(state["own"], [[0.75, 1.85], [1.0, 1.8]])
    close(sent["update"], [[-0.25, -0.15], [0.0, -0.2]])
    own = state["own"].tolist()
    close(rule.personal(local_of(plan), state, received()), own)


@both_plans
def test_fedavg_ft_with_a_pull_is_fedprox_that_keeps_what_it_trained(plan: Plan) -> None:
    method = build("method", {"name": "fedavg-ft", "mu": 2.0})
    state, _ = method.Client(method).train(
        local_of(plan, epochs=2, mu=2.0), {"own": torch.zeros(2, 2)}, received(), {}
    )
    close(
        state["own"], [[0.75 - 0.13, 1.85 - 0.1], [1.0, 1.8 - 0.14]]
    )  # as in test_fedprox_is_pulled_to_the_received_model


@both_plans
def test_local_goes_on_from_its_own(plan: Plan) -> None:
    method = build("method", "local")
    rule = method.Client(method)
    empty = Received(
        torch.zeros(0, 0),
        torch.zeros(2, 0, dtype=torch.int64),
        Wire.of(NETWORK.layout, rule.shared(NETWORK, 1)),
    )
    state, sent = rule.train(local_of(plan), {"own": W.repeat(2, 1)}, empty, {})
    close(state["own"], [[0.75, 1.85], [1.0, 1.8]])
    assert set(sent) == {"loss"}


# ---- server halves


UPDATES = [[-0.25, -0.15], [0.0, -0.2]]


def one_round(name: str, ctx: Context, up: Uplink) -> tuple[Exchange, dict[str, Tensor], Verdict]:
    method = build("method", name)
    server = method.Server(method)
    steps = computed_alone(server.round(server.init(ctx), ctx))
    asked = next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(up)
    return asked, *end.value.value


@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "fedprox", "ditto"])
def test_weighted_mean(name: str) -> None:
    asked, state, verdict = one_round(name, context(), answer([4, 7], UPDATES, [2, 1]))
    assert (
        asked.task == "train"
        and asked.to.tolist() == [4, 7]
        and asked.bank.tolist() == [[1.0, 2.0]]
        and asked.pick.tolist() == [[0], [0]]
    )
    close(state["model"], [(2 * 0.75 + 1.0) / 3, (2 * 1.85 + 1.8) / 3])
    assert (
        verdict.ids.tolist() == [4, 7]
        and verdict.weights is not None
        and verdict.weights.tolist() == pytest.approx([2 / 3, 1 / 3])
    )


def test_uniform_weights_and_server_learning_rate() -> None:
    _, state, verdict = one_round("fedavg", context(weighting="uniform"), answer([4, 7], UPDATES, [2, 1]))
    close(state["model"], [0.875, 1.825])
    assert verdict.weights is not None and verdict.weights.tolist() == [0.5, 0.5]
    _, state, _ = one_round(
        "fedavg", context(weighting="uniform", server_lr=0.5), answer([4, 7], UPDATES, [2, 1])
    )
    close(state["model"], [0.9375, 1.9125])


@pytest.mark.parametrize("cohort", [[], [4, 7]], ids=["no client drawn", "no client answered"])
def test_without_answers_the_model_stays(cohort: list[int]) -> None:
    _, state, verdict = one_round("fedavg", context(cohort), answer([], [], []))
    close(state["model"], [1.0, 2.0])
    assert any("no client answered" in note for note in verdict.notes)


def test_a_single_answer_and_clients_without_samples() -> None:
    _, state, _ = one_round("fedavg", context(), answer([7], UPDATES[1:], [1]))
    close(state["model"], [1.0, 1.8])
    _, state, _ = one_round("fedavg", context(), answer([4, 7], UPDATES, [0, 0]))
    close(state["model"], [0.875, 1.825])  # nobody says it has samples: equal weights
    _, state, _ = one_round("fedavg", context(), answer([4, 7], UPDATES, [0, 5]))
    close(state["model"], [1.0, 1.8])


def test_buffers_are_averaged_with_the_rules_weights_and_not_by_the_server_rate() -> None:
    network = network_of(lambda: nn.BatchNorm1d(1))  # weight, bias; mean, variance, counter
    wire = Wire.of(network.layout, torch.ones(5, dtype=torch.bool))
    start = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    fields = {
        "update": torch.zeros(2, 2, dtype=torch.float64),
        "buffers": torch.tensor([[3.0, 1.0, 4.0], [0.0, 4.0, 1.0]], dtype=torch.float64),
        "count": torch.tensor([2.0, 1.0], dtype=torch.float64),
        "loss": torch.zeros(2, dtype=torch.float64),
    }
    ctx = context(wire=wire, layout=network.layout, initial=start, server_lr=0.1)
    _, state, _ = one_round("fedavg", ctx, Uplink(IDS, fields))
    close(state["model"], [1.0, 0.0, 2.0, 2.0, 3.0])


def test_buffers_are_an_average_also_where_the_rules_weights_do_not_add_up_to_one() -> None:
    class Chosen(Mean):
        """Takes the first two of three, whole."""

        def __call__(
            self, x: Tensor, w: Tensor, state: dict[str, Tensor], ctx: AggregationContext
        ) -> Reduced:
            return Reduced(x[:2].mean(0), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), state)

    layout = network_of(lambda: nn.BatchNorm1d(1)).layout
    wire = Wire.of(layout, torch.ones(5, dtype=torch.bool))
    fields = {
        "update": torch.ones(3, 2, dtype=torch.float64),
        "buffers": torch.tensor([[3.0, 1.0, 4.0], [0.0, 4.0, 1.0], [9.0, 9.0, 9.0]], dtype=torch.float64),
        "count": torch.ones(3, dtype=torch.float64),
        "loss": torch.zeros(3, dtype=torch.float64),
    }
    ctx = context(
        [1, 4, 7], wire=wire, layout=layout, initial=torch.zeros(5, dtype=torch.float64), aggregator=Chosen()
    )
    _, state, verdict = one_round("fedavg", ctx, Uplink(torch.tensor([1, 4, 7]), fields))
    close(state["model"], [1.0, 1.0, 1.5, 2.5, 2.5])
    assert verdict.weights is not None and verdict.weights.tolist() == [1, 1, 0]


def test_local_asks_for_nothing_but_training() -> None:
    ctx = context()
    method = build("method", "local")
    server = method.Server(method)
    assert server.init(ctx) == {}
    asked = next(server.round({}, ctx))
    assert (
        asked.to.tolist() == [4, 7] and asked.bytes_down().tolist() == [0, 0] and asked.pick.shape == (2, 0)
    )
    everyone = build("method", {"name": "local", "everyone": True})
    assert next(everyone.Server(everyone).round({}, ctx)).to.tolist() == list(range(10))
    steps = computed_alone(server.deliver({}, ctx, torch.tensor([1, 2])))
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value.bytes_down().tolist() == [0, 0]


def test_deliver_is_the_model_of_now() -> None:
    method = build("method", "fedavg")
    steps = computed_alone(
        method.Server(method).deliver({"model": W + 1}, context(), torch.tensor([1, 2, 3]))
    )
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value.bank.tolist() == [[2.0, 3.0]] and end.value.value.to.tolist() == [1, 2, 3]


# ---- what the server half is handed


def test_ask_adds_the_servers_own_client_where_a_rule_needs_it() -> None:
    class Trusting(Mean):
        """Needs the server's own update."""

        needs = frozenset({"root"})

    ctx = context(aggregator=Trusting())
    asked = ctx.ask("train", W, weight=torch.tensor([3.0, 4.0]))
    assert asked.to.tolist() == [ROOT, 4, 7] and asked.extra["weight"].tolist() == [3.0, 3.0, 4.0]
    assert ctx.ask("score", W).to.tolist() == [4, 7]
    assert context([], aggregator=Trusting()).ask("train", W, weight=torch.zeros(0)).to.tolist() == []


def test_a_methods_own_weights_reach_the_aggregator() -> None:
    up = answer([ROOT, 4, 7], [[9.0, 9.0], *UPDATES], [5, 2, 1])
    merged = context().reduce({}, up, W, priors=torch.tensor([0.25, 0.75], dtype=torch.float64))
    close(merged.model, [1 - 0.25 * 0.25, 2 - 0.25 * 0.15 - 0.75 * 0.2])
    assert (
        merged.verdict.weights is not None
        and merged.verdict.weights.tolist() == [0.25, 0.75]
        and not merged.verdict.notes
    )
    ignorant = context(aggregator=build("aggregator", "median")).reduce(
        {}, up, W, priors=torch.tensor([0.25, 0.75], dtype=torch.float64)
    )
    assert ignorant.verdict.notes == ("median ignores the method's weights",)


@pytest.mark.parametrize("name", ["malicious", "attackers", "adversary", "benign", "ground_truth"])
def test_asking_for_the_ground_truth_is_an_error(name: str) -> None:
    with pytest.raises(
        RunError,
        match=f"round 3: the server side asked for '{name}', but a defence never sees who is malicious",
    ):
        getattr(context(), name)
    with pytest.raises(RunError):
        hasattr(context(), name)
    with pytest.raises(AttributeError):
        _ = context().something_else
