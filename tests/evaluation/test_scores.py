"""Macro-F1, balanced accuracy and AUC: by hand, and against plain Python over pairs and lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.keys import Key
from holdfast.evaluation import evaluate
from holdfast.evaluation.evaluate import score
from holdfast.evaluation.scores import METRICS, UNDEFINED, AnswerCounts, Score
from holdfast.local.plan import Plan
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.helpers import (
    LOOP,
    VMAP,
    assert_same,
    deal,
    everything,
    network_of,
    random_samples,
    samples_of,
    starts,
)

NAN, INF = float("nan"), float("inf")


# ---- plain Python


def told(logits: Sequence[float]) -> int | None:
    return logits.index(max(logits)) if all(map(math.isfinite, logits)) else None


def slow_f1(logits: list[list[float]], labels: list[int]) -> float:
    answers = [told(row) for row in logits]
    each = []
    for c in {*labels, *(a for a in answers if a is not None)}:
        right = sum(a == y == c for a, y in zip(answers, labels, strict=True))
        each.append(2 * right / (answers.count(c) + labels.count(c)))
    return sum(each) / len(each) if each else UNDEFINED


def slow_balanced(logits: list[list[float]], labels: list[int]) -> float:
    recall = [
        sum(told(row) == c for row, y in zip(logits, labels, strict=True) if y == c) / labels.count(c)
        for c in set(labels)
    ]
    return sum(recall) / len(recall) if recall else UNDEFINED


def slow_auc(logits: list[list[float]], labels: list[int]) -> float:
    def of(row: list[float], c: int) -> float:
        if len(row) == 2:
            return row[c] - row[1 - c]
        return float(torch.tensor(row, dtype=torch.float64).softmax(0)[c])

    def ahead(a: list[float], b: list[float], c: int) -> Fraction:
        if not all(map(math.isfinite, [*a, *b])):
            return Fraction(0)
        return Fraction(1) if of(a, c) > of(b, c) else Fraction(1, 2) if of(a, c) == of(b, c) else Fraction(0)

    areas = []
    for c in [1] if logits and len(logits[0]) == 2 else set(labels):
        mine, others = (
            [row for row, y in zip(logits, labels, strict=True) if (y == c) == side] for side in (True, False)
        )
        if mine and others:
            areas.append(sum(ahead(a, b, c) for a in mine for b in others) / (len(mine) * len(others)))
    return float(sum(areas) / len(areas)) if areas else UNDEFINED


SLOW = {"macro_f1": slow_f1, "balanced_accuracy": slow_balanced, "auc": slow_auc}


def tally_of(logits: Sequence[Sequence[float]], labels: Sequence[int], classes: int = 0) -> dict[str, float]:
    """One client, told in one go."""
    y = torch.tensor(labels)
    data = deal(samples_of(torch.zeros(len(labels), 1), y), [len(labels)])
    tally = AnswerCounts(data, classes or len(logits[0]), METRICS)
    tally.add(0, slice(0, len(labels)), torch.tensor(logits, dtype=torch.float64))
    return {name: float(value[0]) for name, value in tally.score().more.items()}


# ---- by hand


def test_two_classes_by_hand() -> None:
    """Differences .9, .4 of class 1 and .4, .1, -.2 of class 0: of six pairs five are in order and one is
    equal."""
    got = tally_of([[0, 0.9], [0, 0.4], [0, 0.4], [0, 0.1], [0.2, 0]], [1, 1, 0, 0, 0])
    assert got["auc"] == 5.5 / 6
    # told 1, 1, 1, 1, 0. Class 1: 2 of 2 found among 4 told, F1 4/6; class 0: 1 of 3 found among 1 told, F1
    # 2/4
    assert got["macro_f1"] == pytest.approx((4 / 6 + 2 / 4) / 2) and got[
        "balanced_accuracy"
    ] == pytest.approx((1 + 1 / 3) / 2)


def test_three_classes_by_hand() -> None:
    """The third class is told once and never there: it counts in F1, and not in recall or AUC."""
    high, low = math.log(8), 0.0  # the softmax of one high is .8, .1, .1
    got = tally_of([[high, low, low], [low, high, low], [low, high, low], [low, low, high]], [0, 0, 1, 1])
    assert got["macro_f1"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3) and got["balanced_accuracy"] == 0.5
    # class 0 has .8, .1 against .1, .1; class 1 has .8, .1 against .1, .8
    assert got["auc"] == ((1 + 1 + 0.5 + 0.5) / 4 + (1 + 0.5 + 0.5 + 0) / 4) / 2


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        ([[0, 1], [0, 2]], [1, 1], (1.0, 1.0, UNDEFINED)),  # one class: no pairs
        ([[0, 1], [1, 0]], [1, 1], ((2 / 3 + 0) / 2, 0.5, UNDEFINED)),
        ([[0, 1], [1, 0]], [1, 0], (1.0, 1.0, 1.0)),
        ([[1, 0], [0, 1]], [1, 0], (0.0, 0.0, 0.0)),
        ([[0, 0], [0, 0]], [1, 0], ((0 + 2 / 3) / 2, 0.5, 0.5)),  # all equal: argmax is class 0
        ([[NAN, NAN], [NAN, NAN]], [1, 0], (0.0, 0.0, 0.0)),  # argmax would be right of one of them
        ([[0, INF], [1, 0]], [1, 0], ((0 + 1) / 2, 0.5, 0.0)),
        ([[0, 1], [NAN, 0]], [1, 0], ((1 + 0) / 2, 0.5, 0.0)),
        ([[0, 1, 0], [NAN, 0, 0], [1, 0, 0]], [1, 0, 0], ((1 + 2 / 3) / 2, 0.75, 0.5)),
        (
            [[0, 60], [0, 50], [0, 40]],
            [1, 0, 0],
            ((2 / 4 + 0) / 2, 0.5, 1.0),
        ),  # in float64 all three have probability 1
        (
            [[-1e308, 1e308], [1e308, -1e308], [0, 1]],
            [1, 0, 1],
            (1.0, 1.0, 1.0),
        ),  # the difference is more than there is room for,
        ([[-1e308, 1e308], [NAN, 0]], [1, 0], ((1 + 0) / 2, 0.5, 0.0)),  # and still not as much as the worst
    ],
)
def test_edge_cases_by_hand(
    logits: list[list[float]], labels: list[int], expected: tuple[float, ...]
) -> None:
    assert tuple(tally_of(logits, labels).values()) == pytest.approx(expected, abs=1e-15)
    assert [SLOW[name](logits, labels) for name in METRICS] == pytest.approx(expected, abs=1e-15)


def test_more_outputs_than_classes() -> None:
    """Class 4 is told, so it counts in F1; only classes of the data are ranked, by a softmax over all
    outputs."""
    logits = [[2.0, 0, 0, 0, 0], [0, 1, 0, 0, 3], [0, 2, 0, 0, 0], [1, 0, 0, 0, 0]]
    got = tally_of(logits, [0, 0, 1, 1], classes=2)
    assert got == pytest.approx({name: slow(logits, [0, 0, 1, 1]) for name, slow in SLOW.items()}, abs=1e-15)
    assert got["macro_f1"] == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)


# ---- all ways of measuring, over random data


COUNTS = [7, 0, 30, 1, 5, 9, 3, 12, 24]
PATHS = {
    "one by one": (LOOP, torch.arange(9)),
    "by model": (VMAP, torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 0])),
    "stacked": (VMAP, torch.arange(9)),
    "stacked in chunks": (Plan("vmap", rows=3), torch.arange(9).flip(0)),
}


def rounded(net: nn.Module, x: Tensor, aux: Mapping[str, Tensor]) -> Tensor:
    """Coarse answers, so that many are equal, and some that are none: whatever the path, the same bits."""
    logits = (net(x) * 4).round()
    return torch.where(x[..., :1] > 1.5, torch.nan, logits)


def world(classes: int) -> tuple[Network, Any, Any]:
    samples = random_samples(sum(COUNTS), classes=classes)
    data = deal(samples, COUNTS)
    data.labels[4] = 1  # a client with one class
    return network_of(lambda: nn.Linear(3, classes)), samples, data


def reference(
    network: Network, bank: Tensor, which: Tensor, samples: Any, data: Any
) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {name: [] for name in METRICS}
    for i, count in enumerate(COUNTS):
        module = network.load(bank[which[i]], dtype=torch.float64)
        with torch.no_grad():
            logits = rounded(module, samples.batch(data.rows[i, :count], torch.float64), {}).tolist()
        for name, slow in SLOW.items():
            out[name].append(slow(logits, data.labels[i, :count].tolist()))
    return out


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("kept", [1 << 20, 60, 1])
def test_all_paths_equal_plain_python(
    path: str, classes: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_SAMPLES_AT_ONCE", {"cpu": 8})
    monkeypatch.setattr(evaluate, "_ANSWERS_KEPT", {"cpu": kept})
    (network, samples, data), (plan, which) = world(classes), PATHS[path]
    bank = starts(network, int(which.max()) + 1)
    got = score(network, rounded, bank, which, samples, data, plan, None, METRICS)
    expected = reference(network, bank, which, samples, data)
    assert list(got.more) == list(METRICS) and got.total.tolist() == COUNTS
    for name in METRICS:
        assert got.more[name].tolist() == pytest.approx(expected[name], abs=1e-14), name
    assert got.more["auc"][[1, 3, 4]].tolist() == [UNDEFINED] * 3 and got.more["macro_f1"][1] == UNDEFINED
    assert (got.more["auc"][[0, 2, 5, 8]] >= 0).all()


def test_further_metrics_do_not_change_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    network, samples, data = world(5)
    for plan, which in PATHS.values():
        bank = starts(network, int(which.max()) + 1)
        plain = score(network, rounded, bank, which, samples, data, plan)
        asked = score(network, rounded, bank, which, samples, data, plan, None, ["auc"])
        assert plain.more == {} and list(asked.more) == ["auc"]
        assert torch.equal(plain.correct, asked.correct) and torch.equal(
            plain.loss.nan_to_num(), asked.loss.nan_to_num()
        )


def test_an_area_is_exact_however_many_pairs_there_are() -> None:
    """30,000 samples in order but for one equal pair: nothing is binned, nothing is rounded on the way."""
    n = 30_000
    labels = (torch.arange(n) >= n // 2).long()
    scores = torch.arange(n, dtype=torch.float64)
    scores[n // 2] = scores[n // 2 - 1]
    data = deal(samples_of(torch.zeros(n, 1), labels), [n])
    tally = AnswerCounts(data, 2, ("auc",))
    for start in range(0, n, 7001):
        part = scores[start : start + 7001]
        tally.add(0, slice(start, start + len(part)), torch.stack([-part, part], 1))
    pairs = (n // 2) ** 2
    assert float(tally.score().more["auc"]) == float(Fraction(2 * pairs - 1, 2 * pairs)) < 1


def test_portions_cover_all_clients_within_the_bound() -> None:
    def portions(count: list[int], most: int) -> list[tuple[int, int]]:
        return [
            (p.start, p.stop) for p in evaluate._portions(torch.tensor(count, dtype=torch.int64), 2, most)
        ]

    assert portions([3, 3, 3], 100) == [(0, 3)] and portions([], 100) == [(0, 0)]
    assert portions([3, 3, 3], 12) == [(0, 2), (2, 3)]
    assert portions([1, 1, 9, 1, 1], 12) == [
        (0, 2),
        (2, 3),
        (3, 5),
    ]  # the long one alone, although it is too long
    assert portions([0, 0, 0], 1) == [(0, 3)]


def test_no_clients_and_clients_without_samples() -> None:
    network, samples, data = world(3)
    nobody = type(data)(data.rows[:0], data.labels[:0], data.count[:0])
    empty = type(data)(data.rows[1:2], data.labels[1:2], data.count[1:2])
    for plan in (LOOP, VMAP):
        got = score(
            network,
            rounded,
            starts(network, 1),
            torch.zeros(0, dtype=torch.int64),
            samples,
            nobody,
            plan,
            None,
            METRICS,
        )
        assert all(len(value) == 0 for value in got.more.values())
        got = score(
            network,
            rounded,
            starts(network, 1),
            torch.zeros(1, dtype=torch.int64),
            samples,
            empty,
            plan,
            None,
            METRICS,
        )
        assert [value.tolist() for value in got.more.values()] == [[UNDEFINED]] * 3


def test_scores_are_joined_client_by_client() -> None:
    one = Score(torch.tensor([1]), torch.tensor([2.0]), torch.tensor([3]), {"auc": torch.tensor([0.5])})
    two = Score(
        torch.tensor([4, 5]),
        torch.tensor([6.0, 7.0]),
        torch.tensor([8, 9]),
        {"auc": torch.tensor([-1.0, 1.0])},
    )
    both = Score.joined([one, two])
    assert (
        both.correct.tolist() == [1, 4, 5]
        and both.loss.tolist() == [2, 6, 7]
        and both.total.tolist() == [3, 8, 9]
    )
    assert both.more["auc"].tolist() == [0.5, -1, 1]


# ---- whole runs


ASKED: dict[str, Any] = {
    "evaluate": {"metrics": list(METRICS)},
    "data": {"split": {"train": 0.5, "validation": 0.25, "test": 0.25}},
}


def by_hand(run: Run, table: str, model: str) -> dict[str, list[float]]:
    """Each client's figures with the exported model."""
    federation, out = run._experiment.federation, {name: [] for name in METRICS}
    for client in range(federation.clients):
        rows, labels = getattr(federation, table).client(client)
        with torch.no_grad():
            logits = (
                run.model(client=client, model=model)
                .double()(federation.samples.batch(rows, torch.float64))
                .tolist()
            )
        for name, slow in SLOW.items():
            out[name].append(slow(logits, labels.tolist()))
    return out


@pytest.mark.parametrize("plan", ["loop", "vmap"])
def test_a_run_has_the_metrics_per_client_and_in_its_result(plan: str, simulate: Callable[..., Run]) -> None:
    run = simulate(method="ditto", **ASKED, engine={"plan": plan, "threads": 1})
    final, frame = run.final, run.clients()
    for prefix, table in (("", "test"), ("validation/", "validation")):
        for model in ("global", "personal"):
            for name, values in by_hand(run, table, model).items():
                known = [value for value in values if value >= 0]
                assert final[f"{prefix}{name}/{model}"] == pytest.approx(sum(known) / len(known))
                if table == "test":
                    assert frame[f"{name}/{model}"].tolist() == pytest.approx(
                        [v if v >= 0 else NAN for v in values], nan_ok=True
                    )
                if model == "personal":  # the deployed one
                    worst = sorted(known)[0]
                    mean = final[f"{prefix}{name}"]
                    assert mean == final[f"{prefix}{name}/{model}"] and final[
                        f"{prefix}{name}/worst10"
                    ] == pytest.approx(worst)
                    spread = (sum((v - mean) ** 2 for v in known) / len(known)) ** 0.5
                    assert final[f"{prefix}{name}/std"] == pytest.approx(spread) and final[
                        f"{prefix}{name}/clients"
                    ] == len(known)
    assert final["auc/customised"] is None and run.metrics["macro_f1"].notna().all()
    assert (
        final["accuracy"]
        == simulate(method="ditto", data=ASKED["data"], engine={"plan": plan, "threads": 1}).final["accuracy"]
    )


def test_plans_and_fused_runs_agree(
    simulate: Callable[..., Run], simulate_all: Callable[..., list[Run]]
) -> None:
    tables = [
        {"method": "ditto", **ASKED, "seed": seed, "train": {"lr": 0.1 * (seed + 1)}} for seed in range(3)
    ]
    loop = [simulate(**table, engine={"plan": "loop", "threads": 1}) for table in tables]
    for one, fused, alone in zip(
        loop, simulate_all(tables), map(lambda t: simulate(**t), tables), strict=True
    ):
        assert "2/evaluate/validation/personal/auc" in everything(fused)
        assert_same(everything(one), everything(fused), 1e-10)
        assert_same(everything(one), everything(alone), 1e-10)


def test_clients_of_one_class_have_no_auc(simulate: Callable[..., Run]) -> None:
    one_class = {"partition": {"name": "pathological", "classes_per_client": 1}}
    run = simulate(data=one_class, evaluate={"metrics": ["auc", "balanced_accuracy"]})
    assert run.final["auc"] is None and run.final["auc/global"] is None and run.final["auc/clients"] == 0
    assert (
        run.final["balanced_accuracy"] == pytest.approx(run.final["accuracy"]) and "macro_f1" not in run.final
    )
    assert run.clients()["auc/global"].isna().all()


def test_metrics_that_were_not_asked_for_are_absent(simulate: Callable[..., Run]) -> None:
    run = simulate()
    assert not [name for name in run.final if name.split("/")[0] in METRICS]
    assert not [name for name in run.store.arrays(2) if name.split("/")[-1] in METRICS]


def test_malicious_clients_do_not_count(simulate: Callable[..., Run], forget: None) -> None:
    from holdfast.attacks.base import Attack

    run = simulate(attack=Attack(clients=(1, 3)), evaluate={"metrics": ["macro_f1"]})
    values = run.clients()["macro_f1/global"]
    assert (
        run.final["macro_f1"] == pytest.approx(values[[0, 2, 4]].mean())
        and run.final["macro_f1/clients"] == 3
    )


def test_broken_models_are_wrong(simulate: Callable[..., Run]) -> None:
    """A learning rate that explodes: screening keeps the last good model, and a client's own broken one
    counts as wrong."""
    run = simulate(method="local", train={"lr": 1e200, "rounds": 3}, evaluate={"metrics": list(METRICS)})
    assert (
        run.final["accuracy"]
        == run.final["macro_f1"]
        == run.final["balanced_accuracy"]
        == run.final["auc"]
        == 0.0
    )


def test_the_order_of_portions_does_not_matter() -> None:
    """The same answers in any portions, told by client or by sample."""
    network, samples, data = world(5)
    logits = Key(3).normal(*data.rows.shape, 5, dtype=torch.float64)
    whole = AnswerCounts(data, 5, METRICS)
    whole.add(slice(0, 9), slice(0, 30), logits)
    pieces = AnswerCounts(data, 5, METRICS)
    clients, places = data.mask.nonzero(as_tuple=True)
    order = Key(4).uniform(len(clients)).argsort()
    for part in order.split(11):
        pieces.add(clients[part], places[part], logits[clients[part], places[part]])
    a, b = whole.score(), pieces.score()
    assert torch.equal(a.correct, b.correct) and all(
        torch.equal(a.more[name], b.more[name]) for name in METRICS
    )
    torch.testing.assert_close(a.loss, b.loss, rtol=0, atol=1e-12)
