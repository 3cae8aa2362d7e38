"""FedFomo: what a client makes of the models of others, whom the server sends them to, and that it really
mixes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.flat import Wire
from holdfast.core.registry import build
from holdfast.core.together import computed_alone
from holdfast.core.types import Uplink
from holdfast.data.client_rows import Padded
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.plan import Plan
from holdfast.results.run import Run
from tests.checks.method_cases import hard
from tests.helpers import client_keys, deal, everything, network_of, samples_of
from tests.methods.by_hand import answer, both_plans, close, context

Simulate = Callable[..., Run]


class Two(nn.Module):
    """Two numbers, which are the logits of the sample (1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


NETWORK = network_of(Two)
SAMPLES = samples_of(torch.ones(12, 2), torch.zeros(12, dtype=torch.int64), classes=2)
LN2 = math.log(2)


def loss(a: float, b: float) -> float:
    return math.log1p(math.exp(b - a))


def vectors(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def local_of(plan: Plan, validation: tuple[int, int] = (2, 1), train: tuple[int, int] = (2, 1)) -> Local:
    wire = Wire.of(NETWORK.layout, torch.ones(2, dtype=torch.bool))
    return Local(
        network=NETWORK,
        wire=wire,
        ids=torch.tensor([4, 7]),
        key=client_keys(2),
        samples=SAMPLES,
        data=deal(SAMPLES, train),
        validation=deal(SAMPLES, validation),
        initial=torch.zeros(2, 2, dtype=torch.float64),
        plan=plan,
        recipe=Recipe(lr=0.1, epochs=0, batch_size=2),
        settings=SimpleNamespace(held_back=torch.full((2,), 0.2, dtype=torch.float64)),
        selected=torch.ones(2, dtype=torch.bool),
    )


def client(others: int = 2) -> Any:
    method = build("method", {"name": "fedfomo", "others": others})
    return method.Client(method)


def server(others: int = 2) -> Any:
    method = build("method", {"name": "fedfomo", "others": others})
    return method.Server(method)


@both_plans
def test_what_helps_is_taken_by_how_much_it_helps(plan: Plan) -> None:
    """Client 4: from w_old = (0, 0), A = (3, -4) is 5 away and helps, B = (0, 3) is 3 away and hurts, its own
    (1, 0) is 1 away and helps. Client 7: its own (0, 1) hurts; A helps; it was not sent a second one."""
    bank = vectors((3.0, -4.0), (0.0, 3.0))
    got = Received(bank, torch.tensor([[-1, 1, 0], [-1, 0, -1]]), local_of(plan).wire)
    state = {"own": vectors((1.0, 0.0), (0.0, 1.0)), "old": vectors((0.0, 0.0), (0.0, 0.0))}
    fresh, sent = client().train(local_of(plan), state, got, {})
    a, b, own = (LN2 - loss(3, -4)) / 5, (LN2 - loss(0, 3)) / 3, LN2 - loss(1, 0)
    close(sent["affinity"], [[b, a], [a, 0.0]])
    assert b < 0 < a
    mixed = [[(3 * a + own) / (a + own), -4 * a / (a + own)], [3.0, -4.0]]
    close(fresh["old"], mixed)
    close(fresh["own"], mixed)  # no epochs: where training began
    close(sent["update"], mixed)  # against the common start (0, 0)


@both_plans
def test_a_client_that_no_model_helps_keeps_its_own(plan: Plan) -> None:
    """Client 4: all hurt. Client 7: sent a copy of its w_old, which is no way away, and something so far that
    it cannot be told how far."""
    got = Received(
        vectors((0.0, 3.0), (0.0, 0.0), (-1e200, 1e200)),
        torch.tensor([[-1, 0, -1], [-1, 1, 2]]),
        local_of(plan).wire,
    )
    state = {"own": vectors((0.0, 1.0), (0.0, 1.0)), "old": vectors((0.0, 0.0), (0.0, 0.0))}
    fresh, sent = client().train(local_of(plan), state, got, {})
    close(sent["affinity"], [[(LN2 - loss(0, 3)) / 3, 0.0], [0.0, 0.0]])
    close(fresh["own"], [[0.0, 1.0], [0.0, 1.0]])


@both_plans
def test_a_client_whose_training_diverged_recovers_by_the_models_of_others(plan: Plan) -> None:
    """Its own model is no number, and nothing of it may be in the mixture."""
    got = Received(vectors((3.0, -4.0)), torch.tensor([[-1, 0, -1], [-1, 0, -1]]), local_of(plan).wire)
    state = {"own": vectors((math.nan, math.inf), (1.0, 0.0)), "old": vectors((0.0, 0.0), (0.0, 0.0))}
    fresh, sent = client().train(local_of(plan), state, got, {})
    close(fresh["own"][0], [3.0, -4.0])
    assert bool(torch.isfinite(fresh["own"]).all() and torch.isfinite(sent["affinity"]).all())


def test_without_anything_to_try_models_on_a_client_keeps_its_own() -> None:
    """One training sample and no validation: nothing can be held back."""
    local = local_of(Plan("loop"), validation=(0, 0), train=(1, 1))
    trained, held = client()._held_back(local)
    assert held.count.tolist() == [0, 0] and trained.data.count.tolist() == [1, 1]
    got = Received(vectors((3.0, -4.0)), torch.tensor([[-1, 0, -1], [-1, 0, -1]]), local.wire)
    fresh, sent = client().train(
        local, {"own": vectors((1.0, 0.0), (0.0, 1.0)), "old": vectors((0.0, 0.0), (0.0, 0.0))}, got, {}
    )
    close(fresh["own"], [[1.0, 0.0], [0.0, 1.0]])
    close(sent["affinity"], [[0.0, 0.0], [0.0, 0.0]])


def test_a_fifth_is_held_back_the_same_in_every_round_and_only_where_there_is_no_validation() -> None:
    local = local_of(Plan("loop"), validation=(0, 1), train=(10, 2))
    trained, held = client()._held_back(local)
    again = client()._held_back(replace(local, key=client_keys(2, seed=5)))[1]
    assert trained.data.count.tolist() == [8, 2] and held.count.tolist() == [2, 1]
    rows = [*trained.data.rows[0, :8].tolist(), *held.rows[0, :2].tolist()]
    assert sorted(rows) == list(range(10)) and again.rows.tolist() == held.rows.tolist()
    assert trained.data.rows[1, :2].tolist() == [10, 11] and held.rows[1, :1].tolist() == [
        0
    ]  # its own validation sample
    assert client(others=0)._held_back(local)[0] is local


def kept(**changes: Any) -> dict[str, Tensor]:
    affinity = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, -1.0], [5.0, 0.0, 0.0]], dtype=torch.float64)
    return {
        "ids": torch.tensor([4, 7, 9]),
        "models": vectors((1, 1), (2, 2), (3, 3)),
        "affinity": affinity,
        **changes,
    }


def test_the_best_models_are_sent_but_never_the_own_or_one_that_no_client_sent() -> None:
    ctx = context([4, 5, 7])
    best = server(1)._best(kept(), ctx, ctx.cohort)
    assert (
        best[0].tolist() == [2] and best[2].tolist() == [0] and int(best[1]) in (0, 1, 2)
    )  # 7: 4 is untried, 9 has hurt
    best = server(5)._best(kept(), ctx, ctx.cohort)
    assert best[0].tolist() == [2, 1, -1, -1, -1] and best[2].tolist() == [0, 2, -1, -1, -1]
    assert sorted(best[1].tolist()) == [-1, -1, 0, 1, 2]
    drawn = {
        int(server(1)._best(kept(), replace(ctx, key=ctx.key.fold(i)), torch.tensor([5]))) for i in range(30)
    }
    assert drawn == {0, 1, 2}  # among equals luck decides
    empty = server(2)._best(server(2).init(ctx), ctx, ctx.cohort)
    assert empty.tolist() == [[-1, -1]] * 3


def test_a_round_of_the_server_by_hand() -> None:
    ctx, rule = context([4, 5]), server(2)
    steps = computed_alone(rule.round(kept(), ctx))
    asked = next(steps)
    assert asked.pick[0].tolist() == [-1, 2, 1] and asked.bytes_down().tolist() == [32, 32]
    up = answer([4, 5], [[1.0, 0.0], [0.0, 1.0]], [1, 1])
    omega = torch.tensor([[0.5, -0.25], [0.125, 0.0625]], dtype=torch.float64)
    with pytest.raises(StopIteration) as end:
        steps.send(Uplink(up.ids, {**up.fields, "affinity": omega}))
    state, verdict = end.value.value
    assert state["ids"].tolist() == [4, 5, 7, 9]
    close(
        state["models"], [[2.0, 2.0], [1.0, 3.0], [2.0, 2.0], [3.0, 3.0]]
    )  # the common start (1, 2) and the update
    first, second = (0 if int(place) == 0 else int(place) + 1 for place in asked.pick[1, 1:])
    row = [0.0] * 4
    row[first], row[second] = 0.125, 0.0625
    close(state["affinity"], [[0.0, 0.0, 0.75, 2.5], row, [0.0, 0.0, 0.0, -1.0], [5.0, 0.0, 0.0, 0.0]])
    assert verdict.tables["sent"][0].tolist() == [9, 7]


def test_an_unknown_client_gets_the_mean() -> None:
    ctx = context([4])
    steps = computed_alone(server(1).deliver(kept(), ctx, torch.tensor([4, 5])))
    with pytest.raises(StopIteration) as end:
        next(steps)
    sent = end.value.value
    assert sent.pick[:, 0].tolist() == [-1, 3]
    close(sent.bank[3], [2.0, 2.0])


SPLIT = {"split": {"train": 0.5, "validation": 0.25, "test": 0.25}}


def test_it_really_mixes(simulate: Simulate) -> None:
    """The second round begins where the first round's models, tried on each client's validation samples,
    say."""
    table = hard("fedfomo", data=SPLIT, train={"participation": 1.0, "rounds": 2})
    run, first = simulate(**table), simulate(**{**table, "train": {**table["train"], "rounds": 1}})
    own, begun, sent = (
        everything(first)["rows/own"],
        everything(run)["rows/old"],
        run.store.arrays(2)["verdict/tables/sent"],
    )
    experiment = run._experiment
    network, federation = experiment.network, experiment.federation

    def tried(vector: Tensor, client: int) -> float:
        rows, labels = federation.validation.client(client)
        module = network.load(vector, torch.float64).double().eval()
        with torch.no_grad():
            return float(
                nn.functional.cross_entropy(module(federation.samples.batch(rows, torch.float64)), labels)
            )

    p, moved = network.layout.parameters, 0
    for i in range(5):
        before, total, mixture = tried(experiment.initial, i), 0.0, torch.zeros_like(own[i])
        for j in [i, *[int(j) for j in sent[i] if j >= 0]]:
            omega = (before - tried(own[j], i)) / float((own[j] - experiment.initial)[:p].norm())
            total, mixture = total + max(0.0, omega), mixture + max(0.0, omega) * own[j]
        expected = mixture / total if total > 0 else own[i]
        torch.testing.assert_close(begun[i], expected, rtol=0, atol=1e-9)
        moved += not torch.allclose(begun[i], own[i])
        assert sorted(int(j) for j in sent[i] if j >= 0) == [j for j in range(5) if j != i]
    assert moved >= 3


def test_bytes_are_those_of_the_models_that_were_sent(simulate: Simulate) -> None:
    table = {"method": {"name": "fedfomo", "others": 2}, "train": {"rounds": 2}}
    run = simulate(**table)
    size = run._experiment.network.layout.size * 8
    down, up = (list(run.metrics[f"bytes/{way}"]) for way in ("down", "up"))
    assert (
        down == [0, 5 * 2 * size] and up == [5 * (size + 8 * 4)] * 2
    )  # count, loss and two numbers beside the model


@pytest.mark.parametrize("data", [SPLIT, {}], ids=["validation", "no validation"])
def test_without_others_it_is_local(data: dict[str, Any], simulate: Simulate) -> None:
    tables = [hard(name, data=data) for name in ("fedfomo", "local")]
    tables[0]["method"]["others"] = 0
    fomo, local = (everything(simulate(**table))["rows/own"] for table in tables)
    torch.testing.assert_close(fomo, local, rtol=0, atol=1e-12)


def test_a_single_client_has_no_other_models() -> None:
    table = Padded(
        torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1])
    )
    assert table.drawn(
        torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1]), torch.tensor([0])
    ).count.tolist() == [0]
    state = {
        "ids": torch.tensor([4]),
        "models": vectors((1, 1)),
        "affinity": torch.zeros(1, 1, dtype=torch.float64),
    }
    assert server(2)._best(state, context([4]), torch.tensor([4])).tolist() == [[-1, -1]]
