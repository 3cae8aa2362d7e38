"""FedProto by hand: f = b x, logits (h0 f, h1 f). Client 4 has x = 1, 3 of class 0 and x = 2 of class 1, client 7 only x = 1 of class 0.
All start from b = 1, h = 0, where cross-entropy moves the head only; class 0 has the prototype 2, class 1 has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Model
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.core.screen import screen
from holdfast.core.types import Uplink
from holdfast.local.plan import Plan
from holdfast.methods.fedproto import FedProto
from holdfast.models.network import Network
from holdfast.models.split import Split
from holdfast.results import Run
from tests.checks.test_methods import hard
from tests.helpers import LOOP, VMAP, assert_same, everything, samples_of
from tests.methods.halves import close, context_of, delivered, double, local_of, one_round, sent_to

both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
SAMPLES = samples_of(torch.tensor([[1.0], [3.0], [2.0], [1.0]]), torch.tensor([0, 0, 1, 0]))


def line() -> nn.Module:
    return Split(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))


def parts(**settings: Any) -> tuple[FedProto, Network]:
    method = build("method", {"name": "fedproto", **settings})
    rule = method.Client(method)
    rule.head_name = "head"
    return method, Network(lambda: rule.network(line()), "head", f"test fedproto {settings}", torch.float64)


METHOD, NETWORK = parts()
START = double([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # b, h0, h1, the prototypes, which are known
PROTOTYPES = double([2.0, 9.0, 1.0, 0.0])  # what stands for an unknown class must not matter
B = [1 - 0.1 * 0.5 * 4 / 3, 1.1]


@both_plans
def test_a_client_is_pulled_to_the_prototypes_it_knows(plan: Plan) -> None:
    """Client 4: the pull's gradient is 0.5 (2 (1 - 2) 1 + 2 (3 - 2) 3 + 0) / 3, the head's (p - y) f gives -1/3, 1/3. Client 7: 0.5 * -2,
    and -1/2, 1/2."""
    rule = METHOD.Client(METHOD)
    local = local_of(NETWORK, rule, SAMPLES, [3, 1], plan, [4, 7], lam=0.5)
    state, sent = rule.train(local, {"own": START.repeat(2, 1)}, sent_to(local, PROTOTYPES), {})
    close(state["own"][:, :3], [[B[0], 1 / 30, -1 / 30], [B[1], 0.05, -0.05]])
    close(sent["prototypes"][..., 0], [[2 * B[0], 2 * B[0]], [B[1], 0.0]])
    assert sent["held"].tolist() == [[2, 1], [1, 0]] and sent["prototypes"].shape == (2, 2, 1)
    assert not screen(Uplink(local.ids, sent), rule.schema("train", local.wire)).refused


@both_plans
def test_without_prototypes_it_trains_alone_and_answers_with_its_head(plan: Plan) -> None:
    rule, own = METHOD.Client(METHOD), double([1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0]).repeat(2, 1)
    local = local_of(NETWORK, rule, SAMPLES, [3, 1], plan, [4, 7], lam=0.5)
    state, _ = rule.train(local, {"own": START.repeat(2, 1)}, sent_to(local, None), {})
    close(state["own"][:, 0], [1.0, 1.0])
    assert torch.equal(rule.personal(local, {"own": own}, sent_to(local, None)), own)
    net = NETWORK.load(own[0], torch.float64).eval()
    close(net(double([[3.0]])), [[-3.0, 3.0]])


def test_the_nearest_prototype_answers_and_one_that_is_missing_never_does() -> None:
    net = NETWORK.load(double([1.0, 0.0, 9.0, 2.0, 5.0, 1.0, 1.0]), torch.float64).eval()
    x = double([[1.0], [3.0], [4.0], [9.0]])
    assert net(x).argmax(1).tolist() == [0, 0, 1, 1]
    close(net(x).softmax(1), (-(x - double([2.0, 5.0])).square()).softmax(1))
    one = NETWORK.load(double([1.0, 0.0, 9.0, 2.0, 5.0, 1.0, 0.0]), torch.float64).eval()
    assert one(x).argmax(1).tolist() == [0] * 4 and bool(torch.isfinite(one(x)).all())
    with_head, network = parts(predict="head")
    assert network.load(double([1.0, 0.0, 9.0, 2.0, 5.0, 1.0, 1.0]), torch.float64).eval()(x).argmax(1).tolist() == [1] * 4


@pytest.mark.parametrize(("weighting", "expected"), [("equal", (4.0 + 1.0) / 2), ("samples", (3 * 4.0 + 1.0) / 4)])
def test_the_server_averages_over_those_who_hold_a_class(weighting: str, expected: float) -> None:
    method, network = parts(weighting=weighting)
    ctx = context_of(network, method.Client(method), START, [4, 7])
    start = method.Server(method).init(ctx)
    assert start["model"].tolist() == [0.0] * 4
    sent = {"prototypes": double([[[4.0], [0.0]], [[1.0], [0.0]]]), "held": double([[3.0, 0.0], [1.0, 0.0]]), "loss": double([0.0, 0.0])}
    (asked,), state, verdict = one_round(method, start, ctx, Uplink(torch.tensor([4, 7]), sent))
    assert asked.pick.shape == (2, 0) and asked.bytes_down().tolist() == [0, 0]  # there is nothing to send yet
    close(state["model"], [expected, 0.0, 1.0, 0.0])
    assert verdict.tables["holders"].tolist() == [2, 0]
    assert delivered(method, state, ctx, [1, 2]).bytes_down().tolist() == [32, 32]
    later = {"prototypes": double([[[8.0], [6.0]]]), "held": double([[0.0, 2.0]]), "loss": double([0.0])}
    (asked,), state, _ = one_round(method, state, ctx, Uplink(torch.tensor([4]), later))
    assert asked.pick.tolist() == [[0], [0]]
    close(state["model"], [expected, 6.0, 1.0, 1.0])  # who does not hold class 0 does not count, and it keeps what it had


def test_without_a_pull_and_with_heads_it_is_local_training(simulate: Callable[..., Run]) -> None:
    tables = {"local": {}, "fedproto": {"lam": 0.0, "predict": "head"}}
    alone, pulled = (simulate(**hard(method, method=table)) for method, table in tables.items())
    size = alone._experiment.network.layout.size
    a, b = everything(alone), everything(pulled)
    p, parameters = alone._experiment.network.layout.parameters, b["rows/own"].shape[1] - size
    assert parameters == 10 * 6 + 10
    assert torch.equal(a["rows/own"][:, :p], b["rows/own"][:, :p])
    assert alone.final["accuracy"] == pulled.final["accuracy"]


def test_bytes_and_a_client_first_seen_late(simulate: Callable[..., Run]) -> None:
    """Client 0 comes in round 3: until then it answers by prototypes with the start model, and it is in no average."""
    table = hard("fedproto", train={"participation": 1.0, "availability": {"0": [[3, 4]]}, "rounds": 3})
    run = simulate(**table)
    size = (10 * 6 + 10) * 8
    assert run.metrics["bytes/down"].tolist() == [0, 4 * size, 5 * size]
    assert run.metrics["bytes/up"].tolist() == [4 * (size + 8), 4 * (size + 8), 5 * (size + 8)]
    assert run.store.arrays(2)["verdict/ids"].tolist() == [1, 2, 3, 4] and run.store.arrays(3)["verdict/ids"].tolist() == [0, 1, 2, 3, 4]


def test_poisoned_prototypes_reach_the_mean_and_absurd_ones_are_refused(simulate: Callable[..., Run]) -> None:
    train, attack = {"participation": 1.0, "rounds": 1}, {"name": "label-flip", "clients": [1], "ratio": 0.0}
    honest, lied = (simulate(**hard("fedproto", attack={**attack, "lies": lies}, train=train)) for lies in ({}, {"feature": -100.0}))
    assert float(lied.state()["model"].abs().max()) > 10 * float(honest.state()["model"].abs().max())
    rule, sent = METHOD.Client(METHOD), {"prototypes": double([[[float("nan")], [0.0]]]), "held": double([[1.0, 0.0]])}
    schema = rule.schema("train", local_of(NETWORK, rule, SAMPLES, [3], LOOP, [4]).wire)
    assert screen(Uplink(torch.tensor([4]), {**sent, "loss": double([0.0])}), schema).refused == {4: "prototypes is not finite"}


def test_a_model_without_a_head_is_refused() -> None:
    rule = METHOD.Client(METHOD)
    with pytest.raises(ConfigError, match="needs a head"):
        rule.network(line())
    rule.head_name = "1"
    with pytest.raises(ConfigError, match="no linear layer"):
        rule.network(nn.Sequential(nn.Linear(1, 1), nn.Tanh()))


def test_plans_agree_on_a_user_module(simulate: Callable[..., Run]) -> None:
    """A head by another name, and a loss that looks into the user's module."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.body = nn.Linear(5, 10), nn.Linear(64, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x.flatten(1)).tanh())

    def small(net: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none") + 0.01 * net.fc.weight.square().sum()

    table = hard("fedproto", model=Model(Mine, head="fc"), train={"loss": small})
    runs = [simulate(**table, engine={"plan": plan}) for plan in ("loop", "vmap")]
    assert_same(everything(runs[0]), everything(runs[1]), 1e-10)
