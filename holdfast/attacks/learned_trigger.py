"""Triggers whose values attackers learn together, from round to round: where a trigger is says a part of the
registry (a patch, some steps of a window, a column), what stands there the attackers train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import InstanceOf, field_validator
from torch import Tensor
from torch.func import functional_call

from holdfast.attacks.base import Knowledge
from holdfast.attacks.moving_trigger import Answers, MovingTrigger
from holdfast.attacks.own_training import Ask, Crew, Leading, Own, OwnTraining
from holdfast.attacks.planting import check_class, chosen_stamp
from holdfast.attacks.triggers.base import Stamp, changed, kind_of
from holdfast.core.errors import ConfigError
from holdfast.core.registry import build, setting
from holdfast.data.federation import Samples
from holdfast.local.losses import Batch

Tensors = Mapping[str, Tensor]


class Learning(OwnTraining):
    """Base class of attacks that train a trigger on the models that they are sent, then the model on batches
    of which a share carries it. All attackers share the trigger: each trains it on its own data, and the mean
    of what they found is the trigger of the round. They remember its values, so it costs a few samples of
    memory. A network with BatchNorm is in training mode while it is trained, and keeps its statistics."""

    least: ClassVar[Knowledge] = "colluders"
    names: ClassVar[tuple[str, ...]] = ()
    """Of the trigger's tensors."""
    knows: Knowledge = setting("colluders", "what the attackers see: colluders, everyone, defence")
    target: int = setting(1, "the class that the trigger stands for", ge=0)
    ratio: float = setting(
        0.25, "share of each of an attacker's batches that carries the trigger", ge=0, le=1
    )
    inclusive: bool = setting(False, "count samples of the target class in attack/asr")

    def tensors(self, samples: Samples) -> dict[str, Tensor]:
        """The trigger's tensors before any attacker has trained them."""
        raise TypeError(f"{type(self).__name__} does not define its trigger")

    def stamp(self) -> Callable[[Answers, Tensor, Tensors], Tensor]:
        """How it is put into samples, as `MovingTrigger.stamp`."""
        raise TypeError(f"{type(self).__name__} does not define its trigger")

    def searched(self, crew: Crew, trigger: Tensors) -> Leading:
        """Train the trigger, by asking the attackers. Returns its tensors, in one row."""
        raise TypeError(f"{type(self).__name__} does not define how it trains its trigger")

    def mixed(self) -> Callable[[Any, Batch], Tensor]:
        """The loss by which the attackers train their model."""
        raise TypeError(f"{type(self).__name__} does not define how it trains its model")

    def moving(self, samples: Samples) -> MovingTrigger:
        check_class(self.target, "target", samples)
        if samples.words:
            raise ConfigError(
                f"attack '{self.name}' trains the numbers of a trigger, but {samples.name} is text; use"
                " backdoor"
            )
        return MovingTrigger(self.stamp(), self.tensors(samples), self.target, self.inclusive)

    def lead(self, crew: Crew) -> Leading:
        trigger = {name: crew.recall(name) for name in self.names}
        if any(value is None for value in trigger.values()):
            begun = yield Ask("begin")
            trigger = {name: begun[name][0] for name in self.names}
        found = yield from self.searched(crew, {k: v for k, v in trigger.items() if v is not None})
        for name in self.names:
            crew.remember(name, found[name][0])
        return (yield Ask("poisoned", {name: found[name][0] for name in self.names}))

    def begin(self, own: Own) -> Tensors:
        return {
            name: value.to(own.model).expand(own.local.n, *value.shape)
            for name, value in self.tensors(own.local.samples).items()
        }

    def poisoned(self, own: Own) -> Tensors:
        fitted = own.fit(data=own.clean, loss=self.mixed(), aux=dict(own.given))
        return own.report(fitted.model)


class LearningValues(Learning):
    """One whose trigger has values of its own at some places of a sample."""

    names: ClassVar[tuple[str, ...]] = ("values", "places", "low", "high")
    trigger: str | dict[str, Any] | InstanceOf[Stamp] | None = setting(
        None,
        "where the trigger is, and how it begins: `holdfast list triggers`; none: by the kind of the data",
    )

    @field_validator("trigger")
    @classmethod
    def _known(cls, trigger: Any) -> Any:
        if trigger is not None:
            build("trigger", trigger, "attack.trigger")
        return trigger

    def usual(self, samples: Samples) -> Stamp | None:
        """The trigger for such data where none is chosen; none: as in `backdoor`."""
        return None

    def tensors(self, samples: Samples) -> dict[str, Tensor]:
        given = self.usual(samples) if self.trigger is None else self.trigger
        stamp = chosen_stamp(self.name, given, samples).on(samples)
        places = changed(stamp, samples).expand(samples.sample_shape)
        blank = torch.zeros(1, *samples.sample_shape, dtype=samples.x.dtype)
        low, high = bounds(samples)
        values = as_read(samples, stamp(blank)[0])
        return {"values": values.clamp(low, high), "places": places.double(), "low": low, "high": high}

    def stamp(self) -> Callable[[Answers, Tensor, Tensors], Tensor]:
        return shown


def shown(answers: Answers, x: Tensor, own: Tensors) -> Tensor:
    """Samples [B, ...] with the values at their places."""
    return torch.where(own["places"] > 0.5, own["values"].to(x.dtype), x)


def patched(batch: Batch, values: Tensor) -> Tensor:
    return torch.where(batch.aux["places"] > 0.5, values.to(batch.x.dtype), batch.x)


def first_ones(batch: Batch, ratio: float) -> Tensor:
    """bool[B]: the first samples of a batch, a share of its real ones; batches are drawn at random."""
    count = (ratio * batch.mask.sum() + 0.5).floor()
    return torch.arange(len(batch.mask), device=batch.mask.device) < count


def in_part(batch: Batch, stamped: Tensor, target: int, ratio: float) -> tuple[Tensor, Tensor]:
    """A batch of which a share is replaced by stamped samples with the target's label."""
    mine = first_ones(batch, ratio)
    x = torch.where(mine.view(-1, *[1] * (batch.x.dim() - 1)), stamped, batch.x)
    return x, torch.where(mine, torch.full_like(batch.y, target), batch.y)


def on_values(net: Any, batch: Batch, *, target: int, ratio: float) -> Tensor:
    """Cross-entropy on a batch of which a share carries the values and the target's label."""
    x, y = in_part(batch, patched(batch, batch.aux["values"]), target, ratio)
    return F.cross_entropy(net(x), y, reduction="none")


def to_target(net: Any, x: Tensor, target: int) -> Tensor:
    """Cross-entropy of each sample with the target."""
    out = net(x)
    return F.cross_entropy(out, torch.full_like(out[:, 0], target, dtype=torch.int64), reduction="none")


def as_read(samples: Samples, x: Tensor) -> Tensor:
    """One stored sample as a network reads it, in float64."""
    shift, scale = _normalisation(samples)
    return (x.double() - shift) / scale


def bounds(samples: Samples) -> tuple[Tensor, Tensor]:
    """The least and the largest values of a sample, as a network reads them: black and white, or those that
    the dataset has in each channel."""
    shape = samples.sample_shape
    if samples.x.dtype == torch.uint8:
        low, high = torch.zeros(shape).double(), torch.full(shape, 255.0).double()
    else:
        others = [axis for axis in range(samples.x.dim()) if axis != 1]
        spread = [-1, *[1] * (len(shape) - 1)]
        low, high = (
            found(samples.x, others).double().cpu().view(spread).expand(shape)
            for found in (torch.amin, torch.amax)
        )
    return as_read(samples, low), as_read(samples, high)


def _normalisation(samples: Samples) -> tuple[Tensor, Tensor]:
    unit = 255.0 if samples.x.dtype == torch.uint8 else 1.0
    spread = [-1, *[1] * (len(samples.sample_shape) - 1)]
    mean, std = (torch.tensor(each).double().view(spread) * unit for each in (samples.mean, samples.std))
    return mean, std


def grey(samples: Samples, size: int, share: float, place: str) -> Stamp | None:
    """A grey patch for images, at most a share of their side; none for other data."""
    if kind_of(samples) != "image":
        return None
    size = min(size, max(1, int(share * min(samples.sample_shape[1:]))))
    return build("trigger", {"name": "patch", "size": size, "place": place, "colour": (0.5,)})


def unmoved(net: Any, parameters: Tensors | None = None) -> Answers:
    """The answers of a network, with other parameters where some are given, whose running statistics they
    leave as they are: so gradients may be taken through them inside a step."""

    def answers(x: Tensor) -> Tensor:
        held = {name: value.clone() for name, value in net.named_buffers()}
        out: Tensor = functional_call(net, {**held, **(parameters or {})}, (x,))
        return out

    return answers
