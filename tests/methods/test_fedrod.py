"""FedRoD: both losses by hand, what travels, and that the global half is FedAvg with a balanced softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Wire
from holdfast.core.registry import build
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.methods.fedrod import FedRodClient, TwoHeads, log_counts
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import client_keys, deal, samples_of, slow_fit
from tests.methods.by_hand import both_plans, close

Simulate = Callable[..., Run]
SAMPLES = samples_of(
    torch.ones(4, 1), torch.tensor([0, 0, 1, 0]), classes=3
)  # client 4: classes 0, 0, 1; client 7: class 0; nobody: 2


def rule(head: str | None = "head") -> FedRodClient:
    method = build("method", "fedrod")
    made = method.Client(method)
    made.head_name = head
    return made


class Body(nn.Module):
    """features = body * x; logits = head(features)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


NETWORK = Network(lambda: rule().network(Body()), "head", "fedrod by hand", torch.float64)
WIRE = Wire.of(NETWORK.layout, rule().shared(NETWORK, 1))


def local_of(plan: Plan) -> Local:
    return Local(
        network=NETWORK,
        wire=WIRE,
        ids=torch.tensor([4, 7]),
        key=client_keys(2),
        samples=SAMPLES,
        data=deal(SAMPLES, [3, 1]),
        validation=deal(SAMPLES, [0, 0]),
        initial=torch.zeros(2, 8, dtype=torch.float64),
        plan=plan,
        recipe=Recipe(lr=0.6, epochs=1, batch_size=3),
        settings=SimpleNamespace(),
        selected=torch.ones(2, dtype=torch.bool),
    )


def received() -> Received:
    """body 1, generic (0, 0, 0)."""
    return Received(
        torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.int64), WIRE
    )


def test_all_but_the_personal_head_travels() -> None:
    assert [slot.name for slot in NETWORK.layout.slots] == [
        "body.weight",
        "head.generic.weight",
        "head.personal.weight",
        "head.voice",
    ]
    assert WIRE.index.tolist() == [0, 1, 2, 3] and WIRE.parameters == 4


@both_plans
def test_a_step_by_hand(plan: Plan) -> None:
    """With n = (2, 1, 0), the balanced softmax of equal logits is (2/3, 1/3, 0), which is what client 4 has:
    the generic head stays, where a plain softmax would move it. Client 7 has one class only, which the
    balanced softmax takes for certain. The personal heads start at 0 and see a softmax of (1/3, 1/3, 1/3):
    gradients (1/3 - 2/3, 1/3 - 1/3, 1/3) and (1/3 - 1, 1/3, 1/3)."""
    state, sent = rule().train(local_of(plan), rule().init(local_of(plan)), received(), {})
    close(sent["update"], [[0.0] * 4] * 2)
    close(
        state["own"], [[1.0, 0.0, 0.0, 0.0, 0.2, 0.0, -0.2, 1.0], [1.0, 0.0, 0.0, 0.0, 0.4, -0.2, -0.2, 1.0]]
    )
    torch.testing.assert_close(
        log_counts(local_of(plan))[:, :2].exp(), torch.tensor([[2.0, 1.0], [1.0, 1e-30]], dtype=torch.float64)
    )


@both_plans
def test_the_personal_head_adds_to_the_generic_one_and_moves_nothing_else(plan: Plan) -> None:
    """Against autograd on body, generic and personal head as three tensors, each loss by itself."""
    local = local_of(plan)
    whole = torch.tensor([[0.5, 0.3, -0.2, 0.1, 0.7, -0.4, 0.2, 1.0]] * 2, dtype=torch.float64)
    got = Received(whole[:1, :4], torch.zeros(2, 1, dtype=torch.int64), WIRE)
    state, _ = rule().train(local, {"own": whole}, got, {})
    for i, labels in enumerate(([0, 0, 1], [0])):
        body, generic, personal = (
            whole[i, part].clone().requires_grad_() for part in (slice(0, 1), slice(1, 4), slice(4, 7))
        )
        y, prior = (
            torch.tensor(labels),
            torch.tensor([[2.0, 1.0, 1e-30], [1.0, 1e-30, 1e-30]][i], dtype=torch.float64).log(),
        )
        logits = (body * generic).expand(len(y), 3)
        grads = torch.autograd.grad(F.cross_entropy(logits + prior, y), [body, generic])
        summed = (body * generic).detach() + body.detach() * personal
        own = torch.autograd.grad(F.cross_entropy(summed.expand(len(y), 3), y), [personal])
        close(state["own"][i], [*(whole[i, :7] - 0.6 * torch.cat([*grads, *own])).tolist(), 1.0])


def test_the_sum_of_heads_counts_only_where_a_client_has_trained() -> None:
    heads = TwoHeads(nn.Linear(2, 3))
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(heads(x), heads.generic(x))
    heads.voice.fill_(1.0)
    assert torch.equal(heads(x), 2 * heads.generic(x))  # a copy, at first


def test_the_global_half_is_fedavg_with_a_balanced_softmax(simulate: Simulate) -> None:
    """Without the personal head: two rounds written out, every client by plain SGD on the balanced loss, then
    the weighted mean."""
    run = simulate(
        method="fedrod", model={"name": "mlp", "hidden": 4}, train={"rounds": 2, "local_epochs": 2}
    )
    experiment = run._experiment
    network, federation, cell = experiment.network, experiment.federation, experiment.run_context
    ids = torch.arange(federation.clients)
    counts = federation.train.by_class(10).double()
    shared = experiment.rule.shared(network, 1)
    model = experiment.initial
    for round in (1, 2):
        key = experiment.key.fold("client", round, 0).fold(ids).fold("fit")
        clients, seen = iter(counts), {}

        def balanced(
            net: Any, x: Tensor, y: Tensor, clients: Any = clients, seen: dict[int, Any] = seen
        ) -> Tensor:
            if id(net) not in seen:
                seen.clear()
                seen[id(net)] = (net, next(clients))
            net.head.voice.fill_(0.0)
            return F.cross_entropy(net(x) + seen[id(net)][1].log(), y)

        data = federation.train.take(ids)
        trained = slow_fit(
            network, model.expand(len(ids), -1), federation.samples, data, key, cell.recipe, loss=balanced
        )
        model = (counts.sum(1) / counts.sum()) @ trained
    assert bool((counts == 0).any())
    torch.testing.assert_close(run.state()["model"], model[shared], rtol=0, atol=1e-12)


def test_each_model_predicts_with_its_heads(simulate: Simulate) -> None:
    """A client that took part has a voice, one that never did predicts by the generic head; the global model
    never has one."""
    run = simulate(**hard("fedrod", train={"rounds": 1, "participation": 0.4}))
    took_part = set(run.store.arrays(1)["took_part"].tolist())
    assert 0 < len(took_part) < 5
    for client in range(5):
        assert float(run.model(client=client).get_submodule("head").voice) == (client in took_part)
        assert float(run.model(client=client, model="global").get_submodule("head").voice) == 0
    size = run._experiment.network.layout
    private = int(size.under("head.personal").sum()) + 1
    assert run.metrics["bytes/down"].iloc[0] == 8 * len(took_part) * (size.size - private)


def test_a_model_with_more_outputs_than_classes(simulate: Simulate) -> None:
    """As FedCPA's ResNet with 1000 outputs: those that no label ever has are classes that nobody holds."""

    def net(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, outputs))

    run = simulate(method="fedrod", model=holdfast.Model(lambda: net(12), head="3"))
    generic = run.model().get_submodule("3").generic.weight
    start = run._experiment.network.layout.unflatten(run._experiment.initial)["3.generic.weight"]
    assert torch.equal(generic[10:].double(), start[10:]) and not torch.equal(
        generic[:10].double(), start[:10]
    )


@both_plans
def test_a_term_on_the_head_is_the_generic_heads_alone(plan: Plan) -> None:
    """The loss is only such a term: h0 + 2 h1 + 3 h2 of the head, and 5 of the body. Heads and body move by
    these numbers once, the personal head by nothing."""

    def term(net: Any, batch: Any) -> Tensor:
        weight = net.head.weight[:, 0] * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        assert dict(net.named_parameters())
        return 0 * net(batch.x).sum(1) + weight.sum() + 5 * net.body.weight.sum()

    local = local_of(plan)
    local = replace(local, recipe=replace(local.recipe, loss=term))
    state, _ = rule().train(local, rule().init(local), received(), {})
    close(state["own"], [[1.0 - 3.0, -0.6, -1.2, -1.8, 0.0, 0.0, 0.0, 1.0]] * 2)


def test_around_a_users_own_model(simulate: Simulate) -> None:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Sequential(nn.Linear(64, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 10), nn.Tanh())),
        )

    run = simulate(method="fedrod", model=holdfast.Model(net, head="1.2"))
    assert isinstance(run.model(client=0).get_submodule("1.2"), TwoHeads)
    with pytest.raises(ConfigError, match="needs a head"):
        simulate(method="fedrod", model=holdfast.Model(net, head=None))
