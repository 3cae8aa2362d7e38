"""The client and server halves on a model of two numbers, w = (1, 2), with a squared loss.

Client 4 has (1, 1) -> 0 and (2, 0) -> 1: residuals 3 and 1, gradient (2.5, 1.5), so one step of 0.1 leads to
(0.75, 1.85). Client 7 has (0, 1) -> 0: residual 2, gradient (0, 2), so one step leads to (1, 1.8)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.mean import Mean
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.types import Uplink
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.losses import Batch
from holdfast.local.plan import Plan
from holdfast.methods.context import Context
from tests.helpers import LOOP, VMAP, client_keys, deal, network_of, samples_of

SAMPLES = samples_of(torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 0]))


NETWORK = network_of(lambda: nn.Linear(2, 1, bias=False))


WHOLE = Wire.of(NETWORK.layout, torch.ones(2, dtype=torch.bool))


IDS = torch.tensor([4, 7])


W = torch.tensor([1.0, 2.0], dtype=torch.float64)


both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])


def squared(net: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (net(batch.x)[:, 0] - batch.y) ** 2


def local_of(plan: Plan, epochs: int = 1, selected: list[bool] | None = None, **settings: float) -> Local:
    return Local(
        network=NETWORK,
        wire=WHOLE,
        ids=IDS,
        key=client_keys(2),
        samples=SAMPLES,
        data=deal(SAMPLES, [2, 1]),
        validation=deal(SAMPLES, [0, 0]),
        initial=torch.zeros(2, 2, dtype=torch.float64),
        plan=plan,
        recipe=Recipe(lr=0.1, epochs=epochs, batch_size=2, loss=squared),
        settings=SimpleNamespace(
            **{k: torch.full((2,), v, dtype=torch.float64) for k, v in settings.items()}
        ),
        selected=torch.tensor(selected or [True, True]),
    )


def received(has: list[bool] | None = None) -> Received:
    pick = torch.where(torch.tensor(has or [True, True]), 0, -1)[:, None]
    return Received(W[None], pick, WHOLE)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def context(cohort: list[int] | None = None, **changes: Any) -> Context:
    ids = torch.tensor([4, 7] if cohort is None else cohort, dtype=torch.int64)
    given = {
        "round": 3,
        "cohort": ids,
        "available": torch.arange(10),
        "key": Key(0),
        "wire": WHOLE,
        "layout": NETWORK.layout,
        "initial": W,
    }
    return Context(**{**given, "aggregator": Mean(), **changes})


def answer(ids: list[int], update: list[list[float]], count: list[float]) -> Uplink:
    n = len(ids)
    fields = {
        "update": torch.tensor(update, dtype=torch.float64).reshape(n, 2),
        "buffers": torch.zeros(n, 0, dtype=torch.float64),
        "count": torch.tensor(count, dtype=torch.float64),
        "loss": torch.zeros(n, dtype=torch.float64),
    }
    return Uplink(torch.tensor(ids, dtype=torch.int64), fields)
