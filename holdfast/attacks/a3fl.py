"""A3FL: a trigger that is trained against a model which unlearns it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from holdfast.attacks.learned_trigger import (
    LearningValues,
    Tensors,
    grey,
    on_values,
    patched,
    to_target,
)
from holdfast.attacks.own_training import Ask, Crew, Leading, Own
from holdfast.attacks.triggers.base import Stamp
from holdfast.core.flat import Layout
from holdfast.core.registry import register, setting
from holdfast.data.federation import Samples
from holdfast.local.losses import Batch

_UNLEARNT = "unlearnt/"


@register(
    "attack",
    "a3fl",
    paper="Zhang et al.: A3FL: Adversarially Adaptive Backdoor Attacks to Federated Learning, NeurIPS 2023",
)
class A3fl(LearningValues):
    """Trains its trigger so that the model that was sent calls it the target, and so does a copy of that
    model which was trained to unlearn it; then trains the model on batches with it.

    The adapted model t' minimises L(x + trigger, y; t') from the sent model t on, with the true labels y; the
    trigger minimises L(x + trigger, target; t) + lam L(x + trigger, target; t') by steps along the sign of
    the gradient, between the least and the largest values of the data; lam is `weight` times the cosine
    between t and t'. Both are done anew `searches` times in a round. The released code has 200
    searches with 5 epochs of unlearning, far more than local training costs, lets attackers train one after
    the other, and takes the cosine between gradients of convolutions; here all train from the same trigger
    and their mean is taken. Its trigger is a patch of 5 x 5 that begins grey, two pixels from the upper left
    corner (here in it, and at most a quarter of the image's side); poisoned are 0.25 of each batch, its
    target is class 2."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": (
            "trains a trigger against a copy of the model that unlearns it, and the model with it"
        ),
        "settings, with their defaults": (
            "`trigger`: a grey patch for images, else by the kind of the data, `target = 1`, `ratio = 0.25`,"
            " `searches = 3`, `unlearning = 1`, `rate = 0.01`, `weight = 0.01`"
        ),
    }
    searches: int = setting(3, "how often in a round a model unlearns the trigger, which then adapts", ge=1)
    unlearning: int = setting(1, "epochs of unlearning each time", ge=0)
    rate: float = setting(0.01, "length of the trigger's steps, as the model reads samples", gt=0)
    weight: float = setting(0.01, "weight of the model that unlearns", ge=0)

    def usual(self, samples: Samples) -> Stamp | None:
        return grey(samples, 5, 1 / 4, "top-left")

    def searched(self, crew: Crew, trigger: Tensors) -> Leading:
        found = yield Ask("adapted", trigger)
        values = found["values"].mean(0, keepdim=True)
        return found.having(values=values.expand_as(found["values"]))

    def adapted(self, own: Own) -> Tensors:
        given, values = dict(own.given), own.given["values"]
        for search in range(self.searches):
            aux = {**given, "values": values}
            options: dict[str, Any] = {"aux": aux, "epochs": self.unlearning, "purpose": f"unlearn {search}"}
            model = own.fit(data=own.clean, loss=unlearning, **options).model
            likeness = F.cosine_similarity(model.double(), own.model.double(), dim=1).to(model)
            aux = {**aux, "weight": self.weight * likeness, **_parameters(own.local.network.layout, model)}
            values = own.fit_tensors(
                {"values": values},
                partial(both, target=self.target),
                data=own.clean,
                aux=aux,
                step=along_the_sign,
                lr=self.rate,
                epochs=1,
                purpose=f"adapt {search}",
            )["values"]
        return {**given, "values": values}

    def mixed(self) -> Any:
        return partial(on_values, target=self.target, ratio=self.ratio)


def unlearning(net: Any, batch: Batch) -> Tensor:
    """All samples carry the trigger, and keep their labels."""
    return F.cross_entropy(net(patched(batch, batch.aux["values"])), batch.y, reduction="none")


def both(net: Any, batch: Batch, *, target: int) -> Tensor:
    """The loss of the trigger on the model that was sent, and on the one that unlearns."""
    x = patched(batch, net.values)
    theirs = {
        name.removeprefix(_UNLEARNT): value for name, value in batch.aux.items() if name.startswith(_UNLEARNT)
    }

    def other(samples: Tensor) -> Tensor:
        out: Tensor = functional_call(net.net, theirs, (samples,))
        return out

    return to_target(net, x, target) + batch.aux["weight"] * to_target(other, x, target)


def along_the_sign(gradient: Any, params: Tensors, batch: Batch, lr: Tensor) -> Tensors:
    """One step of the trigger against the sign of its gradient, within the bounds of the data."""
    values = params["values"]
    moved = values - lr * gradient(params, batch)["values"].sign()
    low, high = (batch.aux[name].to(values.dtype) for name in ("low", "high"))
    return {**params, "values": torch.clamp(moved, low, high)}


def _parameters(layout: Layout, models: Tensor) -> dict[str, Tensor]:
    views = layout.unflatten(models)
    return {f"{_UNLEARNT}{slot.name}": views[slot.name] for slot in layout.slots if not slot.buffer}
