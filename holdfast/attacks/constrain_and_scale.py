"""Model replacement: a backdoored model that stays near the global one, scaled so that it survives the
average."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.attacks.distance_terms import aims, drawn
from holdfast.attacks.own_training import Ask, Crew, Leading, Own
from holdfast.attacks.poisoned_data import OnPoisonedData
from holdfast.core.registry import register, setting


@register(
    "attack",
    "constrain-and-scale",
    paper="Bagdasaryan et al.: How To Backdoor Federated Learning, AISTATS 2020",
)
class ConstrainAndScale(OnPoisonedData):
    """Trains a backdoor under a loss that punishes distance from the global model, then scales the update.

    The loss is alpha * class + (1 - alpha) * anomaly on the poisoned data (Eq. 4 of the paper), with the
    anomaly ||w - w_t||_2, as in the authors' code. The update is multiplied by `factor`, by default the size
    of the cohort: the paper's gamma = n / eta, for a server that takes the plain mean. With `bound` it is the
    paper's train-and-scale: the factor is at most bound / ||w - w_t||, and at least 1. `epochs` is the
    paper's for images (6); `alpha` is 1 in the authors' config, and 0.9 here. The paper trains with a smaller
    learning rate than others do (0.05 in place of 0.1) and stops once the loss is small; here `lr` is one's
    own and nothing stops early. Running statistics are sent as trained."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains a backdoor near the global model and scales its update",
        "settings, with their defaults": (
            '`poison = "backdoor"`, `alpha = 0.9`, `epochs = 6`, `lr`: another rate, `factor`: another than'
            " the size of the cohort, `bound`: the largest norm that scaling may lead to"
        ),
    }
    alpha: float = setting(0.9, "weight of the class loss; the rest is that of the distance", ge=0, le=1)
    epochs: int = setting(6, "the attackers' own epochs", ge=1)
    lr: float | None = setting(None, "the attackers' own learning rate; none: the experiment's", gt=0)
    factor: float | None = setting(None, "factor on the update; none: the size of the cohort", gt=0)
    bound: float | None = setting(None, "largest norm that scaling may lead to; none: any", gt=0)

    def lead(self, crew: Crew) -> Leading:
        factor = float(crew.cohort) if self.factor is None else self.factor
        return (yield Ask(shared={"factor": torch.tensor(factor, dtype=torch.float64)}))

    def poisoned(self, own: Own) -> Mapping[str, Tensor]:
        local = own.local
        loss = partial(drawn, loss=local.recipe.loss, near=1 - self.alpha, share=self.alpha)
        rate: dict[str, Any] = {} if self.lr is None else {"lr": self.lr}
        fitted = own.fit(loss=loss, aux=aims(local.network.layout, own.model), epochs=self.epochs, **rate)
        sent = own.report(fitted.model)
        factor = own.given["factor"]
        if self.bound is not None:
            length = sent["update"].double().norm(dim=1).clamp(min=1e-300)
            factor = factor.minimum((self.bound / length).clamp(min=1))
        return {**sent, "update": factor.to(sent["update"])[:, None] * sent["update"]}
