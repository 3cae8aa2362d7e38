"""FedCOM: the matching on small tables, both halves on a model of two numbers, and whole runs against Ditto.

The model has one input and two outputs, W = (1, 2), and a squared loss on the first output only. Client 4 has
1 -> 0 and 2 -> 1: residuals 1 and 1, gradient (1.5, 0). Client 7 has 1 -> 0: residual 1, gradient (1, 0). One
step of 0.1 leads to (0.85, 2) and (0.9, 2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.mean import Mean
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Layout, Wire
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.together import computed_alone
from holdfast.core.types import ROOT, Exchange, State, Steps, Uplink, Verdict
from holdfast.detectors.base import Detector, Judgement
from holdfast.engine.simulator import Simulator
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.losses import Batch
from holdfast.local.plan import Plan
from holdfast.methods.context import Context
from holdfast.methods.fedcom import NO_PEER, NOT_WANTED, class_gradients, last_layer, match
from holdfast.models.network import Network
from holdfast.results.run import Run
from holdfast.sweeps import session
from tests.helpers import (
    LOOP,
    PLANS,
    VMAP,
    assert_same,
    client_keys,
    deal,
    everything,
    network_of,
    random_samples,
    samples_of,
    tiny,
)

SAMPLES = samples_of(torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 0]), classes=2)
NETWORK = network_of(lambda: nn.Linear(1, 2, bias=False))
WHOLE = Wire.of(NETWORK.layout, torch.ones(2, dtype=torch.bool))
W = torch.tensor([1.0, 2.0], dtype=torch.float64)
both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])
PAIRS: dict[str, Any] = {
    "clients": 4,
    "partition": {"name": "complementary-pairs", "samples_per_client": 40, "ratio": 0.8},
}


def squared(net: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (net(batch.x)[:, 0] - batch.y) ** 2


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, double(expected), rtol=0, atol=1e-12)


def client(**settings: Any) -> Any:
    method = build("method", {"name": "fedcom", **settings})
    return method.Client(method)


def local_of(
    plan: Plan = LOOP,
    lam: float = 0.5,
    threshold: float = 0.5,
    facts: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Local:
    given: dict[str, Any] = dict(
        network=NETWORK,
        wire=WHOLE,
        ids=torch.tensor([4, 7]),
        key=client_keys(2),
        samples=SAMPLES,
        data=deal(SAMPLES, [2, 1]),
        validation=deal(SAMPLES, [0, 0]),
        initial=torch.zeros(2, 2, dtype=torch.float64),
        plan=plan,
        recipe=Recipe(lr=0.1, batch_size=2, loss=squared),
        selected=torch.tensor([True, True]),
        facts=facts or {},
        settings=SimpleNamespace(lam=double([lam, lam]), threshold=double([threshold, threshold])),
    )
    return Local(**{**given, **changes})


def sent(bank: list[list[float]], pick: list[list[int]]) -> Received:
    return Received(double(bank).reshape(-1, 2), torch.tensor(pick, dtype=torch.int64).reshape(2, -1), WHOLE)


EVERYBODY = sent([[1.0, 2.0]], [[0], [0]])
STATE = {"personal": double([[0.0, 0.0], [1.0, 1.0]]), "anchor": W.repeat(2, 1)}

# ---- Algorithm 1

# g of clients 2, 5 and 9: two classes, three channels
G = double([[[-3, 0, 1], [0, 0, 0]], [[-1, -2, 0], [0, 0, 0]], [[-2, 5, -9], [0, 0, 0]]])
IDS = torch.tensor([2, 5, 9])


def matched(
    wanted: list[list[int]], channels: int, signals: Tensor = G, ids: Tensor = IDS
) -> list[list[int]]:
    return match(G, IDS, torch.tensor(wanted, dtype=torch.bool), signals, ids, channels).tolist()


def test_the_peer_has_the_smallest_sum_where_the_clients_row_is_smallest() -> None:
    asked = [[1, 0], [1, 0], [1, 0]]
    # x = 1: channel 0, 1, 2 of the three; of the others, 9 has -2 < -1; 2 has 0 < 5; 5 has 0 < 1
    assert matched(asked, 1) == [[9, NOT_WANTED], [2, NOT_WANTED], [5, NOT_WANTED]]
    # x = 2: channels 0 1: 5 has -3, 9 has 3; channels 0 1: 2 has -3, 9 has 3; channels 0 2: 2 has -2, 5 has
    # -1
    assert matched(asked, 2) == [[5, NOT_WANTED], [2, NOT_WANTED], [2, NOT_WANTED]]
    # more than there are: all three, sums -2, -3, -6
    assert matched(asked, 20) == matched(asked, 3) == [[9, NOT_WANTED], [9, NOT_WANTED], [5, NOT_WANTED]]


def test_no_match_without_other_clients_or_where_none_has_learnt_the_class() -> None:
    assert matched([[0, 1], [0, 0], [1, 1]], 1) == [
        [NOT_WANTED, NO_PEER],
        [NOT_WANTED, NOT_WANTED],
        [5, NO_PEER],
    ]
    assert matched([[1, 0]] * 3, 1, G[:1], IDS[:1]) == [
        [NO_PEER, NOT_WANTED],
        [2, NOT_WANTED],
        [2, NOT_WANTED],
    ]
    assert matched([[1, 1]] * 3, 1, G[:0], IDS[:0]) == [[NO_PEER, NO_PEER]] * 3


def test_equal_sums_go_to_the_lowest_id_and_non_mutual_matches_are_allowed() -> None:
    same = G.clone()
    same[1:, 0] = double([-4, -4, -4])
    assert matched([[1, 0], [0, 0], [1, 0]], 2, same) == [[5, -1], [-1, -1], [5, -1]]


def test_the_last_layer() -> None:
    plain = nn.Sequential(nn.Embedding(3, 5), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    assert last_layer(Layout.of(plain)).name == "3.weight" and last_layer(NETWORK.layout).shape == (2, 1)
    for other in (nn.Conv2d(1, 2, 3), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3)), nn.BatchNorm1d(2)):
        with pytest.raises(
            ConfigError, match="fedcom: clients are matched by the rows of a last linear layer"
        ):
            last_layer(Layout.of(other))


class HeadFirst(nn.Module):
    """Registers what it ends with before the rest, whose last layer has as many outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(3, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def test_a_named_head_is_where_the_last_layer_is() -> None:
    assert last_layer(Network(HeadFirst, head="fc").layout).name == "fc.weight"
    assert last_layer(Network(HeadFirst, head=None).layout).name == "body.weight"  # all that can be told
    deep = Network(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))),
        head="1",
    )
    assert last_layer(deep.layout).name == "1.2.weight"


def test_a_client_that_has_not_learnt_a_class_is_no_peer() -> None:
    """A client without a step, or, by the gradient of the class's loss, without a sample of it, has a row of
    zeros."""
    untrained = double([[[-3, 0, 1], [-1, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[2, 5, 9], [0, 0, 0]]])
    assert match(untrained[:1], IDS[:1], torch.tensor([[True, True]]), untrained, IDS, 2).tolist() == [
        [9, NO_PEER]
    ]


# ---- the client half


@both_plans
def test_the_first_phase(plan: Plan) -> None:
    state, reply = client(scale="steps").train(local_of(plan), STATE, EVERYBODY, {})
    close(reply["update"], [[-0.15, 0.0], [-0.1, 0.0]])
    close(reply["steps"], [1, 1])
    close(state["anchor"], [[1, 2], [1, 2]])
    close(state["personal"], STATE["personal"].tolist())
    assert (
        set(reply)
        == set(client(scale="steps").schema("train", WHOLE))
        == {"update", "buffers", "count", "loss", "wanted", "steps"}
    )


@both_plans
def test_the_second_phase(plan: Plan) -> None:
    """Client 4: the mean of (0, 0) and (2, 2), then gradient (1.5, 0) + 0.5 (0, -1). Client 7: no peer, (1,
    0) + 0.5 (0, -1)."""
    state, reply = client().personalise(local_of(plan), STATE, sent([[2.0, 2.0]], [[0], [-1]]), {})
    close(reply["personal"], [[0.85, 1.05], [0.9, 1.05]])
    assert torch.equal(state["personal"], reply["personal"]) and torch.equal(state["anchor"], STATE["anchor"])


def test_several_peers_count_alike_and_the_pull_may_go_to_them() -> None:
    """Client 4 starts from the mean of (0, 0), (2, 2) and (4, 1), which is (2, 1): residuals 2 and 3,
    gradient (4, 0)."""
    peers = sent([[2.0, 2.0], [4.0, 1.0]], [[0, 1], [-1, -1]])
    _, reply = client().personalise(local_of(), STATE, peers, {})
    close(reply["personal"], [[2 - 0.1 * (4 + 0.5), 1 + 0.05], [0.9, 1.05]])
    _, reply = client(pull_to="peer").personalise(
        local_of(), STATE, peers, {}
    )  # their mean is (3, 1.5); without peers, w
    close(reply["personal"], [[2 - 0.1 * (4 - 0.5), 1 + 0.025], [0.9, 1.05]])


def test_personal_epochs() -> None:
    _, reply = client(personal_epochs=0).personalise(local_of(), STATE, sent([[2.0, 2.0]], [[0], [-1]]), {})
    close(reply["personal"], [[1, 1], [1, 1]])
    twice = local_of(recipe=Recipe(lr=0.1, epochs=2, batch_size=2, loss=squared))
    many, two = (
        client(personal_epochs=e).personalise(twice, STATE, EVERYBODY, {})[1]["personal"] for e in (None, 2)
    )
    assert torch.equal(many, two)


def test_finetuning_is_dittos_personal_step() -> None:
    state = client().finetune(
        local_of(), STATE, sent([[2.0, 2.0]], [[0], [-1]])
    )  # pulled to (2, 2), and to the w it had
    close(state["personal"], [[0.1 + 0.1, 0.1], [0.9, 1.05]])


def test_which_classes_are_wanted() -> None:
    """Client 0 has 4 + 1 + 2 samples of its classes, client 1 only class 1, client 2 nothing."""
    samples = samples_of(torch.zeros(8, 1), torch.tensor([0, 0, 0, 0, 1, 2, 2, 1]), classes=3)
    network = network_of(lambda: nn.Linear(1, 3))
    three = dict(network=network, samples=samples, data=deal(samples, [7, 1, 0]), ids=torch.tensor([0, 1, 2]))

    def wanted(threshold: float = 0.5, target: list[int] | None = None, **settings: Any) -> list[list[bool]]:
        limit = SimpleNamespace(threshold=torch.full((3,), threshold, dtype=torch.float64))
        facts = {} if target is None else {"target": torch.tensor(target)}
        return client(**settings).wanted(local_of(**three, settings=limit, facts=facts)).int().tolist()

    assert wanted() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]  # 2 of 4 is not less than half
    assert wanted(0.6) == [[0, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert wanted(0.6, [1, 0, -1]) == [
        [0, 1, 0],
        [1, 0, 0],
        [0, 0, 0],
    ]  # what is known comes first: class 2 is noise
    assert wanted(0.6, [1, 0, -1], minority="inferred") == wanted(0.6)


def test_a_last_layer_of_other_classes_is_refused() -> None:
    with pytest.raises(ConfigError, match="fedcom: the last layer has 2 outputs, but the data has 3 classes"):
        client().wanted(local_of(samples=samples_of(torch.zeros(3, 1), torch.tensor([0, 1, 2]))))


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_the_gradient_of_each_class_at_the_received_model(plan: Plan, batch_size: int) -> None:
    """At W = 0 both answers have chance 1/2. Client 4: -1/2 * 1 of 2 samples in row 0, -1/2 * 2 in row 1.
    Client 7: -1/2 in row 0."""
    local = local_of(
        plan, recipe=Recipe(lr=0.1, batch_size=batch_size, momentum=0.9, weight_decay=1.0, loss=squared)
    )
    close(
        class_gradients(local, torch.zeros(2, 2, dtype=torch.float64)), [[[-0.25], [-0.5]], [[-0.5], [0.0]]]
    )


def test_the_gradient_against_a_pass_per_class() -> None:
    samples, network = (
        random_samples(20),
        network_of(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))),
    )
    model = torch.stack([network.initial(Key(i)) for i in range(2)])
    local = local_of(
        VMAP, network=network, samples=samples, data=deal(samples, [13, 7]), recipe=Recipe(batch_size=4)
    )
    found = class_gradients(local, model)
    for i, rows in enumerate((torch.arange(13), torch.arange(13, 20))):
        net = network.load(model[i], dtype=torch.float64)
        for c in range(3):
            mine = rows[samples.y[rows] == c]
            loss = nn.functional.cross_entropy(
                net(samples.batch(mine, torch.float64)), samples.y[mine], reduction="sum"
            ) / len(rows)
            (gradient,) = torch.autograd.grad(loss, net[2].weight)  # type: ignore[index]
            torch.testing.assert_close(found[i, c], gradient[c], rtol=0, atol=1e-12)


# ---- the server half: three classes of one channel each, so that client k's g is minus its update

LINE = network_of(lambda: nn.Linear(1, 3, bias=False))
LINE_WIRE = Wire.of(LINE.layout, torch.ones(3, dtype=torch.bool))
ZERO = torch.zeros(3, dtype=torch.float64)
UPDATES = {0: [0.0, 1.0, 0.0], 1: [0.0, 3.0, 0.0], 2: [0.0, 2.0, 5.0], 3: [6.0, 0.0, 0.0]}


class Judge(Detector):
    """Turns away whom it is told to."""

    banned: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()

    def judge(self, state: State, ctx: Context, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        yield from ()
        return Judgement(
            state, dict.fromkeys(self.banned, "told to"), {}, dict.fromkeys(self.rejected, "told to")
        )


def answer(
    ids: list[int], wanted: dict[int, int], refused: dict[int, str] | None = None, **more: Any
) -> Uplink:
    n = len(ids)
    fields = {
        "update": double([UPDATES.get(k, [0, 0, 0]) for k in ids]).reshape(n, 3),
        "buffers": torch.zeros(n, 0, dtype=torch.float64),
        "count": torch.ones(n, dtype=torch.float64),
        "loss": torch.zeros(n, dtype=torch.float64),
        "wanted": double([[float(wanted.get(k) == c) for c in range(3)] for k in ids]).reshape(n, 3),
    }
    return Uplink(
        torch.tensor(ids, dtype=torch.int64),
        {**fields, **{k: double(v) for k, v in more.items()}},
        refused or {},
    )


def models(value: float) -> Callable[[Exchange], Uplink]:
    """Every client's v is its id plus a value."""
    return lambda asked: Uplink(asked.to, {"personal": (asked.to + value)[:, None].double().expand(-1, 3)})


PLAIN = models(0.0)


class Played:
    """A server half that is asked and answered round by round."""

    def __init__(self, **settings: Any):
        method = build("method", {"name": "fedcom", **settings})
        self.server = method.Server(method)
        self.state = self.server.init(self.context([]))

    def context(self, cohort: list[int], **changes: Any) -> Context:
        ids = torch.tensor(cohort, dtype=torch.int64)
        given = dict(
            round=1,
            cohort=ids,
            available=ids,
            key=Key(0),
            wire=LINE_WIRE,
            layout=LINE.layout,
            initial=ZERO,
            aggregator=Mean(),
        )
        return Context(**{**given, **changes})

    def round(
        self, up: Uplink, back: Callable[[Exchange], Uplink] = PLAIN, judge: Judge | None = None
    ) -> tuple[list[Exchange], Verdict]:
        steps = computed_alone(
            self.server.round(
                self.state, self.context(up.ids.tolist(), detectors=() if judge is None else (judge,))
            )
        )
        asked = next(steps)
        assert asked.task == "train"
        exchanges: list[Exchange] = []
        reply = up
        while True:
            try:
                exchanges.append(steps.send(reply))
            except StopIteration as end:
                self.state, verdict = end.value
                return exchanges, verdict
            reply = back(exchanges[-1])


def got(exchange: Exchange) -> dict[int, list[float]]:
    """The first numbers of the models that each client was sent."""
    return {
        k: [float(exchange.bank[place, 0]) for place in row if place >= 0]
        for k, row in zip(exchange.to.tolist(), exchange.pick.tolist(), strict=True)
    }


WANTED = {0: 1, 1: 2, 3: 2}
ALL = [0, 1, 2, 3]


def test_two_rounds() -> None:
    """0 wants class 1, where 1 pushed most; 1 and 3 want class 2, where only 2 did. In round 1 nobody has
    sent a personal model yet."""
    play = Played()
    (first,), verdict = play.round(answer(ALL, WANTED))
    assert (
        first.task == "personalise"
        and got(first) == {0: [], 1: [], 2: [], 3: []}
        and first.bytes_down().tolist() == [0, 0, 0, 0]
    )
    assert verdict.tables["matches"].tolist() == [[-1, 1, -1], [-1, -1, 2], [-1, -1, -1], [-1, -1, 2]]
    close(play.state["model"], [1.5, 1.5, 1.25])
    close(play.state["personal/rows"][:, 0], [0, 1, 2, 3])
    (second,), _ = play.round(answer(ALL, WANTED), models(0.5))
    assert got(second) == {
        0: [1.0],
        1: [2.0],
        2: [],
        3: [2.0],
    }  # of the round before, although others were trained in this one
    assert len(second.bank) == 2 and second.bytes_down().tolist() == [24, 24, 0, 24]
    close(play.state["personal/rows"][:, 0], [0.5, 1.5, 2.5, 3.5])


def test_several_classes_several_peers_each_once() -> None:
    play = Played()
    play.round(answer(ALL, {}))
    up = answer(ALL, {})
    up["wanted"][0] = double([1.0, 1.0, 1.0])
    up["wanted"][1] = double([1.0, 0.4, 1.0])  # what is not clearly wanted is not
    up["wanted"][3] = double([0.0, 1.0, 1.0])
    (asked,), verdict = play.round(up)
    assert verdict.tables["matches"].tolist() == [[3, 1, 2], [3, -1, 2], [-1, -1, -1], [-1, 1, 2]]
    assert got(asked) == {0: [1.0, 2.0, 3.0], 1: [2.0, 3.0], 2: [], 3: [1.0, 2.0]}


def test_one_peer_for_two_classes_is_sent_once() -> None:
    play = Played()
    play.round(answer([0, 2], {}))
    up = answer([0, 2], {})
    up["wanted"][0] = double([0.0, 1.0, 1.0])
    (asked,), verdict = play.round(up)
    assert verdict.tables["matches"].tolist() == [[-1, 2, 2], [-1, -1, -1]] and got(asked) == {
        0: [2.0],
        2: [],
    }


@pytest.mark.parametrize("way", ["banned", "rejected", "refused"])
def test_a_rejected_client_is_no_peer(way: str) -> None:
    """Without 1, the best for class 1 is 2; a ban is for good."""
    play = Played()
    play.round(answer(ALL, WANTED))
    if way == "refused":
        (asked,), verdict = play.round(answer([0, 2, 3], WANTED, {1: "update is not finite"}))
    else:
        (asked,), verdict = play.round(answer(ALL, WANTED), models(0.5), Judge(**{way: (1,)}))
    assert got(asked)[0] == [2.0] and verdict.tables["matches"][0].tolist() == [-1, 2, -1]
    assert (1 in asked.to.tolist()) == (way == "rejected")  # it may go on with its own model
    (asked,), _ = play.round(answer([0, 2, 3], WANTED))
    assert got(asked)[0] == ([2.5] if way == "banned" else [1.0])  # the last that was sent in good standing
    assert (1 in play.state["personal/ids"].tolist()) == (way != "banned")


def test_an_absent_client_is_a_peer_by_its_last_signal_and_model() -> None:
    play = Played()
    play.round(answer([0, 1], {0: 1}))
    (asked,), verdict = play.round(answer([0, 2], {0: 1}))
    assert (
        verdict.ids.tolist() == [0, 2]
        and verdict.tables["matches"][0].tolist() == [-1, 1, -1]
        and got(asked) == {0: [1.0], 2: []}
    )


def test_a_peer_that_has_sent_no_model_is_skipped() -> None:
    """2's personal model was refused or lost; it still has the best signal for class 2."""

    def lost(asked: Exchange) -> Uplink:
        return PLAIN(asked).only(asked.to != 2)

    play = Played()
    play.round(answer(ALL, WANTED), lost)
    (asked,), verdict = play.round(answer(ALL, WANTED))
    assert got(asked) == {0: [1.0], 1: [], 2: [], 3: []} and verdict.tables["matches"][1].tolist() == [
        -1,
        -1,
        2,
    ]


def test_an_empty_cohort_and_a_single_client() -> None:
    play = Played()
    (asked,), verdict = play.round(answer([0], WANTED))
    assert verdict.tables["matches"].tolist() == [[-1, NO_PEER, -1]] and got(asked) == {0: []}
    exchanges, verdict = play.round(answer([], {}))
    assert (
        not len(verdict.ids)
        and verdict.tables["matches"].shape == (0, 3)
        and all(not len(asked.to) for asked in exchanges)
    )
    close(play.state["personal/rows"][:, 0], [0])


def test_sequential_order_sends_the_newest_models() -> None:
    play = Played(order="sequential")
    first, _ = play.round(answer(ALL, WANTED))
    assert [got(asked) for asked in first] == [{0: []}, {1: []}, {2: []}, {3: [2.0]}]
    second, _ = play.round(answer(ALL, WANTED), models(0.5))
    assert [got(asked) for asked in second] == [{0: [1.0]}, {1: [2.0]}, {2: []}, {3: [2.5]}]


def test_without_matching_no_personal_model_is_sent() -> None:
    play = Played(matching=False)
    for _ in range(2):
        (asked,), verdict = play.round(answer(ALL, WANTED))
        assert got(asked) == {0: [], 1: [], 2: [], 3: []} and bool(
            (verdict.tables["matches"] == NOT_WANTED).all()
        )


def test_scales_and_signals() -> None:
    """1's g of class 1 is -3 of length 3 in 6 steps; 2's is -2 of length sqrt(29) in 1 step; 0's own does not
    count."""
    for settings, best in (
        ({}, 1),
        ({"scale": "norm"}, 1),
        ({"scale": "steps"}, 2),
        ({"signal": "gradient"}, 3),
    ):
        gradient = [[[0], [-9], [0]], [[0], [-1], [0]], [[0], [-1], [0]], [[0], [-2], [0]]]
        _, verdict = Played(**settings).round(answer(ALL, {0: 1}, steps=[1, 6, 1, 1], gradient=gradient))
        assert verdict.tables["matches"][0].tolist() == [-1, best, -1]
    loud = answer(ALL, {0: 1})
    loud["update"][3] = double([60.0, 4.0, 0.0])
    assert Played().round(loud)[1].tables["matches"][0, 1] == 3
    assert Played(scale="norm").round(loud)[1].tables["matches"][0, 1] == 1  # 4 of 60.1 is less than 3 of 3


def test_the_servers_own_client_is_no_peer() -> None:
    up = answer([ROOT, 0, 1], {ROOT: 1, 0: 1})
    up["update"][0] = double([0.0, 100.0, 0.0])
    (asked,), verdict = Played().round(up)
    assert verdict.ids.tolist() == asked.to.tolist() == [0, 1] and verdict.tables["matches"][0].tolist() == [
        -1,
        1,
        -1,
    ]


# ---- whole runs


@pytest.mark.parametrize(
    "settings", [{"matching": False}, {"threshold": 1e-9}], ids=["no matching", "no minority"]
)
def test_without_peers_it_is_ditto(settings: dict[str, Any], simulate: Callable[..., Run]) -> None:
    """Ditto trains w and v on the same batches, FedCOM one after the other on batches of their own;
    unshuffled these are the same."""
    train = {"rounds": 3, "local_epochs": 2, "participation": 0.6, "momentum": 0.5, "shuffle": False}
    ditto = everything(simulate(method={"name": "ditto", "lam": 0.3}, train=train))
    fedcom = everything(simulate(method={"name": "fedcom", "lam": 0.3, **settings}, train=train))
    shared = {name: fedcom[name] for name in ditto}
    assert_same(ditto, shared, 1e-12)
    assert not torch.equal(ditto["rows/personal"][0], ditto["rows/personal"][1])


def test_pairs_find_each_other(simulate: Callable[..., Run]) -> None:
    run = simulate(method="fedcom", data=PAIRS, train={"rounds": 3, "local_epochs": 3})
    assert run.final["matching/accuracy"] == 1.0
    for round in (1, 2, 3):
        matches = run.store.arrays(round)["verdict/tables/matches"]
        assert matches.amax(1).tolist() == [1, 0, 3, 2] and int((matches >= 0).sum()) == 4
    size, parameters = run._experiment.network.layout.size, run._experiment.network.layout.parameters
    assert size == parameters
    # up: update and v, count, loss, ten wanted; down: w each round, and a peer's v from the second round on
    assert run.final["bytes/up"] == 3 * 4 * 8 * (2 * size + 12)
    assert run.final["bytes/down"] == 4 * 8 * (3 * size + 2 * size)


def test_inferred_classes_are_judged_by_the_target_alone(simulate: Callable[..., Run]) -> None:
    """Where noise counts as a minority class, somebody is found for it too; it has no partner to be compared
    with."""
    run = simulate(
        method={"name": "fedcom", "minority": "inferred"}, data=PAIRS, train={"rounds": 1, "local_epochs": 3}
    )
    assert int((run.store.arrays(1)["verdict/tables/matches"] >= 0).sum()) == 8
    assert (
        run.store.parts(1)[0]["metrics"]["matching/decisions"] == 4 and run.final["matching/accuracy"] == 1.0
    )


def test_no_partners_no_matching_accuracy(simulate: Callable[..., Run]) -> None:
    assert simulate(method="fedcom").final["matching/accuracy"] is None
    assert simulate(method="ditto", data=PAIRS).final["matching/accuracy"] is None


SWITCHES: list[dict[str, Any]] = [
    {"order": "sequential"},
    {"signal": "gradient", "scale": "norm"},
    {"pull_to": "peer", "scale": "steps"},
]


@pytest.mark.parametrize("settings", SWITCHES, ids=["sequential", "gradient", "peer"])
def test_every_switch_under_both_plans(settings: dict[str, Any], simulate: Callable[..., Run]) -> None:
    data = {"clients": 4, "partition": PAIRS["partition"]}
    model = {"name": "mlp", "hidden": 6, "batch_norm": True, "dropout": 0.2}
    tables = [
        {
            "method": {"name": "fedcom", **settings},
            "data": data,
            "model": model,
            "train": {"participation": 0.75, "rounds": 3},
            "engine": {"plan": plan},
        }
        for plan in ("loop", "vmap")
    ]
    loop, vmap = (everything(simulate(**table)) for table in tables)
    assert_same(loop, vmap, 1e-10)
    assert bool((loop["3/verdict/tables/matches"] >= 0).any())


def test_fused_partitions_keep_their_own_facts(
    simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]
) -> None:
    tables = [{"method": "fedcom", "data": PAIRS}, {"method": "fedcom"}]
    for table, fused in zip(tables, simulate_all(tables), strict=True):
        assert_same(everything(fused), everything(simulate(**table)), 1e-10)


def test_lies_about_models_reach_the_peers_only_if_they_are_finite(simulate: Callable[..., Run]) -> None:
    """A malicious client's personal model may be anything; what is not finite is refused, and the last good
    one stays."""
    attack = {"name": "sign-flip", "clients": [1], "lies": {"model": 1e300}}
    run = simulate(method="fedcom", data=PAIRS, attack=attack, train={"rounds": 3})
    head = run.store.head()
    assert head is not None and bool(torch.isfinite(head[1]["server/personal/rows"]).all())
    assert head[1]["server/personal/rows"][1].abs().max() > 1e290


def test_a_run_that_was_stopped_between_the_phases_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_disk: None
) -> None:
    config = tiny(
        method="fedcom", data=PAIRS, train={"rounds": 3, "participation": 0.75}, engine={"plan": "loop"}
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    session.start([("", config)], whole)
    exchange = Simulator.exchange

    def stop(self: Simulator, calls: Any) -> Any:
        if (calls[0].run_context.round, calls[0].exchange.task) == (2, "personalise"):
            raise KeyboardInterrupt
        return exchange(self, calls)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Simulator, "exchange", stop)
        session.start([("", config)], cut)
    session.resume(cut)
    a, b = everything(Run(whole, config)), everything(Run(cut, config))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
