"""The committee by hand: six clients 10 ... 15, models of one number; what members answer is made up here."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.together import computed_alone
from holdfast.core.types import SCORE, UNDEFINED, Exchange, State, Uplink
from holdfast.detectors.base import Judgement
from holdfast.detectors.committee import Committee
from holdfast.results.run import Run

CLIENTS = torch.arange(10, 16)
Says = Callable[[int, int], float]
"""What a member says of a client's model."""


def context(available: Tensor = CLIENTS, cohort: Tensor | None = None, round: int = 1, **more: Any) -> Any:
    told: dict[str, Any] = {"counts": None, **more}
    return SimpleNamespace(
        available=available, cohort=available if cohort is None else cohort, key=Key(5).fold(round), **told
    )


def held(
    committee: Committee,
    says: Says,
    state: State | None = None,
    ids: Tensor | None = None,
    ctx: Any = None,
    lost: tuple[int, ...] = (),
    models: Tensor | None = None,
    asked: list[Exchange] | None = None,
) -> Judgement:
    """One round; by default whoever does not sit has sent the model (id)."""
    state, ctx = state or {}, ctx or context()
    if ids is None:
        ids = ctx.cohort[~torch.isin(ctx.cohort, committee.elect(state, ctx))]
    models = ids[:, None].double() if models is None else models
    ctx.buffers = torch.zeros(len(ids), 0, dtype=models.dtype)
    steps = computed_alone(committee.judge(state, ctx, models, ids))
    try:
        exchange = next(steps)
    except StopIteration as end:
        return end.value
    assert exchange.task == SCORE and exchange.bank.shape == models.shape
    if asked is not None:
        asked.append(exchange)
    there = ~torch.isin(exchange.to, torch.tensor(lost, dtype=torch.int64))
    rows = [
        [UNDEFINED if pick < 0 else says(int(member), int(ids[pick])) for pick in picks]
        for member, picks in zip(exchange.to[there], exchange.pick[there], strict=True)
    ]
    answers = torch.tensor(rows, dtype=torch.float64).view(len(rows), exchange.pick.shape[1])
    with pytest.raises(StopIteration) as end:
        steps.send(Uplink(exchange.to[there], {"score": answers}))
    return end.value.value


def seated(*members: int, **memory: Any) -> State:
    """A memory in which these clients have contributed most, the first above all."""
    ids = CLIENTS
    total = torch.tensor(
        [float(10 - members.index(c)) if c in members else 0.0 for c in ids.tolist()], dtype=torch.float64
    )
    fresh = {
        "tau": torch.zeros(1, dtype=torch.float64),
        "members": ids[:0],
        "ids": ids,
        "total": total,
        "accuracy": torch.zeros(6, dtype=torch.float64),
        "count": torch.ones(6, dtype=torch.float64),
        "admitted": torch.ones(6, dtype=torch.int64),
        "strikes": torch.zeros(6, dtype=torch.int64),
    }
    return {**fresh, **{k: torch.as_tensor(v, dtype=fresh[k].dtype) for k, v in memory.items()}}


def of(judged: Judgement, name: str) -> list[float]:
    return judged.tables[name].tolist()


def by_client(table: dict[int, float]) -> Says:
    return lambda member, client: table[client]


# ---- one round


def test_scores_are_averaged_and_a_threshold_decides() -> None:
    """Members 10 and 11 score 12 ... 15; Eq. 1 and 4."""
    votes = {10: [0.9, 0.5, 0.2, 0.6], 11: [0.7, 0.5, 0.4, 0.2]}
    asked: list[Exchange] = []
    judged = held(Committee(size=2), lambda m, c: votes[m][c - 12], seated(10, 11, tau=[0.5]), asked=asked)
    assert of(judged, "members") == [10, 11] and of(judged, "votes") == [votes[10], votes[11]]
    assert of(judged, "accuracy") == pytest.approx([0.8, 0.5, 0.3, 0.4])
    assert (
        judged.rejected == {14: "accuracy 0.3 is below 0.5", 15: "accuracy 0.4 is below 0.5"}
        and not judged.banned
    )
    assert judged.scores["error"].tolist() == pytest.approx([0.2, 0.5, 0.7, 0.6])
    assert asked[0].bytes_down().tolist() == [4 * 8, 4 * 8]  # every member is sent every model


def test_the_next_threshold_is_the_lower_bound_of_the_mean() -> None:
    """Of the admitted 0.8 and 0.5: mean 0.65, s = 0.3 / sqrt(2), t(0.95, 1) = 6.313752: bound below 0. Of
    four, t(0.95, 3) = 2.353363."""
    four = torch.tensor([0.8, 0.5, 0.7, 0.6], dtype=torch.float64)
    s = math.sqrt((0.15**2 + 0.15**2 + 0.05**2 + 0.05**2) / 3)
    bound = 0.65 - 2.353363 * s / 2
    assert Committee().next_tau(0.0, four) == pytest.approx(bound, abs=1e-6)
    assert Committee().next_tau(0.6, four) == 0.6  # never lower
    assert Committee(rule="per-round").next_tau(0.6, four) == pytest.approx(bound, abs=1e-6)
    assert Committee(rule="ema", ema=0.75).next_tau(0.6, four) == pytest.approx(
        0.75 * 0.6 + 0.25 * bound, abs=1e-6
    )
    wide = 0.65 - 2.353363 * s * math.sqrt(1.25)
    assert Committee(rule="prediction-interval").next_tau(0.6, four) == pytest.approx(wide, abs=1e-6)
    assert Committee(rule="per-round").next_tau(0.6, four[:2]) == 0.0  # a bound below 0 is no bound
    assert Committee(significance=0.1).next_tau(0.0, four) > bound


@pytest.mark.parametrize(
    ("scores", "bound"),
    [
        ({}, 0.348638),
        ({"scores": "all"}, 0.348638),
        ({"scores": "admitted"}, 0.7),
        ({"scores": "members"}, 0.4),
    ],
)
def test_which_scores_move_it(scores: dict[str, Any], bound: float) -> None:
    """At a significance of 1/4, t is 1 with two values and 0.764892 with four. All scores, the default: 0.8, 0.7, 0.3 and 0.1 have the mean
    0.475 and s / sqrt(4) = 0.165202. Admitted: 0.8 and 0.7, so 0.75 - 0.05. Members: their means 0.55 and 0.4, so 0.475 - 0.075.


    """  # noqa: E501
    votes = {10: [0.9, 0.7, 0.4, 0.2], 11: [0.7, 0.7, 0.2, 0.0]}
    committee = Committee(size=2, rule="per-round", significance=0.25, **scores)
    judged = held(committee, lambda m, c: votes[m][c - 12], seated(10, 11, tau=[0.5]))
    assert set(judged.rejected) == {14, 15} and of(judged, "threshold") == [0.5]
    assert of(judged, "next_threshold") == [pytest.approx(bound, abs=1e-6)] == judged.state["tau"].tolist()


def test_a_members_value_is_the_mean_of_the_models_it_scored() -> None:
    """Members train too and score all models but their own: 10 has 0.5, 0.6, 0.6, 0.8 and 0.9, 11 has 0.2, 0.3, 0.3, 0.5 and 0.6: means
    0.68 and 0.38, so 0.53 - 0.15. Two values remain where one of three members is away, and one value has no spread.


    """  # noqa: E501
    votes = {10: [0.0, 0.5, 0.6, 0.6, 0.8, 0.9], 11: [0.2, 0.0, 0.3, 0.3, 0.5, 0.6], 12: [1.0] * 6}
    committee = Committee(size=2, scores="members", rule="per-round", significance=0.25)
    judged = held(committee, lambda m, c: votes[m][c - 10], seated(10, 11), ids=CLIENTS)
    assert of(judged, "next_threshold") == pytest.approx([0.38])
    three = committee.model_copy(update={"size": 3})
    without_12 = held(three, lambda m, c: votes[m][c - 10], seated(10, 11, 12), ids=CLIENTS, lost=(12,))
    assert of(without_12, "next_threshold") == pytest.approx([0.38])
    assert of(held(committee, lambda m, c: 0.9, seated(10, 11, tau=[0.2]), lost=(11,)), "next_threshold") == [
        0.2
    ]


def test_the_first_round_admits_all_and_sets_the_threshold() -> None:
    judged = held(Committee(size=2), lambda m, c: 0.5 + 0.01 * (c % 2))
    assert not judged.rejected and 0.45 < of(judged, "next_threshold")[0] < 0.51


def test_equal_scores_are_not_below_their_own_mean() -> None:
    state: State = {}
    for round in range(1, 4):
        judged = held(Committee(size=3, scores="all"), lambda m, c: 0.1, state, ctx=context(round=round))
        state = dict(judged.state)
        assert not judged.rejected and state["tau"].tolist() == pytest.approx([0.1])


def test_the_median_withstands_a_lying_member() -> None:
    truth = {13: 0.9, 14: 0.8, 15: 0.2}

    def says(member: int, client: int) -> float:
        return 1 - truth[client] if member == 10 else truth[client]

    state = seated(10, 11, 12, tau=[0.5])
    median = held(Committee(size=3, vote="median"), says, state)
    assert of(median, "accuracy") == pytest.approx([0.9, 0.8, 0.2]) and set(median.rejected) == {15}
    assert of(held(Committee(size=3), says, state), "accuracy") == pytest.approx([1.9 / 3, 1.8 / 3, 1.2 / 3])


# ---- contributions and elections


def test_contributions_add_up_and_the_largest_sums_sit() -> None:
    """Eq. 7, a = 0.25: accuracies 0.8, 0.6, 0.4 become 1, 1/2, 0; samples 10, 10, 20 are shares 1/4, 1/4,
    1/2."""
    committee = Committee(size=3, a=0.25)
    ctx = context(counts=torch.tensor([10.0, 10.0, 20.0]))
    judged = held(committee, by_client({13: 0.8, 14: 0.6, 15: 0.4}), seated(10, 11, 12), ctx=ctx)
    assert of(judged, "clients") == CLIENTS.tolist()
    assert of(judged, "total") == pytest.approx([10, 9, 8, 0.25 + 0.1875, 0.125 + 0.1875, 0.375])
    assert judged.state["accuracy"].tolist()[3:] == pytest.approx([0.8, 0.6, 0.4]) and judged.state[
        "count"
    ].tolist()[3:] == [10, 10, 20]
    min_max = Committee(a=0.25, share="min-max")
    got = min_max.contributions(
        *(torch.tensor(x, dtype=torch.float64) for x in ([0.8, 0.6, 0.4], [10.0, 10.0, 20.0]))
    )
    assert got.tolist() == pytest.approx([0.25, 0.125, 0.75])


def test_equal_scores_are_all_best_also_without_any_samples() -> None:
    got = Committee(a=0.5).contributions(torch.tensor([0.3, 0.3]), torch.tensor([0.0, 0.0]))
    assert got.tolist() == [0.5, 0.5]
    assert Committee(a=0.5).contributions(torch.tensor([0.1, 0.3]), torch.tensor([0.0, 4.0])).tolist() == [
        0.0,
        1.0,
    ]
    assert Committee().contributions(torch.zeros(0), torch.zeros(0)).tolist() == []


def test_members_rotate_unless_they_are_credited() -> None:
    says = by_client({c: 0.5 + 0.01 * c for c in CLIENTS.tolist()})
    rotating, staying = Committee(size=2), Committee(size=2, credit=True)
    start = seated(11, 10, total=[0.3, 0.4, 0, 0, 0.1, 0.2], accuracy=[0.9, 0.99, 0.1, 0.1, 0.1, 0.1])
    assert rotating.elect(start, context()).tolist() == [10, 11]
    after = dict(held(rotating, says, start).state)
    assert rotating.elect(after, context()).tolist() == [14, 15]
    credited = held(staying, says, start)
    # the scores are 0.62 ... 0.65 and the members' last 0.9 and 0.99: min-max over all six
    share = 0.5 / 6
    expected = [0.3 + 0.5 * 0.28 / 0.37 + share, 0.4 + 0.5 + share]
    assert credited.tables["total"][:2].tolist() == pytest.approx(expected)
    assert staying.elect(dict(credited.state), context()).tolist() == [10, 11]


def test_which_clients_may_be_elected() -> None:
    state = seated(15, 14, 13, admitted=[1, 0, 1, 1, 0, 0])
    assert Committee(size=3, eligible="any").elect(state, context()).tolist() == [13, 14, 15]
    assert Committee(size=3).elect(state, context()).tolist() == [
        10,
        12,
        13,
    ]  # 13 by its sum, then ties by id
    assert Committee(size=4).elect(state, context()).tolist() == [
        10,
        12,
        13,
        15,
    ]  # too few: the others by their sums
    there = torch.tensor([10, 12, 14, 15, 16])  # 13 is away and 16 is new
    assert Committee(size=3).elect(state, context(there)).tolist() == [10, 12, 15]
    assert Committee(size=3, eligible="any").elect(state, context(there)).tolist() == [10, 14, 15]


def test_the_first_committee_is_drawn_by_the_key() -> None:
    drawn = [Committee(size=2).elect({}, context(round=round)).tolist() for round in range(20)]
    assert drawn[3] == Committee(size=2).elect({}, context(round=3)).tolist()
    assert len({tuple(members) for members in drawn}) > 5 and all(
        members == sorted(members) for members in drawn
    )


@pytest.mark.parametrize(
    ("size", "clients", "seats"),
    [
        (0, 6, 3),
        (0, 100, 10),
        (0, 45, 5),
        (0, 4, 2),
        (4, 100, 4),
        (100, 100, 98),
        (9, 6, 4),
        (1, 6, 1),
        (0, 3, 1),
        (3, 2, 0),
        (0, 0, 0),
    ],
)
def test_how_many_sit(size: int, clients: int, seats: int) -> None:
    assert Committee(size=size).seats(clients) == seats


# ---- what may go wrong


def test_all_rejected() -> None:
    says, start = by_client({12: 0.4, 13: 0.3, 14: 0.2, 15: 0.1}), seated(10, 11, tau=[0.5])
    judged = held(Committee(size=2), says, start)
    assert set(judged.rejected) == {12, 13, 14, 15} and of(judged, "next_threshold") == [0.5]
    assert of(judged, "total")[2] > 0  # a score is a contribution also where it was not enough
    scores = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    lower = held(Committee(size=2, rule="per-round"), says, start)
    expected = Committee(rule="per-round").next_tau(0.5, scores)
    assert of(lower, "next_threshold") == pytest.approx([expected]) and expected < 0.2
    best = held(Committee(size=2, on_empty="accept-best-fraction", best_fraction=0.3), says, start)
    assert set(best.rejected) == {14, 15} and best.state["admitted"].tolist() == [1, 1, 2, 2, 1, 1]
    decayed = held(Committee(size=2, on_empty="decay-tau", decay=0.5), says, start)
    assert set(decayed.rejected) == {12, 13, 14, 15} and of(decayed, "next_threshold") == [0.25]
    assert set(
        held(Committee(size=2, on_empty="decay-tau"), says, dict(decayed.state), ids=CLIENTS[2:]).rejected
    ) == {14, 15}


def test_one_score_has_no_spread_and_moves_nothing() -> None:
    judged = held(Committee(size=2), by_client({12: 0.9}), seated(10, 11, tau=[0.5]), ids=torch.tensor([12]))
    assert not judged.rejected and of(judged, "next_threshold") == [0.5]
    assert of(judged, "total")[2] == pytest.approx(1.0)  # the best of one, with all of the data


def test_a_single_member() -> None:
    judged = held(
        Committee(size=1), by_client({11: 0.9, 12: 0.1, 13: 0.8, 14: 0.7, 15: 0.6}), seated(10, tau=[0.5])
    )
    assert of(judged, "accuracy") == [0.9, 0.1, 0.8, 0.7, 0.6] and set(judged.rejected) == {12}


def test_members_that_do_not_answer() -> None:
    says, state = by_client({13: 0.9, 14: 0.8, 15: 0.1}), seated(10, 11, 12, tau=[0.5])
    judged = held(Committee(size=3), says, state, lost=(10, 12))
    assert of(judged, "accuracy") == [0.9, 0.8, 0.1] and set(judged.rejected) == {15}
    assert torch.tensor(of(judged, "votes")).isnan().all(1).tolist() == [True, False, True]
    nobody = held(Committee(size=3), says, state, lost=(10, 11, 12))
    assert (
        nobody.rejected == {c: "0 votes are too few" for c in (13, 14, 15)}
        and nobody.scores["error"].isnan().all()
    )
    assert (
        nobody.state["total"].tolist() == state["total"].tolist()
        and nobody.state["strikes"].tolist() == [0] * 6
    )
    assert of(nobody, "next_threshold") == [0.5]
    assert not held(Committee(size=3, unheard="admit"), says, state, lost=(10, 11, 12)).rejected


def test_a_member_without_samples_is_no_voter() -> None:
    judged = held(Committee(size=2), lambda m, c: UNDEFINED if m == 10 else 0.6, seated(10, 11, tau=[0.5]))
    assert not judged.rejected and of(judged, "accuracy") == [0.6] * 4


@pytest.mark.parametrize(
    ("quorum", "enough"), [(2.0, True), (2.5, False), (3.0, False), (0.5, True), (0.7, False), (9.0, False)]
)
def test_a_quorum(quorum: float, enough: bool) -> None:
    """Two of three members answer."""
    state = seated(10, 11, 12)
    judged = held(Committee(size=3, quorum=quorum), lambda m, c: 0.5, state, lost=(11,))
    assert (judged.rejected == {}) == enough
    admitting = held(Committee(size=3, quorum=quorum, unheard="admit"), lambda m, c: 0.5, state, lost=(11,))
    assert not admitting.rejected and (admitting.state["total"].tolist() == state["total"].tolist()) != enough


def test_each_model_may_be_scored_by_some_members_only() -> None:
    clients = torch.arange(40)
    ctx = context(clients)
    committee = Committee(size=10, sample=4)
    asked: list[Exchange] = []
    judged = held(committee, lambda m, c: 0.5, ctx=ctx, asked=asked)
    votes = judged.tables["votes"]
    assert votes.shape == (10, 30) and (~votes.isnan()).sum(0).tolist() == [4] * 30
    assert len({tuple(column.isnan().tolist()) for column in votes.T}) > 15  # not the same members for all
    assert int(asked[0].bytes_down().sum()) == 30 * 4 * 8  # what is not scored is not sent
    fewer = held(committee, lambda m, c: 0.5, ctx=context(clients), ids=judged_ids(judged, clients)[5:9])
    assert torch.equal(
        fewer.tables["votes"].isnan(), votes[:, 5:9].isnan()
    )  # a client's luck does not hang on the others
    assert (
        len(
            held(Committee(size=10, sample=99), lambda m, c: 0.5, ctx=context(clients))
            .tables["votes"]
            .isnan()
            .nonzero()
        )
        == 0
    )


def judged_ids(judged: Judgement, clients: Tensor) -> Tensor:
    return clients[~torch.isin(clients, judged.tables["members"])]


def test_no_member_scores_its_own_model() -> None:
    """Members that train are judged by the others."""
    judged = held(
        Committee(size=2), lambda m, c: 1.0 if m == c else 0.2, seated(10, 11, tau=[0.5]), ids=CLIENTS
    )
    assert set(judged.rejected) == set(CLIENTS.tolist()) and of(judged, "accuracy") == pytest.approx(
        [0.2] * 6
    )
    alone = held(Committee(size=1), lambda m, c: 0.9, seated(10, tau=[0.5]), ids=CLIENTS)
    assert alone.rejected == {10: "0 votes are too few"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_not_even_tried(bad: float) -> None:
    asked: list[Exchange] = []
    models = torch.tensor([[1.0], [bad], [2.0], [3.0]], dtype=torch.float64)
    judged = held(Committee(size=2), lambda m, c: 0.6, seated(10, 11), models=models, asked=asked)
    assert judged.rejected == {13: "model is not finite"} and of(judged, "accuracy") == [0.6, 0.0, 0.6, 0.6]
    assert (asked[0].pick >= 0).tolist() == [[True, False, True, True]] * 2 and judged.scores["error"][
        1
    ] == 1.0
    only = held(
        Committee(size=2, unheard="admit"),
        lambda m, c: 0.6,
        seated(10, 11),
        ids=CLIENTS[2:3],
        models=models[1:2],
    )
    assert only.rejected == {12: "model is not finite"}


def test_too_few_clients_for_a_committee() -> None:
    two = torch.tensor([3, 4])
    judged = held(Committee(), lambda m, c: 0.0, ctx=context(two), ids=two)
    assert not judged.rejected and of(judged, "members") == [] and judged.tables["votes"].shape == (0, 2)
    nothing = held(Committee(), lambda m, c: 0.0, ctx=context(), ids=two[:0])
    assert not nothing.rejected and of(nothing, "accuracy") == [] and len(of(nothing, "members")) == 3


def test_bans_after_rejections_in_a_row() -> None:
    committee = Committee(size=2, ban_after=2)
    state, words = seated(10, 11, tau=[0.5]), by_client({12: 0.4, 13: 0.9, 14: 0.4, 15: 0.8})
    first = held(committee, words, state)
    assert not first.banned and first.state["strikes"].tolist() == [0, 0, 1, 0, 1, 0]
    second = held(
        committee, by_client({12: 0.9, 13: 0.9, 14: 0.4, 15: 0.8}), dict(first.state), ids=CLIENTS[2:]
    )
    assert (
        second.banned == {14: "2 rejections in a row"}
        and not second.rejected
        and second.state["strikes"].tolist() == [0, 0, 0, 0, 2, 0]
    )


def test_a_new_client_starts_with_nothing() -> None:
    there = torch.arange(10, 18)
    judged = held(Committee(size=2), lambda m, c: 0.5 + 0.01 * c, seated(10, 11), ctx=context(there))
    assert of(judged, "clients") == there.tolist() and judged.state["admitted"].tolist() == [
        1,
        1,
        2,
        2,
        2,
        2,
        1,
        1,
    ]
    assert 0 < of(judged, "total")[6] < of(judged, "total")[7]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"size": -1}, "greater than or equal to 0"),
        ({"quorum": 0}, "greater than 0"),
        ({"rule": "max"}, "rule"),
        ({"significance": 0.5}, "less than 0.5"),
        ({"sizes": 3}, "unknown key 'detector.sizes'; did you mean 'size'"),
    ],
)
def test_settings_that_cannot_be(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("detector", {"name": "committee", **table})


# ---- attached to other methods


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_it_can_be_attached(method: str, simulate: Callable[..., Run]) -> None:
    split = {"train": 0.5, "validation": 0.25, "test": 0.25}
    table = dict(method=method, data={"clients": 8, "split": split}, train={"rounds": 3})
    plain, run = simulate(**table), simulate(**table, detectors=[{"name": "committee", "size": 2}])
    size = run._experiment.network.layout.size * 8
    assert (
        run.final["bytes/down"] - plain.final["bytes/down"] == 3 * (2 * 8 - 2) * size
    )  # nobody is sent its own
    assert run.final["bytes/up"] - plain.final["bytes/up"] == 3 * 2 * 8 * 8
    rejected = [part["metrics"]["rejected"] for part in run.store.parts(3)[-3:]]
    assert run.final["rejected"] == sum(rejected) and rejected[0] == 0
    arrays = run.store.arrays(3)
    assert arrays["verdict/tables/committee/votes"].shape == (2, 8)
    assert (arrays["verdict/weights"] == 0).sum() == rejected[2]


def test_behind_another_detector_it_records_which_clients_it_judged(simulate: Callable[..., Run]) -> None:
    detectors = [{"name": "norm", "threshold": 5.0}, "committee"]
    attack = {"name": "sign-flip", "scale": 1e3, "clients": [2]}
    arrays = simulate(
        method="fedavg", data={"clients": 6}, detectors=detectors, attack=attack, train={"rounds": 1}
    ).store.arrays(1)
    assert arrays["verdict/ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays["verdict/tables/committee/ids"].tolist() == [0, 1, 3, 4, 5]
    assert (
        arrays["verdict/tables/committee/votes"].shape[1]
        == len(arrays["verdict/tables/committee/accuracy"])
        == 5
    )


def test_committees_of_experiments_of_different_sizes(
    simulate: Callable[..., Run], simulate_all: Callable[..., Any]
) -> None:
    tables = [
        {"method": "fedavg", "detectors": ["committee"], "data": {"clients": clients}} for clients in (5, 6)
    ]
    for table, fused in zip(tables, simulate_all(tables), strict=True):
        alone = simulate(**table).store.arrays(2)
        assert torch.equal(
            fused.store.arrays(2)["verdict/tables/committee/accuracy"],
            alone["verdict/tables/committee/accuracy"],
        )
        assert not alone["verdict/tables/committee/accuracy"].isnan().any()


@pytest.mark.parametrize(("vote", "caught"), [("mean", False), ("median", True)])
def test_members_that_turn_their_scores_round(vote: str, caught: bool, simulate: Callable[..., Run]) -> None:
    """Two of five members say the opposite: their votes are mirrored, and only the median does not mind."""
    common = dict(
        method="fedavg",
        data={"clients": 12},
        detectors=[{"name": "committee", "size": 5, "vote": vote}],
        train={"rounds": 1},
    )
    honest = simulate(**common).store.arrays(1)
    liars = [int(c) for c in honest["verdict/tables/committee/members"][:2]]
    lying = simulate(
        **common, attack={"name": "input-noise", "sigma": 0.0, "clients": liars, "lies": {"score": "invert"}}
    ).store.arrays(1)
    before, after = honest["verdict/tables/committee/votes"], lying["verdict/tables/committee/votes"]
    torch.testing.assert_close(after[:2], 1 - before[:2], rtol=0, atol=1e-9, equal_nan=True)
    assert torch.equal(after[2:].nan_to_num(), before[2:].nan_to_num())
    score = lying["verdict/tables/committee/accuracy"]
    by_all = ~before.isnan().any(
        0
    )  # three honest members against two; a member's own model has one voter less
    inside = (score >= before[2:].amin(0) - 1e-9) & (score <= before[2:].amax(0) + 1e-9)
    assert int(by_all.sum()) == 7 and bool(inside[by_all].all()) == caught
    assert not torch.equal(score, honest["verdict/tables/committee/accuracy"])
