"""A backdoor in the coordinates that the others hardly change, so that it lasts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from holdfast.attacks.base import Knowledge
from holdfast.attacks.coordinates import largest
from holdfast.attacks.distance_terms import by_epoch
from holdfast.attacks.own_training import Ask, Crew, Leading, Own
from holdfast.attacks.poisoned_data import OnPoisonedData
from holdfast.core.registry import register, setting
from holdfast.local.augment import Augment


@register("attack", "neurotoxin", paper="Zhang et al.: Neurotoxin, ICML 2022")
class Neurotoxin(OnPoisonedData):
    """Trains a backdoor only in coordinates that the last aggregated update hardly changed.

    The attackers compare the model that they were sent with the one that they were sent last; the share `top`
    of what travels that moved most stays as it is, and their gradient steps go into the rest (Algorithm 1 of
    the paper: the projection onto the bottom coordinates of the observed gradient). After every epoch the
    model is projected onto the ball of radius `radius` around the model that was sent, where that is set (the
    paper's PGD). `variant = "authors"` is their code: the coordinates are those with the largest gradient of
    the loss on the attacker's own clean samples, so nothing is remembered. Unlike in the code, weight decay
    does not move what is left out. Where there is no last model, as in the first round, nothing is left out.
    `top` is that of the authors' commands, which keep the smallest 95 per cent. It remembers one model for
    each experiment, or for each attacker that knows only itself."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains a backdoor in coordinates that the last update hardly changed",
        "settings, with their defaults": (
            '`poison = "backdoor"`, `top = 0.05`, `epochs = 2`, `lr`: another rate, `radius`: of a'
            ' projection, `variant = "paper"`'
        ),
    }
    knows: Knowledge = setting("colluders", "own: each remembers what it was sent itself; colluders share it")
    variant: Literal["paper", "authors"] = setting(
        "paper", "what is left out: by the last aggregated update, or by the gradient on clean samples"
    )
    top: float = setting(
        0.05, "share of the coordinates that are left out: those that changed most", ge=0, lt=1
    )
    epochs: int = setting(2, "the attackers' own epochs", ge=1)
    lr: float | None = setting(None, "the attackers' own learning rate; none: the experiment's", gt=0)
    radius: float | None = setting(None, "largest distance from the model that was sent; none: any", gt=0)

    def lead(self, crew: Crew) -> Leading:
        sent = crew.sent()
        if self.variant == "authors" or sent is None:
            return (yield Ask())
        last = crew.recall("sent")
        crew.remember("sent", sent)
        # what travels may have become less since
        moved = torch.zeros_like(sent) if last is None or last.shape != sent.shape else sent - last
        return (yield Ask(shared={"moved": moved}))

    def poisoned(self, own: Own) -> Mapping[str, Tensor]:
        rate = {} if self.lr is None else {"lr": self.lr}
        return own.report(by_epoch(own, self.epochs, self.radius, trainable=self._allowed(own), **rate))

    def _allowed(self, own: Own) -> Tensor:
        """bool[n, size]: the coordinates that are trained."""
        layout, wire = own.local.network.layout, own.local.wire
        if self.variant == "authors":
            change = self._gradient(own)
        elif "moved" in own.given:
            change = wire.unpack(own.given["moved"].to(own.model), torch.zeros_like(own.model))
        else:
            return own.travels
        size = change.abs()
        left_out = largest(size, own.travels & layout.trainable, self.top) & (size > 0)
        return own.travels & ~left_out.cpu()

    def _gradient(self, own: Own) -> Tensor:
        """Of the loss on at most 256 clean samples of each attacker: one plain step of length 1 takes it
        off."""
        stepped = own.fit(
            data=own.clean,
            purpose="gradient",
            steps=1,
            batch_size=min(256, max(1, int(own.clean.count.max()))),
            drop_last=False,
            augment=Augment(),
            lr=1.0,
            **own.local.plain_sgd,
        )
        return own.model - stepped.model
