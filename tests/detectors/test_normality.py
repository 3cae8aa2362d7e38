from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from holdfast.core.flat import Layout, Wire
from holdfast.core.keys import Key
from holdfast.core.together import computed_alone
from holdfast.core.types import State
from holdfast.detectors.base import Judgement
from holdfast.detectors.normality import Normality
from holdfast.results.run import Run

LAYOUT = Layout.of(nn.Linear(4, 1, bias=False))
WIRE = Wire.of(LAYOUT, torch.ones(4, dtype=torch.bool))
UPDATES = [[1.0, 2, 3, 4], [2.0, 1, 3, 4], [4.0, 3, 2, 1]]
"""See tests/aggregators/test_fedcpa.py: the third has weight 0, the others 1; normality 8/3, 8/3 and 2."""
STRICT = Normality(k=0.5, action="ban", patience=2, global_=False)


def judged(
    detector: Normality, updates: list[list[float]], state: State | None = None, ids: list[int] | None = None
) -> Judgement:
    reference = torch.zeros(4, dtype=torch.float64)
    models = reference + torch.tensor(updates, dtype=torch.float64)
    ctx = SimpleNamespace(reference=reference, layout=LAYOUT, wire=WIRE)
    steps = computed_alone(detector.judge(state or {}, ctx, models, torch.tensor(ids or [10, 11, 12])))
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("it asked somebody")


def test_a_client_without_weight_is_rejected() -> None:
    said = judged(Normality(k=0.5), UPDATES)
    assert said.rejected == {12: "weight 0 by normality"} and said.banned == {}
    assert said.scores["distrust"].tolist() == [0, 0, 1]
    torch.testing.assert_close(
        said.scores["abnormality"], torch.tensor([-8 / 3, -8 / 3, -2], dtype=torch.float64)
    )


def test_patience_before_a_ban() -> None:
    first = judged(STRICT, UPDATES)
    assert set(first.rejected) == {12} and first.banned == {} and first.state["streak"].tolist() == [0, 0, 1]
    second = judged(STRICT, UPDATES, first.state)
    assert second.banned == {12: "weight 0 by normality, 2 rounds in a row"} and second.rejected == {}
    better = judged(STRICT, [UPDATES[0], UPDATES[2], UPDATES[1]], first.state)  # now it is 11
    assert set(better.rejected) == {11} and better.state["streak"].tolist() == [0, 1, 0]


def test_a_round_without_usable_scores_does_not_count() -> None:
    first = judged(STRICT, UPDATES)
    idle = judged(STRICT, [[1.0, 2, 3, 4]] * 3, first.state)
    assert idle.rejected == {} and idle.state["streak"].tolist() == [0, 0, 1]
    away = judged(STRICT, UPDATES, idle.state, [3, 10, 11])  # 12 was not asked
    assert away.state["ids"].tolist() == [3, 10, 11, 12] and away.state["streak"].tolist() == [0, 0, 1, 1]
    assert set(judged(STRICT, UPDATES, away.state).banned) == {12}


def test_few_clients_and_broken_models() -> None:
    assert judged(Normality(k=0.5), UPDATES[:2], ids=[1, 2]).rejected == {}
    said = judged(Normality(k=0.5), [*UPDATES, [float("nan"), 0, 0, 0]], ids=[1, 2, 3, 4])
    assert said.rejected == {3: "weight 0 by normality", 4: "model is not finite"}


def test_a_higher_bar() -> None:
    updates, ids = Key(4).normal(8, 4, dtype=torch.float64).tolist(), list(range(8))
    weights = 1 - judged(Normality(k=0.5), updates, ids=ids).scores["distrust"]
    assert ((weights > 0.1) & (weights < 0.6)).any()  # somebody is between nothing and all
    for bar in (0.0, 0.6):
        assert set(judged(Normality(k=0.5, at_most=bar), updates, ids=ids).rejected) == set(
            (weights <= bar).nonzero().flatten().tolist()
        )


def test_in_a_run_the_rejected_have_no_weight(simulate: Callable[..., Run]) -> None:
    run = simulate(
        detectors=[{"name": "normality"}],
        aggregator="mean",
        model={"name": "mlp", "hidden": 32},
        data={"clients": 8},
        attack={"name": "gaussian", "fraction": 0.25},
        train={"rounds": 3},
    )
    for round in (1, 2, 3):
        arrays = run.store.arrays(round)
        distrust: Tensor = arrays["verdict/scores/normality/distrust"]
        assert (
            torch.equal(arrays["verdict/weights"] == 0, distrust == 1)
            and (distrust[run.malicious()] == 1).all()
        )
    assert run.state()["detector0/model"].shape == run.state()["model"].shape


def test_as_the_authors_score_and_with_bans(simulate: Callable[..., Run]) -> None:
    run = simulate(
        method="fedavg-ft",
        detectors=[{"name": "normality", "variant": "authors", "action": "ban", "patience": 1}],
    )
    banned = {client for part in run.store.parts(2) for client in part["banned"]}
    assert run.round == 2 and banned
