"""FedProto by hand: f = b x, logits (h0 f, h1 f). Client 4 has x = 1, 3 of class 0 and x = 2 of class 1,
client 7 only x = 1 of class 0. All start from b = 1, h = 0, where cross-entropy moves the head only; class 0
has the prototype 2, class 1 has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import Model
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.screening import screen
from holdfast.core.types import Uplink
from holdfast.local import programs
from holdfast.local.batch_order import schedule
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.local.programs import forget, refusals
from holdfast.methods.fedproto import FedProto
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import LOOP, PLANS, VMAP, assert_same, everything, samples_of
from tests.methods.halves import close, context_of, delivered, double, local_of, one_round, sent_to

both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
SAMPLES = samples_of(torch.tensor([[1.0], [3.0], [2.0], [1.0]]), torch.tensor([0, 0, 1, 0]))


def line() -> nn.Module:
    return BackboneHead(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))


def normed() -> nn.Module:
    return BackboneHead(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh()), nn.Linear(2, 3))


def parts(module: Callable[[], nn.Module] = line, **settings: Any) -> tuple[FedProto, Network]:
    method = build("method", {"name": "fedproto", **settings})
    rule = method.Client(method)
    rule.head_name = "head"
    return method, Network(
        lambda: rule.network(module()), "head", f"test fedproto {module.__name__} {settings}", torch.float64
    )


METHOD, NETWORK = parts()
NORMED, NETWORKS = (
    parts(module=normed)[1],
    {name: parts(module=normed, measure=name)[1] for name in ("during", "last-epoch")},
)
START = double([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # b, h0, h1, the prototypes, which are known
PROTOTYPES = double([2.0, 9.0, 1.0, 0.0])  # what stands for an unknown class must not matter
B = [1 - 0.1 * 0.5 * 4 / 3, 1.1]


@both_plans
def test_a_client_is_pulled_to_the_prototypes_it_knows(plan: Plan) -> None:
    """Client 4: the pull's gradient is 0.5 (2 (1 - 2) 1 + 2 (3 - 2) 3 + 0) / 3, the head's (p - y) f gives
    -1/3, 1/3. Client 7: 0.5 * -2, and -1/2, 1/2."""
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
    assert (
        network.load(double([1.0, 0.0, 9.0, 2.0, 5.0, 1.0, 1.0]), torch.float64).eval()(x).argmax(1).tolist()
        == [1] * 4
    )


@pytest.mark.parametrize(
    ("weighting", "expected"), [("equal", (4.0 + 1.0) / 2), ("samples", (3 * 4.0 + 1.0) / 4)]
)
def test_the_server_averages_over_the_clients_that_hold_a_class(weighting: str, expected: float) -> None:
    method, network = parts(weighting=weighting)
    ctx = context_of(network, method.Client(method), START, [4, 7])
    start = method.Server(method).init(ctx)
    assert start["model"].tolist() == [0.0] * 4
    sent = {
        "prototypes": double([[[4.0], [0.0]], [[1.0], [0.0]]]),
        "held": double([[3.0, 0.0], [1.0, 0.0]]),
        "loss": double([0.0, 0.0]),
    }
    (asked,), state, verdict = one_round(method, start, ctx, Uplink(torch.tensor([4, 7]), sent))
    assert asked.pick.shape == (2, 0) and asked.bytes_down().tolist() == [
        0,
        0,
    ]  # there is nothing to send yet
    close(state["model"], [expected, 0.0, 1.0, 0.0])
    assert verdict.tables["holders"].tolist() == [2, 0]
    assert delivered(method, state, ctx, [1, 2]).bytes_down().tolist() == [32, 32]
    later = {"prototypes": double([[[8.0], [6.0]]]), "held": double([[0.0, 2.0]]), "loss": double([0.0])}
    (asked,), state, _ = one_round(method, state, ctx, Uplink(torch.tensor([4]), later))
    assert asked.pick.tolist() == [[0], [0]]
    close(
        state["model"], [expected, 6.0, 1.0, 1.0]
    )  # who does not hold class 0 does not count, and it keeps what it had


def slowly(
    model: Tensor, x: Tensor, y: Tensor, recipe: Recipe, order: Tensor, lam: float, first: int
) -> tuple[Tensor, Tensor]:
    """One client with nn.Module and torch.optim.SGD: its model after training, and the class means of the
    features that its batches had in the steps from `first` on, each under the model that this step began
    with."""
    net = NORMED.load(model, torch.float64).train()
    aim, sums, seen = net.head, torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    optimiser = torch.optim.SGD(net.parameters(), lr=float(recipe.lr), momentum=float(recipe.momentum))
    for t, places in enumerate(order):
        own = places[places >= 0]
        features = net.backbone(x[own])
        pull = sum(
            float(aim.known[k]) * (f - aim.prototypes[k]).square().mean()
            for f, k in zip(features, y[own], strict=True)
        ) / len(own)
        optimiser.zero_grad()
        (nn.functional.cross_entropy(aim.inner(features), y[own]) + lam * pull).backward()
        optimiser.step()
        for f, k in zip(features.detach(), y[own], strict=True):
            if t >= first:
                sums[k], seen[k] = sums[k] + f, seen[k] + 1
    return torch.cat([p.detach().flatten() for p in net.parameters()]), sums / seen.clamp(min=1)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("measure", ["during", "last-epoch"])
@pytest.mark.parametrize("steps", [None, 5], ids=["epochs", "steps"])
def test_prototypes_of_the_training_itself_against_a_slow_client(
    plan: Plan, measure: str, steps: int | None
) -> None:
    """Ragged batches, BatchNorm, momentum, a class that no client has, one without a prototype, a client
    without samples."""
    samples, counts = (
        samples_of(Key(5).normal(17, 3), torch.tensor([0, 2, 0, 2, 2, 2, 0, 0, 0, 2, 2, 2, 0, 2, 2, 0, 0])),
        [7, 0, 10],
    )
    method, _ = parts(measure=measure)
    rule, network = method.Client(method), NETWORKS[measure]
    recipe = Recipe(lr=0.1, momentum=0.5, epochs=torch.tensor([2, 2, 3]), steps=steps, batch_size=4)
    local = local_of(network, rule, samples, counts, plan, [4, 7, 8], recipe, lam=0.7)
    start = network.initial(Key(1)).expand(3, -1)
    told = torch.cat([Key(2).normal(6, dtype=torch.float64), double([1.0, 0.0, 0.0])])
    state, sent = rule.train(local, {"own": start}, sent_to(local, told), {})
    order = schedule(
        local.key.fold("fit"),
        np.array(counts),
        4,
        np.array([2, 2, 3]),
        None if steps is None else np.full(3, steps),
    )
    begun = NORMED.initial(Key(1)).clone()
    begun[NORMED.layout.under("head.prototypes")], begun[NORMED.layout.under("head.known")] = (
        told[:6],
        told[6:],
    )
    for i, first in ((0, {None: 2, 5: 3}[steps]), (2, {None: 6, 5: 2}[steps])):  # 2 and 3 batches an epoch
        data = local.data.rows[i, : counts[i]]
        x, y = samples.batch(data, torch.float64), local.data.labels[i, : counts[i]]
        index = order.index[: int(order.steps[i]), i]
        model, means = slowly(begun, x, y, recipe, index, 0.7, 0 if measure == "during" else first)
        close(state["own"][i, : len(model)], model)
        close(sent["prototypes"][i], means)
        assert sent["held"][i].tolist() == [int((y == k).sum()) for k in range(3)]
    assert not sent["held"][1].any() and not sent["prototypes"][1].any()
    for name in ("sums", "seen", "steps"):  # nothing is left for the next round
        assert not state["own"][:, network.layout.under(f"head.{name}")].any()


def test_what_a_compiler_is_given_of_the_adding_up() -> None:
    """Buffers that the loss writes into: the traced step has them, too."""
    method, network = parts(module=normed, measure="during", predict="head")
    rule, samples = method.Client(method), samples_of(Key(5).normal(6, 3), torch.tensor([0, 2, 0, 2, 2, 1]))
    local = local_of(
        network, rule, samples, [4, 2], Plan("compiled-vmap"), [4, 7], Recipe(lr=0.1, batch_size=4), lam=0.7
    )
    forget()
    rule.train(local, {"own": network.initial(Key(1)).expand(2, -1)}, sent_to(local, None), {})
    (ready,) = programs._programs.values()
    want, got = ready._step(ready.memory), ready.traced()(ready.memory)
    assert want.keys() == got.keys() and "buffers.head.sums" in got
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=0, atol=1e-12)


def test_a_class_that_was_in_no_batch_is_not_held() -> None:
    """Batches of 2 of 3 samples, and the rest is dropped: x = 1, 3 of class 0 are seen, x = 2 of class 1 is
    not; client 7 has no step."""
    method, network = parts(measure="during")
    rule = method.Client(method)
    local = local_of(
        network,
        rule,
        SAMPLES,
        [3, 1],
        LOOP,
        [4, 7],
        Recipe(lr=0.1, batch_size=2, shuffle=False, drop_last=True),
        lam=0.0,
    )
    _, sent = rule.train(local, {"own": network.initial(Key(0)).expand(2, -1)}, sent_to(local, None), {})
    b = float(network.initial(Key(0))[0])
    close(sent["prototypes"][..., 0], [[2 * b, 0.0], [0.0, 0.0]])
    assert sent["held"].tolist() == [[2, 0], [0, 0]]


@pytest.mark.parametrize("measure", ["during", "last-epoch"])
def test_measuring_during_training_changes_no_training_of_the_first_round(
    measure: str, simulate: Callable[..., Run]
) -> None:
    """Later the models differ, as they are pulled to other prototypes; what travels is as much as ever."""
    runs = [
        simulate(**hard("fedproto", method={"measure": chosen}, train={"rounds": 1}))
        for chosen in ("after", measure)
    ]
    after, during = (everything(run)["rows/own"] for run in runs)
    p = runs[0]._experiment.network.layout.parameters
    assert torch.equal(after[:, :p], during[:, :p])
    assert runs[0].final["bytes/up"] == runs[1].final["bytes/up"]
    assert not torch.allclose(runs[0].state()["model"], runs[1].state()["model"])


@pytest.mark.parametrize("measure", ["during", "last-epoch"])
def test_measures_are_the_same_under_every_plan_and_fused(
    measure: str, simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]
) -> None:
    before = refusals()
    tables = [
        hard("fedproto", method={"measure": measure}, train={"rounds": 2}),
        hard("fedproto", method={"measure": measure, "lam": 0.2}, train={"rounds": 2, "local_epochs": 3}),
    ]
    fused = [everything(run) for run in simulate_all(tables)]
    for plan in ("loop", "compiled-vmap"):
        for table, expected in zip(tables, fused, strict=True):
            assert_same(everything(simulate(**table, engine={"plan": plan})), expected, 1e-10)
    assert refusals() == before


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
    """Client 0 comes in round 3: until then it answers by prototypes with the start model, and it is in no
    average."""
    table = hard("fedproto", train={"participation": 1.0, "availability": {"0": [[3, 4]]}, "rounds": 3})
    run = simulate(**table)
    size = (10 * 6 + 10) * 8
    assert run.metrics["bytes/down"].tolist() == [0, 4 * size, 5 * size]
    assert run.metrics["bytes/up"].tolist() == [4 * (size + 8), 4 * (size + 8), 5 * (size + 8)]
    assert run.store.arrays(2)["verdict/ids"].tolist() == [1, 2, 3, 4] and run.store.arrays(3)[
        "verdict/ids"
    ].tolist() == [0, 1, 2, 3, 4]


def test_poisoned_prototypes_reach_the_mean_and_absurd_ones_are_refused(simulate: Callable[..., Run]) -> None:
    train, attack = {"participation": 1.0, "rounds": 1}, {"name": "label-flip", "clients": [1], "ratio": 0.0}
    honest, lied = (
        simulate(**hard("fedproto", attack={**attack, "lies": lies}, train=train))
        for lies in ({}, {"feature": -100.0})
    )
    assert float(lied.state()["model"].abs().max()) > 10 * float(honest.state()["model"].abs().max())
    rule, sent = (
        METHOD.Client(METHOD),
        {"prototypes": double([[[float("nan")], [0.0]]]), "held": double([[1.0, 0.0]])},
    )
    schema = rule.schema("train", local_of(NETWORK, rule, SAMPLES, [3], LOOP, [4]).wire)
    assert screen(Uplink(torch.tensor([4]), {**sent, "loss": double([0.0])}), schema).refused == {
        4: "prototypes is not finite"
    }


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
        return (
            nn.functional.cross_entropy(net(batch.x), batch.y, reduction="none")
            + 0.01 * net.fc.weight.square().sum()
        )

    table = hard("fedproto", model=Model(Mine, head="fc"), train={"loss": small})
    runs = [simulate(**table, engine={"plan": plan}) for plan in ("loop", "vmap")]
    assert_same(everything(runs[0]), everything(runs[1]), 1e-10)
