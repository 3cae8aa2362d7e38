"""PFedBA: a trigger whose task looks to the model like the main one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from holdfast.attacks.learned_trigger import (
    LearningValues,
    Tensors,
    grey,
    on_values,
    patched,
    to_target,
    unmoved,
)
from holdfast.attacks.own_training import Ask, Crew, Leading, Own
from holdfast.attacks.triggers.base import Stamp
from holdfast.core.registry import register, setting
from holdfast.data.federation import Samples
from holdfast.local.losses import Batch


@register(
    "attack",
    "pfedba",
    paper=(
        "Lyu et al.: Lurking in the Shadows: Unveiling Stealthy Backdoor Attacks against Personalized"
        " Federated Learning, USENIX Security 2024"
    ),
)
class PFedBA(LearningValues):
    """Trains its trigger so that the backdoor's gradient is near that of the main task: then clients that
    personalise the model on clean data do not train the backdoor away. The model is trained on batches with
    the trigger.

    With g(x, y) the gradient of the loss with respect to the model that was sent, the trigger minimises the
    length of g(x + trigger, target) - g(x, y) (alignment of gradients, in every round), by plain steps, kept
    between the least and the largest values of the data. Before that, in the attackers' first round, it
    minimises L(x + trigger, target) (alignment of the loss) by `by_loss` batches. As in the released code,
    the length is not squared, and the gradients are of one batch. There, gradients are aligned for 30 epochs
    of at most 100 samples of each class that all attackers have together; here each attacker does it on its
    own samples, and the mean of their triggers is taken. Its trigger is a patch of 10 x 10 in the middle
    (here at most half of the image's side) that begins grey; of a batch of 64 it poisons 16."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": (
            "trains a trigger whose gradient is near that of the main task, and the model with it"
        ),
        "settings, with their defaults": (
            "`trigger`: a grey patch for images, else by the kind of the data, `target = 1`, `ratio = 0.25`,"
            " `by_loss = 50`, `by_gradient = 3`, `rate = 0.1`"
        ),
    }
    by_loss: int = setting(50, "batches of the alignment of the loss, in the attackers' first round", ge=0)
    by_gradient: int = setting(3, "epochs of the alignment of gradients, in every round", ge=0)
    rate: float = setting(0.1, "learning rate of the trigger", gt=0)

    def usual(self, samples: Samples) -> Stamp | None:
        return grey(samples, 10, 1 / 2, "centre")

    def searched(self, crew: Crew, trigger: Tensors) -> Leading:
        now = dict(trigger)
        works = ["aligned_by_loss"] if crew.recall("values") is None else []
        for work in [*works, "aligned_by_gradient"]:
            found = yield Ask(work, now)
            now["values"] = found["values"].mean(0)
        return found.having(values=now["values"].expand_as(found["values"]))

    def aligned_by_loss(self, own: Own) -> Tensors:
        loss = partial(misled, target=self.target)
        return self._aligned(own, loss, steps=self.by_loss, purpose="by loss")

    def aligned_by_gradient(self, own: Own) -> Tensors:
        loss = partial(apart, target=self.target)
        return self._aligned(own, loss, epochs=self.by_gradient, purpose="by gradient")

    def _aligned(self, own: Own, loss: Callable[..., Tensor], **options: Any) -> Tensors:
        values = own.fit_tensors(
            {"values": own.given["values"]},
            loss,
            data=own.clean,
            aux=dict(own.given),
            step=within_bounds,
            lr=self.rate,
            **options,
        )["values"]
        return {**own.given, "values": values}

    def mixed(self) -> Any:
        return partial(on_values, target=self.target, ratio=self.ratio)


def misled(net: Any, batch: Batch, *, target: int) -> Tensor:
    """All samples carry the trigger and the target's label."""
    return to_target(net, patched(batch, net.values), target)


def apart(net: Any, batch: Batch, *, target: int) -> Tensor:
    """The distance between the gradients of the backdoor and of the main task, the same for each sample."""
    parameters = {name: value.detach() for name, value in net.net.named_parameters()}
    count = batch.mask.sum().clamp(min=1)

    def loss(own: Tensors, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(unmoved(net.net, own)(x), y, reduction="none")
        return (each * batch.mask).sum() / count

    gradient = grad(loss)
    main = gradient(parameters, batch.x, batch.y)
    mine = gradient(parameters, patched(batch, net.values), torch.full_like(batch.y, target))
    squares = [(mine[name] - main[name].detach()).square().sum() for name in parameters]
    return (torch.stack(squares).sum() + 1e-24).sqrt().expand_as(batch.mask)


def within_bounds(gradient: Any, params: Tensors, batch: Batch, lr: Tensor) -> Tensors:
    """One step of the trigger against its gradient, within the bounds of the data."""
    values = params["values"]
    moved = values - lr * gradient(params, batch)["values"]
    low, high = (batch.aux[name].to(values.dtype) for name in ("low", "high"))
    return {**params, "values": torch.clamp(moved, low, high)}
