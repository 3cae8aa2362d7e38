"""FedCAP by hand on a model of two numbers, its edge cases, its switches, and what it reduces to.

The pool of the hand-computed rounds: clients 1, 4 and 7, calibrated against the origin with d~ = (1, 0), (0,
2), (-3, 0), so that cosines are 0, -1 and 0, and w~ = (1, 0), (0, 2), (-3, 0)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.flat import Wire
from holdfast.core.registry import build
from holdfast.core.together import computed_alone
from holdfast.core.types import ROOT, Exchange, Uplink, Verdict
from holdfast.detectors.base import Detector, Judgement
from holdfast.methods.context import Context
from holdfast.methods.fedcap import FedCap, customisation
from holdfast.results.run import Run
from tests.detectors.infinite_attack import Endless
from tests.helpers import assert_same, everything, network_of
from tests.methods.by_hand import answer, both_plans, close, context, local_of, received
from tests.methods.slow_client import Slowly

State = dict[str, Tensor]
ORIGIN = torch.zeros(2, dtype=torch.float64)
UPDATES = [[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]
OFF = {"customise": False, "calibrate": False, "detect": False, "personalise": False}


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pool(ids: tuple[int, ...] = (1, 4, 7), rows: list[list[float]] | None = None) -> State:
    rows = UPDATES[: len(ids)] if rows is None else rows
    there = doubles(rows).reshape(len(ids), 2)
    counts = doubles([1.0, 2.0, 5.0][: len(ids)])
    pools = {
        "pool/ids": torch.tensor(ids, dtype=torch.int64),
        "pool/models": there,
        "pool/updates": there.clone(),
        "pool/counts": counts,
    }
    return {"model": doubles([5.0, 5.0]), "previous": ORIGIN.clone(), **pools}


def drive(steps: Any, *replies: Uplink) -> tuple[list[Exchange], Any]:
    """The exchanges of a generator that is sent these replies, and what it returns."""
    asked, up = [], None
    todo, steps = list(replies), computed_alone(steps)
    while True:
        try:
            asked.append(next(steps) if up is None else steps.send(up))
        except StopIteration as end:
            assert not todo
            return asked, end.value
        up = todo.pop(0)


def run_case(
    state: State | None, ctx: Context, *replies: Uplink, **settings: Any
) -> tuple[list[Exchange], State, Verdict]:
    server = server_of(**settings)
    asked, (after, verdict) = drive(server.round(server.init(ctx) if state is None else state, ctx), *replies)
    return asked, after, verdict


def server_of(**settings: Any) -> Any:
    method = build("method", {"name": "fedcap", **settings})
    return method.Server(method)


def request_of(ids: list[int], update: list[list[float]], **more: list[float]) -> Uplink:
    fields = {
        "update": doubles(update).reshape(len(ids), 2),
        **{name: doubles(value) for name, value in more.items()},
    }
    return Uplink(torch.tensor(ids, dtype=torch.int64), fields)


def sent(exchange: Exchange) -> Tensor:
    return exchange.bank[exchange.pick[:, 0]]


# ---- client half


@both_plans
def test_the_client_trains_as_dittos_does(plan: Any) -> None:
    """The same numbers as in test_by_hand: w for the server, v pulled to what was received."""
    rule = FedCap(lam=0.5).Client(FedCap(lam=0.5))
    start = {"personal": doubles([[0.0, 0.0], [1.0, 1.0]])}
    state, reply = rule.train(local_of(plan, lam=0.5), start, received(), {})
    close(state["personal"], [[0.15, 0.1], [1.0, 0.95]])
    close(reply["update"], [[-0.25, -0.15], [0.0, -0.2]])
    close(rule.personal(local_of(plan), state, received()), state["personal"].tolist())


@both_plans
def test_without_personalisation_what_it_trained_is_its_own(plan: Any) -> None:
    rule = FedCap(personalise=False).Client(FedCap(personalise=False))
    state, _ = rule.train(local_of(plan), {"own": torch.zeros(2, 2)}, received(), {})
    close(state["own"], [[0.75, 1.85], [1.0, 1.8]])
    close(rule.personal(local_of(plan), state, received()), [[0.75, 1.85], [1.0, 1.8]])


@both_plans
def test_a_request_is_an_update_and_leaves_nothing(plan: Any) -> None:
    for reference, fields in (("recovered", {"update"}), ("customised", {"update", "count"})):
        method = FedCap(reference=reference)
        state, reply = method.Client(method).request(
            local_of(plan, lam=0.1), {"personal": torch.zeros(2, 2)}, received(), {}
        )
        assert state is None and set(reply) == fields
        close(reply["update"], [[-0.25, -0.15], [0.0, -0.2]])


# ---- weights (Eq. 4 and 5)


def test_weights_by_hand() -> None:
    """Client 4 is in the pool, with cosines 0 and 0 to the others; client 9 is not, with cosines 1, 0 and
    -1."""
    similar = doubles([[0.0, 1.0, 0.0], [1.0, 0.0, -1.0]])
    own = torch.tensor([[False, True, False], [False, False, False]])
    got = customisation(similar, own, 2.0, 0.3)
    total = math.exp(2) + 1 + math.exp(-2)
    close(got, [[0.35, 0.3, 0.35], [math.exp(2) / total, 1 / total, math.exp(-2) / total]])
    close(customisation(similar, own, 2.0, "uniform")[0], [1 / 3, 1 / 3, 1 / 3])
    close(customisation(similar, own, 0.0, 0.3)[1], [1 / 3, 1 / 3, 1 / 3])


def test_a_large_alpha_does_not_overflow_and_a_small_one_keeps_the_own_share() -> None:
    similar, own = doubles([[1.0, 0.5, -1.0]]), torch.tensor([[True, False, False]])
    close(customisation(similar, own, 1e6, 0.2), [[0.2, 0.8, 0.0]])
    close(customisation(similar, own, 1e-14, 0.2), [[0.2, 0.4, 0.4]])


def test_alone_in_the_pool() -> None:
    own = torch.tensor([[True], [False]])
    close(customisation(doubles([[1.0], [-1.0]]), own, 10.0, 0.3), [[1.0], [1.0]])
    close(customisation(doubles([[1.0]]), own[:1], 10.0, "uniform"), [[1.0]])


# ---- server half


def test_the_first_round_sends_the_start_to_all() -> None:
    ctx = context([4, 7], initial=ORIGIN)
    asked, state, verdict = run_case(None, ctx, answer([4, 7], [[3.0, 0.0], [0.0, 4.0]], [1, 3]))
    assert [e.task for e in asked] == ["train"] and asked[0].bank.tolist() == [[0.0, 0.0]]
    close(state["model"], [0.75, 3.0])  # Eq. 6
    close(state["previous"], [0.0, 0.0])
    close(state["pool/models"], [[3.0, 0.0], [0.0, 4.0]])
    close(state["pool/updates"], [[3.0, 0.0], [0.0, 4.0]])
    assert state["pool/ids"].tolist() == [4, 7] and state["pool/counts"].tolist() == [1, 3]
    assert verdict.tables["norms"].tolist() == [3, 4] and verdict.tables["customisation"].shape == (2, 0)


def test_a_round_by_hand() -> None:
    """Clients 1 and 7 of the pool; their cosine is -1, both are at a right angle to client 4. alpha = log 3,
    phi = 0.4: client 1 gets 0.4 of itself and 0.6 * (3/4, 1/4) of 4 and 7: (0.4 - 0.45, 0.9); client 7 the
    mirror image: 0.6 * (1/4 of 1, 3/4 of 4) and 0.4 of itself. The reference is (5, 5): calibrated updates
    are what the clients end with, less that."""
    ctx = context([1, 7])
    reply = answer([1, 7], [[1.0, 0.0], [0.0, 1.0]], [1, 3])
    asked, state, verdict = run_case(pool(), ctx, reply, alpha=math.log(3), phi=0.4, t_norm=100.0)
    assert [e.task for e in asked] == ["train"]
    hat = [[0.4 - 0.45, 0.9], [0.15 - 1.2, 0.9]]
    close(sent(asked[0]), hat)
    recovered = [[hat[0][0] + 1, 0.9], [hat[1][0], 1.9]]
    close(state["pool/models"], recovered)
    calibrated = [[x - 5, y - 5] for x, y in recovered]
    close(state["pool/updates"], calibrated)
    close(state["model"], [0.25 * recovered[0][i] + 0.75 * recovered[1][i] for i in (0, 1)])
    close(state["previous"], [5.0, 5.0])
    close(verdict.tables["norms"], [math.hypot(*row) for row in calibrated])
    close(verdict.tables["customisation"], [[0.4, 0.45, 0.15], [0.15, 0.45, 0.4]])
    assert verdict.tables["customisation/pool"].tolist() == [1, 4, 7] and state["pool/ids"].tolist() == [1, 7]
    assert verdict.weights is not None and verdict.weights.tolist() == [0.25, 0.75]
    assert set(ctx.timer.spent) == {"aggregate", "calibrate", "detect"}


def test_an_absent_client_is_asked_for_an_update_first() -> None:
    """Client 9's request (0, 5) points to client 4 and is at a right angle to the others; client 5's was
    lost, it gets the reference."""
    ctx = context([1, 5, 9])
    up = answer([1, 5, 9], [[0.0, 0.0]] * 3, [1, 1, 1])
    asked, state, verdict = run_case(
        pool(), ctx, request_of([9], [[0.0, 5.0]]), up, alpha=math.log(2), phi=0.5, t_norm=100.0
    )
    assert [e.task for e in asked] == ["request", "train"]
    assert asked[0].to.tolist() == [5, 9] and asked[0].bank.tolist() == [
        [0.0, 0.0]
    ]  # the reference the pool was calibrated against
    weights = [[0.5, 1 / 3, 1 / 6], [0.0, 0.0, 0.0], [0.25, 0.5, 0.25]]
    close(verdict.tables["customisation"], weights)
    close(sent(asked[1]), [[0.5 - 0.5, 2 / 3], [5.0, 5.0], [0.25 - 0.75, 1.0]])
    assert state["pool/ids"].tolist() == [1, 5, 9]


def test_all_are_new() -> None:
    asked, state, _ = run_case(
        pool(),
        context([2, 3]),
        request_of([2, 3], [[1.0, 0.0], [0.0, 1.0]]),
        answer([2, 3], [[0.0] * 2] * 2, [1, 1]),
        alpha=0.0,
        t_norm=100.0,
    )
    close(sent(asked[1]), [[-2 / 3, 2 / 3]] * 2)
    assert state["pool/ids"].tolist() == [2, 3]


@pytest.mark.parametrize("calibrate", [True, False])
def test_calibration(calibrate: bool) -> None:
    """With or without, the reference is the mean of the recovered models; what is compared and judged
    differs."""
    ctx = context(
        [1, 7], aggregator=build("aggregator", {"name": "mean", "weights": "uniform"}), weighting="uniform"
    )
    reply = answer([1, 7], [[1.0, 0.0], [0.0, 2.0]], [1, 3])
    asked, state, verdict = run_case(
        pool(), ctx, reply, calibrate=calibrate, t_norm=1.5 if not calibrate else 100.0
    )
    hat = sent(asked[0])
    recovered = hat + doubles([[1.0, 0.0], [0.0, 2.0]])
    if calibrate:
        close(state["pool/updates"], (recovered - 5).tolist())
        close(state["model"], recovered.mean(0).tolist())
    else:
        assert list(verdict.banned) == [7] and verdict.tables["norms"].tolist() == [1, 2]
        close(state["pool/updates"], [[1.0, 0.0]])
        close(state["model"], recovered[0].tolist())


def test_too_far_from_the_reference_is_banned_for_good() -> None:
    """Client 7's model is at (6, 8): 10 from the origin; client 4's at (3, 4)."""
    ctx = context([4, 7], initial=ORIGIN)
    reply = answer([4, 7], [[3.0, 4.0], [6.0, 8.0]], [1, 1])
    _, state, verdict = run_case(None, ctx, reply, t_norm=9.0)
    assert verdict.banned == {7: "update of norm 10 is above 9"} and state["pool/ids"].tolist() == [4]
    close(state["model"], [3.0, 4.0])
    assert run_case(None, ctx, reply, t_norm=10.0)[2].banned == {}  # above, not at
    assert run_case(None, ctx, reply, detect=False, t_norm=1.0)[2].banned == {}
    three = answer([1, 4, 7], [[1.0, 0.0], [2.0, 0.0], [6.0, 8.0]], [1, 1, 1])
    assert list(
        run_case(None, context([1, 4, 7], initial=ORIGIN), three, t_norm=3.0, t_unit="median")[2].banned
    ) == [7]


def test_all_clients_banned() -> None:
    """The reference stays and is sent next time; nobody who is banned stays in the pool."""
    ctx = context([1, 4, 7])
    _, state, verdict = run_case(pool(), ctx, answer([1, 4, 7], [[99.0, 0.0]] * 3, [1, 1, 1]))
    assert (
        sorted(verdict.banned) == [1, 4, 7]
        and len(state["pool/ids"]) == 0
        and state["pool/models"].shape == (0, 2)
    )
    close(state["model"], [5.0, 5.0])
    close(state["previous"], [0.0, 0.0])
    asked, state, _ = run_case(state, context([2, 3]), answer([2, 3], [[1.0, 0.0], [0.0, 1.0]], [1, 1]))
    assert [e.task for e in asked] == ["train"] and asked[0].bank.tolist() == [[5.0, 5.0]]
    close(state["model"], [5.5, 5.5])
    close(state["previous"], [5.0, 5.0])


def test_a_round_without_answers_leaves_the_pools() -> None:
    before = pool()
    _, state, verdict = run_case(before, context([1, 4]), answer([], [], []))
    assert_same(state, before, 0.0)
    assert any("no client answered" in note for note in verdict.notes)
    asked, state, _ = run_case(before, context([]), answer([], [], []))
    assert_same(state, before, 0.0)
    _, state, _ = run_case(
        before, context([1, 9]), request_of([9], [[1.0, 0.0]]), answer([9], [[99.0, 0.0]], [1])
    )
    assert_same(state, before, 0.0)  # a stranger was banned


def test_a_zero_update_is_at_a_right_angle_to_all() -> None:
    asked, _, verdict = run_case(
        pool(rows=[[1.0, 0.0], [0.0, 0.0], [-3.0, 0.0]]),
        context([4]),
        answer([4], [[0.0, 0.0]], [1]),
        phi=0.2,
    )
    close(verdict.tables["customisation"], [[0.4, 0.2, 0.4]])
    asked, _, verdict = run_case(
        pool(), context([9]), request_of([9], [[0.0, 0.0]]), answer([9], [[0.0, 0.0]], [1])
    )
    close(verdict.tables["customisation"], [[1 / 3, 1 / 3, 1 / 3]])


def test_nothing_that_overflows_enters() -> None:
    """Screening lets a finite update pass, but the model it is added to may make it infinite: banned, or at
    least not used."""
    far = torch.finfo(torch.float64).max
    state = pool() | {"model": doubles([-far, 0.0])}
    up = answer([1, 4], [[far, 0.0], [0.0, 1.0]], [1, 1])
    _, after, verdict = run_case(state, context([1, 4]), up, t_norm=1e300)
    assert 1 in verdict.banned
    _, after, verdict = run_case(state, context([1, 4]), up, detect=False)
    assert verdict.rejected == {1: "recovered model is not finite"}
    assert all(bool(torch.isfinite(value.double()).all()) for value in after.values())


def test_reference_from_the_customised_models() -> None:
    """Algorithm 1, line 7: client 1 has 1 sample, client 9 says it has 3, client 5's request was lost and it
    does not count."""
    ctx = context([1, 5, 9])
    up = answer([1, 5, 9], [[1.0, 0.0]] * 3, [1, 1, 1])
    requests = request_of([9], [[0.0, 5.0]], count=[3.0])
    asked, state, _ = run_case(
        pool(), ctx, requests, up, alpha=math.log(2), phi=0.5, t_norm=100.0, reference="customised"
    )
    hat = sent(asked[1])
    reference = (hat[0] + 3 * hat[2]) / 4
    close(state["previous"], reference.tolist())
    close(state["pool/updates"], (hat + doubles([1.0, 0.0]) - reference).tolist())
    close(state["model"], (hat.mean(0) + doubles([1.0, 0.0])).tolist())


def test_any_aggregator_shapes_the_reference() -> None:
    ctx = context([1, 4, 7], initial=ORIGIN, aggregator=build("aggregator", "median"))
    _, state, _ = run_case(None, ctx, answer([1, 4, 7], UPDATES, [1, 1, 1]))
    close(state["model"], [0.0, 0.0])


def test_the_servers_own_client_gets_the_reference_and_stays_out_of_the_pool() -> None:
    ctx = context([1, 4, 7], aggregator=build("aggregator", "fltrust"))
    up = answer([ROOT, 1, 4, 7], [[1.0, 0.0], [0.5, 0.0], [0.5, 0.0], [0.5, 0.0]], [1, 1, 1, 1])
    asked, state, verdict = run_case(pool(), ctx, up, t_norm=100.0)
    assert (
        asked[0].to.tolist() == [ROOT, 1, 4, 7]
        and sent(asked[0])[0].tolist() == [5, 5]
        and asked[0].pick[:, 0].tolist() == [0, 1, 2, 3]
    )
    assert state["pool/ids"].tolist() == [1, 4, 7] and verdict.ids.tolist() == [1, 4, 7]


def test_buffers_travel_with_their_models_and_do_not_count_for_similarity() -> None:
    network = network_of(lambda: nn.BatchNorm1d(1))  # weight, bias; mean, variance, counter
    wire = Wire.of(network.layout, torch.ones(5, dtype=torch.bool))
    models = doubles([[1.0, 0.0, 3.0, 1.0, 2.0], [0.0, 1.0, 9.0, 4.0, 4.0]])
    pools = {
        "ids": torch.tensor([1, 4]),
        "models": models,
        "updates": models[:, :2],
        "counts": doubles([1.0, 1.0]),
    }
    state = {
        "model": doubles([0.0] * 5),
        "previous": doubles([0.0] * 5),
        **{f"pool/{name}": value for name, value in pools.items()},
    }
    ctx = context([1, 4], wire=wire, layout=network.layout, initial=state["model"])
    up = answer([1, 4], [[0.0, 0.0], [0.0, 0.0]], [1, 1])
    up = replace(up, fields={**up.fields, "buffers": doubles([[1.0, 1.0, 5.0], [2.0, 3.0, 5.0]])})
    asked, after, _ = run_case(state, ctx, up, phi=0.25)
    close(sent(asked[0]), [[0.25, 0.75, 7.5, 3.25, 3.5], [0.75, 0.25, 4.5, 1.75, 2.5]])
    close(after["pool/models"], [[0.25, 0.75, 1.0, 1.0, 5.0], [0.75, 0.25, 2.0, 3.0, 5.0]])
    assert after["pool/updates"].shape == (2, 2)
    close(after["model"], [0.5, 0.5, 1.5, 2.0, 5.0])


def test_similarity_over_the_head() -> None:
    """The second number is the head: clients 1 and 4 agree there, and differ elsewhere."""
    rows = [[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]]
    ctx = context([1], head=torch.tensor([False, True]))
    _, _, verdict = run_case(
        pool(rows=rows), ctx, answer([1], [[0.0, 0.0]], [1]), similarity="head", alpha=math.log(2), phi=0.0
    )
    close(verdict.tables["customisation"], [[0.0, 0.8, 0.2]])
    _, _, verdict = run_case(pool(rows=rows), ctx, answer([1], [[0.0, 0.0]], [1]), alpha=math.log(2), phi=0.0)
    close(verdict.tables["customisation"], [[0.0, 0.5, 0.5]])
    with pytest.raises(ConfigError, match='method.similarity = "head" needs a model with a head'):
        server_of(similarity="head").init(context())


# ---- what is delivered


def delivered(
    state: State, ids: list[int], *replies: Uplink, **settings: Any
) -> tuple[list[Exchange], Tensor]:
    asked, end = drive(
        server_of(**settings).deliver(state, context([1, 4]), torch.tensor(ids, dtype=torch.int64)), *replies
    )
    assert end.task == "deliver" and end.to.tolist() == ids
    return asked, sent(end)


def test_deliver() -> None:
    asked, got = delivered(pool(), [4, 7], alpha=0.0, phi=0.5)
    assert asked == []
    close(got, [[0.25 - 0.75, 1.0], [0.25 - 1.5, 0.5]])
    asked, got = delivered(pool(), [4, 8, 9], request_of([8], [[-1.0, 0.0]]), alpha=1e6, phi=0.5)
    assert [e.task for e in asked] == ["request"] and asked[0].to.tolist() == [8, 9]
    close(got, [[0.25 - 0.75, 1.0], [-3.0, 0.0], [5.0, 5.0]])  # client 9's request was refused: the reference
    close(delivered(pool(ids=()), [2, 4])[1], [[5.0, 5.0]] * 2)  # an empty pool asks nobody
    close(delivered(pool(ids=(4,)), [2, 4], request_of([2], [[1.0, 0.0]]))[1], [[1.0, 0.0]] * 2)
    close(delivered({"model": doubles([5.0, 5.0])}, [2, 4], customise=False)[1], [[5.0, 5.0]] * 2)
    assert delivered(pool(), [])[1].shape == (0, 2)


# ---- whole runs


SETTINGS: dict[str, Any] = {
    "train": {"rounds": 3, "local_epochs": 2, "participation": 0.6, "lr_decay": 0.8},
    "model": {"name": "mlp", "hidden": 6, "batch_norm": True, "dropout": 0.2},
}


def plain(run: Run) -> Mapping[str, Tensor]:
    """All numbers but those that only FedCAP has: its customised models are the global one where nothing is
    customised."""
    return {name: value for name, value in everything(run).items() if "/customised/" not in name}


def test_without_any_switch_it_is_fedavg_ft(simulate: Callable[..., Run]) -> None:
    ours, theirs = (
        simulate(method={"name": "fedcap", **OFF}, **SETTINGS),
        simulate(method="fedavg-ft", **SETTINGS),
    )
    assert_same(plain(ours), plain(theirs), 1e-12)
    assert (ours.final["bytes/up"], ours.final["bytes/down"]) == (
        theirs.final["bytes/up"],
        theirs.final["bytes/down"],
    )
    assert ours.final["accuracy/customised"] == ours.final["accuracy/global"]


def test_with_personalisation_alone_it_is_ditto(simulate: Callable[..., Run]) -> None:
    ours = simulate(method={"name": "fedcap", **OFF, "personalise": True, "lam": 0.7}, **SETTINGS)
    assert_same(plain(ours), plain(simulate(method={"name": "ditto", "lam": 0.7}, **SETTINGS)), 1e-12)


def test_with_detection_alone_it_is_fedavg_ft_with_a_detector(simulate: Callable[..., Run]) -> None:
    attacked = SETTINGS | {"attack": {"name": "replacement", "fraction": 0.4, "factor": 50.0}}
    ours = simulate(method={"name": "fedcap", **OFF, "detect": True, "t_norm": 3.0}, **attacked)
    theirs = simulate(method="fedavg-ft", detectors=[{"name": "norm", "threshold": 3.0}], **attacked)
    assert ours.final["detection/fnr"] == 0
    drop = [{k.replace("norm/norm", "norm"): v for k, v in plain(run).items()} for run in (ours, theirs)]
    assert_same(*drop, 1e-12)


def test_calibration_changes_nothing_where_nothing_is_customised(simulate: Callable[..., Run]) -> None:
    first, second = (
        plain(simulate(method={"name": "fedcap", **OFF, "calibrate": on}, **SETTINGS)) for on in (False, True)
    )
    assert_same(first, second, 0.0)


def test_with_equal_weights_all_clients_are_sent_the_mean(simulate: Callable[..., Run]) -> None:
    """alpha = 0 and phi = 1/N at full participation with equal weights: the customised models are the
    reference, up to rounding."""
    equal: dict[str, Any] = {"train": {"rounds": 3}, "aggregator": {"name": "mean", "weights": "uniform"}}
    ours = simulate(
        method={"name": "fedcap", "alpha": 0.0, "phi": "uniform", "detect": False, "lam": 0.7}, **equal
    )
    theirs = simulate(method={"name": "ditto", "lam": 0.7}, **equal)
    torch.testing.assert_close(ours.vector(), theirs.vector(), rtol=0, atol=1e-12)
    for client in range(5):
        torch.testing.assert_close(ours.vector(client), theirs.vector(client), rtol=0, atol=1e-12)


def test_a_whole_run_slowly(simulate: Callable[..., Run]) -> None:
    """The paper's algorithm client by client, with nn.Module, torch.optim.SGD and a softmax written out."""
    train = {"rounds": 3, "local_epochs": 2, "participation": 0.6, "lr_decay": 0.8}
    run = simulate(method={"name": "fedcap", "alpha": 4.0, "phi": 0.2, "lam": 0.7}, train=train)
    slow = Slowly(run)
    w, previous, v = slow.w0, slow.w0, {c: slow.w0 for c in range(5)}
    models: dict[int, Tensor] = {}
    updates: dict[int, Tensor] = {}

    def customised(client: int, request: Tensor) -> Tensor:
        others = [i for i in models if i != client]
        powers = {
            i: math.exp(4.0 * float(request @ updates[i] / request.norm() / updates[i].norm()))
            for i in others
        }
        rest = sum((powers[i] / sum(powers.values()) * models[i] for i in others), torch.zeros_like(w))
        return 0.2 * models[client] + 0.8 * rest if client in models else rest

    for round, cohort in enumerate(slow.cohorts, 1):
        absent = [c for c in cohort if models and c not in models]
        requests = {c: slow.train(previous, c, round) - previous for c in absent}
        step = 1 if absent else 0
        hat = {c: customised(c, requests[c] if c in absent else updates[c]) if models else w for c in cohort}
        v |= {c: slow.train(v[c], c, round, (hat[c], 0.7), step=step) for c in cohort}
        models = {c: slow.train(hat[c], c, round, step=step) for c in cohort}
        updates = {c: model - w for c, model in models.items()}
        previous, w = w, slow.mean(models)
    state = run.state()
    for got, expected in (
        (run.vector(), w),
        (state["previous"], previous),
        (state["pool/models"], torch.stack([*models.values()])),
        (state["pool/updates"], torch.stack([*updates.values()])),
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    seen = set().union(*slow.cohorts)
    for client in seen:
        torch.testing.assert_close(run.vector(client), v[client], rtol=0, atol=1e-9)
    for client in models:
        torch.testing.assert_close(
            run.vector(client, "customised"), customised(client, updates[client]), rtol=0, atol=1e-9
        )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"similarity": "head"},
    {"reference": "customised"},
    {"variant": "authors", "t_norm": 0.9},
    {"phi": "uniform"},
    {"calibrate": False},
    {"t_unit": "median", "t_norm": 1.2},
]


def test_every_option_runs_and_changes_the_result(simulate_all: Callable[..., list[Run]]) -> None:
    settings = SETTINGS | {"train": SETTINGS["train"] | {"participation": 0.8, "dropout": 0.1}}
    runs = simulate_all([{"method": {"name": "fedcap", **options}, **settings} for options in OPTIONS])
    models = [run.vector() for run in runs]
    assert all(bool(torch.isfinite(model).all()) for model in models)
    for options, model in zip(OPTIONS[1:], models[1:], strict=True):
        assert not torch.allclose(model, models[0], atol=1e-6), options


def test_requests_are_paid_for(simulate: Callable[..., Run]) -> None:
    """A cohort member outside the last cohort costs a second model down and a second update up."""
    run = simulate(method="fedcap", train=SETTINGS["train"])
    d = run._experiment.network.layout.size
    cohorts = [set(run.store.arrays(round)["cohort"].tolist()) for round in (1, 2, 3)]
    new = sum(len(cohorts[r] - cohorts[r - 1]) for r in (1, 2))
    assert (
        new > 0
        and run.final["bytes/down"] == (9 + new) * d * 8
        and run.final["bytes/up"] == 9 * (d + 2) * 8 + new * d * 8
    )
    full = simulate(method="fedcap").final
    assert full["bytes/down"] == 10 * d * 8  # at full participation as FedAvg


def test_attackers_poison_their_requests(simulate: Callable[..., Run]) -> None:
    """Two clients, one of them an attacker that is away every second round: its request is turned around
    too."""
    settings: dict[str, Any] = {
        "train": {"rounds": 3, "availability": {"0": [[1, 2], [3, 4]]}},
        "data": {"clients": 3},
    }
    honest = simulate(method="fedcap", **settings).store.arrays(3)["verdict/tables/customisation"]
    turned = simulate(method="fedcap", attack={"name": "sign-flip", "clients": [0]}, **settings).store.arrays(
        3
    )
    assert turned["verdict/tables/customisation/pool"].tolist() == [1, 2] and not torch.allclose(
        turned["verdict/tables/customisation"][0], honest[0], atol=1e-6
    )


def test_attacks_during_an_evaluation_are_not_noted(simulate: Callable[..., Run]) -> None:
    """Those outside the last cohort make a request to be measured; how often one measures must not change
    what is said of the attack."""
    settings: dict[str, Any] = {
        "attack": {"name": "lie", "fraction": 0.4},
        "train": {"rounds": 4, "participation": 0.4},
    }
    noted = [
        [
            part.get("attack")
            for part in simulate(method="fedcap", evaluate={"every": every}, **settings).store.parts(4)
        ]
        for every in (1, 4)
    ]
    assert noted[0] == noted[1] and any(noted[0])


def test_a_banned_client_is_not_drawn_again_or_is_ignored(simulate: Callable[..., Run]) -> None:
    attacked: dict[str, Any] = {
        "attack": {"name": "replacement", "clients": [1], "factor": 50.0},
        "train": {"rounds": 3, "shuffle": False},
    }
    run = simulate(method={"name": "fedcap", "t_norm": 5.0}, **attacked)
    assert run.final["detection/fnr"] == 0 and run.final["detection/fpr"] == 0
    assert run.store.arrays(1)["cohort"].tolist() == [0, 1, 2, 3, 4] and run.store.arrays(3)[
        "cohort"
    ].tolist() == [0, 2, 3, 4]
    ignoring = simulate(method={"name": "fedcap", "t_norm": 5.0, "variant": "authors"}, **attacked)
    arrays = ignoring.store.arrays(3)
    assert arrays["cohort"].tolist() == [0, 1, 2, 3, 4] and arrays["verdict/ids"].tolist() == [0, 2, 3, 4]
    assert ignoring.state()["banned"].tolist() == [1] and ignoring.final["detection/dacc"] == 1.0
    assert ignoring.state()["pool/ids"].tolist() == [0, 2, 3, 4]
    assert_same({k: v for k, v in ignoring.state().items() if k != "banned"}, run.state(), 0.0)
    assert [ignoring.final[name] for name in ("bytes/up", "bytes/down")] == [
        run.final[name] for name in ("bytes/up", "bytes/down")
    ]
    assert arrays["took_part"].tolist() == [0, 2, 3, 4]


def test_an_ignored_client_is_neither_asked_for_an_update_nor_sent_a_model() -> None:
    """Client 4 is banned, client 9 is new: only 9 makes a request, only 1 and 9 train, as in the released
    code. Where all that were drawn are banned, nobody is asked for anything."""
    state = pool(ids=(1, 7), rows=[[1.0, 0.0], [-3.0, 0.0]]) | {"banned": torch.tensor([4])}
    up = answer([1, 9], [[0.0, 0.0]] * 2, [1, 1])
    asked, after, _ = run_case(
        state, context([1, 4, 9]), request_of([9], [[0.0, 5.0]]), up, variant="authors"
    )
    assert [(e.task, e.to.tolist()) for e in asked] == [("request", [9]), ("train", [1, 9])]
    assert after["pool/ids"].tolist() == [1, 9] and after["banned"].tolist() == [4]
    asked, after, _ = run_case(state, context([4]), answer([], [], []), variant="authors")
    assert [(e.task, e.to.tolist()) for e in asked] == [("train", [])]
    assert_same(after, state, 0.0)


def test_a_uniform_share_is_of_the_pool_and_with_the_authors_of_the_first_pool() -> None:
    """Three clients are left of the first round and two of the second: the own share is a third, then a half;
    the released code computes it once and keeps the third."""
    first, second = (
        answer([1, 4, 7], UPDATES, [1, 1, 1]),
        answer([1, 4, 7], [[0.0, 0.0], [0.0, 0.0], [99.0, 0.0]], [1, 1, 1]),
    )
    for variant, shares in (("paper", [1 / 3, 1 / 2]), ("authors", [1 / 3, 1 / 3])):
        settings = {"phi": "uniform", "variant": variant, "alpha": 0.0}
        state = run_case(None, context([1, 4, 7], initial=ORIGIN), first, **settings)[1]
        for reply, share in zip((second, answer([1, 4], [[0.0, 0.0]] * 2, [1, 1])), shares, strict=True):
            _, state, verdict = run_case(state, context(reply.ids.tolist()), reply, **settings)
            assert verdict.tables["customisation"].diagonal().tolist() == pytest.approx([share] * len(reply))
        assert state["pool/ids"].tolist() == [1, 4]


class Looking(Detector):
    """Bans nobody; remembers whom it could have asked for help."""

    def judge(self, state: State, ctx: Any, models: Tensor, ids: Tensor) -> Any:
        yield from ()
        return Judgement({"available": ctx.available})


def test_an_ignored_client_is_not_asked_to_judge_others(simulate: Callable[..., Run]) -> None:
    method = {"name": "fedcap", "variant": "authors"}
    run = simulate(method=method, attack=Endless(clients=(1,)), detectors=(Looking(),), train={"rounds": 2})
    assert run.state()["detector0/available"].tolist() == [0, 2, 3, 4] and run.store.arrays(2)[
        "cohort"
    ].tolist() == [0, 1, 2, 3, 4]


def test_an_ignored_client_is_banned_once_and_refused_once(simulate: Callable[..., Run]) -> None:
    method = {"name": "fedcap", "variant": "authors"}
    run = simulate(method=method, attack=Endless(clients=(1,)), train={"rounds": 3})
    parts = run.store.parts(3)
    assert [[*part["refused"]] for part in parts if part["round"]] == [["1"], [], []]
    assert [[*part["banned"]] for part in parts if part["round"]] == [["1"], [], []] and run.final[
        "detection/rounds"
    ] == 1
    assert run.store.arrays(3)["verdict/ids"].tolist() == [0, 2, 3, 4]


def test_the_authors_variant_is_a_preset() -> None:
    assert build("method", {"name": "fedcap", "variant": "authors"}).removal == "ignored"
    assert (
        build("method", {"name": "fedcap", "variant": "authors", "removal": "excluded"}).removal == "excluded"
    )
    assert FedCap().removal == "excluded"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"t_unit": "median", "t_norm": 0.5}, "method: t_norm below 1 median norm would ban half"),
        ({"phi": 1.5}, "method.phi: does not fit"),
        ({"phi": "even"}, "method.phi: does not fit"),
        ({"alpha": -1}, "method.alpha: "),
    ],
)
def test_contradictory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        build("method", {"name": "fedcap", **settings})
