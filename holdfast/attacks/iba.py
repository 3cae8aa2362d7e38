"""A trigger that a small network draws into each image, trained with the model from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.attacks.base import Knowledge
from holdfast.attacks.coordinates import largest
from holdfast.attacks.distance_terms import by_epoch
from holdfast.attacks.moving_trigger import Answers, MovingTrigger
from holdfast.attacks.own_training import Ask, Crew, Leading, Own, OwnTraining
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.core.types import State
from holdfast.data.federation import Samples
from holdfast.local.losses import Batch, Loss
from holdfast.local.optimizers.adam import Adam

_PARTS = ("in_weight", "in_bias", "out_weight", "out_bias")
_LIMITS = ("low", "high")


@register("attack", "iba", paper="Nguyen et al.: IBA, NeurIPS 2023")
class IBA(OwnTraining):
    """Trains a network that draws an invisible trigger into each image, and the model on what it draws.

    T(x) = x + epsilon * g(x), cut to the range of the data, with a network g whose outputs are within 1. In
    each round the attackers first train g on the model that they were sent, so that it answers `target` for
    T(x); those that act together use the mean of their networks, and go on from it in the next round. Then
    they train the model by alpha * loss(x, y) + (1 - alpha) * loss(T(x), target) (the authors' attack_alpha,
    0.5), projected after each epoch onto the ball of radius `radius` around the model that was sent, where
    that is set. With `share` below 1 only this share of the coordinates is trained, those with the smallest
    (w_t - w_{t-1}) * w_t of the models that were sent last (the paper's partial poisoning; the authors' code
    has this score). Epsilon is a share of the range of the data: the authors train with 0.3 and test with
    `test_epsilon` 0.05; here both are one number unless set apart. g has two convolutions in place of the
    authors' U-Net or autoencoder, and epsilon does not shrink over the rounds.

    Of IBA and 3DFed (S&P 2023) this is the one that is here: 3DFed's masks, decoys and indicators name layers
    of the authors' networks, and its feedback is read from one coordinate of one common model, which methods
    with a model for each client do not have. IBA works with every model of images and every method. It
    remembers g and, with `share`, one model for each experiment."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": "trains a network that draws the trigger, and the model on what it draws",
        "settings, with their defaults": (
            "`target = 1`, `epsilon = 0.3`, `alpha = 0.5`, `trigger_epochs = 2`, `trigger_lr = 0.01`,"
            " `channels = 8`, `epochs = 2`, `share = 1`, `lr`: another rate, `radius`: of a projection,"
            " `test_epsilon`: another than epsilon"
        ),
    }
    least: ClassVar[Knowledge] = "colluders"
    knows: Knowledge = setting("colluders", "at least colluders: they share the trigger's network")
    target: int = setting(1, "the class that the trigger stands for", ge=0)
    epsilon: float = setting(
        0.3, "largest change of a value, as a share of the range of the data", gt=0, le=1
    )
    test_epsilon: float | None = setting(
        None, "the same while success is measured; none: epsilon", gt=0, le=1
    )
    alpha: float = setting(0.5, "weight of the usual loss; the rest is that of triggered images", ge=0, le=1)
    channels: int = setting(8, "channels inside the network that draws", ge=1)
    trigger_epochs: int = setting(2, "epochs of that network in each round (authors: 10)", ge=1)
    trigger_lr: float = setting(0.01, "its learning rate, by Adam", gt=0)
    epochs: int = setting(2, "the attackers' own epochs", ge=1)
    lr: float | None = setting(None, "the attackers' own learning rate; none: the experiment's", gt=0)
    share: float = setting(1.0, "share of the coordinates that are trained", gt=0, le=1)
    radius: float | None = setting(None, "largest distance from the model that was sent; none: any", gt=0)
    inclusive: bool = setting(False, "count images of the target class in attack/asr")

    def moving(self, samples: Samples) -> MovingTrigger:
        shape = samples.sample_shape
        if samples.words or len(shape) != 3:
            raise ConfigError(
                f"attack 'iba' draws into images, but a sample of {samples.name} is none; use label-flip"
            )
        if self.target >= samples.classes:
            raise ConfigError(
                f"attack.target: {samples.name} has classes 0 to {samples.classes - 1}, got {self.target}"
            )
        epsilon = self.epsilon if self.test_epsilon is None else self.test_epsilon
        start = {**fresh(shape[0], self.channels), **limits(samples)}
        return MovingTrigger(partial(shown, epsilon=epsilon), start, self.target, self.inclusive)

    def lead(self, crew: Crew) -> Leading:
        handed, sent = {}, crew.sent()
        if self.share < 1 and sent is not None:
            last = crew.recall("sent")
            crew.remember("sent", sent)
            if last is not None and last.shape == sent.shape:  # what travels may have become less since
                handed["score"] = (sent - last) * sent
        known = {name: crew.recall(name) for name in _PARTS}
        found = yield Ask("draw", {name: value for name, value in known.items() if value is not None})
        for name in _PARTS:
            handed[name] = found[name].mean(0)
            crew.remember(name, handed[name])
        return (yield Ask("poisoned", handed))

    def draw(self, own: Own) -> Mapping[str, Tensor]:
        """Train the network that draws, on their clean images."""
        start = self._begun(own)
        loss = partial(drawn_loss, target=self.target, epsilon=self.epsilon)
        return own.fit_tensors(
            start,
            loss,
            data=own.clean,
            optimizer=Adam(),
            lr=self.trigger_lr,
            epochs=self.trigger_epochs,
            aux=self._edges(own),
        )

    def poisoned(self, own: Own) -> Mapping[str, Tensor]:
        loss = partial(
            both, loss=own.local.recipe.loss, target=self.target, epsilon=self.epsilon, alpha=self.alpha
        )
        aux = {**{name: own.given[name].to(own.model) for name in _PARTS}, **self._edges(own)}
        rate = {} if self.lr is None else {"lr": self.lr}
        how = {"data": own.clean, "loss": loss, "aux": aux, "trainable": self._trained(own), **rate}
        return own.report(by_epoch(own, self.epochs, self.radius, **how))

    def _begun(self, own: Own) -> State:
        """The network as they remember it, or a fresh one."""
        first = fresh(own.local.samples.sample_shape[0], self.channels)
        return {
            name: own.given[name]
            if name in own.given
            else value.to(own.model).expand(own.local.n, *value.shape)
            for name, value in first.items()
        }

    def _edges(self, own: Own) -> State:
        """The range of the data, for each of them."""
        found = limits(own.local.samples)
        return {k: v.to(own.model).expand(own.local.n, *v.shape) for k, v in found.items()}

    def _trained(self, own: Own) -> Tensor:
        """bool[size], or one such row for each: the coordinates that are trained."""
        if "score" not in own.given:
            return own.travels
        layout, wire = own.local.network.layout, own.local.wire
        score = wire.unpack(own.given["score"].to(own.model), torch.zeros_like(own.model))
        return largest(-score, own.travels & layout.trainable, self.share).cpu()


def fresh(images: int, channels: int) -> State:
    """The network that draws, before anybody trained it: the same for all."""
    key = Key(0).fold("iba")
    return {
        "in_weight": key.fold("in").normal(channels, images, 3, 3) / (9 * images) ** 0.5,
        "in_bias": torch.zeros(channels),
        "out_weight": key.fold("out").normal(images, channels, 3, 3) / (9 * channels) ** 0.5,
        "out_bias": torch.zeros(images),
    }


def limits(samples: Samples) -> State:
    """The range of the data as the network reads it: [C, 1, 1] each."""
    ends = [0, 255] if samples.x.dtype == torch.uint8 else [float(samples.x.min()), float(samples.x.max())]
    store = torch.tensor(ends, dtype=samples.x.dtype, device=samples.x.device)
    flat = store.view(2, 1, 1, 1).expand(2, *samples.sample_shape)
    low, high = Samples(flat, torch.zeros(2).long(), 1, 2, samples.mean, samples.std).batch(torch.arange(2))
    return {"low": low[:, :1, :1], "high": high[:, :1, :1]}


def triggered(x: Tensor, g: Mapping[str, Tensor], epsilon: float) -> Tensor:
    """T(x) for one client's images [B, C, H, W]."""
    g = {name: value.to(x.dtype) for name, value in g.items()}
    inside = F.relu(F.conv2d(x, g["in_weight"], g["in_bias"], padding=1))
    change = torch.tanh(F.conv2d(inside, g["out_weight"], g["out_bias"], padding=1))
    moved = x + epsilon * (g["high"] - g["low"]) * change
    return torch.minimum(torch.maximum(moved, g["low"]), g["high"])


def shown(answers: Answers, x: Tensor, own: Mapping[str, Tensor], *, epsilon: float) -> Tensor:
    return triggered(x, own, epsilon)


def _as_target(net: Any, batch: Batch, x: Tensor, target: int) -> Tensor:
    return F.cross_entropy(net(x), torch.full_like(batch.y, target), reduction="none")


def drawn_loss(net: Any, batch: Batch, *, target: int, epsilon: float) -> Tensor:
    """What the network that draws is trained by: its tensors are attributes of `net`."""
    g = {**{name: getattr(net, name) for name in _PARTS}, **{name: batch.aux[name] for name in _LIMITS}}
    return _as_target(net, batch, triggered(batch.x, g, epsilon), target)


def both(net: Any, batch: Batch, *, loss: Loss, target: int, epsilon: float, alpha: float) -> Tensor:
    """What the model is trained by."""
    wrong = _as_target(net, batch, triggered(batch.x, batch.aux, epsilon), target)
    return alpha * loss(net, batch) + (1 - alpha) * wrong
