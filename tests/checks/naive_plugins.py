"""Client halves and losses as a new user would write them, each with a setting `lam` that pulls the model
back to the received one. Some take the one right way, some the natural wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from pydantic import PrivateAttr
from torch import Tensor, nn

from holdfast.core.registry import Part, setting
from holdfast.methods.averaging import Averaging
from holdfast.methods.base import ClientRule, Method
from holdfast.models.base import NetworkPart


class Naive(ClientRule):
    """Trains with the pull that `strength` gives."""

    def strength(self, local: Any) -> Any:
        raise NotImplementedError

    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        fitted = local.fit(received.model, pull=(received.model, self.strength(local)))
        return state, local.report(fitted.model, received, fitted)


class ByRow(Naive):
    def strength(self, local: Any) -> Any:
        return local.settings.lam


class ByArithmetic(Naive):
    def strength(self, local: Any) -> Any:
        return 2 * local.settings.lam.clamp(min=0.1) - 0.1


class ByList(Naive):
    """One client after the other, by hand: right, and read on the host."""

    def strength(self, local: Any) -> Any:
        return local.initial.new_tensor([2 * lam for lam in local.settings.lam.tolist()])


class FirstOfList(Naive):
    def strength(self, local: Any) -> Any:
        return local.settings.lam.tolist()[0]


class Largest(Naive):
    def strength(self, local: Any) -> Any:
        return float(local.settings.lam.max())


class WhereAny(Naive):
    """What some clients want is done to all."""

    def strength(self, local: Any) -> Any:
        return 3.0 if bool((local.settings.lam > 1).any()) else 0.0


class FromMethod(Naive):
    def strength(self, local: Any) -> Any:
        return self.method.lam  # type: ignore[attr-defined]


class FromInit(Naive):
    def __init__(self, method: Any):
        super().__init__(method)
        self.lam = method.lam

    def strength(self, local: Any) -> Any:
        return self.lam


class FirstEntry(Naive):
    def strength(self, local: Any) -> Any:
        return local.settings.lam[0].item()


class Mean(Naive):
    def strength(self, local: Any) -> Any:
        return float(local.settings.lam.mean())


class FromProperty(Naive):
    def strength(self, local: Any) -> Any:
        return self.method.doubled  # type: ignore[attr-defined]


class FromTable(Naive):
    def strength(self, local: Any) -> Any:
        return self.method.settings()["lam"]


class InTheLoss(ClientRule):
    """The loss is a method of the client half and reads the setting there."""

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        return (
            F.cross_entropy(net(batch.x), batch.y, reduction="none")
            + self.method.lam * net.head.weight.square().sum()
        )  # type: ignore[attr-defined]

    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        fitted = local.fit(received.model, loss=self.loss)
        return state, local.report(fitted.model, received, fitted)


class ThroughAux(ClientRule):
    """The right way for a loss."""

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        return (
            F.cross_entropy(net(batch.x), batch.y, reduction="none")
            + batch.aux["lam"] * net.head.weight.square().sum()
        )

    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        fitted = local.fit(received.model, loss=self.loss, aux={"lam": local.settings.lam})
        return state, local.report(fitted.model, received, fitted)


class Remembers(ByRow):
    """Keeps the setting in its private state."""

    def init(self, local: Any) -> Any:
        return {"lam": local.settings.lam}

    def strength(self, local: Any) -> Any:
        return local.settings.lam + 1.0

    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        state, fields = super().train(local, state, received, extra)
        return {"lam": state["lam"] + local.settings.lam}, fields


class Enclosed(ClientRule):
    """The loss closes over the setting. With as many clients as samples in a batch, the shapes fit."""

    def train(self, local: Any, state: Any, received: Any, extra: Any) -> Any:
        lam = local.settings.lam

        def loss(net: nn.Module, batch: Any) -> Tensor:
            return (
                F.cross_entropy(net(batch.x), batch.y, reduction="none")
                + lam * net.head.weight.square().sum()
            )

        fitted = local.fit(received.model, loss=loss)
        return state, local.report(fitted.model, received, fitted)


RIGHT = [ByRow, ByArithmetic, ThroughAux, Remembers]
APART = [ByList, FirstEntry, Mean, FirstOfList, Largest, WhereAny]
WRONG = [FromMethod, FromInit, FromProperty, FromTable, InTheLoss]


def method_of(client: type[ClientRule], **declared: Any) -> type[Method]:
    class Made(Method):
        """A user's method."""

        Client = client
        Server = Averaging
        lam: float = setting(0.1, "pull", ge=0, **declared)

        @property
        def doubled(self) -> float:
            return 2 * self.lam

    return Made


@dataclass(frozen=True)
class Unequal:
    """A loss that calls itself equal to any other of its kind."""

    smoothing: float = field(compare=False)

    def __call__(self, net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch.x), batch.y, reduction="none", label_smoothing=self.smoothing)

    def __repr__(self) -> str:
        return "Unequal"


class LossPart(Part):
    """A user's loss with a number beside its settings, and an object that does not say what it is."""

    inner: Any = None
    _smoothing: float = PrivateAttr(0.0)

    def __call__(self, net: nn.Module, batch: Any) -> Tensor:
        if self.inner is not None:
            return self.inner(net, batch)
        return F.cross_entropy(net(batch.x), batch.y, reduction="none", label_smoothing=self._smoothing)


def private(smoothing: float) -> LossPart:
    made = LossPart()
    made._smoothing = smoothing
    return made


class Scaling(NetworkPart):
    """A user's network whose setting hides in a list."""

    scales: list[Any] = []

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Scaled(self.scales[0].smoothing)


@dataclass
class Smoothed:
    """A loss with a number of its own; Python cannot hash it."""

    smoothing: float

    def __call__(self, net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch.x), batch.y, reduction="none", label_smoothing=self.smoothing)

    def value(self, net: nn.Module, batch: Any) -> Tensor:
        return self(net, batch)


def smoothed(smoothing: float) -> Any:
    return lambda net, batch: F.cross_entropy(
        net(batch.x), batch.y, reduction="none", label_smoothing=smoothing
    )


class Scaled(nn.Module):
    """Two of them differ in nothing but a number that is no parameter."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale, self.head = scale, nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1) * self.scale)


def part_of(scale: float) -> NetworkPart:
    """A part that was never registered, of a class that was made for it."""

    class Made(NetworkPart):
        """A user's network."""

        def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
            return Scaled(scale)

    return Made()
