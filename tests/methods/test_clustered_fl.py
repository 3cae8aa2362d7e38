"""Clustered federated learning: groups that pull in different directions part; each has a model of its
own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.aggregators.median import Median
from holdfast.core.together import computed_alone
from holdfast.core.types import Exchange, Steps, Uplink, Verdict
from holdfast.engine.simulator import Simulator
from holdfast.results.run import Run
from holdfast.sweeps.session import resume
from tests.helpers import assert_same, everything, run_all
from tests.methods.two import World, close, numbers, reply, server


def world(**settings: Any) -> World:
    """With lengths as they are, unless it is said otherwise."""
    return World(
        plan=None,
        name="clustered-fl",
        **{"eps1": 0.4, "eps2": 1.6, "relative": False, "across": 1.0, **settings},
    )  # type: ignore[arg-type]


Answer = Callable[[Exchange], Uplink]


def run_case(
    where: World, state: dict[str, Tensor], answer: Answer, cohort: list[int]
) -> tuple[dict[str, Tensor], Verdict, list[Exchange]]:
    half = where.method.Server(where.method)
    steps: Steps[Any] = computed_alone(half.round(state, where.ctx(cohort=torch.tensor(cohort))))
    asked: list[Exchange] = []
    try:
        asked.append(next(steps))
        while True:
            asked.append(steps.send(answer(asked[-1])))
    except StopIteration as end:
        state, verdict = end.value
        return state, verdict, asked


PULLS = {1: [2.0, 0.1], 2: [1.8, 0.0], 3: [-2.0, 0.0], 4: [-1.8, 0.1], 5: [-2.0, 0.1]}
"""Clients 1 and 2 pull one way, the others the other. Their mean is (-2 / 5, 0.3 / 5), of length 0.4045."""


def pulls(ex: Exchange) -> Uplink:
    ids = tuple(ex.to.tolist())
    return (
        reply(*(PULLS[c] for c in ids), ids=ids, count=(1,) * len(ids)) if ids else reply(ids=ids, count=())
    )


def start(where: World) -> dict[str, Tensor]:
    return where.method.Server(where.method).init(where.ctx())


def test_groups_that_cancel_are_parted_and_each_moves_by_its_own_updates() -> None:
    where = world(eps1=0.41)
    state, verdict, asked = run_case(where, start(where), pulls, [1, 2, 3, 4, 5])
    assert [ex.bank.tolist() for ex in asked] == [[[1.0, 2.0]]]
    assert state["children"].tolist() == [[1, 2], [-1, -1], [-1, -1]] and state["ids"].tolist() == [
        1,
        2,
        3,
        4,
        5,
    ]
    first, second = int(state["at"][0]), int(state["at"][4])
    assert state["at"].tolist() == [first, first, second, second, second] and {first, second} == {1, 2}
    close(state["models"][0], [1, 2])  # the last they had in common
    close(state["models"][first], [2.9, 2.05])
    close(state["models"][second], [1 - 5.8 / 3, 2 + 0.2 / 3])
    assert verdict.weights is not None
    close(verdict.weights, [1 / 2] * 2 + [1 / 3] * 3)
    close(verdict.tables["mean_norm"], [(0.4**2 + 0.06**2) ** 0.5])
    close(verdict.tables["max_norm"], [(4 + 0.01) ** 0.5])
    assert verdict.tables["split"].tolist() == [1.0] and verdict.ids.tolist() == [1, 2, 3, 4, 5]
    state, verdict, asked = run_case(where, state, pulls, [1, 3, 4])
    assert sorted(ex.to.tolist() for ex in asked) == [[1], [3, 4]]
    close(state["models"][first], [4.9, 2.15])
    assert verdict.ids.tolist() == [1, 3, 4] and verdict.tables["split"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "cohort"),
    [
        ({"eps1": 0.4}, [1, 2, 3, 4, 5]),
        ({"eps1": 9.0, "eps2": 2.1}, [1, 2, 3, 4, 5]),
        ({"eps1": 9.0}, [1, 3]),
        ({"eps1": 0.0}, [1, 3]),
    ],
    ids=["they still move together", "nobody wants to move far", "two are no cluster to cut", "never"],
)
def test_when_a_cluster_stays_one(changes: dict[str, float], cohort: list[int]) -> None:
    where = world(**changes)
    state, verdict, _ = run_case(where, start(where), pulls, cohort)
    assert len(state["models"]) == 1 and verdict.tables["split"].tolist() == [0.0]
    close(state["models"][0], numbers(1, 2) + numbers(*(PULLS[c] for c in cohort)).mean(0))


def test_lengths_are_measured_by_the_longest_mean_so_far() -> None:
    """Means of (2, 0), then (0.9, 0) with members at 2.3: 0.45 and 1.15 of the longest. Half of it and all of
    it are passed, but only in the second round; then each part is measured by its own updates."""
    rounds = [
        {1: [2.0, 0.0], 2: [2.0, 0.0], 3: [2.0, 0.0], 4: [2.0, 0.0]},
        {1: [2.3, 0.0], 2: [2.3, 0.0], 3: [-0.5, 0.0], 4: [-0.5, 0.0]},
    ]
    for eps, nodes in (
        (dict(eps1=0.5, eps2=1.1), 3),
        (dict(eps1=0.44, eps2=1.1), 1),
        (dict(eps1=0.5, eps2=1.16), 1),
    ):
        where = world(relative=True, **eps)
        state = start(where)
        for answers in rounds:

            def answer(ex: Exchange, answers: dict[int, list[float]] = answers) -> Uplink:
                ids = tuple(ex.to.tolist())
                return reply(*(answers[c] for c in ids), ids=ids, count=(1,) * len(ids))

            state, verdict, _ = run_case(where, state, answer, [1, 2, 3, 4])
            assert answers is not rounds[0] or len(state["models"]) == 1
        assert len(state["models"]) == nodes and verdict.tables["split"].tolist() == [float(nodes > 1)]
        close(
            state["longest"],
            [2.0] if nodes == 1 else [2.0, *(2.3 if int(state["at"][0]) == node else 0.5 for node in (1, 2))],
        )


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_under_a_robust_rule_no_attacker_increases_the_measure(server_lr: float) -> None:
    where = world(relative=True)
    up = reply([2.0, 0.0], [2.0, 0.0], [1e9, 0.0], ids=(1, 2, 3), count=(1, 1, 1))
    ctx = where.ctx(cohort=torch.tensor([1, 2, 3]), aggregator=Median(), server_lr=server_lr)
    steps = computed_alone(where.method.Server(where.method).round(start(where), ctx))
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(up)
    close(end.value.value[0]["longest"], [2.0])


def test_a_client_first_seen_later_walks_down_to_where_its_update_points() -> None:
    where = world(eps1=0.9)
    state, _, _ = run_case(where, start(where), pulls, [1, 2, 3, 4])
    half = where.method.Server(where.method)
    with pytest.raises(StopIteration) as end:
        next(half.deliver(state, where.ctx(), torch.tensor([1, 4, 5])))
    told = end.value.value
    assert told.pick[:, 0].tolist() == [int(state["at"][0]), int(state["at"][3]), 0]
    state, verdict, asked = run_case(where, state, pulls, [1, 5])
    probe = asked[0]
    assert probe.to.tolist() == [5] and probe.bank[probe.pick[0, 0]].tolist() == [1.0, 2.0]
    assert int(state["at"][4]) == int(state["at"][3]) and state["ids"].tolist() == [1, 2, 3, 4, 5]
    assert sorted(ex.to.tolist() for ex in asked[1:]) == [[1], [5]] and verdict.ids.tolist() == [1, 5]


def test_a_client_that_does_not_answer_stays_in_its_cluster() -> None:
    where = world(eps1=0.9)
    state, _, _ = run_case(where, start(where), pulls, [1, 2, 3, 4])
    silent, verdict, asked = run_case(where, state, lambda ex: reply(ids=(), count=()), [5])
    assert (
        len(asked) == 1
        and silent["ids"].tolist() == [1, 2, 3, 4]
        and "no client answered" in verdict.notes[0]
    )
    close(silent["models"], state["models"])


def test_a_zero_update_has_no_direction() -> None:
    """In float32, where the smallest number of float64 is 0."""
    where = world(eps1=9.0)
    begun = {
        name: value.float() if value.is_floating_point() else value for name, value in start(where).items()
    }

    def answer(ex: Exchange) -> Uplink:
        up = reply([2.0, 0.0], [-2.0, 0.0], [0.0, 0.0], ids=(1, 2, 3), count=(1, 1, 1))
        return replace(up, fields={name: value.float() for name, value in up.fields.items()})

    state, _, _ = run_case(where, begun, answer, [1, 2, 3])
    assert len(state["models"]) == 3 and all(
        bool(torch.isfinite(value.double()).all()) for value in state.values()
    )


def test_a_zero_update_does_not_prevent_a_cut() -> None:
    """At a right angle to all, it would be across every cut; it goes to the first part, as it would if it
    came later."""
    where, ways = (
        world(eps1=9.0, across=-0.5),
        {1: [-2.0, 0.0], 2: [0.0, 0.0], 3: [2.0, 0.0], 4: [2.0, 0.1], 5: [0.0, 0.0]},
    )

    def answer(ex: Exchange) -> Uplink:
        ids = tuple(ex.to.tolist())
        return reply(*(ways[c] for c in ids), ids=ids, count=(1,) * len(ids))

    state, _, _ = run_case(where, start(where), answer, [1, 2, 3, 4])
    at = state["at"].tolist()
    assert at[2] == at[3] != at[0] and at[1] == 1
    state, _, _ = run_case(where, state, answer, [5])
    assert state["at"].tolist()[4] == 1
    near = world(eps1=9.0, across=-1.0)  # 3 and 4 are not quite opposite to 1
    assert len(run_case(near, start(near), answer, [1, 2, 3, 4])[0]["models"]) == 1


def test_a_cut_cluster_is_cut_again() -> None:
    where = world(eps1=0.9, eps2=0.1)
    state, _, _ = run_case(where, start(where), pulls, [1, 2, 3, 4])
    ways = {1: [2.0, 0.0], 2: [2.0, 0.0], 3: [0.0, 1.0], 4: [0.0, 1.0], 5: [0.0, -1.0]}

    def turned(ex: Exchange) -> Uplink:
        ids = tuple(ex.to.tolist())
        return reply(*(ways[c] for c in ids), ids=ids, count=(1,) * len(ids))

    state["ids"], state["at"] = torch.tensor([1, 2, 3, 4, 5]), torch.cat([state["at"], state["at"][-1:]])
    state, _, _ = run_case(where, state, turned, [1, 2, 3, 4, 5])
    at = state["at"].tolist()
    assert len(state["models"]) == 5 and at[0] == at[1] and at[2] == at[3] != at[4] and len(set(at)) == 3


def test_without_cuts_it_is_fedavg(simulate: Callable[..., Run]) -> None:
    train = {"rounds": 3, "participation": 0.6}
    average, mine = (
        simulate(method=method, train=train) for method in ("fedavg", {"name": "clustered-fl", "eps1": 0.0})
    )
    for client in range(5):
        close(mine.vector(client), average.vector())
    assert mine.metrics["bytes/up"].tolist() == average.metrics["bytes/up"].tolist()
    assert mine.metrics["bytes/down"].tolist() == average.metrics["bytes/down"].tolist()


@pytest.mark.parametrize(
    "aggregator", ["foolsgold", "fltrust", {"name": "trimmed-mean", "f": 1}, {"name": "centered-clip"}]
)
def test_a_run_with_cuts_under_rules_that_remember(aggregator: Any, simulate: Callable[..., Run]) -> None:
    method = {"name": "clustered-fl", "eps1": 100.0, "eps2": 0.0, "relative": False, "across": 1.0}
    data = {"clients": 8, "root": 20}
    run = simulate(
        method=method,
        aggregator=aggregator,
        data=data,
        train={"rounds": 4, "participation": 0.7},
        detectors=["norm"],
    )
    nodes = len(server(run, "models"))
    leaves = (server(run, "children")[:, 0] < 0).nonzero().flatten().tolist()
    assert nodes > 1 and set(server(run, "at").tolist()) & set(leaves)
    assert all(torch.isfinite(run.vector(client)).all() for client in range(8))
    assert run.final["accuracy"] == run.final["accuracy/customised"]


CUTS: dict[str, Any] = {
    "method": {"name": "clustered-fl", "eps1": 100.0, "eps2": 0.0, "relative": False, "across": 1.0},
    "data": {"clients": 8},
    "aggregator": "foolsgold",
    "train": {"rounds": 4, "participation": 0.7},
}


def test_neither_plans_nor_fused_experiments_nor_a_pause_change_the_cuts(
    simulate: Callable[..., Run],
    simulate_all: Callable[..., list[Run]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = everything(simulate(**CUTS))
    assert len(whole["server/models"]) > 3 and any(name.startswith("server/node") for name in whole)
    assert_same(everything(simulate(**CUTS, engine={"plan": "loop"})), whole)
    assert_same(everything(simulate_all([CUTS, {**CUTS, "seed": 1}])[0]), whole)
    honest = Simulator.exchange

    def exchange(self: Simulator, calls: Any) -> Any:
        if calls[0].run_context.round == 3:
            raise KeyboardInterrupt
        return honest(self, calls)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Simulator, "exchange", exchange)
        run_all([CUTS], tmp_path / "cut")
    resume(tmp_path / "cut")
    assert_same(everything(Run(tmp_path / "cut")), whole, 0)


def by_default(simulate: Callable[..., Run], **changes: Any) -> list[int]:
    """Where each of six clients ends up, with the default settings."""
    data = {"clients": 6, "partition": {"name": "iid", "samples_per_client": 80}}
    train = {"rounds": 9, "local_epochs": 5, "batch_size": 10}
    run = simulate(
        method="clustered-fl", data=data, train=train, model={"name": "mlp", "hidden": 16}, **changes
    )
    assert server(run, "ids").tolist() == list(range(6))
    return server(run, "at").tolist()


def test_by_default_opposed_groups_are_parted_and_alike_ones_stay_together(
    simulate: Callable[..., Run],
) -> None:
    """Half of the clients call every digit by its mirror image (9 - y); the same clients with one opinion are
    one cluster to the end, although their updates become short and noisy."""
    opposed = by_default(simulate, attack={"name": "label-flip", "flip": "mirrored", "clients": [0, 1, 2]})
    assert len(set(opposed[:3])) == len(set(opposed[3:])) == 1 and opposed[0] != opposed[5]
    assert by_default(simulate) == [0] * 6


def test_it_finds_the_groups(simulate: Callable[..., Run]) -> None:
    """Two groups of clients with classes of their own, and whoever was away at the cut comes in by its
    update."""
    data = {"clients": 10, "partition": {"name": "grouped", "groups": 2, "share": 0.9}}
    train = {"rounds": 5, "local_epochs": 3, "batch_size": 10, "participation": 0.7}
    method = {"name": "clustered-fl", "eps1": 1.4, "eps2": 1.3, "relative": False, "across": 1.0}
    run = simulate(method=method, data=data, train=train, model={"name": "mlp", "hidden": 16})
    group = run._experiment.federation.facts["group"]
    at = server(run, "at")
    assert server(run, "ids").tolist() == list(range(10)) and len(at.unique()) == 2
    assert len({(int(a), int(b)) for a, b in zip(at, group, strict=True)}) == 2
