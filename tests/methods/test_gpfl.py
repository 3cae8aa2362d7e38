"""GPFL: the valve and the conditions by hand, a training against the losses written out plainly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast import Model
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.methods.gpfl import GPFL, Valve
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import LOOP, VMAP, assert_same, everything, random_samples, slow_fit, starts
from tests.methods.halves import close, double, local_of, sent_to

both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
COUNTS = [7, 1, 12, 0]
SAMPLES = random_samples(20)


def parts(**settings: Any) -> tuple[GPFL, Any, Network]:
    method = build("method", {"name": "gpfl", **settings})
    rule = method.Client(method)
    rule.head_name = "head"
    make = lambda: rule.network(BackboneHead(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 3)))  # noqa: E731
    return method, rule, Network(make, signature=f"test gpfl {settings}", dtype=torch.float64)


def test_the_valve_scales_and_shifts_what_the_head_is_given() -> None:
    """Both maps are set to be constant: scale 2 and shift -1, whatever the condition; features 0.2 and 3
    become 0 and 8."""
    valve = Valve(nn.Linear(2, 1, bias=False), 1, 2).double()
    for part, value in ((valve.scale, 2.0), (valve.shift, -1.0)):
        nn.init.zeros_(part[2].weight)
        nn.init.constant_(part[2].bias, value)
    nn.init.ones_(valve.inner.weight)
    close(valve.through(double([[0.2, 3.0]]), double([5.0, 5.0])).detach(), [[0.0, 8.0]])
    close(valve(double([[0.2, 3.0]])).detach(), [[8.0]])
    assert valve.weight is valve.inner.weight  # a user's loss finds the head's own tensors


@both_plans
def test_conditions_follow_from_the_received_embeddings(plan: Plan) -> None:
    _, rule, network = parts()
    local = local_of(network, rule, SAMPLES, COUNTS, plan, [1, 2, 5, 9], lam=1.0, mu=0.0)
    own, sent = starts(network, 4), local.wire.pack(network.initial(Key(9)))
    model = rule.personal(local, {"own": own}, sent_to(local, torch.stack([sent]), [0, 0, 0, 0]))
    views, embedding = (
        network.layout.unflatten(model),
        network.layout.unflatten(local.wire.unpack(sent, own[0]))["head.embedding"],
    )
    close(local.wire.pack(model), sent.expand(4, -1))
    close(views["head.inner.weight"], network.layout.unflatten(own)["head.inner.weight"])
    close(views["head.generic"], embedding.mean(0).expand(4, -1))
    for i, count in enumerate(COUNTS):
        labels = local.data.labels[i, :count]
        close(views["head.personal"][i], embedding[labels].mean(0) if count else torch.zeros(4))
    kept = rule.personal(local, {"own": own}, sent_to(local, sent, [-1, 0, -1, 0]))
    close(kept[0], own[0])
    close(kept[1], model[1])


@both_plans
@pytest.mark.parametrize("length", ["batch", "sample"])
def test_a_training_is_that_of_the_losses_written_out(plan: Plan, length: str) -> None:
    lam, mu = 0.7, 0.3
    _, rule, network = parts(length=length)
    recipe = Recipe(lr=0.05, epochs=2, batch_size=4)
    local = local_of(network, rule, SAMPLES, COUNTS, plan, [1, 2, 5, 9], recipe, lam=lam, mu=mu)
    own, start = starts(network, 4), network.initial(Key(9))
    state, sent = rule.train(local, {"own": own}, sent_to(local, local.wire.pack(start)), {})
    frozen = network.layout.unflatten(start)["head.embedding"]

    def valve(net: Any, f: Tensor, condition: Tensor) -> Tensor:
        return ((1 + net.head.scale(condition)) * f + net.head.shift(condition)).clamp(min=0)

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        f, embedding = net.backbone(x), net.head.embedding
        generic = valve(net, f, net.head.generic)
        logits = F.linear(valve(net, f, net.head.personal), net.head.inner.weight, net.head.inner.bias)
        cosine = F.cosine_similarity(generic[:, None], embedding[None], dim=2, eps=1e-12)
        gap = generic - frozen[y]
        far = gap.square().sum().sqrt() if length == "batch" else gap.square().sum(1).sqrt().mean()
        return (
            F.cross_entropy(logits, y)
            + F.cross_entropy(cosine, y)
            + lam * far
            + mu
            / 2
            * sum(
                p.square().sum()
                for name, p in net.named_parameters()
                if name.startswith(("head.embedding", "head.scale", "head.shift"))
            )
        )

    begun = rule.personal(local, {"own": own}, sent_to(local, local.wire.pack(start)))
    expected = slow_fit(network, begun, SAMPLES, local.data, local.key.fold("fit"), recipe, loss=loss)
    torch.testing.assert_close(state["own"], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        sent["update"],
        (local.wire.pack(expected) - local.wire.pack(start))[:, : local.wire.parameters],
        rtol=0,
        atol=1e-10,
    )


def test_the_head_stays_and_bytes_say_so(simulate: Callable[..., Run]) -> None:
    """d = 6 features, 10 classes: 60 embeddings and two maps of 36 + 6 + 12 beside the body travel; 70
    numbers of the head do not."""
    run = simulate(**hard("gpfl", train={"participation": 1.0, "availability": {"0": [[3, 4]]}}))
    network = run._experiment.network
    plain = simulate(**hard("fedavg"))._experiment.network.layout.size
    sent = plain - 70 + 60 + 2 * (36 + 6 + 12)
    assert network.layout.size == sent + 70 + 12
    assert run.metrics["bytes/down"].tolist() == [n * sent * 8 for n in (4, 4, 5)]
    assert run.metrics["bytes/up"].tolist() == [n * (sent + 2) * 8 for n in (4, 4, 5)]


def test_conditions_follow_the_embeddings_also_where_unselected_clients_get_the_newest(
    simulate: Callable[..., Run],
) -> None:
    table = hard("gpfl", train={"participation": 0.6, "rounds": 3}, evaluate={"unselected": "deliver"})
    run = simulate(**table)
    layout = run._experiment.network.layout
    idle = set(run.store.arrays(1)["cohort"].tolist()) - set(run.store.arrays(3)["cohort"].tolist())
    assert idle
    counts = run._experiment.federation.train.by_class(10).double()
    for client in idle:
        views = layout.unflatten(run.vector(client))
        close(views["head.generic"], views["head.embedding"].mean(0))
        close(views["head.personal"], counts[client] / counts[client].sum() @ views["head.embedding"])


def test_plans_agree_on_a_user_module_and_loss(simulate: Callable[..., Run]) -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.body = nn.Linear(5, 10), nn.Linear(64, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x.flatten(1)).tanh())

    def small(net: Any, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch.x), batch.y, reduction="none") + 0.01 * net.fc.weight.square().sum()

    table = hard("gpfl", model=Model(Mine, head="fc"), train={"loss": small, "rounds": 2})
    runs = [simulate(**table, engine={"plan": plan}) for plan in ("loop", "vmap")]
    assert_same(everything(runs[0]), everything(runs[1]), 1e-9)
