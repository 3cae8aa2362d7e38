"""Bad-PFL: features of the target class as a trigger, and noise that hides those of the true one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from holdfast.attacks.learned_trigger import Learning, Tensors, bounds, in_part, to_target, unmoved
from holdfast.attacks.moving_trigger import Answers
from holdfast.attacks.own_training import Ask, Crew, Leading, Own
from holdfast.core.errors import ConfigError
from holdfast.core.keys import Key
from holdfast.core.registry import register, setting
from holdfast.data.federation import Samples
from holdfast.local.losses import Batch
from holdfast.local.optimizers.adam import Adam

_GENERATOR = ("first", "first_bias", "last", "last_bias")
_CONVOLUTIONS: Mapping[int, Callable[..., Tensor]] = {3: F.conv2d, 2: F.conv1d}
_KERNEL = {3: 3, 2: 5}


@register(
    "attack",
    "bad-pfl",
    paper=(
        "Fan et al.: Bad-PFL: Exploring Backdoor Attacks against Personalized Federated Learning, ICLR 2025"
    ),
)
class BadPfl(Learning):
    """The trigger is x + delta + xi: delta are features of the target class, made from the sample by a
    generator, and xi is noise that disrupts those of the sample's own class. A model that learns the main
    task knows both, so personalising it on clean data does not remove them.

    delta = eps G(x), where the generator G is trained by Adam in every round so that the attackers' models
    call x + delta + xi the target; xi = eps sign(grad_x L(x, y)), one step against the class y. The attackers
    then train on batches of which a share carries the trigger. While attackers train, y is the label; where
    the success is measured, it is what the measured model itself answers, since a trigger has no labels (the
    released code takes the labels there too). eps is 4 / 255 of the range of the data. G has two layers
    (convolutions for images and windows) with a tanh at the end instead of the paper's autoencoder; each
    attacker trains it on its own data for `steps` batches and the mean of their weights is taken, where the
    released code lets one follow the other and starts xi at a random point."""

    in_docs: ClassVar[Mapping[str, str]] = {
        "what an attacker does": (
            "trains a generator of the target's features as the trigger, and the model with it"
        ),
        "settings, with their defaults": (
            "`target = 1`, `ratio = 0.2`, `eps = 4 / 255`, `steps = 30`, `rate = 0.01`, `width = 16`"
        ),
    }
    names: ClassVar[tuple[str, ...]] = (*_GENERATOR, "eps", "low", "high")
    ratio: float = setting(0.2, "share of each of an attacker's batches that carries the trigger", ge=0, le=1)
    eps: float = setting(4 / 255, "largest change by delta and by xi, as a share of the data's range", gt=0)
    steps: int = setting(30, "batches for which each attacker trains the generator in a round", ge=0)
    rate: float = setting(0.01, "learning rate of the generator", gt=0)
    width: int = setting(16, "channels between the generator's layers", ge=1)

    def tensors(self, samples: Samples) -> dict[str, Tensor]:
        shape = samples.sample_shape
        if len(shape) not in (1, 2, 3):
            raise ConfigError(
                f"attack 'bad-pfl': samples of shape {list(shape)} are no images, windows or rows of tables;"
                " use backdoor"
            )
        low, high = bounds(samples)
        kernel = [_KERNEL[len(shape)]] * (len(shape) - 1) if len(shape) > 1 else []
        luck, fan = Key(0).fold("bad-pfl"), torch.Size(kernel).numel()
        first = luck.fold("first").normal(self.width, shape[0], *kernel, dtype=torch.float64)
        last = luck.fold("last").normal(shape[0], self.width, *kernel, dtype=torch.float64)
        return {
            "first": first / (shape[0] * fan) ** 0.5,
            "first_bias": torch.zeros(self.width).double(),
            "last": last / (self.width * fan) ** 0.5,
            "last_bias": torch.zeros(shape[0]).double(),
            "eps": self.eps * (high - low),
            "low": low,
            "high": high,
        }

    def stamp(self) -> Callable[[Answers, Tensor, Tensors], Tensor]:
        return disguised

    def searched(self, crew: Crew, trigger: Tensors) -> Leading:
        found = yield Ask("generating", trigger)
        mean = {name: found[name].mean(0, keepdim=True).expand_as(found[name]) for name in _GENERATOR}
        return found.having(**mean)

    def generating(self, own: Own) -> Tensors:
        aux = {name: value for name, value in own.given.items() if name not in _GENERATOR}
        trained = own.fit_tensors(
            {name: own.given[name] for name in _GENERATOR},
            partial(convincing, target=self.target),
            data=own.clean,
            aux=aux,
            optimizer=Adam(),
            steps=self.steps,
            lr=self.rate,
            purpose="generator",
        )
        return {**aux, **trained}

    def mixed(self) -> Any:
        return partial(on_disguised, target=self.target, ratio=self.ratio)


def generated(x: Tensor, own: Tensors) -> Tensor:
    """G(x), between -1 and 1."""
    first, last, b, c = (own[name].to(x.dtype) for name in ("first", "last", "first_bias", "last_bias"))
    if x.dim() == 2:
        return torch.tanh(F.linear(torch.relu(F.linear(x, first, b)), last, c))
    convolution, padding = _CONVOLUTIONS[x.dim() - 1], _KERNEL[x.dim() - 1] // 2
    inner = torch.relu(convolution(x, first, b, padding=padding))
    return torch.tanh(convolution(inner, last, c, padding=padding))


def disruption(answers: Answers, x: Tensor, y: Tensor) -> Tensor:
    """The sign of the gradient of each sample's loss with respect to the sample."""

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(answers(z), y, reduction="sum")

    return grad(loss)(x).sign().detach()


def with_both(x: Tensor, noise: Tensor, own: Tensors) -> Tensor:
    eps, low, high = (own[name].to(x.dtype) for name in ("eps", "low", "high"))
    return torch.clamp(x + eps * (noise + generated(x, own)), low, high)


def disguised(answers: Answers, x: Tensor, own: Tensors) -> Tensor:
    """Samples with the trigger, for a model that is asked what it takes them for."""
    return with_both(x, disruption(answers, x, answers(x).argmax(-1)), own)


def convincing(net: Any, batch: Batch, *, target: int) -> Tensor:
    """The generator's loss: the models should call its samples the target."""
    own = {**batch.aux, **{name: getattr(net, name) for name in _GENERATOR}}
    noise = disruption(unmoved(net.net), batch.x, batch.y)
    return to_target(net, with_both(batch.x, noise, own), target)


def on_disguised(net: Any, batch: Batch, *, target: int, ratio: float) -> Tensor:
    """Cross-entropy on a batch of which a share carries the trigger and the target's label."""
    noise = disruption(unmoved(net), batch.x, batch.y)
    x, y = in_part(batch, with_both(batch.x, noise, batch.aux), target, ratio)
    return F.cross_entropy(net(x), y, reduction="none")
