"""DP-SGD: clipped and noised gradients of single samples, against a slow loop and Opacus, on every plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.core.errors import ConfigError
from holdfast.local.fit import Recipe, fit
from holdfast.local.plan import Plan
from holdfast.models.network import Network
from tests.helpers import LOOP, PLANS, client_keys, deal, network_of, random_samples, slow_fit, starts

every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
COUNTS = [7, 5, 12]
CLIPS = torch.tensor([0.3, 1.0, 1e6], dtype=torch.float64)
RECIPE = Recipe(
    lr=0.2, epochs=2, batch_size=5, momentum=0.5, weight_decay=0.01, sample_clip=CLIPS, sample_noise=0.0
)
DENSE = network_of(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)))
IMAGES = network_of(
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
)


def trained(network: Network, recipe: Recipe, plan: Plan, copies: int = 1, seed: int = 0) -> Tensor:
    samples = random_samples(24, (2, 4, 4) if network is IMAGES else (3,))
    model = starts(network, len(COUNTS)).repeat(copies, 1)
    return fit(network, model, samples, deal(samples, COUNTS), client_keys(3, seed), recipe, plan).model


def clipped_by_hand(net: nn.Module, x: Tensor, y: Tensor, clip: float) -> Tensor:
    """A value whose gradient is the mean of the samples' clipped gradients, one sample after the other."""
    params, total = list(net.parameters()), [torch.zeros_like(p) for p in net.parameters()]
    for i in range(len(x)):
        grads = torch.autograd.grad(cross_entropy(net(x[i : i + 1]), y[i : i + 1]), params)
        length = float(sum((g**2).sum() for g in grads)) ** 0.5
        total = [t + g * min(1.0, clip / length) / len(x) for t, g in zip(total, grads, strict=True)]
    return torch.stack([(p * t).sum() for p, t in zip(params, total, strict=True)]).sum()


@every_plan
@pytest.mark.parametrize("network", [DENSE, IMAGES], ids=["dense", "images"])
def test_without_noise_it_is_a_slow_loop_over_samples(network: Network, plan: Plan) -> None:
    samples = random_samples(24, (2, 4, 4) if network is IMAGES else (3,))
    data, model, by_hand = deal(samples, COUNTS), starts(network, 3), []
    for row in range(3):

        def loss(net: nn.Module, x: Tensor, y: Tensor, clip: float = float(CLIPS[row])) -> Tensor:
            return clipped_by_hand(net, x, y, clip)

        by_hand.append(slow_fit(network, model, samples, data, client_keys(3), RECIPE, loss=loss)[row])
    assert (trained(network, RECIPE, plan) - torch.stack(by_hand)).abs().max() < 1e-10


@every_plan
def test_a_clip_that_nothing_reaches_is_plain_training(plan: Plan) -> None:
    plain = trained(DENSE, replace(RECIPE, sample_clip=None), plan)
    for clip in (1e9, float("inf")):
        assert (trained(DENSE, replace(RECIPE, sample_clip=clip), plan) - plain).abs().max() < 1e-10


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("network", [DENSE, IMAGES], ids=["dense", "images"])
def test_without_noise_it_is_opacus(network: Network) -> None:
    """Opacus adds 1e-6 to the norm before it divides by it: losses a million times larger, with a learning
    rate as much smaller, make that negligible."""
    opacus = pytest.importorskip("opacus", reason="compared with Opacus: pip install 'holdfast[privacy]'")
    from opacus.optimizers import DPOptimizer

    million, alive = 1e6, []
    samples = random_samples(20, (2, 4, 4) if network is IMAGES else (3,))
    data, model = deal(samples, [10, 5, 5]), starts(network, 3)  # whole batches: Opacus divides by their size

    def optimiser(net: nn.Module, row: int) -> Any:
        alive.append(opacus.GradSampleModule(net))
        sgd = torch.optim.SGD(net.parameters(), lr=0.2 / million, momentum=0.5, weight_decay=0.01 * million)
        return DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=0.3 * million, expected_batch_size=5)

    theirs = slow_fit(
        network,
        model,
        samples,
        data,
        client_keys(3),
        RECIPE,
        loss=lambda net, x, y: million * cross_entropy(net(x), y),
        optimiser_of=optimiser,
    )
    recipe = replace(
        RECIPE,
        lr=0.2 / million,
        weight_decay=0.01 * million,
        sample_clip=0.3 * million,
        loss=lambda net, batch: million * cross_entropy(net(batch.x), batch.y, reduction="none"),
    )
    ours = fit(network, model, samples, data, client_keys(3), recipe, LOOP).model
    assert (ours - theirs).abs().max() < 1e-10
    assert (theirs - model).abs().max() > 0.01


@every_plan
def test_noise_is_the_same_on_every_plan_and_differs_between_models_clients_and_seeds(plan: Plan) -> None:
    noisy = replace(RECIPE, sample_noise=torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64))
    one, two = trained(DENSE, noisy, plan), trained(DENSE, noisy, plan, copies=2)
    assert (one - trained(DENSE, noisy, LOOP)).abs().max() < 1e-10
    assert (two[:3] - one).abs().max() < 1e-10
    moved = (two[3:] - one).abs().amax(1)
    assert moved[1] < 1e-10 and moved[0] > 0.01 < moved[2]  # the second client has no noise
    secret = replace(noisy, noise_key=torch.tensor([1, 2, 3]))
    assert (trained(DENSE, secret, plan) - one).abs().amax(1)[[0, 2]].min() > 0.01


def test_noise_has_the_deviation_that_is_asked_for() -> None:
    """One step on a batch of five, without a gradient: the noise is sigma / 5 for each of 10,000 numbers."""
    network = network_of(lambda: nn.Linear(99, 101))
    samples = random_samples(5, (99,), classes=101)
    recipe = Recipe(lr=1.0, epochs=1, batch_size=5, sample_clip=1e-9, sample_noise=3.0)
    start = starts(network, 1)
    moved = fit(network, start, samples, deal(samples, [5]), client_keys(1), recipe, LOOP).model - start
    assert abs(float(moved.std()) - 0.6) < 8 * 0.6 / (2 * moved.numel()) ** 0.5
    assert abs(float(moved.mean())) < 8 * 0.6 / moved.numel() ** 0.5


@every_plan
def test_every_sample_has_its_own_dropout(plan: Plan) -> None:
    network = network_of(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    ours = trained(network, RECIPE, plan)
    assert (ours - trained(network, RECIPE, LOOP)).abs().max() < 1e-10
    samples = random_samples(2)
    samples.x[1], samples.y[1] = samples.x[0], samples.y[0]
    start, one = starts(network, 1), replace(RECIPE, sample_clip=1e6, batch_size=2, epochs=1, momentum=0.0)
    pair = fit(network, start, samples, deal(samples, [2]), client_keys(1), one, plan).model
    single = fit(network, start, samples, deal(samples, [1]), client_keys(1), one, plan).model
    assert not torch.equal(pair, single)  # with one mask for both samples they would be equal


def test_a_step_of_the_methods_own_is_refused() -> None:
    samples = random_samples(4)
    with pytest.raises(ConfigError, match="takes steps of its own"):
        fit(
            DENSE,
            starts(DENSE, 1),
            samples,
            deal(samples, [4]),
            client_keys(1),
            replace(RECIPE, sample_clip=1.0),
            LOOP,
            step=lambda gradient, params, batch, lr: params,
        )
