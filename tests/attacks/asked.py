"""What arrives of one request to all clients, and what plain PyTorch needs to compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core.keys import Key
from holdfast.core.types import Uplink, broadcast
from holdfast.data.federation import Padded
from holdfast.engine.client_stack import client_key
from holdfast.engine.simulator import Call, Simulator
from holdfast.experiment.loop import Experiment
from holdfast.local.plan import Plan
from holdfast.models.widened import widened
from tests.helpers import slow_fit, tiny


@dataclass
class Asked:
    """One round of one experiment with a single attacker."""

    experiment: Experiment
    up: Uplink
    attacker: int

    @property
    def remembered(self) -> dict[str, Tensor]:
        found = self.experiment.adversary.memories.tensors
        return {name.removeprefix("all/"): value for name, value in found.items()}

    @property
    def start(self) -> dict[str, Tensor]:
        """The trigger before the round."""
        moving = self.experiment.adversary.moving
        assert moving is not None
        return dict(moving.start)

    @property
    def ids(self) -> Tensor:
        return torch.tensor([self.attacker])

    @property
    def clean(self) -> Padded:
        return self.experiment.run_context.clean(self.ids)

    @property
    def model(self) -> Tensor:
        return self.experiment.initial[None].double()

    def key(self, work: str, purpose: str) -> Key:
        context = self.experiment.run_context
        key = client_key(context.key, 1, broadcast("train", self.experiment.initial, self.ids))
        return key.fold("attack", work).fold(purpose)

    def fitted(self, work: str, purpose: str, loss: Callable[..., Tensor], **recipe: Any) -> Tensor:
        """[1, size]: the model that was sent after plain steps of SGD."""
        context = self.experiment.run_context
        asked = replace(context.recipe, **recipe)
        samples, data = context.federation.samples, self.clean
        return slow_fit(context.network, self.model, samples, data, self.key(work, purpose), asked, loss=loss)

    def trained(
        self,
        work: str,
        purpose: str,
        start: dict[str, Tensor],
        loss: Callable[..., Tensor],
        optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        **recipe: Any,
    ) -> dict[str, Tensor]:
        """Tensors after steps through the model that was sent; the loss finds them in `net`."""
        context = self.experiment.run_context
        wide = widened(context.network, {name: tuple(value.shape) for name, value in start.items()})
        begin = torch.cat([*(value.flatten() for value in start.values()), self.model[0]])[None]
        asked = replace(context.recipe, **recipe)
        samples, data = context.federation.samples, self.clean
        found = slow_fit(
            wide,
            begin,
            samples,
            data,
            self.key(work, purpose),
            asked,
            loss=loss,
            optimiser_of=lambda net, row: optimiser([getattr(net, name) for name in start]),
        )
        views = wide.layout.unflatten(found[0])
        return {name: views[name] for name in start}


class Bounded(torch.optim.Optimizer):
    """Steps against the gradient, or its sign, kept between two tensors."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, low: Tensor, high: Tensor, sign: bool = False
    ):
        super().__init__(params, {})
        self.lr, self.low, self.high, self.sign = lr, low, high, sign

    def step(self, closure: Any = None) -> None:
        for value in self.param_groups[0]["params"]:
            along = value.grad.sign() if self.sign else value.grad
            value.data = torch.minimum(torch.maximum(value.data - self.lr * along, self.low), self.high)


def ask(folder: Path, attack: str, plan: str = "vmap", attacker: int = 1, **settings: Any) -> Asked:
    config = tiny(method="fedavg", attack={"name": attack, "clients": [attacker], **settings})
    experiment = Experiment(config, folder / plan)
    context = experiment.run_context
    context.round = 1
    context.rows.path.mkdir(parents=True, exist_ok=True)
    model = context.wire().pack(experiment.initial)
    engine = Simulator({context.plan_key: Plan(plan)})  # type: ignore[arg-type]
    (up,) = engine.exchange([Call(context, broadcast("train", model, torch.arange(5)))])
    return Asked(experiment, up, attacker)
