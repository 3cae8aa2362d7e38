"""Alternating minimisation: a boosted step towards the backdoor, then steps that hide it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.attacks.distance_terms import aims, drawn
from holdfast.attacks.own_training import Ask, Crew, Leading, Own
from holdfast.attacks.poisoned_data import OnPoisonedData
from holdfast.core.registry import register, setting


@register(
    "attack",
    "alternating",
    paper="Bhagoji et al.: Analyzing Federated Learning through an Adversarial Lens, ICML 2019",
)
class Alternating(OnPoisonedData):
    """Takes turns: a boosted training on its poisoned samples, then a stealthy one on its clean samples.

    In each of `epochs` turns the attacker first trains on the poisoned samples alone, for one epoch, and
    multiplies what this changed by `boost`, by default the size of the cohort (the paper's lambda = 1 / alpha
    of its own weight in the mean). Then it minimises the stealth objective on its clean samples for
    `stealth_epochs`: the usual loss plus rho * ||delta - delta_others||_2 (alternating minimisation with the
    distance constraint of the paper), where delta_others is the change between the last two models that it
    was sent. The paper takes its own last update off that change; here it is not, since a defence may have
    dropped it. Without a last model, as in the first round, the distance is that from the model that was
    sent. The paper attacks single samples; here the poisoned samples are those of `poison`. It remembers one
    model for each attacker that knows only itself, else one for each experiment."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "takes turns between a boosted step to the backdoor and steps that hide it",
        "settings, with their defaults": (
            '`poison = "backdoor"`, `epochs = 5`, `stealth_epochs = 1`, `rho = 1e-4`, `boost`: another than'
            " the size of the cohort, `lr`: another rate"
        ),
    }
    epochs: int = setting(5, "turns", ge=1)
    stealth_epochs: int = setting(1, "epochs on clean samples in each turn", ge=0)
    rho: float = setting(1e-4, "weight of the distance from the others' last update (paper: 1e-4)", ge=0)
    boost: float | None = setting(
        None, "factor on what poisoned samples change; none: the size of the cohort", gt=0
    )
    lr: float | None = setting(None, "learning rate on poisoned samples; none: the experiment's", gt=0)

    def lead(self, crew: Crew) -> Leading:
        sent, last = crew.sent(), crew.recall("sent")
        boost = float(crew.cohort) if self.boost is None else self.boost
        handed = {"boost": torch.tensor(boost, dtype=torch.float64)}
        if sent is not None:
            crew.remember("sent", sent)
            # what travels may have become less since
            same = last is not None and last.shape == sent.shape
            handed["moved"] = sent - last if last is not None and same else torch.zeros_like(sent)
        return (yield Ask(shared=handed))

    def poisoned(self, own: Own) -> Mapping[str, Tensor]:
        local, model = own.local, own.model
        aim = model
        if "moved" in own.given:
            moved = local.wire.unpack(own.given["moved"].to(model), torch.zeros_like(model))
            aim = model + moved
        rate = {} if self.lr is None else {"lr": self.lr}
        near = partial(drawn, loss=local.recipe.loss, near=self.rho)
        aux, boost = aims(local.network.layout, aim), own.given["boost"].to(model)[:, None]
        p = local.network.layout.parameters
        for turn in range(self.epochs):
            bad = own.fit(model, own.poisoned, purpose=f"poisoned {turn}", epochs=1, **rate).model
            boosted = model[:, :p] + boost * (bad[:, :p] - model[:, :p])
            model = torch.cat([boosted, bad[:, p:]], 1)
            if self.stealth_epochs:
                hidden = {"purpose": f"stealth {turn}", "loss": near, "aux": aux}
                model = own.fit(model, own.clean, epochs=self.stealth_epochs, **hidden).model
        return own.report(model)
