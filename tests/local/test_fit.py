from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.data.federation import Padded
from holdfast.evaluation.evaluate import score
from holdfast.local.augment import Augment
from holdfast.local.fit import Recipe, fit
from holdfast.local.losses import Batch
from holdfast.local.plan import Plan
from tests.helpers import (
    LOOP,
    PLANS,
    VMAP,
    client_keys,
    deal,
    network_of,
    random_samples,
    samples_of,
    slow_fit,
    starts,
    train,
)

COUNTS = [7, 2, 12, 5]
RECIPE = Recipe(lr=0.1, epochs=2, batch_size=5)
both_plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def line() -> nn.Module:
    return nn.Linear(2, 1, bias=False)


def squared(net: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (net(batch.x)[:, 0] - batch.y) ** 2


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


@pytest.fixture(scope="module")
def samples() -> Any:
    return random_samples(60)


# ---- by hand: one client, w = (1, 2), samples (1, 1) -> 0 and (2, 0) -> 1
# residuals 3 and 1, gradient the mean of (3, 3) and (2, 0): (2.5, 1.5)
HAND = samples_of(torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.tensor([0, 1]))
W = torch.tensor([[1.0, 2.0]], dtype=torch.float64)


def by_hand(plan: Plan, start: Tensor = W, recipe: dict[str, Any] | None = None, **options: Any) -> Tensor:
    chosen = Recipe(**{"lr": 0.1, "batch_size": 2, "loss": squared, **(recipe or {})})
    return train(network_of(line), start, HAND, deal(HAND, [2]), chosen, plan, **options).model


def close(got: Tensor, *rows: tuple[float, ...]) -> None:
    torch.testing.assert_close(got, torch.tensor(rows, dtype=torch.float64), rtol=0, atol=1e-12)


@both_plans
def test_one_step_by_hand(plan: Plan) -> None:
    close(by_hand(plan), (0.75, 1.85))


@both_plans
def test_loss_is_the_mean_over_steps(plan: Plan) -> None:
    fitted = train(
        network_of(line), W, HAND, deal(HAND, [2]), Recipe(lr=0.1, epochs=2, batch_size=2, loss=squared), plan
    )
    # losses (4.5 + 0.5) / 2 = 2.5, then residuals 2.6 and 0.5: (3.38 + 0.125) / 2 = 1.7525
    close(fitted.loss, 2.12625) if fitted.loss.ndim == 0 else close(fitted.loss[None], (2.12625,))
    assert fitted.steps.tolist() == [2]


@both_plans
def test_weight_decay(plan: Plan) -> None:
    close(by_hand(plan, recipe={"weight_decay": 0.5}), (0.75 - 0.1 * 0.5 * 1, 1.85 - 0.1 * 0.5 * 2))


@both_plans
def test_momentum(plan: Plan) -> None:
    # second step from (0.75, 1.85): residuals 2.6 and 0.5, gradient (1.3 + 0.5, 1.3) = (1.8, 1.3); velocity
    # 0.9 (2.5, 1.5) + it
    close(
        by_hand(plan, recipe={"momentum": 0.9, "epochs": 2}),
        (0.75 - 0.1 * (2.25 + 1.8), 1.85 - 0.1 * (1.35 + 1.3)),
    )


@both_plans
def test_pull(plan: Plan) -> None:
    target = torch.zeros(1, 2, dtype=torch.float64)
    close(by_hand(plan, pull=(target, 0.5)), (0.75 - 0.1 * 0.5 * 1, 1.85 - 0.1 * 0.5 * 2))


@both_plans
def test_pull_per_row_and_a_frozen_target(plan: Plan) -> None:
    """Two models of one client: the first free, the second pulled to where the first began, not to where it
    is now."""
    start = torch.tensor([[1.0, 2.0], [1.0, 2.0]], dtype=torch.float64)
    got = by_hand(plan, start, {"epochs": 2}, pull=(W, torch.tensor([0.0, 2.0])))
    free = (0.75 - 0.18, 1.85 - 0.13)
    pulled = (free[0] - 0.1 * 2 * (0.75 - 1.0), free[1] - 0.1 * 2 * (1.85 - 2.0))
    close(got, free, pulled)


@both_plans
def test_every_client_has_its_own_target(plan: Plan) -> None:
    """Two models of two clients: model i belongs to client i mod 2, and so does its target."""
    data = Padded(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 1], [0, 1]]), torch.tensor([2, 2]))
    target = torch.tensor([[0.0, 0.0], [3.0, 3.0]], dtype=torch.float64)
    recipe = Recipe(lr=0.1, batch_size=2, loss=squared)
    got = train(network_of(line), W.repeat(4, 1), HAND, data, recipe, plan, pull=(target, 0.5)).model
    low, high = (0.75 - 0.05 * 1, 1.85 - 0.05 * 2), (0.75 + 0.05 * 2, 1.85 + 0.05 * 1)
    close(got, low, high, low, high)


@both_plans
def test_learning_rate_per_row(plan: Plan) -> None:
    got = by_hand(plan, W.repeat(2, 1), {"lr": torch.tensor([0.1, 0.2], dtype=torch.float64)})
    close(got, (0.75, 1.85), (0.5, 1.7))


@both_plans
def test_trainable_part_of_a_tensor(plan: Plan) -> None:
    close(by_hand(plan, trainable=torch.tensor([True, False])), (0.75, 2.0))


@both_plans
def test_trainable_per_row(plan: Plan) -> None:
    mask = torch.tensor([[True, False], [False, True]])
    close(by_hand(plan, W.repeat(2, 1), trainable=mask), (0.75, 2.0), (1.0, 1.85))


@both_plans
def test_a_frozen_entry_stays_though_its_gradient_is_nan(plan: Plan) -> None:
    def broken(net: nn.Module, batch: Batch) -> Tensor:
        return (
            squared(net, batch) + torch.sqrt(net.weight[0, 1] - 2.0) * 0.0
        )  # d sqrt at 0 is inf, times 0 is nan

    got = by_hand(
        plan,
        recipe={"loss": broken, "momentum": 0.9, "weight_decay": 0.1, "epochs": 1},
        trainable=torch.tensor([True, False]),
    )
    assert got[0, 1] == 2.0 and torch.isfinite(got).all()


@both_plans
def test_auxiliary_tensors_are_each_clients_own(plan: Plan) -> None:
    def scaled(net: nn.Module, batch: Batch) -> Tensor:
        return squared(net, batch) * batch.aux["scale"]

    data = Padded(torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 1], [0, 1]]), torch.tensor([2, 2]))
    recipe = Recipe(lr=0.1, batch_size=2, loss=scaled)
    got = train(
        network_of(line), W.repeat(2, 1), HAND, data, recipe, plan, aux={"scale": torch.tensor([1.0, 2.0])}
    ).model
    close(got, (0.75, 1.85), (0.5, 1.7))
    four = train(
        network_of(line), W.repeat(4, 1), HAND, data, recipe, plan, aux={"scale": torch.tensor([1.0, 2.0])}
    ).model
    close(four, (0.75, 1.85), (0.5, 1.7), (0.75, 1.85), (0.5, 1.7))


# ---- against torch.optim.SGD on nn.Module


@both_plans
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"lr": torch.tensor([0.1, 0.2, 0.05, 0.0])},
        {"momentum": torch.tensor([0.0, 0.5, 0.9, 0.9]), "weight_decay": torch.tensor([0.1, 0.0, 0.01, 0.0])},
        {"epochs": torch.tensor([1, 3, 0, 2])},
        {"steps": 2},
        {"steps": 7},
        {"steps": torch.tensor([9, 1, 0, 4])},
        {"shuffle": False},
        {"drop_last": True},
        {"drop_last": True, "steps": 3},
        {"batch_size": 1},
        {"batch_size": 50},
    ],
    ids=str,
)
def test_equals_plain_pytorch(plan: Plan, change: dict[str, Any], samples: Any) -> None:
    network, data, recipe = network_of(small), deal(samples, COUNTS), replace(RECIPE, **change)
    model = starts(network, len(COUNTS))
    expected = slow_fit(network, model, samples, data, client_keys(len(COUNTS)), recipe)
    torch.testing.assert_close(
        train(network, model, samples, data, recipe, plan).model, expected, rtol=0, atol=1e-12
    )


@both_plans
def test_a_client_with_less_than_a_batch_trains_unless_drop_last(plan: Plan, samples: Any) -> None:
    network, data = network_of(small), deal(samples, [3, 0, 8])
    model = starts(network, 3)
    fitted = train(network, model, samples, data, RECIPE, plan)
    assert fitted.steps.tolist() == [2, 0, 4]
    assert not torch.equal(fitted.model[0], model[0])
    assert torch.equal(fitted.model[1], model[1]) and fitted.loss[1] == 0
    dropped = train(network, model, samples, data, replace(RECIPE, drop_last=True), plan)
    assert dropped.steps.tolist() == [0, 0, 2]
    assert torch.equal(dropped.model[:2], model[:2])


@both_plans
@pytest.mark.parametrize("change", [{"epochs": 0}, {"steps": 0}], ids=str)
def test_without_steps_models_stay_as_they_are(plan: Plan, change: dict[str, Any], samples: Any) -> None:
    network = network_of(with_norm)
    model = starts(network, 2)
    fitted = train(network, model, samples, deal(samples, [3, 8]), replace(RECIPE, **change), plan)
    assert torch.equal(fitted.model, model) and fitted.steps.tolist() == [0, 0]


@both_plans
def test_a_stack_without_rows_can_be_trained(plan: Plan, samples: Any) -> None:
    network = network_of(small)
    nobody = Padded(
        torch.zeros(0, 1, dtype=torch.int64),
        torch.zeros(0, 1, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
    )
    options = {"pull": (torch.zeros(0, network.layout.size), torch.zeros(0)), "aux": {"a": torch.zeros(0, 2)}}
    recipe = replace(RECIPE, lr=torch.zeros(0), epochs=torch.zeros(0, dtype=torch.int64))
    fitted = train(network, torch.zeros(0, network.layout.size), samples, nobody, recipe, plan, **options)
    assert fitted.model.shape == (0, network.layout.size) and len(fitted.loss) == len(fitted.steps) == 0


@both_plans
def test_the_start_models_are_not_changed(plan: Plan, samples: Any) -> None:
    network, data = network_of(with_norm), deal(samples, COUNTS)
    model = starts(network, len(COUNTS))
    before = model.clone()
    train(network, model, samples, data, RECIPE, plan)
    assert torch.equal(model, before)
    one = network.initial(Key(1))
    train(network, one.expand(len(COUNTS), -1), samples, data, RECIPE, plan)
    assert torch.equal(one, network.initial(Key(1)))


# ---- masks, several models per client, chunks


@both_plans
def test_trainable_whole_tensors(plan: Plan, samples: Any) -> None:
    network, data = network_of(small), deal(samples, COUNTS)
    model, head = starts(network, len(COUNTS)), network.layout.under("2")
    got = train(network, model, samples, data, RECIPE, plan, trainable=head).model

    def freeze(net: nn.Module, row: int) -> None:
        start = network.load(model[row], dtype=torch.float64)
        with torch.no_grad():
            net[0].load_state_dict(start[0].state_dict())

    expected = slow_fit(network, model, samples, data, client_keys(len(COUNTS)), RECIPE, after=freeze)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert torch.equal(got[:, ~head], model[:, ~head])


@both_plans
def test_nothing_trainable(plan: Plan, samples: Any) -> None:
    network = network_of(small)
    model = starts(network, 2)
    mask = torch.zeros(network.layout.size, dtype=torch.bool)
    assert torch.equal(
        train(network, model, samples, deal(samples, [3, 8]), RECIPE, plan, trainable=mask).model, model
    )


@both_plans
def test_parameters_that_the_user_froze_stay_frozen(plan: Plan, samples: Any) -> None:
    def frozen() -> nn.Module:
        module = small()
        module[0].requires_grad_(False)
        return module

    network = network_of(frozen)
    model, fixed = starts(network, 2), network.layout.under("0")
    got = train(network, model, samples, deal(samples, [3, 8]), replace(RECIPE, weight_decay=0.1), plan).model
    assert torch.equal(got[:, fixed], model[:, fixed]) and not torch.equal(got, model)


@both_plans
def test_parameters_the_loss_never_uses_only_decay(plan: Plan, samples: Any) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = small(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    network = network_of(Spare)
    model, spare = starts(network, 1), network.layout.under("spare")
    got = train(
        network, model, samples, deal(samples, [4]), Recipe(lr=0.1, batch_size=5, weight_decay=0.5), plan
    ).model
    torch.testing.assert_close(got[:, spare], model[:, spare] * 0.95, rtol=0, atol=1e-12)


@both_plans
def test_all_models_of_a_client_see_the_same_batches(plan: Plan, samples: Any) -> None:
    network, data = network_of(with_norm), deal(samples, COUNTS)
    model = starts(network, len(COUNTS))
    one = train(network, model, samples, data, RECIPE, plan).model
    three = train(network, model.repeat(3, 1), samples, data, RECIPE, plan).model
    torch.testing.assert_close(three, one.repeat(3, 1), rtol=0, atol=1e-12)


@both_plans
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_chunks_change_nothing(plan: Plan, rows: int, samples: Any) -> None:
    network, data = network_of(lambda: nn.Sequential(with_norm(), nn.Dropout(0.3))), deal(samples, COUNTS)
    model = starts(network, 2 * len(COUNTS))
    recipe = replace(RECIPE, momentum=torch.tensor([0.0, 0.5, 0.9, 0.9]), lr=torch.linspace(0.01, 0.2, 8))
    pull = (model[: len(COUNTS)], torch.linspace(0, 1, 8))
    whole = train(network, model, samples, data, recipe, plan, pull=pull)
    cut = train(network, model, samples, data, recipe, replace(plan, rows=rows), pull=pull)
    torch.testing.assert_close(cut.model, whole.model, rtol=0, atol=1e-12)
    torch.testing.assert_close(cut.loss, whole.loss, rtol=0, atol=1e-12)


@both_plans
def test_a_client_alone_equals_the_client_in_a_stack(plan: Plan, samples: Any) -> None:
    network, data, keys = (
        network_of(lambda: nn.Sequential(with_norm(), nn.Dropout(0.3))),
        deal(samples, COUNTS),
        client_keys(len(COUNTS)),
    )
    model = starts(network, len(COUNTS))
    together = fit(network, model, samples, data, keys, RECIPE, plan).model
    for i in range(len(COUNTS)):
        one = torch.tensor([i])
        alone = fit(
            network,
            model[one],
            samples,
            Padded(data.rows[one], data.labels[one], data.count[one]),
            keys[one],
            RECIPE,
            plan,
        ).model
        torch.testing.assert_close(alone, together[one], rtol=0, atol=1e-12)


# ---- layers of all kinds


LAYERS: dict[str, Any] = {
    "stride": lambda: nn.Conv2d(2, 4, 3, stride=2),
    "padding": lambda: nn.Conv2d(2, 4, 3, padding=1),
    "padding by name": lambda: nn.Conv2d(2, 4, 3, padding="same"),
    "dilation": lambda: nn.Conv2d(2, 4, 3, dilation=2),
    "groups": lambda: nn.Conv2d(2, 4, 3, groups=2),
    "no bias": lambda: nn.Conv2d(2, 4, 3, bias=False),
    "mirrored": lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
    "one pixel": lambda: nn.Conv2d(2, 4, 1),
    "max": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, ceil_mode=True)),
    "overlapping max": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(3, stride=1, padding=1)),
    "average": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 3, 2)),
    "adaptive": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(2)),
    "group norm": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm([2, 6, 6]), nn.Conv2d(2, 2, 3)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.PReLU()),
    "lines": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(2, 3, 5), nn.MaxPool1d(2)),
    "linear on rows": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(36, 5), nn.GELU()),
    "frozen first": lambda: nn.Sequential(nn.Conv2d(2, 4, 3).requires_grad_(False), nn.Conv2d(4, 4, 3)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_both_plans_equal_plain_pytorch_on_models(layer: str) -> None:
    images = random_samples(30, (2, 6, 6))
    torch.manual_seed(0)
    features = LAYERS[layer]()(torch.zeros(2, 2, 6, 6)).flatten(1).shape[1]
    network = network_of(lambda: nn.Sequential(LAYERS[layer](), nn.Flatten(), nn.Linear(features, 3)))
    data, model = deal(images, [7, 3, 12]), starts(network, 3)
    expected = slow_fit(network, model, images, data, client_keys(3), RECIPE)
    for plan in (LOOP, VMAP):
        torch.testing.assert_close(
            train(network, model, images, data, RECIPE, plan).model, expected, rtol=0, atol=1e-10
        )


class Viewing(nn.Module):
    """What users write: it needs tensors to lie in memory as PyTorch's own layers leave them."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm, self.conv, self.out = norm, nn.Conv2d(2, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.out(F.group_norm(x, 2).flatten(1) if self.norm else x.view(x.shape[0], -1))


@both_plans
@pytest.mark.parametrize("norm", [False, True], ids=["view", "group_norm"])
def test_a_users_code_may_depend_on_the_order_in_memory(norm: bool, plan: Plan) -> None:
    images = random_samples(30, (2, 6, 6))
    network = network_of(lambda: Viewing(norm))
    data, model = deal(images, [7, 3, 12]), starts(network, 3)
    expected = slow_fit(network, model, images, data, client_keys(3), RECIPE)
    torch.testing.assert_close(
        train(network, model, images, data, RECIPE, plan).model, expected, rtol=0, atol=1e-10
    )
    got = score(network, lambda net, x, aux: net(x), expected, torch.arange(3), images, data, plan)
    assert got.total.tolist() == [7, 3, 12]


def test_one_convolution_used_twice_and_tied_weights() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.a, self.b, self.out = (
                nn.Conv2d(2, 2, 3, padding=1),
                nn.Linear(72, 72),
                nn.Linear(72, 72),
                nn.Linear(72, 3),
            )
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.b(torch.relu(self.a(self.conv(torch.relu(self.conv(x))).flatten(1)))))

    images = random_samples(30, (2, 6, 6))
    network = network_of(Twice)
    data, model = deal(images, [7, 3]), starts(network, 2)
    expected = slow_fit(network, model, images, data, client_keys(2), RECIPE)
    for plan in (LOOP, VMAP):
        torch.testing.assert_close(
            train(network, model, images, data, RECIPE, plan).model, expected, rtol=0, atol=1e-10
        )


@both_plans
def test_buffers_of_whole_numbers_stay_whole(plan: Plan, samples: Any) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 3)
            self.register_buffer("order", torch.tensor([2, 0, 1]))
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return self.out(x[:, self.order])

    network = network_of(Counting)
    got = train(network, starts(network, 3), samples, deal(samples, [7, 3, 12]), RECIPE, plan).model
    assert got[:, network.layout.under("passes")].flatten().tolist() == [4, 2, 6]
    assert got[:, network.layout.under("order")].tolist() == [[2, 0, 1]] * 3


# ---- layers with memory or luck


@both_plans
@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_batch_norm_equals_pytorchs(plan: Plan, momentum: float | None, samples: Any) -> None:
    """Parameters, running statistics and the counter, also with incomplete batches (padded under vmap)."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.Linear(4, 3)
        )

    counts = [7, 3, 12]
    network, data = network_of(make), deal(samples, counts)
    model = starts(network, 3)
    expected = slow_fit(network, model, samples, data, client_keys(3), RECIPE)
    got = train(network, model, samples, data, RECIPE, plan).model
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    tracked = network.layout.under("1.num_batches_tracked")
    assert got[:, tracked].flatten().tolist() == [4, 2, 6]


@both_plans
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_images_and_without_running_statistics(plan: Plan, affine: bool) -> None:
    def make() -> nn.Module:
        norms = nn.BatchNorm2d(2, affine=affine), nn.BatchNorm2d(2, affine=affine, track_running_stats=False)
        return nn.Sequential(nn.Conv2d(1, 2, 3), norms[0], nn.ReLU(), norms[1], nn.Flatten(), nn.Linear(8, 3))

    images = random_samples(40, (1, 4, 4))
    network, data = network_of(make), deal(images, [7, 4])
    model = starts(network, 2)
    expected = slow_fit(network, model, images, data, client_keys(2), RECIPE)
    torch.testing.assert_close(
        train(network, model, images, data, RECIPE, plan).model, expected, rtol=0, atol=1e-10
    )


def test_batch_norm_with_a_single_sample_trains(samples: Any) -> None:
    """PyTorch refuses a batch of one value per channel; a client's last batch may be one, and must not end
    the run."""
    network, data = network_of(with_norm), deal(samples, [6, 1])
    model = starts(network, 2)
    a, b = (train(network, model, samples, data, RECIPE, plan).model for plan in (LOOP, VMAP))
    assert torch.isfinite(a).all()
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_dropout_is_the_same_on_both_plans_and_differs_between_steps_and_clients(samples: Any) -> None:
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            dropped = self.drop(torch.ones_like(x))
            seen.append((dropped == 0).detach())
            return self.out(x * dropped)

    network, data = network_of(Spy), deal(samples, [4, 4])
    model = network.initial(Key(0)).expand(2, -1)
    recipe = Recipe(lr=0.1, epochs=3, batch_size=4)
    a = train(network, model, samples, data, recipe, LOOP).model
    masks = [mask.flatten().tolist() for mask in seen]
    assert len({tuple(mask) for mask in masks}) == 6  # 3 steps of 2 clients
    torch.testing.assert_close(
        train(network, model, samples, data, recipe, VMAP).model, a, rtol=0, atol=1e-12
    )


def test_dropout_is_on_in_fit_and_repeatable(samples: Any) -> None:
    network, data = (
        network_of(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))),
        deal(samples, COUNTS),
    )
    model = starts(network, len(COUNTS))
    first, second = (train(network, model, samples, data, RECIPE, VMAP).model for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, train(network, model, samples, data, RECIPE, VMAP, seed=1).model)
    plain = slow_fit(network, model, samples, data, client_keys(len(COUNTS)), RECIPE)
    assert (first - plain).abs().max() > 1e-3


@both_plans
def test_augmentation(plan: Plan) -> None:
    """Always flipping is the same as flipped data."""
    images = random_samples(20, (1, 4, 4))
    mirrored = samples_of(images.x.flip(-1), images.y, images.classes)
    network, data = network_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), deal(images, [7, 4])
    model = starts(network, 2)
    got = train(network, model, images, data, replace(RECIPE, augment=Augment(flip=1.0)), plan).model
    torch.testing.assert_close(
        got, train(network, model, mirrored, data, RECIPE, plan).model, rtol=0, atol=1e-12
    )


def test_random_augmentation_is_the_same_on_both_plans_and_new_in_each_step() -> None:
    images = random_samples(20, (3, 6, 6))
    network, data = network_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 3))), deal(images, [7, 4])
    model = starts(network, 2)
    recipe = replace(RECIPE, augment=Augment(crop=2, flip=0.5, rotation=20, jitter=0.3))
    a, b = (train(network, model, images, data, recipe, plan).model for plan in (LOOP, VMAP))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    seen: list[Tensor] = []

    def spy(net: nn.Module, batch: Batch) -> Tensor:
        seen.append(batch.x.clone())
        return F.cross_entropy(net(batch.x), batch.y, reduction="none")

    train(
        network,
        model[:1],
        images,
        deal(images, [4]),
        replace(recipe, loss=spy, shuffle=False, epochs=2),
        LOOP,
    )
    assert len(seen) == 2 and not torch.allclose(seen[0], seen[1])


# ---- a whole step in place of the loss


def inner_loop(gradient: Any, params: dict[str, Tensor], batch: Batch, lr: Tensor) -> dict[str, Tensor]:
    """pFedMe: theta minimises the loss near w by 3 steps; then w moves towards theta."""
    lam, theta = 2.0, params
    for _ in range(3):
        grads = gradient(theta, batch)
        theta = {
            name: theta[name] - 0.2 * (grads[name] + lam * (theta[name] - params[name])) for name in theta
        }
    return {name: params[name] - lr * lam * (params[name] - theta[name]) for name in params}


def slow_inner_loop(
    make: Any, network: Any, model: Tensor, samples: Any, data: Padded, recipe: Recipe, lr: list[float]
) -> Tensor:
    """The same with modules and autograd."""
    import numpy as np

    from holdfast.local.batch_order import schedule

    n = len(data.count)
    order = schedule(
        client_keys(n), data.count.numpy(), recipe.batch_size, np.full(n, recipe.epochs), None, True, False
    )
    out = []
    for i in range(n):
        net = network.load(model[i], dtype=torch.float64).double().train()
        params = dict(net.named_parameters())
        for t in range(order.steps[i]):
            position = order.index[t, i][order.index[t, i] >= 0]
            x, y = samples.batch(data.rows[i, position], dtype=torch.float64), data.labels[i, position]
            w = {name: p.detach().clone() for name, p in params.items()}
            for _ in range(3):
                grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(params.values()))
                with torch.no_grad():
                    for (name, p), g in zip(params.items(), grads, strict=True):
                        p -= 0.2 * (g + 2.0 * (p - w[name]))
            with torch.no_grad():
                for name, p in params.items():
                    p.copy_(w[name] - lr[i] * 2.0 * (w[name] - p))
        out.append(network.layout.flatten({**params, **dict(net.named_buffers())}, torch.float64).detach())
    return torch.stack(out)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 3)),
        nn.Conv2d(1, 4, (1, 2)),
        nn.ReLU(),
        nn.MaxPool2d((1, 2)),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


@both_plans
@pytest.mark.parametrize("make", [small, with_norm, convolution])
def test_step_function(plan: Plan, make: Any, samples: Any) -> None:
    """Buffers too: every pass of the inner loop updates the running statistics, as PyTorch does it."""
    counts = [7, 3, 12]
    network, data = network_of(make), deal(samples, counts)
    model, lr = starts(network, 3), [0.1, 0.3, 0.05]
    got = train(
        network,
        model,
        samples,
        data,
        replace(RECIPE, lr=torch.tensor(lr, dtype=torch.float64)),
        plan,
        step=inner_loop,
    )
    expected = slow_inner_loop(make, network, model, samples, data, RECIPE, lr)
    torch.testing.assert_close(got.model, expected, rtol=0, atol=1e-10)
    assert (got.loss > 0).all()


@both_plans
def test_step_function_respects_the_mask(plan: Plan, samples: Any) -> None:
    network, data = network_of(small), deal(samples, COUNTS)
    model = starts(network, len(COUNTS))
    mask = Key(3).hash(len(COUNTS), network.layout.size).remainder(2).bool()
    got = train(network, model, samples, data, RECIPE, plan, step=inner_loop, trainable=mask).model
    assert torch.equal(got[~mask], model[~mask]) and (got[mask] != model[mask]).any()


def test_pull_with_a_step_function_is_refused(samples: Any) -> None:
    network = network_of(small)
    model = starts(network, 1)
    with pytest.raises(TypeError, match="pull"):
        train(network, model, samples, deal(samples, [4]), RECIPE, LOOP, step=inner_loop, pull=(model, 0.1))


# ---- mistakes


@both_plans
def test_a_loss_that_is_already_reduced_is_a_clear_error(plan: Plan, samples: Any) -> None:
    recipe = replace(RECIPE, loss=lambda net, batch: F.cross_entropy(net(batch.x), batch.y))
    network = network_of(small)
    with pytest.raises(ConfigError, match="one value per sample.*reduction='none'"):
        train(network, starts(network, 2), samples, deal(samples, [4, 5]), recipe, plan)


@both_plans
def test_padding_does_not_poison_a_batch(plan: Plan) -> None:
    """loss = x0 w + x1 log w^2. The first batch moves w from 1 to 0, where the first sample's loss is
    infinite; the second batch does not hold that sample, so w goes on to -0.5."""
    samples = samples_of(torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0, 0]))

    def touchy(net: nn.Module, batch: Batch) -> Tensor:
        w = net.weight[0, 0]
        return batch.x[:, 0] * w + batch.x[:, 1] * torch.log((w + 1 - batch.x[:, 1]) ** 2)

    recipe = Recipe(lr=0.5, batch_size=2, shuffle=False, loss=touchy)
    got = train(network_of(line), W, samples, deal(samples, [3]), recipe, plan).model
    close(got[:, :1], (-0.5,))


# ---- float32


def test_one_float32_step_of_both_plans() -> None:
    images = random_samples(40, (1, 6, 6))

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(36, 3),
        )

    network, data = network_of(make, torch.float32), deal(images, [7, 2, 12, 5])
    model = starts(network, 4)
    a, b = (
        train(network, model, images, data, replace(RECIPE, steps=1), plan).model for plan in (LOOP, VMAP)
    )
    assert a.dtype == torch.float32
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
