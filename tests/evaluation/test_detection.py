"""Weights, scores and bans against the truth, by hand."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.detectors.base import Detector, Judgement
from holdfast.evaluation.detection import JudgedRound, auc, of_rounds
from holdfast.results.run import Run

NAN = float("nan")


@pytest.mark.parametrize(
    ("suspicion", "malicious", "area"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 1, 1, 1], [0, 0, 1, 1], 0.5),
        ([1, 3, 2, 3], [0, 0, 1, 1], (1 + 0 + 1 + 0.5) / 4),
        ([NAN, 3, 2, 3], [0, 0, 1, 1], (0 + 0.5) / 2),
        ([1, 2], [1, 1], None),
        ([NAN, 2], [0, 1], None),
    ],
)
def test_auc_by_hand(suspicion: list[float], malicious: list[int], area: float | None) -> None:
    assert auc(torch.tensor(suspicion), torch.tensor(malicious).bool()) == area


def judged_round(
    round: int, malicious: list[int], banned: dict[str, str], weights: list[float], score: list[float]
) -> JudgedRound:
    arrays = {
        "verdict/ids": torch.arange(4),
        "verdict/weights": torch.tensor(weights),
        "verdict/scores/norm/length": torch.tensor(score),
    }
    return JudgedRound.of({"round": round, "banned": banned}, arrays, torch.tensor(malicious))


ROUNDS = [
    judged_round(1, [2, 3], {"3": "long"}, [0.5, 0.5, 0.0, 0.0], [1.0, 2.0, 1.5, 9.0]),
    judged_round(2, [2, 3], {"0": "long"}, [0.0, 0.5, 0.5, 0.0], [5.0, 1.0, 1.0, NAN]),
    judged_round(5, [2, 3], {"2": "long"}, [0.25] * 4, [0.0] * 4),
]


def test_figures_of_a_run() -> None:
    """Areas: weights 1, 1/2 and 1/2; lengths 3/4, 1/4 and 1/2. Clients 3 and 2 are caught in rounds 1 and
    5."""
    figures = of_rounds(ROUNDS)
    assert figures["detection/auc/weights"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert figures["detection/auc/norm/length"] == pytest.approx((0.75 + 0.25 + 0.5) / 3)
    assert figures["detection/rounds"] == 3.0 and "detection/dacc" not in figures


def test_decisions_where_attackers_change() -> None:
    """12 decisions, 6 on attackers: two of them caught, one benign client wronged."""
    figures = of_rounds(ROUNDS, decide=True)
    assert figures["detection/dacc"] == pytest.approx(7 / 12) and figures["detection/fpr"] == pytest.approx(
        1 / 6
    )
    assert figures["detection/fnr"] == pytest.approx(4 / 6)


def test_without_attackers_figures_are_null() -> None:
    assert of_rounds([]) == {"detection/auc/weights": None, "detection/rounds": None}
    assert of_rounds([], decide=True)["detection/dacc"] is None
    assert of_rounds([judged_round(1, [], {"0": "long"}, [0.25] * 4, [1.0] * 4)])["detection/rounds"] is None


class Longest(Detector):
    """Bans the client whose model lies farthest from the others; tells how far each does."""

    def judge(self, state: Any, ctx: Any, models: Tensor, ids: Tensor) -> Generator[Any, Any, Judgement]:
        yield from ()
        far = (models - models.median(0).values).norm(dim=1)
        return Judgement(state, {int(ids[far.argmax()]): "farthest"}, {"far": far})


def test_detection_figures_of_a_run_under_attack(simulate: Callable[..., Run]) -> None:
    """Attackers 1 and 3 go in the first two rounds, a benign client in the third, in which there is nothing
    to tell any more."""
    attack = {"name": "sign-flip", "scale": 100.0, "clients": (1, 3)}
    final = simulate(attack=attack, detectors=(Longest(),), train={"rounds": 3}).final
    assert final[f"detection/auc/{Longest.name}/far"] == 1.0 and final["detection/rounds"] == 1.5
    assert (final["detection/dacc"], final["detection/fpr"], final["detection/fnr"]) == (
        0.8,
        pytest.approx(1 / 3),
        0.0,
    )
    assert simulate(detectors=(Longest(),)).final["detection/auc/weights"] is None  # nobody attacks


def test_in_a_run_with_other_attackers_every_round(simulate: Callable[..., Run]) -> None:
    """One of five attacks per round and the farthest is banned, so nobody benign is, as long as the attacker
    drawn is not out already."""
    run = simulate(
        attack={"name": "sign-flip", "scale": 100.0, "fraction": 0.2, "redraw": True}, detectors=(Longest(),)
    )
    bad = good = caught = wronged = 0
    for part in run.store.parts(2):
        arrays = run.store.arrays(part["round"])
        (attacker,), banned = arrays["malicious"].tolist(), {int(client) for client in part["banned"]}
        asked = set(arrays["verdict/ids"].tolist())
        bad, good = bad + len(asked & {attacker}), good + len(asked - {attacker})
        caught, wronged = caught + len(banned & {attacker}), wronged + len(banned - {attacker})
    assert bad + good == 9 and run.final["detection/dacc"] == pytest.approx((caught + good - wronged) / 9)
    assert run.final["detection/fnr"] == pytest.approx((bad - caught) / bad) and run.final[
        "detection/fpr"
    ] == pytest.approx(wronged / good)
