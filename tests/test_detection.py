"""Weights, scores and bans against the truth, by hand."""

from __future__ import annotations

import pytest
import torch

from holdfast.detection import Seen, auc, of_rounds

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


def seen(round: int, malicious: list[int], banned: dict[str, str], weights: list[float], score: list[float]) -> Seen:
    arrays = {"verdict/ids": torch.arange(4), "verdict/weights": torch.tensor(weights), "verdict/scores/norm/length": torch.tensor(score)}
    return Seen.of({"round": round, "banned": banned}, arrays, torch.tensor(malicious))


ROUNDS = [
    seen(1, [2, 3], {"3": "long"}, [0.5, 0.5, 0.0, 0.0], [1.0, 2.0, 1.5, 9.0]),
    seen(2, [2, 3], {"0": "long"}, [0.0, 0.5, 0.5, 0.0], [5.0, 1.0, 1.0, NAN]),
    seen(5, [2, 3], {"2": "long"}, [0.25] * 4, [0.0] * 4),
]


def test_figures_of_a_run() -> None:
    """Areas: weights 1, 1/2 and 1/2; lengths 3/4, 1/4 and 1/2. Clients 3 and 2 are caught in rounds 1 and 5."""
    figures = of_rounds(ROUNDS)
    assert figures["detection/auc/weights"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert figures["detection/auc/norm/length"] == pytest.approx((0.75 + 0.25 + 0.5) / 3)
    assert figures["detection/rounds"] == 3.0 and "detection/dacc" not in figures


def test_decisions_where_attackers_change() -> None:
    """12 decisions, 6 on attackers: two of them caught, one benign client wronged."""
    figures = of_rounds(ROUNDS, decide=True)
    assert figures["detection/dacc"] == pytest.approx(7 / 12) and figures["detection/fpr"] == pytest.approx(1 / 6)
    assert figures["detection/fnr"] == pytest.approx(4 / 6)


def test_nothing_to_tell() -> None:
    assert of_rounds([]) == {"detection/auc/weights": None, "detection/rounds": None}
    assert of_rounds([], decide=True)["detection/dacc"] is None
    assert of_rounds([seen(1, [], {"0": "long"}, [0.25] * 4, [1.0] * 4)])["detection/rounds"] is None
