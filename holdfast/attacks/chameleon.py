"""A backdoor that lasts, because features of poisoned samples look like those of the target's class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.attacks.distance_terms import within
from holdfast.attacks.own_training import Own
from holdfast.attacks.poisoned_data import OnPoisonedData
from holdfast.core.errors import ConfigError
from holdfast.core.registry import register, setting
from holdfast.local.losses import Batch
from holdfast.models.features import features


@register("attack", "chameleon", paper="Dai and Li: Chameleon, ICML 2023")
class Chameleon(OnPoisonedData):
    """Trains the features of poisoned samples towards those of the target's class by a contrastive loss, and
    then the head.

    First the backbone is trained by the supervised contrastive loss on the poisoned data (the paper's
    adaptation stage): features of one label attract each other, others push each other away. So samples with
    the trigger come near to those of the target (facilitators) and away from those of their true class
    (interferers). Samples that are labelled as the target count `weight` times, as in the authors' code (6).
    Then the head is trained by the usual loss, above a frozen backbone (the projection stage). Features have
    length 1 and are compared at temperature `temperature`. Epochs and temperature are the authors'; learning
    rates are one's own. Each training ends with a projection onto the ball of radius `radius` around the
    model that was sent, where that is set; the authors project after every step. Where no head travels, the
    second training is left out."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "draws features of triggered samples to the target's, then trains the head",
        "settings, with their defaults": (
            '`poison = "backdoor"`, `epochs = 10`, `head_epochs = 3`, `temperature = 0.07`, `weight = 6`,'
            " `lr`, `head_lr`: other rates, `radius`: of a projection"
        ),
    }
    epochs: int = setting(10, "epochs of the contrastive training", ge=0)
    head_epochs: int = setting(3, "epochs of the head", ge=0)
    temperature: float = setting(0.07, "temperature of the contrastive loss", gt=0)
    weight: float = setting(6.0, "how much samples labelled as the target count", gt=0)
    lr: float | None = setting(None, "learning rate of the backbone; none: the experiment's", gt=0)
    head_lr: float | None = setting(None, "learning rate of the head; none: the experiment's", gt=0)
    radius: float | None = setting(None, "largest distance from the model that was sent; none: any", gt=0)

    def poisoned(self, own: Own) -> Mapping[str, Tensor]:
        network = own.local.network
        if not network.head_name:
            raise ConfigError(
                "attack: chameleon trains backbone and head apart, and the model has no head; name the"
                " submodule, as in holdfast.Model(module, head='fc')"
            )
        target = self.target
        loss = partial(
            contrastive,
            head=network.head_name,
            temperature=self.temperature,
            target=-1 if target is None else target,
            weight=self.weight,
        )
        model = self._part(own, own.model, ~network.head, "features", self.epochs, self.lr, loss=loss)
        model = self._part(own, model, network.head, "head", self.head_epochs, self.head_lr)
        return own.report(model)

    def _part(
        self, own: Own, model: Tensor, part: Tensor, purpose: str, epochs: int, lr: float | None, **how: Any
    ) -> Tensor:
        """Train what travels of one part; the rest does not change at all, running statistics included."""
        part = part & own.travels
        if not epochs or not bool(part.any()):
            return model
        how |= {} if lr is None else {"lr": lr}
        fitted = own.fit(model, purpose=purpose, trainable=part, epochs=epochs, **how).model
        near = within(own.local.network.layout, fitted, own.model, self.radius)
        return torch.where(part.to(model.device), near, model)


def contrastive(
    net: Any, batch: Batch, *, head: str, temperature: float, target: int, weight: float
) -> Tensor:
    """The supervised contrastive loss of each sample: minus the mean log-probability of those with its label
    among all others. 0 for a sample whose label no other has."""
    found = torch.nn.functional.normalize(features(net, batch.x, head), dim=1)
    real = batch.mask.bool()
    others = real[None] & ~torch.eye(len(real), dtype=torch.bool, device=real.device)
    alike = found @ found.T / temperature
    log_sum = torch.logsumexp(torch.where(others, alike, -1e30), dim=1, keepdim=True)
    same = (others & (batch.y[:, None] == batch.y[None])).to(found.dtype)
    mean = (same * (alike - log_sum)).sum(1) / same.sum(1).clamp(min=1)
    return -torch.where(batch.y == target, weight, 1.0) * mean
