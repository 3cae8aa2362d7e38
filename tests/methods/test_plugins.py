"""Parts as a user would write them, without a change inside the package: partly shared models, customised
models with two exchanges and a last training, detectors, aggregators, wrappers, attacks, networks and
losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import holdfast
from holdfast.aggregators.base import AggregationContext, Aggregator, Reduced, Wrapper
from holdfast.attacks import Adversary, Attack, View
from holdfast.core.errors import ConfigError, RunError
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Exchange, Field, Round, Schema, State, Steps, Uplink, Verdict, broadcast
from holdfast.detectors.base import Detector, Judgement
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.losses import Batch
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Fields, Method, ServerRule
from holdfast.methods.context import Context
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.helpers import TINY, assert_same, everything, slow_fit

HARD: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": 6, "batch_norm": True, "dropout": 0.2},
    "train": {"rounds": 3, "local_epochs": 2, "participation": 0.6},
}
Simulate = Callable[..., Run]


# ---- a shared backbone and private heads


class PerClient(ClientRule):
    def shared(self, network: Network, round: int) -> Tensor:
        return ~network.head

    def init(self, local: Local) -> State:
        return {"own": local.initial}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        fitted = local.fit(received.into(state["own"]))
        return {"own": fitted.model}, local.report(fitted.model, received, fitted)

    def personal(self, local: Local, state: State, received: Received) -> Tensor:
        return received.into(state["own"])


class FedPer(Method):
    """Share the backbone, keep the head."""

    Client = PerClient
    Server = Averaging
    models = ("global", "personal")
    deploys = "personal"


def test_partly_shared_models(simulate: Simulate) -> None:
    run = simulate(
        method=FedPer(), model={"name": "mlp", "hidden": 6, "batch_norm": True}, train=HARD["train"]
    )
    experiment = run._experiment
    network, counts = experiment.network, experiment.federation.train.counts.double()
    head = network.head
    p, b = int((~head)[: network.layout.parameters].sum()), int((~head)[network.layout.parameters :].sum())
    assert (p, b) == (65 * 6 + 12, 13)
    assert run.final["bytes/down"] == 9 * (p + b) * 8 and run.final["bytes/up"] == 9 * (p + b + 2) * 8
    shared, own = experiment.initial.clone(), {c: experiment.initial for c in range(5)}
    for round in range(1, 4):
        cohort = run.store.arrays(round)["cohort"].tolist()
        for client in cohort:
            key = Key(0).fold("client", round, 0).fold(torch.tensor([client])).fold("fit")
            start = torch.where(head, own[client], shared)
            data = experiment.federation.train.take(torch.tensor([client]))
            own[client] = slow_fit(
                network,
                start[None],
                experiment.federation.samples,
                data,
                key,
                Recipe(lr=0.1, epochs=2, batch_size=5),
            )[0]
        total = sum(counts[c] for c in cohort)
        shared = torch.where(head, shared, sum((counts[c] / total * own[c] for c in cohort), torch.zeros(())))
    torch.testing.assert_close(run.vector(), shared, rtol=0, atol=1e-9)
    assert run.state()["model"].shape == (p + b,)
    for client in range(5):
        expected = torch.where(head, own[client], shared) if client in cohort else own[client]
        if client not in cohort and torch.equal(own[client], experiment.initial):
            expected = torch.where(head, experiment.initial, shared)
        torch.testing.assert_close(run.vector(client), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("unselected", ["keep_own", "deliver", "finetune"])
def test_partly_shared_models_fused_and_on_both_plans(
    unselected: str, simulate: Simulate, simulate_all: Callable[..., list[Run]]
) -> None:
    """The head of the measured global model is each experiment's own start, not the first one's."""
    tables = [
        {**HARD, "method": FedPer(), "seed": seed, "evaluate": {"unselected": unselected}} for seed in (0, 1)
    ]
    for table, fused in zip(tables, simulate_all(tables), strict=True):
        alone = everything(simulate(**table))
        assert_same(everything(fused), alone, 1e-10)
        assert_same(everything(simulate(**table, engine={"plan": "loop"})), alone, 1e-10)


# ---- a model for each client, a second exchange, a last training


class CustomClient(ClientRule):
    tasks = frozenset({"train", "rate"})

    def schema(self, task: str, wire: Wire) -> Schema:
        return (
            {"rating": Field("score", (2,), low=0, high=1)} if task == "rate" else super().schema(task, wire)
        )

    def init(self, local: Local) -> State:
        return {"rated": torch.zeros(local.n, dtype=torch.float64)}

    def train(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        fitted = local.fit(received.model)
        return state, local.report(fitted.model, received, fitted)

    def rate(self, local: Local, state: State, received: Received, extra: Fields) -> tuple[State, Fields]:
        """How far two models are apart, as this client sees it, and what it was told."""
        distance = (received.models(0) - received.models(1)).norm(dim=1)
        rating = torch.stack([1 / (1 + distance), extra["hint"]], dim=1)
        return {"rated": state["rated"] + local.settings.step}, {"rating": rating}


class CustomServer(ServerRule):
    def init(self, ctx: Context) -> State:
        return {"model": ctx.initial, "bank": ctx.initial.repeat(len(ctx.available), 1)}

    def round(self, state: State, ctx: Context) -> Round:
        ids = ctx.cohort
        up = yield Exchange("train", ids, state["bank"], ids[:, None])
        bank = state["bank"].clone()
        bank[up.ids, : ctx.wire.parameters] += up["update"]
        bank[up.ids, ctx.wire.parameters :] = up["buffers"]
        model = bank.mean(0)
        asked = Exchange(
            "rate",
            ids,
            torch.cat([bank, model[None]]),
            torch.stack([ids, torch.full_like(ids, len(bank))], 1),
            {"hint": torch.full((len(ids),), 0.5, dtype=torch.float64)},
        )
        rated = yield asked
        weight = rated["rating"][:, :1]
        bank[rated.ids] = weight * bank[rated.ids] + (1 - weight) * model
        return {"model": model, "bank": bank}, Verdict(
            rated.ids, scores={"rating": rated["rating"][:, 0]}, tables={"hint": rated["rating"]}
        )

    def deliver(self, state: State, ctx: Context, ids: Tensor) -> Steps[Exchange]:
        yield from ()
        return Exchange("deliver", ids, state["bank"], ids[:, None])

    def finish(self, state: State, ctx: Context) -> Steps[State]:
        up = yield broadcast("train", state["model"], ctx.available)
        bank = state["bank"].clone()
        bank[up.ids, : ctx.wire.parameters] = state["model"][: ctx.wire.parameters] + up["update"]
        return state | {"bank": bank}


class Custom(Method):
    """Everybody's own model on the server."""

    Client = CustomClient
    Server = CustomServer
    models = ("global", "customised", "personal")
    deploys = "customised"
    reduces = False
    step: float = setting(1.0, "counts the ratings")


def test_customised_models_two_exchanges_and_a_last_training(simulate: Simulate) -> None:
    run = simulate(method=Custom(), train={"rounds": 2, "participation": 0.6})
    d, rounds = run._experiment.network.layout.size, 2
    assert run.round == 3  # the last training counts as one more round
    assert run.final["bytes/down"] == 8 * (rounds * 3 * (d + 2 * d + 1) + 5 * d)
    assert run.final["bytes/up"] == 8 * (rounds * 3 * (d + 2 + 2) + 5 * (d + 2))
    bank, model = run.state()["bank"], run.state()["model"]
    frame = run.clients()
    for client in range(5):
        assert torch.equal(run.vector(client), bank[client]) and torch.equal(
            run.vector(client, "global"), model
        )
        rows, labels = run._experiment.federation.test.client(client)
        x = run._experiment.federation.samples.batch(rows, torch.float64)
        for kind in ("global", "customised", "personal"):
            with torch.no_grad():
                right = (run.model(client, kind).double()(x).argmax(1) == labels).double().mean()
            assert frame[f"accuracy/{kind}"][client] == pytest.approx(float(right))
    assert run.final["accuracy"] == run.final["accuracy/customised"]
    arrays = run.store.arrays(1)
    assert arrays["verdict/tables/hint"].shape == (3, 2) and arrays["verdict/scores/rating"].shape == (3,)
    rated = everything(run)
    took_part = [set(run.store.arrays(r)["cohort"].tolist()) for r in (1, 2)]
    expected = [sum(c in cohort for cohort in took_part) for c in rated["rows/ids"].tolist()]
    assert rated["rows/rated"].tolist() == expected  # private state of the second task


def test_only_the_global_model_of_a_customised_method(simulate: Simulate) -> None:
    both, only = (
        simulate(method=Custom(), evaluate={"models": models})
        for models in (["global", "customised"], ["global"])
    )
    assert (
        only.final["accuracy/global"] == both.final["accuracy/global"]
        and only.final["accuracy/customised"] is None
    )
    assert both.final["loss/global"] != both.final["loss/customised"]


def test_customised_models_fused_and_on_both_plans(
    simulate: Simulate, simulate_all: Callable[..., list[Run]]
) -> None:
    tables: list[dict[str, Any]] = [
        {**HARD, "method": Custom()},
        {**HARD, "method": Custom(step=0.25), "seed": 1, "data": {"clients": 3}},
        {**HARD, "method": Custom(step=2), "train": {**HARD["train"], "rounds": 2}},
    ]
    for table, fused in zip(tables, simulate_all(tables), strict=True):
        alone = everything(simulate(**table))
        assert_same(everything(fused), alone, 1e-10)
        assert_same(everything(simulate(**table, engine={"plan": "loop"})), alone, 1e-10)


def test_an_aggregator_on_a_method_that_never_reduces_is_a_mistake(simulate: Simulate) -> None:
    with pytest.raises(ConfigError, match="does not aggregate updates"):
        simulate(method=Custom(), aggregator="mean")


def test_a_task_that_the_client_half_does_not_have(simulate: Simulate) -> None:
    class Confused(Averaging):
        def round(self, state: State, ctx: Context) -> Round:
            yield ctx.ask("dance", state["model"])
            raise AssertionError

    class Wrong(FedPer):
        """Asks for what is not there."""

        Server = Confused

    with pytest.raises(RunError, match="no client task 'dance'; it has train"):
        simulate(method=Wrong())


def test_private_state_must_begin_as_it_goes_on(simulate: Simulate) -> None:
    class Forgetful(PerClient):
        def init(self, local: Local) -> State:
            return {}

        def train(
            self, local: Local, state: State, received: Received, extra: Fields
        ) -> tuple[State, Fields]:
            return super().train(local, {"own": local.initial}, received, extra)

        def personal(self, local: Local, state: State, received: Received) -> Tensor:
            return local.initial

    class Wrong(FedPer):
        """Starts with nothing."""

        Client = Forgetful

    with pytest.raises(RunError, match=r"init gives the private state \[\], but training left \['own'\]"):
        simulate(method=Wrong(), train={"rounds": 4, "participation": 0.4})


def test_a_finish_that_only_computes_is_committed_too(simulate: Simulate) -> None:
    class Doubling(Averaging):
        def finish(self, state: State, ctx: Context) -> Steps[State]:
            yield from ()
            return state | {"model": 2 * state["model"]}

    class Double(FedPer):
        """Twice the model in the end."""

        Server = Doubling

    plain, double = simulate(method=FedPer()), simulate(method=Double())
    assert (
        torch.equal(double.state()["model"], 2 * plain.state()["model"])
        and double.round == 3
        and plain.round == 2
    )


# ---- detectors


class Norm(Detector):
    """Bans whoever is further than a multiple of the median from the mean model; remembers how many it has
    seen."""

    factor: float = 3.0

    def init(self) -> State:
        return {"seen": torch.zeros((), dtype=torch.int64)}

    def judge(self, state: State, ctx: Context, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        yield from ()
        far = (models - models.median(0).values).norm(dim=1) if len(models) else torch.zeros(0)
        limit = self.factor * float(far.median()) if len(far) else 0.0
        banned = {
            int(i): f"{float(f):.3g} is more than {limit:.3g}"
            for i, f in zip(ids, far, strict=True)
            if f > limit
        }
        return Judgement({"seen": state["seen"] + len(ids)}, banned, {"far": far})


class SignFlip(Attack):
    """Sends the opposite, much larger."""

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return {"update": -50 * view.own("update")}


def test_a_detector_on_fedavg_bans(simulate: Simulate) -> None:
    attack = SignFlip(clients=(1, 3))
    run = simulate(method="fedavg", detectors=(Norm(),), attack=attack)
    assert run._experiment.adversary.malicious.tolist() == [1, 3]
    first, second = (run.store.read_json(f"parts/{r:06d}.json") or {} for r in (1, 2))
    assert (
        set(first["banned"]) == {"1", "3"} and second["banned"] == {} and "more than" in first["banned"]["1"]
    )
    arrays = run.store.arrays(1)
    assert arrays["verdict/ids"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["verdict/weights"][[1, 3]].tolist() == [0, 0] and float(
        arrays["verdict/weights"].sum()
    ) == pytest.approx(1)
    far = arrays["verdict/scores/" + Norm().name + "/far"]
    assert far.argsort(descending=True)[:2].sort().values.tolist() == [1, 3]
    assert run.store.arrays(2)["cohort"].tolist() == [0, 2, 4]  # for good
    assert run.state()["detector0/seen"].item() == 5 + 3
    assert (run.final["detection/dacc"], run.final["detection/fpr"], run.final["detection/fnr"]) == (1, 0, 0)
    clean = simulate(method="fedavg", train={"availability": {"1": [], "3": []}})
    torch.testing.assert_close(run.vector(), clean.vector(), rtol=0, atol=1e-12)
    harmed = simulate(method="fedavg", attack=attack)
    assert harmed.final["detection/fnr"] == 1 and not torch.allclose(harmed.vector(), clean.vector())


def test_detectors_one_after_the_other_keep_their_own_memory(simulate: Simulate) -> None:
    run = simulate(
        method="ditto",
        detectors=(Norm(factor=1e9), Norm()),
        attack=SignFlip(clients=(1,)),
        train={"rounds": 1},
    )
    assert run.state()["detector0/seen"].item() == run.state()["detector1/seen"].item() == 5
    assert run.store.arrays(1)["verdict/ids"].tolist() == [0, 1, 2, 3, 4]


def test_detectors_survive_rounds_without_clients(simulate: Simulate) -> None:
    nobody = {str(c): [] for c in range(5)}
    assert simulate(detectors=(Norm(),), train={"availability": nobody}).round == 2


class Everyone(Detector):
    """Trusts nobody."""

    def judge(self, state: State, ctx: Context, models: Tensor, ids: Tensor) -> Steps[Judgement]:
        yield from ()
        return Judgement({}, {int(i): "on principle" for i in ids})


def test_when_all_are_banned_the_model_stays_with_a_note(simulate: Simulate) -> None:
    run = simulate(detectors=(Everyone(),))
    assert torch.equal(run.vector(), run._experiment.initial)
    first = run.store.read_json("parts/000001.json")
    assert first is not None and any("no update was used" in note for note in first["notes"])
    assert (
        run.store.arrays(1)["verdict/weights"].tolist() == [0.0] * 5
        and len(run.store.arrays(2)["cohort"]) == 0
    )


# ---- aggregators and wrappers


class Root(Aggregator):
    """Believes the server's own data only."""

    needs = frozenset({"root"})
    uses_priors = False

    def init(self, layout: Any) -> State:
        return {"calls": torch.zeros((), dtype=torch.int64)}

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        assert (
            ctx.root is not None
            and ctx.ids.tolist() == list(range(5))
            and x.shape == (5, len(ctx.root))
            and ctx.received.shape == ctx.root.shape
        )
        return Reduced(ctx.root, torch.zeros_like(w), {"calls": state["calls"] + 1})


def test_an_aggregator_with_the_servers_own_data(simulate: Simulate) -> None:
    run = simulate(method="ditto", aggregator=Root(), data={"root": 12})
    experiment, w = run._experiment, run._experiment.initial
    for round in (1, 2):
        key = Key(0).fold("client", round, 0).fold(torch.tensor([-1])).fold("fit")
        data = experiment.federation.root.take(torch.tensor([0]))
        w = slow_fit(
            experiment.network,
            w[None],
            experiment.federation.samples,
            data,
            key,
            Recipe(lr=0.1, epochs=1, batch_size=5),
        )[0]
    torch.testing.assert_close(run.vector(), w, rtol=0, atol=1e-9)
    d = len(w)
    assert (
        run.final["bytes/down"] == 10 * d * 8 and run.final["bytes/up"] == 10 * (d + 2) * 8
    )  # the server sends itself nothing
    assert run.state()["aggregator/calls"].item() == 2
    assert run.store.arrays(1)["verdict/ids"].tolist() == [0, 1, 2, 3, 4]
    part = run.store.read_json("parts/000001.json")
    assert (
        part is not None
        and any("ignores sample counts" in note for note in part["notes"])
        and part["metrics"]["cohort"] == 5
    )
    with pytest.raises(ConfigError, match="needs the server's own data; set data.root"):
        simulate(aggregator=Root())


class Halved(Aggregator):
    """An aggregator on half the updates."""

    inner: Aggregator

    def __call__(self, x: Tensor, w: Tensor, state: State, ctx: AggregationContext) -> Reduced:
        return self.inner(0.5 * x, w, state, ctx)


def test_a_wrapper(simulate: Simulate, forget: None) -> None:
    @register("wrapper", "halve")
    class Halve(Wrapper):
        """Takes half of every update."""

        def __call__(self, inner: Aggregator) -> Aggregator:
            return Halved(inner=inner, weights=inner.weights)

    table = {"name": "mean", "weights": "uniform"}
    wrapped = simulate(aggregator={**table, "wrap": ["halve"]})
    assert_models(wrapped, simulate(aggregator=table, train={"server_lr": 0.5}))
    assert_models(
        simulate(aggregator={**table, "wrap": [{"name": "halve"}, "halve"]}),
        simulate(aggregator=table, train={"server_lr": 0.25}),
    )
    with pytest.raises(ConfigError, match="unknown wrapper 'half'; did you mean 'halve'"):
        simulate(aggregator={**table, "wrap": ["half"]})


def assert_models(a: Run, b: Run) -> None:
    torch.testing.assert_close(a.vector(), b.vector(), rtol=0, atol=1e-12)


# ---- attacks


SCHEMA: Schema = {"update": Field("update", (2,)), "count": Field("count", (), low=0)}
UP = Uplink(
    torch.tensor([0, 2, 3, 6]),
    {"update": torch.arange(8.0).view(4, 2), "count": torch.tensor([1.0, 2.0, 3.0, 4.0])},
)


class Spy(Attack):
    """Does what the test says."""

    act: Any = None

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return self.act(up, view)


def poison(
    act: Callable[[Uplink, View], Mapping[str, Tensor]], task: str = "train", **settings: Any
) -> Uplink:
    attack = Spy(act=act, clients=settings.pop("clients", (2, 6, 9)), **settings)
    return Adversary(attack, torch.arange(10), Key(0)).poison(task, SCHEMA, UP, Key(1))


def test_an_attack_changes_only_its_own_rows() -> None:
    up = poison(lambda up, view: {"update": -view.own("update")})
    assert up["update"].tolist() == [[0, 1], [-2, -3], [4, 5], [-6, -7]] and torch.equal(
        up["count"], UP["count"]
    )
    assert UP["update"].tolist() == torch.arange(8.0).view(4, 2).tolist()  # the honest replies are untouched


def test_an_attack_sees_only_what_it_declares_to_know() -> None:
    seen: list[Any] = []

    def look(up: Uplink, view: View) -> dict[str, Tensor]:
        seen.append((up.ids.tolist(), view.up.ids.tolist(), view.own("update").tolist()))
        return {}

    poison(look)
    assert seen == [
        ([2], [2], [[2, 3]]),
        ([6], [6], [[6, 7]]),
    ]  # nothing of the others is within reach, not even of colluders
    poison(look, knows="colluders")
    assert seen.pop() == ([2, 6], [2, 6], [[2, 3], [6, 7]])
    poison(look, knows="everyone")
    assert seen.pop() == ([2, 6], [0, 2, 3, 6], [[2, 3], [6, 7]])
    with pytest.raises(
        RunError,
        match='reads what everyone sent but declares to know only own; set attack.knows = "everyone"',
    ):
        poison(lambda up, view: {"update": view.everyone("update")[:2]})
    with pytest.raises(RunError, match="declares to know only own"):
        poison(lambda up, view: {"update": view.colluders("update")})
    with pytest.raises(RunError, match="declares to know only colluders"):
        poison(lambda up, view: {"update": view.everyone("update")}, knows="colluders")
    up = poison(
        lambda up, view: {"update": view.colluders("update").mean(0).expand(2, -1)}, knows="colluders"
    )
    assert up["update"].tolist() == [[0, 1], [4, 5], [4, 5], [4, 5]]
    up = poison(lambda up, view: {"update": -view.everyone("update").mean(0).expand(2, -1)}, knows="everyone")
    assert up["update"][[1, 3]].tolist() == [[-3, -4], [-3, -4]]


def test_an_attack_touches_only_the_declared_kinds_and_tasks() -> None:
    with pytest.raises(RunError, match="may not touch 'count', which is of kind count"):
        poison(lambda up, view: {"count": torch.tensor([99.0])})
    with pytest.raises(
        RunError, match="sends 'updat', which task 'train' does not have; did you mean 'update'"
    ):
        poison(lambda up, view: {"updat": torch.zeros(2, 2)})
    assert poison(lambda up, view: 1 / 0, task="score") is UP  # type: ignore[arg-type, return-value]
    assert poison(lambda up, view: 1 / 0, clients=(1,)) is UP  # type: ignore[arg-type, return-value]

    class Liar(Spy):
        """May lie about its number of samples."""

        kinds = frozenset({"count"})

    liar = Adversary(
        Liar(act=lambda up, view: {"count": torch.tensor([99.0])}, clients=(2, 6)), torch.arange(10), Key(0)
    )
    assert liar.poison("train", SCHEMA, UP, Key(1))["count"].tolist() == [1, 99, 3, 99]


@pytest.mark.parametrize(
    ("fraction", "clients", "many"),
    [(0.3, 10, 3), (0.29, 100, 29), (0.57, 100, 57), (0.0, 10, 0), (1.0, 7, 7), (0.3, 5, 1)],
)
def test_a_share_of_attackers_is_drawn_by_key(fraction: float, clients: int, many: int) -> None:
    drawn = Adversary(Attack(fraction=fraction), torch.arange(clients), Key(0)).malicious
    assert len(drawn) == many and drawn.tolist() == sorted(set(drawn.tolist()))
    assert torch.equal(Adversary(Attack(fraction=fraction), torch.arange(clients), Key(0)).malicious, drawn)
    if 0 < many < clients and clients == 100:
        assert not torch.equal(
            Adversary(Attack(fraction=fraction), torch.arange(clients), Key(1)).malicious, drawn
        )


def test_attackers_by_id() -> None:
    assert Adversary(Attack(clients=(3, 1, 3)), torch.arange(5), Key(0)).malicious.tolist() == [1, 3]
    with pytest.raises(ConfigError, match="attack.clients: no client 5 that trains; ids go from 0 to 4"):
        Adversary(Attack(clients=(5,)), torch.arange(5), Key(0))
    assert len(Adversary(None, torch.arange(5), Key(0)).malicious) == 0
    members = torch.tensor([0, 3, 4, 8])  # the others are held out and never train
    assert set(Adversary(Attack(fraction=0.5), members, Key(0)).malicious.tolist()) < {0, 3, 4, 8}


def test_an_attack_in_a_run_by_hand(simulate: Simulate) -> None:
    """One round: the malicious update is replaced by -50 times itself, with the weight of its samples."""
    table: dict[str, Any] = {"train": {"rounds": 1}}
    honest, attacked = simulate(**table), simulate(attack=SignFlip(clients=(2,)), **table)
    alone = simulate(train={"rounds": 1, "availability": {str(c): [] for c in (0, 1, 3, 4)}})
    share = honest.store.arrays(1)["verdict/weights"][2]
    own = alone.vector() - alone._experiment.initial
    torch.testing.assert_close(attacked.vector(), honest.vector() - share * 51 * own, rtol=0, atol=1e-10)


def test_attackers_data_reaches_only_their_own_tables(simulate: Simulate) -> None:
    class Flip(Attack):
        """Labels upside down."""

        def data(self, federation: Any, malicious: Tensor, key: Key) -> Any:
            owner = torch.repeat_interleave(torch.arange(federation.clients), federation.train.counts)
            label = torch.where(
                torch.isin(owner, malicious), 9 - federation.train.label, federation.train.label
            )
            return replace(federation, train=replace(federation.train, label=label))

    honest, attacked = (simulate(method="local", attack=attack) for attack in (None, Flip(clients=(1,))))
    for client in range(5):
        assert torch.equal(honest.vector(client), attacked.vector(client)) == (client != 1)


def test_an_attack_that_touches_the_data_of_others_is_refused(simulate: Simulate) -> None:
    class Vandal(Attack):
        """Changes everybody's labels."""

        def data(self, federation: Any, malicious: Tensor, key: Key) -> Any:
            return replace(federation, train=replace(federation.train, label=9 - federation.train.label))

    with pytest.raises(RunError, match="changed the data of client 0, which is not malicious"):
        simulate(attack=Vandal(clients=(1,)))


class Tamper(Attack):
    """Does to the data what the test says."""

    act: Any = None

    def data(self, federation: Any, malicious: Tensor, key: Key) -> Any:
        return self.act(federation)


def without_labels(federation: Any, table: str) -> Any:
    old = getattr(federation, table)
    return replace(federation, **{table: replace(old, label=torch.zeros_like(old.label))})


def blank(federation: Any) -> Any:
    """Blank pictures in place of everybody's."""
    return replace(federation, samples=replace(federation.samples, x=torch.zeros_like(federation.samples.x)))


def scribble(federation: Any) -> Any:
    federation.test.label[0] = (federation.test.label[0] + 1) % 10
    return federation


@pytest.mark.parametrize(
    ("act", "message"),
    [
        *(
            (lambda f, t=t: without_labels(f, t), f"changed the table '{t}'")
            for t in ("test", "validation", "global_test", "root")
        ),
        (blank, "changed samples that were there before"),
        (
            lambda f: replace(f, samples=replace(f.samples, y=9 - f.samples.y)),
            "changed samples that were there before",
        ),
        (
            lambda f: replace(f, samples=replace(f.samples, std=(2.0,))),
            "changed the dataset's description",
        ),
        (scribble, "changed data in place"),
    ],
)
def test_an_attack_cannot_touch_what_is_measured(act: Any, message: str, simulate: Simulate) -> None:
    split = {"train": 0.5, "validation": 0.25, "test": 0.25}
    with pytest.raises(RunError, match=message):
        simulate(attack=Tamper(act=act, clients=(1,)), data={"root": 20, "split": split})


def test_poisoned_inputs_are_scratch_rows(simulate: Simulate) -> None:
    def noisy(federation: Any) -> Any:
        """Client 1 trains on negatives of its pictures."""
        samples, train = federation.samples, federation.train
        begin, end = int(train.start[1]), int(train.start[2])
        mine = train.row[begin:end]
        row = train.row.clone()
        row[begin:end] = len(samples) + torch.arange(end - begin)
        more = replace(
            samples,
            x=torch.cat([samples.x, samples.x.max() - samples.x[mine]]),
            y=torch.cat([samples.y, samples.y[mine]]),
        )
        return replace(federation, samples=more, train=replace(train, row=row))

    honest, attacked = (
        simulate(method="local", attack=attack) for attack in (None, Tamper(act=noisy, clients=(1,)))
    )
    for client in range(5):
        assert torch.equal(honest.vector(client), attacked.vector(client)) == (client != 1)
    simulate(attack=Tamper(act=noisy, clients=(1,)))


def test_an_attacker_that_knows_only_itself_has_randomness_of_its_own() -> None:
    class Noise(Attack):
        """Sends noise."""

        def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
            return {"update": key.normal(len(up), 2)}

    def sent(*clients: int) -> Tensor:
        return Adversary(Noise(clients=clients), torch.arange(10), Key(0)).poison(
            "train", SCHEMA, UP, Key(1)
        )["update"]

    both = sent(2, 6)
    assert not torch.equal(both[1], both[3]) and torch.equal(
        sent(2)[1], both[1]
    )  # nor does it depend on who else attacks


class Boast(Attack):
    """Says it has a great many samples."""

    kinds = frozenset({"count"})
    count: float = 0.0

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        return {"count": torch.full_like(up["count"], self.count)}


def test_boasted_counts_cannot_overflow(simulate: Simulate) -> None:
    absurd, bold = (
        simulate(attack=Boast(clients=(1, 2), count=count), train={"dtype": "float32"})
        for count in (2e38, 1e9)
    )
    assert absurd.final["refused"] == 4 and bold.final["refused"] == 0
    for run in (absurd, bold):
        weights = run.store.arrays(2)["verdict/weights"]
        assert bool(torch.isfinite(run.vector()).all()) and float(weights.sum()) == pytest.approx(1)


def test_counts_whose_sum_is_not_finite_weigh_equally(simulate: Simulate) -> None:
    ctx = simulate(train={"dtype": "float32"})._experiment.context()
    for count in ([3e38, 3e38, 1.0], [0.0, 0.0, 0.0]):
        assert ctx.priors(Uplink(torch.arange(3), {"count": torch.tensor(count)})).tolist() == pytest.approx(
            [1 / 3] * 3
        )


# ---- a user's own network and loss


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.fc = nn.Linear(64, 7), nn.BatchNorm1d(7), nn.Linear(7, 10)
        self.register_buffer("order", torch.arange(63, -1, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.body(x.flatten(1)[:, self.order]))))


def margin(net: Any, batch: Batch) -> Tensor:
    """Crammer and Singer's hinge, and a term for the whole batch."""
    logits = net(batch.x)
    right = F.one_hot(batch.y, 10).bool()
    rival = torch.where(right, torch.full_like(logits, -1e9), logits).amax(1)
    return (
        F.relu(1 + rival - torch.where(right, logits, torch.zeros_like(logits)).sum(1))
        + 0.01 * net.fc.weight.square().sum()
    )


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_a_users_own_module_and_loss(plan: str, tmp_path: Path) -> None:
    module = Mine()
    before = copy.deepcopy(module.state_dict())
    sections = {
        **TINY,
        "train": {**TINY["train"], "rounds": 6, "loss": margin},
        "engine": {"plan": plan, "threads": 1},
    }
    sections["data"] = {"clients": 4, "partition": {"name": "iid", "samples_per_client": 40}}
    run = holdfast.run(
        out=tmp_path / "run", **{**sections, "method": FedPer(), "model": holdfast.Model(module, head="fc")}
    )
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert run.metrics["loss/train"].iloc[-1] < 0.8 * run.metrics["loss/train"].iloc[0]
    one, two = run.model(client=1), run.model(client=2)
    assert type(one) is Mine and one is not two and one.order.tolist() == list(range(63, -1, -1))
    assert not torch.equal(one.fc.weight, two.fc.weight) and torch.equal(one.body.weight, two.body.weight)
    assert 0 < int(one.norm.num_batches_tracked) <= 6 * 6


def test_experiments_with_the_same_object_are_fused(
    simulate: Simulate, simulate_all: Callable[..., list[Run]]
) -> None:
    model = holdfast.Model(Mine, head="fc")
    tables: list[dict[str, Any]] = [
        {"model": model, "seed": seed, "train": {"loss": margin, "lr": 0.1 + seed / 10}} for seed in (0, 1)
    ]
    for table, fused in zip(tables, simulate_all(tables), strict=True):
        assert_same(everything(fused), everything(simulate(**table)), 1e-10)


def test_methods_with_the_same_name_in_different_places_are_not_fused() -> None:
    def make(scale: float) -> type[Method]:
        class Same(FedPer):
            """One of two."""

            factor: ClassVar[float] = scale

        return Same

    assert make(1.0)().structure() != make(2.0)().structure()
