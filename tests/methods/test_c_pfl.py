"""C-PFL: its two halves by hand on a model of two numbers, rounds of whole runs against a slow reference, and
every switch.

The network is y = head * (backbone * x): backbone 2, head 3, a squared loss. Client 4 has x = 1 -> 0 and x =
2 -> 1: residuals 6 and 11. The backbone's gradient is the mean of residual * head * x = (18 + 66) / 2 = 42,
the head's that of residual * backbone * x = (12 + 44) / 2 = 28. Client 7 has x = 1 -> 1: residual 5,
gradients 15 and 10."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.mean import Mean
from holdfast.core.errors import ConfigError
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.together import computed_alone
from holdfast.core.types import SCORE, UNDEFINED, Exchange, State, Uplink, Verdict
from holdfast.engine.client_stack import client_key
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.losses import Batch
from holdfast.local.plan import Plan
from holdfast.methods.c_pfl import CPfl
from holdfast.methods.context import Context
from holdfast.models.network import Network
from holdfast.results.run import Run
from holdfast.storage.store import Store
from holdfast.sweeps.session import resume
from tests.helpers import (
    LOOP,
    VMAP,
    assert_same,
    client_keys,
    deal,
    everything,
    run_all,
    samples_of,
    slow_fit,
)

SAMPLES = samples_of(torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 1]))
SPLIT = {"train": 0.5, "validation": 0.25, "test": 0.25}


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def squared(net: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (net(batch.x)[:, 0] - batch.y) ** 2


NETWORK = Network(Product, head="head", signature="test c-pfl", dtype=torch.float64)
INITIAL = torch.tensor([2.0, 3.0], dtype=torch.float64)
both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def world(method: CPfl, plan: Plan = LOOP) -> tuple[Any, Local, Received]:
    """The client half, two clients, and what they are sent: the backbone 2 (and the head 3 where it
    travels)."""
    rule = method.Client(method)
    wire = Wire.of(NETWORK.layout, rule.shared(NETWORK, 1))
    local = Local(
        network=NETWORK,
        wire=wire,
        ids=torch.tensor([4, 7]),
        key=client_keys(2),
        samples=SAMPLES,
        data=deal(SAMPLES, [2, 1]),
        validation=deal(SAMPLES, [0, 0]),
        initial=INITIAL.repeat(2, 1),
        plan=plan,
        settings=SimpleNamespace(),
        recipe=Recipe(lr=0.01, epochs=1, batch_size=2, loss=squared),
        selected=torch.tensor([True, True]),
    )
    return rule, local, Received(wire.pack(INITIAL)[None], torch.zeros(2, 1, dtype=torch.int64), wire)


# ---- the client half


@both_plans
def test_only_the_backbone_is_trained_and_sent(plan: Plan) -> None:
    rule, local, received = world(CPfl(), plan)
    state, sent = rule.train(local, rule.init(local), received, {})
    close(sent["update"], [[-0.42], [-0.15]])
    close(sent["count"], [2.0, 1.0])
    close(state["own"], [[2.0, 3.0], [2.0, 3.0]])  # what it was sent, under the common head
    close(rule.personal(local, state, received), [[2.0, 3.0], [2.0, 3.0]])


@both_plans
def test_the_head_may_travel_too(plan: Plan) -> None:
    rule, local, received = world(CPfl(train="all"), plan)
    _, sent = rule.train(local, rule.init(local), received, {})
    close(sent["update"], [[-0.42, -0.28], [-0.15, -0.1]])


@both_plans
@pytest.mark.parametrize("train", ["backbone", "all"])
def test_tuning_changes_the_head_only(train: Any, plan: Plan) -> None:
    """Second epoch of client 7: head 2.9, residual 4.8, gradient 9.6."""
    rule, local, received = world(CPfl(train=train, tune_epochs=2), plan)
    state, sent = rule.tune(local, rule.init(local), received, {})
    close(state["own"][1], [2.0, 3 - 0.1 - 0.096])
    assert (
        state["own"][0, 0] == 2.0
        and state["own"][0, 1] < 3
        and set(sent) == {"loss"}
        and state["tuned"].all()
    )
    other = Received(received.bank + 1, received.pick, received.wire)
    assert torch.equal(rule.personal(local, state, other), state["own"])  # its own, whatever is sent later


def test_tuning_may_change_everything() -> None:
    rule, local, received = world(CPfl(tune="all", tune_epochs=1))
    state, _ = rule.tune(local, rule.init(local), received, {})
    close(state["own"], [[1.58, 2.72], [1.85, 2.9]])
    close(rule.personal(local, state, received), [[1.58, 2.72], [1.85, 2.9]])


def test_training_goes_on_from_the_common_head_after_tuning() -> None:
    rule, local, received = world(CPfl())
    tuned, _ = rule.tune(local, rule.init(local), received, {})
    state, sent = rule.train(local, tuned, received, {})
    close(sent["update"], [[-0.42], [-0.15]])
    assert not state["tuned"].any()


def test_feedback_is_kept() -> None:
    rule, local, received = world(CPfl())
    start = rule.init(local)
    assert start["feedback"].tolist() == [[UNDEFINED] * 3] * 2
    said = {
        "accuracy": torch.tensor([0.5, 0.25]),
        "threshold": torch.tensor([0.4, 0.4]),
        "admitted": torch.tensor([1.0, 0.0]),
    }
    state, sent = rule.notify(local, start, received, said)
    close(state["feedback"].float(), torch.tensor([[0.5, 0.4, 1.0], [0.25, 0.4, 0.0]]).tolist())
    assert sent == {} and rule.schema("notify", received.wire) == {} and state["own"] is start["own"]


def test_a_client_that_is_sent_nothing_keeps_its_model() -> None:
    rule, local, received = world(CPfl())
    away = Received(received.bank + 5, torch.tensor([[0], [-1]]), received.wire)
    state = {**rule.init(local), "own": torch.tensor([[1.0, 1.0], [4.0, 3.0]], dtype=torch.float64)}
    close(rule.personal(local, state, away), [[7.0, 3.0], [4.0, 3.0]])


# ---- the server half


def context(clients: int = 6, **more: Any) -> Context:
    ids = torch.arange(clients)
    return Context(
        round=3,
        cohort=ids,
        available=ids,
        key=Key(2),
        wire=Wire.of(NETWORK.layout, ~NETWORK.head),
        layout=NETWORK.layout,
        initial=INITIAL[:1],
        aggregator=Mean(),
        **more,
    )


def server_round(
    method: CPfl, scores: dict[int, float], ctx: Context | None = None
) -> tuple[State, Verdict, list[Exchange]]:
    """Client i trains the backbone 2 to 2 + i and has i + 1 samples; members say `scores`."""
    server, ctx = method.Server(method), ctx or context()
    steps, asked = computed_alone(server.round(server.init(ctx), ctx)), []
    up: Any = None
    while True:
        try:
            exchange = steps.send(up)
        except StopIteration as end:
            return *end.value, asked
        asked.append(exchange)
        ids = exchange.to
        if exchange.task == "train":
            fields = {
                "update": ids[:, None].double(),
                "count": ids.double() + 1,
                "buffers": torch.zeros(len(ids), 0),
                "loss": ids.double(),
            }
        elif exchange.task == SCORE:
            trained = asked[0].to
            fields = {
                "score": torch.tensor([[scores[int(c)] for c in trained]] * len(ids), dtype=torch.float64)
            }
        else:
            fields = {}
        up = Uplink(ids, fields)


def judged(**settings: Any) -> CPfl:
    return build("method", {"name": "c-pfl", "committee": {"size": 2, "tau": 0.5}, **settings})


def outcome(method: CPfl) -> tuple[Tensor, dict[int, float], set[int], list[Exchange]]:
    """The new backbone, everybody's samples, who was rejected, and what was asked: the two least ids that
    train are bad."""
    trainers = server_round(method, dict.fromkeys(range(6), 1.0))[2][0].to.tolist()
    scores = {c: 0.1 if c in trainers[:2] else 0.9 for c in range(6)}
    state, verdict, asked = server_round(method, scores)
    assert set(verdict.rejected) == set(trainers[:2])
    return state["model"], {c: c + 1.0 for c in trainers}, set(trainers[:2]), asked


def test_members_do_not_train_and_rejected_models_are_not_used() -> None:
    model, samples, rejected, asked = outcome(judged())
    members = asked[1].to.tolist()
    assert (
        [e.task for e in asked] == ["train", SCORE, "notify"]
        and set(samples) == set(range(6)) - set(members)
        and len(members) == 2
    )
    used = {c: n for c, n in samples.items() if c not in rejected}
    close(model, [2 + sum(n * c for c, n in used.items()) / sum(used.values())])


@pytest.mark.parametrize("mode", ["previous", "literal"])
def test_the_missing_mass(mode: str) -> None:
    """Eq. 5 as printed shrinks the backbone; `previous` fills up with the old one, 2."""
    model, samples, rejected, _ = outcome(judged(missing_mass=mode))
    n = sum(samples.values())
    used = {c: samples[c] / n for c in samples if c not in rejected}
    literal = sum(share * (2 + c) for c, share in used.items())
    close(model, [literal + (2 * (1 - sum(used.values())) if mode == "previous" else 0)])


@pytest.mark.parametrize("mode", ["renormalise", "previous", "literal"])
def test_all_rejected_leaves_the_backbone_as_it_was(mode: str) -> None:
    state, verdict, _ = server_round(judged(missing_mass=mode), dict.fromkeys(range(6), 0.2))
    close(state["model"], [2.0])
    assert len(verdict.rejected) == 4 and verdict.notes == ("no update was used: the model stays as it was",)


def test_every_client_that_trained_gets_feedback() -> None:
    _, samples, rejected, asked = outcome(judged())
    told = asked[-1]
    assert (
        told.task == "notify"
        and told.to.tolist() == sorted(samples)
        and told.bytes_down().tolist() == [3 * 8] * 4
    )
    assert told.extra["admitted"].tolist() == [float(c not in rejected) for c in sorted(samples)]
    close(told.extra["accuracy"], [0.1 if c in rejected else 0.9 for c in sorted(samples)])
    close(told.extra["threshold"], [0.5] * 4)
    assert [e.task for e in outcome(judged(feedback=False))[3]] == ["train", SCORE]


def test_members_may_train() -> None:
    _, verdict, asked = server_round(judged(committee_trains=True), dict.fromkeys(range(6), 0.9))
    assert asked[0].to.tolist() == list(range(6)) and not verdict.rejected and len(asked[1].to) == 2
    assert (asked[1].pick >= 0).sum().item() == 2 * 6 - 2


def test_without_a_committee_no_client_is_asked_to_score() -> None:
    state, verdict, asked = server_round(CPfl(committee=False), {})
    assert [e.task for e in asked] == ["train"] and not verdict.rejected
    close(state["model"], [2 + sum((c + 1) * c for c in range(6)) / 21])


def test_finish_asks_all_that_are_there() -> None:
    method = CPfl()
    ctx = context()
    steps = method.Server(method).finish({"model": INITIAL[:1]}, ctx)
    asked = next(steps)
    assert (
        asked.task == "tune"
        and asked.to.tolist() == list(range(6))
        and asked.bytes_down().tolist() == [8] * 6
    )
    none = CPfl(tune_epochs=0)  # nobody tunes, but everybody gets the last backbone
    assert next(none.Server(none).finish({"model": INITIAL[:1]}, ctx)).to.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"committee": {"sise": 3}}, r"unknown key 'method\.committee\.sise'; did you mean 'size'"),
        ({"committee": {"vote": "max"}}, r"method\.committee\.vote"),
        ({"committee": 3}, r"method\.committee"),
        ({"committee": 1}, r"method\.committee"),  # not taken for true, and then for no committee
        ({"committee": "yes"}, r"method\.committee"),
        ({"tune_epochs": -1}, r"method\.tune_epochs"),
    ],
)
def test_settings_that_cannot_be(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("method", {"name": "c-pfl", **table})


def test_the_committee_is_on_by_default() -> None:
    assert (
        CPfl()
        == build("method", {"name": "c-pfl", "committee": True})
        == build("method", {"name": "c-pfl", "committee": {}})
    )


# ---- whole runs


def reference(run: Run, rounds: int, tune: int) -> tuple[Tensor, Tensor]:
    """FedBABU as one would write it down: plain modules, plain SGD, one client after the other, everybody in
    every round."""
    e = run._experiment
    network, federation, recipe = e.network, e.federation, e.run_context.recipe
    ids = torch.arange(federation.clients)
    data = federation.train.take(ids)
    weights = data.count.double() / data.count.sum()
    model = e.initial.double().clone()
    frozen, head = e.initial.double(), network.head

    def keep(entries: Tensor) -> Callable[[nn.Module, int], None]:
        """After every step, the frozen entries are put back."""

        def undo(net: nn.Module, row: int) -> None:
            start, named = network.layout.unflatten(model), dict(net.named_parameters())
            mask = network.layout.unflatten(entries)
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.copy_(torch.where(mask[name], start[name], parameter))

        return undo

    def trained(entries: Tensor, round: int, purpose: Exchange, **options: Any) -> Tensor:
        key = client_key(e.key, round, purpose).fold("fit")
        start, how = model.expand(len(ids), -1), replace(recipe, **options)
        return slow_fit(network, start, federation.samples, data, key, how, after=keep(entries))

    ask = Exchange("train", ids, frozen[None], torch.zeros(len(ids), 1, dtype=torch.int64))
    for round in range(1, rounds + 1):
        model = torch.where(head, frozen, weights @ trained(head, round, ask))
    own = trained(~head, rounds + 1, ask, epochs=tune, steps=None)
    return model, own


def test_without_a_committee_it_is_fedbabu(simulate: Callable[..., Run]) -> None:
    run = simulate(method={"name": "c-pfl", "committee": False, "tune_epochs": 3}, train={"rounds": 3})
    model, own = reference(run, 3, 3)
    torch.testing.assert_close(run.vector(model="global"), model, rtol=0, atol=1e-12)
    for client in range(5):
        torch.testing.assert_close(run.vector(client=client), own[client], rtol=0, atol=1e-12)
    assert run.round == 4 and run.final["accuracy"] == run.final["accuracy/personal"]


def test_a_committee_that_rejects_no_client_changes_nothing(simulate: Callable[..., Run]) -> None:
    """Members train, and a threshold of 0 stays where it is."""
    without = simulate(method={"name": "c-pfl", "committee": False})
    lenient = {"name": "c-pfl", "committee_trains": True, "committee": {"rule": "ema", "significance": 1e-12}}
    run = simulate(method=lenient)
    assert run.final["rejected"] == 0
    torch.testing.assert_close(run.vector(model="global"), without.vector(model="global"), rtol=0, atol=1e-12)


def test_traffic_is_counted(simulate: Callable[..., Run]) -> None:
    run = simulate(
        method={"name": "c-pfl", "committee": {"size": 3}},
        data={"clients": 8, "split": SPLIT},
        train={"rounds": 2},
    )
    network = run._experiment.network
    backbone, number = 8 * int((~network.head).sum()), 8
    table = run.metrics.set_index("round")
    for round in (1, 2):  # M = 5 backbones, M * c backbones, three numbers of feedback
        assert table["bytes/down"][round] == 5 * backbone + 15 * backbone + 5 * 3 * number
        assert table["bytes/up"][round] == 5 * (backbone + 2 * number) + 15 * number
    assert table["bytes/down"][3] == 8 * backbone and table["bytes/up"][3] == 8 * number


def test_only_clients_that_answered_get_feedback_also_where_another_detector_bans_others(
    simulate: Callable[..., Run],
) -> None:
    """A norm test behind the committee bans those whose update screening refused: the committee has no score
    of theirs."""
    attack = {"name": "sign-flip", "scale": 1e308, "lies": {"update": 1e308}, "clients": [1, 4]}
    run = simulate(
        method="c-pfl",
        data={"clients": 8, "split": SPLIT},
        attack=attack,
        detectors=["norm"],
        train={"rounds": 3},
    )
    arrays, prefix = run.store.arrays(1), "verdict/tables/committee/"
    trained = sorted(set(range(8)) - set(arrays[prefix + "members"].tolist()))
    refused = [client for client in trained if client in (1, 4)]
    assert refused and arrays["verdict/ids"].tolist() == trained
    assert arrays[prefix + "ids"].tolist() == [client for client in trained if client not in refused]
    assert len(arrays[prefix + "accuracy"]) == len(trained) - len(refused)


def test_what_is_recorded(simulate: Callable[..., Run]) -> None:
    run = simulate(
        method={"name": "c-pfl", "committee": {"size": 3}},
        data={"clients": 8, "split": SPLIT},
        train={"rounds": 3},
    )
    prefix = "verdict/tables/committee/"
    seen = [
        {k.removeprefix(prefix): v for k, v in run.store.arrays(r).items() if k.startswith(prefix)}
        for r in (1, 2, 3)
    ]
    for tables, part in zip(seen, run.store.parts(4)[-4:-1], strict=True):
        assert tables["votes"].shape == (3, 5) and len(tables["members"]) == 3
        torch.testing.assert_close(tables["accuracy"], tables["votes"].mean(0))
        assert int((~tables["admitted"]).sum()) == part["metrics"]["rejected"] == len(part["rejected"])
    for before, after in zip(seen, seen[1:], strict=False):
        assert torch.equal(before["next_threshold"], after["threshold"]) and bool(
            after["threshold"] >= before["threshold"]
        )
    ranking = torch.argsort(seen[0]["total"], descending=True, stable=True)
    assert seen[1]["members"].tolist() == sorted(seen[0]["clients"][ranking[:3]].tolist())
    rows = run._experiment.run_context.rows.__class__(run.path / "rows", run.store.head()[1]["rows/index"])
    told = rows.read(seen[2]["clients"])["feedback"]
    trained = ~torch.isin(torch.arange(8), seen[2]["members"])
    torch.testing.assert_close(told[trained, 0], seen[2]["accuracy"])
    assert torch.equal(told[trained, 2].bool(), seen[2]["admitted"])


@pytest.mark.parametrize("epochs", [0, 5])
def test_tuning_epochs(epochs: int, simulate: Callable[..., Run]) -> None:
    """A client outside the last cohort, as a member is, has an old backbone; in the end it is handed the last
    one, tuned or not."""
    run = simulate(method={"name": "c-pfl", "tune_epochs": epochs}, data={"clients": 6}, train={"rounds": 3})
    common, last = run.vector(model="global"), run.store.parts(4)[-1]["metrics"]
    assert run.round == 4 and all(
        torch.equal(run.vector(client=client), common) == (epochs == 0) for client in range(6)
    )
    assert run.final["accuracy/personal"] == run.final["accuracy/global"] or epochs
    assert last["bytes/down"] == 6 * 8 * int((~run._experiment.network.head).sum())
    assert (last["bytes/up"], last["loss/train"] is None) == (0 if epochs == 0 else 6 * 8, epochs == 0)


def test_the_backbone_stays_also_with_batch_norm(simulate: Callable[..., Run]) -> None:
    run = simulate(method="c-pfl", model={"name": "mlp", "hidden": 6, "batch_norm": True})
    head, common = run._experiment.network.head, run.vector(model="global")
    for client in range(5):
        own = run.vector(client=client)
        assert torch.equal(own[~head], common[~head]) and not torch.equal(own[head], common[head])


@pytest.mark.parametrize("attack", ["input-noise", "label-flip", "sign-flip"])
def test_attackers_that_are_redrawn_every_round(attack: str, simulate: Callable[..., Run]) -> None:
    run = simulate(
        method={"name": "c-pfl", "committee": {"vote": "median", "rule": "per-round"}},
        data={"clients": 10, "split": SPLIT},
        attack={"name": attack, "fraction": 0.4, "redraw": True, "lies": {"score": "invert"}},
        train={"rounds": 3},
    )
    assert run.final["accuracy"] is not None and run.final["detection/auc/committee/error"] is not None
    assert all(torch.isfinite(value).all() for value in run.state().values())


def test_lost_replies_and_absent_members(simulate: Callable[..., Run]) -> None:
    run = simulate(
        method="c-pfl",
        data={"clients": 9},
        train={"rounds": 4, "dropout": 0.4, "availability": 0.7, "participation": 0.8},
    )
    heard = [run.store.arrays(round)["verdict/tables/committee/votes"] for round in range(1, 5)]
    assert any(bool(votes.isnan().any()) for votes in heard)
    assert all(torch.isfinite(value).all() for value in run.state().values())


def test_other_committees_are_trained_together(
    simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]
) -> None:
    tables = [
        {"method": {"name": "c-pfl", "committee": {"significance": s, "size": c}}}
        for s, c in ((0.05, 2), (0.3, 1))
    ]
    structures = {build("method", table["method"]).structure() for table in tables}
    assert len(structures) == 1
    for table, fused in zip(tables, simulate_all(tables), strict=True):
        torch.testing.assert_close(
            fused.vector(client=1), simulate(**table).vector(client=1), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("committed", [1, 3])
def test_a_stopped_run_goes_on_to_the_same_bits(
    committed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_disk: None
) -> None:
    """In the middle, and before the tuning."""
    method = {"name": "c-pfl", "committee": {"size": 2, "sample": 1, "ban_after": 2}}
    table = {"method": method, "data": {"clients": 7}, "train": {"rounds": 3}}
    whole = everything(run_all([table], tmp_path / "whole")[0])
    commit, calls = Store.write_head, itertools.count()

    def stop(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == committed + 1:
            raise KeyboardInterrupt
        return commit(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "write_head", stop)
        run_all([table], tmp_path / "cut")
    assert Run(tmp_path / "cut").round == committed
    resume(tmp_path / "cut")
    assert_same(whole, everything(Run(tmp_path / "cut")), tolerance=0)
    assert whole["server/method-detector0/total"].any()
