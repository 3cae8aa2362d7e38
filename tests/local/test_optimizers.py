"""The clients' optimisers against torch.optim, client after client, on every plan: ragged clients, a learning
rate per row, masks, pulls, schedules, clipping, and a state that goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.registry import build
from holdfast.local.fit import Fitted, Recipe
from holdfast.local.optimizers.torch_class import classes, torch_optimizer
from holdfast.local.plan import Plan
from holdfast.local.program import Program
from tests.helpers import (
    LOOP,
    PLANS,
    VMAP,
    client_keys,
    deal,
    network_of,
    random_samples,
    slow_fit,
    starts,
    train,
)

every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
COUNTS = [7, 2, 12, 5]
SAMPLES = random_samples(60)
DATA = deal(SAMPLES, COUNTS)
RATES = torch.tensor([0.1, 0.02, 0.3, 0.05], dtype=torch.float64)
# a bias under BatchNorm has a gradient of 0, and Adam would make steps of its rounding errors
NETWORK = network_of(
    lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
)
START = starts(NETWORK, 4)
CASES: dict[str, tuple[Any, dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "nesterov": ({"name": "sgd", "nesterov": True}, {"momentum": 0.9}, torch.optim.SGD, {"nesterov": True}),
    "adam": ("adam", {"weight_decay": 0.1}, torch.optim.Adam, {}),
    "amsgrad": (
        {"name": "adam", "amsgrad": True, "betas": [0.5, 0.7], "eps": 1e-3},
        {},
        torch.optim.Adam,
        {"amsgrad": True, "betas": (0.5, 0.7), "eps": 1e-3},
    ),
    "adamw": ("adamw", {}, torch.optim.AdamW, {}),
    "adamw decay": ({"name": "adamw", "weight_decay": 0.3}, {}, torch.optim.AdamW, {"weight_decay": 0.3}),
    "rmsprop": ("rmsprop", {"weight_decay": 0.1}, torch.optim.RMSprop, {}),
    "centered": (
        {"name": "rmsprop", "centered": True, "alpha": 0.9},
        {"momentum": 0.5},
        torch.optim.RMSprop,
        {"centered": True, "alpha": 0.9},
    ),
}


def recipe_of(chosen: Any, **options: Any) -> Recipe:
    rule = chosen if not isinstance(chosen, (str, dict)) else build("optimizer", chosen)
    return Recipe(**{"lr": RATES, "epochs": 2, "batch_size": 5, "optimizer": rule, **options})


def trained(recipe: Recipe, plan: Plan, **options: Any) -> Fitted:
    return train(NETWORK, START, SAMPLES, DATA, recipe, plan, **options)


def reference(
    recipe: Recipe, kind: type[torch.optim.Optimizer], given: dict[str, Any], **more: Any
) -> Tensor:
    def optimiser_of(net: nn.Module, row: int) -> torch.optim.Optimizer:
        rate = float(recipe.lr[row]) if isinstance(recipe.lr, Tensor) else recipe.lr
        return kind(net.parameters(), lr=rate, **given)  # type: ignore[call-arg]

    return slow_fit(NETWORK, START, SAMPLES, DATA, client_keys(4), recipe, optimiser_of=optimiser_of, **more)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@every_plan
@pytest.mark.parametrize("case", CASES)
def test_equal_to_torch_with_ragged_clients_and_a_rate_per_row(case: str, plan: Plan) -> None:
    chosen, numbers, kind, given = CASES[case]
    recipe = recipe_of(chosen, **numbers)
    close(trained(recipe, plan).model, reference(recipe, kind, {**numbers, **given}))


def test_what_a_compiler_would_be_given_does_the_same() -> None:
    plan, seen = Plan("compiled-vmap"), []
    original = Program._advance
    try:
        Program._advance = lambda self: seen.append(self.traced()) or original(self)  # type: ignore[method-assign]
        network = network_of(lambda: nn.Linear(3, 3))
        recipe = recipe_of("adam", schedule=lambda steps: [0.5] * steps, clip_gradient=0.5)
        together = train(network, starts(network, 4), SAMPLES, DATA, recipe, plan).model
    finally:
        Program._advance = original  # type: ignore[method-assign]
    (graph,) = seen
    assert any("sqrt" in str(node.target) for node in graph.graph.nodes)
    close(together, train(network, starts(network, 4), SAMPLES, DATA, recipe, LOOP).model)


@every_plan
@pytest.mark.parametrize("name", ["NAdam", "Adagrad"])
def test_a_class_of_torch_is_stepped_as_it_is(name: str, plan: Plan) -> None:
    """Clients finish at different steps; on plans that replay a step the next best plan does it."""
    for lr in (0.1, RATES):
        recipe = recipe_of(torch_optimizer(f"torch:{name}", {"weight_decay": 0.1}), lr=lr)
        close(trained(recipe, plan).model, reference(recipe, classes()[name], {"weight_decay": 0.1}))


def test_the_classes_of_torch_that_can_be_stacked() -> None:
    refused = set()
    for name in classes():
        try:
            torch_optimizer(f"torch:{name}", {})
        except ConfigError as error:
            assert "cannot train a stack" in str(error)
            refused.add(name)
    assert refused <= {"LBFGS", "SparseAdam", "Adafactor", "Muon"} and {"LBFGS", "SparseAdam"} <= refused
    with pytest.raises(ConfigError, match="unknown key 'optimizer.beta'; did you mean 'betas'"):
        torch_optimizer("torch:NAdam", {"beta": (0.5, 0.5)})
    with pytest.raises(ConfigError, match="torch.optim has no 'Adem'"):
        torch_optimizer("torch:Adem", {})


class WholeNorm(torch.optim.Optimizer):
    """Divides by the norm of a whole tensor, which in a stack belongs to several clients."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data -= group["lr"] * param.grad / param.grad.norm()


def test_an_optimiser_that_mixes_rows_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="WholeNorm cannot train a stack .*differs from its steps on each row"
    ):
        torch_optimizer(WholeNorm, {})


@every_plan
def test_masked_entries_stay_and_the_pull_is_a_gradient(plan: Plan) -> None:
    mask = torch.arange(NETWORK.layout.size) % 3 > 0
    target = START.flip(0)
    for rule in (build("optimizer", "adamw"), torch_optimizer("torch:NAdam", {})):
        recipe = recipe_of(rule, lr=0.1)
        got = trained(recipe, plan, trainable=mask, pull=(target, 0.7)).model
        close(got, trained(recipe, LOOP, trainable=mask, pull=(target, 0.7)).model)
        fixed = ~mask[: NETWORK.layout.parameters]
        assert torch.equal(got[:, : len(fixed)][:, fixed], START[:, : len(fixed)][:, fixed])
        assert not torch.equal(got, trained(recipe, plan, trainable=mask).model)


def test_a_pull_by_hand() -> None:
    """With Adam, the first step has the length lr, in the direction of gradient and pull together."""
    recipe = recipe_of({"name": "adam", "eps": 0}, lr=0.1, steps=1)
    far = START + 1e6  # the pull is all that counts
    got = trained(recipe, LOOP, pull=(far, 1.0)).model[:, : NETWORK.layout.parameters]
    close(got, START[:, : NETWORK.layout.parameters] + 0.1)


@every_plan
@pytest.mark.parametrize("chosen", ["sgd", "adam"])
def test_clipping_is_that_of_torch(chosen: str, plan: Plan) -> None:
    most = torch.tensor([0.05, 0.4, 3.0, 0.2], dtype=torch.float64)
    recipe = recipe_of(chosen, clip_gradient=most)
    kind = torch.optim.SGD if chosen == "sgd" else torch.optim.Adam

    def clip(net: nn.Module, optimiser: torch.optim.Optimizer, row: int, step: int) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), float(most[row]))

    close(trained(recipe, plan).model, reference(recipe, kind, {}, before=clip))
    assert not torch.allclose(
        trained(recipe, plan).model, trained(replace(recipe, clip_gradient=None), plan).model
    )


def test_clipping_counts_only_what_is_trained() -> None:
    mask = NETWORK.layout.under("3.weight")
    mask[: NETWORK.layout.slot("3.weight").start + 2] = False  # one tensor, in part
    recipe = recipe_of("sgd", lr=1.0, steps=1, clip_gradient=1e-3)
    for plan in (LOOP, VMAP, Plan("compiled-vmap")):
        moved = (trained(recipe, plan, trainable=mask).model - START)[:, mask]
        torch.testing.assert_close(moved.norm(dim=1), torch.full((4,), 1e-3).double(), rtol=1e-2, atol=0)


@every_plan
@pytest.mark.parametrize("rule", ["sgd", "adam", torch_optimizer("torch:NAdam", {})])
def test_a_schedule_over_steps_multiplies_each_rate(rule: Any, plan: Plan) -> None:
    """Every client goes through the whole schedule in its own number of steps."""
    recipe = recipe_of(rule, schedule=lambda steps: [(t + 1) / steps for t in range(steps)])
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    kind = kinds[rule] if isinstance(rule, str) else torch.optim.NAdam
    steps = [2 * -(-count // 5) for count in COUNTS]

    def set_rate(net: nn.Module, optimiser: torch.optim.Optimizer, row: int, step: int) -> None:
        optimiser.param_groups[0]["lr"] = float(RATES[row]) * (step + 1) / steps[row]

    close(trained(recipe, plan).model, reference(recipe, kind, {}, before=set_rate))


@every_plan
def test_a_kept_state_goes_on_where_it_was(plan: Plan) -> None:
    """Two trainings of one epoch each, without shuffling, are one training of two epochs."""
    recipe = recipe_of({"name": "adam", "amsgrad": True}, shuffle=False)
    size, once = NETWORK.layout.parameters, replace(recipe, epochs=1)
    fresh = {
        name: torch.zeros(4, size, dtype=torch.float64)
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }
    first = trained(once, plan, state={**fresh, "step": torch.zeros(4, dtype=torch.int64)})
    assert first.state["step"].tolist() == [2, 1, 3, 1]
    second = train(NETWORK, first.model, SAMPLES, DATA, once, plan, state=first.state)
    close(second.model, trained(recipe, plan).model)
    assert second.state["step"].tolist() == [4, 2, 6, 2]
    afresh = train(NETWORK, first.model, SAMPLES, DATA, once, plan)
    assert not torch.allclose(afresh.model, second.model)
