"""Class means of features: the same by every plan, and equal to a slow reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.evaluation import evaluate
from holdfast.evaluation.prototypes import averaged, prototypes
from holdfast.local.plan import Plan
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.network import Network
from tests.helpers import LOOP, VMAP, deal, random_samples, starts

COUNTS = [7, 0, 30, 1, 5]
SAMPLES = random_samples(43)
DATA = deal(SAMPLES, COUNTS)
NETWORK = Network(
    lambda: BackboneHead(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh()), nn.Linear(4, 3)
    ),
    signature="test prototypes",
    dtype=torch.float64,
)


@pytest.mark.parametrize("plan", [LOOP, VMAP, Plan("vmap", rows=2)], ids=["loop", "vmap", "chunks"])
@pytest.mark.parametrize("at_once", [1024, 3])
@pytest.mark.parametrize("head", ["head", None])
def test_every_plan_equals_a_slow_reference(
    plan: Plan, at_once: int, head: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_SAMPLES_AT_ONCE", {"cpu": at_once})
    models = starts(NETWORK, 5)
    got = prototypes(NETWORK, models, SAMPLES, DATA, plan, head)
    for i, count in enumerate(COUNTS):
        net = NETWORK.load(models[i], torch.float64).eval()
        x, y = SAMPLES.batch(DATA.rows[i, :count], torch.float64), DATA.labels[i, :count]
        with torch.no_grad():
            found = net(x) if head is None else net.backbone(x)
        for c in range(3):
            mine = found[y == c]
            assert int(got.counts[i, c]) == len(mine)
            expected = mine.mean(0) if len(mine) else torch.zeros(found.shape[1], dtype=torch.float64)
            torch.testing.assert_close(got.means[i, c], expected, rtol=0, atol=1e-12)
            assert float(got.squares[i, c]) == pytest.approx(
                float(mine.square().sum()) / max(1, len(mine)), abs=1e-12
            )
    assert NETWORK.module.training  # as it was found


def test_clients_without_any_sample_have_zeros_of_the_right_width() -> None:
    got = prototypes(NETWORK, starts(NETWORK, 2), SAMPLES, deal(SAMPLES, [0, 0]), LOOP, "head")
    assert got.means.shape == (2, 3, 4) and not got.means.any() and not got.counts.any()


@pytest.mark.parametrize(("weighting", "expected"), [("equal", 2.0), ("samples", 1.5)])
def test_means_are_over_the_clients_that_hold_a_class(weighting: str, expected: float) -> None:
    """Client 0 holds three samples of class 0, client 1 one; nobody holds class 1, which keeps what it had,
    known or not."""
    means, held = torch.tensor([[[1.0], [7.0]], [[3.0], [8.0]]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    mean, known = averaged(means, held, weighting, torch.tensor([[0.0], [5.0]]), torch.tensor([0.0, 0.0]))
    assert mean.tolist() == [[expected], [5.0]] and known.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("weighting", ["equal", "samples"])
def test_the_mean_of_the_largest_numbers_is_a_number(weighting: str) -> None:
    """Prototypes that screening lets pass must not become infinite by adding them up."""
    means, held = torch.full((4, 1, 2), 3e38), torch.full((4, 1), 1e9)
    mean, _ = averaged(means, held, weighting, torch.zeros(1, 2), torch.zeros(1))
    torch.testing.assert_close(mean, torch.full((1, 2), 3e38))
