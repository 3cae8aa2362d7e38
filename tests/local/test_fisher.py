"""Fisher information by hand and by every plan.

The model has two numbers: f = b x, logits (h f, 0). With b = 1, h = ln 3, x = 1 the first class has probability 3/4: d loss / d (h f) is
-1/4 for label 0 and 3/4 for label 1, so the squared length of a sample's gradient is q/16 or 9q/16 with q = 1 + (ln 3)^2.


"""  # noqa: E501

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.local.fisher import Definition, diagonal, trace
from holdfast.local.plan import Plan
from holdfast.local.stack import Recipe
from holdfast.models.network import Network
from tests.helpers import LOOP, PLANS, VMAP, deal, network_of, random_samples, samples_of, starts


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.b(x))
        return torch.cat([z, torch.zeros_like(z)], 1)


Q = 1 + math.log(3) ** 2
TWO = network_of(Two)
MODEL = torch.tensor([[1.0, math.log(3)]] * 3, dtype=torch.float64)
SAMPLES = samples_of(torch.ones(4, 1), torch.tensor([0, 1, 1, 0]))
DATA = deal(SAMPLES, [3, 1, 0])  # client 0: labels 0, 1, 1; client 1: label 0; client 2 has nothing
every_plan = pytest.mark.parametrize("plan", [*PLANS.values(), Plan("vmap", rows=1)], ids=[*PLANS, "chunks"])


@every_plan
@pytest.mark.parametrize(
    ("of", "drop_last", "expected"),
    [
        ("batch-sum", False, [10 / 16, 1 / 16, 0]),  # {0, 1}: mean 1/4; {1}: 3/4
        ("batch-sum", True, [1 / 16, 0, 0]),  # a client with less than a batch has none
        ("batch-mean", False, [5 / 16, 1 / 16, 0]),
        ("batch-mean", True, [1 / 16, 0, 0]),
        ("per-sample", True, [19 / 48, 1 / 16, 0]),  # (1 + 9 + 9) / 3 sixteenths; every sample counts
        ("full", True, [25 / 16, 1 / 16, 0]),  # (-1 + 3 + 3) / 4: the log-likelihood of all labels is a sum
        ("full-mean", True, [25 / 144, 1 / 16, 0]),  # a third of that gradient
    ],
)
def test_by_hand(plan: Plan, of: Definition, drop_last: bool, expected: list[float]) -> None:
    recipe = Recipe(
        batch_size=2, drop_last=drop_last, shuffle=True
    )  # batches are those of the data's order all the same
    got = trace(TWO, MODEL, SAMPLES, DATA, recipe, plan, of)
    torch.testing.assert_close(got, Q * torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)
    each = diagonal(TWO, MODEL, SAMPLES, DATA, recipe, plan, of)
    torch.testing.assert_close(
        each, got[:, None] / Q * torch.tensor([Q - 1, 1.0], dtype=torch.float64), rtol=0, atol=1e-14
    )


def rich() -> nn.Module:
    net = nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 3)
    )
    net[4].requires_grad_(False)
    return net


@pytest.mark.parametrize("of", ["batch-sum", "batch-mean", "per-sample", "full", "full-mean"])
def test_plans_equal_plain_autograd_in_evaluation_mode(of: Definition) -> None:
    """BatchNorm by its running statistics, no Dropout, frozen layers left out, buffers 0."""
    network, samples, counts = network_of(rich), random_samples(40), [11, 0, 4, 25]
    data, models = deal(samples, counts), starts(network, 4)
    models[:, network.layout.under("1.running_mean")] = 0.3
    before = models.clone()
    got = [diagonal(network, models, samples, data, Recipe(batch_size=4), plan, of) for plan in (LOOP, VMAP)]
    torch.testing.assert_close(got[0], got[1], rtol=0, atol=1e-12)
    for i, count in enumerate(counts):
        expected = slow_diagonal(
            network, models[i], samples.batch(data.rows[i, :count], torch.float64), data.labels[i, :count], of
        )
        torch.testing.assert_close(got[0][i], expected, rtol=0, atol=1e-12)
        total = trace(network, models, samples, data, Recipe(batch_size=4), LOOP, of)[i]
        torch.testing.assert_close(total, expected.sum(), rtol=0, atol=1e-12)
    assert torch.equal(models, before) and network.module.training


def slow_diagonal(network: Network, vector: Tensor, x: Tensor, y: Tensor, of: str) -> Tensor:
    net = network.load(vector, torch.float64).eval()
    free = [p for p in net.parameters() if p.requires_grad]
    names = [n for n, p in net.named_parameters() if p.requires_grad]
    size = {"per-sample": 1, "full": max(1, len(y)), "full-mean": max(1, len(y))}.get(of, 4)
    total = {
        name: torch.zeros(s.shape, dtype=torch.float64)
        for name, s in ((s.name, s) for s in network.layout.slots)
    }
    batches = list(zip(x.split(size), y.split(size), strict=True)) if len(y) else []
    for xs, ys in batches:
        grads = torch.autograd.grad(
            F.cross_entropy(net(xs), ys, reduction="sum" if of == "full" else "mean"), free
        )
        for name, grad in zip(names, grads, strict=True):
            total[name] += grad.square() / (len(batches) if of in ("batch-mean", "per-sample") else 1)
    return network.layout.flatten(total)
