"""PoisonedFL: the same way in every round, from nothing but the models that are received."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.aggregators.geometry import total
from holdfast.attacks.base import Attack, Knowledge, View
from holdfast.attacks.received import Received
from holdfast.attacks.several import Views
from holdfast.attacks.shared_rows import lengths, uniform
from holdfast.core.columns import Reads, current
from holdfast.core.device import to_device
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import Schema, Uplink


@register(
    "attack",
    "poisoned-fl",
    paper=(
        "Xie, Fang and Gong: Model Poisoning Attacks to Federated Learning via Multi-Round Consistency,"
        " CVPR 2025"
    ),
)
class PoisonedFL(Attack):
    """Sends c |g| v * s: signs s that stay for the whole run, with magnitudes v from what the model did last.

    g is what the model moved by since it was last received, k what the attackers sent then, and v = |g - k
    |g| / |k|| / |...|, coordinate by coordinate: large where the benign clients pulled. All attackers send
    the same, and add up over rounds instead of cancelling out. Every `every` rounds they test whether the
    signs of what the model moved by since the last test agree with s more often than by chance (one-sided
    binomial test at level `level`); where not, c is multiplied by `shrink`, as long as it stays at
    `least_scale` or more, so that a defence lets it pass. In its first round an attacker, who knows no g,
    sends zeros, as the released code does. It reads nobody's update, not even its own; only on class means,
    whose common ones it is not shown, the first attacker's mean takes the place of the model. Where clients
    are sent different models, g is that of the first attacker's. Attackers that know each other share one
    memory of three models; with `knows = "own"` each has its own."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "sends the same random signs in every round, scaled by the model's step",
        "settings, with their defaults": (
            "`scale = 8`, `every = 50`, `shrink = 0.7`, `level = 0.01`, `least_scale = 0.5`"
        ),
    }
    tasks: ClassVar[None] = None
    reads: ClassVar[Reads] = "gram"
    knows: Knowledge = setting(
        "colluders", "colluders share one memory; own: each attacker has one. No update is read"
    )
    scale: float = setting(8.0, "first c: length of what is sent, in lengths of the model's last step", gt=0)
    every: int = setting(50, "rounds between two tests of whether the attack works (the paper's e)", ge=1)
    shrink: float = setting(0.7, "factor on c where it does not (the paper's beta)", gt=0, le=1)
    level: float = setting(0.01, "level of the test", gt=0, lt=1)
    least_scale: float = setting(0.5, "c never falls below this", ge=0)

    def uplink(self, task: str, schema: Schema, up: Uplink, view: View, key: Key) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            received = Received(view, task, name, view.own(name))
            out[name] = self._next(received, view.own(name)[:1], view.lasting.fold(name).bits[None])
        return out

    def together(self, task: str, schema: Schema, views: Views) -> Mapping[str, Tensor]:
        out = {}
        for name in self.targets(schema):
            own = views.own(name)
            keys = [situation.lasting.fold(name).bits for situation in views.situations]
            received = Received(views, task, name, own)
            out[name] = self._next(received, own[:, 0], torch.stack(keys))[:, None]
        return out

    def _next(self, received: Received, own: Tensor, luck: Tensor) -> Tensor:
        """[c, d]: what is sent now."""
        model = own if received.model is None else received.model
        before = received.recall("model")
        received.remember("model", model, columns=True)
        if before is None:
            received.remember("tested model", model, columns=True)
            received.remember("tested round", received.rounds)
            received.remember("c", torch.full_like(received.rounds, self.scale))
            sent = torch.zeros_like(model)
        else:
            half = uniform(Key(to_device(luck, model.device)), model.shape[-1], dtype=model.dtype)
            signs = torch.where(half < 0.5, -1.0, 1.0).to(model)
            c = self._scale(received, model, signs)
            sent = self._magnitudes(received, model - before) * c.to(model) * signs
        received.remember("sent", sent, columns=True)
        return sent

    def _magnitudes(self, received: Received, moved: Tensor) -> Tensor:
        """[c, d]: |g| v."""
        last, size = received.recall("sent"), lengths(moved)
        assert last is not None
        share = torch.where(lengths(last) > 0, size / lengths(last), 0)
        v = (moved - share * last).abs()
        return size * v / lengths(v).clamp(min=1e-30)

    def _scale(self, received: Received, model: Tensor, signs: Tensor) -> Tensor:
        """[c, 1]: c, after the test where one is due."""
        known = [received.recall(name) for name in ("c", "tested model", "tested round")]
        c, tested, since = (value for value in known if value is not None)
        due = to_device(received.rounds, c.device) - since >= self.every
        if not bool(due.any()):
            return c
        moved = model - tested
        moved = torch.where(moved == 0, model, moved)  # as the released code counts what did not move
        agree = total((moved.sign() == signs).sum(-1, keepdim=True))
        shared = current()
        d = model.shape[-1] if shared is None else shared.total
        needed = d / 2 + NormalDist().inv_cdf(1 - self.level) * d**0.5 / 2
        lower = due & (agree < needed) & (c * self.shrink >= self.least_scale)
        c = torch.where(lower, c * self.shrink, c)
        received.remember("c", c)
        received.remember("tested model", torch.where(due, model, tested), columns=True)
        received.remember("tested round", torch.where(due, to_device(received.rounds, since.device), since))
        return c
