"""FedGC: the correction by hand and against its formula in plain loops, heads that know only some classes,
and rounds by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import Uplink
from holdfast.detectors import Detector, Judgement
from holdfast.local.plan import Plan
from holdfast.methods import fedgc
from holdfast.methods.fedgc import FAR, FedGC, correction
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import LOOP, VMAP, everything, samples_of
from tests.methods.halves import close, context_of, delivered, double, local_of, one_round, sent_to

both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
SAMPLES = samples_of(torch.tensor([[1.0], [3.0], [2.0], [1.0]]), torch.tensor([0, 0, 1, 2]), 3)
START = double([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # b, h0, h1, h2, which are present


def parts(**settings: Any) -> tuple[FedGC, Any, Network]:
    method = build("method", {"name": "fedgc", **settings})
    rule = method.Client(method)
    rule.head_name = "head"
    make = lambda: rule.network(BackboneHead(nn.Linear(1, 1, bias=False), nn.Linear(1, 3, bias=False)))  # noqa: E731
    return method, rule, Network(make, signature=f"test fedgc {settings}", dtype=torch.float64)


def test_two_embeddings_by_hand() -> None:
    """Client 0 holds class 0 with a = 1, client 1 class 1 with b = 2: with s = sigmoid(a b - a^2) and r =
    sigmoid(a b - b^2) the gradient is s (b - a) + r b, and r (a - b) + s a."""
    a, b = 1.0, 2.0
    s, r = 1 / (1 + math.exp(a * a - a * b)), 1 / (1 + math.exp(b * b - a * b))
    got = correction(
        double([[[a], [9.0]], [[9.0], [b]]]), torch.tensor([[True, False], [False, True]]), False
    )
    close(got[..., 0], [[s * (b - a) + r * b, 0.0], [0.0, r * (a - b) + s * a]])


def slowly(rows: Tensor, held: Tensor, alike: bool) -> Tensor:
    w = rows.clone().requires_grad_()
    clients, classes = held.shape
    value = torch.zeros((), dtype=torch.float64)
    for k in range(clients):
        for c in range(classes):
            if held[k, c]:
                mean = torch.stack([rows[z, c] for z in range(clients) if held[z, c]]).mean(0)
                near = (w[k, c] @ mean).exp()
                others = [
                    (w[k, c] @ w[z, j]).exp()
                    for z in range(clients)
                    for j in range(classes)
                    if z != k and held[z, j] and (alike or j != c)
                ]
                value = value - (near / (near + sum(others))).log()
    return torch.autograd.grad(value, w)[0]


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("at_once", [1024, 3])
def test_the_correction_is_the_gradient_of_its_formula(
    alike: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedgc, "ROWS_AT_ONCE", at_once)
    rows, held = Key(1).normal(4, 3, 5, dtype=torch.float64), Key(2).uniform(4, 3) < 0.6
    torch.testing.assert_close(correction(rows, held, alike), slowly(rows, held, alike), rtol=0, atol=1e-12)


def test_one_class_that_all_hold_is_only_drawn_together() -> None:
    """Nothing to keep away from: the softmax has one term, and its gradient is 0."""
    rows = Key(1).normal(3, 1, 2, dtype=torch.float64)
    assert not correction(rows, torch.ones(3, 1, dtype=torch.bool), False).any()
    assert correction(rows, torch.ones(3, 1, dtype=torch.bool), True).any()
    assert not correction(rows, torch.zeros(3, 1, dtype=torch.bool), False).any()


def test_an_absent_class_is_never_chosen_and_its_loss_is_a_number() -> None:
    _, _, network = parts()
    x, y = double([[1.0], [2.0]]), torch.tensor([1, 1])
    net = network.load(double([1.0, 1.0, 9.0, 2.0, 1.0, 0.0, 1.0]), torch.float64)
    close(net(x).detach(), [[1.0, 1.0 - FAR, 2.0], [2.0, 2.0 - FAR, 4.0]])
    assert bool(torch.isfinite(nn.functional.cross_entropy(net(x), y)))
    untold = network.load(double([1.0, 1.0, 9.0, 2.0, 0.0, 0.0, 0.0]), torch.float64)
    close(untold(x).detach(), [[1.0, 9.0, 2.0], [2.0, 18.0, 4.0]])


@both_plans
def test_a_client_trains_on_its_own_classes_alone(plan: Plan) -> None:
    """Client 4 has classes 0, 0, 1: softmax over two classes from h = 0, so h0 moves by 0.1 * (1/2 + 3/2 -
    2/2) / 3, h1 by the opposite, h2 not at all. Client 7 has class 2 alone and nothing to learn."""
    _, rule, network = parts()
    local = local_of(network, rule, SAMPLES, [3, 1], plan, [4, 7])
    received = sent_to(local, START[:4])
    state, sent = rule.train(local, {"own": START.repeat(2, 1)}, received, {})
    close(state["own"], [[1.0, 0.1 / 3, -0.1 / 3, 0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    close(sent["update"], [[0.0, 0.1 / 3, -0.1 / 3, 0.0], [0.0] * 4])
    assert sent["held"].tolist() == [[2, 1, 0], [0, 0, 1]] and set(sent) == set(
        rule.schema("train", local.wire)
    )
    # one that never trained knows its classes all the same
    close(
        rule.personal(local, {"own": START.repeat(2, 1)}, received)[:, 4:], [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    )


def replies(ids: list[int], update: Any, held: Any) -> Uplink:
    n = len(ids)
    usual = {
        "update": double(update),
        "buffers": double([[]] * n),
        "count": double([1.0] * n),
        "loss": double([0.0] * n),
    }
    return Uplink(torch.tensor(ids), {**usual, "held": double(held)})


def test_rounds_of_the_server() -> None:
    method, rule, network = parts(lam=2.0, lr=0.1)
    head = double([0.0, 1.0, 1.0, 1.0]) > 0
    ctx = context_of(network, rule, START, [4, 7], head=head)
    up = replies([4, 7], [[1.0, 1.0, 0.0, 0.0], [3.0, 0.0, 2.0, 0.0]], [[5, 0, 0], [0, 1, 0]])
    (asked,), state, _ = one_round(method, method.Server(method).init(ctx), ctx, up)
    assert asked.bank.tolist() == [START[:4].tolist()]
    close(state["model"], [3.0, 0.5, 1.0, 0.0])
    s, r = 1 / (1 + math.exp(1 - 2)), 1 / (1 + math.exp(4 - 2))
    a, b = 1 - 0.2 * (s * 1 + r * 2), 2 - 0.2 * (r * -1 + s * 1)
    close(state["models"], [[a, 0.0, 0.0, 1.0, 0.0, 0.0], [0.0, b, 0.0, 0.0, 1.0, 0.0]])
    later = delivered(method, state, ctx, [4, 5, 7])
    close(later.bank[later.pick[:, 0]], [[3.0, a, 0.0, 0.0], [3.0, 0.5, 1.0, 0.0], [3.0, 0.0, b, 0.0]])
    # client 5 comes with class 2 at c, from the common head; 4 and 7 are away: their heads stay, and are kept
    # away from
    ctx = context_of(network, rule, START, [5], head=head)
    _, state, _ = one_round(method, state, ctx, replies([5], [[0.0, 0.0, 0.0, 3.0]], [[0, 0, 4]]))
    close(state["models"][[0, 2], :3], [[a, 0.0, 0.0], [0.0, b, 0.0]])
    rows, held = (
        double([[[a], [0.0], [0.0]], [[0.5], [1.0], [3.0]], [[0.0], [b], [0.0]]]),
        torch.eye(3)[[0, 2, 1]] > 0,
    )
    close(state["models"][1, :3], double([0.5, 1.0, 3.0]) - 0.2 * slowly(rows, held, False)[1, :, 0])


class Ban(Detector):
    """Bans client 7."""

    name = "ban"

    def judge(self, state: Any, ctx: Any, models: Tensor, ids: Tensor) -> Any:
        yield from ()
        return Judgement(state, {7: "for the test"} if 7 in ids.tolist() else {}, {})


def test_a_banned_clients_head_is_forgotten() -> None:
    """It was heard in round 1, and banned in round 2: nobody is kept away from its embedding, or drawn to a
    mean that it is in."""
    method, rule, network = parts(lam=2.0, lr=0.1)
    ctx = context_of(network, rule, START, [4, 7], head=double([0.0, 1.0, 1.0, 1.0]) > 0)
    up = replies([4, 7], [[1.0, 1.0, 0.0, 0.0], [3.0, 0.0, 2.0, 0.0]], [[5, 0, 0], [0, 1, 0]])
    _, state, _ = one_round(method, method.Server(method).init(ctx), ctx, up)
    assert state["ids"].tolist() == [4, 7]
    _, after, verdict = one_round(method, state, replace(ctx, detectors=(Ban(),)), up)
    assert list(verdict.banned) == [7] and after["ids"].tolist() == [4] and len(after["models"]) == 1
    came_from = delivered(method, state, ctx, [4]).bank[1, 1:]
    close(
        after["models"][0, :3], came_from + double([1.0, 0.0, 0.0])
    )  # alone with its class: nothing to correct


def test_a_correction_beyond_all_bounds_is_not_taken() -> None:
    method, rule, network = parts(lam=1e300, lr=1e300)
    ctx = context_of(network, rule, START, [4, 7], head=double([0.0, 1.0, 1.0, 1.0]) > 0)
    up = replies([4, 7], [[1.0, 1.0, 0.0, 0.0], [3.0, 0.0, 2.0, 0.0]], [[5, 0, 0], [0, 1, 0]])
    _, state, verdict = one_round(method, method.Server(method).init(ctx), ctx, up)
    close(state["models"][:, :2], [[1.0, 0.0], [0.0, 2.0]])
    assert "method.lam" in verdict.notes[0]


def test_without_correction_and_with_all_classes_it_is_fedper(simulate: Callable[..., Run]) -> None:
    """FedAS without its two parts is FedPer: private heads under an averaged body."""
    data = {"clients": 3, "partition": {"name": "iid", "samples_per_client": 150}}
    tables = {"fedas": {"align": "off", "synchronise": False}, "fedgc": {"lam": 0.0}}
    train = {
        "local_epochs": 1,
        "participation": 1.0,
    }  # one that is first seen late would start from the averaged head
    per, gc = (
        everything(simulate(**hard(name, method=table, data=data, train=train)))
        for name, table in tables.items()
    )
    own = gc["rows/own"]
    assert bool((own[:, -10:] == 1).all())  # everybody has every class
    torch.testing.assert_close(own[:, :-10], per["rows/own"], rtol=0, atol=1e-12)


def test_bytes(simulate: Callable[..., Run]) -> None:
    run = simulate(**hard("fedgc", train={"participation": 1.0, "availability": {"0": [[3, 4]]}}))
    size = len(run.state()["model"]) * 8
    assert run.metrics["bytes/down"].tolist() == [n * size for n in (4, 4, 5)]
    assert run.metrics["bytes/up"].tolist() == [n * (size + (2 + 10) * 8) for n in (4, 4, 5)]
    assert run.state()["ids"].tolist() == [0, 1, 2, 3, 4]
