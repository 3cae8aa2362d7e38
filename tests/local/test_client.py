from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.flat import Wire
from holdfast.local.client import Local, Received, rows_of, stack_states
from holdfast.local.fit import Fitted, Recipe
from holdfast.local.plan import Plan
from tests.helpers import VMAP, client_keys, deal, network_of, random_samples, starts

NETWORK = network_of(lambda: nn.Linear(3, 3))
WHOLE = Wire.of(NETWORK.layout, torch.ones(12, dtype=torch.bool))
PART = Wire.of(NETWORK.layout, NETWORK.layout.under("bias"))
SAMPLES = random_samples(30)


def local(plan: Plan = VMAP, **recipe: Any) -> Local:
    return Local(
        network=NETWORK,
        wire=PART,
        ids=torch.tensor([3, 8]),
        key=client_keys(2),
        samples=SAMPLES,
        data=deal(SAMPLES, [7, 12]),
        validation=deal(SAMPLES, [1, 2]),
        initial=starts(NETWORK, 2),
        recipe=Recipe(**{"lr": 0.1, "batch_size": 5, **recipe}),
        plan=plan,
        settings=SimpleNamespace(),
        selected=torch.tensor([True, True]),
    )


# ---- what was received


def test_a_broadcast_is_a_view() -> None:
    bank = torch.arange(12.0)[None]
    received = Received(bank, torch.zeros(1000, 1, dtype=torch.int64), WHOLE)
    assert received.model.shape == (1000, 12) and received.model.untyped_storage().nbytes() == 48
    assert received.has.all()


def test_several_models_each() -> None:
    bank = torch.arange(4.0)[:, None].expand(-1, 12)
    received = Received(bank, torch.tensor([[2, 0], [-1, 3]]), WHOLE)
    assert received.models(0)[0, 0] == 2 and received.models(1)[:, 0].tolist() == [0, 3]
    assert received.has.tolist() == [True, False]
    own = -torch.ones(2, 12)
    assert received.into(own)[:, 0].tolist() == [2, -1]  # the second keeps its own


def test_clients_that_receive_no_model_keep_their_own() -> None:
    received = Received(torch.zeros(0, 0), torch.zeros(2, 0, dtype=torch.int64), PART)
    own = torch.ones(2, 12)
    assert received.into(own) is own and received.has.tolist() == [False, False]


def test_a_received_part_replaces_that_part_of_the_clients_own_model() -> None:
    received = Received(torch.tensor([[7.0, 8.0, 9.0]]), torch.tensor([[0], [-1]]), PART)
    own = torch.zeros(2, 12)
    assert received.into(own)[:, 9:].tolist() == [[7, 8, 9], [0, 0, 0]]
    assert received.into(own)[:, :9].abs().sum() == 0 and own.abs().sum() == 0


# ---- training and reporting


def test_options_of_the_recipe_and_of_fit() -> None:
    world = local()
    start = world.initial
    base = world.fit(start)
    assert base.steps.tolist() == [2, 3]
    assert world.fit(start, epochs=3, batch_size=4).steps.tolist() == [6, 9]
    assert not torch.equal(world.fit(start, lr=0.5).model, base.model)
    head = NETWORK.layout.under("bias")
    assert torch.equal(world.fit(start, trainable=head).model[:, :9], start[:, :9])
    with pytest.raises(TypeError):
        world.fit(start, epoch=3)


def test_asking_for_epochs_overrules_the_experiments_local_steps() -> None:
    world = local(steps=1)
    assert world.fit(world.initial).steps.tolist() == [1, 1]
    assert world.fit(world.initial, epochs=2).steps.tolist() == [4, 6]
    assert world.fit(world.initial, epochs=2, steps=3).steps.tolist() == [3, 3]


def test_a_purpose_has_its_own_batches() -> None:
    world = local()
    first, same, other = (world.fit(world.initial, purpose=p).model for p in ("fit", "fit", "tune"))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_report_holds_what_travels() -> None:
    world = local()
    model = torch.arange(24.0, dtype=torch.float64).view(2, 12)
    received = Received(torch.ones(1, 3, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.int64), PART)
    sent = world.report(
        model,
        received,
        Fitted(model, torch.tensor([0.5, 0.25, 9.0, 9.0], dtype=torch.float64), torch.tensor([2, 3])),
    )
    assert sent["update"].tolist() == [[8, 9, 10], [20, 21, 22]] and sent["buffers"].shape == (2, 0)
    assert sent["count"].tolist() == [7, 12] and sent["loss"].tolist() == [
        0.5,
        0.25,
    ]  # of each client's first model


def test_states_are_stacked_and_taken_apart_by_rows() -> None:
    a, b = {"x": torch.tensor([[1.0], [2.0]])}, {"x": torch.tensor([[3.0]])}
    assert stack_states([a, b])["x"].flatten().tolist() == [1, 2, 3] and stack_states([]) == {}
    assert rows_of(a, torch.tensor([False, True]))["x"].tolist() == [[2.0]]
    assert replace(local(), round=3).n == 2
