"""FedGH by hand: f = b x, logits h f + c. Client 4 has x = 1, 3 of class 0 and x = 2 of class 1, client 7
only x = 1 of class 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from holdfast import Model
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.core.types import Uplink
from holdfast.local.plan import Plan
from holdfast.methods.fedgh import FedGH
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import LOOP, VMAP, everything, samples_of
from tests.methods.halves import close, context_of, double, local_of, one_round, sent_to

both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
SAMPLES = samples_of(torch.tensor([[1.0], [3.0], [2.0], [1.0]]), torch.tensor([0, 0, 1, 0]))
NETWORK = Network(
    lambda: BackboneHead(nn.Linear(1, 1, bias=False), nn.Linear(1, 2)),
    signature="test fedgh",
    dtype=torch.float64,
)
START = double([1.0, 0.0, 0.0, 0.0, 0.0])  # b, h0, h1, c0, c1


def method_of(**settings: Any) -> FedGH:
    return build("method", {"name": "fedgh", **settings})


@both_plans
def test_a_client_trains_its_body_under_the_received_head_and_sends_class_means(plan: Plan) -> None:
    """Received h = (1, -1), c = 0; client 7 has b = 0, so p = (1/2, 1/2) and its features are 0: b moves by 0.1 * 1/2 * (1 - -1), c by
    0.05, h by nothing."""  # noqa: E501
    method = method_of()
    rule = method.Client(method)
    local = local_of(NETWORK, rule, SAMPLES, [3, 1], plan, [4, 7])
    own = double([[0.0, 5.0, 5.0, 5.0, 5.0]]).repeat(2, 1)
    state, sent = rule.train(local, {"own": own}, sent_to(local, double([1.0, -1.0, 0.0, 0.0])), {})
    close(state["own"][1], [0.1, 1.0, -1.0, 0.05, -0.05])
    b = 0.1 * (0.5 * 2 * 1 + 0.5 * 2 * 3 - 0.5 * 2 * 2) / 3
    close(state["own"][0, 0], b)
    close(sent["prototypes"][..., 0], [[2 * b, 2 * b], [0.1, 0.0]])
    assert sent["held"].tolist() == [[2, 1], [1, 0]] and set(sent) == set(rule.schema("train", local.wire))
    close(
        rule.personal(local, state, sent_to(local, double([7.0, 8.0, 9.0, 6.0])))[1],
        [0.1, 7.0, 8.0, 9.0, 6.0],
    )


def replies(means: list[list[float]], held: list[list[float]]) -> Uplink:
    n = len(means)
    fields = {
        "prototypes": double(means).reshape(n, 2, 1),
        "held": double(held).reshape(n, 2),
        "loss": torch.zeros(n, dtype=torch.float64),
    }
    return Uplink(torch.arange(n), fields)


def test_one_step_of_the_server_on_all_pairs() -> None:
    """Pairs (2, 0), (4, 1), (1, 0): errors (-1/2, 1/2), (1/2, -1/2), (-1/2, 1/2), so h0's gradient is (-1 + 2
    - 1/2) / 3; client 1's class 1 is not held, and what stands there does not count."""
    method = method_of(head_lr=3.0)
    ctx = context_of(NETWORK, method.Client(method), START, [0, 1])
    start = method.Server(method).init(ctx)
    close(start["model"], [0.0] * 4)
    (asked,), state, verdict = one_round(
        method, start, ctx, replies([[2.0, 4.0], [1.0, 99.0]], [[5.0, 1.0], [1.0, 0.0]])
    )
    close(state["model"], [-0.5, 0.5, 0.5, -0.5])
    assert asked.bytes_down().tolist() == [32, 32] and verdict.tables["held"].tolist() == [[5, 1], [1, 0]]


def test_passes_in_batches_are_sgd() -> None:
    """The same pairs in the same order through torch.optim.SGD."""
    method = method_of(head_lr=0.5, head_epochs=2, head_batch_size=2)
    ctx = context_of(NETWORK, method.Client(method), START, [0, 1])
    up = replies([[2.0, 4.0], [1.0, 3.0]], [[5.0, 1.0], [1.0, 2.0]])
    _, state, _ = one_round(method, method.Server(method).init(ctx), ctx, up)
    x, y, head = double([[2.0], [4.0], [1.0], [3.0]]), torch.tensor([0, 1, 0, 1]), nn.Linear(1, 2).double()
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    sgd = torch.optim.SGD(head.parameters(), lr=0.5)
    for epoch in range(2):
        for batch in (
            ctx.key.fold("head", epoch).fold(torch.arange(4)).uniform(dtype=torch.float64).argsort().split(2)
        ):
            sgd.zero_grad()
            F.cross_entropy(head(x[batch]), y[batch]).backward()
            sgd.step()
    close(state["model"], torch.cat([head.weight.flatten(), head.bias]).detach())


@pytest.mark.parametrize(
    "up", [replies([], []), replies([[9.0, 9.0]], [[0.0, 0.0]])], ids=["nobody", "nobody holds anything"]
)
def test_without_pairs_the_head_stays(up: Uplink) -> None:
    method = method_of()
    ctx = context_of(NETWORK, method.Client(method), START, [0])
    _, state, _ = one_round(method, {"model": double([1.0, 2.0, 3.0, 4.0])}, ctx, up)
    close(state["model"], [1.0, 2.0, 3.0, 4.0])


def test_a_head_whose_training_diverged_stays_as_it_was() -> None:
    method = method_of(head_lr=1e300)
    ctx = context_of(NETWORK, method.Client(method), START, [0])
    _, state, verdict = one_round(
        method, method.Server(method).init(ctx), ctx, replies([[1e300, 0.0]], [[1.0, 0.0]])
    )
    close(state["model"], [0.0] * 4)
    assert "head_lr" in verdict.notes[0]


def test_without_the_servers_training_all_clients_start_from_the_first_head(
    simulate: Callable[..., Run],
) -> None:
    """One round of it is local training; and bodies never travel, whatever the number of rounds."""
    tables = {"local": {}, "fedgh": {"head_epochs": 0}}
    alone, common = (
        everything(simulate(**hard(name, method=table, train={"rounds": 1})))
        for name, table in tables.items()
    )
    assert torch.equal(alone["rows/own"], common["rows/own"])
    run = simulate(**hard("fedgh", train={"participation": 1.0, "availability": {"0": [[3, 4]]}}))
    assert run.metrics["bytes/down"].tolist() == [n * 70 * 8 for n in (4, 4, 5)]
    assert run.metrics["bytes/up"].tolist() == [n * (60 + 10 + 1) * 8 for n in (4, 4, 5)]


def test_a_head_of_several_layers_is_refused(simulate: Callable[..., Run]) -> None:
    def deep() -> nn.Module:
        return BackboneHead(nn.Flatten(), nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)))

    with pytest.raises(ConfigError, match="one linear layer"):
        simulate(**hard("fedgh", model=Model(deep)))
