"""A world in which methods that cut a model in two can be followed by hand: y = h b x, a body of one number
under a head of one.

Client 4 has 1 -> 0, client 7 has 2 -> 1. With residual r = h b x - y the gradient of r^2 / 2 is r h x for b
and r b x for h; steps are 0.1. From (b, h) = (1, 2): client 4 has r = 2 and gradient (4, 2), client 7 has r =
3 and gradient (12, 6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.aggregators.mean import Mean
from holdfast.core.flat import Wire
from holdfast.core.keys import Key
from holdfast.core.registry import build
from holdfast.core.types import Uplink
from holdfast.local.client import Local, Received
from holdfast.local.fit import Recipe
from holdfast.local.losses import Batch
from holdfast.local.plan import Plan
from holdfast.methods import ClientRule, Context
from holdfast.models.backbone_head import BackboneHead
from holdfast.models.network import Network
from holdfast.results.run import Run
from tests.helpers import LOOP, VMAP, client_keys, deal, samples_of

SAMPLES = samples_of(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]))
IDS = torch.tensor([4, 7])
both_plans = pytest.mark.parametrize("plan", [LOOP, VMAP], ids=["loop", "vmap"])


def body_and_head() -> nn.Module:
    return BackboneHead(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))


def squared(net: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (net(batch.x)[:, 0] - batch.y) ** 2


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


class World:
    """Two clients under a method's client half: `start` is the common start model (b, h)."""

    def __init__(
        self,
        plan: Plan,
        start: tuple[float, float] = (1.0, 2.0),
        epochs: int = 1,
        lr: float = 0.1,
        **method: Any,
    ):
        self.method = build("method", method)
        self.rule: ClientRule = self.method.Client(self.method)
        self.network = Network(
            lambda: self.rule.network(body_and_head()), self.rule.head("head"), f"two {method}", torch.float64
        )
        self.wire = Wire.of(self.network.layout, self.rule.shared(self.network, 1))
        settings = {
            name: torch.full((2,), value, dtype=torch.float64)
            for name, value in self.method.row_settings().items()
        }
        first = self.network.layout.mask(lambda slot: "backbone" in slot.name)
        initial = torch.where(
            first,
            start[0],
            torch.where(self.network.layout.mask(lambda slot: "head" in slot.name), start[1], 0.0),
        )
        self.local = Local(
            network=self.network,
            wire=self.wire,
            ids=IDS,
            key=client_keys(2),
            samples=SAMPLES,
            data=deal(SAMPLES, [1, 1]),
            validation=deal(SAMPLES, [0, 0]),
            initial=initial.double().repeat(2, 1),
            plan=plan,
            recipe=Recipe(lr=lr, epochs=epochs, batch_size=2, loss=squared),
            settings=SimpleNamespace(**settings),
            selected=torch.tensor([True, True]),
        )

    def sent(self, *model: float, has: tuple[bool, bool] = (True, True)) -> Received:
        return Received(numbers(model), torch.where(torch.tensor(has), 0, -1)[:, None], self.wire)

    def ctx(self, **changes: Any) -> Context:
        initial = self.wire.pack(self.local.initial[0])
        given = {
            "round": 3,
            "cohort": IDS,
            "available": torch.tensor([4, 5, 7]),
            "key": Key(0),
            "wire": self.wire,
        }
        return Context(
            **{**given, "layout": self.network.layout, "initial": initial, "aggregator": Mean(), **changes}
        )


def reply(*updates: list[float], ids: tuple[int, ...] = (4, 7), count: tuple[float, ...] = (1, 1)) -> Uplink:
    n = len(ids)
    update = numbers(*updates).reshape(n, -1) if n else torch.zeros(0, 2, dtype=torch.float64)
    fields = {"update": update, "buffers": torch.zeros(n, 0, dtype=torch.float64), "count": numbers(*count)}
    return Uplink(
        torch.tensor(ids, dtype=torch.int64), {**fields, "loss": torch.zeros(n, dtype=torch.float64)}
    )


def rows(run: Run, client: int) -> dict[str, Tensor]:
    """The private state of one client at the end of a run."""
    head = run.store.head()
    assert head is not None
    stored = run._experiment.run_context.rows.__class__(run.path / "rows", head[1]["rows/index"])
    return {name: value[0] for name, value in stored.read(torch.tensor([client])).items()}


def server(run: Run, name: str = "model") -> Tensor:
    head = run.store.head()
    assert head is not None
    return head[1][f"server/{name}"]
